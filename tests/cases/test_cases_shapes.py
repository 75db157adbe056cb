"""Cases about sizes and layouts: sizes across cuts, one row and none, pinned dims, strides, what compilers see."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import demo
import piecework
from piecework import (
    CaptureError,
    CompiledPiece,
    CompileError,
    GradientNotSupported,
    Piece,
    PieceworkError,
    PieceworkWarning,
    TraceDepartureError,
    counters,
    hookimpl,
    testing,
)
from piecework.pieces import InputKind
from ways import Way, check, close, same

# --- C19: sizes across cuts ---------------------------------------------------------------------


def _size_is_used_after_a_cut(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    s = x.size()
    y = demo.scale3(x * 2)
    return y.view(s) + 1, y.new_zeros(s[0]), y.reshape(s[0] * s[1])


def _size_is_unpacked(x: torch.Tensor) -> torch.Tensor:
    b, d = x.shape
    y = demo.scale3(x)
    y = demo.scale3(y.view(d, b))
    return y.expand(2, d, b)[0]


def _numbers_follow_from_sizes(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    rows, tail, total = x.shape[0], x.shape[1:], x.numel() + y.shape[0]
    z = demo.scale3(x + 1)
    z = demo.scale3(torch.cat([z, y[:, :6]]) * rows)
    half = (rows + 1) // 2
    return z[:rows].reshape(-1, *tail) + total, z[half:], z.new_full((half, y.size(0)), total / rows)


def _sizes_of_results(x: torch.Tensor) -> tuple[Any, ...]:
    y = demo.scale3(x[1:])  # its own size is neither that of an argument
    shape = y.shape
    z = torch.empty(shape[0] + 1, shape[1], device=x.device)
    demo.attn(z.new_ones(shape[0] + 1, shape[1]), x, z)
    return z, x.size(), shape, {"n": shape[0], "of": (x.shape[0], x.size(1))}, y.sum() * shape[0]


def test_c19_size_is_taken_in_one_piece_and_used_in_another(way: Way) -> None:
    for model in (_size_is_used_after_a_cut, _size_is_unpacked):
        with counters.expect(num_graphs_seen=1):
            same(way, model, lambda n: (way.rand(n, 6),), [4, 7, 5])


def test_c19_numbers_that_follow_from_two_sizes_cross_two_cuts(eager_way: Way) -> None:
    # Where a number is made anew is asked here, whatever runs in the pieces.
    with counters.expect(num_graphs_seen=1):
        call = eager_way.compile(
            _numbers_follow_from_sizes,
            dims={"x": {0: "n"}, "y": {0: "m"}},
            captures=[{"n": 4, "m": 3}, {"n": 7, "m": 7}],
        )
        for n, m in ((4, 3), (7, 7), (5, 2), (3, 4), (4, 3)):
            check(call, _numbers_follow_from_sizes, torch.randn(n, 6), torch.randn(m, 8))


def test_c19_sizes_of_results_are_returned(eager_way: Way) -> None:
    # As above; sizes in the result are the caller's, whatever a call was padded to.
    with counters.expect(num_graphs_seen=1):
        same(eager_way, _sizes_of_results, lambda n: (torch.randn(n, 6),), [4, 7, 5, 2], captures=[4, 7])


# --- C21: one row, and none ---------------------------------------------------------------------

ORDERS = [[1, 5, 9], [5, 1, 0, 3], [0, 4, 1]]


def _attends(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    out = torch.empty_like(y)
    demo.attn(y, y + 1, out)
    return out.tanh() + x


def _in_order(way: Way, model: Any, order: Sequence[int], captures: Sequence[int]) -> None:
    """Call once per size; one graph, whatever the order, and nothing for calls without rows."""
    call = way.compile(model, captures=captures)
    with counters.expect(num_graphs_seen=1):
        for n in order:
            before = counters.num_graph_replays, counters.num_piece_compilations, counters.num_graph_captures
            assert check(call, model, way.rand(n, 6)).shape == (n, 6)
            after = counters.num_graph_replays, counters.num_piece_compilations, counters.num_graph_captures
            assert n or before == after
    before = counters.num_graph_replays
    check(call, model, way.rand(1, 6))
    assert (counters.num_graph_replays - before > 0) is (way.is_captured and 1 in captures)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_c21_first_call_with_one_row_later_with_none(way: Way, order: list[int]) -> None:
    _in_order(way, _attends, order, [1, 4, 8])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_c21_one_row_where_it_is_not_captured(eager_way: Way, order: list[int]) -> None:
    # Which sizes are captured is asked here, whatever runs in the pieces.
    _in_order(eager_way, _attends, order, [4, 8])


class _Remembers(nn.Module):
    """Writes rows to a buffer, counts calls, and sums over rows."""

    calls: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(16, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.calls.add_(1)
        demo.update(x, self.seen)
        return demo.scale3(x) + self.seen.sum() + self.calls, x.sum(0), x.mean(1, keepdim=True)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_c21_buffers_and_reductions_of_one_row_and_none(eager_way: Way, order: list[int]) -> None:
    # What a call without rows leaves behind is asked here, whatever runs in the pieces.
    same(eager_way, _Remembers(), lambda n: (torch.randn(n, 6),), [*order, *order], captures=[1, 4])


@pytest.mark.parametrize("order", [[1, 5], [5, 1, 1], [1, 1, 4]], ids=str)
def test_c21_op_that_treats_one_row_in_its_own_way(eager_way: Way, order: list[int]) -> None:
    # What a trace holds for is asked here, whatever runs in the pieces.
    def model(x: torch.Tensor) -> torch.Tensor:
        return demo.scale3(x * 2).squeeze(0) + 1

    refusing, falling_back = (eager_way.compile(model, captures=[1, 5], on_failure=kind) for kind in ("error", "eager"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PieceworkWarning)
        for n in order:
            x = torch.randn(n, 6)
            check(falling_back, model, x)
            if n > 1:
                check(refusing, model, x)
            else:
                with pytest.raises(
                    TraceDepartureError, match=r"holds for rows != 1, .*squeeze gives \[6\].*test_cases_shapes.py"
                ):
                    refusing(x)
    assert [str(one.message) for one in caught if "squeeze" in str(one.message)] == [str(caught[0].message)]


SIZES_OF_TWO_DIMS = [(1, 1), (4, 3), (1, 3), (4, 1), (0, 3), (4, 0), (0, 0), (3, 3)]


@pytest.mark.parametrize("first", SIZES_OF_TWO_DIMS, ids=str)
def test_c21_two_dims_with_one_or_none(eager_way: Way, first: tuple[int, int]) -> None:
    # What a trace holds for is asked here, whatever runs in the pieces.
    def model(x: torch.Tensor) -> torch.Tensor:
        return (demo.scale3(x + 1) * x.shape[1]).transpose(0, 1) + x.sum(1)

    sizes = [{"b": 1, "s": 1}, {"b": 4, "s": 3}, {"b": 1, "s": 3}]
    call = eager_way.compile(model, dims={"x": {0: "b", 1: "s"}}, captures=sizes)
    with counters.expect(num_graphs_seen=1):
        for b, s in [first, *SIZES_OF_TWO_DIMS]:
            check(call, model, torch.randn(b, s))


SQUEEZED: list[tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[int, int], bool], str]] = [
    (lambda x: x.squeeze(0).sum(-1), lambda b, s: b == 1, "b != 1"),
    (lambda x: x.squeeze(1).sum(0), lambda b, s: s == 1, "s != 1"),
    (
        lambda x: x.flatten().squeeze().cumsum(-1),
        lambda b, s: b == s == 1,
        "b != 1 or s != 1",
    ),
]


@pytest.mark.parametrize(("squeezed", "departs", "words"), SQUEEZED, ids=["first", "second", "both"])
def test_c21_op_that_treats_one_in_two_dims_in_its_own_way(
    eager_way: Way, squeezed: Any, departs: Callable[[int, int], bool], words: str
) -> None:
    # What a trace holds for is asked here, whatever runs in the pieces.
    def model(x: torch.Tensor) -> torch.Tensor:
        return squeezed(demo.scale3(x * 2)) + 1

    call = eager_way.compile(model, dims={"x": {0: "b", 1: "s"}}, captures=[{"b": 4, "s": 3}])
    for b, s in [(4, 3), (1, 3), (4, 1), (1, 1), (2, 2)]:
        x = torch.randn(b, s)
        if departs(b, s):
            with pytest.raises(TraceDepartureError, match=f"holds for {words}, .*squeeze gives .*test_cases_shapes.py"):
                call(x)
        else:
            check(call, model, x)


# --- C22: what pins a dim -----------------------------------------------------------------------


class _Pins(nn.Module):
    """Looks at the number of its rows in one of several ways."""

    pos: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.n = how, 0
        self.register_buffer("pos", torch.arange(64.0))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, how = x.shape[0], self.how
        if how == "compare" and n == 4:
            x = x + 1
        if how == "buffer":
            x = x + torch.ones(4, 6, device=x.device)
        if how == "slice of 4":
            x = x + self.pos[:4, None]
        if how == "view":
            x = x.view(4, 6)
        if how == "loop":
            for _ in range(n):
                x = x + 1
        if how == "assert":
            assert n == 4
        if how == "dict":
            x = x * {4: 2.0}.get(n, 3.0)
        if how == "threshold":
            x = x + 1 if n < 6 else x - 1
        if how == "layer":
            x = self.layers[n % 8](x)
        if how == "chunks":
            x = torch.cat([chunk * i for i, chunk in enumerate(x.split(3))])
        if how == "keeps":
            self.n = n
        if how == "text":
            x = x * len(str(n))
        if how == "int":
            x = x * float(int(n))
        if how in ("ok", "rows of a table"):
            x = x + self.pos[:n, None]
        if how == "sine":
            x = x * math.sin(n) + math.atan(n / 3)
        return demo.scale3(x)


PINS = {
    "compare": "if how == .compare. and n == 4",
    "buffer": r"torch.ones\(4, 6",
    "slice of 4": r"self.pos\[:4, None\]",
    "view": r"x.view\(4, 6\)",
    "loop": r"for _ in range\(n\)",
    "assert": "assert n == 4",
    "dict": r"x \* {4: 2.0}.get\(n, 3.0\)",
}


@pytest.mark.parametrize("how", PINS)
def test_c22_dim_that_the_model_pins_is_told_with_the_line(eager_way: Way, how: str) -> None:
    # All of it comes before anything is compiled.
    call = eager_way.compile(_Pins(how), captures=[4, 7])
    pinned = r"dim 0 \('rows'\) of argument x is meant to vary, but the model fixes it to 4, by this line"
    for _ in range(2):
        with pytest.raises(CompileError, match=rf"{pinned}: .*{PINS[how]}.*test_cases_shapes.py:\d+ in forward"):
            call(torch.randn(4, 6))


@pytest.mark.parametrize("how", ["compare", "dict"])
def test_c22_other_size_first(eager_way: Way, how: str) -> None:
    """What 4 rows get must not follow from what 7 got."""
    model = _Pins(how)
    call, falling_back = (eager_way.compile(model, captures=[4, 7], on_failure=kind) for kind in ("error", "eager"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PieceworkWarning)
        for n in (7, 4, 5, 4):
            check(falling_back, model, torch.randn(n, 6))
    for n in (7, 4, 5):
        try:
            check(call, model, torch.randn(n, 6))
        except (CompileError, TraceDepartureError) as error:
            assert re.search(PINS[how], str(error)) and (how == "dict" or n == 4)  # noqa: PT017 - right as well


@pytest.mark.parametrize(
    ("how", "line", "right", "other"),
    [
        ("threshold", "x = x . 1 if n < 6", (4, 3, 5), 7),
        ("layer", r"\(rows % 8\) == 4", (4, 12, 20), 7),
        ("chunks", r"x.split\(3\)", (4, 5, 6), 7),
    ],
)
def test_c22_branch_that_holds_for_some_sizes_departs_with_the_line(
    eager_way: Way, how: str, line: str, right: Sequence[int], other: int
) -> None:
    # What a trace holds for is asked here, whatever runs in the pieces; 7 rows are never padded to what holds.
    model = _Pins(how)
    call = eager_way.compile(model, captures=[4, 12], rows_independent=how != "chunks")
    for n in right:
        check(call, model, torch.randn(n, 6))
    with pytest.raises(TraceDepartureError, match=rf"the trace holds for .*{line}.*this call has rows = {other}"):
        call(torch.randn(other, 6))
    check(call, model, torch.randn(4, 6))


@pytest.mark.parametrize("how", ["chunks", "threshold", "rows of a table"])
def test_c22_size_that_the_trace_does_not_hold_for_is_not_captured(eager_way: Way, how: str) -> None:
    """Not where a legal call would be padded to it, either, whatever the user asserts of its rows."""
    model = _Pins(how)
    call = eager_way.compile(model, captures=[4, 10, 66], rows_independent=True)
    legal = 64 if how == "rows of a table" else 5
    check(call, model, torch.randn(4, 6))
    if eager_way.is_captured:
        with pytest.warns(PieceworkWarning, match=rf"answers size {legal} uncaptured: size .*the trace holds for"):
            check(call, model, torch.randn(legal, 6))
        with pytest.raises(
            CaptureError, match=r"size 66 of _Pins can't be captured: the trace holds for .*(in forward|<= 64)"
        ):
            piecework.capture(call, [66, 2], torch.randn(4, 6))
    with counters.expect(num_graph_captures=0):
        for n in (legal, 4, legal, 4, legal):
            check(call, model, torch.randn(n, 6))


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("keeps", "Python state in its forward: self.n;"),
        ("text", r"at .*test_cases_shapes.py:\d+ in forward: .*len\(str\(n\)\)"),
    ],
)
def test_c22_number_of_rows_that_python_keeps_is_refused(eager_way: Way, how: str, line: str) -> None:
    # All of it comes before anything is compiled.
    with pytest.raises(CompileError, match=rf"_Pins (changes|can't be traced).*{line}"):
        eager_way.compile(_Pins(how))(torch.randn(4, 6))


@pytest.mark.parametrize("how", ["ok", "int"])
def test_c22_slice_of_a_buffer_and_number_of_rows_vary(way: Way, how: str) -> None:
    with counters.expect(num_graphs_seen=1):
        same(way, _Pins(how).to(way.device), lambda n: (way.rand(n, 6),), [4, 7, 1, 8])


def test_c22_functions_of_the_number_of_rows_vary(way: Way) -> None:
    """Torch has no form of a sine that computes one from sizes again, so that the traced one is repeated."""
    with counters.expect(num_graphs_seen=1):
        same(way, _Pins("sine").to(way.device), lambda n: (way.rand(n, 6),), [4, 7, 1], captures=[4])


# --- C23: layouts and dtypes that differ --------------------------------------------------------

LAYOUTS: dict[str, Callable[[Way, int], torch.Tensor]] = {
    "plain": lambda way, n: way.rand(n, 6),
    "offset": lambda way, n: way.rand(n + 3, 6)[3:],
    "transposed": lambda way, n: way.rand(6, n).t(),
    "expanded": lambda way, n: way.rand(1, 6).expand(n, 6),
    "expanded columns": lambda way, n: way.rand(n, 1).expand(n, 6),
    "gaps": lambda way, n: way.rand(n + 2, 8)[2:, 1:7],
    "every other row": lambda way, n: way.rand(2 * n, 6)[::2],
    "float64": lambda way, n: way.rand(n, 6, dtype=torch.float64),
    "float16": lambda way, n: way.rand(n, 6).half(),
}


def check_layout(way: Way, call: Callable[..., Any], model: Callable[..., Any], *args: Any) -> None:
    """Compare with eager, strides of results too: what is copied out of static memory has those of a clone."""
    result, expected = check(call, model, *args), model(*args)
    pairs = zip(
        (result if isinstance(result, tuple) else (result,)),
        (expected if isinstance(expected, tuple) else (expected,)),
        strict=True,
    )
    for one, other in pairs:
        legal = [_strides(other), _strides(other.clone())][: 1 + way.is_captured]
        assert _strides(one) in legal, f"strides {one.stride()} of {tuple(one.shape)}, in eager {other.stride()}"


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides that can be told from the outside."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()]


def _results_of_many_layouts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = demo.scale3(x * 2)
    return y + x, y.t() * 2, torch.empty_like(x).copy_(y), y.unsqueeze(0) * 3, y @ y.new_ones(6, 4)


def test_c23_layout_or_dtype_differs_on_a_later_call(way: Way) -> None:
    refusing, falling_back = (way.compile(_attends, captures=[4, 8], on_failure=kind) for kind in ("error", "eager"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PieceworkWarning)
        for name in ("plain", *LAYOUTS, "plain"):
            for n in (3, 4):
                x = LAYOUTS[name](way, n)
                check_layout(way, falling_back, _attends, x)
                if name in ("plain", "offset"):
                    check_layout(way, refusing, _attends, x)
                    continue
                what = "dtype" if "float" in name else "strides"
                with pytest.raises(TraceDepartureError, match=rf"{what} of argument x (was|are) "):
                    refusing(x)


def test_c23_layout_of_the_first_call_is_that_of_all(way: Way) -> None:
    call = way.compile(_results_of_many_layouts, captures=[4, 8])
    for n in (4, 3, 8, 1):
        check_layout(way, call, _results_of_many_layouts, LAYOUTS["transposed"](way, n))


@pytest.mark.parametrize("name", LAYOUTS)
def test_c23_results_have_the_layout_that_eager_gives_them(eager_way: Way, name: str) -> None:
    # Who makes the memory of a result is asked here, whatever runs in the pieces.
    call = eager_way.compile(_results_of_many_layouts, captures=[4, 8])
    for n in (4, 3, 8, 1, 5):
        check_layout(eager_way, call, _results_of_many_layouts, LAYOUTS[name](eager_way, n))


class _Convolves(nn.Module):
    """What its op is given has the layout of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = demo.scale3(self.conv(x))
        return y.relu(), y.permute(0, 2, 3, 1) * 2, y.flatten(2)


