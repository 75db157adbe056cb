"""Record one size of a split graph: what can be captured as graphs, the ops between as bound calls.

While recording, a tensor is held until the last step that needs it has been recorded; then its memory
may serve later steps, and all of it serves the other sizes. Bound calls refer to memory by aliases,
which do not hold it. Nothing is read by a step before this same size's steps have written it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from piecework.bridge import bind
from piecework.errors import CaptureError
from piecework.inputs import GraphInputs, Numbers
from piecework.pieces import SplittingOp
from piecework.pool import Pool
from piecework.refusals import Refusals
from piecework.schedule import OpStep, Schedule
from piecework.segment import Action, OpAction, PieceAction, Run, Segment
from piecework.static_inputs import StaticInputs, UnknownSizeError, fill
from piecework.values import Values


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


@dataclass(frozen=True)
class Pieces:
    """What runs at one size: a function per piece, and which of them are the same code."""

    runs: Sequence[Run]
    keys: Sequence[str]


class Recorder:
    """Records one size.

    Args:
        schedule: the steps of the graph in order.
        inputs: what it is called with.
        pieces: the compiled pieces, one per piece of the graph.
        pool: where to record; its lock is held.
        statics: memory of the inputs.
        refusals: what stays out of graphs.
        numbers: the value of each symbol.
        size: the size as the user writes it; ``SplittingOp.capturable`` is asked about it.
        results: nodes that the caller's results are made from.
    """

    def __init__(
        self,
        schedule: Schedule,
        inputs: GraphInputs,
        pieces: Pieces,
        pool: Pool,
        statics: StaticInputs,
        refusals: Refusals,
        *,
        numbers: Numbers,
        size: Any,
        results: Sequence[Node],
    ) -> None:
        self.schedule, self.effects, self.inputs = schedule, schedule.effects, inputs
        self.statics, self.refusals = statics, refusals
        self.size, self.results = size, results
        self.values = Values(schedule, statics, pool, numbers)
        self.actions = self.list_actions(pieces)
        self.num_settled = 0
        """So many actions are done, and what they were the last to use has been let go."""
        self.recording = Recording([], 0, {}, {}, {})
        self.warmed: set[str] = set()

    def record(self, given: Mapping[int, torch.Tensor]) -> Recording:
        """Record all steps, in ``recording_session``; no op runs, and nothing of the model or the caller is written to.

        Args:
            given: the tensor arguments of a call, by position; those that are copied may have other sizes.

        Raises:
            CaptureError: the device refuses something, or lacks the memory. Nothing stays behind.
        """
        try:
            self.enter(given)
            self.record_steps()
            self.leave()
        except UnknownSizeError as error:
            raise CaptureError(f"{error}, so that its memory can't be set aside") from error
        except torch.OutOfMemoryError as error:
            raise CaptureError(f"the device has no memory for it: {error}") from error
        finally:
            self.values.clear()
            recording, self.recording = self.recording, Recording([], 0, {}, {}, {})
        return recording

    # What there is to do.

    def list_actions(self, pieces: Pieces) -> list[Action]:
        actions: list[Action] = []
        places = iter(zip(pieces.runs, pieces.keys, strict=True))
        for unit in self.schedule.units:
            if isinstance(unit, OpStep):
                actions.append(OpAction(unit, self.is_captured(unit.op, unit.node)))
                continue
            run, key = next(places)
            why = self.refusals.of_piece(unit, key)
            actions.append(PieceAction(unit, run, key, why))
            if why is not None:
                self.refusals.note(unit.name, why)
        return actions

    def is_captured(self, op: SplittingOp | None, node: Node) -> bool:
        """Whether a splitting op is recorded at this size, and not run between the graphs."""
        if op is None:
            return False
        wanted = op.capturable(self.size) if callable(op.capturable) else op.capturable
        return bool(wanted) and self.refusals.of_op(node, self.effects) is None

    # The walk.

    def enter(self, given: Mapping[int, torch.Tensor]) -> None:
        """Set aside the memory of the inputs, filled with what the call passes."""
        env = self.values.env
        env.update(self.inputs.bound)
        for tensor in self.statics.held:
            # Without what the caller may still do to the tensor itself, such as `cache.data = other`.
            env[tensor.node] = given[tensor.index].detach()
            self.recording.held[tensor.index] = given[tensor.index].data_ptr()
        for tensor in self.statics.copied:
            memory = self.statics.memory(tensor, self.values.numbers)
            fill(memory, given[tensor.index])
            env[tensor.node] = self.recording.inputs[tensor.index] = memory

    def record_steps(self) -> None:
        """Record neighbours that can be captured as one graph each, and bind what stands between."""
        waiting: list[tuple[int, Action]] = []
        for index, action in enumerate(self.actions):
            if self.is_recorded(action, waiting):
                waiting.append((index, action))
            elif isinstance(action, OpAction) and action.op is None:
                self.settle(action.node)
            else:
                self.capture(waiting)
                waiting = []
                self.bind(action)
                self.let_go(index)
        self.capture(waiting)
        if not self.recording.num_graphs:
            raise CaptureError("no piece of it can be captured" + "".join(f"; {w}" for w in self.refusals.lines()))

    def is_recorded(self, action: Action, waiting: Sequence[tuple[int, Action]]) -> bool:
        """Whether an action becomes part of a graph: what unpacks the results of a recorded op does, too."""
        if isinstance(action, PieceAction):
            return action.why_uncaptured is None
        parents = [other.node for _, other in waiting if isinstance(other, OpAction)]
        return action.is_captured or (action.node.target is operator.getitem and action.node.args[0] in parents)

    def settle(self, node: Node) -> None:
        """Do once what costs no kernel: allocate, unpack, look at sizes."""
        values = self.values
        if self.effects.is_allocation(node):
            values.env[node] = values.memory_for(self.effects.values[node])
        elif node not in self.effects.identical:
            values.env[node] = values.value(node, values.env)

    def capture(self, waiting: Sequence[tuple[int, Action]]) -> None:
        """Record some actions as one graph."""
        if not waiting:
            return
        segment = Segment(self.values, waiting)
        for action in segment.pieces:
            if action.key not in self.warmed:
                self.warmed.add(action.key)
                segment.warm_up(action)
        captured = segment.capture()
        self.recording.steps.append(captured.replay)
        self.recording.num_graphs += 1
        self.values.env.update(zip(segment.exports, captured.outputs, strict=True))
        self.let_go(waiting[-1][0])

    def bind(self, action: Action) -> None:
        """Have something run between the graphs."""
        bound = bind(action, self.values)
        self.values.env.update(bound.results)
        self.recording.steps.append(bound.step)
        self.recording.bridge_bytes += bound.num_bytes

    def let_go(self, index: int) -> None:
        """Drop what no action after this one needs, so that its memory can be used again."""
        for done in range(self.num_settled, index + 1):
            for node in self.schedule.dying[done]:
                self.values.drop(node)
        self.num_settled = index + 1

    def leave(self) -> None:
        for node in self.results:
            self.recording.outputs[node] = self.values.bound(node)


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
