"""Checks of the tensors of a call: form, layout, autocast, and memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.arguments import Arguments, TensorSpec

MAX_CHECK_VARIANTS = 8


class TensorChecks:
    """Checks tensors by torch's compiled guards; a no is asked again in Python, which decides.

    The compiled guards also say no to what is harmless here (a tensor made under inference mode,
    one row with other strides); once found harmless, such a form has a guard of its own.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.autocast = autocast_state()
        self.variants: list[Callable[..., bool]] = []
        self.namespace: dict[str, Any] = {}

    def attach(self, namespace: dict[str, Any]) -> None:
        """Put the check that is tried first into the namespace of an entry."""
        self.namespace = namespace
        namespace["_pw_check"] = lambda *_: False

    def explain(self, values: Sequence[Any]) -> str | None:
        """Return how the values differ from the traced ones; None, and a new variant, if they don't."""
        now = autocast_state()
        if now != self.autocast:
            return f"autocast was {dict(self.autocast) or 'off'} when traced, now it is {dict(now) or 'off'}"
        problem = self.arguments.explain(values)
        if problem is None:
            self.learn(self.arguments.tensors_in(dict(zip(self.arguments.specs, values, strict=True))))
        return problem

    def learn(self, tensors: Sequence[torch.Tensor]) -> None:
        check = next((variant for variant in self.variants if variant(*tensors)), None)
        specs = self.arguments.tensors
        strides = [_checked_strides(spec) for spec in specs]
        if any(
            step is not None and step != tensor.stride(dim)
            for steps, tensor in zip(strides, tensors, strict=True)
            for dim, step in enumerate(steps)
        ):
            return  # a single row may have any stride: nothing to learn for other sizes
        if check is None:
            sizes = [[size if isinstance(size, int) else None for size in spec.dims] for spec in specs]
            check = internals.tensor_check(tensors, sizes, strides)
            self.variants = [check, *self.variants[: MAX_CHECK_VARIANTS - 1]]
        self.namespace["_pw_check"] = check


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the device kinds for which autocast is on, each with its dtype."""
    kinds = ("cpu", "cuda", "xpu", "mps")
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    if a is b:
        return True
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    start_a, start_b = a.data_ptr(), b.data_ptr()
    return start_a < start_b + _span(b) and start_b < start_a + _span(a)


def _span(tensor: torch.Tensor) -> int:
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + sum(steps)) * tensor.element_size()


def layout_condition(spec: TensorSpec, sizes: dict[str, str]) -> str | None:
    """Return the check of strides that depend on a size that varies; torch's own check leaves them out."""
    if None not in _checked_strides(spec):
        return None
    if spec.dense_order == tuple(range(len(spec.dims))):
        return f"{spec.path}.is_contiguous()"
    strides = []
    for dim in range(len(spec.dims)):
        assert spec.dense_order is not None
        inner = spec.dense_order[spec.dense_order.index(dim) + 1 :]
        strides.append(" * ".join(str(sizes.get(str(spec.dims[i]), spec.dims[i])) for i in inner) or "1")
    return f"{spec.path}.stride() == ({', '.join(strides)},)"


def _checked_strides(spec: TensorSpec) -> list[int | None]:
    """Return the strides that do not depend on a size that varies; None for the others."""
    if spec.dense_order is None:
        return list(spec.strides)
    strides: list[int | None] = [None] * len(spec.dims)
    step: int | None = 1
    for dim in reversed(spec.dense_order):
        strides[dim] = step
        size = spec.dims[dim]
        step = step * max(size, 1) if step is not None and isinstance(size, int) else None
    return strides
