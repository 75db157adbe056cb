"""Record one size of a split graph: what can be captured as graphs, the ops between as bound calls.

While recording, a tensor is held until the last step that needs it has been recorded; then its memory
may serve later steps, and all of it serves the other sizes. Bound calls refer to memory by aliases,
which do not hold it. Nothing is read by a step before this same size's steps have written it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from piecework.bridge import bind
from piecework.errors import CaptureError
from piecework.inputs import Numbers
from piecework.pool import Pool
from piecework.program import Action, CaptureTask, EvaluateTask, Task
from piecework.refusals import Refusals
from piecework.schedule import Schedule
from piecework.segment import Segment
from piecework.static_inputs import StaticInputs, UnknownSizeError, fill
from piecework.values import Values

if TYPE_CHECKING:
    from piecework.debug import Debug
    from piecework.debug_replays import PlanChecks


@dataclass
class Recording:
    """One captured size."""

    steps: list[Callable[[], Any]]
    """To be called in this order, without arguments."""
    num_graphs: int
    inputs: dict[int, torch.Tensor]
    """Static memory of the copied inputs, by position among the tensor arguments."""
    held: dict[int, int]
    """Addresses of the inputs that are read where the caller has them."""
    outputs: dict[Node, torch.Tensor]
    """What the results are made from; these do not hold their memory."""
    bridge_bytes: int = 0
    """Memory for results that come from outside of graphs."""
    names: list[str] = field(default_factory=list)
    """What each step runs, for notes on exceptions."""
    checks: PlanChecks | None = None
    """In debug mode, what the steps look at."""


class Recorder:
    """Records one size.

    Args:
        program: what is to be done.
        schedule: the steps of the graph in order.
        bound: the parameters and buffers.
        pool: where to record; its lock is held.
        statics: memory of the inputs.
        refusals: what stays out of graphs, for messages.
        numbers: the value of each symbol.
        results: nodes that the caller's results are made from.
        warm: keys of pieces that ran at this size before, and need no warm-up; those that get one are added.
        debug: puts checked steps in the places of the steps.
    """

    def __init__(
        self,
        program: Sequence[Task],
        schedule: Schedule,
        bound: Mapping[Node, torch.Tensor],
        pool: Pool,
        statics: StaticInputs,
        refusals: Refusals,
        *,
        numbers: Numbers,
        results: Sequence[Node],
        warm: set[str],
        debug: Debug | None = None,
    ) -> None:
        self.program, self.effects, self.bound = program, schedule.effects, bound
        self.statics, self.refusals = statics, refusals
        self.results, self.warm = results, warm
        self.values = Values(schedule, statics, pool, numbers)
        self.recording = Recording([], 0, {}, {}, {})
        self.ownership = debug.ownership(self.values, bound) if debug is not None else None

    def record(self, given: Mapping[int, torch.Tensor]) -> Recording:
        """Record all steps, in ``recording_session``; no op runs, and nothing of the model or the caller is written to.

        Args:
            given: the tensor arguments of a call, by position; those that are copied may have other sizes.

        Raises:
            CaptureError: the device refuses something, or lacks the memory. Nothing stays behind.
        """
        try:
            self.enter(given)
            if self.ownership is not None:
                self.ownership.enter()
            self.record_steps()
            if self.ownership is not None:
                self.recording.checks = self.ownership.close()
            self.recording.outputs = {node: self.values.bound(node) for node in self.results}
        except UnknownSizeError as error:
            raise CaptureError(f"{error}, so that its memory can't be set aside") from error
        except torch.OutOfMemoryError as error:
            raise CaptureError(f"the device has no memory for it: {error}") from error
        finally:
            self.values.clear()
            self.ownership = None
            recording, self.recording = self.recording, Recording([], 0, {}, {}, {})
        return recording

    def enter(self, given: Mapping[int, torch.Tensor]) -> None:
        """Set aside the memory of the inputs, filled with what the call passes."""
        env = self.values.env
        env.update(self.bound)
        for tensor in self.statics.held:
            # Without what the caller may still do to the tensor itself, such as `cache.data = other`.
            env[tensor.node] = given[tensor.index].detach()
            self.recording.held[tensor.index] = given[tensor.index].data_ptr()
        for tensor in self.statics.copied:
            memory = self.statics.memory(tensor, self.values.numbers)
            fill(memory, given[tensor.index])
            env[tensor.node] = self.recording.inputs[tensor.index] = memory

    def record_steps(self) -> None:
        """Record neighbours that can be captured as one graph each, and bind what stands between.

        What nothing after a task needs is let go, so that its memory can be used again.
        """
        for task in self.program:
            if isinstance(task, EvaluateTask):
                self.evaluate(task.node)
            elif isinstance(task, CaptureTask):
                self.capture(task)
            else:
                self.bind(task.action)
            if self.ownership is not None:
                self.ownership.note(task, self.recording.steps)
            if not isinstance(task, EvaluateTask):
                self.values.drop(task.dying)
        if not self.recording.num_graphs:
            raise CaptureError("no piece of it can be captured" + "".join(f"; {w}" for w in self.refusals.lines()))

    def evaluate(self, node: Node) -> None:
        """Do once what costs no kernel: allocate, unpack, look at sizes."""
        values = self.values
        if self.effects.is_allocation(node):
            values.env[node] = values.memory_for(self.effects.values[node])
        elif node not in self.effects.identical:
            values.env[node] = values.value(node, values.env)

    def capture(self, graph: CaptureTask) -> None:
        """Record some actions as one graph."""
        segment = Segment(self.values, graph)
        for action in graph.pieces:
            if action.key not in self.warm:
                segment.warm_up(action)
                self.warm.add(action.key)
        captured = segment.capture(self.ownership)
        self.recording.steps.append(captured.replay)
        self.recording.names.append(graph.words)
        self.recording.num_graphs += 1
        self.values.env.update(zip(graph.outline.exports, captured.outputs, strict=True))

    def bind(self, action: Action) -> None:
        """Have something run between the graphs."""
        bound = bind(action, self.values)
        self.values.env.update(bound.results)
        self.recording.steps.append(bound.step)
        self.recording.names.append(action.words)
        self.recording.bridge_bytes += bound.num_bytes


@contextlib.contextmanager
def recording_session(pool: Pool) -> Iterator[None]:
    """Return a context for any number of recordings: a session of the capturer, ordinary modes of torch.

    Random numbers that warm-ups draw are put back. No casts of weights are kept: autocast frees its cache when the
    caller leaves it.
    """
    device = pool.device
    devices = [] if device.type == "cpu" else [device.index]
    is_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"),
            pool.capturer.session(),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(is_cached)
