"""Neighbouring pieces and ops that become one graph: run as one, warmed up, and recorded by the capturer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from piecework import torch_internals as internals
from piecework.capturing import Capture, Recordable
from piecework.effects import Effects, line_of, op_name
from piecework.errors import CaptureError
from piecework.pieces import SplittingOp
from piecework.refusals import refused_op
from piecework.schedule import OpStep
from piecework.split import PieceStep
from piecework.values import Values

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

    def function(self, effects: Effects) -> Callable[..., Any]:
        """Return what to call: the cheapest route that is right."""
        if self.op is not None and self.op.implementation is not None:
            return self.op.implementation
        if self.node.op == "call_method":
            return getattr(torch.Tensor, str(self.node.target))
        overload = effects.overload(self.node)
        target: Any = self.node.target
        return internals.direct_call(overload) if overload is not None else target


Action = PieceAction | OpAction


class Segment:
    """Neighbouring actions that become one graph.

    Args:
        values: what exists before it.
        actions: what it does, each with its place in the schedule.
    """

    def __init__(self, values: Values, actions: Sequence[tuple[int, Action]]) -> None:
        self.values, self.effects, self.schedule = values, values.effects, values.schedule
        self.capturer = values.pool.capturer
        self.actions = actions
        self.pieces = [action for _, action in actions if isinstance(action, PieceAction)]
        own = [node for _, action in actions for node in self.schedule.definitions(action.step)]
        end = actions[-1][0]
        self.exports = [
            node
            for node in own
            if self.schedule.last_use.get(node, -1) > end and isinstance(self.effects.values[node], torch.Tensor)
        ]
        """What later actions need: single tensors, not the several results of an op."""
        used = (
            base
            for _, action in actions
            for value in self.schedule.uses(action.step)
            for base in self.schedule.bases(value)
        )
        self.given = [node for node in dict.fromkeys(used) if node not in set(own)]

    @property
    def name(self) -> str:
        """Return what it runs, for messages."""
        names = [action.step.name for action in self.pieces]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "a splitting op"

    # Recording.

    def capture(self) -> Capture:
        """Record it as one graph.

        Raises:
            CaptureError: the device refuses something, or what it runs fails.
        """
        recordable = Recordable(self.name, self.run, self.inputs(), self.writes())
        try:
            captured = self.capturer.capture(recordable)
        except CaptureError as error:
            raise self.explained(error) from error
        except Exception as error:  # of a compiled piece or an op: it fails in this size's capture, and in nothing else
            raise CaptureError(f"{self.name} failed while it was recorded: {type(error).__name__}: {error}") from error
        if not isinstance(captured, Capture):
            raise CaptureError(f"the capturer answered capture with {captured!r}, allowed: a Capture")
        return captured

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that exist before it and that it reads or writes."""
        return tuple(self.values.env[node] for node in self.given)

    def writes(self) -> tuple[int, ...]:
        """Return which of its inputs it writes to."""
        storages = self.effects.storages
        touched: set[int | None] = set()
        for _, action in self.actions:
            if isinstance(action, PieceAction):
                written = (action.step.inputs[i] for i in action.step.written)
                touched.update(key for node in written if isinstance(node, Node) for key in storages[node])
            else:
                touched.update(self.effects.written[action.node])
        return tuple(i for i, node in enumerate(self.given) if touched.intersection(storages[node]))

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Do the work on these inputs; what only later actions of it need is let go in time."""
        env: dict[Node, Any] = dict(zip(self.given, inputs, strict=True))
        keep = {*self.exports, *self.given}
        for index, action in self.actions:
            self.run_one(action, env)
            for node in self.schedule.dying[index]:
                if node not in keep:
                    env.pop(node, None)
        return tuple(env[node] for node in self.exports)

    def run_one(self, action: Action, env: dict[Node, Any]) -> None:
        values = self.values
        if isinstance(action, PieceAction):
            args = [values.value(value, env) for value in action.step.inputs]
            env.update(zip(action.step.outputs, action.run(*args), strict=True))
            return
        node = action.node
        if action.op is None:  # unpacks the results of an op
            env[node] = values.value(node, env)
            return
        args, kwargs = map_arg((node.args, node.kwargs), lambda arg: values.value(arg, env))
        result = action.function(self.effects)(*args, **kwargs)
        if node not in self.effects.identical:
            env[node] = result

    # On scratch memory.

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

    def explained(self, error: CaptureError) -> CaptureError:
        """Return an error that names the op that the device refuses, if recording ops one by one finds it."""
        for action in self.pieces:
            node = refused_op(action.step.graph, self.scratch_inputs(action.step), self.capturer)
            if node is not None:
                what = f"{op_name(node) or node.target} in {action.step.name}{line_of(node)}"
                return CaptureError(f"{error}; it is {what}")
        return error

    def scratch_inputs(self, step: PieceStep) -> list[Any]:
        """Return inputs for a piece: the caller's and the model's own, zeros for what other steps make."""
        scratch: list[Any] = []
        for position, value in enumerate(step.inputs):
            if isinstance(value, sympy.Symbol):
                scratch.append(self.values.value(value, {}))
            elif self.schedule.outside.issuperset(self.schedule.bases(value)):
                real = self.values.value(value, self.values.env)
                scratch.append(real.clone() if position in step.written else real)
            else:
                fake = self.effects.values[self.schedule.resolve(value)]
                layout = self.values.layout(fake)
                flat = torch.zeros(layout.span, dtype=fake.dtype, device=fake.device)
                scratch.append(flat.as_strided(layout.size, layout.stride))
        return scratch
