"""Find the pieces that are the same, so that layers that are alike compile once."""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from piecework import torch_internals as internals
from piecework.pieces import InputKind, Piece
from piecework.split import PieceStep

Row = tuple[Any, ...]


@dataclass(frozen=True)
class CanonicalForm:
    """A piece without names: two pieces may share compiled code only if all rows are equal.

    Attributes:
        rows: one per node, in order: what it is, and by number which nodes it uses.
        names: what a person would call each row.
        symbols: the sizes that occur, in order of appearance.
    """

    rows: tuple[Row, ...]
    names: tuple[str, ...]
    symbols: tuple[sympy.Symbol, ...]

    @property
    def key(self) -> str:
        """Return a hash of the rows."""
        return hashlib.sha256(repr(self.rows).encode()).hexdigest()


def canonical_form(step: PieceStep, kinds: Sequence[InputKind], shape_env: internals.ShapeEnv) -> CanonicalForm:
    """Return the form of a piece that leaves out the names of nodes, sizes and parameters.

    It holds all that a compiler may build into its code: ops, constants with their types, dtypes,
    shapes, strides, offsets, devices, classes, ``requires_grad``, kinds of inputs, which of them
    are written to or share memory, and the order of the results.
    """
    return _Canonicalizer(step, kinds, shape_env).run()


class _Canonicalizer:
    def __init__(self, step: PieceStep, kinds: Sequence[InputKind], shape_env: internals.ShapeEnv) -> None:
        self.step = step
        self.kinds = kinds
        self.shape_env = shape_env
        self.numbers: dict[Node, int] = {}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def run(self) -> CanonicalForm:
        rows: list[Row] = []
        names: list[str] = []
        kinds = iter(self.kinds)
        for node in self.step.graph.graph.nodes:
            self.numbers[node] = len(rows)
            if node.op == "placeholder":
                rows.append(("input", next(kinds).value, *self.tensor(node.meta["example_value"])))
            elif node.op == "get_attr":
                rows.append(("attribute", self.attribute(node)))
            else:
                target = node.target if node.op == "call_method" else _target_name(node.target)
                rows.append((node.op, target, self.argument(node.args), self.argument(node.kwargs)))
            names.append(f"input {len(rows)}" if node.op == "placeholder" else str(rows[-1][1]))
        ranges = tuple(str(internals.symbol_range(self.shape_env, symbol)) for symbol in self.symbols)
        rows += [("written", self.step.written), ("share memory", self.step.aliased), ("ranges", ranges)]
        rows.append(("fresh", self.step.outputs_are_fresh))
        names += ["what is written to", "what shares memory", "the ranges of sizes", "results that are inputs"]
        return CanonicalForm(tuple(rows), tuple(names), tuple(self.symbols))

    def tensor(self, example: Any) -> Row:
        if not isinstance(example, torch.Tensor):
            return (self.size(example),)
        return (
            type(example).__name__ if isinstance(example, torch.nn.Parameter) else _class_name(example),
            str(example.dtype),
            str(example.device),
            tuple(self.size(size) for size in example.shape),
            tuple(self.size(size) for size in example.stride()) if example.layout is torch.strided else None,
            self.size(example.storage_offset()) if example.layout is torch.strided else None,
            example.requires_grad,
        )

    def size(self, size: Any) -> str:
        if not isinstance(size, (int, torch.SymInt)):
            return repr(size)
        expression = internals.size_expression(size, self.shape_env)
        for symbol in internals.size_symbols(size, self.shape_env):
            self.symbols.setdefault(symbol, sympy.Symbol(f"s{len(self.symbols)}", integer=True, positive=True))
        return str(expression.xreplace(self.symbols))

    def argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return ("node", self.numbers[value])
        if isinstance(value, dict):
            return ("dict", *((key, self.argument(item)) for key, item in value.items()))
        if isinstance(value, slice):
            return ("slice", *map(self.argument, (value.start, value.stop, value.step)))
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *map(self.argument, value))
        return (type(value).__name__, value.hex() if isinstance(value, float) else repr(value))

    def attribute(self, node: Node) -> str:
        value = operator.attrgetter(str(node.target))(self.step.graph)
        if isinstance(value, torch.fx.GraphModule):
            return str(value.graph)
        return f"{type(value).__name__} {id(value)}"


def _class_name(tensor: torch.Tensor) -> str:
    return "Tensor" if type(tensor) is internals.FakeTensor else type(tensor).__qualname__


