"""Compile each unique piece, for the general shape and for the exact sizes that were asked for."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from piecework import torch_internals as internals
from piecework.config import CompilationConfig
from piecework.counting import counters
from piecework.dedupe import UniquePiece
from piecework.errors import CompileError, ConfigError, PieceworkError, PieceworkWarning, PluginError
from piecework.exact import copied_graph, exact_graph, run_on_fakes
from piecework.pieces import EAGER, CompiledPiece, Piece, PieceRun
from piecework.plugins import PluginManager
from piecework.process_settings import is_first_time
from piecework.settings import cache_dir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledUniquePiece:
    """What became of a unique piece."""

    unique: UniquePiece
    run: PieceRun
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
        run = _compile(one.piece, config, manager, owner)
        seconds = time.perf_counter() - start
        added = internals.shape_guards(shape_env)[before:]
        relations = tuple(internals.size_relation(guard.relation, shape_env) for guard in added)
        logger.info(
            "%s: compiled unique piece %d of %d (%s, stands in %d places) by %s in %.2f s",
            *(owner, index + 1, len(unique), one.piece.name, len(one.places), run.compiler, seconds),
        )
        compiled.append(CompiledUniquePiece(one, run, seconds, relations))
    return compiled


def compile_exact(
    one: CompiledUniquePiece,
    size: int | Mapping[str, int],
    values: Mapping[sympy.Symbol, int],
    config: CompilationConfig,
    manager: PluginManager,
    *,
    owner: str,
) -> PieceRun:
    """Compile a unique piece for one exact size.

    Args:
        one: the piece, already compiled for the general shape.
        size: as the user wrote it.
        values: the value of each symbol of the piece.
    """
    piece = specialised(one.unique.piece, size, values)
    start = time.perf_counter()
    run = _compile(piece, config, manager, owner)
    seconds = time.perf_counter() - start
    logger.info("%s: compiled %s for size %s by %s in %.2f s", owner, piece.name, size, run.compiler, seconds)
    return run


def _compile(piece: Piece, config: CompilationConfig, manager: PluginManager, owner: str) -> PieceRun:
    if _writes_to_shared_memory(piece):
        logger.info("%s: %s writes to memory that two of its inputs share, so it runs eagerly", owner, piece.name)
        return PieceRun(eager_piece(piece).run, EAGER)
    try:
        with torch.inference_mode(False), internals.one_trace_for_all_sizes():
            # A copy: what a compiler does to a graph that it then declines must not run.
            answer = manager.compile_piece(replace(piece, graph=copied_graph(piece.graph)), config)
    except ConfigError:
        raise  # a setting, not the piece: nothing that on_failure is about
    except PieceworkError as failure:  # whatever a plugin raised arrives as one of ours
        hint = _repro_hint(piece, failure, config)
        return _failed(piece, f"{failure}{hint}", failure, config, owner)
    if answer is None and config.piece_compiler not in (None, "eager"):
        error = CompileError(f"piece compiler {config.piece_compiler!r} declined {piece.name} of {owner}")
        return _failed(piece, str(error), error, config, owner)
    if answer is None:
        _say_that_nobody_compiles(config, manager, owner)
        return PieceRun(eager_piece(piece).run, EAGER)
    counters.num_piece_compilations += 1
    compiled, plugin = answer
    return PieceRun(compiled.run, plugin, str(manager.origin(plugin)))


def _failed(piece: Piece, text: str, failure: PieceworkError, config: CompilationConfig, owner: str) -> PieceRun:
    """Raise the failure with its full text, or run the piece eagerly and say so."""
    if config.on_failure == "error":
        failure.args = (text, *failure.args[1:])
        raise failure
    message = f"{piece.name} of {owner} runs eagerly, since compiling it failed: {text}"
    warnings.warn(PieceworkWarning(message), stacklevel=3)
    return PieceRun(eager_piece(piece).run, EAGER)


def _repro_hint(piece: Piece, failure: PieceworkError, config: CompilationConfig) -> str:
    """Write a script that compiles the piece alone; return the words that name it."""
    if isinstance(failure, PluginError) and failure.__cause__ is None:
        return ""  # an answer that is not allowed, or a plugin that is not there: no piece failed
    from piecework.tools.repro import write_repro  # seldom needed

    try:
        path = write_repro(piece, failure, cache_dir() / "repro", config=config)
    except Exception as error:  # Whatever is wrong with the script must not hide what is wrong with the piece.
        logger.warning("no repro script of %s could be written: %s", piece.name, error)
        return ""
    return f"; {path} compiles this piece alone"


def _say_that_nobody_compiles(config: CompilationConfig, manager: PluginManager, owner: str) -> None:
    if config.piece_compiler is None and not manager.names_of_compilers() and is_first_time("no piece compiler"):
        left_out = [f"{info.name} is {info.state}: {info.cause}" for info in manager.infos() if info.state != "active"]
        text = (
            f"no piece compiler is there, so the pieces of {owner} run op by op; install one of those that the README "
            'lists under "Piece compilers", or set piece_compiler="eager" to say that this is meant'
            + "".join(f" ({what})" for what in left_out)
        )
        warnings.warn(PieceworkWarning(text), stacklevel=2)


def _writes_to_shared_memory(piece: Piece) -> bool:
    return any(set(group).intersection(piece.mutated_inputs) for group in piece.aliased_inputs)


def eager_piece(piece: Piece) -> CompiledPiece:
    """Return a piece that runs its graph op by op: the core's own answer, asked last."""
    return CompiledPiece(piece.graph.forward)


def specialised(piece: Piece, size: int | Mapping[str, int], values: Mapping[sympy.Symbol, int]) -> Piece:
    """Return a piece whose example inputs have one exact size; its inputs stay the same."""
    graph = exact_graph(piece.graph, values, _shape_env_of(piece))
    run_on_fakes(graph, lambda node, result: node.meta.__setitem__("example_value", result))
    examples = tuple(node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder"))
    return replace(piece, name=f"{piece.name} for size {size}", graph=graph, example_inputs=examples, size=size)


def _shape_env_of(piece: Piece) -> internals.ShapeEnv | None:
    modes = (getattr(example, "fake_mode", None) for example in piece.example_inputs)
    return next((mode.shape_env for mode in modes if mode is not None and mode.shape_env is not None), None)
