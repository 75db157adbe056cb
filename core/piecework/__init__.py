"""Compile a PyTorch model piece by piece."""

from piecework.hookspecs import hookimpl
from piecework.pieces import CompiledPiece, Piece, SplittingOp

__all__ = ["CompiledPiece", "Piece", "SplittingOp", "hookimpl"]

__version__ = "0.1.0"
