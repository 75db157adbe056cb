"""What is prepared once around many captures: garbage collection and the workspaces of cuBLAS."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

__all__ = ["garbage_collection_off", "make_workspaces"]

FROZEN_BY_PYTHON = 10_000
"""Python 3.12 freezes some hundred immortal objects by itself; with torch alone, a program freezes 100,000 and more."""


@contextlib.contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Collect no garbage in the block: a tensor or graph that is freed by chance spoils a capture.

    What exists is frozen, so that a collection that somebody asks for inside is cheap, unless the program has frozen
    objects itself: thawing thaws all. Afterwards only what is young is collected; a full collection takes
    longer than the captures.
    """
    if not gc.isenabled():
        yield
        return
    freezes = gc.get_freeze_count() < FROZEN_BY_PYTHON
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        gc.enable()
        gc.collect(1)


def make_workspaces(device: torch.device) -> None:
    """Let cuBLAS allocate what it keeps per stream and thread; inside a capture it would sit in the pool for good."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            square, bias = torch.zeros(16, 16, dtype=dtype, device=device), torch.zeros(16, dtype=dtype, device=device)
            torch.mm(square, square)
            torch.addmm(bias, square, square)  # This one may take cuBLASLt, which has one of its own.
