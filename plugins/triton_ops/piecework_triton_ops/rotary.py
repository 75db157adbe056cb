"""Rotary position embeddings of queries and keys, in one launch.

Arithmetic, in float32: of each head, ``first * cos - second * sin`` and ``second * cos + first * sin``, each rounded
once to the dtype of the head; elements past ``rotary_dim`` are copied. The pairs are element ``i`` and ``i +
rotary_dim / 2`` (NeoX), or ``2 * i`` and ``2 * i + 1`` (GPT-J). The table of cosines and then sines is laid out as
vLLM's ``rotary_embedding`` has it.
"""

from __future__ import annotations

import torch
import triton.language as tl

from piecework_triton_ops.checks import FLOATS, check_device, check_dtype, check_last_dim, check_shape
from piecework_triton_ops.launching import Launch, ceil_div, new_result, next_power_of_2, on_device, rounded
from piecework_triton_ops.library import jit, register
from piecework_triton_ops.tiles import load_tile, store_tile

__all__ = ["rotary_embedding", "rotary_launch"]


def rotary_embedding(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first ``rotary_dim`` elements of each head.

    Args:
        positions: ``[tokens]``; int32 or int64, each within the table: no launch can check that without a wait.
        q: ``[tokens, heads, head_dim]``; float32, float16 or bfloat16.
        k: ``[tokens, kv_heads, head_dim]``; with the dtype of ``q``.
        cos_sin: ``[max_positions, rotary_dim]``, cosines and then sines; float32 or the dtype of ``q``.
        is_neox: whether pairs are halves; otherwise they are neighbours.
        launch: in place of ``rotary_launch``; ``rows`` are heads, ``block`` covers ``rotary_dim / 2``.

    Returns:
        Both rotated, new contiguous memory.

    Raises:
        TypeError: a dtype is none of these.
        ValueError: shapes or devices don't fit.
    """
    _check(positions, q, k, cos_sin)
    q_out, k_out = new_result(q, q.shape, q.dtype), new_result(k, k.shape, k.dtype)
    if q.numel() + k.numel() > 0:
        _launch_rotary(positions, q, k, cos_sin, is_neox, q_out, k_out, launch)
    return rounded(q_out, q.dtype), rounded(k_out, k.dtype)


def rotary_launch(num_tokens: int, num_heads: int, rotary_dim: int) -> Launch:
    """Choose the constants: fewer heads per program where few tokens leave SMs idle; 16 bytes of a half per thread."""
    block = next_power_of_2(rotary_dim // 2)
    most = 4 if num_tokens <= 32 else 16
    heads = min(next_power_of_2(num_heads), most)
    return Launch(num_warps=min(8, max(1, heads * block // 256)), block=block, rows=heads)


def _launch_rotary(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    launch: Launch | None,
) -> None:
    (num_tokens, num_heads, head_dim), num_kv_heads, rotary_dim = q.shape, k.shape[1], cos_sin.shape[1]
    q, k, cos_sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos_sin))
    constants = launch or rotary_launch(num_tokens, max(num_heads, num_kv_heads), rotary_dim)
    blocks_per_token = ceil_div(num_heads, constants.rows) + ceil_div(num_kv_heads, constants.rows)
    rest = head_dim - rotary_dim
    with on_device(q.device):
        _rotary_kernel[(num_tokens * blocks_per_token,)](
            positions.contiguous(),
            q,
            k,
            cos_sin,
            q_out,
            k_out,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos_sin.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            ROTARY_DIM=rotary_dim,
            IS_NEOX=is_neox,
            BLOCK=constants.block,
            REST_BLOCK=next_power_of_2(rest) if rest > 0 else 0,
            HEADS=constants.rows,
            num_warps=constants.num_warps,
        )


@jit
def _rotary_kernel(
    positions_ptr,
    q_ptr,
    k_ptr,
    cos_sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    cos_sin_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate ``HEADS`` heads of one token: of its query, or of its key."""
    q_blocks: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    num_blocks: tl.constexpr = q_blocks + (NUM_KV_HEADS + HEADS - 1) // HEADS
    half: tl.constexpr = ROTARY_DIM // 2
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    block = tl.program_id(0) % num_blocks
    index = tl.arange(0, BLOCK)[None, :]
    cos_row = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride + index
    cos = load_tile(cos_row, index < half, half == BLOCK, "evict_last").to(tl.float32)
    sin = load_tile(cos_row + half, index < half, half == BLOCK, "evict_last").to(tl.float32)
    if block < q_blocks:
        _rotate_heads(
            q_ptr + token * q_token_stride,
            q_out_ptr + token * (NUM_HEADS * HEAD_DIM),
            block * HEADS,
            q_head_stride,
            cos,
            sin,
            NUM_HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            IS_NEOX,
            BLOCK,
            REST_BLOCK,
            HEADS,
        )
    else:
        _rotate_heads(
            k_ptr + token * k_token_stride,
            k_out_ptr + token * (NUM_KV_HEADS * HEAD_DIM),
            (block - q_blocks) * HEADS,
            k_head_stride,
            cos,
            sin,
            NUM_KV_HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            IS_NEOX,
            BLOCK,
            REST_BLOCK,
            HEADS,
        )


@jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    first_head,
    head_stride,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate heads of the token at ``x_ptr``; ``cos`` and ``sin`` are ``[1, BLOCK]``."""
    head = first_head + tl.arange(0, HEADS)[:, None]
    half: tl.constexpr = ROTARY_DIM // 2
    is_full: tl.constexpr = half == BLOCK and NUM_HEADS % HEADS == 0
    x_row = x_ptr + head.to(tl.int64) * head_stride
    out_row = out_ptr + head * HEAD_DIM
    if IS_NEOX:
        index = tl.arange(0, BLOCK)[None, :]
        mask = (head < NUM_HEADS) & (index < half)
        first = load_tile(x_row + index, mask, is_full, "evict_first").to(tl.float32)
        second = load_tile(x_row + half + index, mask, is_full, "evict_first").to(tl.float32)
        store_tile(out_row + index, first * cos - second * sin, mask, is_full)
        store_tile(out_row + half + index, second * cos + first * sin, mask, is_full)
    else:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        mask = (head < NUM_HEADS) & (column < ROTARY_DIM)
        pairs = load_tile(x_row + column, mask, is_full, "evict_first").to(tl.float32)
        first, second = tl.split(tl.reshape(pairs, (HEADS, BLOCK, 2)))
        pairs = tl.join(first * cos - second * sin, second * cos + first * sin)
        store_tile(out_row + column, tl.reshape(pairs, (HEADS, 2 * BLOCK)), mask, is_full)
    if REST_BLOCK > 0:
        rest = ROTARY_DIM + tl.arange(0, REST_BLOCK)[None, :]
        mask = (head < NUM_HEADS) & (rest < HEAD_DIM)
        store_tile(out_row + rest, load_tile(x_row + rest, mask, False, "evict_first"), mask, False)


def _check(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> None:
    op = "rotary_embedding"
    if q.ndim != 3 or k.ndim != 3:
        raise ValueError(
            f"{op}: q and k must be [tokens, heads, head_dim], got the shapes {tuple(q.shape)} and {tuple(k.shape)}"
        )
    check_shape(op, "k", k, (q.shape[0], k.shape[1], q.shape[2]), "of q, the number of heads apart")
    check_shape(op, "positions", positions, q.shape[:1], "of the first dim of q")
    check_dtype(op, "positions", positions, (torch.int32, torch.int64))
    check_dtype(op, "q", q, FLOATS)
    check_dtype(op, "k", k, (q.dtype,))
    check_dtype(op, "cos_sin", cos_sin, (torch.float32, q.dtype))
    check_last_dim(op, "cos_sin", cos_sin)
    if cos_sin.ndim != 2 or cos_sin.shape[1] > q.shape[2] or cos_sin.shape[1] == 0:
        raise ValueError(
            f"{op}: cos_sin must be [max_positions, rotary_dim] with rotary_dim from 2 to head_dim, {q.shape[2]}, "
            f"got the shape {tuple(cos_sin.shape)}"
        )
    check_device(op, positions, q=q, k=k, cos_sin=cos_sin)


def _fake(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(positions, q, k, cos_sin)
    return q.new_empty(q.shape), k.new_empty(k.shape)


register(
    "rotary_embedding(Tensor positions, Tensor q, Tensor k, Tensor cos_sin, bool is_neox) -> (Tensor, Tensor)",
    rotary_embedding,
    _fake,
)
