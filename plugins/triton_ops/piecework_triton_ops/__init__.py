"""Triton kernels for the layers of transformers, behind custom ops of Piecework.

Loaded as a plugin, it brings implementations for the custom ops of ``layers``, and for any model's own ops under the
same names; and it copies the inputs of captured calls by one launch. Importing it imports neither Triton nor torch:
layers come with their names, and kernels are defined when the first op asks for them.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from piecework import hookimpl

if TYPE_CHECKING:
    import torch

    from piecework import CustomOpImplementation
    from piecework_triton_ops.layers import (
        GeluAndMul,
        QuantizeDynamic,
        QuantizeStatic,
        RMSNorm,
        RotaryEmbedding,
        SiluAndMul,
    )

__all__ = ["GeluAndMul", "QuantizeDynamic", "QuantizeStatic", "RMSNorm", "RotaryEmbedding", "SiluAndMul"]

PIECEWORK_PLUGIN_API = 1

OP_NAMES = (
    *("rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding", "quantize_dynamic", "quantize_static"),
    "copy_inputs",
)
"""The custom ops that this plugin brings kernels for."""
SWITCHED_ON = ("1", "true", "yes", "on", "y")
"""What Triton takes for a yes."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("piecework_triton_ops.layers"), name)


@hookimpl(trylast=True)
def piecework_custom_op_enabled(op_name: str) -> bool | None:
    """Copy inputs by one launch at every level: it is faster than one per dtype (docs/custom-ops.md has the figures).

    For the other ops, the default of the level stands. Alone, a kernel is somewhat faster than what Inductor makes of
    the native body; at level 3 that is fused with its neighbours, too.
    """
    return True if op_name == "copy_inputs" else None


@hookimpl(trylast=True)
def piecework_custom_op_implementations(op_name: str, device: torch.device) -> list[CustomOpImplementation] | None:
    """Bring a kernel for the op, on CUDA devices, and on a CPU where Triton's interpreter is switched on."""
    is_interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "").lower() in SWITCHED_ON
    if op_name not in OP_NAMES or device.type != "cuda" and not is_interpreted:
        return None
    from piecework_triton_ops.implementations import implementation_of  # It imports Triton.

    return [implementation_of(op_name, device)]
