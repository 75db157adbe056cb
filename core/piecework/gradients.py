"""Compiled code is for inference: outputs whose backward says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.errors import GradientNotSupported


def without_gradients(run: Callable[..., Any], state: Sequence[torch.Tensor], given: tuple[Any, ...]) -> Sequence[Any]:
    """Run with gradients off; where the caller could ask for them, give outputs that refuse.

    Args:
        run: called with what is given.
        state: tensors besides the arguments that a result could be asked for gradients of.
        given: tensors and sizes.
    """
    if internals.any_has_tangent(given):
        raise GradientNotSupported(
            "an argument carries a forward-mode derivative (torch.autograd.forward_ad), which a model that Piecework "
            "compiled for inference (levels 2 and 3) would drop; call the original model, or use level 0 or 1"
        )
    internals.set_grad_enabled(False)
    try:
        outputs = run(*given)
    finally:
        internals.set_grad_enabled(True)
    requiring = [a for a in itertools.chain(given, state) if isinstance(a, torch.Tensor) and a.requires_grad]
    if not requiring:
        return outputs
    own = [id(tensor) for tensor in itertools.chain(given, state)]
    chosen = [
        i
        for i, out in enumerate(outputs)
        if isinstance(out, torch.Tensor) and (out.is_floating_point() or out.is_complex()) and id(out) not in own
    ]
    results = list(outputs)
    if chosen:
        refusing = _RefuseBackward.apply(len(requiring), *requiring, *(results[i] for i in chosen))
        for i, refused in zip(chosen, refusing, strict=True):  # pyright: ignore[reportArgumentType]
            results[i] = refused
    return results


class _RefuseBackward(torch.autograd.Function):
    """Hands its tensors through; a backward to what they could depend on raises.

    All that requires a gradient is an input, since torch does not visit a node that leads to nothing asked for:
    ``autograd.grad(loss, x)`` would leave the model's part out.
    """

    @staticmethod
    def forward(ctx: Any, num_requiring: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # ``.data`` gives a tensor that is no view, so that the caller may change it in place.
        return tuple(tensor.data for tensor in tensors[num_requiring:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise GradientNotSupported(
            "a backward reached the result of a model that Piecework compiled for inference (levels 2 and 3); "
            "call the original model, use level 0 or 1 for training, or call it under torch.no_grad()"
        )
