"""The objects that hooks receive and return: splitting ops, pieces and compiled pieces."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SplittingOp:
    """An op at which a traced graph is cut; it always runs eagerly between two pieces.

    Args:
        name: ``"ns::op"``, ``"ns.op"`` or ``"ns::op.overload"``; a built-in op by its ATen name
            (``"aten::scaled_dot_product_attention"``) means the torch function, the method and the
            operator of that name.
        capturable: whether a device graph may hold the op; a function gets the size of a call.
        rows_independent: whether each row of its results depends on the same row of its inputs only.
        implementation: a Python function with the op's signature, called instead of the dispatcher
            where that is the cheapest correct route.
    """

    name: str
    capturable: bool | Callable[[Any], bool] = field(default=False, kw_only=True)
    rows_independent: bool = field(default=False, kw_only=True)
    implementation: Callable[..., Any] | None = field(default=None, kw_only=True)


class InputKind(enum.Enum):
    """Where an input of a piece comes from."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    SIZE = "size"


@dataclass(frozen=True)
class Piece:
    """What lies between two cuts: a graph to compile, and all that a compiler may rely on.

    Layers that are alike share one piece, so it names no parameter: parameters are inputs.
    """

    name: str
    """The name of the first place where it stands, such as ``"piece_0"``."""
    graph: torch.fx.GraphModule
    """Flat inputs, a tuple as its output. A compiler must not change it; ``copy.deepcopy`` may."""
    example_inputs: tuple[Any, ...]
    """One per placeholder: a ``FakeTensor`` (symbolic dims unless ``size`` is given) or a
    ``SymInt``. No memory stands behind them."""
    input_kinds: tuple[InputKind, ...]
    mutated_inputs: tuple[int, ...]
    """Indices of the inputs that the piece writes to."""
    aliased_inputs: tuple[tuple[int, ...], ...]
    """Groups of inputs that share memory, in every place where the piece stands."""
    outputs_are_fresh: bool
    """No output is, or is a view of, an input or another output."""
    key: str
    """Hash of the canonical form: equal for pieces that may share compiled code."""
    size: int | Mapping[str, int] | None = None
    """The exact size to compile for; ``None`` for the general, symbolic shape."""


@dataclass(frozen=True)
class CompiledPiece:
    """A compiler's answer.

    Args:
        run: called as ``run(*flat_inputs)`` with gradients off; returns a tuple or list with one
            entry per output of the piece's graph.
        save: returns what a later process needs to run the piece without compiling it.
    """

    run: Callable[..., Any]
    save: Callable[[], bytes] | None = field(default=None, kw_only=True)


EAGER = "eager"
"""Stands for the name of a plugin where a piece runs op by op."""


@dataclass(frozen=True)
class PieceRun:
    """What runs a piece at some sizes, and the name of the plugin that compiled it."""

    run: Callable[..., Any]
    compiler: str
    origin: str = ""
    """The plugin and its distribution, for messages."""

    @property
    def how(self) -> str:
        """Return in words what runs."""
        return "run op by op" if self.compiler == EAGER else f"compiled by {self.origin or self.compiler}"
