"""Replay a new capture of one size step by step, each value beside that of an uncaptured call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from piecework.effects import line_of, op_name
from piecework.errors import CaptureError
from piecework.inputs import Key
from piecework.plans import Plans
from piecework.program import Action, CaptureTask, PieceAction
from piecework.recorder import Recorder, Recording
from piecework.split import PieceStep
from piecework.static_inputs import fill
from piecework.tools.verify.chains import Finding
from piecework.tools.verify.comparing import Tolerance, clone, first_difference
from piecework.tools.verify.uncaptured import Uncaptured


class NotingRecorder(Recorder):
    """Records a size, and notes for each step what it is called and where its values lie."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes: list[Note] = []

    def capture(self, graph: CaptureTask) -> None:
        """Record some actions as one graph, and note what comes out of it."""
        super().capture(graph)
        later = [self.writes(action) for action in graph.actions[1:]]
        written = set[int | None]().union(*later) if len(graph.actions) > 1 else set()
        nodes = [n for n in graph.outline.exports if written.isdisjoint(self.effects.storages[n])]
        places = [action.step for action in graph.pieces]
        self.notes.append(Note(graph.name, places, {node: self.values.bound(node) for node in nodes}))

    def bind(self, action: Action) -> None:
        """Have something run between the graphs, and note what it gives."""
        super().bind(action)
        if isinstance(action, PieceAction):
            name, nodes = action.step.name, action.step.outputs
        else:
            node = action.node
            name = f"{op_name(node) or node.target}{line_of(node)}"
            nodes = () if node in self.effects.identical or not node.users else (node,)
        self.notes.append(Note(name, [], {node: self.values.bound(node) for node in nodes}))

    def writes(self, action: Action) -> set[int | None]:
        """Return the storages that an action writes to."""
        if not isinstance(action, PieceAction):
            return set(self.effects.written[action.node])
        inputs = [action.step.inputs[position] for position in action.step.written]
        return {key for node in inputs if isinstance(node, Node) for key in self.effects.storages[node]}


@dataclass(frozen=True)
class Note:
    """One step of a recording."""

    name: str
    pieces: Sequence[PieceStep]
    """Those that a graph consists of; none for what runs between graphs."""
    values: Mapping[Node, Any]
    """What it gives, by aliases that hold no memory."""


@dataclass
class Replays:
    """Replays a new capture of one size step by step, and compares each value with that of an uncaptured call.

    Args:
        plans: of the model; what is captured here is no plan of it, and is gone afterwards.
        uncaptured: one uncaptured call.
        tolerance: for the values.
        rewind: puts all memory back, and the random numbers.
    """

    plans: Plans
    uncaptured: Uncaptured
    tolerance: Tolerance
    rewind: Callable[[], None]
    findings: list[Finding] = field(default_factory=list)
    num_graphs: int = 0

    def run(self) -> None:
        """Capture the size of the uncaptured call, and replay it with the same arguments.

        Raises:
            CaptureError: it can't be captured.
        """
        captures, pool, given = self.plans.captures, self.plans.pool, self.uncaptured.given
        key, tensors = self.plans.key_of(given), self.plans.by_position(given)
        with torch.no_grad(), pool.lock:
            if pool.is_busy or not pool.switch():
                raise CaptureError("verify can't capture now: another call is using the memory of captures")
            with captures.undoing(key), pool.being_busy():  # What is not kept is undone.
                other = self.other_rows(tensors)
                # What this leaves in the pool is not what is looked for: a graph that reads too early shows.
                recording, notes = self.record(key, other)
                with contextlib.suppress(Exception):  # An op may refuse rows in another order.
                    for step in recording.steps:
                        step()
                del recording, notes
                self.rewind()
                recording, notes = self.record(key, other)
                self.num_graphs = recording.num_graphs
                for index, memory in recording.inputs.items():
                    fill(memory, tensors[index])
                for step, note in zip(recording.steps, notes, strict=True):
                    step()
                    self.compare(note)
                    if self.findings:
                        break
                del recording, notes

    def record(self, key: Key, tensors: Mapping[int, torch.Tensor]) -> tuple[Recording, list[Note]]:
        """Capture a size, and note what each step gives."""
        captures = self.plans.captures
        with captures.session():
            recorder = captures.recorder(key, NotingRecorder)
            return recorder.record(tensors), recorder.notes

    def other_rows(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the arguments of a call with those that are copied in another order of rows: they are legal, too."""
        copied = {tensor.index for tensor in self.plans.statics.copied}
        return {i: tensor.flip(0) if i in copied and tensor.dim() else tensor for i, tensor in tensors.items()}

    def compare(self, note: Note) -> None:
        """Compare what a step gave, right after it, with what the same step gave uncaptured."""
        for node, value in note.values.items():
            expected = self.uncaptured.values.get(node)
            if expected is None:
                continue
            difference = first_difference(clone(value), expected, f"result {node.name}", self.tolerance)
            if difference is not None:
                kind = "capture" if note.pieces else "between graphs"
                self.findings.append(Finding(kind, note.name, difference, pieces=tuple(note.pieces)))
                return
