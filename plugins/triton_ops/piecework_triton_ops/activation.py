"""The gate of a feed-forward layer: ``act(x[..., :d]) * x[..., d:]``, in float32, rounded once to the dtype of ``x``.

``silu(g) = g / (1 + exp(-g))``, ``gelu(g) = g / 2 * (1 + erf(g / sqrt(2)))``, and the approximation of the latter by
``tanh`` written as the same function without it: ``(1 + tanh(u)) / 2 = 1 / (1 + exp(-2 * u))``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import triton.language as tl

from piecework_triton_ops.checks import FLOATS, check_dtype, check_last_dim
from piecework_triton_ops.launching import (
    Launch,
    ceil_div,
    new_result,
    next_power_of_2,
    on_device,
    rounded,
    rows_of,
)
from piecework_triton_ops.library import jit, register
from piecework_triton_ops.tiles import load_tile, store_tile

__all__ = ["activation_launch", "gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul"]

Activation = Literal["silu", "gelu", "gelu_tanh"]


def silu_and_mul(x: torch.Tensor, launch: Launch | None = None) -> torch.Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]``.

    Args:
        x: ``[..., 2 * d]``; float32, float16 or bfloat16.
        launch: in place of ``activation_launch``.

    Returns:
        New contiguous memory ``[..., d]`` with the dtype of ``x``.

    Raises:
        TypeError: the dtype is none of these.
        ValueError: the last dim is odd.
    """
    return _act_and_mul("silu", x, launch)


def gelu_and_mul(x: torch.Tensor, launch: Launch | None = None) -> torch.Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]`` with the exact ``gelu``; otherwise as ``silu_and_mul``."""
    return _act_and_mul("gelu", x, launch)


def gelu_tanh_and_mul(x: torch.Tensor, launch: Launch | None = None) -> torch.Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]`` with the approximation by ``tanh``; otherwise as ``silu_and_mul``."""
    return _act_and_mul("gelu_tanh", x, launch)


def activation_launch(num_rows: int, width: int) -> Launch:
    """Choose the constants: 8 results per thread, 16 bytes of a half in bfloat16; more threads where SMs are idle."""
    block = min(next_power_of_2(width), 512)
    rows = min(next_power_of_2(num_rows), 512 // block)
    per_thread = 8 if num_rows * width >= 512 * 264 else 2
    return Launch(num_warps=max(1, block * rows // (32 * per_thread)), block=block, rows=rows)


def _act_and_mul(activation: Activation, x: torch.Tensor, launch: Launch | None) -> torch.Tensor:
    _check(activation, x)
    width = x.shape[-1] // 2
    out = new_result(x, (*x.shape[:-1], width), x.dtype)
    if out.numel() > 0:
        rows = rows_of(x)
        constants = launch or activation_launch(rows.count, width)
        num_programs = ceil_div(rows.count, constants.rows) * ceil_div(width, constants.block)
        with on_device(x.device):
            _activation_kernel[(num_programs,)](
                rows.tensor,
                out,
                rows.count,
                rows.stride,
                WIDTH=width,
                ACTIVATION=activation,
                BLOCK=constants.block,
                ROWS=constants.rows,
                num_warps=constants.num_warps,
            )
    return rounded(out, x.dtype)


@jit(do_not_specialize=["num_rows"])
def _activation_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    x_stride,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Hold a tile of results; those of one row are neighbours in the grid too."""
    num_blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_full: tl.constexpr = ROWS == 1 and WIDTH % BLOCK == 0
    mask = (row < num_rows) & (column < WIDTH)
    pointers = x_ptr + row * x_stride + column
    gate = load_tile(pointers, mask, is_full, "").to(tl.float32)
    up = load_tile(pointers + WIDTH, mask, is_full, "").to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        gate = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    store_tile(out_ptr + row * WIDTH + column, gate * up, mask, is_full)


def _check(activation: Activation, x: torch.Tensor) -> None:
    op = f"{activation}_and_mul"
    check_dtype(op, "x", x, FLOATS)
    check_last_dim(op, "x", x)


def _fake(activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    def fake(x: torch.Tensor) -> torch.Tensor:
        _check(activation, x)
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))

    return fake


register("silu_and_mul(Tensor x) -> Tensor", silu_and_mul, _fake("silu"))
register("gelu_and_mul(Tensor x) -> Tensor", gelu_and_mul, _fake("gelu"))
register("gelu_tanh_and_mul(Tensor x) -> Tensor", gelu_tanh_and_mul, _fake("gelu_tanh"))