def _in_channels(way: Way, layout: torch.memory_format, other: torch.memory_format) -> None:
    model = _Convolves().to(way.device)
    call = way.compile(model, captures=[2, 4])
    with torch.no_grad():
        for n in (4, 3, 2):
            check_layout(way, call, model, way.rand(n, 3, 5, 5).to(memory_format=layout))
        with pytest.raises(TraceDepartureError, match="strides of argument x are"):
            call(way.rand(4, 3, 5, 5).to(memory_format=other))


def test_c23_channels_last(way: Way) -> None:
    _in_channels(way, torch.channels_last, torch.contiguous_format)


def test_c23_channels_first(eager_way: Way) -> None:
    # Who makes the memory of a result is asked here, whatever runs in the pieces.
    _in_channels(eager_way, torch.contiguous_format, torch.channels_last)


def test_c23_input_that_requires_gradients(way: Way) -> None:
    call = way.compile(_attends, captures=[4])
    check_layout(way, call, _attends, way.rand(4, 6))
    for n in (4, 3):
        x = way.rand(n, 6).requires_grad_()
        result = call(x)
        close(result.detach(), _attends(x.detach()))
        with pytest.raises(GradientNotSupported):
            result.sum().backward()
        check_layout(way, call, _attends, way.rand(n, 6))


