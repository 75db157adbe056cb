"""What a device refuses while it records, in words that say what to do."""

from __future__ import annotations

import re

import torch

__all__ = ["explain"]

_MAKE_IT_A_SPLITTING_OP = "make the op that does it a splitting op, so that it runs between the graphs"

# What CUDA says (cudaErrorStreamCapture...), and what torch says before it asks CUDA.
_REFUSALS = {
    r"unjoined": (
        f"the device refuses a side stream that is left open: let the current stream wait for it, or "
        f"{_MAKE_IT_A_SPLITTING_OP}"
    ),
    r"operation not permitted when stream is capturing|Cannot copy between CPU and CUDA tensors during": (
        "the device refuses a host synchronisation (.item(), nonzero, a mask as an index, a copy from or to memory of "
        "the host that is not pinned): do this, and what needs its result, inside a custom op that is a splitting op "
        "and gives known sizes"
    ),
    r"dependency created on uncaptured work|legacy stream depend|event last recorded in a capturing stream": (
        f"the device refuses to wait for work of another stream that is not recorded with it: {_MAKE_IT_A_SPLITTING_OP}"
    ),
    r"CUDA graph capture|previous error during capture|CUDA error": (
        f"the device refuses something that it does: {_MAKE_IT_A_SPLITTING_OP}"
    ),
}


def explain(error: BaseException) -> str | None:
    """Return why a device could not record, and what to do; None where the error is none of the device's."""
    said = str(error).strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"there is not enough memory ({said}): capture fewer or smaller sizes"
    if not isinstance(error, RuntimeError):
        return None
    for pattern, words in _REFUSALS.items():
        if re.search(pattern, str(error)):
            return f"{words} ({said})"
    return None
