"""The steps of a split graph one by one, and how long each value is needed: the same for all sizes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from piecework.pieces import SplittingOp
from piecework.split import PieceStep, SplitGraph


@dataclass(frozen=True)
class OpStep:
    """A splitting op, or a node beside one that costs no kernel."""

    node: Node
    op: SplittingOp | None


Unit = PieceStep | OpStep


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
