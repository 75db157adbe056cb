"""Run the steps of a split graph one by one, in other ways than calls do, behind the checks of a call.

Three chains do: ``reference`` runs the pieces op by op, each beside its compiled code on the same inputs;
``uncaptured`` the compiled pieces, with a copy of every value; ``replays`` a new capture, each value beside that copy.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from piecework.build import Compiled
from piecework.effects import line_of, op_name
from piecework.inputs import GraphInputs
from piecework.piece_checks import FirstCall
from piecework.pieces import SplittingOp
from piecework.split import EagerStep, PieceStep, SplitGraph
from piecework.tools.verify.comparing import Difference
from piecework.torch_internals import OpOverload

Run = Callable[..., Sequence[Any]]


def entry_with(compiled: Compiled, run: Callable[[Run, tuple[Any, ...]], Sequence[Any]]) -> Callable[..., Any]:
    """Return the entry of a compiled model with all its checks, and something else behind them.

    Args:
        compiled: the model.
        run: called as ``run(line, given)`` with the straight-line code for the size of a call, and what that is
            called with: tensors, then sizes. It returns what the line would.
    """

    def through(line: Run | None) -> Run | None:
        return None if line is None else lambda *given: run(line, given)

    space = compiled.entry.namespace
    replaced = {
        "_pw_run": through(space["_pw_run"]),
        "_pw_exact": {key: through(line) for key, line in space["_pw_exact"].items()},
        "_pw_uncompiled": through(space["_pw_uncompiled"]),
        "_pw_plans": {},
        "_pw_choose": lambda given, uncaptured: uncaptured,
    }
    function = compiled.entry.function
    made = types.FunctionType(function.__code__, {**space, **replaced}, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def inputs_now(compiled: Compiled) -> GraphInputs:
    """Return what the graph is called with, with the parameters and buffers that the model has now."""
    namespace = compiled.run.namespace
    bound = {node: namespace[name] for node, name in compiled.run.bound_names.items()}
    return GraphInputs(compiled.trace.inputs, bound, compiled.trace.sizes)


def pieces_of(line: Run, split: SplitGraph) -> list[Run]:
    """Return the functions of the pieces that straight-line code calls."""
    space = line.__globals__  # pyright: ignore[reportFunctionMemberAccess]
    found = [space[step.name] for step in split.pieces]
    return [one.run if isinstance(one, FirstCall) else one for one in found]


def function_of(node: Node, split: SplitGraph) -> Callable[..., Any]:
    """Return what runs a splitting op, whatever its implementation is."""
    target: Any = node.target
    return split.effects.overload(node) or (getattr(torch.Tensor, target) if node.op == "call_method" else target)


def with_ops(split: SplitGraph, made: Callable[[Node, SplittingOp], Callable[..., Any]]) -> SplitGraph:
    """Return a split graph that calls other functions for its splitting ops."""
    steps = tuple(
        replace(step, ops={node: replace(op, implementation=made(node, op)) for node, op in step.ops.items()})
        if isinstance(step, EagerStep)
        else step
        for step in split.steps
    )
    return replace(split, steps=steps)


@dataclass(frozen=True)
class OtherRows:
    """A call with another last row, after which a row before it is another, too.

    Attributes:
        args: of that call.
        kwargs: the same by keyword.
        index: which tensor departs, among those in the arguments and the result.
        dim: along which rows lie there.
        num_rows: of the call.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int
    dim: int
    num_rows: int


@dataclass(frozen=True)
class Finding:
    """Something that is wrong at one step of a chain.

    Attributes:
        kind: which check found it: ``"declaration"``, ``"implementation"``, ``"rows"``, ``"piece"``,
            ``"capture"`` or ``"between graphs"``.
        place: the piece, op or graph.
        difference: what differs, in words and numbers.
        piece: the index of the piece among those of the graph, where it is one.
        pieces: the pieces of a captured graph.
        node: the op, where it is known.
        args: copies of what the step was called with, before it ran; None where they are not known.
        kwargs: the same by keyword.
        overload: the op, where it has one.
        implementation: the function that a ``SplittingOp`` names.
        other_rows: the second call of ``"rows"``.
    """

    kind: str
    place: str
    difference: Difference
    piece: int | None = None
    pieces: tuple[PieceStep, ...] = ()
    node: Node | None = None
    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    overload: OpOverload | None = None
    implementation: Callable[..., Any] | None = None
    other_rows: OtherRows | None = None

    @property
    def op_name(self) -> str | None:
        """Return the op in words, with the user's line; None where it is not known."""
        return None if self.node is None else f"{op_name(self.node) or self.node.target}{line_of(self.node)}"
