"""A complete plugin for Piecework: an op of its own to cut graphs at, and a look at every piece.

Install it with ``pip install examples/piecework-foo``; ``python -m piecework plugins`` shows it then.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from piecework import CompiledPiece, Piece, SplittingOp, hookimpl

PIECEWORK_PLUGIN_API = 1


@torch.library.custom_op("foo::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply; importing this module is what registers the op."""
    return x * factor


@scale.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


@hookimpl
def piecework_splitting_ops() -> list[SplittingOp]:
    """Cut graphs at the op; each row of its result depends on the same row of its input only."""
    return [SplittingOp("foo::scale", rows_independent=True)]


@hookimpl(wrapper=True)
def piecework_compile_piece(piece: Piece) -> Generator[None, CompiledPiece | None, CompiledPiece | None]:
    """Print each piece and whether somebody compiled it, and change nothing."""
    compiled = yield
    num_ops = sum(node.op.startswith("call_") for node in piece.graph.graph.nodes)
    print(f"foo: {piece.name} with {num_ops} ops is {'compiled' if compiled else 'left to run eagerly'}")
    return compiled
