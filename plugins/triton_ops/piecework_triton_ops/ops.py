"""Register every op: ``import piecework_triton_ops.ops``, then ``torch.ops.piecework_triton_ops.rms_norm(...)``."""

from __future__ import annotations

from piecework_triton_ops.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from piecework_triton_ops.copy import copy_tensors_, prepare_copy
from piecework_triton_ops.norm import add_rms_norm, rms_norm
from piecework_triton_ops.quantize import quantize_dynamic, quantize_static
from piecework_triton_ops.rotary import rotary_embedding

__all__ = [
    "add_rms_norm",
    "copy_tensors_",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "prepare_copy",
    "quantize_dynamic",
    "quantize_static",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
]
