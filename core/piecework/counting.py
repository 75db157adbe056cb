"""What has been traced, split and compiled in this process, as plain integers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields


@dataclass
class Counters:
    """Process-wide counts; each only ever grows, until ``piecework.reset()``."""

    num_graphs_seen: int = 0
    """Graphs traced for levels 2 and 3, or handed to ``backend="piecework"``."""
    num_pieces_seen: int = 0
    """Pieces and splitting steps of all graphs."""
    num_capturable_pieces_seen: int = 0
    """Pieces between splitting steps."""
    num_unique_pieces: int = 0
    """Pieces that differ from all others of their graph."""
    num_piece_compilations: int = 0
    """Calls of a piece compiler that gave a compiled piece: unique pieces times sizes."""
    num_graph_captures: int = 0
    """Graphs recorded: for each captured size, one for all neighbouring pieces and ops that can be."""
    num_graph_replays: int = 0
    """Graphs replayed by calls."""

    def snapshot(self) -> dict[str, int]:
        """Return all counts by name, to be kept."""
        return asdict(self)

    def reset(self) -> None:
        """Set all counts to zero."""
        for count in fields(self):
            setattr(self, count.name, 0)

    @contextmanager
    def expect(self, **deltas: int) -> Iterator[None]:
        """Check that the block raises the named counts by exactly these numbers.

        Not checked when the block itself raises, so that its error is not hidden.

        Raises:
            AttributeError: a name is not a counter.
            AssertionError: a count rose by another number; the message lists all that differ.
        """
        before = {name: getattr(self, name) for name in deltas}
        yield
        risen = {name: getattr(self, name) - start for name, start in before.items()}
        wrong = [
            f"{name} rose by {risen[name]}, expected {deltas[name]}" for name in deltas if risen[name] != deltas[name]
        ]
        assert not wrong, "; ".join(wrong)


counters = Counters()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=counters.reset)
