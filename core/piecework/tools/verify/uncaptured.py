"""Run the compiled pieces and the ops as an uncaptured call does, with a copy of every value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

from piecework.inputs import GraphInputs
from piecework.pieces import EAGER, PieceRun
from piecework.run import straight_line
from piecework.split import SplitGraph
from piecework.tools.verify.chains import Run, function_of, pieces_of, with_ops
from piecework.tools.verify.comparing import clone


class Uncaptured:
    """Runs the compiled pieces and the ops as an uncaptured call does, and keeps a copy of each value.

    Args:
        split: the graph.
        inputs: what it is called with.
        args_of: index of a piece; what that one is called with is kept in ``args``, too.
    """

    def __init__(self, split: SplitGraph, inputs: GraphInputs, *, args_of: int | None = None) -> None:
        self.split, self.inputs, self.args_of = split, inputs, args_of
        self.values: dict[Node, Any] = {}
        self.given: tuple[Any, ...] = ()
        self.args: tuple[Any, ...] = ()

    def __call__(self, line: Run, given: tuple[Any, ...]) -> Sequence[Any]:
        """Run the graph in the place of ``line``."""
        self.given = given
        pairs = enumerate(zip(pieces_of(line, self.split), self.split.pieces, strict=True))
        runs = [PieceRun(self.noting(run, step.outputs, index), EAGER) for index, (run, step) in pairs]
        split = self.split
        noting = with_ops(split, lambda node, op: self.noting_op(op.implementation or function_of(node, split), node))
        return straight_line(noting, runs, self.inputs, name="verify").function(*given)

    def noting(self, run: Run, nodes: Sequence[Node], index: int) -> Run:
        def call(*args: Any) -> Sequence[Any]:
            if index == self.args_of:
                self.args = clone(args)
            results = run(*args)
            self.values.update(zip(nodes, clone(list(results)), strict=True))
            return results

        return call

    def noting_op(self, function: Callable[..., Any], node: Node) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.values[node] = clone(result)
            return result

        return call
