"""``piecework::decode_attention``, in plain torch and by its kernel, against float64 loops."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import piecework_attention  # noqa: F401 - registers the ops
from attention_reference import DEVICES, TOLERANCES, Batch, make_batch
from piecework.testing.refusing import Refusing
from piecework_attention import AttentionError
from piecework_attention.decode import decode_attention as by_torch
from piecework_attention.launch import MAX_SPLITS, DecodeLaunch, decode_launch

triton = pytest.importorskip("triton", reason="needs Triton")
triton_ops = pytest.importorskip("piecework_attention.decode_triton", reason="needs Triton")
op = torch.ops.piecework.decode_attention

Decode = Callable[..., None]
LAUNCHES = {
    "whole": DecodeLaunch(num_splits=1, block_tokens=16),
    "split": DecodeLaunch(num_splits=3, block_tokens=16, min_split_tokens=16),
}
DECODES: dict[str, Decode] = {"torch": by_torch} | {
    f"triton_{name}": functools.partial(triton_ops.decode_attention_triton, launch=launch)
    for name, launch in LAUNCHES.items()
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window": {"window": 18},
    "window_of_one": {"window": 1},
    "wide_window": {"window": 1000},
    "cap": {"soft_cap": 0.7},
    "window_and_cap": {"window": 37, "soft_cap": 1.5, "scale": 0.9},
}
LENGTHS = [1, 65, 0, 17, 49]


def interpreter_can_loop() -> bool:
    """Tell whether loops run up to a number from memory: Triton 3.6 turns arrays of one into it, NumPy no longer."""
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8):
        return True
    try:
        return int(numpy.array([1])) == 1
    except TypeError:
        return False


def decode(decoder: Decode, batch: Batch, **options: Any) -> None:
    """Call an implementation as the op does."""
    if decoder is not by_torch and not batch.q.is_cuda and not interpreter_can_loop():
        pytest.skip("the interpreter of this Triton can't loop with this NumPy")
    options = {"scale": batch.q.shape[2] ** -0.5, "window": 0, "soft_cap": 0.0} | options
    decoder(*batch.new, *batch.cache.values(), **options)


def make_decoding(lengths: list[int], **settings: Any) -> Batch:
    """Make a batch of one row per sequence; a row of length 0 is there, with a query, but is inactive."""
    batch = make_batch([1] * len(lengths), [max(0, length - 1) for length in lengths], **settings)
    for row, length in enumerate(lengths):
        if length == 0:
            batch.lengths[row] = 0
            batch.keys[row], batch.values[row] = batch.keys[row][:0], batch.values[row][:0]
    return batch


def check(batch: Batch, **options: Any) -> None:
    """Compare with the loops; inactive rows must be zeros, and nothing else may be written to the cache."""
    active = [len(keys) > 0 for keys in batch.keys]
    assert not batch.out[[not is_active for is_active in active]].any()
    expected = torch.zeros(batch.out.shape, dtype=torch.float64)
    for row in [row for row, is_active in enumerate(active) if is_active]:
        one = dataclasses.replace(batch, q=batch.q[row : row + 1])
        one.query_starts = torch.tensor([0, 1])
        one.keys, one.values, one.out = [batch.keys[row]], [batch.values[row]], batch.out[row : row + 1]
        expected[row] = one.expected(**options)[0]
    tolerance = TOLERANCES[batch.out.dtype]
    torch.testing.assert_close(batch.out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    batch.check_cache()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("decoder", DECODES.values(), ids=DECODES)
@pytest.mark.parametrize("heads_first", [False, True], ids=["slots_first", "heads_first"])
def test_each_option_equals_the_loops(decoder: Decode, options: dict[str, Any], heads_first: bool, device: str) -> None:
    batch = make_decoding(LENGTHS, heads_first=heads_first, device=device)
    decode(decoder, batch, **options)
    check(batch, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decoder", DECODES.values(), ids=DECODES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 64), (6, 2, 80), (4, 4, 96), (20, 1, 128), (2, 1, 256), (3, 3, 5)]
)
def test_dtypes_and_shapes_of_heads(
    decoder: Decode, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    if dtype == torch.bfloat16 and device == "cpu" and decoder is not by_torch:
        pytest.skip("Triton's interpreter (3.6 to 3.9) multiplies bfloat16 matrices as if they held integers")
    batch = make_decoding([36, 0, 3], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
    decode(decoder, batch)
    check(batch)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 3, 4, 16, 64]),
    window=st.integers(0, 40),
    soft_cap=st.sampled_from([0.0, 1.0]),
    num_splits=st.integers(1, 5),
    heads_first=st.booleans(),
)
def test_any_lengths(
    lengths: list[int], block_size: int, window: int, soft_cap: float, num_splits: int, heads_first: bool
) -> None:
    launch = DecodeLaunch(num_splits=num_splits, block_tokens=16, min_split_tokens=16)
    for decoder in (by_torch, functools.partial(triton_ops.decode_attention_triton, launch=launch)):
        batch = make_decoding(lengths, block_size=block_size, heads_first=heads_first)
        decode(decoder, batch, window=window, soft_cap=soft_cap)
        check(batch, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decoder", DECODES.values(), ids=DECODES)
def test_missing_blocks_are_neither_written_nor_seen(decoder: Decode, device: str) -> None:
    batch = make_decoding([9, 9, 9, 9], device=device)
    # A block in the middle, that of the new token by either sign of wrong, and a table that is too short.
    batch.block_table[0, 1] = -1
    batch.block_table[1, 2] = -1
    batch.block_table[2, 2] = len(batch.key_cache)
    batch.lengths[3] = 100
    before = batch.key_cache.clone()
    decode(decoder, batch)
    written = (batch.key_cache != before) & ~(batch.key_cache.isnan() & before.isnan())
    assert written.flatten(2).any(dim=2).nonzero().tolist() == [[batch.block_table[0, 2].item(), 0]]
    for row, kept in enumerate([[*range(4), 8], range(8), range(8)]):
        one = dataclasses.replace(batch)
        one.q, one.query_starts = batch.q[row : row + 1], torch.tensor([0, 1])
        one.keys, one.values = [batch.keys[row][list(kept)]], [batch.values[row][list(kept)]]
        one.out = batch.out[row : row + 1]
        one.check_out()


@pytest.mark.parametrize("decoder", DECODES.values(), ids=DECODES)
@pytest.mark.parametrize("block_size", [1, 4])
def test_rows_of_zeros_write_nothing_even_where_another_row_writes_to_block_zero(
    block_size: int, decoder: Decode
) -> None:
    batch = make_decoding([0, 1, 0], spare_blocks=1, block_size=block_size)
    batch.block_table.zero_()
    batch.q[::2] = 0
    decode(decoder, batch)
    torch.testing.assert_close(batch.key_cache[0, 0], batch.k[1])
    assert batch.key_cache[0, 1:].isnan().all()
    assert batch.key_cache[1:].isnan().all()
    torch.testing.assert_close(batch.out, torch.stack([batch.v[1].repeat_interleave(2, dim=0) * i for i in (0, 1, 0)]))


@pytest.mark.parametrize("decoder", DECODES.values(), ids=DECODES)
def test_no_rows_no_table_no_blocks(decoder: Decode) -> None:
    decode(decoder, make_decoding([]))
    batch = make_decoding([3, 2])
    for changes in ({"block_table": batch.block_table[:, :0]}, {"lengths": batch.lengths * 0}):
        one = dataclasses.replace(batch, **changes)
        decode(decoder, one)
        assert not one.out.any()
    one = dataclasses.replace(batch, key_cache=batch.key_cache[:0], value_cache=batch.value_cache[:0])
    one.out.fill_(math.nan)
    decode(decoder, one)
    assert not one.out.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"soft_cap": 1.0}], ids=str)
def test_decoding_step_by_step_equals_the_general_op(options: dict[str, Any], device: str) -> None:
    whole = make_batch([12, 7, 9], [0, 0, 0], device=device)
    torch.ops.piecework.attention(*whole.new, whole.query_starts, **whole.cache, **options)
    steps = make_batch([12, 7, 9], [0, 0, 0], device=device)
    starts = steps.query_starts.tolist()
    for step in range(12):
        rows = torch.tensor([start + min(step, end - start - 1) for start, end in itertools.pairwise(starts)])
        is_active = torch.tensor([step < end - start for start, end in itertools.pairwise(starts)])
        out = torch.empty_like(steps.out[rows])
        lengths = ((step + 1) * is_active).to(device, torch.int32)
        cache = steps.cache | {"lengths": lengths}
        op(*(x[rows] for x in (steps.q, steps.k, steps.v)), out, **cache, **options)
        steps.out[rows[is_active]] = out[is_active]
    torch.testing.assert_close(steps.out, whole.out, rtol=2e-5, atol=2e-5)
    steps.check_cache()


@pytest.mark.parametrize("decoder", DECODES.values(), ids=DECODES)
def test_sequences_may_share_the_full_blocks_of_a_prefix(decoder: Decode) -> None:
    batch = make_decoding([9, 10])
    for x in (batch.keys, batch.values):
        x[1][:8] = x[0][:8]
    batch.block_table[1, :2] = batch.block_table[0, :2]
    for x, new in ((batch.key_cache, batch.keys), (batch.value_cache, batch.values)):
        x[int(batch.block_table[1, 2]), 0] = new[1][8]
    decode(decoder, batch)
    batch.check_out()


def test_plain_torch_reads_nothing_on_the_host() -> None:
    batch = make_decoding(LENGTHS)
    with Refusing("decode_attention"):
        decode(by_torch, batch, window=3)
    with Refusing("decode_attention"):
        decode(by_torch, make_decoding(LENGTHS), soft_cap=1.0)


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_a_proper_op(device: str) -> None:
    batch = make_decoding([5, 0, 9], device=device)
    for x in (batch.key_cache, batch.value_cache, batch.out):
        x.nan_to_num_()  # opcheck compares, and NaN differs from itself.
    torch.library.opcheck(op, (*batch.new, *batch.cache.values()), {"window": 3})
    torch.library.opcheck(op, (*batch.new, *batch.cache.values()), {"soft_cap": 3.0, "scale": 1.0})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"lengths": lambda x: x.long()}, r"lengths must be \[sequences=2\] of torch.int32 on cpu, got \[2\] of .*64"),
        ({"lengths": lambda x: x[:1]}, r"lengths must be \[sequences=2\].*got \[1\]"),
        ({"block_table": lambda x: x[0]}, r"block_table must be \[sequences=2, max_blocks\].*got \[5\]"),
        ({"key_cache": lambda x: x.half()}, r"key_cache must be .* of torch.float32 on cpu, got .*float16"),
        (
            {"value_cache": lambda x: x[:, :2]},
            r"value_cache must be \[blocks=7, block_size=4, kv_heads=2, head_dim=8\]",
        ),
        ({"key_cache": lambda x: x[:, :0], "value_cache": lambda x: x[:, :0]}, "block_size must be at least 1, got 0"),
        ({"k": lambda x: x[:1]}, r"k must be \[sequences=2, kv_heads, head_dim=8\]"),
        ({"window": lambda _: -2}, r"window must be 0 \(none\) or the number of tokens that one sees, itself included"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "+".join(value),
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], match: str) -> None:
    batch = make_decoding([9, 5])
    arguments = {"q": batch.q, "k": batch.k, "v": batch.v, "out": batch.out} | batch.cache
    with pytest.raises(AttentionError, match=match):
        op(**arguments | {name: change(arguments.get(name)) for name, change in changes.items()})


@pytest.mark.parametrize("decoder", DECODES.values(), ids=DECODES)
@pytest.mark.parametrize("length", [-1, -(2**31), -(2**31) + 1])
def test_a_negative_length_is_an_inactive_row(decoder: Decode, length: int) -> None:
    batch = make_decoding([9, 0])
    batch.lengths[1] = length
    decode(decoder, batch)
    batch.lengths[1] = 0
    check(batch)


# --- launch constants ---


def chosen(**changes: int) -> DecodeLaunch:
    shape = {"rows": 1, "kv_heads": 8, "head_dim": 128, "itemsize": 2, "capacity": 32768, "num_multiprocessors": 132}
    return decode_launch(**shape | changes)


def test_few_rows_are_split_more_than_many() -> None:
    assert chosen().num_splits > chosen(rows=8).num_splits > chosen(rows=24).num_splits > 1
    assert chosen(rows=1000).num_splits == 1


def test_programs_fill_the_device_once_and_split_no_more() -> None:
    for rows in range(1, 200):
        num_programs = chosen(rows=rows).num_splits * rows * 8
        assert 0.5 * 396 < num_programs <= max(396, rows * 8)


def test_short_tables_are_not_split() -> None:
    assert chosen(capacity=300).num_splits == 1
    assert chosen(capacity=0).num_splits == 1


def test_constants_suit_the_kernel_for_all_shapes() -> None:
    for head_dim in (1, 64, 80, 96, 128, 256, 512):
        for itemsize in (2, 4):
            for rows in (1, 7, 64, 4096):
                launch = chosen(rows=rows, head_dim=head_dim, itemsize=itemsize, capacity=2**20)
                assert 1 <= launch.num_splits <= MAX_SPLITS
                assert launch.block_tokens in (16, 32, 64, 128)
                assert launch.min_split_tokens % launch.block_tokens == 0


def test_an_empty_batch_has_constants() -> None:
    assert chosen(rows=0).num_splits >= 1
