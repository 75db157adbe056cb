"""Attention of a batch of equal lengths, by PyTorch's own kernels where they can."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Return softmax(scores) @ v, ``[batch, heads, queries, head_dim]``.

    Args:
        q: ``[batch, heads, queries, head_dim]``.
        k: ``[batch, kv_heads, keys, head_dim]``, like v; ``heads`` is a multiple of ``kv_heads``.
        scale: of the scores.
        mask: bool, broadcastable to ``[batch, 1, queries, keys]``; True where a query sees a key.
        is_causal: instead of a mask, as many queries as keys.
        soft_cap: as in ``ops``; needs a mask where something is hidden.
    """
    group = q.shape[1] // k.shape[1]
    if q.shape[2] == 1 and group > 1:
        # Heads that share a key head are like several queries: nothing need be repeated.
        rows = q.reshape(q.shape[0], k.shape[1], group, q.shape[3])
        return attend(rows, k, v, scale=scale, mask=mask, soft_cap=soft_cap).reshape(q.shape)
    if soft_cap:
        return _capped(q, k, v, mask, scale, soft_cap)
    # Of the fused kernels only those for half precision without a mask know groups; others would build all scores.
    knows_groups = mask is None and q.dtype != torch.float32
    if group > 1 and not knows_groups:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=group > 1 and knows_groups
    )


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, soft_cap: float
) -> torch.Tensor:
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # [batch, kv_heads, group, queries, head_dim]
    scores = grouped @ k.float().transpose(-1, -2).unsqueeze(2)
    scores = soft_cap * torch.tanh(scores * (scale / soft_cap))
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(-3), float("-inf"))
    return (scores.softmax(dim=-1) @ v.float().unsqueeze(2)).flatten(1, 2).to(q.dtype)
