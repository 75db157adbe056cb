"""What all kernels read and write tiles with."""

from __future__ import annotations

import triton.language as tl

from piecework_triton_ops.library import jit

__all__ = ["load_tile", "store_tile"]


@jit
def load_tile(pointers, mask, IS_FULL: tl.constexpr, EVICTION):
    """Load a tile; without a mask where all of it is there, since a mask may keep loads from being 16 bytes wide."""
    if IS_FULL:
        return tl.load(pointers, eviction_policy=EVICTION)
    else:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICTION)


@jit
def store_tile(pointers, value, mask, IS_FULL: tl.constexpr):
    """Round a tile to what the pointers point to, to nearest, and store it."""
    if IS_FULL:
        tl.store(pointers, value.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)
