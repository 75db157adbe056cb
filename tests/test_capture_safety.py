"""What captured calls may never do to a caller: inputs, outputs, ops, parameters, random numbers, on the real API."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import piecework
from capture_models import (
    INDEPENDENT,
    OPS,
    MinimalCapturer,
    Noting,
    capturing_by,
    check,
    check_sizes,
    compiled,
    counting,
    more,
    ops,
    plans_of,
    reasons,
    rows,
    simple,
)
from piecework import (
    CaptureError,
    GradientNotSupported,
    SplittingOp,
    StaleCaptureError,
    TraceDepartureError,
    counters,
    testing,
)

pytestmark = pytest.mark.usefixtures("emulation")


class Model(nn.Module):
    """Two pieces with parameters and buffers around an op."""

    scale: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return ops.scale3(self.linear(x)) * self.scale + self.count


class Copies(torch.utils._python_dispatch.TorchDispatchMode):  # pyright: ignore[reportAttributeAccessIssue]
    """Counts copies into a tensor that is not fresh."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.name().startswith(("aten::copy_", "aten::_foreach_copy_"))
        return func(*args, **(kwargs or {}))


# --- inputs ---


def test_inputs_are_copied_at_every_call_and_not_kept() -> None:
    call = compiled(simple)
    x = rows(2)
    check(call, simple, x)
    x.fill_(5)  # the same address, other values
    check(call, simple, x)
    check(call, simple, rows(2))
    assert x.eq(5).all()


def test_an_input_that_is_in_place_already_is_not_copied() -> None:
    call = compiled(lambda x, y: ops.scale3(x) + y, {"x": 0, "y": 0})
    call(rows(2), rows(2))
    static = plans_of(call).plans[2].recording.inputs
    with Copies() as copies:
        call(rows(2), rows(2))
    num_copies = copies.num
    static[0].fill_(1)
    static[1].fill_(2)
    with Copies() as copies:
        torch.testing.assert_close(call(static[0], static[1]), torch.full((2, 4), 5.0))
    assert copies.num == num_copies - 1
    x = rows(2)
    torch.testing.assert_close(call(x, static[1]), x * 3 + 2)


@pytest.mark.parametrize("make", [
    lambda n: rows(4, n).t(),
    lambda n: rows(n, 8)[:, ::2],
    lambda n: rows(2 * n)[::2],
    lambda n: torch.randn(n, 1).expand(n, 4),
    lambda n: torch.randn(1, 4).expand(n, 4),
    lambda n: torch.randn(()).expand(n, 4),
    lambda n: rows(n + 1)[1:],
])  # fmt: skip
@pytest.mark.parametrize("is_padded", [False, True])
def test_inputs_of_any_layout(make: Callable[[int], torch.Tensor], is_padded: bool) -> None:
    settings: dict[str, Any] = {"splitting_ops": INDEPENDENT, "capture_sizes": (4,)} if is_padded else {}
    call = compiled(simple, **settings, **({"max_padding_ratio": 4} if is_padded else {}))
    for size in (4, 2, 3, 2):
        check(call, simple, make(size))
    assert not is_padded or [*plans_of(call).plans] == [4]


def test_inputs_of_several_dtypes_and_no_dims() -> None:
    def model(x: torch.Tensor, i: torch.Tensor, b: torch.Tensor, h: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x) + h.float() * b.unsqueeze(1) + i.unsqueeze(1) + z

    call = compiled(model, {"x": 0, "i": 0, "b": 0, "h": 0})
    z = torch.tensor(2.5)
    with counters.expect(num_graph_captures=3):
        for n in (2, 3, 2, 4):
            check(call, model, rows(n), torch.randint(0, 5, (n,)), torch.rand(n) > 0.5, rows(n).bfloat16(), z)


