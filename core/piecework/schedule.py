"""The steps of a split graph one by one, and how long each value is needed: the same for all sizes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from piecework.pieces import SplittingOp
from piecework.split import PieceStep, SplitGraph


@dataclass(frozen=True)
class OpStep:
    """A splitting op, or a node beside one that costs no kernel."""

    node: Node
    op: SplittingOp | None


Unit = PieceStep | OpStep


@dataclass(frozen=True)
class Outline:
    """What neighbouring units that become one graph read, write and give.

    Attributes:
        given: nodes whose values exist before them, and that they read or write.
        written: positions in ``given`` of those that they write to.
        exports: nodes of theirs that later units need: single tensors, not the several results of an op.
        dying: for each unit, the values of theirs that no later one of them needs.
    """

    given: tuple[Node, ...]
    written: tuple[int, ...]
    exports: tuple[Node, ...]
    dying: tuple[tuple[Node, ...], ...]


class Schedule:
    """What runs in which order, and after which unit nobody needs a value any longer.

    Args:
        split: the graph.
        outside: nodes whose values exist before the first unit: arguments, parameters and buffers.
        results: nodes that the caller's results are made from.
    """

    def __init__(self, split: SplitGraph, outside: Iterable[Node], results: Sequence[Node]) -> None:
        self.effects = split.effects
        self.units: list[Unit] = []
        for step in split.steps:
            if isinstance(step, PieceStep):
                self.units.append(step)
            else:
                self.units += [OpStep(node, step.ops.get(node)) for node in _unpacked_at_once(step.nodes)]
        self.outside = frozenset(outside)
        self.defined = self.outside.union(*(self.definitions(unit) for unit in self.units))
        """The nodes with values of their own; all others are views and numbers that follow from these."""
        self._bases: dict[Node, tuple[Node, ...]] = {}
        self.last_use: dict[Node, int] = {}
        for index, unit in enumerate(self.units):
            for used in (*self.uses(unit), *self.definitions(unit)):
                self.last_use.update(dict.fromkeys(self.bases(used), index))
        for node in results:
            self.last_use.update(dict.fromkeys(self.bases(node), len(self.units)))
        self.dying: list[list[Node]] = [[] for _ in range(len(self.units) + 1)]
        """The nodes that each unit is the last to use."""
        for node, index in self.last_use.items():
            if node not in self.outside:
                self.dying[index].append(node)
        self._outlines: dict[tuple[int, ...], Outline] = {}

    def outline(self, indices: tuple[int, ...]) -> Outline:
        """Return what units that become one graph have to do with the others; the same object for all sizes."""
        if indices not in self._outlines:
            self._outlines[indices] = self._outline_of(indices)
        return self._outlines[indices]

    def _outline_of(self, indices: tuple[int, ...]) -> Outline:
        effects, units = self.effects, [self.units[index] for index in indices]
        own = dict.fromkeys(node for unit in units for node in self.definitions(unit))
        used = dict.fromkeys(base for unit in units for value in self.uses(unit) for base in self.bases(value))
        given = tuple(node for node in used if node not in own)
        exports = tuple(
            node
            for node in own
            if self.last_use.get(node, -1) > indices[-1] and isinstance(effects.values[node], torch.Tensor)
        )
        written: set[int | None] = set().union(*map(self.writes, units))
        kept = {*given, *exports}
        return Outline(
            given,
            tuple(i for i, node in enumerate(given) if written.intersection(effects.storages[node])),
            exports,
            tuple(tuple(node for node in self.dying[index] if node not in kept) for index in indices),
        )

    def writes(self, unit: Unit) -> set[int | None]:
        """Return the storages that a unit writes to."""
        if isinstance(unit, OpStep):
            return set(self.effects.written[unit.node])
        written = (unit.inputs[position] for position in unit.written)
        return {key for node in written if isinstance(node, Node) for key in self.effects.storages[node]}

    def definitions(self, unit: Unit) -> tuple[Node, ...]:
        """Return the nodes that a unit gives a value of its own: not an argument that is handed through."""
        if isinstance(unit, PieceStep):
            return unit.outputs
        return () if unit.node in self.effects.identical else (unit.node,)

    def uses(self, unit: Unit) -> list[Node]:
        """Return the nodes whose values a unit takes."""
        if isinstance(unit, PieceStep):
            return [value for value in unit.inputs if isinstance(value, Node)]
        return unit.node.all_input_nodes

    def resolve(self, node: Node) -> Node:
        """Return the node whose value is the same tensor."""
        while node in self.effects.identical and node not in self.defined:
            node = self.effects.aliased[node]
        return node

    def bases(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes with values of their own that a use of ``node`` needs."""
        if node not in self._bases:
            resolved = self.resolve(node)
            if resolved in self.defined:
                self._bases[node] = (resolved,)
            elif self.effects.is_scalar(resolved):
                self._bases[node] = ()
            else:
                found = (base for arg in resolved.all_input_nodes for base in self.bases(arg))
                self._bases[node] = tuple(dict.fromkeys(found))
        return self._bases[node]


def _unpacked_at_once(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes in order, but what unpacks the results of an op right after that op."""
    ordered: list[Node] = []
    for node in nodes:
        place = len(ordered)
        if node.target is operator.getitem and node.args[0] in ordered:
            place = 1 + max(i for i, n in enumerate(ordered) if n is node.args[0] or n.args[:1] == node.args[:1])
        ordered.insert(place, node)
    return ordered
