"""Root mean square normalisation, alone and after the addition of a residual.

Arithmetic, per row of ``[..., hidden]``, in float32: ``x * rsqrt(mean(x * x) + eps) * weight``, rounded once at the
end, to the dtype of ``x``. With a residual, ``x`` is first ``x + residual`` rounded to the dtype of ``x``, and the norm
is that of the rounded sum: so a model in PyTorch computes it that adds in its own dtype before it normalises (Hugging
Face transformers), and vLLM's CUDA kernel ``fused_add_rms_norm``.
"""

from __future__ import annotations

import torch
import triton.language as tl

from piecework_triton_ops.checks import FLOATS, check_device, check_dtype, check_ndim, check_shape
from piecework_triton_ops.launching import (
    MAX_BLOCK,
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

__all__ = ["add_rms_norm", "norm_launch", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, launch: Launch | None = None) -> torch.Tensor:
    """Normalise each row of ``x`` and multiply it by ``weight``.

    Args:
        x: ``[..., hidden]``; float32, float16 or bfloat16.
        weight: ``[hidden]``; any of these dtypes.
        eps: added to the mean of squares.
        launch: in place of ``norm_launch``; ``block`` below ``hidden`` reads each row twice.

    Returns:
        New contiguous memory with the shape and dtype of ``x``.

    Raises:
        TypeError: a dtype is none of these.
        ValueError: shapes or devices don't fit.
    """
    _check("rms_norm", x, weight)
    out = new_result(x, x.shape, x.dtype)
    if x.numel() > 0:
        _launch_norm(x, None, weight, eps, out, None, launch)
    return rounded(out, x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, launch: Launch | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``residual`` to ``x``, and normalise the sum as ``rms_norm`` does.

    Args:
        x: ``[..., hidden]``; float32, float16 or bfloat16.
        residual: with the shape and dtype of ``x``.
        weight: ``[hidden]``; any of these dtypes.
        eps: added to the mean of squares.
        launch: in place of ``norm_launch``; ``block`` below ``hidden`` reads each row twice.

    Returns:
        The normalised sum and the sum, both new contiguous memory with the shape and dtype of ``x``.

    Raises:
        TypeError: a dtype is none of these.
        ValueError: shapes or devices don't fit.
    """
    _check_sum(x, residual, weight)
    out, total = new_result(x, x.shape, x.dtype), new_result(x, x.shape, x.dtype)
    if x.numel() > 0:
        _launch_norm(x, residual, weight, eps, out, total, launch)
    return rounded(out, x.dtype), rounded(total, x.dtype)


def norm_launch(num_rows: int, hidden: int) -> Launch:
    """Choose the constants: a row in one block if it fits; where few rows leave SMs idle, more threads for each row.

    Many wide rows are read twice, the second time from the cache: programs that hold less of a row leave room for more
    of them (H200: 5 % faster).
    """
    block = next_power_of_2(hidden)
    if block > MAX_BLOCK:
        return Launch(num_warps=16, block=8192)
    if block >= 8192 and num_rows >= 2048:
        return Launch(num_warps=16, block=4096)
    rows = min(next_power_of_2(num_rows), max(1, 1024 // block))
    per_thread = 16 if num_rows <= 256 else 32
    return Launch(num_warps=min(16, max(1, rows * block // (32 * per_thread))), block=block, rows=rows)


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
    launch: Launch | None,
) -> None:
    rows, added = rows_of(x), None if residual is None else rows_of(residual)
    hidden = x.shape[-1]
    constants = launch or norm_launch(rows.count, hidden)
    is_whole = constants.block >= hidden
    kernel = _norm_kernel if is_whole else _long_norm_kernel
    with on_device(x.device):
        kernel[(ceil_div(rows.count, constants.rows) if is_whole else rows.count,)](
            rows.tensor,
            rows.tensor if added is None else added.tensor,
            weight.contiguous(),
            out,
            out if total is None else total,
            rows.count,
            rows.stride,
            0 if added is None else added.stride,
            eps,
            HIDDEN=hidden,
            HAS_RESIDUAL=residual is not None,
            BLOCK=constants.block,
            ROWS=constants.rows if is_whole else 1,
            num_warps=constants.num_warps,
        )


@jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Hold ``ROWS`` whole rows in registers: each is read once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_full: tl.constexpr = ROWS == 1 and BLOCK == HIDDEN
    mask = (row < num_rows) & (column < HIDDEN)
    # Asked for before the sum is waited for.
    weight = load_tile(weight_ptr + column, column < HIDDEN, BLOCK == HIDDEN, "evict_last")
    x = load_tile(x_ptr + row * x_stride + column, mask, is_full, "")
    if HAS_RESIDUAL:
        residual = load_tile(residual_ptr + row * residual_stride + column, mask, is_full, "")
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        store_tile(total_ptr + row * HIDDEN + column, x, mask, is_full)
    value = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / HIDDEN + eps)
    value = value * scale[:, None] * weight.to(tl.float32)
    store_tile(out_ptr + row * HIDDEN + column, value, mask, is_full)


@jit(do_not_specialize=["num_rows"])
def _long_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Walk over one row twice, the second time from the cache: for rows that registers can't hold."""
    row = tl.program_id(0).to(tl.int64)
    is_full: tl.constexpr = HIDDEN % BLOCK == 0
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, HIDDEN, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < HIDDEN
        x = load_tile(x_ptr + row * x_stride + column, mask, is_full, "evict_last")
        if HAS_RESIDUAL:
            residual = load_tile(residual_ptr + row * residual_stride + column, mask, is_full, "evict_last")
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            store_tile(total_ptr + row * HIDDEN + column, x, mask, is_full)
        squares += x.to(tl.float32) * x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / HIDDEN + eps)
    for start in range(0, HIDDEN, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < HIDDEN
        x = load_tile(x_ptr + row * x_stride + column, mask, is_full, "evict_first")
        if HAS_RESIDUAL:  # Added again: reading the sum back could need another thread's write.
            residual = load_tile(residual_ptr + row * residual_stride + column, mask, is_full, "evict_first")
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        weight = load_tile(weight_ptr + column, mask, is_full, "evict_last")
        value = x.to(tl.float32) * scale * weight.to(tl.float32)
        store_tile(out_ptr + row * HIDDEN + column, value, mask, is_full)


def _check(op: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    check_ndim(op, "x", x, 1)
    check_dtype(op, "x", x, FLOATS)
    check_dtype(op, "weight", weight, FLOATS)
    check_shape(op, "weight", weight, x.shape[-1:], "of the last dim of x")
    check_device(op, x, weight=weight)


def _check_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    _check("add_rms_norm", x, weight)
    check_dtype("add_rms_norm", "residual", residual, (x.dtype,))
    check_shape("add_rms_norm", "residual", residual, x.shape, "of x")
    check_device("add_rms_norm", x, residual=residual)


def _rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    _check("rms_norm", x, weight)
    return x.new_empty(x.shape)


def _add_rms_norm_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_sum(x, residual, weight)
    return x.new_empty(x.shape), x.new_empty(x.shape)


register("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm, _rms_norm_fake)
register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    add_rms_norm,
    _add_rms_norm_fake,
)
