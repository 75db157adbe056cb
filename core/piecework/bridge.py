"""What runs between graphs: ops and uncaptured pieces as calls without arguments, bound to memory of the pool."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from piecework import torch_internals as internals
from piecework.effects import line_of, op_name, tensors_in
from piecework.errors import CaptureError
from piecework.program import Action, OpAction, PieceAction
from piecework.refusals import gives_number
from piecework.static_inputs import UnknownSizeError, base_of
from piecework.values import Values


@dataclass(slots=True, eq=False)
class Bound:
    """A call that does at a replay what is not captured."""

    step: Callable[[], Any]
    results: dict[Node, Any] = field(default_factory=dict)
    """The values that it gives: fresh ones lie in memory set aside for them."""
    num_bytes: int = 0
    """Memory that fresh results are copied to."""


def bind(action: Action, values: Values) -> Bound:
    """Bind what is not captured to its memory.

    Raises:
        CaptureError: its results have no memory that could be set aside.
    """
    return _bind_piece(action, values) if isinstance(action, PieceAction) else _bind_op(action, values)


def _bind_piece(action: PieceAction, values: Values) -> Bound:
    step = action.step
    call = functools.partial(action.run, *map(values.bound, step.inputs))
    kept = [values.memory_for(values.effects.values[node]) for node in step.outputs]
    results = dict(zip(step.outputs, kept, strict=True))
    return _bridged(call, results, kept, values, step.name) if kept else Bound(call)


def _bind_op(action: OpAction, values: Values) -> Bound:
    node, effects = action.node, values.effects
    # A third of the time of one look at all arguments, which are nested in few ops.
    args = [values.bound(arg) if isinstance(arg, Node) else map_arg(arg, values.bound) for arg in action.args]
    kwargs = map_arg(action.kwargs, values.bound) if action.kwargs else {}
    call = functools.partial(action.function, *args, **kwargs)
    if node in effects.identical:
        return Bound(call)
    result = effects.values[node]
    if not node.users:
        return Bound(call, {node: None})
    _check_result(node, result)
    fakes = tensors_in(result)
    sources = [_source_of(key, node, values) for key in effects.storages[node]]
    pairs = list(zip(fakes, sources, strict=True))
    try:
        kept = [values.memory_for(fake) if source is None else None for fake, source in pairs]
    except UnknownSizeError as error:
        raise CaptureError(f"what {op_name(node)} gives has no memory set aside: {error}{line_of(node)}") from error
    remaining = iter(
        [_view_of(*pair, values) if memory is None else memory for pair, memory in zip(pairs, kept, strict=True)]
    )
    results = {node: internals.pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), result)}
    is_bridged = any(memory is not None for memory in kept)
    if not is_bridged:
        return Bound(call, results)
    return _bridged(call, results, kept, values, f"{op_name(node) or node.target}{line_of(node)}")


def _check_result(node: Node, result: Any) -> None:
    if gives_number(result):
        raise CaptureError(f"{op_name(node)} gives a number{line_of(node)}, which a graph can't follow")


def _source_of(key: int | None, node: Node, values: Values) -> Node | None:
    """Return the argument of an op that a result shares memory with; None for a fresh one."""
    return next((arg for arg in node.all_input_nodes if key in values.effects.storages[arg]), None)


def _view_of(fake: torch.Tensor, source: Node | None, values: Values) -> torch.Tensor:
    """Return the view that an op gives of one of its arguments."""
    assert source is not None
    base = values.value(source, values.env)
    offsets = (one.storage_offset() for one in (fake, values.effects.values[source]))
    ahead, start = (values.statics.number(offset, values.numbers) for offset in offsets)
    layout = values.layout(fake)
    return base.as_strided(layout.size, layout.stride, base.storage_offset() + ahead - start)


def _bridged(
    call: Callable[[], Any], results: dict[Node, Any], kept: Sequence[torch.Tensor | None], values: Values, name: str
) -> Bound:
    """Return a call whose fresh results are copied into static memory; None stands for one that is not fresh."""
    num_bytes = sum(tensor.nbytes for tensor in kept if tensor is not None)
    alias = values.pool.capturer.alias
    bridge = _Bridge(call, tuple(tensor if tensor is None else alias(tensor) for tensor in kept), name)
    return Bound(bridge.run, results, num_bytes)


class _Bridge:
    """Runs something that gives fresh tensors, and copies them to where graphs read them."""

    def __init__(self, call: Callable[[], Any], kept: tuple[torch.Tensor | None, ...], name: str) -> None:
        self.call, self.name = call, name
        self.kept = tuple((None, False) if t is None else (base_of(t), 0 in t.stride()) for t in kept)

    def run(self) -> None:
        """Called at every replay."""
        for (kept, is_expanded), result in zip(self.kept, tensors_in(self.call()), strict=True):
            if kept is None:
                continue
            fresh = base_of(result) if is_expanded else result
            if fresh.shape != kept.shape or fresh.dtype != kept.dtype:
                raise CaptureError(
                    f"{self.name} gave a tensor of shape {tuple(fresh.shape)} and {fresh.dtype}, where its fake "
                    f"implementation gives {tuple(kept.shape)} and {kept.dtype}; mend the fake implementation"
                )
            kept.copy_(fresh)
