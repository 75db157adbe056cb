"""Where the kernels of piecework_triton_ops are tested, and how near they must come."""

from __future__ import annotations

import pytest
import torch

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a device"),
    ),
    pytest.param("cuda", marks=pytest.mark.cuda),
]
"""The interpreter of Triton, or a device."""

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
HIDDEN = [1, 7, 100, 128, 4097]


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Values of a normal distribution, the same on each device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with float64: half a unit in the last place of the dtype, and 2e-6 for arithmetic in float32."""
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    assert exact.dtype == torch.float64
    half_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(actual.double(), exact, rtol=half_unit + 2e-6, atol=1e-6)
