"""Where the rows of a tensor stand, read from symbolic shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from piecework import torch_internals as internals
from piecework.inputs import Sizes, dim_symbol


@dataclass(frozen=True)
class RowPlace:
    """The dim of a tensor that counts its rows.

    Its index is ``(outer, row, inner)`` in one number: views such as ``[rows, heads, width]`` to
    ``[rows * heads, width]`` join the rows with other dims, and later views part them again.
    """

    dim: int
    outer: sympy.Expr = sympy.S.One
    inner: sympy.Expr = sympy.S.One

    @property
    def is_plain(self) -> bool:
        """Whether the dim is the rows and nothing else."""
        return self.outer == self.inner == 1


class RowsMixedError(Exception):
    """Rows can't be told apart by the shape of a tensor."""


@dataclass
class RowSizes:
    """Tells the sizes that have to do with one named dim from those that do not."""

    sizes: Sizes
    dim: str
    known: dict[sympy.Basic, sympy.Expr] = field(default_factory=dict)
    same: frozenset[sympy.Basic] = field(init=False)
    """What the trace takes to be the number of rows too: ``table[:rows]`` has ``min(rows, 16)`` of them."""

    def __post_init__(self) -> None:
        guards = internals.shape_guards(self.sizes.shape_env)
        sides = [self.sizes.named(guard.relation).args for guard in guards if isinstance(guard.relation, sympy.Eq)]
        equal = [side for pair in sides if self.num_rows in pair for side in pair]
        self.same = frozenset(side for side in equal if self.num_rows in side.free_symbols)

    @property
    def num_rows(self) -> sympy.Symbol:
        """Return what stands for the number of rows in the expressions of ``size``."""
        return dim_symbol(self.dim)

    def size(self, value: int | torch.SymInt) -> sympy.Expr:
        """Return a size over the names of dims; comparing symbolic sizes would ask torch for their values."""
        if isinstance(value, int):
            return sympy.Integer(value)
        expression = internals.size_expression(value, self.sizes.shape_env)
        if expression not in self.known:
            named = self.sizes.named(expression)
            self.known[expression] = self.num_rows if named in self.same else named  # pyright: ignore[reportArgumentType]
        return self.known[expression]

    def depends(self, value: Any) -> bool:
        """Whether a number changes with the number of rows, or may: it is read from a tensor."""
        return any(map(self.symbol_depends, internals.size_symbols(value, self.sizes.shape_env)))

    def symbol_depends(self, symbol: sympy.Symbol) -> bool:
        """Whether a symbol stands for the number of rows, or for something that is not known."""
        return self.sizes.meaning_of_symbol.get(symbol, self.dim) == self.dim

    def row_dim(self, tensor: torch.Tensor) -> int | None:
        """Return the one dim whose size changes with the number of rows; None where none does.

        Raises:
            RowsMixedError: several do.
        """
        found = [dim for dim, size in enumerate(tensor.shape) if self.depends(size)]
        if len(found) > 1:
            raise RowsMixedError(f"has rows in several dims of {self.shape_text(tensor)}")
        return found[0] if found else None

    def place(self, tensor: torch.Tensor, like: RowPlace | None = None) -> RowPlace | None:
        """Return where the rows of a tensor stand, if it has any.

        Args:
            tensor: any tensor of the graph.
            like: how the rows are joined with other dims; plain rows where it is not given.

        Raises:
            RowsMixedError: they stand in several dims, or not like that.
        """
        dim = self.row_dim(tensor)
        if dim is None:
            return None
        outer, inner = (like.outer, like.inner) if like is not None else (sympy.S.One, sympy.S.One)
        if self.size(tensor.shape[dim]) != outer * self.num_rows * inner:
            raise RowsMixedError(f"has rows in no dim of their own: {self.shape_text(tensor)}")
        return RowPlace(dim, outer, inner)

    def place_in_view(self, result: torch.Tensor, source: torch.Tensor, place: RowPlace) -> RowPlace:
        """Return where the rows of a tensor stand after a view that keeps the order of its elements.

        Raises:
            RowsMixedError: a row is no longer in one place.
        """
        dim = self.row_dim(result)
        if dim is not None:
            outer = self.product(source.shape[: place.dim]) * place.outer / self.product(result.shape[:dim])
            inner = self.size(result.shape[dim]) / (outer * self.num_rows)
            if outer.is_integer and inner.is_integer:
                return RowPlace(dim, outer, inner)
        raise RowsMixedError(f"mixes rows: {self.shape_text(source)} to {self.shape_text(result)}")

    def product(self, shape: Iterable[int | torch.SymInt]) -> sympy.Expr:
        """Return the product of sizes."""
        return sympy.Mul(*(self.size(size) for size in shape))

    def is_empty(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no elements at any size."""
        return any(self.size(size) == 0 for size in tensor.shape)

    def shape_text(self, tensor: torch.Tensor) -> str:
        """Return a shape as a person would write it."""
        return f"[{', '.join(str(self.size(size)) for size in tensor.shape)}]"
