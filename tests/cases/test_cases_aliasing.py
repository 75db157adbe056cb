"""Cases about memory: results of ops, views of one base, results that are kept, and writes that must happen once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import demo
import piecework
from piecework import counters
from ways import IS_TORCH_2_11, Way, check, close, same, slices_of_unknown_length

# --- C11: an op returns a new tensor ------------------------------------------------------------


def _fresh_between(x: torch.Tensor) -> torch.Tensor:
    return demo.scale3(x + 1) * 2 - x


def _fresh_twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = demo.pair(x * 2)
    c = demo.scale3(b.t())  # an op reads what another one gave, past no piece
    y = demo.scale3(a + 1)
    return y.relu() + b, c.t() * 2, y


def _with_moving_memory(way: Way, model: Callable[..., Any], sizes: tuple[int, ...]) -> None:
    call = way.compile(model, captures=[4])
    keep: list[torch.Tensor] = []
    before = counters.num_graph_replays
    for i in range(20):
        keep.append(torch.empty(1 + 997 * i, device=way.device))
        check(call, model, way.rand(sizes[i % len(sizes)], 6))
        if i % 3 == 0:
            keep.clear()
    assert (counters.num_graph_replays - before >= 40) is way.is_captured


def test_c11_fresh_result_of_an_op_between_captured_pieces(way: Way) -> None:
    _with_moving_memory(way, _fresh_between, (4,))


def test_c11_fresh_results_read_by_ops_and_pieces_further_on(eager_way: Way) -> None:
    # Who owns memory between and after pieces is asked here, whatever runs in them.
    _with_moving_memory(eager_way, _fresh_twice, (4,))


def test_c11_fresh_results_in_padded_calls(eager_way: Way) -> None:
    # Who owns memory between and after pieces is asked here, whatever runs in them.
    _with_moving_memory(eager_way, _fresh_between, (3, 4, 2))


# --- C12: ops that write to views of one base ---------------------------------------------------


def _writes_to_views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.zeros(4, 8, device=x.device)
    demo.attn(x, x, base[:, 1:7])
    flat = torch.zeros(24, device=x.device)
    demo.attn(x, x, flat.view(4, 6))
    demo.attn(x[:2], x[2:], base[:2, :6])
    return base * 2, flat + 1


def _writes_to_strange_views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    base = torch.zeros(6, 2 * x.shape[0], device=x.device)
    demo.attn(x, x, base.t()[::2])
    left, right = base.chunk(2, 1)
    shifted = left.add_(1)  # in place, and its result is used on
    demo.attn(shifted.t(), x, right.t())
    row = base.select(0, 1).unsqueeze(0)
    demo.attn(row, row, row)
    return base + 0, shifted * 2, row.clone()


class WritesToSlices(nn.Module):
    """Its op writes to slices of a buffer and of an argument."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(8, 6))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        demo.attn(x, x, self.kept[1 : x.shape[0] + 1])
        demo.attn(self.kept[: x.shape[0]], x, state[:, 1:7])
        self.kept[2:4].mul_(2)
        return state[:, ::2] + self.kept.sum()


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "inside a piece"])
def test_c12_ops_write_to_views_of_one_base(way: Way, is_cut: bool) -> None:
    ops = demo.OPS if is_cut else ()
    is_refused = way.level == 3 and is_cut
    # Torch 2.11 reads the length of a slice where it is taken, between two pieces.
    num_pieces = (4 if IS_TORCH_2_11 else 3) if is_cut else 1
    num_seen = num_pieces * (way.level == 3)
    with counters.expect(num_capturable_pieces_seen=num_seen), slices_of_unknown_length(way if is_refused else None):
        same(way, _writes_to_views, lambda _: (way.rand(4, 6),), [4, 4], splitting_ops=ops)


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "inside a piece"])
def test_c12_ops_write_to_transposed_strided_and_selected_views(way: Way, is_cut: bool) -> None:
    ops = demo.OPS if is_cut else ()
    same(way, _writes_to_strange_views, lambda n: (way.rand(n, 6),), [4, 3, 4], splitting_ops=ops)


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "inside a piece"])
def test_c12_ops_write_to_slices_of_a_buffer_and_of_an_argument(way: Way, is_cut: bool) -> None:
    ops = demo.OPS if is_cut else ()
    model = WritesToSlices().to(way.device)
    with slices_of_unknown_length(None if way.level == 3 and is_cut else way):
        same(way, model, lambda n: (way.rand(n, 6), way.rand(n, 8)), [4, 3, 4], splitting_ops=ops)


# --- C15: results that are kept, or fed back ----------------------------------------------------


def _step(x: torch.Tensor) -> torch.Tensor:
    return demo.scale3(x.tanh()) * 0.3 + x


def _keep_and_feed_back(way: Way, **settings: Any) -> None:
    call = way.compile(_step, captures=[2, 4], **settings)
    if not settings.get("static_outputs"):
        kept = [(x, call(x)) for x in (way.rand(n, 6) for n in (4, 4, 2, 4, 3, 4, 2, 1, 4, 3))]
        for x, y in kept:
            close(y, _step(x))
    z = way.rand(4, 6)
    w = z.clone()
    for _ in range(5):
        z, w = call(z), _step(w)
    close(z, w)
    large = call(way.rand(4, 6))
    part = large[1:3].clone()
    close(call(large[1:3]), _step(part))


def test_c15_results_are_kept_and_fed_back(way: Way) -> None:
    with counters.expect(num_graph_captures=4 * way.is_captured):
        _keep_and_feed_back(way)


def test_c15_static_outputs_are_fed_back(eager_way: Way) -> None:
    # Who owns memory between and after pieces is asked here, whatever runs in them.
    _keep_and_feed_back(eager_way, static_outputs=True)


