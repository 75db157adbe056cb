"""How much memory captures take, and which sizes a budget leaves out."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from piecework.capturing import CaptureMemory
from piecework.inputs import Key

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedBytes:
    """What one size took from the device when it was captured."""

    num_rows: int
    pool_bytes: int
    driver_bytes: int


class Budget:
    """Keeps the captures of one model under ``max_capture_bytes``.

    All sizes share a pool, so that a size takes memory of its own only where it is larger than all
    before it, and what the driver keeps for its graphs.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.probes: list[CapturedBytes] = []
        """Sizes that were captured to see what they take, and dropped."""
        self.taken: dict[Key, CapturedBytes] = {}
        self.left_out: dict[Key, str] = {}

    @property
    def bytes_taken(self) -> int:
        """Return what all captures took so far."""
        return sum(one.pool_bytes + one.driver_bytes for one in self.taken.values())

    def why_left_out(self, key: Key) -> str | None:
        """Return why a size is not captured any more."""
        return self.left_out.get(key)

    def estimate(self, num_rows: int) -> int | None:
        """Return how many bytes a size would take, from those that were captured; None without any.

        Pool memory grows with the rows beyond the largest size so far; what the driver keeps does not.
        """
        known = [*self.taken.values()] or self.probes
        if not known:
            return None
        driver = sum(one.driver_bytes for one in known) / len(known)
        largest = max(one.num_rows for one in known)
        pool = sum(one.pool_bytes for one in known)
        return int(driver + pool * max(num_rows / largest - (1 if self.taken else 0), 0))

    def probe(self, num_rows: int, before: CaptureMemory, after: CaptureMemory) -> None:
        """Note what a capture took that is dropped again."""
        self.probes.append(_taken_between(num_rows, before, after))

    def allows(self, key: Key, num_rows: int, memory: CaptureMemory, owner: str) -> bool:
        """Whether a size is expected to fit, into the budget and onto the device; said once where it is not."""
        expected = self.estimate(num_rows)
        if expected is None:
            return True
        if self.limit is not None and self.bytes_taken + expected > self.limit:
            return self.over_limit(key, "with it, captures would take about", self.bytes_taken + expected, owner)
        if memory.free_bytes is not None and expected > memory.free_bytes:
            needed, free = format_apart(expected, memory.free_bytes)
            return self.leave_out(key, f"it would take about {needed}, and {free} are free", owner)
        return True

    def take(self, key: Key, num_rows: int, before: CaptureMemory, after: CaptureMemory, owner: str) -> bool:
        """Note what a size took; False where that is more than the budget, and the size is to be dropped."""
        taken = _taken_between(num_rows, before, after)
        total = self.bytes_taken + taken.pool_bytes + taken.driver_bytes
        if self.limit is not None and total > self.limit:
            return self.over_limit(key, "with it, captures take", total, owner)
        self.taken[key] = taken
        return True

    def over_limit(self, key: Key, what: str, total: int, owner: str) -> bool:
        """Say that a size is left out since captures would take more than they may; returns False."""
        assert self.limit is not None
        taken, limit = format_apart(total, self.limit)
        return self.leave_out(key, f"{what} {taken}; max_capture_bytes is {limit}", owner)

    def leave_out(self, key: Key, why: str, owner: str) -> bool:
        """Say that a size is left out; returns False."""
        self.left_out[key] = f"left out for its memory: {why}"
        logger.warning("%s: size %s is not captured: %s", owner, key, why)
        return False


def _taken_between(num_rows: int, before: CaptureMemory, after: CaptureMemory) -> CapturedBytes:
    grown = (after.pool_bytes - before.pool_bytes, after.driver_bytes - before.driver_bytes)
    return CapturedBytes(num_rows, *(max(growth, 0) for growth in grown))


def format_bytes(count: float) -> str:
    """Return a number of bytes in the unit that suits it, such as ``1.5 MB``."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB"):
        count /= 1000
        if count < 999.95:  # which would show as 1000.0
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} GB"


def format_apart(count: int, other: int) -> tuple[str, str]:
    """Return two different numbers of bytes so that they can be told apart: exactly, where rounding would hide it."""
    rounded = format_bytes(count), format_bytes(other)
    return rounded if rounded[0] != rounded[1] else (f"{count:,} B", f"{other:,} B")
