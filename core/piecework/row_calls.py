"""One call of an ATen op, as the rules of row independence see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.effects import tensors_in
from piecework.row_places import RowPlace, RowSizes


@dataclass(frozen=True)
class RowCall:
    """A call of an op, and where the rows of its arguments stand."""

    name: str
    """``"aten::op"``; an op in place has the name of the one that is not."""
    arguments: dict[str, Any]
    """By the names of the schema, defaults filled in."""
    results: tuple[torch.Tensor, ...]
    places: dict[int, RowPlace | None]
    """Of each tensor argument, by its id."""
    sizes: RowSizes

    def tensors(self, name: str) -> list[torch.Tensor]:
        """Return the tensors of an argument, which may be a list."""
        return tensors_in(self.arguments.get(name))

    def first(self) -> torch.Tensor:
        """Return the first tensor argument."""
        return tensors_in(self.arguments)[0]

    def row_dim(self, name: str) -> int | None:
        """Return the row dim of an argument that is one tensor; None if it has none or was left out."""
        tensors = self.tensors(name)
        return self.row_dim_of(tensors[0]) if tensors else None

    def row_dim_of(self, tensor: torch.Tensor) -> int | None:
        """Return the row dim of a tensor argument."""
        place = self.places[id(tensor)]
        return None if place is None else place.dim

    def from_right(self, tensor: torch.Tensor) -> int | None:
        """Return the row dim of an argument or a result, counted from the right as in broadcasting."""
        known = id(tensor) in self.places
        dim = self.row_dim_of(tensor) if known else self.sizes.row_dim(tensor)
        return None if dim is None else dim - tensor.dim()

    def with_rows(self, *but: str) -> list[torch.Tensor]:
        """Return the tensor arguments that have rows, leaving out the named ones."""
        given = {name: value for name, value in self.arguments.items() if name not in but}
        return [tensor for tensor in tensors_in(given) if self.places[id(tensor)] is not None]

    def common_place(self) -> RowPlace | None:
        """Return how rows are joined with other dims in all arguments; None where they differ or there are none."""
        places = [place for place in self.places.values() if place is not None]
        if len({(place.outer, place.inner) for place in places}) != 1:
            return None
        return places[0]


def make_call(
    op: internals.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, sizes: RowSizes
) -> RowCall:
    """Return a call with its arguments by name; the places of its tensors are to be filled in."""
    arguments: dict[str, Any] = {}
    for position, argument in enumerate(internals.op_schema(op).arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        arguments[argument.name] = given
    return RowCall(base_name(op), arguments, tuple(tensors_in(result)), {}, sizes)


def base_name(op: internals.OpOverload) -> str:
    """Return the name of an op without its overload, and without the mark of an op in place."""
    name = op.name().partition(".")[0]
    return name if name.endswith("__") else name.removesuffix("_")


def written_arguments(op: internals.OpOverload, call: RowCall) -> list[torch.Tensor]:
    """Return the tensors that a call writes to."""
    names = [
        argument.name
        for argument in internals.op_schema(op).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [tensor for name in names for tensor in call.tensors(name)]
