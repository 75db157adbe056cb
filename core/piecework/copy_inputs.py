"""``copy_inputs``: the custom op that copies the arguments of a captured call into static memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecework import torch_internals as internals
from piecework.custom_op import CustomOp
from piecework.custom_op_choice import CallForm, Choice, CustomOpChoices
from piecework.custom_op_limits import form_of


class CopyInputs(CustomOp, op_name="copy_inputs"):
    """Copies many tensors at once; chosen at each capture, for the static inputs of that size.

    Plugins may bring implementations, called as ``function(op, *sources)``: copy each source to the destination of the
    same position, in stream order. Both have the same shape, dtype and device; their strides may differ. The first call
    may prepare what later ones need and keep it on ``op``, which lives as long as the captured size.

    Args:
        destinations: static memory, at the same addresses for the life of the op; two or more.
    """

    def __init__(self, destinations: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.destinations = tuple(destinations)

    def forward_native(self, *sources: torch.Tensor) -> None:
        """Copy by one launch per dtype."""
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(self.destinations):
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(index)
        for indices in by_kind.values():
            internals.foreach_copy_([self.destinations[i] for i in indices], [sources[i] for i in indices])


def choose_copy(op: CopyInputs, choices: CustomOpChoices) -> Choice:
    """Choose what copies the inputs of one captured size, and note it."""
    call = CallForm(tuple(map(form_of, op.destinations)), ())
    asked = choices.attributes_asked(CopyInputs, call.device)
    choice = choices.choose(CopyInputs, call, tuple(name for name in asked if hasattr(op, name)))
    choices.note(choice)
    return choice
