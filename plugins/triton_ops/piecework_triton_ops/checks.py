"""What ops are given, checked alike for real and for fake tensors, whose sizes may be symbols."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["FLOATS", "check_device", "check_dtype", "check_last_dim", "check_ndim", "check_shape"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What activations and weights may be."""


def check_dtype(op: str, name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Check the dtype of an argument.

    Raises:
        TypeError: it is another one.
    """
    if tensor.dtype not in allowed:
        raise TypeError(f"{op}: {name} must be {_one_of(allowed)}, got {tensor.dtype}")


def check_ndim(op: str, name: str, tensor: torch.Tensor, at_least: int) -> None:
    """Check that an argument has enough dims.

    Raises:
        ValueError: it has fewer.
    """
    if tensor.ndim < at_least:
        raise ValueError(f"{op}: {name} must have {at_least} dims or more, got the shape {tuple(tensor.shape)}")


def check_shape(op: str, name: str, tensor: torch.Tensor, shape: Sequence[int], why: str) -> None:
    """Check the shape of an argument.

    Raises:
        ValueError: it has another one.
    """
    if tensor.ndim != len(shape) or any(given != size for given, size in zip(tensor.shape, shape, strict=True)):
        raise ValueError(f"{op}: {name} must have the shape {tuple(shape)} {why}, got {tuple(tensor.shape)}")


def check_last_dim(op: str, name: str, tensor: torch.Tensor) -> None:
    """Check that the last dim of an argument holds two halves.

    Raises:
        ValueError: its size is odd.
    """
    check_ndim(op, name, tensor, 1)
    if tensor.shape[-1] % 2 != 0:
        raise ValueError(f"{op}: the last dim of {name} must be even, two halves, got the shape {tuple(tensor.shape)}")


def check_device(op: str, x: torch.Tensor, **others: torch.Tensor) -> None:
    """Check that all arguments are where the first is.

    Raises:
        ValueError: one isn't.
    """
    for name, other in others.items():
        if other.device != x.device:
            raise ValueError(f"{op}: {name} must be on {x.device} as the first tensor is, got one on {other.device}")


def _one_of(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)
