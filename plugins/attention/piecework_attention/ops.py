"""The two ops: their schemas, what they promise, and which code answers them.

``piecework::attention(q, k, v, out, query_starts, *, key_cache, value_cache, block_table, lengths, scale, causal,
window, soft_cap)`` attends over packed sequences; ``piecework::decode_attention(q, k, v, out, key_cache, value_cache,
block_table, lengths, *, scale, window, soft_cap)`` over one new token of each sequence.

==================  ========================================  =====================================================
argument            shape                                     meaning
==================  ========================================  =====================================================
``q``               ``[tokens, heads, head_dim]``             float32, float16 or bfloat16, as all below
``k``, ``v``        ``[tokens, kv_heads, head_dim]``          of the new tokens; ``heads`` is a multiple of
                                                              ``kv_heads``, neighbours share a head
``out``             ``[tokens, heads, head_dim]``             written: every row of it
``query_starts``    ``[sequences + 1]``, int32                sequence ``s`` holds the tokens from ``query_starts[s]``
                                                              up to ``query_starts[s + 1]``; the first is 0
``key_cache``,      ``[blocks, block_size, kv_heads,          written: the keys and values of the new tokens; all
``value_cache``     head_dim]``                               layers have their own
``block_table``     ``[sequences, max_blocks]``, int32        block ``block_table[s, i]`` holds the tokens of
                                                              sequence ``s`` from ``i * block_size`` on
``lengths``         ``[sequences]``, int32                    tokens of each sequence, new ones included
``scale``           float                                     of the products; None: ``head_dim ** -0.5``
``causal``          bool                                      a token sees no later ones
``window``          int                                       a token sees those at a distance below it, so itself
                                                              and ``window - 1`` before it; without ``causal`` as
                                                              many after it; 0: no window
``soft_cap``        float                                     scores become ``cap * tanh(score / cap)``; 0: no cap
==================  ========================================  =====================================================

Strides are free, but that ``head_dim`` is contiguous: q, k and v may be views of one projection, and a cache whose
memory is ``[blocks, kv_heads, block_size, head_dim]`` is passed as ``memory.transpose(1, 2)``. Tensors must not share
memory with what is written, and no slot may be written twice by one call. Blocks that sequences share (a common
prefix) must be full: the new tokens of a sequence go to blocks of its own.

**attention.** Without a cache (all four arguments or none), a sequence attends over its own new tokens. With one, the
new tokens are the last of ``lengths[s]``: their keys and values are written to the cache, then they see all of it, so
that a prompt may come in chunks. Rows of ``out`` behind the last sequence become zeros. What lies before a window is
not read; its blocks may be gone (-1 in the table). A table or length that does not fit is an ``AttentionError``, found
in the one copy to the host that each call makes.

**decode_attention.** A row is a sequence with one new token, whose position is ``lengths[s] - 1``. No tensor is read on
the host, so nothing that depends on data is an error: a sequence of length 0 gets zeros and writes nothing, and a block
that is negative or none of the cache is skipped: neither written nor seen (so are tokens beyond the table).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piecework_attention.checks import OpCheck
from piecework_attention.decode import decode_attention
from piecework_attention.packed import PackedCache, packed_attention

_library = torch.library.Library("piecework", "FRAGMENT")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor query_starts, *, "
    "Tensor(b!)? key_cache=None, Tensor(c!)? value_cache=None, Tensor? block_table=None, Tensor? lengths=None, "
    "float? scale=None, bool causal=True, int window=0, float soft_cap=0.0) -> ()"
)
_library.define(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) key_cache, Tensor(c!) value_cache, "
    "Tensor block_table, Tensor lengths, *, float? scale=None, int window=0, float soft_cap=0.0) -> ()"
)


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    query_starts: Tensor,
    *,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    cache = _checked_attention(
        *(q, k, v, out, query_starts, key_cache, value_cache, block_table, lengths, window, soft_cap, scale)
    )
    scale, window = _scale(scale, q), min(window, LARGEST_WINDOW)
    packed_attention(q, k, v, out, query_starts, cache, scale=scale, causal=causal, window=window, soft_cap=soft_cap)


@torch.library.register_fake("piecework::attention", lib=_library)
def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    query_starts: Tensor,
    *,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    _checked_attention(
        q, k, v, out, query_starts, key_cache, value_cache, block_table, lengths, window, soft_cap, scale
    )


def _checked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    query_starts: Tensor,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    block_table: Tensor | None,
    lengths: Tensor | None,
    window: int,
    soft_cap: float,
    scale: float | None,
) -> PackedCache | None:
    """Check the arguments; return those of the cache, or None where there is none."""
    check = OpCheck("piecework::attention", q, rows="tokens")
    check.rows_and_heads(k, v, out)
    check.numbers(window, soft_cap, scale)
    check.tensor("query_starts", query_starts, [("sequences + 1", None)], torch.int32)
    if isinstance(query_starts.shape[0], int) and query_starts.shape[0] == 0:
        check.refuse("query_starts", "one number longer than there are sequences", "none")
    if key_cache is None or value_cache is None or block_table is None or lengths is None:
        cache = {"key_cache": key_cache, "value_cache": value_cache, "block_table": block_table, "lengths": lengths}
        given = [name for name, tensor in cache.items() if tensor is not None]
        if given:
            check.refuse(f"the arguments of a cache ({', '.join(cache)})", "all there or none", f"only {given}")
        return None
    check.cache(k, key_cache, value_cache, block_table, lengths)
    sequences = lengths.shape[0]
    if isinstance(sequences, int):
        check.tensor("query_starts", query_starts, [("sequences + 1", sequences + 1)], torch.int32)
    return PackedCache(key_cache, value_cache, block_table, lengths)


@torch.library.impl(_library, "decode_attention", "CompositeExplicitAutograd")
def _decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    _check_decode(q, k, v, out, key_cache, value_cache, block_table, lengths, window, soft_cap, scale)
    attend = _decode_by_triton() if q.is_cuda else decode_attention
    scale, window = _scale(scale, q), min(window, LARGEST_WINDOW)
    attend(*(q, k, v, out, key_cache, value_cache, block_table, lengths), scale=scale, window=window, soft_cap=soft_cap)


@torch.library.register_fake("piecework::decode_attention", lib=_library)
def _decode_attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    _check_decode(q, k, v, out, key_cache, value_cache, block_table, lengths, window, soft_cap, scale)


def _check_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    window: int,
    soft_cap: float,
    scale: float | None,
) -> None:
    check = OpCheck("piecework::decode_attention", q, rows="sequences")
    check.rows_and_heads(k, v, out)
    check.numbers(window, soft_cap, scale)
    check.cache(k, key_cache, value_cache, block_table, lengths)


LARGEST_WINDOW = 2**30
"""As good as any above it: no sequence is so long, and lengths, which are int32, minus it do not wrap."""


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[2] ** -0.5 if scale is None else scale


@functools.cache
def _decode_by_triton() -> Callable[..., Any]:
    """Return what decodes on a CUDA device: the kernel, or without Triton what the CPU runs."""
    if importlib.util.find_spec("triton") is None:
        return decode_attention
    from piecework_attention.decode_triton import decode_attention_triton  # Triton is optional, and heavy.

    return decode_attention_triton
