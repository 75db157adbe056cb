"""Whether the rows of a traced forward are independent: padding them at the end changes no real row.

Over-cautious: an op that is not known to keep rows apart is taken to mix them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Interpreter, Node
from torch.fx.node import map_arg

from piecework import torch_internals as internals
from piecework.dedupe import UniquePiece
from piecework.effects import fresh_fake, line_of, op_name, tensors_in
from piecework.inputs import Sizes
from piecework.pieces import SplittingOp
from piecework.row_places import RowSizes, RowsMixedError
from piecework.row_watch import RowWatch
from piecework.split import EagerStep, PieceStep, SplitGraph


def why_rows_depend(
    split: SplitGraph, sizes: Sizes, dim: str, *, unique: Sequence[UniquePiece] | None = None
) -> str | None:
    """Return in words the first thing that lets a row's result depend on rows after it; None where nothing does.

    Nothing is assumed of what padded rows hold, except that ops accept it: indices must be valid.
    The other named dims are taken as constants. The trace is left as it is: no guard is added.

    Args:
        split: a traced graph, cut into steps.
        sizes: what the symbols of the graph stand for.
        dim: the named dim that counts the rows.
        unique: the same pieces without repetition, so that layers that are alike are looked at once.
    """
    row_sizes = RowSizes(sizes, dim)
    written = _why_inputs_are_written(split)
    mode = _fake_mode(split)
    if written is not None or mode is None:
        return written
    chosen = _distinct_pieces(split.pieces, unique, row_sizes)
    eager = _EagerRun(split, row_sizes)
    with (
        internals.one_trace_for_all_sizes(),
        mode,
        internals.without_new_guards(mode),
        internals.keeping_sizes_symbolic(),
    ):
        for step in split.steps:
            why = None
            if isinstance(step, EagerStep):
                why = eager.why_step(step)
            elif step.name in chosen:
                why = _why_in_piece(step, row_sizes)
            if why is not None:
                return why
        return eager.why_returned(split.returned)


def _fake_mode(split: SplitGraph) -> internals.FakeTensorMode | None:
    """Return the mode of the trace; None where it has no tensor."""
    tensors = (tensor for value in split.effects.values.values() for tensor in tensors_in(value))
    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, internals.FakeTensor)), None)


def _distinct_pieces(
    pieces: Sequence[PieceStep], unique: Sequence[UniquePiece] | None, sizes: RowSizes
) -> frozenset[str]:
    """Return the names of pieces that stand for all: those that are alike, with the rows in the same sizes."""
    if unique is None:
        return frozenset(piece.name for piece in pieces)
    chosen: dict[tuple[int, tuple[bool, ...]], str] = {}
    for number, one in enumerate(unique):
        for place, symbols in zip(one.places, one.symbols_by_place, strict=True):
            are_rows = tuple(sizes.symbol_depends(symbol) for symbol in symbols)
            chosen.setdefault((number, are_rows), pieces[place].name)
    return frozenset(chosen.values())


def _why_inputs_are_written(split: SplitGraph) -> str | None:
    """Return in words the first write to memory that outlives the call: padded rows would stay there."""
    nodes = list(split.graph.graph.nodes)
    lasting = {
        key: node.name
        for node in nodes
        if node.op in ("placeholder", "get_attr")
        for key in split.effects.storages.get(node, ())
        if key is not None
    }
    for node in nodes:
        for key in split.effects.written.get(node, ()):
            if key in lasting:
                name = op_name(node) or str(node.target)
                return f"{name} writes to the input {lasting[key]}{_where(split, node)}{line_of(node)}"
    return None


def _where(split: SplitGraph, node: Node) -> str:
    """Return in words the piece that holds a node of the traced graph."""
    for step in split.pieces:
        if any(inside.name == node.name and inside.op == node.op for inside in step.graph.graph.nodes):
            return f" in {step.name}"
    return _OUTSIDE


_OUTSIDE = " between pieces"


# --- pieces -----------------------------------------------------------------------------------


def _why_in_piece(step: PieceStep, sizes: RowSizes) -> str | None:
    """Return in words the first thing in a piece that mixes rows; called under the fake mode."""
    if any(set(group).intersection(step.written) for group in step.aliased):
        return f"{step.name} writes to memory that several of its inputs share"
    watch = RowWatch(sizes)
    run = _PieceRun(step, watch)
    examples = [fresh_fake(node.meta["example_value"]) for node in step.graph.graph.find_nodes(op="placeholder")]
    with watch:
        run.run(*examples)
    if watch.found is None or run.found_at is None:
        return None
    return f"{watch.found} in {step.name}{line_of(run.found_at)}"


class _PieceRun(Interpreter):
    """Runs a piece on fakes to its end, also past what mixes rows: it may have entered contexts."""

    def __init__(self, step: PieceStep, watch: RowWatch) -> None:
        super().__init__(step.graph, garbage_collect_values=False)
        self.watch = watch
        self.found_at: Node | None = None

    def run_node(self, n: Node) -> Any:
        if isinstance(n.target, internals.HigherOrderOperator):
            self.watch.note(f"{n.target.name()} is not looked into")
            result = n.meta["example_value"]
        else:
            try:
                result = super().run_node(n)
            except internals.DataDependentOutputException:
                result = n.meta["example_value"]
        if self.watch.found is not None and self.found_at is None:
            self.found_at = n
        return result


# --- between the pieces -----------------------------------------------------------------------


class _EagerRun:
    """Looks at what runs between pieces: splitting ops, allocations, and views that are taken again."""

    def __init__(self, split: SplitGraph, sizes: RowSizes) -> None:
        self.effects = split.effects
        self.sizes = sizes
        self.watch = RowWatch(sizes)
        self.values: dict[Node, Any] = {}
        self.found_at: Node | None = None
        self.crossing = {node for piece in split.pieces for node in piece.outputs}
        self.first_with_memory: dict[int | None, Node] = {}
        for node in split.graph.graph.nodes:
            for key in self.effects.storages.get(node, ()):
                self.first_with_memory.setdefault(key, node)

    def why_step(self, step: EagerStep) -> str | None:
        """Return in words the first thing in a step that mixes rows."""
        for node in step.nodes:
            why = self.why_op(node, step.ops[node]) if node in step.ops else self.why_node(node)
            if why is not None:
                return why
        return None

    def why_returned(self, returned: Sequence[Any]) -> str | None:
        """Return in words why padding can't be cut off what the graph returns."""
        for node in returned:
            if isinstance(node, Node) and (why := self.why_node(node)) is not None:
                return why
        return None

    def why_node(self, node: Node) -> str | None:
        value = self.value(node)
        if self.watch.found is not None:
            return f"{self.watch.found}{_OUTSIDE}{line_of(self.found_at or node)}"
        unplain = self.why_unplain(tensors_in(value))
        return None if unplain is None else f"{node.name} {unplain}{line_of(node)}"

    def why_unplain(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return in words why the rows of some tensor can't be cut."""
        try:
            for tensor in tensors:
                place = self.watch.place(tensor)
                if place is not None and not place.is_plain:
                    return f"has rows in no dim of their own: {self.sizes.shape_text(tensor)}"
        except RowsMixedError as mixed:
            return str(mixed)
        return None

    def why_op(self, node: Node, op: SplittingOp) -> str | None:
        """Return in words why a splitting op does not keep rows apart."""
        name = f"splitting op {op_name(node)}"
        given = [tensor for arg in node.all_input_nodes for tensor in tensors_in(self.value(arg))]
        results = tensors_in(self.effects.values[node])
        self.values[node] = self.effects.values[node]
        if self.watch.found is not None:
            return f"{self.watch.found}{_OUTSIDE}{line_of(self.found_at or node)}"
        why = None if op.rows_independent else "does not declare rows_independent"
        why = why or self.why_unplain((*given, *results)) or self.why_numbers(node)
        why = why or self.why_without_rows(given, results) or self.why_written(node)
        return None if why is None else f"{name} {why}{line_of(node)}"

    def why_numbers(self, node: Node) -> str | None:
        numbers = [self.effects.values[arg] for arg in node.all_input_nodes if self.effects.is_scalar(arg)]
        return "uses the number of rows as a number" if any(map(self.sizes.depends, numbers)) else None

    def why_without_rows(self, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> str | None:
        if all(self.watch.place(tensor) is None for tensor in given):
            return None
        lacking = [t for t in results if self.watch.place(t) is None and not self.sizes.is_empty(t)]
        return f"gives a result without rows: {self.sizes.shape_text(lacking[0])}" if lacking else None

    def why_written(self, node: Node) -> str | None:
        """Return in words why a write may reach memory that other rows, or all, are read from."""
        for arg in node.all_input_nodes:
            for key in self.effects.written[node].intersection(self.effects.storages[arg]):
                tensors = (*tensors_in(self.value(arg)), *tensors_in(self.effects.values[self.first_with_memory[key]]))
                if any(self.sizes.row_dim(tensor) is None for tensor in tensors):
                    return "writes to memory without rows"
        return None

    def value(self, node: Node) -> Any:
        """Return what a node gives; views are taken again, under watch, as the generated code does."""
        while node in self.effects.identical and node not in self.crossing and node not in self.values:
            node = self.effects.aliased[node]
        if node not in self.values:
            self.values[node] = self.taken_again(node)
        return self.values[node]

    def taken_again(self, node: Node) -> Any:
        value = self.effects.values[node]
        is_given = node.op in ("placeholder", "get_attr") or node in self.crossing
        if is_given or self.effects.is_scalar(node) or not tensors_in(value):
            return value
        args, kwargs = map_arg((node.args, node.kwargs), self.value)
        with self.watch:
            taken = _call(node, args, kwargs)
        if self.watch.found is not None and self.found_at is None:
            self.found_at = node
        return taken


def _call(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target: Any = node.target
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)
