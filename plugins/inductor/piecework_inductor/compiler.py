"""Compile one piece, and find the cheapest correct way to call the result."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from piecework import CompiledPiece, CompileError, Piece
from piecework_inductor import inductor_internals as internals
from piecework_inductor.options import InductorOptions
from piecework_inductor.passes import UnfuseResiduals, with_pass
from piecework_inductor.settings import check_settings

logger = logging.getLogger("piecework.inductor")


def compile_piece(piece: Piece, options: InductorOptions) -> CompiledPiece:
    """Compile a piece for the shape of its example inputs, symbolic or exact.

    Raises:
        CompileError: Inductor failed, or took longer than ``compile_timeout_s``.
        ConfigError: the option ``config`` names what Inductor does not have.
    """
    check_settings(options.config)
    config = with_pass(options.config, UnfuseResiduals()) if options.unfuse_residuals else options.config
    with _watched(piece, options.compile_timeout_s):
        try:
            artifact = internals.compile_graph(copy.deepcopy(piece.graph), piece.example_inputs, config)
        except Exception as error:
            raise CompileError(f"Inductor can't compile {piece.name}: {_last_line(error)}") from error
    inner = internals.inner_function(artifact) if options.call_inner_function and _needs_no_wrapper(piece) else None
    num_outputs = len(piece.graph.graph.output_node().args[0])  # pyright: ignore[reportArgumentType]
    if inner is not None and inner.num_outputs == num_outputs:
        return CompiledPiece(_taking_arguments(inner, len(piece.example_inputs)))
    logger.debug("%s is called through all layers of Inductor's artifact", piece.name)
    return CompiledPiece(artifact)


def _needs_no_wrapper(piece: Piece) -> bool:
    """Whether nothing is left to do around the generated function.

    The layers around it give outputs that are inputs or views of them, unpack tensor subclasses and
    switch autocast off.
    """
    plain = all(
        type(example) in (internals.FakeTensor, torch.nn.Parameter)
        for example in piece.example_inputs
        if isinstance(example, torch.Tensor)
    )
    return piece.outputs_are_fresh and plain and not internals.is_any_autocast_enabled()


def _taking_arguments(inner: internals.InnerFunction, num_inputs: int) -> Callable[..., Any]:
    """Return a function of so many arguments around Inductor's, which takes one list and empties it.

    Its own look at the addresses of all inputs, parameters too, is a loop that takes as long as launching a kernel.
    Here it is one expression, and Inductor's way is gone where an address is odd.
    """
    arguments = ", ".join(f"a{i}" for i in range(num_inputs))
    lines = [f"def run({arguments}):"]
    if inner.checked_inputs:
        addresses = " | ".join(f"a{i}.data_ptr()" for i in inner.checked_inputs)
        lines += [f"    if ({addresses}) % {internals.ALIGNMENT}:", f"        return call([{arguments}])"]
    lines.append(f"    return aligned_call([{arguments}])")
    namespace = {"call": inner.call, "aligned_call": inner.aligned_call}
    exec("\n".join(lines), namespace)
    return namespace["run"]


@contextmanager
def _watched(piece: Piece, timeout_s: float) -> Iterator[None]:
    """Say that a piece takes long while it does; a thread in Inductor can't be stopped."""
    start = time.perf_counter()
    timer = threading.Timer(timeout_s, _warn, (piece.name, timeout_s))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.perf_counter() - start
    if seconds > timeout_s:
        raise CompileError(
            f"Inductor took {seconds:.1f} s for {piece.name}, more than compile_timeout_s={timeout_s:g}; raise it "
            'in plugin_options={"inductor": {"compile_timeout_s": ...}}, or cut the model at more ops'
        )


def _warn(name: str, timeout_s: float) -> None:
    logger.warning("Inductor has been compiling %s for more than %g s (compile_timeout_s)", name, timeout_s)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
