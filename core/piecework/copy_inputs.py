"""``copy_inputs``: the custom op that copies the arguments of a captured call into static memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.custom_op import CustomOp
from piecework.custom_op_choice import CallForm, CustomOpChoices
from piecework.custom_op_limits import form_of
from piecework.errors import CaptureError


class CopyInputs(CustomOp, op_name="copy_inputs"):
    """Copies many tensors at once; chosen at each capture, for the static inputs of that size.

    Plugins may bring implementations, called as ``function(op, *sources)``: copy each source to the destination of the
    same position, in stream order. Both have the same shape, dtype, device and strides, for which every call is
    checked. The first call comes when a size is captured, with the destinations themselves as sources, so that what
    later ones need is made before ``freeze()``; a function that it sets as ``op.prepared`` is called from then on, with
    the sources alone. The op lives as long as the captured size.

    Args:
        destinations: static memory, at the same addresses for the life of the op; two or more.

    Attributes:
        prepared: what copies, or None: the implementation does.
    """

    def __init__(self, destinations: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.destinations = tuple(destinations)
        self.prepared: Callable[..., None] | None = None

    def forward_native(self, *sources: torch.Tensor) -> None:
        """Copy by one launch per dtype."""
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(self.destinations):
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(index)
        for indices in by_kind.values():
            internals.foreach_copy_([self.destinations[i] for i in indices], [sources[i] for i in indices])


@dataclass(frozen=True)
class ChosenCopy:
    """What copies the inputs of one captured size, and its name for messages."""

    function: Callable[..., Any]
    name: str


def choose_copy(op: CopyInputs, choices: CustomOpChoices) -> ChosenCopy | None:
    """Choose what copies the inputs of one captured size, note it and prepare it; None for the native body."""
    call = CallForm(tuple(map(form_of, op.destinations)), ())
    asked = choices.attributes_asked(CopyInputs, call.device)
    choice = choices.choose(CopyInputs, call, tuple(name for name in asked if hasattr(op, name)))
    choices.note(choice)
    if choice.is_native:
        return None
    copy = functools.partial(choice.implementation.function, op)
    try:
        copy(*op.destinations)
    except Exception as error:  # of a plugin's implementation: this size fails, and nothing else
        what = f"{choice} of custom op {CopyInputs.op_name!r} raised {type(error).__name__}: {error}"
        raise CaptureError(f"the copy of the inputs of {choices.owner} can't be prepared: {what}") from error
    return ChosenCopy(op.prepared or copy, str(choice))
