"""Record one size of a split graph: what can be captured as graphs, the ops between as bound calls.

While recording, a tensor is held until the last step that needs it has been recorded; then its memory
may serve later steps, and all of it serves the other sizes. Bound calls refer to memory by aliases,
which do not hold it. Nothing is read by a step before this same size's steps have written it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from piecework import torch_internals as internals
from piecework.capturing import Recordable
from piecework.effects import line_of, op_name, tensors_in
from piecework.errors import CaptureError
from piecework.inputs import GraphInputs
from piecework.pieces import SplittingOp
from piecework.pool import Pool
from piecework.refusals import Refusals, refused_op
from piecework.schedule import OpStep, Schedule
from piecework.split import PieceStep, SplitGraph
from piecework.static_inputs import Layout, Numbers, StaticInputs, UnknownSizeError, base_of, evaluate, fill

logger = logging.getLogger(__name__)

Run = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class PieceAction:
    """Runs a compiled piece."""

    step: PieceStep
    run: Run
    key: str
    """Equal for places that share compiled code."""
    why_uncaptured: str | None


@dataclass(frozen=True)
class OpAction:
    """Runs a splitting op, or a node beside one that costs no kernel."""

    step: OpStep
    is_captured: bool

    @property
    def node(self) -> Node:
        """Return the node that it runs."""
        return self.step.node

    @property
    def op(self) -> SplittingOp | None:
        """Return the splitting op, where it is one."""
        return self.step.op


Action = PieceAction | OpAction


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


class Recorder:
    """Records one size.

    Args:
        split: the graph.
        schedule: its steps in order.
        inputs: what it is called with.
        runs: the compiled pieces, one per piece of the graph.
        keys: equal for places that share compiled code.
        pool: where to record; its lock is held.
        statics: memory of the inputs.
        numbers: the value of each symbol.
        size: the size as the user writes it; ``SplittingOp.capturable`` is asked about it.
        results: nodes that the caller's results are made from.
    """

    def __init__(
        self,
        split: SplitGraph,
        schedule: Schedule,
        inputs: GraphInputs,
        runs: Sequence[Run],
        keys: Sequence[str],
        pool: Pool,
        statics: StaticInputs,
        refusals: Refusals,
        *,
        numbers: Numbers,
        size: Any,
        results: Sequence[Node],
    ) -> None:
        self.split, self.effects, self.inputs = split, split.effects, inputs
        self.pool, self.capturer, self.statics, self.refusals = pool, pool.capturer, statics, refusals
        self.numbers, self.size, self.results = numbers, size, results
        self.schedule = schedule
        self.actions = self.list_actions(runs, keys)
        self.env: dict[Node, Any] = {}
        self.aliases: dict[Node, Any] = {}
        """The same values without a hold on memory of the pool, as far as they were asked for."""
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
            self.env.clear()
            self.aliases.clear()
            recording, self.recording = self.recording, Recording([], 0, {}, {}, {})
        return recording

    # What there is to do.

    def list_actions(self, runs: Sequence[Run], keys: Sequence[str]) -> list[Action]:
        actions: list[Action] = []
        pieces = iter(zip(runs, keys, strict=True))
        for unit in self.schedule.units:
            if isinstance(unit, OpStep):
                actions.append(OpAction(unit, self.is_captured(unit.op, unit.node)))
                continue
            run, key = next(pieces)
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

    # Values.

    def enter(self, given: Mapping[int, torch.Tensor]) -> None:
        """Set aside the memory of the inputs, filled with what the call passes."""
        self.env.update(self.inputs.bound)
        for tensor in self.statics.held:
            # Without what the caller may still do to the tensor itself, such as `cache.data = other`.
            self.env[tensor.node] = given[tensor.index].detach()
            self.recording.held[tensor.index] = given[tensor.index].data_ptr()
        for tensor in self.statics.copied:
            memory = self.statics.memory(tensor, self.numbers)
            fill(memory, given[tensor.index])
            self.env[tensor.node] = self.recording.inputs[tensor.index] = memory

    def value(self, node: Node, env: Mapping[Node, Any]) -> Any:
        """Return the value of a node: kept, computed from sizes, or a view taken again from its base."""
        node = self.schedule.resolve(node)
        if node in env:
            return env[node]
        if self.effects.is_scalar(node):
            return self.number(self.effects.values[node])
        args, kwargs = map_arg((node.args, node.kwargs), lambda arg: self.value(arg, env))
        if node.op == "call_method":
            made = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            target: Any = node.target
            made = target(*args, **kwargs)
        if env is self.aliases:  # These hold no memory, so that a view of one may be kept for other uses.
            self.aliases[node] = made
        return made

    def number(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(self.number(item) for item in value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return evaluate(self.statics.sizes.shape_env.replace(value.node.expr), self.numbers)
        return value

    def bound_value(self, node: Node) -> Any:
        """Return a value for a call that outlives the recording: memory of the pool by an alias."""
        for base in self.schedule.bases(node):
            if base not in self.aliases:
                value = self.env[base]
                is_pooled = isinstance(value, torch.Tensor) and base not in self.schedule.outside
                self.aliases[base] = self.capturer.alias(value) if is_pooled else value
        return self.value(node, self.aliases)

    def layout(self, fake: torch.Tensor) -> Layout:
        return self.statics.layout(fake, self.numbers)

    def memory_for(self, fake: torch.Tensor) -> torch.Tensor:
        layout = self.layout(fake)
        return self.pool.empty(fake, layout.size, layout.stride)

    # Steps.

    def record_steps(self) -> None:
        """Record neighbours that can be captured as one graph each, and bind what stands between."""
        waiting: list[tuple[int, Action]] = []
        for index, action in enumerate(self.actions):
            if self.is_recorded(action, waiting):
                waiting.append((index, action))
            elif isinstance(action, OpAction) and action.op is None:
                self.settle(action)
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

    def let_go(self, index: int) -> None:
        """Drop what no action after this one needs, so that its memory can be used again."""
        for done in range(self.num_settled, index + 1):
            for node in self.schedule.dying[done]:
                self.env.pop(node, None)
                self.aliases.pop(node, None)
        self.num_settled = index + 1

    def settle(self, action: OpAction) -> None:
        """Do once what costs no kernel: allocate, unpack, look at sizes."""
        node = action.node
        if self.effects.is_allocation(node):
            self.env[node] = self.memory_for(self.effects.values[node])
        elif node not in self.effects.identical:
            self.env[node] = self.value(node, self.env)

    def capture(self, waiting: Sequence[tuple[int, Action]]) -> None:
        """Record some actions as one graph."""
        if not waiting:
            return
        segment = _Segment(self, waiting)
        names = [action.step.name for _, action in waiting if isinstance(action, PieceAction)]
        for _, action in waiting:
            if isinstance(action, PieceAction) and action.key not in self.warmed:
                self.warmed.add(action.key)
                self.warm_up(action)
        what = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "a splitting op"
        recordable = Recordable(what, segment.run, segment.inputs(), segment.writes())
        try:
            captured = self.capturer.capture(recordable)
        except CaptureError as error:
            raise self.explained(error, waiting) from error
        except Exception as error:  # of a compiled piece or an op: it fails in this size's capture, and in nothing else
            raise CaptureError(f"{what} failed while it was recorded: {type(error).__name__}: {error}") from error
        self.recording.steps.append(captured.replay)
        self.recording.num_graphs += 1
        self.env.update(zip(segment.exports, captured.outputs, strict=True))
        self.let_go(waiting[-1][0])

    def warm_up(self, action: PieceAction) -> None:
        """Run a piece once on scratch memory, so that what is done at a first run is not recorded."""
        scratch = self.scratch_inputs(action.step)
        try:
            self.capturer.warm_up(lambda: action.run(*scratch))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiled piece: it fails in this size's capture, and in nothing else
            what = f"{action.step.name} failed in its warm-up"
            raise CaptureError(f"{what}: {type(error).__name__}: {error}") from error

    def scratch_inputs(self, step: PieceStep) -> list[Any]:
        """Return inputs for a piece: the caller's and the model's own, zeros for what other steps make."""
        scratch: list[Any] = []
        for position, value in enumerate(step.inputs):
            if isinstance(value, sympy.Symbol):
                scratch.append(int(evaluate(value, self.numbers)))
            elif self.schedule.outside.issuperset(self.schedule.bases(value)):
                real = self.value(value, self.env)
                scratch.append(real.clone() if position in step.written else real)
            else:
                fake = self.effects.values[self.schedule.resolve(value)]
                layout = self.layout(fake)
                flat = torch.zeros(layout.span, dtype=fake.dtype, device=fake.device)
                scratch.append(flat.as_strided(layout.size, layout.stride))
        return scratch

    def explained(self, error: CaptureError, waiting: Sequence[tuple[int, Action]]) -> CaptureError:
        """Return an error that names the op that the device refuses, if recording ops one by one finds it."""
        for _, action in waiting:
            if isinstance(action, PieceAction):
                node = refused_op(action.step.graph, self.scratch_inputs(action.step), self.capturer)
                if node is not None:
                    return CaptureError(
                        f"{error}; it is {op_name(node) or node.target} in {action.step.name}{line_of(node)}"
                    )
        return error

    # What runs between graphs.

    def bind(self, action: Action) -> None:
        """Bind what is not captured to its memory."""
        if isinstance(action, PieceAction):
            args = [self.piece_argument(value) for value in action.step.inputs]
            call = functools.partial(action.run, *args)
            fakes = [self.effects.values[node] for node in action.step.outputs]
            kept = [self.memory_for(fake) for fake in fakes]
            self.env.update(zip(action.step.outputs, kept, strict=True))
            self.recording.steps.append(self.bridged(call, kept) if kept else call)
            return
        node = action.node
        args, kwargs = map_arg((node.args, node.kwargs), self.bound_value)
        call = functools.partial(self.function(node, action.op), *args, **kwargs)
        if node in self.effects.identical:
            self.recording.steps.append(call)
            return
        result = self.effects.values[node]
        self.check_result(node, result)
        pairs = [
            (fake, self.holder_of(key, node))
            for fake, key in zip(tensors_in(result), self.effects.storages[node], strict=True)
        ]
        try:
            kept = [self.memory_for(fake) if source is None else None for fake, source in pairs]
        except UnknownSizeError as error:
            raise CaptureError(f"what {op_name(node)} gives has no memory set aside: {error}{line_of(node)}") from error
        remaining = iter(
            [self.view_of(*pair) if memory is None else memory for pair, memory in zip(pairs, kept, strict=True)]
        )
        self.env[node] = internals.pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), result)
        is_bridged = any(memory is not None for memory in kept) and node.users
        self.recording.steps.append(self.bridged(call, kept) if is_bridged else call)

    def piece_argument(self, value: Node | sympy.Symbol) -> Any:
        if isinstance(value, sympy.Symbol):
            return int(evaluate(value, self.numbers))
        return self.bound_value(value)

    def check_result(self, node: Node, result: Any) -> None:
        leaves = internals.pytree.tree_leaves(result)
        if node.users and not all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise CaptureError(f"{op_name(node)} gives a number{line_of(node)}, which a graph can't follow")

    def holder_of(self, key: int | None, node: Node) -> Node | None:
        """Return the argument of an op that a result shares memory with; None for a fresh one."""
        return next((arg for arg in node.all_input_nodes if key in self.effects.storages[arg]), None)

    def view_of(self, fake: torch.Tensor, source: Node | None) -> torch.Tensor:
        """Return the view that an op gives of one of its arguments."""
        assert source is not None
        base = self.value(source, self.env)
        offsets = (one.storage_offset() for one in (fake, self.effects.values[source]))
        ahead, start = (self.statics.number(offset, self.numbers) for offset in offsets)
        layout = self.layout(fake)
        return base.as_strided(layout.size, layout.stride, base.storage_offset() + ahead - start)

    def bridged(self, call: Callable[[], Any], kept: Sequence[torch.Tensor | None]) -> Callable[[], None]:
        """Return a call whose fresh results are copied into static memory; None stands for one that is not fresh."""
        self.recording.bridge_bytes += sum(tensor.nbytes for tensor in kept if tensor is not None)
        return _Bridge(call, tuple(tensor if tensor is None else self.capturer.alias(tensor) for tensor in kept)).run

    def function(self, node: Node, op: SplittingOp | None) -> Callable[..., Any]:
        """Return what to call for a node: the cheapest route that is right."""
        if op is not None and op.implementation is not None:
            return op.implementation
        if node.op == "call_method":
            return getattr(torch.Tensor, str(node.target))
        overload = self.effects.overload(node)
        target: Any = node.target
        return internals.direct_call(overload) if overload is not None else target

    def leave(self) -> None:
        for node in self.results:
            self.recording.outputs[node] = self.bound_value(node)


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


class _Segment:
    """Neighbouring actions that become one graph."""

    def __init__(self, recorder: Recorder, actions: Sequence[tuple[int, Action]]) -> None:
        self.recorder = recorder
        self.actions = actions
        own = [node for _, action in actions for node in recorder.schedule.definitions(action.step)]
        end = actions[-1][0]
        self.exports = [
            node for node in own if recorder.schedule.last_use.get(node, -1) > end and is_tensor(recorder, node)
        ]
        used = (
            base
            for _, action in actions
            for value in recorder.schedule.uses(action.step)
            for base in recorder.schedule.bases(value)
        )
        self.given = [node for node in dict.fromkeys(used) if node not in set(own)]

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that exist before it and that it reads or writes."""
        return tuple(self.recorder.env[node] for node in self.given)

    def writes(self) -> tuple[int, ...]:
        """Return which of its inputs it writes to."""
        effects = self.recorder.effects
        touched: set[int | None] = set()
        for _, action in self.actions:
            if isinstance(action, PieceAction):
                written = (action.step.inputs[i] for i in action.step.written)
                touched.update(key for node in written if isinstance(node, Node) for key in effects.storages[node])
            else:
                touched.update(effects.written[action.node])
        return tuple(i for i, node in enumerate(self.given) if touched.intersection(effects.storages[node]))

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Do the work on these inputs; what only later actions of it need is let go in time."""
        env: dict[Node, Any] = dict(zip(self.given, inputs, strict=True))
        keep = {*self.exports, *self.given}
        for index, action in self.actions:
            self.run_one(action, env)
            for node in self.recorder.schedule.dying[index]:
                if node not in keep:
                    env.pop(node, None)
        return tuple(env[node] for node in self.exports)

    def run_one(self, action: Action, env: dict[Node, Any]) -> None:
        recorder = self.recorder
        if isinstance(action, PieceAction):
            args = [
                int(evaluate(value, recorder.numbers))
                if isinstance(value, sympy.Symbol)
                else recorder.value(value, env)
                for value in action.step.inputs
            ]
            env.update(zip(action.step.outputs, action.run(*args), strict=True))
            return
        node = action.node
        if action.op is None:  # unpacks the results of an op
            env[node] = recorder.value(node, env)
            return
        args, kwargs = map_arg((node.args, node.kwargs), lambda arg: recorder.value(arg, env))
        result = recorder.function(node, action.op)(*args, **kwargs)
        if node not in recorder.effects.identical:
            env[node] = result


def is_tensor(recorder: Recorder, node: Node) -> bool:
    """Whether a node gives one tensor, and not several or nothing."""
    return isinstance(recorder.effects.values[node], torch.Tensor)


class _Bridge:
    """Runs something that gives fresh tensors, and copies them to where graphs read them."""

    def __init__(self, call: Callable[[], Any], kept: tuple[torch.Tensor | None, ...]) -> None:
        self.call = call
        self.kept = tuple((None, False) if t is None else (base_of(t), 0 in t.stride()) for t in kept)

    def run(self) -> None:
        """Called at every replay."""
        for (kept, is_expanded), result in zip(self.kept, tensors_in(self.call()), strict=True):
            if kept is None:
                continue
            fresh = base_of(result) if is_expanded else result
            if fresh.shape != kept.shape or fresh.dtype != kept.dtype:
                raise CaptureError(
                    f"an op gave a tensor of shape {tuple(fresh.shape)} and {fresh.dtype}, where its fake "
                    f"implementation gives {tuple(kept.shape)} and {kept.dtype}; mend the fake implementation"
                )
            kept.copy_(fresh)
