"""At which sizes one trace holds: size 1, and sizes at which ops choose other layouts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import piecework
from models import both_levels
from piecework import CompilationConfig, TraceDepartureError, counters


@both_levels
def test_a_squeeze_that_sees_one_row_departs_there(level: int) -> None:
    """torch leaves no guard for that: a symbolic dim is kept."""

    def squeezes(x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(0) + 1

    call = piecework.compile(squeezes, config=CompilationConfig(level=level, piece_compiler="eager"))
    torch.testing.assert_close(call(torch.ones(4, 6)), squeezes(torch.ones(4, 6)))
    with pytest.raises(TraceDepartureError, match=r"holds for rows != 1.*squeeze gives \[6\].*x.squeeze\(0\)"):
        call(torch.ones(1, 6))


@both_levels
@pytest.mark.parametrize("first", [1, 5])
def test_an_op_that_chooses_a_layout_by_the_size_serves_one_row_too(level: int, first: int) -> None:
    def transposes(x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(-1, 2, 3).transpose(0, 1).reshape(2, -1)
        return heads + nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0].t().contiguous().sum()

    call = piecework.compile(transposes, config=CompilationConfig(level=level, piece_compiler="eager"))
    with counters.expect(num_graphs_seen=1):
        for n in (first, 5, 1, 2, 40):
            x = torch.randn(n, 6)
            torch.testing.assert_close(call(x), transposes(x))


@both_levels
def test_a_write_through_what_is_a_copy_for_some_sizes_only_departs(level: int) -> None:
    def writes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        z = y.t().contiguous()  # of one row: y itself
        z.add_(1)
        return y, z

    call = piecework.compile(writes, config=CompilationConfig(level=level, piece_compiler="eager"))
    torch.testing.assert_close(call(torch.ones(4, 6)), writes(torch.ones(4, 6)))
    with pytest.raises(TraceDepartureError, match="rows != 1"):
        call(torch.ones(1, 6))
