"""A reference of our own: the same pieces as modules of a stitched FX graph, each of which replays for itself.

It is the usual form of piecewise graphs behind ``torch.compile``. Dynamo checks its guards and passes every
parameter; the code of the stitched module calls an object per piece with all arguments of that piece; the object looks
its size up and replays. Splitting ops are small modules, as ``torch.fx.passes.split_module`` leaves them. Nothing is
copied, and what is not needed to be right is left out: no context to read, no debug checks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from piecework import torch_internals as internals
from piecework.build import by_place
from piecework.capturing import Capture, Recordable
from piecework.compilers import compile_pieces
from piecework.config import CompilationConfig
from piecework.dedupe import deduplicate
from piecework.pieces import InputKind, SplittingOp
from piecework.plugins import plugin_manager
from piecework.pool import Pool
from piecework.split import EagerStep, PieceStep, SplitGraph, split_graph

__all__ = ["Stitched"]


@dataclass
class Stitched:
    """A backend for ``torch.compile``.

    Args:
        op: where to cut.
        config: how pieces are compiled.
        pool: where to capture.
    """

    op: str
    config: CompilationConfig
    pool: Pool
    function: Callable[..., Any] | None = None
    """The stitched module, called with all parameters, the size and the ids."""
    arguments: tuple[Any, ...] = field(default=(), init=False)
    """What Dynamo passed last; keeping it costs a call 0.3 us, so that one trace serves with and without guards."""

    def __call__(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Called by Dynamo with the graph that it traced."""
        fake_mode = internals.current_fake_mode()
        assert fake_mode.shape_env is not None
        split = split_graph(graph, fake_mode, [SplittingOp(self.op)], must_match=[self.op])
        unique = deduplicate(split.pieces, _kinds, fake_mode.shape_env)
        with internals.outside_of_tracing():
            manager = plugin_manager()
            compiled = compile_pieces(unique, self.config, manager, fake_mode.shape_env, owner="the stitched reference")
        self.function = _stitch(split, [one.run.run for one in by_place(compiled)], self.pool).forward
        return self.keep_arguments

    def keep_arguments(self, *args: Any) -> Any:
        self.arguments = args
        assert self.function is not None
        return self.function(*args)


class StitchedPiece:
    """Stands for one piece in the stitched module; its last argument is the size."""

    def __init__(self, name: str, run: Callable[..., Any], pool: Pool) -> None:
        self.name, self.run, self.pool = name, run, pool
        self.by_size: dict[int, Capture] = {}

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        captured = self.by_size.get(args[-1])
        if captured is None:
            captured = self.by_size[args[-1]] = self.capture(args[:-1])
        captured.replay()
        return captured.outputs

    def capture(self, args: tuple[Any, ...]) -> Capture:
        """Capture the piece where its arguments lie."""
        capturer, at = self.pool.capturer, [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = list(args)
            for position, tensor in zip(at, tensors, strict=True):
                given[position] = tensor
            return tuple(self.run(*given))

        with self.pool.lock, torch.no_grad(), capturer.session():
            capturer.warm_up(lambda: self.run(*args))
            return capturer.capture(Recordable(self.name, run, tuple(args[i] for i in at)))


def _kinds(step: PieceStep) -> tuple[InputKind, ...]:
    return tuple(InputKind.SIZE if isinstance(v, sympy.Symbol) else InputKind.ACTIVATION for v in step.inputs)


def _stitch(split: SplitGraph, runs: Sequence[Callable[..., Any]], pool: Pool) -> GraphModule:
    """Return a module that calls one object per piece and one module per op."""
    graph, root = Graph(), torch.nn.Module()
    env: dict[Any, Node] = {}
    sizes: list[Node] = []
    for node in split.graph.graph.find_nodes(op="placeholder"):
        env[node] = graph.placeholder(node.name)
        example = node.meta["example_value"]
        if isinstance(example, torch.SymInt):
            env[example.node.expr] = env[node]
            sizes.append(env[node])
    (size,) = sizes
    remaining, pieces = iter(runs), dict[str, StitchedPiece]()
    for step in split.steps:
        if isinstance(step, EagerStep):
            _add_ops(step, graph, root, env)
            continue
        pieces[step.name] = StitchedPiece(step.name, next(remaining), pool)
        root.add_module(step.name, torch.nn.Module())  # Its place, for FX.
        results = graph.call_module(step.name, (*(env[value] for value in step.inputs), size))
        for index, node in enumerate(step.outputs):
            env[node] = graph.call_function(operator.getitem, (results, index))
    graph.output(tuple(env[value] for value in split.returned))
    stitched = GraphModule(root, graph)
    for name, piece in pieces.items():
        delattr(stitched, name)
        vars(stitched)[name] = piece
    return stitched


def _add_ops(step: EagerStep, graph: Graph, root: torch.nn.Module, env: dict[Any, Node]) -> None:
    for node in step.nodes:
        inner = Graph()
        given = {arg: inner.placeholder(arg.name) for arg in node.all_input_nodes}
        inner.output(inner.node_copy(node, given.__getitem__))
        root.add_module(node.name, GraphModule(torch.nn.Module(), inner))
        env[node] = graph.call_module(node.name, tuple(env[arg] for arg in given))