def _adds_in_place(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return demo.scale3(x)


def _op_writes(x: torch.Tensor) -> torch.Tensor:
    demo.attn(x * 2, x + 1, x)
    return x + 1


def _op_writes_to_a_part(x: torch.Tensor) -> torch.Tensor:
    demo.attn(x[:, 1:] * 2, x[:, 1:] + 1, x[:, 1:])
    return demo.scale3(x + 1)


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_c23_write_to_an_expanded_tensor_fails_as_in_eager(way: Way, is_first: bool) -> None:
    _writes_to_expanded(way, _adds_in_place, is_first)


@pytest.mark.parametrize("model", [_op_writes, _op_writes_to_a_part], ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_c23_op_that_writes_to_an_expanded_tensor_fails_as_in_eager(
    eager_way: Way, model: Callable[..., Any], is_first: bool
) -> None:
    # The op runs as in eager, whatever runs in the pieces.
    _writes_to_expanded(eager_way, model, is_first)


def _writes_to_expanded(way: Way, model: Callable[..., Any], is_first: bool) -> None:
    call = way.compile(model, captures=[4])
    if not is_first:
        check(call, model, way.rand(4, 6))
    for n in (4, 3):
        x = LAYOUTS["expanded"](way, n)
        before = x.clone()
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            model(x)
        close(x, before)
        with pytest.raises((RuntimeError, PieceworkError), match="more than one element|strides of argument x"):
            call(x)
        close(x, before)


# --- C24: what a compiler of pieces is given ----------------------------------------------------


class _Looks:
    """A compiler that notes the examples of pieces, works with them as compilers do, and runs pieces as they are."""

    name = "looks"

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.made: list[tuple[torch.Size, ...]] = []

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        self.pieces.append(piece)
        results = piece.graph(*piece.example_inputs)
        first = next(example for example in piece.example_inputs if isinstance(example, torch.Tensor))
        with cast("Any", first).fake_mode:  # new fakes beside those that were recorded
            more = [torch.empty_like(result) + result.new_zeros(result.shape) for result in results]
            more[0] = more[0] + torch.zeros(())
        self.made.append(tuple(result.shape for result in more))
        return CompiledPiece(piece.graph.forward)


class _Branches(_Looks):
    """Its code holds for few rows only: it looked at the examples to choose it."""

    name = "branches"

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        sizes = [dim for example in _tensors(piece) for dim in example.shape if isinstance(dim, torch.SymInt)]
        if sizes and sizes[0] < 6:
            self.pieces.append(piece)

            def run(*args: Any) -> Any:
                results = piece.graph.forward(*args)
                assert results[0].shape[0] < 6, "this code is for few rows"
                return results

            return CompiledPiece(run)
        return CompiledPiece(piece.graph.forward)


def _tensors(piece: Piece) -> list[torch.Tensor]:
    return [example for example in piece.example_inputs if isinstance(example, torch.Tensor)]


class _ThreePieces(nn.Module):
    """Each piece has the rows of the argument; one has a weight, and two have a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6, bias=False)
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = demo.scale3(self.l(x) * self.scale)
        out = torch.empty_like(y)
        demo.attn(y + x, y.tanh(), out)
        return out[:, :3] * self.scale[:3] + x.sum(1, keepdim=True)


def test_c24_compiler_sees_symbolic_sizes_of_the_one_trace(eager_way: Way) -> None:
    """The plugin runs pieces as they are: what it is given is looked at."""
    looks = _Looks()
    model = _ThreePieces()
    with testing.plugins(looks), counters.expect(num_graphs_seen=1, num_piece_compilations=3):
        call = eager_way.compile(model, captures=[4, 9], piece_compiler="looks")
        for n in (4, 9, 3):
            check(call, model, torch.randn(n, 6))
    assert len(looks.pieces) == 3
    varying = [
        t
        for piece in looks.pieces
        for t, kind in zip(piece.example_inputs, piece.input_kinds, strict=True)
        if kind is InputKind.ACTIVATION
    ]
    assert len({str(t.shape[0]) for t in varying}) == 1 and all(isinstance(t.shape[0], torch.SymInt) for t in varying)
    every = [t for piece in looks.pieces for t in _tensors(piece)]
    assert (
        all(isinstance(t, FakeTensor) for t in every)
        and len({id(t.fake_mode) for t in every if isinstance(t, FakeTensor)}) == 1
    )
    assert all(isinstance(shape[0], torch.SymInt) for shapes in looks.made for shape in shapes)


def test_c24_examples_stay_symbolic_for_one_row_equal_dims_and_exact_sizes(eager_way: Way) -> None:
    # As above: a first call of one row, or of two equal dims, must not fix what may vary.
    def model(x: torch.Tensor) -> torch.Tensor:
        return demo.scale3(x * 2).transpose(0, 1) + x.sum()

    for first in ((1, 1), (6, 6), (4, 2)):
        looks = _Looks()
        with testing.plugins(looks):
            call = eager_way.compile(
                model,
                dims={"x": {0: "b", 1: "s"}},
                captures=[{"b": 6, "s": 6}],
                piece_compiler="looks",
                compile_sizes=({"b": 4, "s": 2},),
            )
            for b, s in (first, (6, 6), (4, 2), (3, 5), (1, 1)):
                check(call, model, torch.randn(b, s))
        general = [piece for piece in looks.pieces if piece.size is None]
        exact = [piece for piece in looks.pieces if piece.size is not None]
        assert len(general) == len(exact) == 2
        for piece in general:
            assert all(len({str(size) for size in t.shape}) == 2 for t in _tensors(piece))
            assert all(isinstance(size, torch.SymInt) for t in _tensors(piece) for size in t.shape)
        assert all(type(size) is int for piece in exact for t in _tensors(piece) for size in t.shape)


def test_c24_compiler_that_looks_at_a_size_is_used_where_that_holds(eager_way: Way) -> None:
    # As above: elsewhere the piece runs op by op.
    branches = _Branches()
    model = _ThreePieces()
    with testing.plugins(branches), counters.expect(num_graphs_seen=1):
        call = eager_way.compile(model, captures=[4, 9], piece_compiler="branches")
        for n in (4, 9, 3, 7, 1):
            check(call, model, torch.randn(n, 6))
    assert len(branches.pieces) == 3
