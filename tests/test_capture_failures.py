"""Captures that fail half-way, pieces that can't be captured, memory and budgets, odd and minimal capturers."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import piecework
from capture_models import (
    OPS,
    MinimalCapturer,
    Noting,
    capturing_by,
    check,
    check_sizes,
    compiled,
    emulated,
    more,
    ops,
    plans_of,
    reasons,
    rows,
    simple,
)
from piecework import CaptureError, Capturer, Piece, PieceworkWarning, PluginError, SplittingOp, counters, testing
from piecework.testing import EmulatedCapturer

pytestmark = pytest.mark.usefixtures("emulation")


class Deep(nn.Module):
    """Four pieces; writes to a buffer and to its input, draws random numbers."""

    count: torch.Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        self.count.add_(1)
        for layer in self.layers:
            x = ops.scale3(layer(x).relu() + torch.rand_like(x)) * 0.3
        return x + self.count


class Stateless(Deep):
    """The same layers, and nothing besides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = ops.scale3(layer(x).relu()) * 0.3
        return x


def state_of(model: Deep, x: torch.Tensor, capturer: EmulatedCapturer, call: Any) -> list[Any]:
    plans = plans_of(call)
    gc_state = (gc.isenabled(), gc.get_freeze_count())
    buffers = {index: tensor.data_ptr() for index, tensor in plans.statics.buffers.items()}
    own = [plans.captures in plans.pool.users, plans.pool.is_busy, buffers, [*plans.plans], gc_state]
    tensors = [value.clone() for value in (*model.state_dict().values(), x, torch.get_rng_state())]
    gc.collect()
    return [own, tensors, capturer.memory()]


# --- failing half-way ---


