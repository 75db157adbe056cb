"""Captured calls from several threads, on several streams, and from inside one another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import piecework
from capture_models import (
    OPS,
    capturing_by,
    check,
    check_sizes,
    compiled,
    counting,
    emulated,
    in_threads,
    ops,
    plans_of,
    reasons,
    rows,
    simple,
)
from piecework import CaptureError, SplittingOp, counters, set_compile_context
from piecework.testing.emulated import stream

pytestmark = pytest.mark.usefixtures("emulation")


def in_thread(work: Callable[[], Any]) -> Any:
    """Run in another thread, without gradients, and wait for it; fail where that never ends."""
    results: list[Any] = []

    def run() -> None:
        with torch.no_grad():
            try:
                results.append(work())
            except BaseException as error:  # of another thread, to be looked at in this one
                results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert results, "the thread waits forever"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def calling(inner: Callable[..., Any]) -> SplittingOp:
    """Return a splitting op that calls something while a captured call is under way."""
    return SplittingOp("models::scale3", implementation=lambda x: inner(x))


# --- from inside one another ---


@pytest.mark.parametrize("run", [lambda work: work(), in_thread])
@pytest.mark.parametrize("sizes", [(2, 2, 3), (2,)])
def test_a_model_called_from_an_op_of_another_runs_uncaptured(run: Callable[..., Any], sizes: tuple[int, ...]) -> None:
    inner = compiled(simple)
    if len(sizes) > 1:
        inner(rows(2))  # captured already: it comes through its plan
    captured = plans_of(inner).num_uncaptured if len(sizes) > 1 else None

    def outer(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x * 2) + 1

    call = compiled(outer, splitting_ops=[calling(lambda x: run(lambda: inner(x)))])
    for size in sizes:
        x = rows(size)
        torch.testing.assert_close(call(x), simple(x * 2) + 1)
    why = reasons(inner, 2)
    assert "inside another captured call" in why or "another thread" in why
    assert captured is None or captured[3]
    with counters.expect(num_graph_replays=2):
        check(inner, simple, rows(2))  # and is captured again outside


def test_a_model_that_calls_itself_from_an_op() -> None:
    depth: list[int] = []

    def again(x: torch.Tensor) -> torch.Tensor:
        depth.append(0)
        result = call(x) if len(depth) < 3 else x
        return result * 3

    call = compiled(lambda x: ops.scale3(x) + 1, splitting_ops=[calling(again)])
    x = rows(2)
    for _ in range(2):
        depth.clear()
        torch.testing.assert_close(call(x), ((x * 3 + 1) * 3 + 1) * 3 + 1)
    assert "inside another captured call" in reasons(call, 2)


@torch.library.custom_op("capture::calls", mutates_args=())
def calls(x: torch.Tensor) -> torch.Tensor:
    return called[0](x).clone()


calls.register_fake(lambda x: torch.empty_like(x))
called: list[Any] = []


def test_a_model_called_from_inside_a_piece_while_that_is_recorded() -> None:
    inner = compiled(simple)
    inner(rows(2))
    called[:] = [inner]

    def outer(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(torch.ops.capture.calls(x * 2)) + 1

    call = compiled(outer)
    with counters.expect(num_graph_captures=4):  # of the outer one, at two sizes
        for size in (2, 3, 2):
            x = rows(size)
            torch.testing.assert_close(call(x), simple(x * 2) * 3 + 1)


def test_capture_from_an_op_is_refused() -> None:
    other = compiled(simple)

    def capture(x: torch.Tensor) -> torch.Tensor:
        piecework.capture(other, [2], x)
        return x * 3

    call = compiled(lambda x: ops.scale3(x) + 1, splitting_ops=[calling(capture)])
    with pytest.raises(CaptureError, match="can't be captured now: called from inside another captured call"):
        call(rows(2))
    piecework.capture(other, [2], rows(2))
    check(other, simple, rows(2))


def test_replaced_parameters_are_noticed_by_a_thread_that_an_op_waits_for() -> None:
    linear = nn.Linear(4, 4)
    inner = compiled(linear, {"input": 0}, splitting_ops=())
    inner(rows(2))

    def replace(x: torch.Tensor) -> torch.Tensor:
        linear.weight = nn.Parameter(torch.randn(4, 4))
        return in_thread(lambda: inner(x))

    call = compiled(lambda x: ops.scale3(x) + 1, splitting_ops=[calling(replace)])
    x = rows(2)
    torch.testing.assert_close(call(x), linear(x) + 1)
    check(inner, linear, rows(2))


# --- threads ---


def test_results_of_many_threads_are_each_their_own_and_ops_run_once_per_call() -> None:
    runs: list[int] = []
    call = compiled(simple, splitting_ops=[counting(runs)])
    call(rows(1))  # while something is traced, calls of other threads are answered by the original
    runs.clear()

    def work(_: int) -> None:
        kept = [(x, call(x)) for x in (rows(2 + i % 4) for i in range(40))]
        for x, result in kept:
            torch.testing.assert_close(result, simple(x))

    in_threads(4, work)
    assert len(runs) == 4 * 40


def test_calls_go_on_while_another_thread_releases() -> None:
    call = compiled(simple)
    stop = threading.Event()

    def work() -> None:
        with torch.no_grad():
            while not stop.is_set():
                check(call, simple, rows(3))

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        try:
            for _ in range(5):
                check(call, simple, rows(2))
                piecework.release(call)
        finally:
            stop.set()
        done.result()
    piecework.release(call)


def test_a_released_model_is_not_captured_by_a_call_that_had_begun() -> None:
    call = compiled(simple)
    call(rows(2))
    plans = plans_of(call)
    piecework.release(call)
    with counters.expect(num_graph_captures=0):
        function = plans.choose((rows(2), 2), plans.uncaptured)
    assert function is plans.uncaptured
    assert plans.captures not in plans.pool.users
    assert plans.pool.capturer.memory().pool_bytes == 0


def test_a_compile_context_holds_for_its_thread() -> None:
    call = compiled(simple, capture_sizes=None)
    with set_compile_context([2]), counters.expect(num_graph_captures=0):
        in_thread(lambda: call(rows(2)))
    with set_compile_context([2]), counters.expect(num_graph_captures=2):
        call(rows(2))
    with counters.expect(num_graph_captures=0, num_graph_replays=2):
        in_thread(lambda: check(call, simple, rows(2)))


# --- streams ---


def test_another_stream_waits_for_the_last_one() -> None:
    capturer = emulated()
    with capturing_by(capturer):
        call, other = compiled(simple), compiled(lambda x: x - 1)
        call(rows(2))
        capturer.waits.clear()
        with stream("side"):
            check(call, simple, rows(2))
            check(call, simple, rows(2))
            check_sizes(other, lambda x: x - 1, 2, 2)
        check(call, simple, rows(2))
    assert capturer.waits == [("side", "default"), ("side", "side"), ("default", "side")]


def test_a_capture_waits_for_the_stream_that_replays_the_same_memory() -> None:
    capturer = emulated()
    with capturing_by(capturer):
        call = compiled(simple)
        call(rows(2))
        capturer.waits.clear()
        with stream("side"):
            check(call, simple, rows(3))
    assert capturer.waits == [("side", "default")]


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_stream_that_somebody_records_gets_no_replay_and_no_capture(is_captured: bool) -> None:
    call = compiled(simple)
    if is_captured:
        call(rows(2))
    with stream("side", is_recorded=True), counters.expect(num_graph_captures=0, num_graph_replays=0):
        check(call, simple, rows(2))
        with pytest.raises(CaptureError, match="its stream is being recorded"):
            piecework.capture(call, [4], rows(2))
    assert "recorded" in reasons(call, 2)
    with counters.expect(num_graph_replays=2):
        check(call, simple, rows(2))


def test_ops_that_fail_leave_the_pool_usable() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        out = torch.empty_like(y)
        ops.checked(y, out)
        return out * 2

    call = compiled(reference, splitting_ops=OPS)
    for _ in range(2):
        check(call, reference, rows(2))
        with pytest.raises(ValueError, match="too big"):
            call(torch.full((2, 4), 1e7))
    assert not plans_of(call).pool.is_busy
    in_thread(lambda: check(call, reference, rows(2)))
