"""Neighbouring pieces and ops that become one graph: run as one, warmed up, and recorded by the capturer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from piecework.capturing import Capture, Recordable
from piecework.effects import line_of, op_name
from piecework.errors import CaptureError, DebugFinding
from piecework.notes import has_passed
from piecework.program import Action, CaptureTask, PieceAction
from piecework.refusals import refused_op
from piecework.split import PieceStep
from piecework.values import Values

if TYPE_CHECKING:
    from piecework.debug_ownership import Ownership

logger = logging.getLogger(__name__)


class SizeRefusedError(CaptureError):
    """What a piece runs fails at a size by itself, whether or not it is captured."""


class Segment:
    """Neighbouring actions that become one graph.

    Args:
        values: what exists before it.
        graph: what it does.
    """

    def __init__(self, values: Values, graph: CaptureTask) -> None:
        self.values, self.graph = values, graph
        self.effects, self.schedule = values.effects, values.schedule
        self.capturer = values.pool.capturer

    # Recording.

    def capture(self, ownership: Ownership | None = None) -> Capture:
        """Record it as one graph.

        Args:
            ownership: in debug mode, has the memory of the recording looked at. It is not kept: the work is, with its
                graph, which is to be gone as soon as its plan is dropped.

        Raises:
            CaptureError: the device refuses something, or what it runs fails.
        """
        name, outline = self.graph.name, self.graph.outline
        inputs = tuple([self.values.env[node] for node in outline.given])
        run = self.run
        if ownership is not None:
            run = ownership.on_same_memory(name, run, inputs, outline.given)
        try:
            captured = self.capturer.capture(Recordable(name, run, inputs, outline.written))
        except DebugFinding:
            raise
        except CaptureError as error:
            raise self.explained(error) from error
        except Exception as error:  # of a compiled piece or an op: it fails in this size's capture, and in nothing else
            if not has_passed(error, self.run):
                raise  # of the capturer
            what = f"{self.graph.words} failed while it was recorded"
            raise CaptureError(f"{what}: {type(error).__name__}: {error}") from error
        if not isinstance(captured, Capture):
            raise CaptureError(f"the capturer answered capture with {captured!r}, allowed: a Capture")
        return captured

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Do the work on these inputs; what only later actions of it need is let go in time."""
        outline = self.graph.outline
        env: dict[Node, Any] = dict(zip(outline.given, inputs, strict=True))
        for action, dying in zip(self.graph.actions, outline.dying, strict=True):
            self.run_one(action, env)
            for node in dying:
                env.pop(node, None)
        return tuple([env[node] for node in outline.exports])

    def run_one(self, action: Action, env: dict[Node, Any]) -> None:
        values = self.values
        if isinstance(action, PieceAction):
            args = [env[given] if given in env else values.value(given, env) for given in action.step.inputs]
            if action.check is not None and len(self.graph.actions) > 1:  # Ops are among them, which may give anything.
                action.check.inputs(args)
            env.update(zip(action.step.outputs, action.run(*args), strict=True))
            return
        node = action.node
        if action.op is None:  # unpacks the results of an op
            env[node] = values.value(node, env)
            return
        args, kwargs = map_arg((action.args, action.kwargs), lambda arg: values.value(arg, env))
        result = action.function(*args, **kwargs)
        if node not in self.effects.identical:
            env[node] = result

    # On scratch memory.

    def warm_up(self, action: PieceAction) -> None:
        """Run a piece once on scratch memory, so that what a first run does is not recorded; look at its results."""
        scratch = self.scratch_inputs(action.step)

        def run() -> None:
            results = action.run(*scratch)
            if action.check is not None:
                action.check.results(results, scratch)

        try:
            self.capturer.warm_up(run)
        except (torch.OutOfMemoryError, DebugFinding):
            raise
        except Exception as error:  # of a compiled piece: it fails in this size's capture, and in nothing else
            if not has_passed(error, run):
                raise  # of the capturer
            what = f"{action.words} failed in its warm-up"
            raise SizeRefusedError(f"{what}: {type(error).__name__}: {error}") from error

    def explained(self, error: CaptureError) -> CaptureError:
        """Return an error that names the op that the device refuses, if recording ops one by one finds it."""
        for action in self.graph.pieces:
            try:
                node = refused_op(action.step.graph, self.scratch_inputs(action.step), self.capturer)
            except Exception:  # Whatever goes wrong in the search must not hide what the device refused.
                logger.debug("the search for the op that is refused failed", exc_info=True)
                return error
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
