"""What memory holds that nobody should read: NaN, or numbers that are no index."""

from __future__ import annotations

import torch

from piecework.fingerprints import bits_of
from piecework.static_inputs import base_of

POISON_BYTE = 0xA5


def poison(memory: torch.Tensor, dtype: torch.dtype) -> None:
    """Fill bytes, given as such, with poison for a dtype."""
    memory.fill_(_byte_for(dtype))


def poison_elements(tensor: torch.Tensor) -> None:
    """Fill the elements of a tensor with poison, and nothing between them."""
    with torch.no_grad():
        bits = bits_of(base_of(tensor))
        byte = bytes([_byte_for(tensor.dtype)]) * bits.element_size()
        bits.fill_(int.from_bytes(byte, "little", signed=bits.dtype.is_signed))


def index_poison(dtype: torch.dtype) -> int:
    """Return what poison reads as in a signed integer type."""
    return int.from_bytes(bytes([POISON_BYTE]) * dtype.itemsize, "little", signed=True)


def _byte_for(dtype: torch.dtype) -> int:
    if dtype.is_floating_point or dtype.is_complex:
        return 0xFF  # NaN in every format but the fnuz ones of eight bits.
    return 1 if dtype is torch.bool else POISON_BYTE
