"""Debug mode, captured calls: who owns which memory of a plan and when, and whether each replay keeps to that.

While a size is recorded, ``PlanChecks`` notes for each step what it reads, writes and gives, and where that lies.
At a replay each ``CheckedStep`` looks at addresses, at memory that the step must leave alone, and at NaN that come
from memory nobody should read: all that is dead, or not written yet, is filled with poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from piecework.debug_findings import CaptureFinding, StaleFinding
from piecework.effects import line_of, op_name, tensors_in
from piecework.fingerprints import bits_of, fingerprints, has_bits
from piecework.poison import poison_elements
from piecework.program import Action, BindTask, CaptureTask, EvaluateTask, PieceAction, Task
from piecework.schedule import OpStep, Unit
from piecework.static_inputs import base_of
from piecework.tensor_checks import overlap
from piecework.values import Values


@dataclass(frozen=True, eq=False)
class Place:
    """One tensor of a plan, and where it lies.

    Attributes:
        name: what to call it in messages.
        step: what gives it; None for what exists before the first step.
        is_pooled: it lies in memory that other values have at other times.
    """

    node: Node
    name: str
    step: str | None
    tensor: torch.Tensor
    storages: frozenset[int | None]
    is_pooled: bool

    @property
    def has_nan(self) -> torch.Tensor:
        """Return whether an element is NaN, as a tensor."""
        tensor = self.tensor.float() if self.tensor.element_size() == 1 else self.tensor
        return tensor.isnan().any()


@dataclass(eq=False)
class CheckedStep:
    """One step of a plan, and what is looked at before and after it.

    Attributes:
        name: what it runs.
        run: the step itself.
        read: what it reads.
        given: what it gives.
        kept: what it must not change.
        changed: what it writes to, or gives.
        dying: memory that nobody needs after it.
        is_repeatable: running it once more does no harm.
        unowned: memory of the plan that nobody owns when it runs.
    """

    plan: PlanChecks
    name: str
    run: Callable[[], Any]
    read: Sequence[Place]
    given: Sequence[Place]
    kept: Sequence[Place]
    changed: Sequence[Place]
    dying: Sequence[Place]
    is_repeatable: bool
    unowned: Sequence[Place] = ()
    is_first: bool = False
    is_last: bool = False

    def __call__(self) -> None:
        """Called at every replay."""
        plan = self.plan
        if self.is_first:
            plan.begin()
        plan.check_addresses(self.name)
        plan.learn(self.kept)
        self.run()
        plan.compare(self.kept, self.name)
        plan.forget(self.changed)
        if self.is_repeatable and self.unowned:
            self.check_origin_of_nan()
        for place in self.dying:
            poison_elements(place.tensor)
        if self.is_last:
            plan.end()

    def check_origin_of_nan(self) -> None:
        """Run again with zeros in the place of poison, where the step gave NaN and read none.

        Raises:
            CaptureError: then it gives none, so that it reads what it must not.
        """
        if not _any_nan(self.given) or _any_nan(self.read):
            return
        for place in self.unowned:
            bits_of(base_of(place.tensor)).zero_()
        self.run()
        is_real = _any_nan(self.given)
        for place in self.unowned:
            poison_elements(place.tensor)
        if not is_real:
            names = ", ".join(place.name for place in self.given)
            raise CaptureFinding(
                f"{self.name} reads memory that nobody owns when it runs: {names} would be made from a value after its "
                "last use, or before it was written. Compiled code must read its inputs only, and a graph what it was "
                "recorded with"
            )
        self.run()


class PlanChecks:
    """What is known of the memory of one recorded size.

    Args:
        values: those of the recording that begins; not kept after its end.
        bound: parameters and buffers.
        names: how the user calls these.
    """

    def __init__(self, values: Values, bound: Mapping[Node, torch.Tensor], names: Mapping[Node, str]) -> None:
        self.values = values
        self.plugin = values.pool.plugin
        self.effects, self.schedule = values.effects, values.schedule
        self.bound_tensors = list(bound.values())
        written: set[int | None] = set().union(*self.effects.written.values())
        self.addresses = [
            (names.get(node, node.name), tensor, tensor.data_ptr())
            for node, tensor in bound.items()
            if has_bits(tensor)
        ]
        changed = [tensor for node, tensor in bound.items() if written.intersection(self.effects.storages[node])]
        self.constants = [
            (name, tensor) for name, tensor, _ in self.addresses if not any(overlap(tensor, other) for other in changed)
        ]
        self.bound, self.names = bound, names
        self.copied = frozenset(tensor.node for tensor in values.statics.copied)
        self.seen: set[Any] = set()
        self.live: list[Place] = []
        self.pooled: list[Place] = []
        self.steps: list[CheckedStep] = []
        self.owners: list[list[Place]] = []
        """For each step, what is alive while it runs."""
        self.known: dict[Place, int] = {}
        """Fingerprints of what did not change since they were taken."""
        self.constants_before: list[int] = []

    # While a size is recorded.

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
            died = [place for place in self.pooled if place.node in dying]
            step.dying = [one for one in died if not any(overlap(one.tensor, other.tensor) for other in self.live)]

    def close(self) -> None:
        """Let go of what only the recording needs."""
        for step, owners in zip(self.steps, self.owners, strict=True):
            step.unowned = [
                place for place in self.pooled if not any(overlap(place.tensor, other.tensor) for other in owners)
            ]
        self.steps[0].is_first = self.steps[-1].is_last = True
        # Steps refer to this, and not the other way round: graphs are to be gone as soon as their plan is dropped.
        del self.values, self.steps, self.live, self.owners, self.seen, self.bound

    def on_same_memory(
        self, name: str, run: Callable[..., Any], inputs: Sequence[torch.Tensor], nodes: Sequence[Node]
    ) -> Callable[..., Any]:
        """Return work to record that refuses other memory than that of its inputs."""
        addresses = [(self.name_of(node), t.data_ptr()) for t, node in zip(inputs, nodes, strict=True)]

        def checked(*given: torch.Tensor) -> Any:
            for (of, address), tensor in zip(addresses, given, strict=True):
                if tensor.numel() and tensor.data_ptr() != address:
                    raise CaptureFinding(
                        f"the capturer of plugin {self.plugin!r} runs {name} on a copy of {of}, so that its graph "
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
                    self.pooled.append(place)
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
            *(self, name, run, [p for p in read if _may_be_nan(p)], [p for p in given if self.is_made(p)]),
            *(kept, [*changed, *given], []),
            is_repeatable=isinstance(task, CaptureTask) and not written,
        )
        self.steps.append(step)
        self.owners.append([*self.live, *given])
        return step

    def is_made(self, place: Place) -> bool:
        """Whether a value that may be NaN was computed, and is not memory for something else to write to."""
        return _may_be_nan(place) and not self.effects.is_allocation(place.node)

    # At every replay.

    def begin(self) -> None:
        """Forget what the last call left, and poison it."""
        self.known.clear()
        for place in self.pooled:
            poison_elements(place.tensor)
        self.constants_before = fingerprints([tensor for _, tensor in self.constants])

    def check_addresses(self, step: str) -> None:
        """Check that parameters and buffers are where the graphs read them.

        Raises:
            StaleCaptureError: one has moved.
        """
        for name, tensor, address in self.addresses:
            if tensor.data_ptr() != address:
                raise StaleFinding(
                    f"{name} is at another address than when this size was captured, and {step} reads the old one; it "
                    "moved while the call ran, by an op in it or another thread: write into it in place instead"
                )

    def learn(self, places: Sequence[Place]) -> None:
        """Take the fingerprints that are not known."""
        unknown = [place for place in places if place not in self.known]
        self.known.update(zip(unknown, fingerprints([place.tensor for place in unknown]), strict=True))

    def compare(self, places: Sequence[Place], step: str) -> None:
        """Check that a step left memory alone.

        Raises:
            CaptureError: it did not.
        """
        for place, now in zip(places, fingerprints([place.tensor for place in places]), strict=True):
            if now != self.known[place]:
                raise CaptureFinding(
                    f"{step} wrote to {place.name}, which it must leave as it is: an op in it writes without declaring "
                    "it, a kernel writes beyond its result, or its graph has the memory of another value"
                )

    def forget(self, places: Sequence[Place]) -> None:
        """Drop the fingerprints of what was written to."""
        for place in places:
            self.known.pop(place, None)

    def end(self) -> None:
        """Check that parameters and buffers that the graph does not write to are as they were.

        Raises:
            CaptureError: one is not.
        """
        after = fingerprints([tensor for _, tensor in self.constants])
        for (name, _), old, new in zip(self.constants, self.constants_before, after, strict=True):
            if old != new:
                raise CaptureFinding(
                    f"a call changed {name}, which the model only reads: an op writes to it without declaring it, a "
                    "kernel writes beyond its result, or another thread loads weights meanwhile"
                )


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


def _any_nan(places: Sequence[Place]) -> bool:
    return bool(places) and bool(torch.stack([place.has_nan for place in places]).any())