def test_the_same_tensor_twice_and_overlapping_ones() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x + 1) * y

    call = compiled(model, {"x": 0, "y": 0})
    for _ in range(2):
        x = rows(3)
        torch.testing.assert_close(call(x, x), model(x, x))
        torch.testing.assert_close(call(x[1:], x[:2]), model(x[1:], x[:2]))


def test_writes_to_inputs_reach_the_caller_once() -> None:
    def model(x: torch.Tensor, y: torch.Tensor, log: torch.Tensor) -> Any:
        x.add_(1)
        y.copy_(ops.scale3(x))
        log.add_(x.sum())
        return y - 1

    call = compiled(model, {"x": 0, "y": 0})
    log = torch.zeros(())
    for n in (2, 2, 3, 2, 7):
        check(call, model, rows(n), rows(n), log)
    x = torch.zeros(2, 1).expand(2, 4).contiguous()
    check(call, model, x, rows(2, 8)[:, :4].contiguous(), log)


def test_overlapping_inputs_that_are_written_to_depart_from_the_trace() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return ops.scale3(x + y)

    call = compiled(model, {"x": 0, "y": 0})
    check(call, model, rows(2), rows(2))
    x = rows(3)
    with pytest.raises(TraceDepartureError, match="share memory"):
        call(x[1:], x[:2])


# --- inputs that are held ---


def with_cache(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache[:2].add_(x[:1])
    return ops.scale3(x + cache[1:2]) * 2


def test_a_held_input_is_read_and_written_in_place() -> None:
    call = compiled(with_cache)
    cache = rows(5)
    with counters.expect(num_graph_captures=4):
        for n in (2, 3, 2):
            check(call, with_cache, rows(n), cache)


def test_a_held_input_at_another_address_is_captured_again_and_copied_after_three_moves() -> None:
    call = compiled(with_cache)
    check(call, with_cache, rows(2), rows(5))
    for _ in range(3):
        with counters.expect(num_graph_captures=2):
            check(call, with_cache, rows(2), rows(5))
    assert piecework.report(call).num_recaptures == 3
    with counters.expect(num_graph_captures=0, num_graph_replays=4):
        check(call, with_cache, rows(2), rows(5))
        check(call, with_cache, rows(2), rows(5))


def test_plans_from_before_an_input_was_copied_still_hold_it() -> None:
    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x + weight) * 2

    call = compiled(model, splitting_ops=INDEPENDENT, capture_sizes=(4, 8), max_padding_ratio=2)
    first = rows(1)
    check(call, model, rows(8), first)
    for _ in range(4):
        check(call, model, rows(4), rows(1))
    with counters.expect(num_graph_captures=0):
        check(call, model, rows(7), first)  # padded for the first time, to a size that holds the weight
        check(call, model, rows(3), rows(1))
    check(call, model, rows(8), rows(1))
    check(call, model, rows(7), rows(1))


@pytest.mark.parametrize("move", [
    lambda cache: setattr(cache, "data", rows(5)),
    lambda cache: cache.set_(rows(5)),
])  # fmt: skip
def test_a_held_input_whose_memory_is_replaced(move: Callable[[torch.Tensor], Any]) -> None:
    call = compiled(with_cache)
    cache = rows(5)
    for _ in range(6):
        check(call, with_cache, rows(2), cache)
        move(cache)


def test_a_held_input_that_moves_after_freeze_is_stale() -> None:
    for on_failure in ("error", "eager"):
        piecework.reset()
        with testing.plugins():
            call = compiled(with_cache, on_failure=on_failure)
            cache = rows(5)
            call(rows(2), cache)
            piecework.freeze()
            check(call, with_cache, rows(2), cache)
            other = rows(5)
            if on_failure == "error":
                before = other.clone()
                with pytest.raises(StaleCaptureError, match="argument cache is at another address"):
                    call(rows(2), other)
                torch.testing.assert_close(other, before)
            else:
                check(call, with_cache, rows(2), other)
                assert "stale" in reasons(call, 2)
            with counters.expect(num_graph_replays=2):
                check(call, with_cache, rows(2), cache)


