"""Measure calls in turns: host time while the device is kept from filling its queue, and device time by events."""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Spread", "Timed", "device_times", "host_times", "medians"]

NUM_LAUNCHES_IN_FLIGHT = 400
"""A batch gives the device at most about so many launches; its queue holds about a thousand, then launching blocks."""
MAX_CALLS = 20
NUM_WARM_UPS = 3
"""What the contender before it left in the caches of the processor is not a contender's own doing."""
NUM_DEVICE_CALLS = 20
"""Back-to-back calls between two events."""


@dataclass(frozen=True)
class Timed:
    """What is called, and how many launches one call makes; None: unknown, so that one call is a batch."""

    call: Callable[[], Any]
    num_launches: int | None = None

    @property
    def num_calls(self) -> int:
        """Return how many calls make up a batch."""
        if self.num_launches is None:
            return 1
        return max(1, min(MAX_CALLS, NUM_LAUNCHES_IN_FLIGHT // max(1, self.num_launches)))


@dataclass(frozen=True)
class Spread:
    """Microseconds: the median and the quartiles."""

    median: float
    low: float
    high: float


def host_times(timed: Mapping[str, Timed], *, num_rounds: int, drain: Callable[[], Any]) -> dict[str, Spread]:
    """Return what submitting one call takes: batches in turns, in another order each round, drained in between.

    Args:
        timed: by name.
        num_rounds: batches of each.
        drain: waits for the device.
    """
    times: dict[str, list[float]] = {name: [] for name in timed}
    with _undisturbed():
        for name, call, num_calls in _turns(timed, num_rounds):
            for _ in range(NUM_WARM_UPS):
                call()
            drain()
            start = time.perf_counter()
            for _ in range(num_calls):
                call()
            times[name].append((time.perf_counter() - start) / num_calls * 1e6)
            drain()
    return {name: _spread(values) for name, values in times.items()}


def device_times(timed: Mapping[str, Timed], *, num_rounds: int) -> dict[str, Spread]:
    """Return what one call takes on the current CUDA device, of those that submit faster than the device works."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with _undisturbed():
        for name, call, _ in _turns(timed, num_rounds):
            for _ in range(NUM_WARM_UPS):  # The device is busy with these until the first that counts is submitted.
                call()
            start.record()
            for _ in range(NUM_DEVICE_CALLS):
                call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / NUM_DEVICE_CALLS * 1e3)
    return {name: _spread(values) for name, values in times.items()}


def medians(times: Mapping[str, Spread]) -> dict[str, float]:
    """Return the medians alone."""
    return {name: spread.median for name, spread in times.items()}


def _turns(timed: Mapping[str, Timed], num_rounds: int) -> Iterator[tuple[str, Callable[[], Any], int]]:
    order, shuffler = list(timed.items()), random.Random(0)
    for _ in range(num_rounds):
        shuffler.shuffle(order)
        for name, one in order:
            yield name, one.call, one.num_calls


def _spread(values: list[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Collect garbage before, and none meanwhile."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
