"""What became of a compiled model, as an object and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecework.api import forward_of
from piecework.budget import format_bytes
from piecework.build import Compiled
from piecework.compilers import CompiledUniquePiece
from piecework.config_checks import CompilationLevel
from piecework.custom_op import CustomOp
from piecework.custom_op_calls import by_op_of_process
from piecework.custom_op_choice import Choice
from piecework.dedupe import explain_difference
from piecework.forward import Forward
from piecework.plan import Plan
from piecework.plans import Plans


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
class SizeReport:
    """One captured size."""

    size: int | tuple[int, ...]
    num_graphs: int
    num_calls: int
    """Calls of exactly this size; of earlier captures of it, too."""
    num_padded_calls: int
    """Calls of fewer rows that were padded up to it."""
    num_padding_rows: int
    """Rows that these calls computed for nothing."""
    seconds: float
    """Of its capture."""
    pool_bytes: int
    """By how much the pool grew."""
    driver_bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """What captures hold.

    Attributes:
        pool_bytes: memory of the device in the pool, which all models of the process share.
        driver_bytes: kept by the driver for the graphs of all models, as far as it can be told.
        static_input_bytes: of this model's inputs that calls are copied into, at the largest size.
        bridge_bytes: of results of ops and of uncaptured pieces that graphs read, at the largest size.
        max_capture_bytes: the budget.
    """

    pool_bytes: int
    driver_bytes: int
    static_input_bytes: int
    bridge_bytes: int
    max_capture_bytes: int | None


@dataclass(frozen=True)
class CustomOpReport:
    """What ran the custom ops of one class, where more than one thing did: one of these for each."""

    op_name: str
    class_name: str
    device: str
    implementation: str
    """``"forward_native"``, another method of the op, or the name that a plugin gives its implementation."""
    plugin: str | None
    """Name, distribution and version of the plugin that brought it; None for the op's own methods."""
    is_on: bool
    why: str
    """Who decided that it is on or off: a level, a plugin or a setting."""
    skipped: Mapping[str, str]
    """Candidates before it, and why each was not chosen."""
    num_places: int
    """Places of the trace, or ops that run untraced."""
    num_outside: int = 0
    """Untraced calls that the native body answered, since they were outside of the limits."""

    def lines(self) -> list[str]:
        """Return the report line by line."""
        state = f"{'on' if self.is_on else 'off'}: {self.why}"
        by = self.implementation + (f" of {self.plugin}" if self.plugin is not None else "")
        where = _count(self.num_places, "place")
        lines = [f"  custom op {self.op_name} ({self.class_name}) on {self.device}: {by}, {where}; {state}"]
        lines += [f"    not {name}: {reason}" for name, reason in self.skipped.items()]
        if self.num_outside:
            lines.append(f"    {_count(self.num_outside, 'call')} outside of its limits ran by forward_native")
        return lines


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
        why_eager: why nothing is compiled, and the original forward answers every call.
        num_rebindings: how often replaced parameters were bound anew.
        sizes: the captured sizes, the largest first.
        num_uncaptured_calls: by size and by the reason why no plan answered.
        num_recaptures: how often a size was captured again, since what it read moved.
        uncaptured_pieces: pieces that run between the graphs, and why.
        capturer: the plugin that records graphs; None where there is none.
        memory: what captures hold; None where nothing can be captured.
        dims_not_padded: the named dims along which calls are not padded, as far as that was asked, and why.
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
    why_eager: str | None = None
    num_rebindings: int = 0
    num_calls_for_all_addresses: int = 0
    relations: tuple[str, ...] = ()
    source: str = ""
    sizes: tuple[SizeReport, ...] = ()
    num_uncaptured_calls: Mapping[Any, Mapping[str, int]] = ()  # pyright: ignore[reportAssignmentType]
    num_recaptures: int = 0
    uncaptured_pieces: Mapping[str, str] = ()  # pyright: ignore[reportAssignmentType]
    capturer: str | None = None
    memory: MemoryReport | None = None
    dims_not_padded: Mapping[str, str] = ()  # pyright: ignore[reportAssignmentType]
    custom_ops: tuple[CustomOpReport, ...] = ()

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
        if self.why_eager is not None:
            lines.append(f"  runs eagerly: {self.why_eager}")
        if self.stage_seconds:
            lines.append("  start-up: " + ", ".join(f"{stage} {s:.2f} s" for stage, s in self.stage_seconds.items()))
        if self.level is CompilationLevel.PIECEWISE and self.num_pieces:
            num_cuts = self.num_pieces - self.num_capturable_pieces
            lines.append(
                f"  {_count(self.num_capturable_pieces, 'piece')}, {self.num_unique_pieces} unique, "
                f"and {_count(num_cuts, 'splitting step')}"
            )
            for piece in self.pieces:
                where = f"stands in {_count(len(piece.places), 'place')}, {piece.compiler}, {piece.seconds:.2f} s"
                differs = f"; {piece.differs}" if piece.differs else ""
                lines.append(f"    {piece.name}: {_count(piece.num_nodes, 'node')}, {where}{differs}")
            if (summary := self.why_so_many) is not None:
                lines.append(f"  {summary}")
        lines += [line for op in self.custom_ops for line in op.lines()]
        lines += self.capture_lines()
        for relation in self.relations:
            lines.append(f"  holds for {relation}")
        for reason, count in dict(self.num_eager_calls).items():
            lines.append(f"  {_count(count, 'call')} answered by the original forward: {reason}")
        if self.num_rebindings:
            lines.append(f"  bound to replaced parameters {_count(self.num_rebindings, 'time')}")
        return lines

    def capture_lines(self) -> list[str]:
        """Return what is said of captures."""
        lines: list[str] = []
        if self.level is CompilationLevel.PIECEWISE and self.num_pieces and self.memory is None:
            lines.append('  nothing is captured: no plugin records graphs of its pieces, or capturer="none" is set')
        if self.memory is not None:
            memory = self.memory
            budget = f", budget {format_bytes(memory.max_capture_bytes)}" if memory.max_capture_bytes else ""
            lines.append(
                f"  captured by {self.capturer}: {_count(len(self.sizes), 'size')}; "
                f"pool {format_bytes(memory.pool_bytes)}, "
                f"driver {format_bytes(memory.driver_bytes)}, static inputs {format_bytes(memory.static_input_bytes)}, "
                f"bridges {format_bytes(memory.bridge_bytes)}{budget}"
            )
        for size in self.sizes:
            padded = f", {size.num_padded_calls} padded with {_count(size.num_padding_rows, 'row')}"
            lines.append(
                f"    size {size.size}: {_count(size.num_graphs, 'graph')}, {_count(size.num_calls, 'call')}"
                f"{padded if size.num_padded_calls else ''}, captured in {size.seconds:.2f} s"
            )
        if self.num_recaptures:
            lines.append(f"  captured again {_count(self.num_recaptures, 'time')}, since what was read had moved")
        for piece, why in dict(self.uncaptured_pieces).items():
            lines.append(f"  {piece} runs uncaptured: {why}")
        for dim, why in dict(self.dims_not_padded).items():
            lines.append(f"  {dim} is not padded: {why}")
        for size, reasons in dict(self.num_uncaptured_calls).items():
            for why, count in reasons.items():
                lines.append(f"  size {size}: {_count(count, 'call')} ran uncaptured: {why}")
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
    level, compiled = forward.level, forward.compiled
    if compiled is None:
        made = Report(forward.owner, level, stage_seconds={}, num_eager_calls={}, why_eager=forward.why_eager)
        return replace(made, custom_ops=_custom_ops(forward))
    made = replace(_report(forward.owner, compiled), custom_ops=_custom_ops(forward))
    return replace(made, **_captures(compiled.plans)) if compiled.plans is not None else made


