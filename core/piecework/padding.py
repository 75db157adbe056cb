"""Whether a call may be answered by a plan of more rows, and by which."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch.fx import Node

from piecework import torch_internals as internals
from piecework.config import CompilationConfig
from piecework.dedupe import UniquePiece
from piecework.effects import tensors_in
from piecework.inputs import GraphInputs, Key, dim_symbol
from piecework.rows import why_rows_depend
from piecework.split import SplitGraph
from piecework.static_inputs import StaticInputs


class Padding:
    """Decides, for one graph, which captured size a call may be padded up to.

    Args:
        split: the graph.
        inputs: what it is called with.
        statics: which inputs are copied: only those have rows to pad.
        config: ``max_padding_ratio`` and ``rows_independent``.
        made_from: the nodes that results are cut from.
        unique: the pieces without repetition.
    """

    def __init__(
        self,
        split: SplitGraph,
        inputs: GraphInputs,
        statics: StaticInputs,
        config: CompilationConfig,
        made_from: Sequence[Node],
        unique: Sequence[UniquePiece],
    ) -> None:
        self.split, self.inputs, self.statics, self.config = split, inputs, statics, config
        self.made_from, self.unique = made_from, unique
        self.by_dim: dict[str, str | None] = {}

    def target(self, key: Key, possible: Iterable[Key]) -> tuple[Key | None, str]:
        """Return the smallest size that a call may be padded to, or None and the reason."""
        if self.config.max_padding_ratio == 1:
            return None, ""
        ratios = {other: ratio for other in possible if (ratio := self.ratio(key, other)) is not None}
        if not ratios:
            return None, ""
        within = [other for other, ratio in ratios.items() if ratio <= self.config.max_padding_ratio]
        if not within:
            return None, f"the next captured size is more than {self.config.max_padding_ratio:g} times as large"
        why_not = ""
        for other in sorted(within, key=ratios.__getitem__):
            problems = [problem for dim in self.differing(key, other) if (problem := self.why_not(dim))]
            if not problems:
                return other, ""
            why_not = why_not or f"not padded: {problems[0]}"
        return None, why_not

    def ratio(self, key: Key, other: Key) -> float | None:
        """Return how many times as many rows another size has; None where it is no larger."""
        pairs = list(zip(_as_tuple(key), _as_tuple(other), strict=True))
        if key == other or any(larger < smaller for smaller, larger in pairs):
            return None
        return math.prod(larger / smaller for smaller, larger in pairs)

    def differing(self, key: Key, other: Key) -> list[str]:
        pairs = zip(self.inputs.sizes.dims, _as_tuple(key), _as_tuple(other), strict=True)
        return [dim for dim, smaller, larger in pairs if smaller != larger]

    def why_not(self, dim: str) -> str | None:
        """Return why calls can't be padded along a dim; found out at the first need."""
        if dim not in self.by_dim:
            self.by_dim[dim] = self.find_out(dim)
        return self.by_dim[dim]

    def find_out(self, dim: str) -> str | None:
        if self.config.rows_independent is False:
            return "rows_independent=False"
        for tensor in self.statics.held:
            if tensor.varies:
                return f"argument {tensor.path} is kept in place by the caller (static_inputs), with no rows to pad"
        for node in self.made_from:
            if not self.can_be_cut(node, dim):
                return f"rows of a result ({node.name}) don't lie along one of its dims"
        if self.config.rows_independent:
            return None
        return why_rows_depend(self.split, self.inputs.sizes, dim, unique=self.unique)

    def can_be_cut(self, node: Node, dim: str) -> bool:
        """Whether every dim of a value is the padded one as it is, or has nothing to do with it."""
        sizes = self.inputs.sizes
        for tensor in tensors_in(self.split.effects.values[node]):
            for size in tensor.shape:
                named = sizes.named(internals.size_expression(size, sizes.shape_env))
                is_known = named.free_symbols.issubset(map(dim_symbol, sizes.dims))
                if named != dim_symbol(dim) and (dim_symbol(dim) in named.free_symbols or not is_known):
                    return False
        return True


def _as_tuple(key: Key) -> tuple[int, ...]:
    return key if isinstance(key, tuple) else (key,)
