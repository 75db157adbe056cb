"""What is changed in the graph of a piece after Inductor's own rewriting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from piecework_inductor import inductor_internals as internals

__all__ = ["UnfuseResiduals", "with_pass"]

aten = torch.ops.aten


def with_pass(config: dict[str, Any], added: internals.CustomGraphPass) -> dict[str, Any]:
    """Return values for Inductor's config that have a pass run last, after those of the whole process.

    Args:
        config: the user's values for pieces, which hold no passes, as they are data.
        added: the pass.
    """
    own = internals.process_wide(internals.LAST_PASS)
    if own is None:
        return {**config, internals.LAST_PASS: added}
    if internals.TAKES_SEVERAL_PASSES:
        several = own if isinstance(own, (list, tuple)) else (own,)
        return {**config, internals.LAST_PASS: (*several, added)}
    return {**config, internals.LAST_PASS: _Both(own, added)}


class UnfuseResiduals(internals.CustomGraphPass):
    """Adds a residual after a product and not in it, on CUDA, where results and pointwise ops alone need the sum.

    Where all that needs the sum is pointwise, Inductor itself leaves it unfused, and joins the addition with the
    kernel after it. A result counts as something else for it, and in pieces the residual stream is a result of each:
    it becomes ``addmm``, which for a residual of full size first copies that with a kernel of its own. So does each
    sum before it that goes into that ``addmm``. A layer of two residuals cost two kernels more than in a whole graph
    (torch 2.11 to 2.14, ``should_prefer_unfused_addmm`` in Inductor's ``fx_passes/post_grad.py``). A bias of one dim
    stays fused: there it costs nothing.
    """

    def __call__(self, graph: Graph) -> None:
        # From the last on: the addition that one becomes is pointwise for those before it.
        for node in reversed(graph.find_nodes(op="call_function", target=aten.addmm.default)):
            if _adds_residual(node):
                _unfuse(node)

    def uuid(self) -> str:
        """Return what Inductor's cache tells versions of this pass apart by."""
        return "piecework: unfuse residuals, 2"


def _adds_residual(node: Node) -> bool:
    """Whether an ``addmm`` was an addition, of two dims and not expanded, that results and pointwise ops alone need.

    One that the program itself calls stays: the product is not rounded before the sum.
    """
    residual: Any = node.args[0]
    value = residual.meta["val"]
    is_plain = all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta"))
    is_full = value.device.type == "cuda" and value.dim() == 2 and 0 not in value.stride()
    was_addition = is_plain and is_full and not internals.is_written_as(node, aten.addmm.default)
    return was_addition and all(user.op == "output" or internals.is_pointwise_use(user) for user in node.users)


def _unfuse(node: Node) -> None:
    residual, left, right = node.args
    with node.graph.inserting_before(node):
        product = node.graph.call_function(aten.mm.default, (left, right))
        total = node.graph.call_function(aten.add.Tensor, (residual, product))
    product.meta.update(node.meta)
    total.meta.update(node.meta)
    node.replace_all_uses_with(total)
    node.graph.erase_node(node)


class _Both(internals.CustomGraphPass):
    """One pass after another, for torch before 2.13, which takes a single one."""

    def __init__(self, first: Callable[[Graph], None], second: internals.CustomGraphPass) -> None:
        self.first, self.second = first, second

    def __call__(self, graph: Graph) -> None:
        self.first(graph)
        self.second(graph)

    def uuid(self) -> Any | None:
        """Return what Inductor's cache tells this pair from others by; None where the first pass can't be cached."""
        own = self.first.uuid() if isinstance(self.first, internals.CustomGraphPass) else None
        return None if own is None else (own, self.second.uuid())
