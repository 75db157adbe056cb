"""Why a piece or an op stays out of a graph, and which op a device refused to record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from piecework import torch_internals as internals
from piecework.capturing import Capturer, Recordable
from piecework.effects import Effects, line_of, op_name, tensors_in
from piecework.errors import CaptureError
from piecework.pool import Pool
from piecework.split import PieceStep


class Refusals:
    """Remembers, for one model, which pieces run uncaptured between the graphs, and why."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.by_key: dict[str, str | None] = {}
        self.by_piece: dict[str, str] = {}

    def of_piece(self, step: PieceStep, key: str) -> str | None:
        """Return why a piece can't be captured; None where it is worth a try."""
        if key not in self.by_key:
            self.by_key[key] = (
                self.other_device(step) or self.unsafe_op(step.graph) or self.pool.capturer.refuses(step.graph)
            )
        return self.by_key[key]

    def of_op(self, node: Node, effects: Effects) -> str | None:
        """Return why a splitting op that says it is capturable is not."""
        overload = effects.overload(node)
        if overload is not None and torch.Tag.cudagraph_unsafe in overload.tags:
            return f"{overload.name()} is tagged cudagraph_unsafe"
        return "it gives a number" if gives_number(effects.values[node]) else None

    def note(self, name: str, why: str) -> None:
        """Keep the reason for reports."""
        self.by_piece[name] = why

    def lines(self) -> list[str]:
        """Return the reasons, one per piece."""
        return [f"{name}: {why}" for name, why in self.by_piece.items()]

    def other_device(self, step: PieceStep) -> str | None:
        for node in step.graph.graph.nodes:
            for tensor in tensors_in(node.meta.get("example_value")):
                if tensor.device != self.pool.device:
                    what = "takes" if node.op == "placeholder" else "makes"
                    where = f"{tensor.device}{line_of(node)}"
                    return f"it {what} a tensor on {where}, which a graph of {self.pool.device} can't follow"
        return None

    def unsafe_op(self, graph: GraphModule) -> str | None:
        for node in graph.graph.nodes:
            overloads: list[Any] = []
            if isinstance(node.target, internals.OpOverload):
                overloads = [node.target]
            elif isinstance(node.target, internals.OpOverloadPacket):
                overloads = [getattr(node.target, name) for name in node.target.overloads()]
            if any(torch.Tag.cudagraph_unsafe in overload.tags for overload in overloads):
                return (
                    f"{op_name(node)} is tagged cudagraph_unsafe{line_of(node)}; name it as a splitting op, so that "
                    "what stands around it is captured"
                )
        return None


def gives_number(result: Any) -> bool:
    """Whether an op gives something that no graph can hold: other than tensors and None."""
    leaves = internals.pytree.tree_leaves(result)
    return not all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves)


def refused_op(graph: GraphModule, inputs: Sequence[Any], capturer: Capturer) -> Node | None:
    """Return the first op of a piece that can't be recorded by itself; inside a session.

    Args:
        graph: the piece, op by op.
        inputs: scratch inputs that may be written to.
        capturer: records each op alone.
    """
    finder = _Finder(graph, capturer)
    try:
        finder.run(*inputs)
    except _FoundError as found:
        return found.node
    return None


class _FoundError(Exception):
    def __init__(self, node: Node) -> None:
        super().__init__(node.name)
        self.node = node


class _Finder(Interpreter):
    def __init__(self, graph: GraphModule, capturer: Capturer) -> None:
        super().__init__(graph)
        self.capturer = capturer

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        results: list[Any] = []
        run = super().run_node

        def once(*_: Any) -> tuple[torch.Tensor, ...]:
            run(n)
            return ()

        try:
            self.capturer.capture(Recordable(n.name, once, ()))
        except CaptureError as error:
            raise _FoundError(n) from error
        self.capturer.warm_up(lambda: results.append(run(n)))
        return results[0]