def test_a_caller_may_promise_to_keep_an_input_in_place() -> None:
    call = compiled(simple, static_inputs=["x"])
    x = rows(4)
    with counters.expect(num_graph_captures=4):
        for n in (4, 2):
            torch.testing.assert_close(call(x[:n]), simple(x[:n]))
    assert not plans_of(call).plans[2].recording.inputs
    x.fill_(3)
    torch.testing.assert_close(call(x[:2]), simple(x[:2]))
    with counters.expect(num_graph_captures=2):
        check(call, simple, rows(2))


# --- outputs ---


@pytest.mark.parametrize("static_outputs", [False, True])
def test_outputs_are_the_callers_own_unless_they_are_said_not_to_be(static_outputs: bool) -> None:
    call = compiled(simple, static_outputs=static_outputs)
    x, y = rows(2), rows(2)
    first = call(x)
    second = call(y)
    torch.testing.assert_close(first, simple(y if static_outputs else x))
    second.zero_()
    check(call, simple, x)


def test_outputs_that_were_kept_over_many_sizes_and_captures() -> None:
    call = compiled(simple)
    kept = [(x, call(x)) for x in (rows(n) for n in (4, 2, 3, 2, 4, 1, 3))]
    other = compiled(lambda x: ops.scale3(x * 5))
    check_sizes(other, lambda x: ops.scale3(x * 5), 4, 3, 2)
    piecework.release(call)
    for x, result in kept:
        torch.testing.assert_close(result, simple(x))


def test_an_output_that_is_an_input_or_a_view_of_one() -> None:
    def model(x: torch.Tensor, cache: torch.Tensor) -> Any:
        y = ops.scale3(x)
        return x, x[:1], x.t(), cache, cache[1:], x.view(-1), y

    call = compiled(model)
    cache = rows(3)
    for n in (2, 3, 2):
        x = rows(n)
        same, head, transposed, kept, tail, flat, y = call(x, cache)
        torch.testing.assert_close(y, x * 3)
        assert same is x
        assert kept is cache
        flat.fill_(7)
        assert head.eq(7).all() and transposed.eq(7).all() and x.eq(7).all()
        tail.fill_(n)
        assert cache[1:].eq(n).all()


def test_an_output_that_is_an_input_that_was_written_to() -> None:
    def model(x: torch.Tensor) -> Any:
        x.mul_(2)
        y = ops.scale3(x)
        x.add_(y)
        return x, x[1:], y

    call = compiled(model)
    for n in (2, 3, 2):
        x = rows(n)
        result = check(call, model, x)
        assert result[0] is x
        result[0].zero_()
        assert result[1].eq(0).all()


def test_an_output_that_is_a_parameter_or_a_view_of_one() -> None:
    class Returns(Model):
        def forward(self, x: torch.Tensor) -> Any:
            return ops.scale3(self.linear(x)), self.linear.weight, self.linear.weight[0], self.scale.expand(2, 4)

    model = Returns()
    call = compiled(model)
    for _ in range(2):
        for n in (2, 3, 2):
            _, weight, row, scale = check(call, model, rows(n))
            assert weight is model.linear.weight
            row.fill_(n)
            assert model.linear.weight[0].eq(n).all()
            assert scale.data_ptr() == model.scale.data_ptr()
        model.linear.weight = nn.Parameter(rows(4))


def test_outputs_that_share_memory_share_it() -> None:
    def model(x: torch.Tensor) -> Any:
        y = ops.scale3(x) + 1
        up, down = ops.pair(y)
        return y, y[1:], y.t(), up, up[:1], down

    call = compiled(model)
    for n in (2, 3, 2):
        y, tail, transposed, up, head, down = check(call, model, rows(n))
        y.zero_()
        up.fill_(3)
        assert tail.eq(0).all() and transposed.eq(0).all() and head.eq(3).all()
        assert not down.eq(0).all()


