"""Cases about threads and streams: calls from several at once, callers on side streams, ops that leave work behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import demo
import piecework
from piecework import SplittingOp, counters, testing
from piecework.api import forward_of
from piecework.testing.emulated import stream
from ways import CAPTURED_WAY, CUDA_WAYS, Way, check

CUDA_CAPTURED = [way for way in CUDA_WAYS if way.is_captured]


def attends(x: torch.Tensor) -> torch.Tensor:
    y, out = x * 2, torch.empty_like(x)
    demo.attn(y, x, out)
    return out + 1


def in_threads(num: int, work: Any) -> list[Any]:
    """Run ``work(index)`` in threads that begin together."""
    barrier = threading.Barrier(num)

    def run(index: int) -> Any:
        barrier.wait()
        with torch.no_grad():
            return work(index)

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(run, range(num)))


def num_wrong(call: Any, way: Way, seed: int, num_calls: int) -> int:
    generator, wrong = torch.Generator().manual_seed(seed), 0
    for i in range(num_calls):
        # Made on the CPU: while a device records, it refuses random numbers to all threads.
        x = torch.randn(1 + (seed + i) % 8, 6, generator=generator).to(way.device)
        wrong += not torch.allclose(call(x), attends(x), atol=1e-5)
    return wrong


# --- C63: more in test_capture_threads.py, where ops wait for threads ---


def test_c63_calls_of_a_cold_model_from_several_threads(way: Way) -> None:
    call = way.compile(attends, captures=[2, 4, 8])
    before = counters.snapshot()
    assert sum(in_threads(8, lambda seed: num_wrong(call, way, seed, 100))) == 0
    risen = {name: count - before[name] for name, count in counters.snapshot().items()}
    assert risen["num_graphs_seen"] == 1
    assert risen["num_graph_captures"] <= 3 * 2
    assert (risen["num_graph_captures"] > 0) is way.is_captured


def test_c63_calls_of_a_warm_model_while_one_thread_captures_a_new_size(way: Way) -> None:
    call = way.compile(attends, captures=[2, 4, 8, 64])
    for n in (2, 4, 8):
        check(call, attends, way.rand(n, 6))

    def work(seed: int) -> int:
        if seed == 7:
            x = torch.randn(64, 6).to(way.device)
            return int(not torch.allclose(call(x), attends(x), atol=1e-5))
        return num_wrong(call, way, seed, 100)

    with counters.expect(num_graphs_seen=0, num_graph_captures=2 * way.is_captured):
        assert sum(in_threads(8, work)) == 0


def test_c63_first_calls_of_several_models_at_once(way: Way) -> None:
    calls = [way.compile(attends, captures=[4]) for _ in range(3)]
    with counters.expect(num_graphs_seen=3, num_graph_captures=3 * 2 * way.is_captured):
        assert sum(in_threads(6, lambda seed: num_wrong(calls[seed % 3], way, seed, 10))) == 0


def test_c63_release_while_others_call(eager_way: Way) -> None:
    """With eager pieces: what is shared is the trace and the plans."""
    call = eager_way.compile(attends, captures=[2, 4, 8])

    def work(seed: int) -> int:
        if seed == 0:
            for _ in range(3):
                piecework.release(call)
            return 0
        return num_wrong(call, eager_way, seed, 20)

    assert sum(in_threads(4, work)) == 0


# --- C65 ---


@pytest.mark.cuda
@pytest.mark.parametrize("way", CUDA_CAPTURED, ids=str)
def test_c65_caller_works_on_a_side_stream(way: Way) -> None:
    with testing.plugins(load_installed=True):
        call = way.compile(attends, captures=[4])
        call(way.rand(4, 6))
        sides = torch.cuda.Stream(), torch.cuda.Stream()
        for i in range(20):
            for side in sides:
                with torch.cuda.stream(side):
                    torch.cuda._sleep(10**7)
                    result = call(torch.full((4, 6), float(i), device="cuda")) + 1
                torch.cuda.current_stream().wait_event(side.record_event())
                torch.testing.assert_close(result, attends(torch.full((4, 6), float(i), device="cuda")) + 1)
        with torch.cuda.stream(sides[0]):  # captured there
            check(way.compile(demo_layer, captures=[4]), demo_layer, way.rand(4, 6))


def demo_layer(x: torch.Tensor) -> torch.Tensor:
    return demo.scale3(x + 1) * 2


def test_c65_streams_that_use_one_model_are_ordered() -> None:
    """In emulation a stream is a name: the capturer notes who waits for whom. With eager pieces."""
    with testing.plugins(load_installed=True):
        call = CAPTURED_WAY.compile(attends, captures=[4])
        check(call, attends, torch.randn(4, 6))
        capturer = pool_of(call).capturer
        capturer.waits.clear()
        for name in ("s1", "s1", "s2", "s1"):
            with stream(name):
                check(call, attends, torch.randn(4, 6))
        assert [pair for pair in capturer.waits if pair[0] != pair[1]] == [
            *(("s1", "default"), ("s2", "s1"), ("s1", "s2"))
        ]


def pool_of(call: Any) -> Any:
    compiled = forward_of(call, "test").compiled
    assert compiled is not None and compiled.plans is not None
    return compiled.plans.pool


def test_c65_capture_under_a_side_stream_waits_for_the_last_user_of_the_pool() -> None:
    """Two models share the pool, so that the second's capture may write where the first replays."""
    with testing.plugins(load_installed=True):
        first, second = (CAPTURED_WAY.compile(model, captures=[4]) for model in (attends, demo_layer))
        check(first, attends, torch.randn(4, 6))
        capturer = pool_of(first).capturer
        capturer.waits.clear()
        with stream("side"):
            check(second, demo_layer, torch.randn(4, 6))
        assert ("side", "default") in capturer.waits


