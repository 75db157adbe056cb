"""``piecework::attention``: packed sequences, with and without a cache, against float64 loops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import piecework_attention
from attention_reference import DEVICES, TOLERANCES, make_batch, reference
from piecework import SplittingOp
from piecework_attention import AttentionError, packed

attention = torch.ops.piecework.attention

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window": {"window": 3},
    "window_of_one": {"window": 1},
    "wide_window": {"window": 100},
    "cap": {"soft_cap": 0.7},
    "window_and_cap": {"window": 4, "soft_cap": 1.5, "scale": 0.9},
}
BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "one_token": ([1], [0]),
    "one_prompt": ([7], [0]),
    "prompts": ([5, 1, 9, 5, 3], [0, 0, 0, 0, 0]),
    "equal_neighbours": ([4, 4, 4], [0, 0, 0]),
    "chunks": ([3, 5, 1, 3], [6, 0, 11, 6]),
    "decoding": ([1, 1, 1], [4, 7, 4]),
    "nothing_new_in_some": ([0, 2, 0, 1, 0], [3, 1, 0, 4, 8]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sizes", BATCHES.values(), ids=BATCHES)
def test_each_option_on_each_batch_equals_the_loops(
    sizes: tuple[list[int], list[int]], options: dict[str, Any], causal: bool, device: str
) -> None:
    for heads_first, is_cached in ((False, True), (True, True), (False, False)):
        batch = make_batch(*sizes, heads_first=heads_first, device=device)
        cache = batch.cache if is_cached else {}
        attention(*batch.new, batch.query_starts, **cache, causal=causal, **options)
        batch.check(is_cached=is_cached, causal=causal, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 16), (6, 6, 5), (6, 3, 80), (8, 1, 64)])
def test_dtypes_and_groups_of_heads(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    batch = make_batch(
        *([4, 1, 6], [0, 5, 2]), heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device
    )
    attention(*batch.new, batch.query_starts, **batch.cache)
    batch.check()
    attention(*batch.new, batch.query_starts, soft_cap=2.0, window=3)
    batch.check(is_cached=False, soft_cap=2.0, window=3)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=5),
    block_size=st.integers(1, 5),
    window=st.integers(0, 8),
    soft_cap=st.sampled_from([0.0, 1.0]),
    causal=st.booleans(),
    padding=st.integers(0, 2),
    heads_first=st.booleans(),
)
def test_any_sizes(
    sizes: list[tuple[int, int]],
    block_size: int,
    window: int,
    soft_cap: float,
    causal: bool,
    padding: int,
    heads_first: bool,
) -> None:
    new, cached = [a for a, _ in sizes], [b for _, b in sizes]
    batch = make_batch(new, cached, block_size=block_size, padding=padding, heads_first=heads_first)
    options: dict[str, Any] = {"window": window, "soft_cap": soft_cap, "causal": causal}
    attention(*batch.new, batch.query_starts, **batch.cache, **options)
    batch.check(**options)


@pytest.mark.parametrize("options", [{"soft_cap": 1.0}, {"window": 4}, {"window": 4, "causal": False}, {}])
def test_long_prompts_are_attended_in_parts(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MASKED_ROWS", 3)
    monkeypatch.setattr(packed, "CAPPED_SCORES", 200)
    batch = make_batch([10, 8, 10], [3, 0, 3])
    attention(*batch.new, batch.query_starts, **batch.cache, **options)
    batch.check(**options)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_behind_the_last_sequence_become_zeros(device: str) -> None:
    batch = make_batch([2, 3], [0, 4], padding=3, device=device)
    attention(*batch.new, batch.query_starts, **batch.cache)
    batch.check()
    assert not batch.out[5:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_and_no_sequences(device: str) -> None:
    for new, cached in (([], []), ([0, 0], [0, 3])):
        batch = make_batch(new, cached, device=device)
        attention(*batch.new, batch.query_starts, **batch.cache)
        attention(*batch.new, batch.query_starts)
        batch.check()


@pytest.mark.parametrize("chunks", [[1, 7], [4, 4], [3, 3, 2], [1] * 8])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"soft_cap": 1.0}], ids=str)
def test_a_prompt_in_chunks_equals_the_prompt_at_once(chunks: list[int], options: dict[str, Any]) -> None:
    whole = make_batch([8, 8], [0, 0])
    attention(*whole.new, whole.query_starts, **whole.cache, **options)
    parts = make_batch([8, 8], [0, 0])
    rows = torch.arange(16).view(2, 8)
    for start, size in zip(itertools.accumulate([0, *chunks]), chunks, strict=False):
        taken = rows[:, start : start + size].flatten()
        out = torch.empty(len(taken), *parts.out.shape[1:])
        starts = torch.tensor([0, size, 2 * size], dtype=torch.int32)
        cache = {**parts.cache, "lengths": torch.full((2,), start + size, dtype=torch.int32)}
        attention(*(x[taken] for x in (parts.q, parts.k, parts.v)), out, starts, **cache, **options)
        parts.out[taken] = out
    torch.testing.assert_close(parts.out, whole.out)
    parts.check_cache()


def test_sequences_may_share_the_full_blocks_of_a_prefix() -> None:
    batch = make_batch([2, 1], [8, 8])
    for x in (batch.keys, batch.values):
        x[1][:8] = x[0][:8]
    batch.block_table[1, :2] = batch.block_table[0, :2]
    attention(*batch.new, batch.query_starts, **batch.cache)
    batch.check_out()


def test_blocks_before_the_window_may_be_gone() -> None:
    batch = make_batch([2, 1], [9, 9])
    batch.block_table[:, 0] = -1
    attention(*batch.new, batch.query_starts, **batch.cache, window=4)
    batch.check_out(window=4)
    with pytest.raises(AttentionError, match=r"block_table\[0\] must name blocks from 0 to \d+ for the tokens of its"):
        attention(*batch.new, batch.query_starts, **batch.cache)


class CountsHostCopies(TorchDispatchMode):
    """Counts reads of numbers, and leaves a tensor as it is when a list is made of it."""

    num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func.name().startswith(("aten::_local_scalar_dense", "aten::nonzero"))
        return func(*args, **(kwargs or {}))


def test_the_only_host_copy_is_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor.shape) or tolist(tensor))
    batch = make_batch([3, 5, 1, 3], [6, 0, 11, 6])
    lists.clear()
    cache = packed.PackedCache(batch.key_cache, batch.value_cache, batch.block_table, batch.lengths)
    with CountsHostCopies() as counts:
        packed.packed_attention(
            batch.q,
            batch.k,
            batch.v,
            batch.out,
            batch.query_starts,
            cache,
            scale=0.5,
            causal=True,
            window=3,
            soft_cap=0.0,
        )
    assert lists == [(5 + 4 + 4,)]
    assert counts.num_reads == 0


# --- what is refused ---


def refused(match: str, **changes: Any) -> None:
    batch = make_batch([3, 2], [1, 4])
    arguments = {"q": batch.q, "k": batch.k, "v": batch.v, "out": batch.out, "query_starts": batch.query_starts}
    arguments |= batch.cache
    before = batch.key_cache.clone()
    with pytest.raises(AttentionError, match=match):
        attention(**arguments | {name: change(arguments.get(name)) for name, change in changes.items()})
    torch.testing.assert_close(batch.key_cache, before, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("q", lambda q: q.double(), "q must be of torch.float32, torch.float16, torch.bfloat16, got torch.float64"),
        ("q", lambda q: q[0], r"q must be \[tokens, heads, head_dim\] of torch.float32 on cpu, got \[4, 8\]"),
        ("q", lambda q: q[:, :3], r"the heads of q must be a multiple|out must be \[tokens=5, heads=3"),
        ("k", lambda k: k.half(), r"k must be \[tokens=5, kv_heads, head_dim=8\] of torch.float32 on cpu, got .*16"),
        ("k", lambda k: k[:4], r"k must be \[tokens=5, .*got \[4, 2, 8\]"),
        ("v", lambda v: v[:, :1], r"v must be \[tokens=5, kv_heads=2, head_dim=8\]"),
        ("out", lambda out: out[:, :, :4], r"out must be \[tokens=5, heads=4, head_dim=8\]"),
        ("out", lambda out: out.mT.contiguous().mT, r"out must be contiguous in its last dim \(a stride of 1\)"),
        ("query_starts", lambda x: x.long(), "query_starts must be .* of torch.int32 on cpu, got .*int64"),
        ("query_starts", lambda x: x[:2], r"query_starts must be \[sequences \+ 1=3\] .*got \[2\]"),
        ("query_starts", lambda x: x + 1, r"query_starts must rise from 0 to at most the 5 tokens of q, got \[1, 4"),
        ("query_starts", lambda x: x.flip(0), "query_starts must rise from 0"),
        ("key_cache", lambda x: x.transpose(1, 2), r"key_cache must be \[blocks, block_size, kv_heads=2, head_dim=8\]"),
        ("value_cache", lambda x: x[1:], r"value_cache must be \[blocks=5,"),
        ("block_table", lambda x: x[:1], r"block_table must be \[sequences=2, max_blocks\] of torch.int32"),
        ("block_table", lambda x: x * 0 + 99, r"block_table\[0\] must name blocks from 0 to 4 .* got \[99"),
        ("lengths", lambda x: x - 2, r"lengths\[0\] must lie between its 3 new tokens and the 16 of 4 blocks of 4, go"),
        ("lengths", lambda x: x + 50, r"lengths\[0\] must lie between .* got 54"),
        ("lengths", lambda _: None, r"must be all there or none, got only \['key_cache', 'value_cache', 'block_table'"),
        ("window", lambda _: -1, "window must be 0"),
        ("soft_cap", lambda _: -1.0, "soft_cap must be 0"),
        ("soft_cap", lambda _: float("inf"), "soft_cap must be 0 .none. or a finite number above, got inf"),
        ("soft_cap", lambda _: float("nan"), "soft_cap must be 0"),
        ("scale", lambda _: float("inf"), "scale must be a finite number, or None, got inf"),
        ("scale", lambda _: float("nan"), "scale must be a finite number"),
        ("q", lambda q: q[:, :0], "the heads of q must be at least 1, got 0|out must be"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_writes_nothing(name: str, change: Any, match: str) -> None:
    refused(match, **{name: change})


@pytest.mark.parametrize("window", [2**31 - 1, 2**32, 2**32 + 1, 2**63 - 1])
def test_a_window_beyond_every_length_is_none(window: int) -> None:
    batch = make_batch([3, 2], [1, 4])
    arguments = (*batch.new, batch.query_starts)
    attention(*arguments, **batch.cache)
    expected = batch.out.clone()
    attention(*arguments, **batch.cache, window=window)
    torch.testing.assert_close(batch.out, expected)
    one = [x[:2].contiguous() for x in batch.new]
    lengths = batch.cache["lengths"]
    torch.ops.piecework.decode_attention(
        *one, *(batch.cache[n] for n in ("key_cache", "value_cache", "block_table")), lengths
    )
    expected = one[3].clone()
    torch.ops.piecework.decode_attention(
        *one, *(batch.cache[n] for n in ("key_cache", "value_cache", "block_table")), lengths, window=window
    )
    torch.testing.assert_close(one[3], expected)


def test_heads_must_share_key_heads_evenly() -> None:
    batch = make_batch([2], [0], heads=3, kv_heads=2)
    with pytest.raises(AttentionError, match=r"the heads of q must be a multiple of those of k and v \(2\), got 3"):
        attention(*batch.new, batch.query_starts)


# --- as an op, and as a plugin ---


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_a_proper_op(device: str) -> None:
    batch = make_batch([3, 5, 1], [6, 0, 11], device=device)
    for x in (batch.key_cache, batch.value_cache, batch.out):
        x.nan_to_num_()  # opcheck compares, and NaN differs from itself.
    torch.library.opcheck(attention, (*batch.new, batch.query_starts), {**batch.cache, "window": 3})
    torch.library.opcheck(attention, (*batch.new, batch.query_starts), {"causal": False})


def test_fake_tensors_are_checked_too() -> None:
    batch = make_batch([3], [0])
    with torch._subclasses.FakeTensorMode() as mode:
        q, k, v, out = (mode.from_tensor(x) for x in batch.new)
        with pytest.raises(AttentionError, match="window must be"):
            attention(q, k, v, out, mode.from_tensor(batch.query_starts), window=-1)


def test_the_plugin_names_both_ops() -> None:
    assert piecework_attention.piecework_splitting_ops() == [
        SplittingOp("piecework::attention"),
        SplittingOp("piecework::decode_attention", capturable=True, rows_independent=True),
    ]


def test_the_reference_is_attention() -> None:
    q, k, v = (torch.randn(5, 2, 8, dtype=torch.float64) for _ in range(3))
    by_heads = (x.transpose(0, 1) for x in (q, k, v))
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    by_torch = attend(*by_heads, is_causal=True)
    torch.testing.assert_close(reference(q, k, v), by_torch.transpose(0, 1))
