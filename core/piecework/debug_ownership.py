"""Debug mode, while a size is recorded: who owns which memory and when.

``Ownership`` notes for each step what it reads, writes and gives, and where that lies, and puts a checked step in its
place; ``debug_replays.py`` is what those look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from piecework.debug_findings import CaptureFinding
from piecework.debug_replays import CheckedStep, Place, PlanChecks
from piecework.effects import line_of, op_name, tensors_in
from piecework.fingerprints import has_bits
from piecework.program import Action, BindTask, CaptureTask, EvaluateTask, PieceAction, Task
from piecework.schedule import OpStep, Unit
from piecework.tensor_checks import overlap
from piecework.values import Values


class Ownership:
    """What is known of the memory of a size that is being recorded.

    Args:
        values: those of the recording that begins.
        bound: parameters and buffers.
        names: how the user calls these.
    """

    def __init__(self, values: Values, bound: Mapping[Node, torch.Tensor], names: Mapping[Node, str]) -> None:
        self.values = values
        self.plugin = values.pool.plugin
        self.effects, self.schedule = values.effects, values.schedule
        self.bound, self.names = bound, names
        written: set[int | None] = set().union(*self.effects.written.values())
        addresses = [
            (names.get(node, node.name), tensor, tensor.data_ptr())
            for node, tensor in bound.items()
            if has_bits(tensor)
        ]
        changed = [tensor for node, tensor in bound.items() if written.intersection(self.effects.storages[node])]
        constants = [
            (name, tensor) for name, tensor, _ in addresses if not any(overlap(tensor, other) for other in changed)
        ]
        self.checks = PlanChecks(addresses, constants, list(bound.values()))
        self.copied = frozenset(tensor.node for tensor in values.statics.copied)
        self.seen: set[Any] = set()
        self.live: list[Place] = []
        self.steps: list[CheckedStep] = []
        self.owners: list[list[Place]] = []
        """For each step, what is alive while it runs."""

    def enter(self) -> None:
        """Note what exists before the first step."""
        self.live = list(self.places_of_new_values(None))

    def note(self, task: Task, steps: list[Callable[[], Any]]) -> None:
        """Note what a task did, before what dies with it is let go; put a checked step in the place of its step.

        Raises:
            CaptureError: it gives a value memory that another one needs.
        """
        name, units = _described(task)
        given = list(self.places_of_new_values(name))
        self.check_ownership(given)
        dying = () if isinstance(task, EvaluateTask) else task.dying
        if not isinstance(task, EvaluateTask):
            steps[-1] = self.checked(name, units, steps[-1], given, task)
        self.live = [place for place in (*self.live, *given) if place.node not in dying]
        if not isinstance(task, EvaluateTask):
            step = self.steps[-1]
            died = [place for place in self.checks.pooled if place.node in dying]
            step.dying = [one for one in died if not any(overlap(one.tensor, other.tensor) for other in self.live)]

    def close(self) -> PlanChecks:
        """Return what replays are checked by, when every step is there."""
        for step, owners in zip(self.steps, self.owners, strict=True):
            step.unowned = [
                place
                for place in self.checks.pooled
                if not any(overlap(place.tensor, other.tensor) for other in owners)
            ]
        self.steps[0].is_first = self.steps[-1].is_last = True
        return self.checks

    def on_same_memory(
        self, name: str, run: Callable[..., Any], inputs: Sequence[torch.Tensor], nodes: Sequence[Node]
    ) -> Callable[..., Any]:
        """Return work to record that refuses other memory than that of its inputs."""
        addresses = [(self.name_of(node), t.data_ptr()) for t, node in zip(inputs, nodes, strict=True)]
        plugin = self.plugin  # The work is kept with its graph, and must not keep this.

        def checked(*given: torch.Tensor) -> Any:
            for (of, address), tensor in zip(addresses, given, strict=True):
                if tensor.numel() and tensor.data_ptr() != address:
                    raise CaptureFinding(
                        f"the capturer of plugin {plugin!r} runs {name} on a copy of {of}, so that its graph "
                        "reads what that held once; Recordable.run takes its inputs, or tensors that share their memory"
                    )
            return run(*given)

        return checked

    def places_of_new_values(self, step: str | None) -> Iterator[Place]:
        env, alias = self.values.env, self.values.pool.capturer.alias
        for node in [node for node in env if node not in self.seen]:
            self.seen.add(node)
            storages = frozenset(self.effects.storages.get(node, ()))
            for tensor in tensors_in(env[node]):
                if step is None:
                    yield Place(node, self.name_of(node), None, tensor, storages, False)
                    continue
                aliased = alias(tensor)
                place = Place(node, self.name_of(node), step, aliased, storages, aliased is not tensor)
                if place.is_pooled and has_bits(aliased):
                    self.checks.pooled.append(place)
                yield place

    def name_of(self, node: Node) -> str:
        if node in self.names:
            return self.names[node]
        given = (one for one in self.values.statics.tensors.values() if one.node is node)
        return next((f"argument {one.path}" for one in given), f"{node.name}{line_of(node)}")

    def check_ownership(self, given: Sequence[Place]) -> None:
        for index, place in enumerate(given):
            for other in (*self.live, *given[:index]):
                if overlap(place.tensor, other.tensor) and not place.storages & other.storages:
                    origin = f"of {other.step}" if other.step is not None else "from outside"
                    raise CaptureFinding(
                        f"{place.step} gives {place.name} memory that {other.name} {origin} still needs: plugin "
                        f"{self.plugin!r}, which captures, must not give a block to two values that live at a time, "
                        "nor compiled code return one tensor twice"
                    )

    def checked(
        self, name: str, units: Sequence[Unit], run: Callable[[], Any], given: Sequence[Place], task: Task
    ) -> CheckedStep:
        uses = [used for unit in units for used in self.schedule.uses(unit)]
        bases = {base for used in uses for base in self.schedule.bases(used)}
        written: set[int | None] = set().union(*map(self.schedule.writes, units))
        read = [place for place in self.live if place.node in bases]
        changed = [place for place in self.live if place.storages & written]
        changed += [
            place
            for place in self.live
            if place not in changed and any(overlap(place.tensor, c.tensor) for c in changed)
        ]
        kept = [
            place
            for place in self.live
            if place not in changed
            and place.node not in self.bound
            and has_bits(place.tensor)
            and (place.is_pooled or place in read or place.node in self.copied)
        ]
        step = CheckedStep(
            *(self.checks, name, run, [p for p in read if _may_be_nan(p)], [p for p in given if self.is_made(p)]),
            *(kept, [*changed, *given], []),
            is_repeatable=isinstance(task, CaptureTask) and not written,
        )
        self.steps.append(step)
        self.owners.append([*self.live, *given])
        return step

    def is_made(self, place: Place) -> bool:
        """Whether a value that may be NaN was computed, and is not memory for something else to write to."""
        return _may_be_nan(place) and not self.effects.is_allocation(place.node)


def _described(task: Task) -> tuple[str, list[Unit]]:
    """Return what a task is called in messages, and the units that it does."""
    if isinstance(task, EvaluateTask):
        return f"{op_name(task.node) or task.node.name}{line_of(task.node)}", [OpStep(task.node, None)]
    actions: Sequence[Action] = task.actions if isinstance(task, CaptureTask) else (task.action,)
    units = [a.step if isinstance(a, PieceAction) else OpStep(a.node, a.op) for a in actions]
    if isinstance(task, BindTask) and not isinstance(task.action, PieceAction):
        node = task.action.node
        return f"{op_name(node) or node.target}{line_of(node)}", units
    if isinstance(task, CaptureTask):
        return task.name, units
    assert isinstance(task.action, PieceAction)
    return task.action.step.name, units


def _may_be_nan(place: Place) -> bool:
    return place.tensor.is_floating_point() or place.tensor.is_complex()
