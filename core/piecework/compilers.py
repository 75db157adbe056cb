"""Compile each unique piece, for the general shape and for the exact sizes that were asked for."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from piecework import torch_internals as internals
from piecework.config import CompilationConfig
from piecework.counting import counters
from piecework.dedupe import UniquePiece
from piecework.effects import fresh_fake
from piecework.errors import CompileError, PieceworkError, PieceworkWarning
from piecework.pieces import CompiledPiece, Piece
from piecework.plugins import PluginManager

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledUniquePiece:
    """What became of a unique piece."""

    unique: UniquePiece
    run: Callable[..., Any]
    compiler: str
    """Name of the plugin, or ``"eager"``."""
    seconds: float
    added_relations: tuple[sympy.Basic, ...] = ()
    """Relations between sizes that the compiled code relies on besides the trace's, over canonical symbols."""


def compile_pieces(
    unique: Sequence[UniquePiece],
    config: CompilationConfig,
    manager: PluginManager,
    shape_env: internals.ShapeEnv,
    *,
    owner: str,
) -> list[CompiledUniquePiece]:
    """Compile every unique piece for its general shape, in turn: compilers keep process-wide state.

    Raises:
        CompileError: a piece can't be compiled, and ``on_failure`` is ``"error"``.
    """
    compiled: list[CompiledUniquePiece] = []
    for index, one in enumerate(unique):
        before = len(internals.shape_guards(shape_env))
        start = time.perf_counter()
        run, compiler = _compile(one.piece, config, manager, owner)
        seconds = time.perf_counter() - start
        added = internals.shape_guards(shape_env)[before:]
        relations = tuple(internals.size_relation(guard.relation, shape_env) for guard in added)
        logger.info(
            "%s: compiled unique piece %d of %d (%s, stands in %d places) by %s in %.2f s",
            *(owner, index + 1, len(unique), one.piece.name, len(one.places), compiler, seconds),
        )
        compiled.append(CompiledUniquePiece(one, run, compiler, seconds, relations))
    return compiled


def compile_exact(
    one: CompiledUniquePiece,
    size: int | Mapping[str, int],
    values: Mapping[sympy.Symbol, int],
    config: CompilationConfig,
    manager: PluginManager,
    *,
    owner: str,
) -> Callable[..., Any]:
    """Compile a unique piece for one exact size.

    Args:
        one: the piece, already compiled for the general shape.
        size: as the user wrote it.
        values: the value of each symbol of the piece.
    """
    piece = specialised(one.unique.piece, size, values)
    start = time.perf_counter()
    run, compiler = _compile(piece, config, manager, owner)
    seconds = time.perf_counter() - start
    logger.info("%s: compiled %s for size %s by %s in %.2f s", owner, piece.name, size, compiler, seconds)
    return run


def _compile(
    piece: Piece, config: CompilationConfig, manager: PluginManager, owner: str
) -> tuple[Callable[..., Any], str]:
    if _writes_to_shared_memory(piece):
        logger.info("%s: %s writes to memory that two of its inputs share, so it runs eagerly", owner, piece.name)
        return eager_piece(piece).run, "eager"
    try:
        with torch.inference_mode(False), internals.one_trace_for_all_sizes():
            answer = manager.compile_piece(piece, config)
        if answer is None and config.piece_compiler not in (None, "eager"):
            raise CompileError(f"piece compiler {config.piece_compiler!r} declined {piece.name} of {owner}")
    except Exception as error:
        failure = error if isinstance(error, PieceworkError) else CompileError(str(error))
        if config.on_failure == "error":
            if failure is error:
                raise
            raise CompileError(f"{piece.name} of {owner} can't be compiled: {failure}") from error
        message = f"{piece.name} of {owner} runs eagerly, since compiling it failed: {failure}"
        warnings.warn(PieceworkWarning(message), stacklevel=2)
        return eager_piece(piece).run, "eager"
    if answer is None:
        return eager_piece(piece).run, "eager"
    counters.num_piece_compilations += 1
    compiled, plugin = answer
    return compiled.run, plugin


def _writes_to_shared_memory(piece: Piece) -> bool:
    return any(set(group).intersection(piece.mutated_inputs) for group in piece.aliased_inputs)


def eager_piece(piece: Piece) -> CompiledPiece:
    """Return a piece that runs its graph op by op: the core's own answer, asked last."""
    return CompiledPiece(piece.graph.forward)


def specialised(piece: Piece, size: int | Mapping[str, int], values: Mapping[sympy.Symbol, int]) -> Piece:
    """Return a piece whose example inputs have one exact size; its inputs stay the same."""
    shape_env = _shape_env_of(piece)
    graph = torch.fx.GraphModule(piece.graph, _copied(piece.graph.graph))
    mode = internals.new_fake_mode()
    examples: list[Any] = []
    with mode:
        for node in graph.graph.find_nodes(op="placeholder"):
            example = _exact(node.meta["example_value"], values, shape_env)
            node.meta["example_value"] = example
            if isinstance(example, int):
                for user in list(node.users):
                    user.args, user.kwargs = torch.fx.node.map_arg(
                        (user.args, user.kwargs), lambda arg, node=node, number=example: number if arg is node else arg
                    )
            examples.append(example)
    graph.recompile()
    with mode, torch.no_grad():
        _Refresher(graph).run(*[fresh_fake(example) for example in examples])
    name = f"{piece.name} for size {size}"
    return replace(piece, name=name, graph=graph, example_inputs=tuple(examples), size=size)


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    copied = torch.fx.Graph()
    output = copied.graph_copy(graph, {})
    copied.output(output)
    return copied


class _Refresher(torch.fx.Interpreter):
    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op not in ("placeholder", "output"):
            n.meta["example_value"] = result
        return result


def _exact(example: Any, values: Mapping[sympy.Symbol, int], shape_env: internals.ShapeEnv | None) -> Any:
    def number(size: int | torch.SymInt) -> int:
        return size if isinstance(size, int) else int(internals.size_expression(size, shape_env).xreplace(values))  # pyright: ignore[reportArgumentType]

    if isinstance(example, (int, torch.SymInt)):
        return number(example)
    if type(example) not in (internals.FakeTensor, torch.nn.Parameter):
        return example
    shape, stride = [number(size) for size in example.size()], [number(step) for step in example.stride()]
    made = torch.empty_strided(shape, stride, dtype=example.dtype, device=example.device)
    return torch.nn.Parameter(made, example.requires_grad) if isinstance(example, torch.nn.Parameter) else made


def _shape_env_of(piece: Piece) -> internals.ShapeEnv | None:
    for example in piece.example_inputs:
        mode = getattr(example, "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return mode.shape_env
    return None
