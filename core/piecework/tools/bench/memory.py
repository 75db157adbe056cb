"""What many captured sizes take beside the largest alone, and how long capturing them takes beside the bare calls."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import piecework
from piecework.api import forward_of
from piecework.build import Compiled
from piecework.plans import Plans
from piecework.tools.bench.contenders import Bench, SkipContender

__all__ = ["MemoryFigures", "measure_memory"]

NUM_PASSES = 7
"""The first of each does things for the first time, warm-ups too; of those that capture again, the fastest counts."""


@dataclass
class MemoryFigures:
    """What capturing some sizes takes.

    Attributes:
        largest_pool_bytes: of the pool, with the largest size alone.
        pool_bytes: with all sizes.
        driver_bytes: kept by the driver for all graphs, as far as it can be told.
        num_graphs: of all sizes together.
        capture_s: ``piecework.capture`` of all sizes, pass by pass.
        calls_s: so much of that was spent in the calls of ``Capturer.capture``.
        bare_s: the calls of ``Capturer.capture`` alone, with the same pieces in the same order.
        context_s: ``with torch.cuda.graph(...):`` in their place, as one captures by hand.
        raw_s: ``capture_begin``, run, ``capture_end`` of ``torch.cuda.CUDAGraph``, of which that consists.
        skipped: why nothing was measured.
    """

    sizes: Sequence[int]
    num_layers: int
    largest_pool_bytes: int = 0
    pool_bytes: int = 0
    driver_bytes: int = 0
    num_graphs: int = 0
    capture_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)
    context_s: list[float] = field(default_factory=list)
    raw_s: list[float] = field(default_factory=list)
    skipped: str | None = None


def measure_memory(bench: Bench, sizes: Sequence[int]) -> MemoryFigures:
    """Capture the largest size alone, then all sizes several times, each time from an empty pool.

    Args:
        bench: its case has as many rows as the largest size.
        sizes: in any order.
    """
    figures = MemoryFigures(sorted(sizes), bench.case.num_layers)
    try:
        assert bench.pool is not None
    except SkipContender as reason:
        figures.skipped = str(reason)
        return figures
    ids = bench.new_ids()
    with torch.no_grad(), bench.plugins.in_use():
        config = bench.config(capture_sizes=())
        model = piecework.compile(bench.piecework_model, config=config, dynamic_arg_dims={"ids": 0})
        for size in sizes:
            model(ids[:size])
        piecework.capture(model, [max(sizes)], ids, show_progress=False)
        compiled = forward_of(model, "bench").compiled
        assert compiled is not None and compiled.plans is not None
        plans = compiled.plans
        figures.largest_pool_bytes = plans.pool.capturer.memory().pool_bytes
        plans.give_back()
        for _ in range(NUM_PASSES):
            with _timing_calls(plans) as timing:
                start = time.perf_counter()
                piecework.capture(model, sizes, ids, show_progress=False)
                figures.capture_s.append(time.perf_counter() - start)
            figures.calls_s.append(timing.seconds)
            memory = plans.pool.capturer.memory()
            figures.pool_bytes, figures.driver_bytes = memory.pool_bytes, memory.driver_bytes
            figures.num_graphs = sum(plan.recording.num_graphs for plan in plans.plans.values())
            plans.give_back()
            figures.bare_s.append(_seconds_of_captures(compiled, plans, sizes, ids, _by_capturer(plans)))
            plans.pool.capturer.release()
            if bench.case.device.type == "cuda":
                figures.context_s.append(_seconds_of_captures(compiled, plans, sizes, ids, _by_context()))
                figures.raw_s.append(_seconds_of_captures(compiled, plans, sizes, ids, _by_hand()))
    return figures


class _Timing:
    """Stands for a capturer, and adds up the time that its captures take."""

    def __init__(self, capturer: Any) -> None:
        self.capturer = capturer
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.capturer, name)

    def capture(self, fn: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return self.capturer.capture(fn)
        finally:
            self.seconds += time.perf_counter() - start


@contextlib.contextmanager
def _timing_calls(plans: Plans) -> Iterator[_Timing]:
    pool: Any = plans.pool
    pool.capturer = timing = _Timing(pool.capturer)
    try:
        yield timing
    finally:
        pool.capturer = timing.capturer


Capturing = Callable[[Callable[[], Any]], tuple[Any, Any]]
"""Captures one run; returns what must be kept, and what the run returned."""


def _by_capturer(plans: Plans) -> Capturing:
    def capture(fn: Callable[[], Any]) -> tuple[Any, Any]:
        captured = plans.pool.capturer.capture(fn)
        return captured.replay, captured.outputs

    return capture


def _by_context() -> Capturing:
    pool = torch.cuda.graph_pool_handle()

    def capture(fn: Callable[[], Any]) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, torch.cuda.current_stream(), capture_error_mode="thread_local"):
            outputs = fn()
        return graph, outputs

    return capture


def _by_hand() -> Capturing:
    pool = torch.cuda.graph_pool_handle()

    def capture(fn: Callable[[], Any]) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool, capture_error_mode="thread_local")
        outputs = fn()
        graph.capture_end()
        return graph, outputs

    return capture


def _seconds_of_captures(
    compiled: Compiled, plans: Plans, sizes: Sequence[int], ids: torch.Tensor, capture: Capturing
) -> float:
    """Return how long capturing every piece of every size takes, without what hands tensors on between them."""
    seconds = 0.0
    kept: list[Any] = []

    def capturing(run: Callable[..., Any]) -> Callable[..., Any]:
        def piece(*args: Any) -> Any:
            nonlocal seconds
            start = time.perf_counter()
            graph, outputs = capture(lambda: tuple(run(*args)))
            seconds += time.perf_counter() - start
            kept.append(graph)
            return outputs

        return piece

    plain: Any = compiled.run.function
    space = dict(plain.__globals__)
    assert compiled.split is not None
    names = {step.name for step in compiled.split.pieces}
    space |= {name: capturing(space[name]) for name in names}
    space |= {name: _do_nothing for name, value in space.items() if name.startswith("f") and callable(value)}
    function = types.FunctionType(plain.__code__, space)
    with plans.pool.lock, plans.pool.capturer.session():
        for size in sorted(sizes, reverse=True):
            function(ids[:size], size)
    return seconds


def _do_nothing(*_: Any) -> None:
    """Stands for a splitting op: no capture runs them."""
