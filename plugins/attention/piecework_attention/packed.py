"""The general op: packed sequences of different lengths, with or without a cache.

Sequences with as many new tokens and as many keys go through one call of PyTorch's attention: a loop over many short
ones would be all overhead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from piecework_attention.checks import AttentionError
from piecework_attention.maths import attend

MASKED_ROWS = 1024
"""Queries that share one explicit mask, so that a mask stays small beside keys and values."""
CAPPED_SCORES = 2**24
"""Scores that are held at once where they are computed one by one, in float32."""


@dataclass(frozen=True)
class PackedCache:
    """The cache of a call, as in ``ops``."""

    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True)
class _Sequence:
    index: int
    start: int
    """Of its new tokens among those of the call."""
    num_new: int
    length: int
    """Its keys, new ones included."""


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    query_starts: torch.Tensor,
    cache: PackedCache | None,
    *,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
) -> None:
    """Write the attention of each sequence into ``out``; arguments as in ``ops``."""
    sequences, num_tokens = _read_sequences(query_starts, cache, window, q.shape[0])
    if cache is not None:
        _write_new(k[:num_tokens], v[:num_tokens], query_starts, cache)
    for group in _alike(sequences):
        rows = _rows_of(group, q.device)
        num_new, length = group[0].num_new, group[0].length
        if cache is None:
            keys, values = (x[rows].unflatten(0, (-1, num_new)) for x in (k, v))
        else:
            first = max(0, length - num_new - window + 1) if window else 0
            keys, values = _gather(cache, group, first, length)
        queries = q[rows].unflatten(0, (-1, num_new))
        parts = _attend_in_parts(
            *(x.transpose(1, 2) for x in (queries, keys, values)),
            scale=scale,
            causal=causal,
            window=window,
            soft_cap=soft_cap,
        )
        for part, result in parts:
            if isinstance(rows, slice):
                out[rows].unflatten(0, (-1, num_new))[:, part] = result.transpose(1, 2)
            else:
                out[rows.view(-1, num_new)[:, part]] = result.transpose(1, 2)
    out[num_tokens:] = 0


def _read_sequences(
    query_starts: torch.Tensor, cache: PackedCache | None, window: int, num_rows: int
) -> tuple[list[_Sequence], int]:
    """Return the sequences that have new tokens, and the number of these, from one copy to the host.

    Raises:
        AttentionError: the numbers contradict each other, or a block that is needed is none of the cache.
    """
    num_sequences = query_starts.shape[0] - 1
    parts = [query_starts]
    if cache is not None:
        parts += [cache.lengths, _lacks_blocks(query_starts, cache, window)]
    numbers = torch.cat(parts).tolist()
    starts = numbers[: num_sequences + 1]
    if starts[0] != 0 or starts[-1] > num_rows or any(start > end for start, end in itertools.pairwise(starts)):
        raise AttentionError(
            f"piecework::attention: query_starts must rise from 0 to at most the {num_rows} tokens of q, got {starts}"
        )
    news = [end - start for start, end in itertools.pairwise(starts)]
    if cache is None:
        lengths = news
    else:
        lengths, lacks = numbers[num_sequences + 1 : 2 * num_sequences + 1], numbers[2 * num_sequences + 1 :]
        _check_lengths(news, lengths, lacks, cache)
    found = zip(range(num_sequences), starts, news, lengths, strict=False)
    return [_Sequence(*numbers) for numbers in found if numbers[2] > 0], starts[-1]


def _lacks_blocks(query_starts: torch.Tensor, cache: PackedCache, window: int) -> torch.Tensor:
    """Return for each sequence, ``[sequences]`` int32, whether the table has no block for keys that it needs."""
    starts = cache.lengths - query_starts.diff()
    first = (starts - window + 1).clamp(min=0) if window else torch.zeros_like(starts)
    column = torch.arange(cache.block_table.shape[1], device=starts.device) * cache.block_size
    is_needed = (column + cache.block_size > first[:, None]) & (column < cache.lengths[:, None])
    is_none = (cache.block_table < 0) | (cache.block_table >= cache.keys.shape[0])
    return (is_needed & is_none).any(dim=1).to(torch.int32)


def _check_lengths(news: Sequence[int], lengths: Sequence[int], lacks: Sequence[int], cache: PackedCache) -> None:
    capacity = cache.block_table.shape[1] * cache.block_size
    for index, (num_new, length, lack) in enumerate(zip(news, lengths, lacks, strict=True)):
        if num_new and not num_new <= length <= capacity:
            raise AttentionError(
                f"piecework::attention: lengths[{index}] must lie between its {num_new} new tokens and the {capacity} "
                f"of {cache.block_table.shape[1]} blocks of {cache.block_size}, got {length}"
            )
        if num_new and lack:
            raise AttentionError(
                f"piecework::attention: block_table[{index}] must name blocks from 0 to {cache.keys.shape[0] - 1} for "
                f"the tokens of its sequence ({length}), got {cache.block_table[index].tolist()}"
            )


def _write_new(k: torch.Tensor, v: torch.Tensor, query_starts: torch.Tensor, cache: PackedCache) -> None:
    """Write the keys and values of the new tokens, ``[tokens, kv_heads, head_dim]``, to their slots."""
    token = torch.arange(k.shape[0], dtype=torch.int32, device=k.device)
    ends = query_starts[1:].contiguous()
    sequence = torch.searchsorted(ends, token, right=True)
    position = (cache.lengths - ends)[sequence] + token
    block = cache.block_table[sequence, position // cache.block_size]
    slot = position % cache.block_size
    cache.keys[block, slot] = k
    cache.values[block, slot] = v


def _alike(sequences: Sequence[_Sequence]) -> list[list[_Sequence]]:
    """Return the sequences in groups of equal numbers of new tokens and keys."""
    groups: dict[tuple[int, int], list[_Sequence]] = {}
    for sequence in sequences:
        groups.setdefault((sequence.num_new, sequence.length), []).append(sequence)
    return list(groups.values())


def _rows_of(group: Sequence[_Sequence], device: torch.device) -> slice | torch.Tensor:
    """Return where the new tokens of a group lie: a slice where they are neighbours, which copies nothing."""
    first, num_new = group[0], group[0].num_new
    if all(sequence.start == first.start + i * num_new for i, sequence in enumerate(group)):
        return slice(first.start, first.start + len(group) * num_new)
    starts = torch.tensor([sequence.start for sequence in group], device=device)
    return (starts[:, None] + torch.arange(num_new, device=device)).flatten()


def _gather(
    cache: PackedCache, group: Sequence[_Sequence], first: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values ``[group, length - first, kv_heads, head_dim]`` of tokens from ``first`` on."""
    size = cache.block_size
    skipped = first // size
    indices = torch.tensor([sequence.index for sequence in group], device=cache.keys.device)
    blocks = cache.block_table[indices, skipped : (length - 1) // size + 1]
    keys, values = (x[blocks].flatten(1, 2) for x in (cache.keys, cache.values))
    kept = slice(first - skipped * size, length - skipped * size)
    return keys[:, kept], values[:, kept]


def _attend_in_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield runs of queries and their results ``[batch, heads, run, head_dim]``; the last query stands at the last key.

    Args:
        q: ``[batch, heads, queries, head_dim]``.
        k: ``[batch, kv_heads, keys, head_dim]``, like v.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    window = 0 if window >= num_keys else window
    causal = causal and num_queries > 1
    if not window and not soft_cap and (not causal or num_queries == num_keys):
        yield slice(0, num_queries), attend(q, k, v, scale=scale, is_causal=causal)
        return
    most = CAPPED_SCORES // (q.shape[0] * q.shape[1] * num_keys) if soft_cap else MASKED_ROWS
    step = max(1, most)
    offset = num_keys - num_queries
    for start in range(0, num_queries, step):
        end = min(start + step, num_queries)
        # The keys that some query of the run sees.
        first = max(0, offset + start - window + 1) if window else 0
        last = offset + end if causal else min(num_keys, offset + end + window - 1) if window else num_keys
        mask = _visible(offset + start, offset + end, first, last, causal=causal, window=window, device=q.device)
        keys, values = k[:, :, first:last], v[:, :, first:last]
        yield slice(start, end), attend(q[:, :, start:end], keys, values, scale=scale, mask=mask, soft_cap=soft_cap)


def _visible(
    start: int, end: int, first: int, last: int, *, causal: bool, window: int, device: torch.device
) -> torch.Tensor | None:
    """Return which of the keys ``first..last`` the queries at ``start..end`` see, ``[queries, keys]``; None: all."""
    if not causal and not window:
        return None
    distance = torch.arange(start, end, device=device)[:, None] - torch.arange(first, last, device=device)
    visible = distance >= 0 if causal else distance > -window
    return visible & (distance < window) if window else visible
