"""Debug mode, captured calls: whether each replay keeps to what was noted when its size was recorded.

Each ``CheckedStep`` looks at addresses, at memory that the step must leave alone, and at NaN that come from memory
nobody should read: all that is dead, or not written yet, is filled with poison. ``debug_ownership.py`` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from piecework.debug_findings import CaptureFinding, StaleFinding
from piecework.fingerprints import bits_of, fingerprints
from piecework.poison import poison_elements
from piecework.static_inputs import base_of


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
    """What replays of one recorded size keep to.

    Steps refer to this, and not the other way round: graphs are to be gone as soon as their plan is dropped.

    Args:
        addresses: names, tensors and addresses of parameters and buffers.
        constants: those among them that the graph does not write to, by name.
        bound_tensors: all parameters and buffers.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, torch.Tensor, int]],
        constants: Sequence[tuple[str, torch.Tensor]],
        bound_tensors: Sequence[torch.Tensor],
    ) -> None:
        self.addresses, self.constants, self.bound_tensors = addresses, constants, bound_tensors
        self.pooled: list[Place] = []
        """Memory that one value has after the other; filled while the size is recorded."""
        self.known: dict[Place, int] = {}
        """Fingerprints of what did not change since they were taken."""
        self.constants_before: list[int] = []

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


def _any_nan(places: Sequence[Place]) -> bool:
    return bool(places) and bool(torch.stack([place.has_nan for place in places]).any())
