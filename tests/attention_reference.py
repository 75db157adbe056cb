"""What attention is, in float64 and loops, and batches to try it on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attend over one sequence: q ``[new, heads, head_dim]``, keys ``[length, kv_heads, head_dim]``."""
    num_new, heads, head_dim = q.shape
    length, kv_heads = keys.shape[:2]
    q, keys, values = (x.double().cpu() for x in (q, keys, values))
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    kv_head = [head // (heads // kv_heads) for head in range(heads)]
    out = torch.zeros(num_new, heads, head_dim, dtype=torch.float64)
    for i in range(num_new):
        position = length - num_new + i
        seen = [
            j for j in range(length) if (j <= position or not causal) and (abs(position - j) < window or not window)
        ]
        scores = (keys[seen][:, kv_head] * q[i]).sum(dim=-1) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = torch.exp(scores - scores.amax(dim=0))
        out[i] = (weights / weights.sum(dim=0))[:, :, None].mul(values[seen][:, kv_head]).sum(dim=0)
    return out


@dataclass
class Batch:
    """Packed sequences, and a cache that holds what came before; slots that nobody wrote hold NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    query_starts: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def new(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.out

    @property
    def cache(self) -> dict[str, torch.Tensor]:
        names = ("key_cache", "value_cache", "block_table", "lengths")
        return {name: getattr(self, name) for name in names}

    def expected(self, *, is_cached: bool = True, **options: Any) -> torch.Tensor:
        """Compute what ``out`` must be."""
        starts = self.query_starts.tolist()
        expected = torch.zeros(self.out.shape, dtype=torch.float64)
        for start, end, keys, values in zip(starts, starts[1:], self.keys, self.values, strict=False):
            if end == start:
                continue
            first = 0 if is_cached else len(keys) - (end - start)
            expected[start:end] = reference(self.q[start:end], keys[first:], values[first:], **options)
        return expected

    def check(self, *, is_cached: bool = True, **options: Any) -> None:
        """Compare ``out``, and where there is a cache, all of what it holds."""
        self.check_out(is_cached=is_cached, **options)
        if is_cached:
            self.check_cache()

    def check_out(self, *, is_cached: bool = True, **options: Any) -> None:
        tolerance = TOLERANCES[self.out.dtype]
        expected = self.expected(is_cached=is_cached, **options)
        torch.testing.assert_close(self.out.double().cpu(), expected, rtol=tolerance, atol=tolerance)

    def check_cache(self) -> None:
        """Check that each token is in its slot, and that no other slot was written."""
        block_size = self.key_cache.shape[1]
        expected_keys = torch.full_like(self.key_cache, math.nan)
        expected_values = torch.full_like(self.value_cache, math.nan)
        for table, keys, values in zip(self.block_table.tolist(), self.keys, self.values, strict=True):
            for position in range(len(keys)):
                place = table[position // block_size], position % block_size
                expected_keys[place] = keys[position]
                expected_values[place] = values[position]
        torch.testing.assert_close(self.key_cache, expected_keys, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(self.value_cache, expected_values, rtol=0, atol=0, equal_nan=True)


def make_batch(
    new: Sequence[int],
    cached: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 4,
    spare_blocks: int = 2,
    padding: int = 0,
    heads_first: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """Make a batch.

    Args:
        new: tokens of each sequence in this call.
        cached: tokens of each sequence before it.
        spare_blocks: columns of the table that nobody needs, and blocks in the cache.
        padding: rows behind the last sequence.
        heads_first: the memory of the cache is ``[blocks, kv_heads, block_size, head_dim]``.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    starts = torch.tensor([0, *new]).cumsum(0).tolist()
    # Views of one projection, as models have them.
    projected = random(starts[-1] + padding, (heads + 2 * kv_heads) * head_dim)
    q, k, v = projected.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    q, k, v = (x.unflatten(1, (-1, head_dim)) for x in (q, k, v))
    lengths = [a + b for a, b in zip(new, cached, strict=True)]
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + spare_blocks
    order = torch.randperm(num_blocks, generator=generator).tolist()
    table = torch.full((len(new), max([0, *needed]) + spare_blocks), -1, dtype=torch.int32)
    shape = (kv_heads, block_size) if heads_first else (block_size, kv_heads)
    memory = [torch.full((num_blocks, *shape, head_dim), math.nan, device=device, dtype=dtype) for _ in range(2)]
    key_cache, value_cache = (x.transpose(1, 2) if heads_first else x for x in memory)
    keys, values = [], []
    for index, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        blocks = [order.pop() for _ in range(needed[index])]
        table[index, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        old = length - (end - start)
        keys.append(torch.cat([random(old, kv_heads, head_dim), k[start:end]]))
        values.append(torch.cat([random(old, kv_heads, head_dim), v[start:end]]))
        for position in range(old):
            place = blocks[position // block_size], position % block_size
            key_cache[place], value_cache[place] = keys[-1][position], values[-1][position]
    return Batch(
        q,
        k,
        v,
        torch.full((len(q), heads, head_dim), math.nan, device=device, dtype=dtype),
        torch.tensor(starts, dtype=torch.int32, device=device),
        key_cache,
        value_cache,
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        keys,
        values,
    )
