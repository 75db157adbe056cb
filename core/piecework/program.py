"""What is done to record a size, decided once for all sizes that are captured in the same way."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.fx.node import Argument

from piecework import torch_internals as internals
from piecework.effects import Effects
from piecework.errors import CaptureError
from piecework.inputs import Sizes
from piecework.piece_checks import PieceCheck, piece_check
from piecework.pieces import PieceRun, SplittingOp
from piecework.refusals import Refusals
from piecework.run import op_words, piece_words
from piecework.schedule import OpStep, Outline, Schedule
from piecework.split import PieceStep

if TYPE_CHECKING:
    from piecework.debug import Debug


@dataclass(frozen=True)
class Pieces:
    """What runs at one size: a function per piece, and which of them are the same code."""

    runs: Sequence[PieceRun]
    """The same list for all sizes that have these functions."""
    keys: Sequence[str]


@dataclass(frozen=True)
class PieceAction:
    """Runs a compiled piece."""

    step: PieceStep
    run: Callable[..., Sequence[Any]]
    check: PieceCheck | None
    """Looks at what goes in and out of compiled code."""
    words: str
    """What runs, for notes on exceptions."""
    key: str
    """Equal for places that share compiled code."""
    why_uncaptured: str | None


@dataclass(frozen=True)
class OpAction:
    """Runs a splitting op, or a node beside one that costs no kernel."""

    node: Node
    op: SplittingOp | None
    """None for a node beside one."""
    is_captured: bool
    function: Callable[..., Any]
    """What to call for a splitting op: the cheapest route that is right."""
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    words: str
    """What runs, for notes on exceptions."""


Action = PieceAction | OpAction


@dataclass(frozen=True)
class EvaluateTask:
    """Do once what costs no kernel: allocate, unpack, look at sizes."""

    node: Node


@dataclass(frozen=True)
class CaptureTask:
    """Record neighbouring actions as one graph.

    Attributes:
        name: what it runs, for messages.
        pieces: those of the actions that run pieces.
        dying: nodes that nothing after it needs.
    """

    actions: tuple[Action, ...]
    outline: Outline
    name: str
    pieces: tuple[PieceAction, ...]
    dying: tuple[Node, ...]

    @property
    def words(self) -> str:
        """Return what it runs, for notes on exceptions."""
        if len(self.actions) == 1:
            return self.actions[0].words
        return f"{self.name} ({', '.join(action.words.rstrip(',') for action in self.actions)})"


@dataclass(frozen=True)
class BindTask:
    """Bind an action that runs between the graphs."""

    action: Action
    dying: tuple[Node, ...]


Task = EvaluateTask | CaptureTask | BindTask


class Programs:
    """Knows what is to be done at each size of one model.

    Args:
        schedule: the steps of the graph in order.
        refusals: what stays out of graphs.
        sizes: what the symbols of the graph mean.
        debug: has more looked at, and ops and uncaptured pieces whenever they run.
    """

    def __init__(self, schedule: Schedule, refusals: Refusals, sizes: Sizes, *, debug: Debug | None = None) -> None:
        self.sizes, self.debug = sizes, debug
        self.schedule, self.effects, self.refusals = schedule, schedule.effects, refusals
        units = (unit for unit in schedule.units if isinstance(unit, OpStep))
        self.ops = {unit.node: unit.op for unit in units if unit.op is not None}
        self._made: dict[tuple[int, tuple[bool, ...]], tuple[Any, tuple[Task, ...]]] = {}

    def of(self, pieces: Pieces, size: Any) -> tuple[Task, ...]:
        """Return what is to be done, in order.

        Args:
            pieces: the compiled pieces, one per piece of the graph.
            size: as the user writes it; ``SplittingOp.capturable`` is asked about it.
        """
        captured = tuple([self.is_captured(node, op, size) for node, op in self.ops.items()])
        key = (id(pieces.runs), captured)
        if key not in self._made:  # With the functions, so that none of others can have their identity.
            self._made[key] = pieces.runs, tuple(self.tasks(self.actions(pieces, captured)))
        return self._made[key][1]

    def is_captured(self, node: Node, op: SplittingOp, size: Any) -> bool:
        """Whether a splitting op is recorded at a size, and not run between the graphs.

        Raises:
            CaptureError: its ``capturable`` fails.
        """
        try:
            wanted = bool(op.capturable(size) if callable(op.capturable) else op.capturable)
        except Exception as error:  # of a function of the user's or a plugin's
            what = f"capturable of splitting op {op.name!r} raised {type(error).__name__} for size {size}"
            raise CaptureError(f"{what}: {error}") from error
        return wanted and self.refusals.of_op(node, self.effects) is None

    def actions(self, pieces: Pieces, captured: Sequence[bool]) -> list[Action]:
        actions: list[Action] = []
        places = iter(zip(pieces.runs, pieces.keys, strict=True))
        is_captured = dict(zip(self.ops, captured, strict=True))
        steps = [unit for unit in self.schedule.units if isinstance(unit, PieceStep)]
        checks = self.debug.line(steps, pieces.runs, self.effects, self.sizes) if self.debug is not None else None
        for unit in self.schedule.units:
            if isinstance(unit, OpStep):
                node, function = unit.node, _function(unit, unit.op, self.effects)
                taken = is_captured.get(node, False)
                if checks is not None and unit.op is not None:
                    function = (checks.recorded_op if taken else checks.op)(node, function)
                words = op_words(node, unit.op)
                actions.append(OpAction(node, unit.op, taken, function, node.args, node.kwargs, words))
                continue
            piece, key = next(places)
            why = self.refusals.of_piece(unit, key)
            run, words = piece.run, piece_words(unit, piece)
            if checks is not None:
                run = piece.run if why is None else checks.piece(unit, piece)
                check = checks.piece_check(unit, piece)
            else:
                check = piece_check(unit, piece, self.effects, self.sizes)
            actions.append(PieceAction(unit, run, check, words, key, why))
            if why is not None:
                self.refusals.note(unit.name, why)
        return actions

    def tasks(self, actions: Sequence[Action]) -> Iterator[Task]:
        """Yield what to do: neighbours that can be captured become one graph."""
        waiting: list[tuple[int, Action]] = []
        num_done = 0
        for index, action in enumerate(actions):
            if _is_recorded(action, waiting):
                waiting.append((index, action))
            elif isinstance(action, OpAction) and action.op is None:
                yield EvaluateTask(action.node)
            else:
                if waiting:
                    yield self.graph(waiting, num_done)
                    num_done = waiting[-1][0] + 1
                    waiting = []
                yield BindTask(action, self.dying(num_done, index))
                num_done = index + 1
        if waiting:
            yield self.graph(waiting, num_done)

    def graph(self, waiting: Sequence[tuple[int, Action]], num_done: int) -> CaptureTask:
        indices, actions = zip(*waiting, strict=True)
        pieces = tuple(action for action in actions if isinstance(action, PieceAction))
        names = [action.step.name for action in pieces]
        name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "a splitting op"
        return CaptureTask(actions, self.schedule.outline(indices), name, pieces, self.dying(num_done, indices[-1]))

    def dying(self, num_done: int, index: int) -> tuple[Node, ...]:
        """Return what nobody needs any longer after an action, besides what was let go before."""
        return tuple(node for done in range(num_done, index + 1) for node in self.schedule.dying[done])


def _is_recorded(action: Action, waiting: Sequence[tuple[int, Action]]) -> bool:
    """Whether an action becomes part of a graph: what unpacks the results of a recorded op does, too."""
    if isinstance(action, PieceAction):
        return action.why_uncaptured is None
    parents = [other.node for _, other in waiting if isinstance(other, OpAction)]
    return action.is_captured or (action.node.target is operator.getitem and action.node.args[0] in parents)


def _function(unit: OpStep, op: SplittingOp | None, effects: Effects) -> Callable[..., Any]:
    if op is None:
        return _not_called
    if op.implementation is not None:
        return op.implementation
    target: Any = unit.node.target
    if unit.node.op == "call_method":
        return getattr(torch.Tensor, target)
    overload = effects.overload(unit.node)
    return internals.direct_call(overload) if overload is not None else target


def _not_called(*_: Any) -> Any:
    raise AssertionError("what costs no kernel is evaluated when a size is recorded, and not called")
