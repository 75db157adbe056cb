"""Quantisation of activations to int8 or float8, by a scale per row that is found or by one that is given.

Arithmetic, all in float32, each step rounded to nearest as IEEE 754 says, so that plain PyTorch agrees bit for bit:

- ``scale = max(amax(abs(x)) * (1 / largest), 2**-126)``; ``largest`` is 127, 448 (float8_e4m3fn) or 57344
  (float8_e5m2). The least scale is the least whose reciprocal is finite in normal numbers: a row of zeros gives zeros.
- ``code = round(clamp(x * (1 / scale), -largest, largest))``: one division per row, and a multiplication per element.
  Rounding is half to even, to an integer or to a float8.

``quantize_static`` with the scales of ``quantize_dynamic`` gives the same codes. A row with an infinity or NaN has
that as its scale, so that it shows; its codes are unspecified.
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
from piecework_triton_ops.native import largest
from piecework_triton_ops.tiles import load_tile, store_tile

__all__ = ["quantize_dynamic", "quantize_launch", "quantize_static", "quantize_static_launch"]

CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
"""What can be quantised to; Triton has float8_e4m3fn on devices of compute capability 8.9 and above."""


def quantize_dynamic(
    x: torch.Tensor, dtype: torch.dtype, launch: Launch | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of ``x`` by a scale of its own.

    Args:
        x: ``[..., hidden]``; float32, float16 or bfloat16.
        dtype: int8, float8_e4m3fn or float8_e5m2.
        launch: in place of ``quantize_launch``; ``block`` below ``hidden`` reads each row twice.

    Returns:
        The codes, with the shape of ``x``, and float32 scales ``[..., 1]``, so that ``codes.float() * scales`` is
        about ``x``.

    Raises:
        TypeError: a dtype is none of these.
        ValueError: ``x`` has no dims, or rows without elements.
    """
    _check_dynamic(x, dtype)
    codes = new_result(x, x.shape, dtype)
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if x.numel() > 0:
        rows, hidden = rows_of(x), x.shape[-1]
        constants = launch or quantize_launch(rows.count, hidden)
        is_whole = constants.block >= hidden
        kernel = _dynamic_kernel if is_whole else _long_dynamic_kernel
        with on_device(x.device):
            kernel[(ceil_div(rows.count, constants.rows) if is_whole else rows.count,)](
                rows.tensor,
                codes,
                scales,
                rows.count,
                rows.stride,
                HIDDEN=hidden,
                LARGEST=largest(dtype),
                IS_INTEGER=not dtype.is_floating_point,
                BLOCK=constants.block,
                ROWS=constants.rows if is_whole else 1,
                num_warps=constants.num_warps,
            )
    return rounded(codes, dtype), scales


def quantize_static(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, launch: Launch | None = None
) -> torch.Tensor:
    """Quantise ``x`` by a given scale.

    Args:
        x: ``[..., hidden]``; float32, float16 or bfloat16.
        scale: float32, positive; one element (``[]`` or ``[1]``), or one per row, ``[..., 1]``.
        dtype: int8, float8_e4m3fn or float8_e5m2.
        launch: in place of ``quantize_static_launch``.

    Returns:
        The codes, with the shape of ``x``.

    Raises:
        TypeError: a dtype is none of these.
        ValueError: shapes or devices don't fit.
    """
    _check_static(x, scale, dtype)
    codes = new_result(x, x.shape, dtype)
    if x.numel() > 0:
        rows, hidden = rows_of(x), x.shape[-1]
        constants = launch or quantize_static_launch(rows.count, hidden)
        num_programs = ceil_div(rows.count, constants.rows) * ceil_div(hidden, constants.block)
        with on_device(x.device):
            _static_kernel[(num_programs,)](
                rows.tensor,
                scale.contiguous(),
                codes,
                rows.count,
                rows.stride,
                HIDDEN=hidden,
                IS_PER_ROW=scale.numel() > 1,
                LARGEST=largest(dtype),
                IS_INTEGER=not dtype.is_floating_point,
                BLOCK=constants.block,
                ROWS=constants.rows,
                num_warps=constants.num_warps,
            )
    return rounded(codes, dtype)


