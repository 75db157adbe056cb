"""Decoding by Triton: each sequence is divided among programs, whose findings are combined ("flash decoding").

The idea is Tri Dao and others', "Flash-Decoding for long-context inference" (2023): a batch of single queries has too
few programs to keep a device's memory busy, unless several read parts of one sequence. Reading keys by a block table
is vLLM's PagedAttention (Kwon and others, 2023). No code of either is used.

One program serves one row, one key head with the query heads that share it, and one part of the tokens. The last part
ends before the new token: that one is taken from ``k`` and ``v`` themselves, and the same program writes it to the
cache. So nobody reads a slot that is being written.

What is a part follows from the lengths, on the device. The grid follows from shapes, so a program may find that there
is nothing for it to do.
"""

# Triton's own annotations know neither launch options nor tensors that are scalars:
# pyright: reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from piecework_attention.launch import DecodeLaunch, decode_launch, power_of_two

LOG2_E = tl.constexpr(1.4426950408889634)
_COMBINE_TILE = 2048
"""Numbers that the combining kernel holds at once at most, per program: few, so that there are many programs."""


def decode_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    launch: DecodeLaunch | None = None,
) -> None:
    """Write new keys and values to the cache, then the attention of each row to ``out``.

    Args:
        q: as the other tensors, in ``ops``.
        launch: instead of what ``decode_launch`` chooses.
    """
    rows, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    max_blocks = block_table.shape[1]
    if rows == 0 or heads == 0:
        return
    if launch is None:
        launch = decode_launch(
            rows=rows,
            kv_heads=kv_heads,
            head_dim=head_dim,
            itemsize=q.element_size(),
            capacity=max_blocks * block_size,
            num_multiprocessors=_num_multiprocessors(q.device),
        )
    num_splits = launch.num_splits
    padded_dim = max(16, power_of_two(head_dim))
    is_split = num_splits > 1
    found = torch.empty((rows, heads, num_splits, head_dim) if is_split else 0, dtype=torch.float32, device=q.device)
    weight = torch.empty((2, rows, heads, num_splits) if is_split else 0, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        _decode[(num_splits, kv_heads, rows)](
            *(q, k, v, out, found, weight, key_cache, value_cache, block_table, lengths),
            *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            *(out.stride(0), out.stride(1)),
            *(key_cache.stride(0), key_cache.stride(1), key_cache.stride(2)),
            *(value_cache.stride(0), value_cache.stride(1), value_cache.stride(2)),
            *(block_table.stride(0), block_table.stride(1), lengths.stride(0)),
            *(num_blocks, max_blocks, rows, num_splits, scale, soft_cap),
            WINDOW=window,
            HAS_CAP=soft_cap > 0,
            BLOCK_SIZE=block_size,
            GROUP=heads // kv_heads,
            PADDED_GROUP=max(16, power_of_two(heads // kv_heads)),
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            BLOCK_TOKENS=launch.block_tokens,
            MIN_SPLIT_TOKENS=launch.min_split_tokens,
            IS_SPLIT=is_split,
            # Tensor cores would round float32 to ten bits.
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
        if is_split:
            padded_splits = power_of_two(num_splits)
            part_dim = max(16, min(padded_dim, _COMBINE_TILE // padded_splits))
            _combine[(rows, heads, triton.cdiv(head_dim, part_dim))](
                *(out, found, weight, lengths, out.stride(0), out.stride(1), lengths.stride(0)),
                *(rows, heads, max_blocks * block_size, num_splits),
                WINDOW=window,
                HEAD_DIM=head_dim,
                PART_DIM=part_dim,
                BLOCK_TOKENS=launch.block_tokens,
                MIN_SPLIT_TOKENS=launch.min_split_tokens,
                PADDED_SPLITS=padded_splits,
                num_warps=4,
            )


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter.
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _parts(length, capacity, num_splits, WINDOW: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    """Return the first token that is seen, the end of those read from the cache, and the tokens of one part."""
    end = tl.minimum(tl.maximum(length - 1, 0), capacity)
    first = 0
    if WINDOW > 0:
        first = tl.minimum(tl.maximum(length - WINDOW, 0), end)
    part = tl.cdiv(tl.cdiv(end - first, num_splits), BLOCK) * BLOCK
    return first, end, tl.maximum(part, LEAST)


@triton.jit
def _score(products, scale, soft_cap, HAS_CAP: tl.constexpr):
    """Return scores in units of which 2 to the power is taken, since the hardware has no other."""
    scores = products * scale
    if HAS_CAP:
        scores = soft_cap * (1 - 2 / (tl.exp(2 * scores / soft_cap) + 1))  # tanh
    return scores * LOG2_E


# One kernel serves all batches and tables: a size of its own would cost seconds at the first call.
@triton.jit(do_not_specialize=["num_blocks", "max_blocks", "num_rows", "num_splits"])
def _decode(
    q_pointer,
    k_pointer,
    v_pointer,
    out_pointer,
    found_pointer,
    weight_pointer,
    key_cache_pointer,
    value_cache_pointer,
    table_pointer,
    lengths_pointer,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    out_row_stride,
    out_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    table_row_stride,
    table_column_stride,
    lengths_stride,
    num_blocks,
    max_blocks,
    num_rows,
    num_splits,
    scale,
    soft_cap,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MIN_SPLIT_TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(1)
    length = tl.maximum(tl.load(lengths_pointer + row * lengths_stride), 0)
    first, end, part = _parts(length, max_blocks * BLOCK_SIZE, num_splits, WINDOW, BLOCK_TOKENS, MIN_SPLIT_TOKENS)
    start = first + split * part
    # The part that ends before the new token; where nothing else is seen, the first.
    is_last = (start + part >= end) & ((start < end) | (split == 0))
    if (start < end) | (split == 0):
        group = tl.arange(0, PADDED_GROUP)
        dim = tl.arange(0, PADDED_DIM)
        in_group = group < GROUP
        in_dim = dim < HEAD_DIM
        head = kv_head * GROUP + group
        is_q = in_group[:, None] & in_dim[None, :]
        q = tl.load(
            q_pointer + row * q_row_stride + head[:, None].to(tl.int64) * q_head_stride + dim[None, :],
            mask=is_q,
            other=0.0,
        )

        # The new token, where this program has it: a row of length 0 has none, a missing block hides it.
        column = tl.maximum(length - 1, 0) // BLOCK_SIZE
        slot = tl.maximum(length - 1, 0) % BLOCK_SIZE
        has_new = is_last & (length > 0) & (column < max_blocks)
        table_row = table_pointer + row * table_row_stride
        block = tl.load(table_row + column.to(tl.int64) * table_column_stride, mask=has_new, other=-1)
        has_new = has_new & (block >= 0) & (block < num_blocks)
        block = block.to(tl.int64)
        # Not `in_dim & has_new`: the interpreters of Triton 3.6 to 3.9 make an int8 of a bool that becomes a vector.
        is_new = dim < tl.where(has_new, HEAD_DIM, 0)
        k_new = tl.load(k_pointer + row * k_row_stride + kv_head * k_head_stride + dim, mask=is_new, other=0.0)
        v_new = tl.load(v_pointer + row * v_row_stride + kv_head * v_head_stride + dim, mask=is_new, other=0.0)
        key_head = key_cache_pointer + kv_head.to(tl.int64) * key_head_stride
        value_head = value_cache_pointer + kv_head.to(tl.int64) * value_head_stride
        tl.store(key_head + block * key_block_stride + slot * key_slot_stride + dim, k_new, mask=is_new)
        tl.store(value_head + block * value_block_stride + slot * value_slot_stride + dim, v_new, mask=is_new)
        products = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1)
        # Not minus infinity, which less itself is NaN.
        largest = tl.where(has_new, _score(products, scale, soft_cap, HAS_CAP), -1.0e30)
        total = tl.where(has_new, in_group.to(tl.float32), 0.0)
        found = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32) + v_new.to(tl.float32)[None, :]

        # Blocks are looked up a tile ahead. Looked up in their own turn, they would use up the stages of the software
        # pipeline (Triton 3.6 to 3.9), and no tile of keys would be under way while another one is at work.
        stop = tl.minimum(start + part, end)
        position = start + tl.arange(0, BLOCK_TOKENS)
        ahead = tl.load(
            table_row + (position // BLOCK_SIZE).to(tl.int64) * table_column_stride, mask=position < stop, other=-1
        )
        for token in range(start, stop, BLOCK_TOKENS):
            position = token + tl.arange(0, BLOCK_TOKENS)
            block_of = ahead
            is_read = (position < stop) & (block_of >= 0) & (block_of < num_blocks)
            following = position + BLOCK_TOKENS
            ahead = tl.load(
                table_row + (following // BLOCK_SIZE).to(tl.int64) * table_column_stride,
                mask=following < stop,
                other=-1,
            )
            block_of = block_of.to(tl.int64)
            slot_of = position % BLOCK_SIZE
            is_kv = is_read[:, None] & in_dim[None, :]
            keys = tl.load(
                key_head + (block_of * key_block_stride + slot_of * key_slot_stride)[:, None] + dim[None, :],
                mask=is_kv,
                other=0.0,
            )
            scores = _score(tl.dot(q, tl.trans(keys), input_precision=PRECISION), scale, soft_cap, HAS_CAP)
            scores = tl.where(is_read[None, :], scores, -1.0e30)
            larger = tl.maximum(largest, tl.max(scores, axis=1))
            shrunk = tl.exp2(largest - larger)
            weights = tl.where(is_read[None, :], tl.exp2(scores - larger[:, None]), 0.0)
            values = tl.load(
                value_head + (block_of * value_block_stride + slot_of * value_slot_stride)[:, None] + dim[None, :],
                mask=is_kv,
                other=0.0,
            )
            found = found * shrunk[:, None]
            found = tl.dot(weights.to(values.dtype), values, found, input_precision=PRECISION)
            total = total * shrunk + tl.sum(weights, axis=1)
            largest = larger

        if not IS_SPLIT:
            result = found / tl.where(total > 0, total, 1.0)[:, None]  # Zeros, where nothing is seen.
            tl.store(
                out_pointer + row * out_row_stride + head[:, None].to(tl.int64) * out_head_stride + dim[None, :],
                result.to(out_pointer.dtype.element_ty),
                mask=is_q,
            )
        else:
            place = (row * kv_heads * GROUP + head) * num_splits + split
            tl.store(found_pointer + place[:, None] * HEAD_DIM + dim[None, :], found, mask=is_q)
            tl.store(weight_pointer + place, largest, mask=in_group)
            all_places = num_rows.to(tl.int64) * kv_heads * GROUP * num_splits
            tl.store(weight_pointer + all_places + place, total, mask=in_group)


@triton.jit(do_not_specialize=["num_rows", "heads", "capacity", "num_splits"])
def _combine(
    out_pointer,
    found_pointer,
    weight_pointer,
    lengths_pointer,
    out_row_stride,
    out_head_stride,
    lengths_stride,
    num_rows,
    heads,
    capacity,
    num_splits,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PART_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MIN_SPLIT_TOKENS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.maximum(tl.load(lengths_pointer + row * lengths_stride), 0)
    first, end, part = _parts(length, capacity, num_splits, WINDOW, BLOCK_TOKENS, MIN_SPLIT_TOKENS)
    split = tl.arange(0, PADDED_SPLITS)
    dim = tl.program_id(2) * PART_DIM + tl.arange(0, PART_DIM)
    # Others wrote nothing.
    was_used = (first + split * part < end) | (split == 0)
    place = (row * heads + head) * num_splits + split
    largest = tl.load(weight_pointer + place, mask=was_used, other=-1.0e30)
    total = tl.load(weight_pointer + num_rows.to(tl.int64) * heads * num_splits + place, mask=was_used, other=0.0)
    share = tl.exp2(largest - tl.max(largest, axis=0))
    found = tl.load(
        found_pointer + place[:, None] * HEAD_DIM + dim[None, :],
        mask=was_used[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    summed = tl.sum(total * share, axis=0)
    result = tl.sum(found * share[:, None], axis=0) / tl.where(summed > 0, summed, 1.0)
    tl.store(
        out_pointer + row * out_row_stride + head.to(tl.int64) * out_head_stride + dim,
        result.to(out_pointer.dtype.element_ty),
        mask=dim < HEAD_DIM,
    )
