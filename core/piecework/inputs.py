"""What a traced graph is called with: where each input comes from, and what its sizes are called."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from piecework import torch_internals as internals
from piecework.config_checks import Size
from piecework.effects import Effects
from piecework.errors import ConfigError
from piecework.pieces import InputKind
from piecework.split import PieceStep

Key = Any
"""A size as plans are looked up by: a number, or a tuple of one number per named dim."""
Numbers = Mapping[sympy.Symbol, sympy.Integer]
"""The value of each symbol of a graph at one size."""


@dataclass(frozen=True)
class GraphInput:
    """Where a placeholder of the graph gets its value from."""

    kind: InputKind
    tensor_index: int | None = None
    """Of an activation: its position in ``Arguments.tensors``."""
    source: str | None = None
    """Of a parameter, buffer or global: an expression over ``L`` and ``G``."""


@dataclass(frozen=True)
class Sizes:
    """The named dims of a graph, and what its symbols have to do with them."""

    dims: Sequence[str]
    meaning_of_symbol: Mapping[sympy.Symbol, str | int]
    """The named dim that a symbol stands for, or the number where calls are held to one (a stride)."""
    shape_env: internals.ShapeEnv

    @property
    def variables(self) -> dict[str, str]:
        """Return the variable of generated code that holds the size of each dim."""
        return {dim: f"_pw_s{i}" for i, dim in enumerate(self.dims)}

    def key_of_size(self, size: Size, where: str) -> Key:
        """Return what a size that the user wrote is looked up by.

        Raises:
            ConfigError: it names other dims than there are.
        """
        return key_of_values(size_values(size, self.dims, where))

    def values_of(self, key: Key) -> dict[str, int]:
        """Return the value of each named dim at a size."""
        return dict(zip(self.dims, (key,) if len(self.dims) == 1 else key, strict=True))

    def num_rows(self, key: Key) -> int:
        """Return how many rows a size has in all."""
        return math.prod(self.values_of(key).values())

    def numbers_of(self, key: Key) -> Numbers:
        """Return the value of each symbol at a size."""
        values = self.values_of(key)
        return {
            symbol: sympy.Integer(values[meaning] if isinstance(meaning, str) else meaning)
            for symbol, meaning in self.meaning_of_symbol.items()
        }

    def named(self, expression: sympy.Basic) -> sympy.Basic:
        """Return an expression over symbols named like the dims."""
        meanings = {
            symbol: dim_symbol(meaning) if isinstance(meaning, str) else sympy.Integer(meaning)
            for symbol, meaning in self.meaning_of_symbol.items()
        }
        return expression.xreplace(meanings)

    def code(self, named: sympy.Basic) -> str:
        """Return an expression over the names of dims as Python over their variables."""
        variables = {dim_symbol(dim): dim_symbol(variable) for dim, variable in self.variables.items()}
        return internals.print_expression(named.xreplace(variables))


def size_values(size: Size, dims: Sequence[str], where: str) -> dict[str, int]:
    """Return the value of each named dim of a size.

    Raises:
        ConfigError: the size names other dims than the model has.
    """
    if isinstance(size, int):
        if len(dims) == 1:
            return {dims[0]: size}
        example = ", ".join(f'"{dim}": {size}' for dim in dims)
        raise ConfigError(f"{where}: the model has the dims {', '.join(dims)}, so give {{{example}}}, got {size}")
    if set(size) != set(dims):
        raise ConfigError(f"{where}: a size needs a value for each of {', '.join(dims)}, got {dict(size)}")
    return {dim: size[dim] for dim in dims}


def dim_symbol(name: str) -> sympy.Symbol:
    """Return the symbol that stands for a named dim, or for the variable that holds its size."""
    return sympy.Symbol(name, integer=True, positive=True)


def key_of_values(values: Mapping[str, int]) -> Key:
    """Return what a size is looked up by: its number, or a tuple where there are several dims."""
    return next(iter(values.values())) if len(values) == 1 else tuple(values.values())


@dataclass(frozen=True)
class GraphInputs:
    """All inputs of one graph."""

    by_placeholder: Mapping[Node, GraphInput]
    bound: Mapping[Node, torch.Tensor]
    """The parameters, buffers and globals themselves."""
    sizes: Sizes

    @property
    def tensor_indices(self) -> list[int]:
        """Return which of the tensor arguments the graph takes, in order."""
        return sorted(g.tensor_index for g in self.by_placeholder.values() if g.tensor_index is not None)

    def written_tensors(self, effects: Effects) -> list[int]:
        """Return which of the tensor arguments the graph writes to."""
        written = {key for keys in effects.written.values() for key in keys}
        return sorted(
            given.tensor_index
            for node, given in self.by_placeholder.items()
            if given.tensor_index is not None and written.intersection(effects.storages[node])
        )

    def kinds_of(self, step: PieceStep) -> tuple[InputKind, ...]:
        """Return where each input of a piece comes from."""
        return tuple(self._kind(value) for value in step.inputs)

    def _kind(self, value: Node | sympy.Symbol) -> InputKind:
        if isinstance(value, sympy.Symbol):
            return InputKind.SIZE
        return self.by_placeholder[value].kind if value in self.by_placeholder else InputKind.ACTIVATION
