"""Tell whether memory changed without a copy of it: one number per tensor, from its bits and their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecework.static_inputs import base_of

BLOCK = 1 << 22
"""Elements looked at together: what is needed besides the tensor is some multiples of this."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP, _START = 0x9E3779B97F4A7C15 - (1 << 64), 0x2545F4914F6CDD1D
"""Odd numbers whose multiples are spread over 64 bits; from splitmix64 and xorshift64*, public domain."""


def has_bits(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory, which a fingerprint can be taken of."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested
    return is_plain and tensor.layout is torch.strided


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return one integer on the tensor's device, without waiting for it; NaN are compared by their bits."""
    with torch.no_grad():
        bits = bits_of(base_of(tensor.detach()))
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        if not bits.numel():
            return total
        num_rows = max(BLOCK * len(bits) // bits.numel(), 1)
        done = 0
        for block in bits.split(num_rows):
            flat = block.reshape(-1).to(torch.int64)
            places = torch.arange(done, done + len(flat), dtype=torch.int64, device=tensor.device)
            # Modulo 2^64. The bits are mixed first: a change of a high bit alone, such as a sign, would else be lost
            # wherever the weight is even.
            total += (flat * _STEP).bitwise_xor_(flat >> 29).mul_(places.mul_(_STEP).add_(_START).bitwise_or_(1)).sum()
            done += len(flat)
        return total


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the fingerprint of each tensor; waits once per device for what is queued there."""
    made = [fingerprint(tensor) for tensor in tensors]
    values: dict[int, int] = {}
    for device in dict.fromkeys(one.device for one in made):
        places = [i for i, one in enumerate(made) if one.device == device]
        values.update(zip(places, torch.stack([made[i] for i in places]).tolist(), strict=True))
    return [values[i] for i in range(len(made))]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers over the same memory, with at least one dim, in the order of memory."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().view(_BITS[tensor.element_size()])
    if bits.dim() == 0:
        return bits.reshape(1)
    return bits.permute(sorted(range(bits.dim()), key=lambda dim: -bits.stride(dim)))
