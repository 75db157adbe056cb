"""What became of a compiled model, as an object and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecework.api import forward_of
from piecework.build import Compiled
from piecework.compilers import CompiledUniquePiece
from piecework.config_checks import CompilationLevel
from piecework.dedupe import explain_difference


@dataclass(frozen=True)
class PieceReport:
    """One unique piece."""

    name: str
    key: str
    places: tuple[int, ...]
    """Positions among the pieces between cuts, from 0."""
    num_nodes: int
    compiler: str
    seconds: float
    differs: str | None
    """Why it is not the piece before it in this list that looks most like it; None for the first."""


@dataclass(frozen=True)
class Report:
    """What became of a model; ``str()`` gives it as text.

    Attributes:
        level: where it runs; None before the first call.
        num_pieces: pieces and splitting steps.
        num_capturable_pieces: pieces between splitting steps.
        pieces: the unique pieces.
        stage_seconds: trace, split, dedupe, compile.
        num_eager_calls: calls that the original forward answered, by reason.
        num_rebindings: how often replaced parameters were bound anew.
        num_calls_for_all_addresses: within so many calls a raw change of a parameter's storage is noticed.
        source: the generated code of one forward.
    """

    owner: str
    level: CompilationLevel | None
    num_pieces: int = 0
    num_capturable_pieces: int = 0
    pieces: tuple[PieceReport, ...] = ()
    stage_seconds: Mapping[str, float] = ()  # pyright: ignore[reportAssignmentType]
    num_eager_calls: Mapping[str, int] = ()  # pyright: ignore[reportAssignmentType]
    num_rebindings: int = 0
    num_calls_for_all_addresses: int = 0
    relations: tuple[str, ...] = ()
    source: str = ""

    @property
    def num_unique_pieces(self) -> int:
        """Return how many pieces were compiled for the general shape."""
        return len(self.pieces)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the report line by line."""
        if self.level is None:
            return [f"{self.owner}: not called yet"]
        lines = [f"{self.owner}: level {self.level.value} ({self.level.name})"]
        if self.stage_seconds:
            lines.append("  start-up: " + ", ".join(f"{stage} {s:.2f} s" for stage, s in self.stage_seconds.items()))
        if self.level is CompilationLevel.PIECEWISE and self.num_pieces:
            lines.append(
                f"  {_count(self.num_pieces, 'piece')}, {self.num_capturable_pieces} between splitting ops, "
                f"{self.num_unique_pieces} unique"
            )
            for piece in self.pieces:
                where = f"stands in {_count(len(piece.places), 'place')}, {piece.compiler}, {piece.seconds:.2f} s"
                differs = f"; {piece.differs}" if piece.differs else ""
                lines.append(f"    {piece.name}: {_count(piece.num_nodes, 'node')}, {where}{differs}")
            if (summary := self.why_so_many) is not None:
                lines.append(f"  {summary}")
        for relation in self.relations:
            lines.append(f"  holds for {relation}")
        for reason, count in dict(self.num_eager_calls).items():
            lines.append(f"  {_count(count, 'call')} answered by the original forward: {reason}")
        if self.num_rebindings:
            lines.append(f"  bound to replaced parameters {_count(self.num_rebindings, 'time')}")
        return lines

    @property
    def why_so_many(self) -> str | None:
        """Return in words why pieces that look alike are not the same; None where nothing is odd."""
        reasons = Counter(piece.differs for piece in self.pieces if piece.differs and "/" in piece.differs)
        alike = [piece for piece in self.pieces if piece.differs and "inputs and ops" not in piece.differs]
        if len(alike) < 2 or not reasons:
            return None
        return f"{self.num_capturable_pieces} pieces, {self.num_unique_pieces} unique: {reasons.most_common(1)[0][0]}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def report(model: Any) -> Report:
    """Return what became of a compiled model, function or decorated instance.

    Raises:
        ConfigError: it is none of these.
    """
    forward = forward_of(model, "report")
    level = forward.settings.level if forward.settings is not None else None
    compiled = forward.compiled
    if compiled is None:
        return Report(forward.owner, level, stage_seconds={}, num_eager_calls={})
    return _report(forward.owner, compiled)


def _report(owner: str, compiled: Compiled) -> Report:
    split = compiled.split
    return Report(
        owner=owner,
        level=compiled.level,
        num_pieces=split.num_pieces if split else 1,
        num_capturable_pieces=len(split.pieces) if split else 1,
        pieces=_piece_reports(compiled.unique),
        stage_seconds=dict(compiled.stage_seconds),
        num_eager_calls=dict(compiled.num_eager_calls),
        num_rebindings=compiled.state.num_rebindings,
        num_calls_for_all_addresses=compiled.state.num_calls_for_all_addresses,
        relations=tuple(relation.describe() for relation in compiled.trace.relations),
        source=f"{compiled.entry.source}\n{compiled.run.source}",
    )


def _piece_reports(unique: Sequence[CompiledUniquePiece]) -> tuple[PieceReport, ...]:
    reports: list[PieceReport] = []
    for index, one in enumerate(unique):
        form = one.unique.form
        earlier = [other.unique.form for other in unique[:index]]
        same_length = [other for other in earlier if len(other.rows) == len(form.rows)]
        nearest = (same_length or earlier or [None])[-1]
        reports.append(
            PieceReport(
                name=one.unique.piece.name,
                key=one.unique.piece.key,
                places=one.unique.places,
                num_nodes=sum(node.op not in ("placeholder", "output") for node in one.unique.piece.graph.graph.nodes),
                compiler=one.compiler,
                seconds=one.seconds,
                differs=explain_difference(nearest, form) if nearest is not None else None,
            )
        )
    return tuple(reports)