def test_results_of_calls_as_arguments_of_later_calls() -> None:
    for static_outputs in (False, True):
        call = compiled(lambda x: ops.scale3(x.relu() + 1) * 0.5 - x, static_outputs=static_outputs)
        for order in ((4, 4, 3, 2, 2, 3, 4), (2, 2, 3, 4)):
            given = expected = rows(4)
            for n in order:
                if n > given.shape[0]:
                    given = expected = rows(n)
                expected = ops.scale3(expected[:n].relu() + 1) * 0.5 - expected[:n]
                given = call(given[:n])
                torch.testing.assert_close(given, expected)
        piecework.release(call)


@pytest.mark.parametrize("num_models", [1, 2])
def test_a_static_result_as_a_state_of_the_next_call(num_models: int) -> None:
    def model(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        after = state * 0.5
        z = ops.scale3(x + state)
        return z + state, after + z.sum() * 0.1

    calls = [compiled(model, static_outputs=True) for _ in range(num_models)]
    state = expected = rows(1)[0]
    for i in range(12):
        x = rows((2, 3, 4)[i % 3])
        wanted, expected = model(x, expected)
        result, state = calls[i % num_models](x, state)
        torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(state, expected)
    call, x = calls[0], rows(2)
    piecework.release(call)
    for _ in range(3):  # captured, given what lies in the pool, captured with a copy of it
        state = call(x, state)[1]
    with counters.expect(num_graph_captures=0, num_graph_replays=4):
        state = call(x, state)[1]
        call(x, state)
    assert "argument state is a result in memory that captures re-use" in reasons(call, 2)


@dataclasses.dataclass
class Result:
    y: torch.Tensor
    parts: dict[str, list[torch.Tensor]]
    size: int


def test_nested_containers_as_arguments_and_results() -> None:
    def model(batch: dict[str, Any], pair: tuple[torch.Tensor, list[torch.Tensor]]) -> Result:
        y = ops.scale3(batch["x"] + pair[0])
        return Result(y, {"views": [y[:1], batch["x"]], "other": [pair[1][0] * 2]}, y.shape[0] * 2)

    call = compiled(model, {"batch": 0, "pair": 0})
    for n in (2, 3, 2):
        batch, pair = {"x": rows(n)}, (rows(n), [rows(n)])
        result, expected = call(batch, pair), model(batch, pair)
        assert type(result) is Result and result.size == 2 * n
        torch.testing.assert_close(dataclasses.asdict(result), dataclasses.asdict(expected))
        assert result.parts["views"][1] is batch["x"]


def test_sizes_in_results_and_of_tensors_that_are_made() -> None:
    def model(x: torch.Tensor) -> Any:
        n = x.shape[0]
        y = ops.scale3(x)
        return y.view(2 * n, -1), torch.arange(n), y + torch.arange(n).unsqueeze(1), n, 3 * n + 1, x.shape

    call = compiled(model)
    for n in (2, 3, 2, 1):
        check(call, model, rows(n))


def test_two_dims_one_row_and_none() -> None:
    call = compiled(
        simple, {"x": {0: "batch", 1: "seq"}}, capture_sizes=[{"batch": 1, "seq": 3}, {"batch": 2, "seq": 1}]
    )
    for shape in ((1, 3), (2, 1), (1, 3), (0, 3), (2, 0), (3, 3)):
        check(call, simple, rows(*shape))
    one = compiled(simple, capture_sizes=(1,))
    with counters.expect(num_graph_captures=2, num_graph_replays=4):
        check_sizes(one, simple, 2, 1, 0, 1)


def test_a_call_is_padded_whose_rows_nothing_reads(emulation: None) -> None:
    """No input that is copied has rows, so that there is nothing to zero."""

    def model(table: torch.Tensor, x: torch.Tensor) -> Any:
        return table * table, x

    call = compiled(model, {"x": 0}, capture_sizes=(4,), max_padding_ratio=4)
    with counters.expect(num_graph_replays=3):
        for n in (4, 2, 3):
            check(call, model, rows(5), rows(n))


# --- splitting ops ---


@pytest.mark.parametrize("capturable", [False, True])
def test_ops_whose_results_share_memory_with_their_arguments(capturable: bool) -> None:
    def model(x: torch.Tensor) -> Any:
        y, z, w, v = x + 1, x * 3, x - 2, x.cos()
        q, k = more.rotate(y, z)
        twice = more.double(w)
        tail = more.tail(v)
        return q + k, y * 2, z, twice + w, tail * 2, v

    names = [f"capture::{name}" for name in ("rotate", "double", "tail")]
    call = compiled(model, splitting_ops=[SplittingOp(name, capturable=capturable) for name in names])
    for n in (2, 3, 2):
        check(call, model, rows(n))


@pytest.mark.parametrize("capturable", [False, True])
def test_arguments_that_an_op_with_several_results_gives_back_stay_the_callers(
    emulation: None, capturable: bool
) -> None:
    def whole(x: torch.Tensor, y: torch.Tensor) -> Any:
        a, b = more.rotate(x, y * 2)
        return a, b + 1

    def parts(x: torch.Tensor, y: torch.Tensor) -> Any:
        a, b = more.rotate(x[:, 1:], y)
        return b, a[:, 0], (a * 2, b)

    cut = SplittingOp("capture::rotate", capturable=capturable)
    for model in (whole, parts):
        call = compiled(model, {"x": 0, "y": 0}, splitting_ops=(cut,))
        for size in (2, 2, 5):
            x, y = rows(size), rows(size)
            expected_x, expected_y = x.clone(), y.clone()
            expected = model(expected_x, expected_y)
            result = call(x, y)
            torch.testing.assert_close(result, expected)
            torch.testing.assert_close((x, y), (expected_x, expected_y))
            assert (result[0] is x) == (expected[0] is expected_x)
            assert (result[0] is y) == (expected[0] is expected_y)
            given = result[0] if model is whole else result[1]
            assert given.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def _part_of_the_input(x: torch.Tensor) -> Any:
    t = more.tail(x)
    return t, t, t[:, 0], x


def _part_of_an_intermediate(x: torch.Tensor) -> Any:
    y = x * 2
    t = more.tail(y)
    return t, y, t.t()


def _part_of_a_view(x: torch.Tensor) -> Any:
    t = more.tail(x.t())
    return t[:1] if x.shape[0] > 1 else t, x + 1


def _part_of_memory_with_gaps(x: torch.Tensor) -> Any:
    y = torch.empty_strided((x.shape[0], 4), (9, 2), dtype=x.dtype, device=x.device).copy_(x)
    return more.tail(y[:, 1:]).add_(1), y


def _part_of_an_item(x: torch.Tensor) -> Any:
    t, total = more.tail_and_sum(x)
    return t, total, t.view_as(t)


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("cut", [(), ("capture::tail", "capture::tail_and_sum")], ids=["in a piece", "cut"])
@pytest.mark.parametrize(
    "model",
    [
        _part_of_the_input,
        _part_of_an_intermediate,
        _part_of_a_view,
        _part_of_memory_with_gaps,
        _part_of_an_item,
    ],
)
def test_part_of_what_an_op_wrote_to_shares_its_memory(
    emulation: None, model: Callable[..., Any], cut: tuple[str, ...]
) -> None:
    """A result that an op gave of its argument is no copy: whoever writes to one sees it in the other."""
    call = compiled(model, splitting_ops=cut, max_padding_ratio=4)
    for size in (3, 3, 2):
        x = rows(size)
        expected_x = x.clone()
        result, expected = [*call(x), x], [*model(expected_x), expected_x]
        torch.testing.assert_close(result, expected)
        for a, b in itertools.combinations(range(len(result)), 2):
            assert (place(result[a]) == place(result[b])) == (place(expected[a]) == place(expected[b])), (a, b)
            assert (result[a] is result[b]) == (expected[a] is expected[b]), (a, b)
    torch._dynamo.reset()


def test_a_result_that_shares_memory_beside_a_fresh_one() -> None:
    def model(x: torch.Tensor) -> Any:
        y = x + 1
        tail, total = more.tail_and_sum(y)
        y.mul_(2)
        return tail + 1, total * 2, y + 0

    call = compiled(model)
    for n in (2, 3, 2):
        check(call, model, rows(n))


def test_ops_that_write_to_inputs_and_parameters() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Buffer(torch.ones(4))

        def forward(self, x: torch.Tensor, cache: torch.Tensor) -> Any:
            more.double(x)
            more.double(cache[:2])
            more.double(self.scale)
            return x + 1, cache[0] * self.scale

    model, reference = Writes(), Writes()
    call = compiled(model)
    cache, expected_cache = torch.ones(3, 4), torch.ones(3, 4)
    for n in (2, 3, 2):
        x = rows(n)
        expected = reference(x.clone(), expected_cache)
        given = x.clone()
        torch.testing.assert_close(call(given, cache), expected)
        torch.testing.assert_close((given, cache, model.scale), (x * 2, expected_cache, reference.scale))


@pytest.mark.parametrize("capturable", [False, True])
def test_fresh_results_used_by_graphs_by_ops_returned_and_not_at_all(capturable: bool) -> None:
    def model(x: torch.Tensor) -> Any:
        a = ops.scale3(x)
        b = ops.scale3(a)
        up, _ = ops.pair(b)
        _, down = ops.pair(up + 1)
        ops.scale3(down)
        return a, down, ops.scale3(up)

    call = compiled(model, splitting_ops=[SplittingOp(name, capturable=capturable) for name in OPS])
    for n in (2, 3, 2):
        results = check(call, model, rows(n))
        for result in results:
            result.zero_()


def test_an_expanded_tensor_that_is_handed_on_between_uncaptured_pieces() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = more.unsafe(x)
        z = ops.scale3(y[:, :1].expand(x.shape[0], 3))
        return ops.scale3(z).sum(1) + y[:, 0]

    call = compiled(model)
    for n in (2, 3, 2):
        check(call, model, rows(n))


def test_an_op_that_gives_another_form_than_its_fake_says_so() -> None:
    for wrong, words in ((lambda x: x[:1], r"shape \(1, 4\)"), (lambda x: x.double(), "float64")):
        call = compiled(simple, splitting_ops=[SplittingOp("models::scale3", implementation=wrong)])
        with pytest.raises(CaptureError, match=rf"models::scale3.*capture_models.py.*{words}.*mend the fake"):
            call(rows(2))


def test_every_op_runs_once_per_call_and_never_for_a_capture() -> None:
    counts: list[int] = []

    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.scale3(ops.scale3(x + weight) * 2) - 1

    def once(num_rows: int, weight: torch.Tensor) -> None:
        counts.clear()
        call(rows(num_rows), weight)
        assert len(counts) == 2

    call = compiled(model, splitting_ops=[counting(counts)], capture_sizes=(4, 8), max_padding_ratio=2)
    weight = rows(1)
    piecework.capture(call, [5], (rows(2), weight))
    assert not counts
    for n in (4, 4, 3, 8, 5, 1, 9):
        once(n, weight)
    once(4, rows(1))  # captured again
    assert piecework.report(call).num_recaptures == 1
    call = compiled(lambda x, weight: model(x, weight) * x.sum().item(), splitting_ops=[counting(counts)],
                    on_failure="eager", capture_sizes=(4,))  # fmt: skip
    with pytest.warns(piecework.PieceworkWarning, match="uncaptured"):
        once(4, weight)  # whose capture fails


# --- parameters and buffers ---


def _load(model: Model, **kwargs: Any) -> None:
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()}, **kwargs)


