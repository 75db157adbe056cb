"""What the driver keeps for graphs, which no API tells."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch

__all__ = ["DriverMemory"]


class DriverMemory:
    """Counts by how much the free memory of a device shrank in sessions, less what torch took.

    An approximation: the driver takes memory in large steps, other processes may allocate meanwhile, and modules that
    are loaded during a session count too. The graphs of a session share what it took.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, float] = weakref.WeakKeyDictionary()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @property
    def num_bytes(self) -> int:
        """The sum over the graphs that still exist."""
        return round(sum(self._bytes.values()))

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """Let a graph have its share of what the session takes."""
        self._graphs.append(graph)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Count what is taken in the block for the graphs that are added in it."""
        before = self._taken()
        try:
            yield
        finally:
            taken = max(0, self._taken() - before)
            self._bytes.update({graph: taken / len(self._graphs) for graph in self._graphs})
            self._graphs.clear()

    def _taken(self) -> int:
        """Return what is in use besides torch's memory, but for a constant."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        # Five times as fast as torch.cuda.memory_reserved, which flattens all statistics.
        statistics = torch.cuda.memory_stats_as_nested_dict(self._device)
        return total_bytes - free_bytes - statistics["reserved_bytes"]["all"]["current"]
