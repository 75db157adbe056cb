"""Check every contender against eager, then measure those that are right, in turns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from piecework.tools.bench.captured import split_into_parts
from piecework.tools.bench.contenders import Bench, Contender, SkipContender
from piecework.tools.bench.timing import Spread, Timed, device_times, host_times, medians

__all__ = ["Measured", "Run", "measure"]

logger = logging.getLogger(__name__)

NUM_CHECKS = 3
"""Fresh inputs that each contender must answer as eager does."""
ROUNDING = 4.0
"""How many times further from the exact result than eager a contender may be."""
LEAST_DISTANCE = 1e-4


@dataclass
class Measured:
    """What became of a contender.

    Attributes:
        status: ``"timed"``; ``"wrong"``: differs from eager; ``"skipped"``: can't run here; ``"failed"``.
        note: the reason, or what is to be known of it.
        distance: from the exact result, relative; the largest of the checks.
        host_us: to submit one forward.
        device_us: of one forward, where the device takes longer than the host.
        ratio: of the host time to that of the bare loop.
    """

    name: str
    status: str
    note: str = ""
    distance: float | None = None
    allowed_distance: float | None = None
    num_calls_per_batch: int | None = None
    host_us: Spread | None = None
    device_us: Spread | None = None
    ratio: float | None = None


@dataclass
class Run:
    """The figures of one number of layers."""

    num_layers: int
    contenders: list[Measured] = field(default_factory=list)
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """By contender: select, copy, replay, splitting ops, finish, rest and whole, in microseconds."""

    def host(self, name: str) -> float | None:
        """Return the median host time of a contender."""
        found = self.find(name)
        return found.host_us.median if found and found.host_us else None

    def device(self, name: str) -> float | None:
        """Return the median device time of a contender."""
        found = self.find(name)
        return found.device_us.median if found and found.device_us else None

    def find(self, name: str) -> Measured | None:
        return next((measured for measured in self.contenders if measured.name == name), None)


def measure(
    bench: Bench,
    builders: Mapping[str, Callable[[Bench], Contender]],
    *,
    num_rounds: int,
    is_checked: bool = True,
    on_built: Callable[[Measured], None] = lambda measured: None,
) -> Run:
    """Build, check and time contenders.

    Args:
        bench: what they are built from.
        builders: by name, in the order of the table.
        num_rounds: batches of each.
        is_checked: compare with eager; not where the pieces do nothing.
        on_built: called with each contender before it is timed.
    """
    run = Run(bench.case.num_layers)
    contenders: dict[str, Contender] = {}
    with torch.no_grad():
        for name, builder in builders.items():
            measured, contender = _build(bench, name, builder, is_checked=is_checked)
            run.contenders.append(measured)
            if contender is not None:
                contenders[name] = contender
            on_built(measured)
        _time(bench, run, contenders, num_rounds)
    _add_ratios(run)
    return run


def _build(
    bench: Bench, name: str, builder: Callable[[Bench], Contender], *, is_checked: bool
) -> tuple[Measured, Contender | None]:
    try:
        contender = builder(bench)
        measured = Measured(name, "timed", contender.note, num_calls_per_batch=contender.timed.num_calls)
        if is_checked:
            _check(bench, contender, measured)
    except SkipContender as reason:
        return Measured(name, "skipped", str(reason)), None
    except Exception as error:  # One that fails, a peer for example, must not keep the others from being measured.
        logger.debug("contender %s failed", name, exc_info=True)
        first_line = str(error).strip().partition("\n")[0]
        return Measured(name, "failed", f"{type(error).__name__}: {first_line}"), None
    return measured, contender if measured.status == "timed" else None


def _check(bench: Bench, contender: Contender, measured: Measured) -> None:
    """Compare with the exact result, which eager itself misses by its rounding."""
    distances, allowed = [], []
    for _ in range(NUM_CHECKS):
        ids = bench.new_ids()
        exact = bench.reference(ids)
        allowed.append(max(LEAST_DISTANCE, ROUNDING * _distance(bench.eager_model(ids), exact)))
        distances.append(_distance(contender.run(ids), exact))
    measured.distance, measured.allowed_distance = max(distances), min(allowed)
    if not all(distance <= measured.allowed_distance for distance in distances):  # NaN is none of these.
        measured.status = "wrong"
        measured.note = f"differs from eager: {measured.distance:.1e}, allowed {measured.allowed_distance:.1e}"


def _distance(given: torch.Tensor, exact: torch.Tensor) -> float:
    return float((given.double() - exact).norm() / exact.norm())


def _time(bench: Bench, run: Run, contenders: Mapping[str, Contender], num_rounds: int) -> None:
    timed = {name: contender.timed for name, contender in contenders.items()}
    parts: dict[str, dict[str, Timed]] = {}
    for name in contenders:
        if name in _CAPTURED:
            is_full, is_static = _CAPTURED[name]
            parts[name] = bench.captured(is_full=is_full, is_static=is_static).parts()
    variants = {f"{name}: {part}": one for name, by_part in parts.items() for part, one in by_part.items()}
    drain: Callable[[], Any] = torch.cuda.synchronize if bench.case.device.type == "cuda" else lambda: None
    host = host_times(timed, num_rounds=num_rounds, drain=drain)
    of_variants = medians(host_times(variants, num_rounds=num_rounds, drain=drain))
    for name, by_part in parts.items():
        run.parts[name] = split_into_parts({part: of_variants[f"{name}: {part}"] for part in by_part})
    device: dict[str, Spread] = {}
    if bench.case.device.type == "cuda":
        of_graphs = {name: timed[name] for name, contender in contenders.items() if contender.is_one_graph}
        device = device_times(of_graphs, num_rounds=max(3, num_rounds // 4))
    for measured in run.contenders:
        measured.host_us, measured.device_us = host.get(measured.name), device.get(measured.name)


_CAPTURED = {
    "piecewise": (False, False),
    "piecewise-static": (False, True),
    "full": (True, False),
    "full-static": (True, True),
}


def _add_ratios(run: Run) -> None:
    loop = run.host("piecewise-static-loop") or run.host("piecewise-loop")
    for measured in run.contenders:
        if loop and measured.host_us is not None:
            measured.ratio = measured.host_us.median / loop
