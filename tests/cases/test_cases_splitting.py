"""Cases about what a graph is cut at: several results, first and last, neighbours."""

from __future__ import annotations

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
