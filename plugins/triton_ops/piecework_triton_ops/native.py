"""The ops in plain PyTorch, as an author of models writes them.

Kernels are compared with them, and where no kernel runs, Inductor fuses them.
"""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F

__all__ = [
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "quantize_dynamic",
    "quantize_static",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
]


@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: None = None) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise ``x``, or ``x + residual``; with a residual, return the sum too, as ``add_rms_norm``."""
    if residual is not None:
        x = x + residual
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()
    normed = value.to(x.dtype)
    return normed if residual is None else (normed, x)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]``."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]``."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate) * up).to(x.dtype)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]`` with the approximation by ``tanh``."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def rotary_embedding(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first ``rotary_dim`` elements of each head of ``q`` and ``k``, as the op of this name."""
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin, is_neox), _rotate(k, cos, sin, is_neox)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate ``[tokens, heads, head_dim]`` by ``[tokens, 1, rotary_dim / 2]``."""
    rotary_dim = 2 * cos.shape[-1]
    rotated, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    if is_neox:
        first, second = rotated.chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
        rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def quantize_dynamic(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row by its own scale, with the arithmetic of the op of this name, bit for bit in eager mode."""
    value = x.float()
    # As a product: eager PyTorch divides by a number on a CPU, and multiplies by its inverse on CUDA.
    scale = (value.abs().amax(-1, keepdim=True) * (1.0 / largest(dtype))).clamp(min=torch.finfo(torch.float32).tiny)
    return _quantized(value, scale, dtype), scale


def quantize_static(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantise by a given scale, with the arithmetic of the op of this name, bit for bit in eager mode."""
    scale = scale.float()
    scale = scale.reshape(1) if scale.numel() == 1 else scale.reshape(*x.shape[:-1], 1)
    return _quantized(x.float(), scale, dtype)


def largest(dtype: torch.dtype) -> float:
    """Return the largest magnitude that a quantised value takes: 127 for int8, so that its range is symmetric."""
    return torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max


def _quantized(value: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    value = value * scale.reciprocal()
    value = value.clamp(-largest(dtype), largest(dtype))
    return (value if dtype.is_floating_point else value.round()).to(dtype)
