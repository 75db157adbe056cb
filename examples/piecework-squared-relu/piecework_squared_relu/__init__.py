"""Squared ReLU, a custom op with a kernel: a plugin from start to finish (docs/ship-a-kernel.md walks through it)."""

from __future__ import annotations

import os

import torch

from piecework import CustomOp, CustomOpImplementation, Limits, hookimpl

PIECEWORK_PLUGIN_API = 1


class SquaredReLU(CustomOp, op_name="squared_relu"):
    """``relu(x) ** 2``; an op of this name takes one tensor and has no attributes."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).square()


@torch.library.custom_op("squared_relu::squared_relu", mutates_args=())
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Launch the kernel; for torch this is one op, which no compiler looks into."""
    from piecework_squared_relu.kernel import launch  # It imports Triton, which loading a plugin should not.

    return launch(x)


@squared_relu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def by_kernel(op: SquaredReLU, x: torch.Tensor) -> torch.Tensor:
    """Run ``forward`` of an op; the op comes first, for its attributes."""
    return squared_relu(x)


@hookimpl
def piecework_custom_op_implementations(op_name: str, device: torch.device) -> list[CustomOpImplementation] | None:
    """Bring the kernel where Triton runs: on CUDA devices, and anywhere by its interpreter."""
    if op_name != "squared_relu" or device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    limits = Limits(dtypes=(torch.float32, torch.float16, torch.bfloat16))
    return [CustomOpImplementation(by_kernel, name="squared_relu by Triton", limits=limits)]