@pytest.mark.parametrize("has_plans", [False, True])
@pytest.mark.parametrize("kind", [CaptureError, RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_a_capture_that_fails_leaves_nothing_behind(
    kind: type[BaseException], has_plans: bool, on_failure: str
) -> None:
    num_before = 4 if has_plans else 0
    capturer = emulated(fail_at=num_before + 3, error=kind("planned"))
    with capturing_by(capturer):
        model = Deep()
        call = compiled(model, on_failure=on_failure)
        reference = copy.deepcopy(model)
        for run in (call, reference):
            torch.manual_seed(1)
            for _ in range(2):
                run(rows(2) if has_plans else rows(5))  # five rows are never captured
        x = rows(4)
        expected_x = x.clone()
        torch.manual_seed(2)
        before = state_of(model, x, capturer, call)
        if on_failure == "error" or kind is KeyboardInterrupt:
            words = "planned" if kind is KeyboardInterrupt else "size 4 of Deep can't be captured.*planned"
            with pytest.raises(KeyboardInterrupt if kind is KeyboardInterrupt else CaptureError, match=words):
                call(x)
            after = state_of(model, x, capturer, call)
            torch.testing.assert_close(after[1], before[1])
            if has_plans:
                assert after[0] == before[0]
                assert after[2].driver_bytes == before[2].driver_bytes
            else:
                assert after[0][0] is False and after[0][2] == {}
                assert (after[2].pool_bytes, after[2].driver_bytes) == (0, 0)
        else:
            with pytest.warns(PieceworkWarning, match="answers size 4 uncaptured"):
                result = call(x)
            torch.manual_seed(2)
            torch.testing.assert_close(result, reference(expected_x))
        for n in (4, 2, 4, 4, 3, 4):
            torch.manual_seed(n)
            given = rows(n)
            wanted = given.clone()
            torch.manual_seed(n)
            result = call(given)
            torch.manual_seed(n)
            torch.testing.assert_close(result, reference(wanted))
            torch.testing.assert_close(given, wanted)
            torch.testing.assert_close(model.count, reference.count)
        assert 4 in plans_of(call).plans


@pytest.mark.parametrize("error", [RuntimeError("in a piece"), KeyboardInterrupt()])
def test_an_exception_in_the_last_piece(error: BaseException) -> None:
    planned: list[BaseException] = []

    def fail(piece: Piece) -> None:
        is_last = any(len(node.args) > 1 and node.name == "add" for node in piece.graph.graph.nodes)
        if planned and is_last:
            raise planned.pop()

    with testing.plugins(Noting(fail)):
        model = Deep()
        call = compiled(model, piece_compiler=None)
        call(rows(5))
        planned.append(error)
        x, count, generator = rows(2), model.count.clone(), torch.get_rng_state()
        before = x.clone()
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CaptureError):
            call(x)
        torch.testing.assert_close((x, model.count, torch.get_rng_state()), (before, count, generator))
        assert not plans_of(call).pool.is_busy
        with counters.expect(num_graph_captures=4, num_graph_replays=4):
            call(x)
        torch.testing.assert_close(x, before + 1)


def test_a_pool_that_is_too_small_says_so_and_smaller_sizes_go_on() -> None:
    with capturing_by(emulated(limit_bytes=40_000)):
        model = Stateless(64)
        call = compiled(model, capture_sizes=(8, 512))
        for _ in range(2):
            with pytest.raises(CaptureError, match=r"size 512 .*memory"):
                call(rows(512, 64))
        check(call, model, rows(8, 64))
        check(call, model, rows(512, 64))  # of which it is known now what it would take
        assert "are free" in reasons(call, 512)
        eager = compiled(model, capture_sizes=(8, 512), on_failure="eager")
        with pytest.warns(PieceworkWarning, match="size 512"):
            check(eager, model, rows(512, 64))
        check(eager, model, rows(8, 64))


def test_a_failed_size_does_not_keep_larger_static_inputs() -> None:
    capturer = emulated(fail_at=4)
    with capturing_by(capturer):
        call = compiled(simple, capture_sizes=(2, 400))
        call(rows(2))
        statics = plans_of(call).statics
        (before,) = statics.buffers.values()
        with pytest.raises(CaptureError):
            call(rows(400))
        assert next(iter(statics.buffers.values())) is before
        check_sizes(call, simple, 400, 2)


def test_failures_of_automatic_sizes_are_said_once_and_tried_less_and_less() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = ops.scale3(x)
        return y * y.sum().item()

    call = compiled(model, capture_sizes="auto")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with counters.expect(num_graph_captures=0):
            for i in range(60):
                check(call, model, rows(2 + i % 3))
    assert [warning.category for warning in said].count(PieceworkWarning) == 1
    assert piecework.report(call).num_uncaptured_calls[2]["capturing it failed"] <= 5


def test_a_stale_automatic_size_that_fails_is_no_error() -> None:
    capturer = emulated(fail_at=3)
    with capturing_by(capturer):
        model = nn.Linear(4, 4)
        call = compiled(lambda x: ops.scale3(model(x)) * 2, capture_sizes="auto")
        for _ in range(3):
            call(rows(2))
        assert [*plans_of(call).plans] == [2]
        model.weight = nn.Parameter(rows(4))
        with pytest.warns(PieceworkWarning, match="answers size 2 uncaptured"):
            check(call, lambda x: ops.scale3(model(x)) * 2, rows(2))


# --- what can't be captured ---


def test_what_can_not_be_captured_is_named_with_piece_op_and_line() -> None:
    def item(x: torch.Tensor) -> torch.Tensor:
        y = ops.scale3(x)
        return y * y.sum().item()  # reads a number

    def nonzero(x: torch.Tensor) -> torch.Tensor:
        y = ops.scale3(x)
        return ops.scale3((y > 0).nonzero().float())

    for model, op, line in ((item, "aten::item", "y.sum().item()"), (nonzero, "aten::nonzero", "nonzero().float()")):
        call = compiled(model)
        with pytest.raises(CaptureError) as caught:
            call(rows(2))
        text = str(caught.value)
        for word in ("size 2", "piece_0", op, "test_capture_failures.py", line, "splitting op"):
            assert word in text
        check(call, model, rows(5))  # not among the sizes
        eager = compiled(model, on_failure="eager")
        with pytest.warns(PieceworkWarning, match=op):
            check(eager, model, rows(2))


def test_a_size_that_follows_from_data_names_the_op() -> None:
    call = compiled(lambda x: (x > 0).nonzero().float() + 1, splitting_ops=["aten::nonzero"])
    with pytest.raises(CaptureError, match=r"aten::nonzero .*follows from data .*test_capture_failures.py"):
        call(rows(2))


@pytest.mark.parametrize("op", ["capture::log", "capture::log_parts", "aten::nonzero"])
def test_an_op_whose_result_nobody_uses_needs_no_memory_and_runs_once_per_call(op: str) -> None:
    def model(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if op == "aten::nonzero":
            y.nonzero()
        else:
            getattr(more, op.removeprefix("capture::"))(y, count)
        return y * 2 + count

    call = compiled(model, splitting_ops=[op])
    count = torch.zeros(())
    with counters.expect(num_graph_captures=4, num_graph_replays=6):
        for n in (2, 3, 2):
            check(call, model, rows(n), count)
    check(call, model, rows(5), count)  # not among the sizes
    assert count == (0 if op == "aten::nonzero" else 4)
    report = piecework.report(call)
    assert report.memory is not None and report.memory.bridge_bytes == 0


def test_what_asserts_more_of_a_size_that_follows_from_data_stays() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        chosen = (x > 0).nonzero()
        torch._check(chosen.shape[0] >= 1)
        return x + 1

    call = compiled(model, splitting_ops=["aten::nonzero"], capture_sizes=())
    check(call, model, rows(2).abs())
    with pytest.raises(RuntimeError, match="u0 >= 1"):
        call(-rows(2).abs())


def test_pieces_with_unsafe_ops_run_between_the_graphs() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = ops.scale3(x + 1)
        y = more.unsafe(y * 2) + y
        return ops.scale3(y) - x

    call = compiled(model)
    with counters.expect(num_graph_captures=4, num_graph_replays=6):
        check_sizes(call, model, 2, 3, 2)
    report = piecework.report(call)
    assert [*report.uncaptured_pieces] == ["piece_1"]
    assert "capture::unsafe is tagged cudagraph_unsafe" in str(report)
    assert "test_capture_failures.py" in report.uncaptured_pieces["piece_1"]
    assert report.memory is not None and report.memory.bridge_bytes > 0


def test_the_tag_of_an_op_wins_over_what_it_says_of_itself() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(more.unsafe(x + 1) * 2) - x

    marked = [SplittingOp(name, capturable=True) for name in (*OPS, "capture::unsafe")]
    call = compiled(model, splitting_ops=marked)
    with counters.expect(num_graph_captures=2):  # before it, and all after it
        check_sizes(call, model, 2, 2)


@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_capturable_that_raises_is_named_and_not_the_capturer(on_failure: str) -> None:
    def odd_sizes(size: int) -> bool:
        return [False, True][size]

    marked = [SplittingOp(name, capturable=odd_sizes) for name in OPS]
    call = compiled(simple, splitting_ops=marked, capture_sizes=(1, 2), on_failure=on_failure)
    check(call, simple, rows(1))
    text = r"size 2 of simple can't be captured: capturable of splitting op 'models::\w+' raised IndexError for size 2"
    if on_failure == "error":
        with pytest.raises(CaptureError, match=text):
            call(rows(2))
    else:
        with pytest.warns(PieceworkWarning, match=text):
            check(call, simple, rows(2))


def test_a_model_with_nothing_to_capture_says_why() -> None:
    call = compiled(lambda x: more.unsafe(x) + 1, splitting_ops=())
    with pytest.raises(CaptureError, match="no piece of it can be captured; piece_0: capture::unsafe is tagged"):
        call(rows(2))


# --- memory ---


def test_35_sizes_take_little_more_than_the_largest_alone() -> None:
    def pool_bytes(sizes: tuple[int, ...]) -> int:
        capturer = emulated()
        with capturing_by(capturer):
            model = Stateless(64)
            call = compiled(model, capture_sizes=())
            piecework.capture(call, sizes, rows(2, 64))
            for n in sizes[::6]:
                check(call, model, rows(n, 64))
            return capturer.memory().pool_bytes

    alone = pool_bytes((280,))
    assert alone <= pool_bytes(tuple(range(8, 281, 8))) <= 1.12 * alone


def test_intermediates_of_one_size_use_the_same_memory() -> None:
    def pool_bytes(num_layers: int) -> int:
        capturer = emulated()
        with capturing_by(capturer):

            def model(x: torch.Tensor) -> torch.Tensor:
                for _ in range(num_layers):
                    x = ops.scale3(x + 1) * 0.3
                return x

            check(compiled(model, capture_sizes=(64,)), model, rows(64, 64))
            return capturer.memory().pool_bytes

    assert pool_bytes(8) == pool_bytes(3)


def test_two_models_on_one_pool_released_one_after_the_other() -> None:
    capturer = emulated()
    with capturing_by(capturer):
        models = [Stateless(), Stateless()]
        calls = [compiled(model) for model in models]
        kept = []
        for n in (2, 3, 4, 2, 3, 4):
            for call, model in zip(calls, models, strict=True):
                x = rows(n)
                kept.append((model(x), call(x)))
        piecework.release(calls[0])
        assert capturer.memory().pool_bytes > 0
        check_sizes(calls[1], models[1], 2, 3, 4)
        check_sizes(calls[0], models[0], 4, 3)
        check_sizes(calls[1], models[1], 2, 3, 4)
        for call in calls:
            piecework.release(call)
        assert capturer.memory().pool_bytes == 0
        for expected, result in kept:
            torch.testing.assert_close(result, expected)


def test_a_model_that_is_gone_leaves_no_graphs() -> None:
    capturer = emulated()
    with capturing_by(capturer):
        sizes = []
        for _ in range(4):
            model = Stateless(16)
            call = compiled(model)
            check(call, model, rows(4, 16))
            del call, model
            gc.collect()
            sizes.append(capturer.memory())
    assert {memory.driver_bytes for memory in sizes} == {0}
    assert sizes[-1].pool_bytes == sizes[0].pool_bytes


def test_released_graphs_go_without_garbage_collection() -> None:
    capturer = emulated()
    with capturing_by(capturer):
        call = compiled(Stateless())
        for n in (2, 3):
            call(rows(n))
        assert capturer.memory().driver_bytes > 0
        gc.disable()
        try:
            piecework.release(call)
            assert capturer.memory().driver_bytes == 0
        finally:
            gc.enable()


@pytest.mark.parametrize("by_capture", [False, True])
def test_a_budget_leaves_sizes_out_and_says_so(by_capture: bool) -> None:
    model = Stateless(64)
    call = compiled(model, capture_sizes=() if by_capture else (8, 16, 4096), max_capture_bytes=1_500_000)
    if by_capture:
        piecework.capture(call, [8, 16, 4096], rows(8, 64))
    for n in (8, 16, 4096, 8):
        check(call, model, rows(n, 64))
    report = piecework.report(call)
    assert [size.size for size in report.sizes] == [16, 8]
    assert by_capture or "left out for its memory" in reasons(call, 4096)
    capturer = plans_of(call).pool.capturer
    assert isinstance(capturer, EmulatedCapturer)
    assert capturer.num_captures == (16 if by_capture else 8)  # with two sizes to estimate from
    assert "budget 1.5 MB" in str(report)


def test_the_estimate_for_a_budget_does_not_raise_where_failures_are_no_error() -> None:
    capturer = emulated(fail_at=2)
    with capturing_by(capturer):
        model = Stateless()
        call = compiled(model, capture_sizes=(), max_capture_bytes=10_000_000, on_failure="eager")
        piecework.capture(call, [2, 3, 4], rows(2))
        assert [*plans_of(call).plans] == [4, 3, 2]
        check_sizes(call, model, 2, 3, 4)


def test_the_report_tells_what_happened() -> None:
    call = compiled(simple)
    for n in (2, 2, 3, 5):
        call(rows(n))
    report = piecework.report(call)
    assert report.capturer == "emulated"
    assert [(size.size, size.num_graphs, size.num_calls) for size in report.sizes] == [(3, 2, 1), (2, 2, 2)]
    assert report.num_uncaptured_calls == {5: {"not among the sizes to capture": 1}}
    memory = report.memory
    assert memory is not None
    assert memory.pool_bytes == plans_of(call).pool.capturer.memory().pool_bytes
    assert memory.static_input_bytes == memory.bridge_bytes == 3 * 4 * 4
    assert memory.driver_bytes == 4 * 64 * 1024
    text = str(report)
    assert "captured by emulated: 2 sizes" in text
    assert "size 2: 2 graphs, 2 calls" in text
    assert "size 5: 1 call ran uncaptured: not among the sizes to capture" in text


# --- capturers ---


def test_a_capturer_of_the_abstract_methods_alone_will_do() -> None:
    capturer = MinimalCapturer()
    with capturing_by(capturer):
        model = Deep()
        reference = copy.deepcopy(model)
        call = compiled(model)
        kept = []
        for n in (4, 2, 3, 2, 4, 5):
            x, seed = rows(n), n
            given = x.clone()
            torch.manual_seed(seed)
            result = call(given)
            torch.manual_seed(seed)
            expected = reference(x)
            torch.testing.assert_close((result, given, model.count), (expected, x, reference.count))
            kept.append((result, expected))
        for result, expected in kept:
            torch.testing.assert_close(result, expected)
        assert capturer.num_captures == 3 * 4
        model.layers[0].weight = nn.Parameter(rows(4))
        reference.layers[0].weight = nn.Parameter(model.layers[0].weight.clone())
        torch.manual_seed(0)
        result = call(rows(2))
        torch.manual_seed(0)
        torch.testing.assert_close(result, reference(rows(2)))
        piecework.release(call)
        assert capturer.num_releases == 1


def test_a_piece_is_warmed_up_once_per_size_and_again_after_a_failure() -> None:
    class Counting(EmulatedCapturer):
        num_warm_ups = 0

        def warm_up(self, fn: Any) -> None:
            self.num_warm_ups += 1
            super().warm_up(fn)

    def new_warm_ups() -> int:
        count, capturer.num_warm_ups = capturer.num_warm_ups, 0
        return count

    capturer = Counting(torch.device("cpu"), fail_at=15)
    with capturing_by(capturer):
        model = Stateless()
        call = compiled(model)
        check(call, model, rows(2))
        num_pieces = new_warm_ups()
        assert num_pieces > 0
        check(call, model, rows(3))
        assert new_warm_ups() == num_pieces
        model.layers[0].weight = nn.Parameter(rows(4))
        check(call, model, rows(2))
        assert new_warm_ups() == 0
        model.layers[0].weight = nn.Parameter(rows(4))
        with pytest.raises(CaptureError, match="asked to fail"):
            call(rows(2))
        new_warm_ups()  # While it looks for the op that fails.
        check(call, model, rows(2))
        assert new_warm_ups() == num_pieces


ODD = ("session", "capture", "empty", "memory", "alias", "warm_up", "refuses")


@pytest.mark.parametrize("method", ODD)
def test_a_capturer_that_raises_something_odd(method: str) -> None:
    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("odd")

    kind: Any = type("Odd", (EmulatedCapturer,), {method: fails})
    with capturing_by(kind(torch.device("cpu"))):
        model = Stateless()
        call = compiled(model)
        with pytest.raises(CaptureError, match="size 2 of Stateless can't be captured: .*KeyError: 'odd'"):
            call(rows(2))
        eager = compiled(model, on_failure="eager")
        with pytest.warns(PieceworkWarning, match="odd"):
            check(eager, model, rows(2))
        check(call, model, rows(5))


def test_a_capturer_by_name() -> None:
    class Declines:
        name = "declines"

        @piecework.hookimpl
        def piecework_capturer(self, device: torch.device) -> Capturer | None:
            return None

    with testing.plugins(Declines()):
        model = Stateless()
        check(compiled(model), model, rows(2))
        with pytest.raises(CaptureError, match="'declines' records nothing on cpu"):
            compiled(model, capturer="declines")(rows(2))
        with pytest.raises(PluginError, match="nobody"):
            compiled(model, capturer="nobody")(rows(2))
        with counters.expect(num_graph_captures=0):
            check(compiled(model, capturer="none"), model, rows(2))


@pytest.mark.parametrize("model", [lambda x: ops.scale3(x), lambda x: x[1:]], ids=["an op only", "a view only"])
def test_capturing_a_model_without_a_piece_says_so(model: Callable[..., Any]) -> None:
    call = compiled(model)
    with pytest.raises(CaptureError, match="has no piece to capture"):
        piecework.capture(call, [2], (rows(2),))
    check_sizes(call, model, 2, 3)
