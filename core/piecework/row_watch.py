"""Watch the ATen ops that run on fake tensors, and find the first that lets rows depend on each other."""

from __future__ import annotations

from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.effects import SIZE_READERS, tensors_in
from piecework.row_calls import RowCall, base_name, make_call, written_arguments
from piecework.row_places import RowPlace, RowSizes, RowsMixedError
from piecework.row_rules import Rule, may_be_random, rule_for

_LOOK_AT_NO_ELEMENTS = SIZE_READERS | {"prim::device", "prim::layout", "aten::_assert_scalar"}


class RowWatch(internals.TorchDispatchMode):
    """Follows the rows through all ops that run while it is entered.

    It sees what the compilers see: ops of ATen, below autocast and ``torch.func``.

    Attributes:
        found: the first reason, in words that name the op; later ops are not looked at.
    """

    def __init__(self, sizes: RowSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.found: str | None = None
        self.seen: dict[int, tuple[torch.Tensor, RowPlace | None]] = {}
        """By id; it holds the tensors, so that no other gets the id."""
        self.memory_has_rows: dict[int | None, bool] = {}
        """By storage: whether the tensor that it was first seen with has rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except internals.DataDependentOutputException:
            self.note(f"{_name(func)} reads a number from a tensor")
            raise
        if self.found is None:
            try:
                self.look_at(func, args, kwargs, result)
            except RowsMixedError as mixed:
                self.note(f"{_name(func)} {mixed}")
        return result

    def note(self, why: str | None) -> None:
        """Keep the first reason."""
        self.found = self.found or why

    def place(self, tensor: torch.Tensor) -> RowPlace | None:
        """Return where the rows of a tensor stand; one that no op gave has them in a dim of their own.

        Raises:
            RowsMixedError: it has not.
        """
        if id(tensor) not in self.seen:
            self.keep(tensor, self.sizes.place(tensor))
        return self.seen[id(tensor)][1]

    def keep(self, tensor: torch.Tensor, place: RowPlace | None) -> None:
        """Remember where the rows of a tensor stand."""
        self.seen[id(tensor)] = (tensor, place)
        self.memory_has_rows.setdefault(internals.storage_key(tensor), place is not None)

    def look_at(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Look at one call: note why it mixes rows, or remember where those of its results stand."""
        if not isinstance(op, internals.OpOverload):
            self.note(f"{_name(op)} is not looked into")
            return
        if base_name(op) in _LOOK_AT_NO_ELEMENTS:
            return
        call = make_call(op, args, kwargs, result, self.sizes)
        for tensor in tensors_in(call.arguments):
            call.places[id(tensor)] = self.place(tensor)
        rule = rule_for(op, call.name)
        self.note(self.why(op, call, rule))
        if self.found is None:
            for tensor in call.results:
                self.keep(tensor, self.place_of_result(call, tensor, rule))

    def why(self, op: internals.OpOverload, call: RowCall, rule: Rule | None) -> str | None:
        name = _name(op)
        if may_be_random(op, call):
            return f"{name} draws random numbers"
        written = written_arguments(op, call)
        if any((call.places[id(t)] is not None) is not self.memory_has_rows[internals.storage_key(t)] for t in written):
            return f"{name} writes rows to memory that has none"
        numbers = [key for key, value in call.arguments.items() if self.is_number_of_rows(value)]
        if op.namespace == "aten" and not numbers and not call.with_rows() and not self.any_rows(call.results):
            return None
        if rule is None:
            return f"{name} is not known to keep rows apart"
        if any(key not in rule.shapes for key in numbers):
            return f"{name} uses the number of rows as a number"
        if call.with_rows() and not rule.makes_constants and call.common_place() is None:
            return f"{name} brings different rows together"
        return None if call.results and rule.check(call) else f"{name} {rule.why}"

    def is_number_of_rows(self, value: Any) -> bool:
        return any(self.sizes.depends(leaf) for leaf in internals.pytree.tree_leaves(value))

    def any_rows(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        return any(self.sizes.row_dim(tensor) is not None for tensor in tensors)

    def place_of_result(self, call: RowCall, result: torch.Tensor, rule: Rule | None) -> RowPlace | None:
        """Return where the rows of a result stand, of an op that keeps them apart.

        Raises:
            RowsMixedError: they are gone, or stand in no place that follows from the arguments.
        """
        common = call.common_place()
        if rule is not None and rule.makes_constants:
            return self.sizes.place(result, None if "size" in call.arguments else common)
        if rule is not None and rule.keeps_order and common is not None:
            return self.sizes.place_in_view(result, call.first(), common)
        place = self.sizes.place(result, common)
        if place is None and common is not None and not self.may_lack_rows(result, rule):
            raise RowsMixedError(f"gives a result without rows: {self.sizes.shape_text(result)}")
        return place

    def may_lack_rows(self, result: torch.Tensor, rule: Rule | None) -> bool:
        return (rule is not None and rule.may_drop_rows) or self.sizes.is_empty(result)


def _name(op: Any) -> str:
    return op.name().partition(".")[0] if isinstance(op, internals.OpOverload) else str(op)