CHANGES: dict[str, tuple[Callable[[Model], Any], bool]] = {
    "in place": (lambda model: model.linear.weight.normal_(), False),
    "in place through data": (lambda model: model.linear.weight.data.normal_(), False),
    "load": (_load, False),
    "assigned": (lambda model: _load(model, assign=True), True),
    "replaced": (lambda model: setattr(model.linear, "weight", nn.Parameter(rows(4))), True),
    "buffer replaced": (lambda model: setattr(model, "scale", rows(1)[0]), True),
    "data": (lambda model: setattr(model.linear.weight, "data", rows(4)), True),
    "moved": (lambda model: model.double().float(), True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_parameters_are_seen(change: str) -> None:
    how, moves = CHANGES[change]
    model = Model()
    call = compiled(model, check_parameters="always")
    for n in (2, 3):
        call(rows(n))
    how(model)
    with counters.expect(num_graph_captures=4 if moves else 0):
        for n in (2, 3, 2):
            expected = copy.deepcopy(model)(x := rows(n))
            torch.testing.assert_close(call(x), expected)
    assert piecework.report(call).num_recaptures == (2 if moves else 0)


def test_a_swapped_parameter_is_seen() -> None:
    model = Model()
    call = compiled(model, check_parameters="always")
    call(rows(2))
    model.linear.weight = nn.Parameter(rows(4))  # torch swaps none that Dynamo has a weak reference to
    call(rows(2))
    torch.utils.swap_tensors(model.linear.weight, nn.Parameter(rows(4)))
    expected = copy.deepcopy(model)(x := rows(2))
    torch.testing.assert_close(call(x), expected)


def test_another_dtype_of_parameters_departs_and_comes_back() -> None:
    model = Model()
    call = compiled(model)
    call(rows(2))
    model.to(torch.float64)
    with pytest.raises(TraceDepartureError, match="dtype"):
        call(rows(2))
    model.to(torch.float32)
    expected = copy.deepcopy(model)(x := rows(2))
    torch.testing.assert_close(call(x), expected)


def test_buffers_are_written_once_per_call() -> None:
    model, reference = Model(), None
    call = compiled(model)
    reference = copy.deepcopy(model)
    piecework.capture(call, [4], rows(2))
    for n in (2, 2, 3, 5, 4):
        x = rows(n)
        torch.testing.assert_close(call(x), reference(x))
        torch.testing.assert_close(model.count, reference.count)


STALE: dict[str, str] = {
    "replaced": "linear.weight was",
    "buffer replaced": "scale was",
    "assigned": "count, linear.weight, linear.bias and 1 more were",
    "data": "linear.weight was",
}


@pytest.mark.parametrize("change", STALE)
def test_an_error_after_freeze_names_the_parameters_that_were_replaced_or_moved(change: str) -> None:
    model = Model()
    call = compiled(model, check_parameters="always")
    for n in (2, 3):
        call(rows(n))
    piecework.freeze()
    CHANGES[change][0](model)
    why = f"has to be captured again, since {STALE[change]} replaced or moved, and piecework.freeze()"
    for n in (2, 3, 2):
        with pytest.raises(StaleCaptureError, match=why):
            call(rows(n))


def test_an_error_after_freeze_names_all_that_changed_before_the_call() -> None:
    model = Model()
    call = compiled(nn.Sequential(model), {"input": 0})
    call(rows(2))
    piecework.freeze()
    model.linear.weight = nn.Parameter(rows(4))
    piecework.verify_assumptions(call)  # notices it
    for _ in range(2):
        model.scale = rows(1)[0]
        piecework.verify_assumptions(call)
    with pytest.raises(StaleCaptureError, match=r"since 0\.linear\.weight, 0\.scale were replaced or moved"):
        call(rows(2))


def test_a_copy_of_a_compiled_model_captures_for_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    call = compiled(model, {"input": 0}, splitting_ops=())
    check(call, model, rows(2))
    for made in (copy.deepcopy(call), pickle.loads(pickle.dumps(call))):
        made[0].weight.fill_(1)
        check(made, nn.Sequential(made[0]), rows(2))
    copied = copy.deepcopy(call)
    with counters.expect(num_graph_captures=1, num_graph_replays=2):
        check_sizes(copied, model, 2, 2)
    with counters.expect(num_graph_captures=0, num_graph_replays=1):
        check(call, model, rows(2))


# --- random numbers, modes ---


def test_random_numbers_are_those_of_eager_and_go_on_from_replay_to_replay() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(nn.functional.dropout(x, 0.5, True)) + torch.rand_like(x)

    call = compiled(model)
    sequences: list[list[torch.Tensor]] = []
    for run in (call, model, call):
        torch.manual_seed(3)
        sequences.append([*(run(torch.ones(n, 4)) for n in (2, 2, 3, 2)), torch.rand(3)])
    for sequence in sequences:
        torch.testing.assert_close(sequence, sequences[1])
    assert not torch.equal(sequences[0][0], sequences[0][1])


def test_capture_does_not_move_the_generator() -> None:
    call = compiled(lambda x: ops.scale3(torch.rand_like(x)))
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    piecework.capture(call, [2, 3], torch.zeros(2, 4))
    torch.testing.assert_close(torch.rand(3), expected)


@pytest.mark.parametrize("static_outputs", [False, True])
def test_gradients_are_refused_and_the_results_are_right(static_outputs: bool) -> None:
    model = nn.Linear(4, 4)
    call = compiled(model, {"input": 0}, splitting_ops=(), static_outputs=static_outputs)
    with torch.enable_grad():
        for _ in range(3):
            x = rows(2).requires_grad_()
            y = call(x)
            torch.testing.assert_close(y, model(x))
            with pytest.raises(GradientNotSupported):
                y.sum().backward()
    assert not call(rows(2)).requires_grad


@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("called_in", [torch.inference_mode, torch.no_grad])
def test_inference_mode(made_in: Callable[[], Any], called_in: Callable[[], Any]) -> None:
    with made_in():
        model, cache = Model(), torch.zeros(4)
        reference = copy.deepcopy(model)
        call = compiled(lambda x, cache: model(x) + cache)
        inputs = [rows(n) for n in (2, 3, 2)]
        call(rows(4), cache)
        reference(rows(4))
    with made_in(), called_in():
        for x in inputs:
            torch.testing.assert_close(call(x, cache), reference(x) + cache)
    with called_in():
        other = compiled(simple)
        for x in inputs:
            result = other(x)
            torch.testing.assert_close(result, simple(x))
    torch.testing.assert_close(other(rows(2).fill_(1)), torch.full((2, 4), 12.0))
    with capturing_by(MinimalCapturer()):
        minimal = compiled(simple)
        with called_in():
            minimal(rows(2))
        check(minimal, simple, rows(2))


def test_autocast_holds_for_captures_too() -> None:
    model = nn.Linear(4, 4)
    call = compiled(model, {"input": 0}, splitting_ops=(), capture_sizes=())
    autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    with autocast():
        check(call, model, rows(3))
    with pytest.raises(TraceDepartureError, match="autocast was"):
        piecework.capture(call, [2], rows(3))
    with autocast():
        piecework.capture(call, [2], rows(3))
    for value in (2, 3):
        model.weight.fill_(value)
        with autocast(), counters.expect(num_graph_replays=1):
            check(call, model, rows(2))


def test_no_cast_of_a_weight_outlives_its_autocast() -> None:
    cached: list[bool] = []
    noting = Noting(lambda _: cached.append(torch.is_autocast_cache_enabled()))
    with testing.plugins(noting), torch.autocast("cpu", dtype=torch.bfloat16):
        call = compiled(nn.Linear(4, 4), {"input": 0}, splitting_ops=(), piece_compiler=None)
        piecework.capture(call, [2], rows(2))
        assert cached and not any(cached)
        assert torch.is_autocast_cache_enabled()
