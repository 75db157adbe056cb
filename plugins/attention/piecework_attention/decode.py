"""Decoding in plain torch, for the CPU and where Triton is missing: no tensor is read on the host.

All blocks of the table are gathered whatever the lengths, since shapes must not depend on them.
"""

from __future__ import annotations

import torch

from piecework_attention.maths import attend


def decode_attention(
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
) -> None:
    """Write new keys and values to the cache, then the attention of each row to ``out``; arguments as in ``ops``."""
    num_rows, max_blocks = block_table.shape
    num_blocks, block_size = key_cache.shape[:2]
    if min(num_rows, max_blocks, num_blocks) == 0:
        out.zero_()
        return
    has_block = (block_table >= 0) & (block_table < num_blocks)
    blocks = block_table.clamp(0, num_blocks - 1)
    _write_new(k, v, key_cache, value_cache, blocks, has_block, lengths)

    position = torch.arange(max_blocks * block_size, device=q.device)
    visible = (position < lengths[:, None]) & has_block.repeat_interleave(block_size, dim=1)
    if window:
        visible &= position >= lengths[:, None] - window
    # Slots that nobody wrote may hold NaN, which a weight of zero does not make zero.
    hidden = ~visible[:, :, None, None]
    keys, values = (x[blocks].flatten(1, 2).masked_fill_(hidden, 0) for x in (key_cache, value_cache))
    result = attend(
        q.unsqueeze(2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        scale=scale,
        mask=visible[:, None, None],
        soft_cap=soft_cap,
    )
    out.copy_(result.squeeze(2).masked_fill_(~visible.any(dim=1)[:, None, None], 0))


def _write_new(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    blocks: torch.Tensor,
    has_block: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Write each row's key and value to its slot, but nothing for rows that have none.

    The number of writes can't depend on data. So rows without a slot do again what the first row with one does;
    with no such row, all write back what is there, to one slot.
    """
    block_size = key_cache.shape[1]
    position = (lengths - 1).long()
    column = position.clamp(min=0) // block_size
    fits = column < blocks.shape[1]
    column = column.clamp(max=blocks.shape[1] - 1)[:, None]
    writes = (position >= 0) & fits & has_block.gather(1, column).squeeze(1)
    row = torch.where(writes, torch.arange(len(writes), device=writes.device), writes.int().argmax())
    block = blocks.gather(1, column).squeeze(1)[row]
    slot = position[row] % block_size
    is_real = writes[row][:, None, None]
    for cache, fresh in ((key_cache, k), (value_cache, v)):
        cache[block, slot] = torch.where(is_real, fresh[row], cache[block, slot])