def test_c65_stream_that_somebody_records_gets_no_replay() -> None:
    with testing.plugins(load_installed=True):
        call = CAPTURED_WAY.compile(attends, captures=[4])
        check(call, attends, torch.randn(4, 6))
        with stream("recorded", is_recorded=True), counters.expect(num_graph_replays=0, num_graph_captures=0):
            check(call, attends, torch.randn(4, 6))


# --- C66 ---


def forks(buffer: torch.Tensor, sides: list[Any]) -> SplittingOp:
    """Return an op that leaves a copy of its input on a stream of its own."""

    def run(x: torch.Tensor) -> torch.Tensor:
        if not sides:
            sides.append(torch.cuda.Stream())
        sides[0].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(sides[0]):
            torch.cuda._sleep(5 * 10**7)
            buffer[: x.shape[0]].copy_(x)
        return x * 3

    return SplittingOp("demo::scale3", implementation=run)


@pytest.mark.cuda
@pytest.mark.parametrize("way", CUDA_CAPTURED, ids=str)
def test_c66_op_leaves_work_on_its_own_stream(way: Way) -> None:
    """What it reads there is the caller's: memory of a piece may be another's as soon as the op has returned."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        return (demo.scale3(x) + 1) * 3

    with testing.plugins(load_installed=True):
        buffer, sides = torch.zeros(8, 6, device="cuda"), []
        call = way.compile(layer, captures=[2, 4, 8], splitting_ops=[forks(buffer, sides)])
        for n in (8, 4, 2, 3, 8):
            x = way.rand(n, 6)
            torch.testing.assert_close(call(x), layer(x))
            torch.cuda.synchronize()
            torch.testing.assert_close(buffer[:n], x)


def leaves(buffer: torch.Tensor, threads: list[threading.Thread], go: threading.Event) -> SplittingOp:
    """Return an op that leaves a copy of its input to a thread, which is what a side stream is on a CPU."""

    def run(x: torch.Tensor) -> torch.Tensor:
        kept = x.clone()
        threads.append(threading.Thread(target=lambda: go.wait(20) and buffer[: len(kept)].copy_(kept)))
        threads[-1].start()
        return x * 3

    return SplittingOp("demo::scale3", implementation=run)


@pytest.mark.parametrize("pieces", ["eager", "inductor"])
def test_c66_work_left_behind_is_no_obstacle_to_the_next_capture(pieces: str) -> None:
    """All captures are made, and none runs the op: its work is left once per call."""
    with testing.plugins(load_installed=True):
        way = Way(3, pieces, is_captured=True)
        buffer, threads, go = torch.zeros(8, 6), [], threading.Event()
        call = way.compile(demo_layer, captures=[2, 4, 8], splitting_ops=[leaves(buffer, threads, go)])
        with counters.expect(num_graph_captures=6):
            for n in (8, 4, 2, 3, 8):
                x = way.rand(n, 6)
                torch.testing.assert_close(call(x), demo_layer(x))
        assert len(threads) == 5
        go.set()
        for thread in threads:
            thread.join(20)


def test_c66_capture_all_at_once_runs_no_op_that_leaves_work() -> None:
    with testing.plugins(load_installed=True):
        threads: list[threading.Thread] = []
        op = leaves(torch.zeros(8, 6), threads, threading.Event())
        call = CAPTURED_WAY.compile(demo_layer, splitting_ops=[op])
        piecework.capture(call, [8, 4, 2], (torch.randn(8, 6),))
        assert not threads


def test_c66_op_that_fails_with_work_left_behind_leaves_the_next_call_right() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("planned")
        return x * 3

    with testing.plugins(load_installed=True):
        op = SplittingOp("demo::scale3", implementation=run)
        call = CAPTURED_WAY.compile(demo_layer, captures=[2, 4], splitting_ops=[op])
        for n in (4, 2):
            with pytest.raises(ValueError, match="planned"):
                call(torch.full((n, 6), float("nan")))
            check(call, demo_layer, torch.randn(n, 6))