def test_c15_results_in_containers_are_kept_and_changed_by_the_caller(eager_way: Way) -> None:
    # Who owns memory between and after pieces is asked here, whatever runs in them.
    def nested(x: torch.Tensor, state: torch.Tensor) -> dict[str, Any]:
        y = demo.scale3(x + state)
        return {"y": y, "more": [y[:, :2], (y * 2,)], "x": x}

    call = eager_way.compile(nested, captures=[4])
    kept, state, expected_state = [], eager_way.rand(4, 6), None
    expected_state = state.clone()
    for _ in range(4):
        x = eager_way.rand(4, 6)
        result, expected = call(x, state), nested(x, expected_state)
        assert result["x"] is x
        kept.append((result, expected))
        state, expected_state = result["more"][1][0], expected["more"][1][0]
        for one in (result, expected):
            one["y"].add_(1)  # the view beside it sees that, as in eager
    for result, expected in kept:
        close(result, expected)


def test_c15_result_of_one_model_is_the_input_of_another(eager_way: Way) -> None:
    # Who owns memory between and after pieces is asked here, whatever runs in them.
    first, second = eager_way.compile(_step, captures=[4]), eager_way.compile(_fresh_between, captures=[4])
    z = eager_way.rand(4, 6)
    w = z.clone()
    for _ in range(3):
        z, w = second(first(z)), _fresh_between(_step(w))
        z = z[torch.arange(4, device=eager_way.device)]
    close(z, w)


# --- C17: writes happen once --------------------------------------------------------------------


class Counts(nn.Module):
    """A call counter, and a cache that rows are written to."""

    n: torch.Tensor
    c: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("c", torch.zeros(32, 6))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        self.n.add_(1)
        self.c.index_copy_(0, pos, x * 2)
        return demo.scale3(x) + self.n + self.c.sum()


class Averages(nn.Module):
    """Running statistics of a norm in training, a running mean, and a cache that a splitting op writes to."""

    mean: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("cache", torch.zeros(8, 6))

    def forward(self, x: torch.Tensor, num_seen: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        token = demo.update(y, self.cache)
        num_seen += 1
        return demo.scale3(y) + self.mean + self.cache.sum() + token.numel()


def _rows_and_positions(way: Way) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda n: (way.rand(n, 6), torch.randperm(32)[:n].to(way.device))


def test_c17_writes_happen_once_per_call(way: Way) -> None:
    sizes = (4, 2, 4, 3, 1, 4)
    # 3 and 1 rows are not padded: the cache would get stray rows.
    with counters.expect(num_graph_replays=2 * 4 * way.is_captured, num_graph_captures=2 * 2 * way.is_captured):
        same(way, Counts().to(way.device), _rows_and_positions(way), sizes, captures=[2, 4])


def test_c17_running_statistics_and_writing_ops_happen_once_per_call(way: Way) -> None:
    def make_args(n: int) -> tuple[torch.Tensor, ...]:
        return way.rand(n, 6), torch.zeros((), device=way.device)

    same(way, Averages().to(way.device), make_args, (4, 2, 4, 3, 4), captures=[2, 4], dims={"x": 0})


def test_c17_capturing_alone_writes_nothing(way: Way) -> None:
    model = Counts().to(way.device)
    twin = Counts().to(way.device)
    make_args = _rows_and_positions(way)
    call = way.compile(model, captures=[2, 4], compile_sizes=(2,))
    if way.is_captured:
        piecework.capture(call, [2, 4], make_args(4))
    close(model.state_dict(), twin.state_dict())
    for n in (2, 4, 2):
        args = make_args(n)
        close(call(*args), twin(*args))
        close(model.state_dict(), twin.state_dict())
    piecework.release(call)
    args = make_args(2)
    close(call(*args), twin(*args))
    close(model.state_dict(), twin.state_dict())


# --- C18: a tensor and its view cross a cut -----------------------------------------------------


def _base_changes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    v = y[1:]
    out = torch.empty_like(v)
    demo.attn(v, v, out)
    y.add_(1)
    return out + v, y


def _view_changes(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    v = y[1:]
    z = demo.scale3(v)
    v.add_(z)
    return y


def _views_cross_two_cuts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 0.25
    v = y[:, 1:]
    w = v.t()[::2]
    z = demo.scale3(w)
    w.mul_(z)
    a, b = y.unbind(1)[:2]
    z = demo.scale3(z + 1)
    y.sub_(z.amax())
    bits = y.view(torch.int32)
    return a + b, v, w * 2, bits[:, 0].sign(), z


def _base_and_views_are_returned(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    v = y[:, 1:]
    z = demo.scale3(v)
    return v, y, z, z[:1], x[:, :2], z.view(z.shape)


def test_c18_tensor_and_its_view_cross_a_cut(way: Way) -> None:
    for model in (_base_changes, _view_changes):
        same(way, model, lambda n: (way.rand(n, 6),), [4, 4])


def test_c18_views_of_views_cross_two_cuts(way: Way) -> None:
    same(way, _views_cross_two_cuts, lambda n: (way.rand(n, 6),), [4, 3, 4])


def test_c18_views_that_are_returned_share_memory_as_in_eager(eager_way: Way) -> None:
    # Who owns memory between and after pieces is asked here, whatever runs in them.
    call = eager_way.compile(_base_and_views_are_returned, captures=[4])
    for n in (4, 3, 4):
        x = eager_way.rand(n, 6)
        x_after = x.clone()
        result, expected = call(x), _base_and_views_are_returned(x_after)
        assert result[5] is not result[2]
        for one in (result, expected):
            one[1].add_(1)
            one[3].mul_(2)
            one[4].zero_()
        close((result, x), (expected, x_after))
