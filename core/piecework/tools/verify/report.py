"""What ``verify`` found, as an object and as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from piecework.config_checks import CompilationLevel, Size
from piecework.pieces import EAGER
from piecework.tools.verify.comparing import Difference

MEANINGS = {
    "declaration": "an op does something else than it declares, which traces and compilers rely on",
    "implementation": "the function that a SplittingOp names does something else than the op",
    "rows": "an op that is declared rows_independent lets the last row change the rows before it: padding would, too",
    "piece": "the compiled code of a piece departs from its ops run one by one, on the same inputs",
    "original": "the original gives something else when it runs again on the same inputs (numbers that torch did not "
    "draw, a clock, state that is no parameter or buffer); nothing can be compared with it",
    "trace": "the trace departs from the original, op by op: something that it assumed is no longer so",
    "refused": "the original runs, and the compiled model refuses this call: it can't be traced or compiled, or it is "
    "another call than was traced; no step was compared",
    "capture": "a captured graph departs from the same code uncaptured, after steps that agree: it reads or writes "
    "memory elsewhere (a stale address), or what it does is not recorded",
    "between graphs": "what runs between two graphs departs from the same in an uncaptured call",
    "call": "each step is right by itself, and so is a new capture; the answer to the call is not: it comes from a "
    "capture that is stale, from padded rows, or from another path than was compared",
    "sum": "no step departs by itself; small differences of all steps add up to more than the tolerance",
}
"""What each kind of departure says."""
BEFORE_CAPTURES = ("declaration", "implementation", "rows", "piece")
"""Kinds that are found while pieces and ops are looked at, where it ends with the first."""


@dataclass(frozen=True)
class Departure:
    """The first thing that is wrong at one size.

    Attributes:
        kind: one of ``MEANINGS``.
        place: the piece, op or graph.
        difference: how its result departs.
        op: the first op that departs, with the user's line; None where none can be told.
        op_difference: how that one's result departs.
        script: shows it by itself, and exits with 1 where it does; None where it takes the whole model.
        missing: what has to be added to the script by hand first.
        script_error: why no script could be written, where one was tried.
        compiler: the plugin that compiled the piece; None where that is not what departs.
        assumption: what the trace assumed and is no longer so, where the trace departs.
        moved: parameters and buffers whose memory is elsewhere than at the capture, where the answer is what departs.
    """

    kind: str
    place: str
    difference: Difference
    op: str | None = None
    op_difference: Difference | None = None
    script: Path | None = None
    missing: tuple[str, ...] = ()
    script_error: str | None = None
    compiler: str | None = None
    assumption: str | None = None
    moved: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """Return it line by line."""
        found = [f"{self.place}: {str(self.difference).strip()}"]
        if self.op is not None and self.op_difference is not None:
            found.append(f"  first op: {self.op}: {str(self.op_difference).strip()}")
        found.append(f"  {self.meaning}")
        if self.assumption is not None:
            found.append(f"  {self.assumption}")
        if self.script is not None:
            first = f" (first {' and '.join(self.missing)})" if self.missing else ""
            found.append(f"  python {self.script} shows it{first}")
        if self.script_error is not None:
            found.append(f"  no script could be written (`folder` says where): {self.script_error}")
        return found

    @property
    def meaning(self) -> str:
        """Return what it says of the model."""
        by = "" if self.compiler in (None, EAGER) else f" (compiled by plugin {self.compiler!r})"
        if not self.moved:
            return f"{MEANINGS[self.kind]}{by}"
        names, verb = ", ".join(self.moved), "lies" if len(self.moved) == 1 else "lie"
        return (
            f"each step is right by itself, and so is a new capture; captures that are stale answer the call: {names} "
            f"{verb} elsewhere in memory than at the capture; write to it in place (copy_), or compile with "
            "check_parameters='always'"
        )


@dataclass(frozen=True)
class SizeVerification:
    """One size.

    Attributes:
        size: as the user wrote it; None for the inputs as they were given.
        answered_by: what answered the call.
        departures: what is wrong; nothing, or the first thing.
        num_pieces: compiled pieces that were compared op by op.
        num_ops: splitting ops that were looked at.
        num_graphs: captured graphs that were replayed one by one.
        random_pieces: pieces whose compiled code draws other random numbers than their ops one by one. They can't be
            compared, nor can their captures and the answer to the call.
        largest: the largest difference between the answer and eager's, whatever the tolerance; None where they are
            equal bit by bit.
        is_error: the call raised, so that there is no answer to compare.
    """

    size: Size | None
    answered_by: str
    departures: tuple[Departure, ...] = ()
    num_pieces: int = 0
    num_ops: int = 0
    num_graphs: int = 0
    random_pieces: tuple[str, ...] = ()
    largest: Difference | None = None
    is_error: bool = False

    @property
    def what_departs(self) -> list[tuple[str, str, str | None, tuple[str, ...]]]:
        """Return what is the same of a departure at several sizes."""
        return [(one.kind, one.place, one.op, one.moved) for one in self.departures]

    @property
    def looked_at(self) -> str:
        """Return in words what was compared."""
        pieces, ops = _number(self.num_pieces, "piece"), _number(self.num_ops, "splitting op")
        if any(one.kind in BEFORE_CAPTURES for one in self.departures):
            return f"looked at {pieces} and {ops} before it stopped"
        return f"{pieces}, {ops}, {_number(self.num_graphs, 'graph')} compared"

    @property
    def apart(self) -> str:
        """Return in words how far the answer is from eager; nothing where there is none."""
        if self.is_error:
            return ""
        if self.largest is None:
            return "; answer and eager: equal"
        apart = self.largest.largest
        return f"; answer and eager: {str(self.largest) if apart is None else f'apart by {apart:.3g}'}"


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


@dataclass(frozen=True)
class Verification:
    """What ``verify`` compared and found; ``str()`` gives it as text."""

    owner: str
    level: CompilationLevel | None
    sizes: tuple[SizeVerification, ...] = field(default=())

    @property
    def is_right(self) -> bool:
        """Whether nothing departs at any size."""
        return not self.departures

    @property
    def departures(self) -> tuple[Departure, ...]:
        """Return what departs, size by size."""
        return tuple(departure for one in self.sizes for departure in one.departures)

    def __str__(self) -> str:
        level = "no level yet" if self.level is None else f"level {self.level.value}"
        lines = [f"{self.owner} at {level}: {'right' if self.is_right else 'WRONG'}"]
        for one in self.sizes:
            size = "the inputs as given" if one.size is None else f"size {one.size}"
            lines.append(f"{size}: answered by {one.answered_by}; {one.looked_at}{one.apart}")
            if one.random_pieces:
                names = ", ".join(one.random_pieces)
                lines.append(f"  not compared: {names} (other random numbers), captures, and the answer to the call")
            same = [other for other in self.sizes if one.departures and other.what_departs == one.what_departs]
            if len(same) > 1 and same[-1] is one:  # Once for all sizes that depart there, as at the first of them.
                lines.append(f"sizes {', '.join(str(other.size) for other in same)}:")
            if not same or same[-1] is one:
                lines += [f"  {line}" for departure in (same or [one])[0].departures for line in departure.lines]
        return "\n".join(lines)