def _custom_ops(forward: Forward) -> tuple[CustomOpReport, ...]:
    """Return what ran the custom ops of a model; at level 0, whose choices may be those of the process."""
    choices = forward.custom_ops
    if choices is None:
        return ()
    goes_by_process = forward.level is CompilationLevel.NO_COMPILATION and forward.config is None
    by_op = by_op_of_process() if goes_by_process else choices.by_op
    ops = list(by_op)
    if isinstance(forward.target, torch.nn.Module):
        ops = [module for module in forward.target.modules() if isinstance(module, CustomOp)]
    untraced = [by_op[op] for op in ops if op in by_op]
    places = choices.traced + Counter(one.choice for one in untraced)
    outside: Counter[Choice] = Counter()
    for one in untraced:
        outside[one.choice] += one.num_outside
    ordered = sorted(places, key=lambda choice: (choice.op_name, choice.op_class.__name__, -places[choice]))
    return tuple(_custom_op(choice, places[choice], outside[choice]) for choice in ordered)


def _custom_op(choice: Choice, num_places: int, num_outside: int) -> CustomOpReport:
    return CustomOpReport(
        *(choice.op_name, choice.op_class.__name__, str(choice.device), choice.title),
        plugin=None if choice.origin is None else str(choice.origin),
        is_on=choice.verdict.is_on,
        why=choice.verdict.why,
        skipped=dict(choice.skipped),
        num_places=num_places,
        num_outside=num_outside,
    )


def _captures(plans: Plans) -> dict[str, Any]:
    """Return the fields of a report that are about captures."""
    with plans.pool.lock:
        memory = plans.pool.memory()
        num_rows = plans.inputs.sizes.num_rows
        largest_first = sorted(plans.plans.values(), key=lambda plan: num_rows(plan.key), reverse=True)
        bridges = [plan.recording.bridge_bytes for plan in largest_first]
        static = sum(buffer.nbytes for buffer in plans.statics.buffers.values())
        return {
            "sizes": tuple(_size_report(plans, plan) for plan in largest_first),
            "num_uncaptured_calls": {key: dict(reasons) for key, reasons in plans.num_uncaptured.items() if reasons},
            "num_recaptures": plans.num_recaptures,
            "uncaptured_pieces": dict(plans.captures.refusals.by_piece),
            "capturer": plans.pool.plugin,
            "memory": MemoryReport(
                *(memory.pool_bytes, memory.driver_bytes, static, max(bridges, default=0)),
                plans.config.max_capture_bytes,
            ),
            "dims_not_padded": {dim: why for dim, why in plans.padding.by_dim.items() if why is not None},
        }


def _size_report(plans: Plans, plan: Plan) -> SizeReport:
    calls = {key: variant.num_calls for key, variant in plan.variants.items()}
    for (size, key), count in plans.num_earlier_calls.items():
        if size == plan.key:
            calls[key] = calls.get(key, 0) + count
    padded = {key: count for key, count in calls.items() if key != plan.key}
    num_rows = plans.inputs.sizes.num_rows
    taken = plans.captures.budget.taken[plan.key]
    return SizeReport(
        size=plan.key,
        num_graphs=plan.recording.num_graphs,
        num_calls=calls.get(plan.key, 0),
        num_padded_calls=sum(padded.values()),
        num_padding_rows=sum(count * (num_rows(plan.key) - num_rows(key)) for key, count in padded.items()),
        seconds=plan.seconds,
        pool_bytes=taken.pool_bytes,
        driver_bytes=taken.driver_bytes,
    )


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
                compiler=one.run.compiler,
                seconds=one.seconds,
                differs=explain_difference(nearest, form) if nearest is not None else None,
            )
        )
    return tuple(reports)
