"""What the project promises about these figures, and whether they keep it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from piecework.tools.bench.measure import Run
from piecework.tools.bench.memory import MemoryFigures

__all__ = ["Bound", "bounds_of_dispatch", "bounds_of_memory", "bounds_of_run"]

MOST_OF_STITCHED = {32: 0.7, 80: 0.5}
"""By number of layers: the largest ratio to the stitched reference."""


@dataclass(frozen=True)
class Bound:
    """One promise.

    Attributes:
        what: which figure.
        value: measured; None: it was not.
        limit: what it may be at most.
    """

    what: str
    num_layers: int
    value: float | None
    limit: float | None
    unit: Literal["us", "times", ""] = "us"

    @property
    def state(self) -> str:
        """Return whether it is kept."""
        if self.value is None or self.limit is None:
            return "not measured"
        return "met" if self.value <= self.limit else "missed"


def bounds_of_run(run: Run) -> Iterator[Bound]:
    """Yield what is promised about host and device times."""
    yield from _of_pieces(run)
    yield _host(run, "uncaptured: torch-compile", "uncaptured", "torch-compile")
    yield _host(run, "uncaptured: torch-compile-varied", "uncaptured", "torch-compile-varied")
    yield _host(run, "full-static: manual-graph + 10 us", "full-static", "manual-graph", more=10)
    yield _host(run, "full: manual-graph + 30 us", "full", "manual-graph", more=30)
    yield _host(run, "full-static: reduce-overhead", "full-static", "reduce-overhead")
    yield _device(run, "full-static: 1.01 x manual-graph", "full-static", "manual-graph", 1.01)
    yield _device(run, "full-static: reduce-overhead", "full-static", "reduce-overhead")


def bounds_of_dispatch(run: Run) -> Iterator[Bound]:
    """Yield what is promised about calls whose pieces do nothing."""
    yield from _of_pieces(run)
    yield _host(run, "uncaptured: torch-compile-nothing", "uncaptured", "torch-compile-nothing")
    yield _host(run, "uncaptured: straight-line + 4 us", "uncaptured", "straight-line", more=4)


def _of_pieces(run: Run) -> Iterator[Bound]:
    static, layers = "piecewise-static", run.num_layers
    yield _host(run, f"{static}: 1.03 x its bare loop + 3 us", static, f"{static}-loop", 1.03, more=3)
    yield _host(run, "piecewise: 1.03 x its bare loop + 25 us", "piecewise", "piecewise-loop", 1.03, more=25)
    if layers in MOST_OF_STITCHED:
        mine, peer = run.host(static), run.host("stitched")
        ratio = mine / peer if mine and peer else None
        yield Bound(f"host, {static}: ratio to stitched", layers, ratio, MOST_OF_STITCHED[layers], "times")


def _host(run: Run, what: str, name: str, peer: str, factor: float = 1.0, *, more: float = 0.0) -> Bound:
    limit = run.host(peer)
    return Bound(f"host, {what}", run.num_layers, run.host(name), None if limit is None else factor * limit + more)


def _device(run: Run, what: str, name: str, peer: str, factor: float = 1.0) -> Bound:
    limit = run.device(peer)
    return Bound(f"device, {what}", run.num_layers, run.device(name), None if limit is None else factor * limit)


def bounds_of_memory(memory: MemoryFigures) -> Iterator[Bound]:
    """Yield what is promised about memory and the time of captures."""
    all_bytes, largest = memory.pool_bytes, memory.largest_pool_bytes
    ratio = all_bytes / largest if all_bytes and largest else None
    what = f"pool of {len(memory.sizes)} sizes: ratio to the largest alone"
    yield Bound(what, memory.num_layers, ratio, 1.12, "times")
    peers = {
        "torch.cuda.graph of the same pieces": memory.context_s,
        "the same calls, one after the other": memory.bare_s,
    }
    for peer, passes in peers.items():
        seconds = min(memory.capture_s) / min(passes) if memory.capture_s and passes else None
        what = f"capture of {len(memory.sizes)} sizes again: ratio to {peer}"
        yield Bound(what, memory.num_layers, seconds, 1.3, "times")
