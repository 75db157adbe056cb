"""Compile pieces with TorchInductor, which is imported when the first piece asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piecework import hookimpl, read_options

if TYPE_CHECKING:
    from piecework import CompilationConfig, CompiledPiece, Piece

PIECEWORK_PLUGIN_API = 1


@hookimpl(trylast=True)
def piecework_compile_piece(piece: Piece, config: CompilationConfig) -> CompiledPiece:
    """Compile any piece; asked after all third-party compilers."""
    from piecework_inductor.compiler import compile_piece  # Inductor takes a second to import.
    from piecework_inductor.options import InductorOptions

    return compile_piece(piece, read_options(InductorOptions, config, "inductor"))