def quantize_launch(num_rows: int, hidden: int) -> Launch:
    """Choose the constants: a row in one block if it fits; where few rows leave SMs idle, more threads for each row."""
    block = next_power_of_2(hidden)
    if block > MAX_BLOCK:
        return Launch(num_warps=16, block=8192)
    rows = min(next_power_of_2(num_rows), max(1, 1024 // block))
    per_thread = 8 if num_rows <= 256 else 16
    return Launch(num_warps=min(16, max(1, rows * block // (32 * per_thread))), block=block, rows=rows)


def quantize_static_launch(num_rows: int, hidden: int) -> Launch:
    """Choose the constants: 16 codes per thread, 16 bytes; fewer where SMs are idle."""
    most, per_thread = (2048, 16) if num_rows * hidden >= 2048 * 264 else (512, 2)
    block = min(next_power_of_2(hidden), most)
    rows = min(next_power_of_2(num_rows), most // block)
    return Launch(num_warps=max(1, block * rows // (32 * per_thread)), block=block, rows=rows)


@jit(do_not_specialize=["num_rows"])
def _dynamic_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    x_stride,
    HIDDEN: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Hold ``ROWS`` whole rows in registers: each is read once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_full: tl.constexpr = ROWS == 1 and BLOCK == HIDDEN
    mask = (row < num_rows) & (column < HIDDEN)
    x = load_tile(x_ptr + row * x_stride + column, mask, is_full, "").to(tl.float32)
    scale = _scale_of(tl.max(_magnitude(x), axis=1), LARGEST)[:, None]
    codes = _encode(x, tl.div_rn(1.0, scale), LARGEST, IS_INTEGER)
    store_tile(codes_ptr + row * HIDDEN + column, codes, mask, is_full)
    tl.store(scales_ptr + row, scale, mask=row < num_rows)


@jit(do_not_specialize=["num_rows"])
def _long_dynamic_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    x_stride,
    HIDDEN: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Walk over one row twice, the second time from the cache: for rows that registers can't hold."""
    row = tl.program_id(0).to(tl.int64)
    is_full: tl.constexpr = HIDDEN % BLOCK == 0
    magnitudes = tl.zeros([BLOCK], tl.int32)
    for start in range(0, HIDDEN, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr + row * x_stride + column, column < HIDDEN, is_full, "evict_last").to(tl.float32)
        magnitudes = tl.maximum(magnitudes, _magnitude(x))
    scale = _scale_of(tl.max(magnitudes, axis=0), LARGEST)
    inverse = tl.div_rn(1.0, scale)
    tl.store(scales_ptr + row, scale)
    for start in range(0, HIDDEN, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr + row * x_stride + column, column < HIDDEN, is_full, "evict_first").to(tl.float32)
        codes = _encode(x, inverse, LARGEST, IS_INTEGER)
        store_tile(codes_ptr + row * HIDDEN + column, codes, column < HIDDEN, is_full)


@jit(do_not_specialize=["num_rows"])
def _static_kernel(
    x_ptr,
    scale_ptr,
    codes_ptr,
    num_rows,
    x_stride,
    HIDDEN: tl.constexpr,
    IS_PER_ROW: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Hold a tile of codes; those of one row are neighbours in the grid too."""
    num_blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_full: tl.constexpr = ROWS == 1 and HIDDEN % BLOCK == 0
    mask = (row < num_rows) & (column < HIDDEN)
    x = load_tile(x_ptr + row * x_stride + column, mask, is_full, "").to(tl.float32)
    if IS_PER_ROW and ROWS == 1:
        scale = tl.load(scale_ptr + tl.program_id(0) // num_blocks)  # One load per program, not one per element.
    elif IS_PER_ROW:
        scale = tl.load(scale_ptr + row, mask=row < num_rows, other=1.0)
    else:
        scale = tl.load(scale_ptr)
    codes = _encode(x, tl.div_rn(1.0, scale), LARGEST, IS_INTEGER)
    store_tile(codes_ptr + row * HIDDEN + column, codes, mask, is_full)


@jit
def _magnitude(x):
    """Return the bits of ``abs(x)``: as integers they are ordered as the floats are, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _scale_of(magnitude, LARGEST: tl.constexpr):
    """Return the scale of rows from the bits of their largest element."""
    scale = magnitude.to(tl.float32, bitcast=True) * (1.0 / LARGEST)
    return tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)  # As written, it keeps NaN.


@jit
def _encode(x, inverse, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr):
    """Return codes as float32; those of float8 are rounded when they are stored."""
    codes = tl.minimum(tl.maximum(x * inverse, -LARGEST), LARGEST)
    if IS_INTEGER:
        # 1.5 * 2**23: sums with it have no bits below 1, and addition rounds half to even. libdevice.rint does the
        # same, but Triton's interpreter lacks it.
        codes = (codes + 12582912.0) - 12582912.0
    return codes


def _check(op: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    check_ndim(op, "x", x, 1)
    check_dtype(op, "x", x, FLOATS)
    if dtype not in CODES:
        raise TypeError(f"{op}: dtype must be one of {', '.join(map(str, CODES))}, got {dtype}")


def _check_dynamic(x: torch.Tensor, dtype: torch.dtype) -> None:
    _check("quantize_dynamic", x, dtype)
    if x.shape[-1] == 0:
        raise ValueError(f"quantize_dynamic: rows of x must have elements, got the shape {tuple(x.shape)}")


def _check_static(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
    op = "quantize_static"
    _check(op, x, dtype)
    check_dtype(op, "scale", scale, (torch.float32,))
    if scale.ndim > 1 or scale.ndim == 1 and scale.shape[0] != 1:  # So written, no guard on the number of rows.
        check_shape(op, "scale", scale, (*x.shape[:-1], 1), "(one per row of x), [] or [1]")
    check_device(op, x, scale=scale)


def _quantize_dynamic_fake(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    _check_dynamic(x, dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _quantize_static_fake(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    _check_static(x, scale, dtype)
    return x.new_empty(x.shape, dtype=dtype)


register(
    "quantize_dynamic(Tensor x, ScalarType dtype) -> (Tensor, Tensor)",
    quantize_dynamic,
    _quantize_dynamic_fake,
)
register(
    "quantize_static(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
    quantize_static,
    _quantize_static_fake,
)
