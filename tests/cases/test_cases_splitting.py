"""Cases about what a graph is cut at: several results, first and last, neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch

import demo
from piecework import counters
from ways import Way, check, same


def test_c01_splitting_op_with_several_outputs(way: Way) -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = demo.pair(x * 2)
        return demo.scale3(a) + 1, b

    def second(x: torch.Tensor) -> torch.Tensor:
        _, b = demo.pair(x)
        return b

    # The two ops are neighbours, so that they share a step.
    with counters.expect(num_pieces_seen=3 * (way.level == 3), num_capturable_pieces_seen=2 * (way.level == 3)):
        same(way, both, lambda n: (way.rand(n, 6),), [4, 2, 4])
    with counters.expect(num_pieces_seen=1 * (way.level == 3), num_capturable_pieces_seen=0):
        same(way, second, lambda n: (way.rand(n, 6),), [4])


def test_c01_nothing_of_an_op_is_used(way: Way) -> None:
    def unused(x: torch.Tensor) -> torch.Tensor:
        demo.pair(x * 2)
        return x + 1

    same(way, unused, lambda n: (way.rand(n, 6),), [4, 2, 4])


def test_c02_splitting_op_first_last_and_only(way: Way) -> None:
    def last(x: torch.Tensor) -> torch.Tensor:
        out, y = torch.empty_like(x), x * 2
        demo.attn(y, y, out)
        return out

    def first(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        demo.attn(x, x, out)
        return out + 1

    def only(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        demo.attn(x, x, out)
        return out

    is_cut = way.level == 3
    for model, num_args, num_pieces in ((last, 1, 1), (first, 2, 1), (only, 2, 0)):
        with counters.expect(num_capturable_pieces_seen=num_pieces * is_cut):
            call = same(way, model, lambda n, k=num_args: tuple(way.rand(n, 6) for _ in range(k)), [4, 3])
    x, out = way.rand(4, 6), way.rand(4, 6)
    assert check(call, only, x, out) is out


def _update_then_attend(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    token = demo.update(x, cache)
    out = torch.empty_like(x)
    demo.attn_tok(x, cache[: x.shape[0]], out, token)
    return out


def _rows_and_cache(way: Way) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda n: (way.rand(n, 6), torch.zeros(16, 6, device=way.device))


def test_c03_neighbouring_splitting_ops_share_a_step(way: Way) -> None:
    def four_layers(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = _update_then_attend(x, cache) * 0.5
        return x

    is_cut, sizes = way.level == 3, [4, 8]
    num_captures = 4 * len(sizes) * way.is_captured
    with counters.expect(
        num_pieces_seen=8 * is_cut,
        num_capturable_pieces_seen=4 * is_cut,
        num_unique_pieces=is_cut,
        num_piece_compilations=is_cut and way.pieces == "inductor",
        num_graph_captures=num_captures,
        num_graph_replays=num_captures,
    ):
        same(way, four_layers, _rows_and_cache(way), sizes, dims={"x": 0})


def test_c03_no_kernel_between_layers(way: Way) -> None:
    def attends_thrice(x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x * 2
        for _ in range(3):
            x = _update_then_attend(x, cache)
        return x, cache[:2]

    is_cut, sizes = way.level == 3, [4, 8, 4]
    # A cache at another address, as each call has one here, is a capture of its own.
    num_captures = len(sizes) * way.is_captured
    with counters.expect(
        num_pieces_seen=2 * is_cut, num_capturable_pieces_seen=is_cut, num_graph_captures=num_captures
    ):
        same(way, attends_thrice, _rows_and_cache(way), sizes, dims={"x": 0})


def test_c03_a_neighbour_reads_a_view_of_what_the_one_before_returned(way: Way) -> None:
    def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = demo.pair(x + 1)
        c = demo.scale3(a[:, 1:].t())
        out = torch.empty_like(b)
        demo.attn(b, c.t().new_empty(b.shape).copy_(b), out)
        return demo.scale3(out[:, :2]), c

    same(way, neighbours, lambda n: (way.rand(n, 6),), [4, 2, 4])