def _target_name(target: Any) -> str:
    if isinstance(target, internals.OpOverloadPacket):
        return internals.packet_name(target)
    if isinstance(target, internals.OpOverload):
        return internals.overload_name(target)  # not the name of its packet, which may choose another overload
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    # A function made at run time may share its name with others: it is told apart by identity.
    unique = "" if name and _named(module, name) is target else f" {id(target)}"
    return f"{module}.{name or target}{unique}"


def _named(module: str | None, name: str) -> Any:
    """Return what a module holds under a name, if anything."""
    try:
        return operator.attrgetter(name)(sys.modules[module or ""])
    except (KeyError, AttributeError):
        return None


@dataclass(frozen=True)
class UniquePiece:
    """A piece to compile, and where it stands."""

    piece: Piece
    form: CanonicalForm
    places: tuple[int, ...]
    """Positions among the pieces of the graph."""
    symbols_by_place: tuple[tuple[sympy.Symbol, ...], ...]
    """The sizes that occur in each place, in the order of the canonical form."""


def deduplicate(
    steps: Sequence[PieceStep],
    kinds_of: Callable[[PieceStep], tuple[InputKind, ...]],
    shape_env: internals.ShapeEnv,
) -> list[UniquePiece]:
    """Group pieces of equal canonical form, in order of first appearance.

    Equal hashes are not trusted: the forms themselves are compared.
    """
    groups: dict[CanonicalRows, list[int]] = {}
    forms = [canonical_form(step, kinds_of(step), shape_env) for step in steps]
    for place, form in enumerate(forms):
        groups.setdefault(form.rows, []).append(place)
    unique: list[UniquePiece] = []
    for places in groups.values():
        step, form = steps[places[0]], forms[places[0]]
        piece = Piece(
            name=step.name,
            graph=step.graph,
            example_inputs=tuple(node.meta["example_value"] for node in step.graph.graph.find_nodes(op="placeholder")),
            input_kinds=kinds_of(step),
            mutated_inputs=step.written,
            aliased_inputs=step.aliased,
            outputs_are_fresh=step.outputs_are_fresh,
            key=form.key,
        )
        unique.append(UniquePiece(piece, form, tuple(places), tuple(forms[place].symbols for place in places)))
    return unique


CanonicalRows = tuple[Row, ...]


def explain_difference(one: CanonicalForm, other: CanonicalForm) -> str | None:
    """Return in words the first difference between two pieces; None where they are the same."""
    for a, b, name in zip(one.rows, other.rows, one.names, strict=False):
        if a == b:
            continue
        both_tensors = a[0] == b[0] == "input" and len(a) == len(b) > 3
        if len(one.rows) != len(other.rows) and not both_tensors:
            break
        if a[0] != b[0] or a[0] in ("call_function", "call_method") and a[1] != b[1]:
            return f"they differ at {_op(name)}: {_op(a[1])} / {_op(b[1])}"
        if a[0] in ("call_function", "call_method"):
            return _explain_arguments(a, b)
        fields = ("kind", "class", "dtype", "device", "shape", "strides", "offset", "requires_grad")
        what = next((f for f, x, y in zip(fields, a[1:], b[1:], strict=False) if x != y), "value")
        left, right = next((x, y) for x, y in zip(a[1:], b[1:], strict=False) if x != y) if a[1:] and b[1:] else (a, b)
        return f"they differ at {name}{f' ({what})' if a[0] == 'input' else ''}: {left} / {right}"
    if len(one.rows) != len(other.rows):
        return f"one has {len(one.rows)} inputs and ops, the other {len(other.rows)}"
    return None


def _explain_arguments(a: Row, b: Row) -> str:
    for position, (x, y) in enumerate(zip(a[2][1:], b[2][1:], strict=False)):
        if x != y:
            return f"they differ at argument {position} of {_op(a[1])}: {_shown(x)} / {_shown(y)}"
    for x, y in zip(a[3][1:], b[3][1:], strict=False):
        if x != y:
            return f"they differ at argument {x[0]!r} of {_op(a[1])}: {_shown(x[1])} / {_shown(y[1])}"
    return f"they differ in the number of arguments of {_op(a[1])}"


def _op(name: str) -> str:
    return name.removesuffix(".default")


def _shown(argument: Any) -> str:
    if isinstance(argument, tuple) and argument and argument[0] == "node":
        return f"the result of node {argument[1]}"
    return argument[1] if isinstance(argument, tuple) and len(argument) == 2 else str(argument)
