"""The kernels as the core calls them for custom ops: one function for each op name, with the op as its first argument.

``layers`` says what an op of each name has to be.
"""

from __future__ import annotations

from typing import Any

import torch

from piecework import CustomOpImplementation, Limits
from piecework_triton_ops import ops as ops  # Registers them.
from piecework_triton_ops.copy import prepare_copy

_kernels = torch.ops.piecework_triton_ops


def rms_norm(op: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    if residual is None:
        return _kernels.rms_norm(x, op.weight, op.eps)
    return _kernels.add_rms_norm(x, residual, op.weight, op.eps)


def silu_and_mul(op: Any, x: torch.Tensor) -> torch.Tensor:
    return _kernels.silu_and_mul(x)


def gelu_and_mul(op: Any, x: torch.Tensor) -> torch.Tensor:
    return _kernels.gelu_tanh_and_mul(x) if op.approximate == "tanh" else _kernels.gelu_and_mul(x)


def rotary_embedding(
    op: Any, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _kernels.rotary_embedding(positions, q, k, op.cos_sin, op.is_neox)


def quantize_dynamic(op: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _kernels.quantize_dynamic(x, op.dtype)


def quantize_static(op: Any, x: torch.Tensor) -> torch.Tensor:
    return _kernels.quantize_static(x, op.scale.float(), op.dtype)


def copy_inputs(op: Any, *sources: torch.Tensor) -> None:
    """Copy all sources by one launch, which the first call prepares; ``op`` is the core's ``CopyInputs``.

    Unchecked: the core has looked at form, dtype, device and layout of every argument before it copies one.
    """
    if all(destination.is_contiguous() for destination in op.destinations):
        op.prepared = prepare_copy(op.destinations, is_checked=False)
        op.prepared(*sources)
    else:
        op.forward_native(*sources)


def implementation_of(op_name: str, device: torch.device) -> CustomOpImplementation:
    """Return what runs an op of one of ``OP_NAMES`` on a device, with its limits."""
    return {
        "rms_norm": CustomOpImplementation(rms_norm, limits=_limits(), attributes=("weight", "eps")),
        "silu_and_mul": CustomOpImplementation(silu_and_mul, limits=_limits()),
        "gelu_and_mul": CustomOpImplementation(gelu_and_mul, limits=_limits(), attributes=("approximate",)),
        "rotary_embedding": CustomOpImplementation(
            rotary_embedding, limits=_limits(argument="q"), attributes=("cos_sin", "is_neox")
        ),
        "quantize_dynamic": CustomOpImplementation(quantize_dynamic, limits=_of_codes(device), attributes=("dtype",)),
        "quantize_static": CustomOpImplementation(
            quantize_static, limits=_of_codes(device), attributes=("scale", "dtype")
        ),
        "copy_inputs": CustomOpImplementation(copy_inputs),
    }[op_name]


def _limits(**more: Any) -> Limits:
    return Limits(dtypes=(torch.float32, torch.float16, torch.bfloat16), **more)


def _of_codes(device: torch.device) -> Limits:
    """Triton has float8_e4m3fn from Ada on; the dtype of codes is not among what limits look at."""
    return _limits(min_capability=(8, 9) if device.type == "cuda" else None)
