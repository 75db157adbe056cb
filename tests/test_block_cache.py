"""``BlockCache``: blocks are handed out as sequences grow, into tensors that stay in place."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_reference import DEVICES
from piecework_attention import AttentionError, BlockCache


def make_cache(**settings: Any) -> BlockCache:
    shape: dict[str, Any] = {"num_layers": 2, "num_blocks": 6, "block_size": 4, "kv_heads": 2, "head_dim": 8}
    shape |= {"max_sequences": 3, "max_length": 14}
    shape.update(settings)
    return BlockCache(**shape)


def held_blocks(cache: BlockCache) -> list[list[int]]:
    return [[block for block in row if block >= 0] for row in cache.block_table.tolist()]


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_each_layer_has_memory_of_its_own_in_either_order(heads_first: bool, device: str) -> None:
    cache = make_cache(heads_first=heads_first, dtype=torch.float16, device=device)
    memory = [*cache.keys, *cache.values]
    assert [tuple(x.shape) for x in memory] == [(6, 4, 2, 8)] * 4
    assert len({x.data_ptr() for x in memory}) == 4
    assert all((x.is_contiguous(), x.dtype, x.device.type) == (not heads_first, torch.float16, device) for x in memory)
    assert cache.keys[0].transpose(1, 2).is_contiguous() == heads_first


@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_gets_blocks_only_as_it_grows(device: str) -> None:
    cache = make_cache(device=device)
    cache.extend([3, 0, 5])
    assert [len(blocks) for blocks in held_blocks(cache)] == [1, 0, 2]
    assert cache.lengths.tolist() == [3, 0, 5]
    before = held_blocks(cache)
    cache.extend([1, 0, 1])
    assert held_blocks(cache) == before
    cache.extend([1])
    assert [len(blocks) for blocks in held_blocks(cache)] == [2, 0, 2]
    assert cache.lengths.tolist() == [5, 0, 6] == [cache.length(row) for row in range(3)]
    assert cache.num_free_blocks == 2


def test_tensors_stay_in_place() -> None:
    cache = make_cache()
    tensors = cache.block_table, cache.lengths
    addresses = [x.data_ptr() for x in tensors]
    cache.extend([9, 1])
    cache.free(0)
    assert (cache.block_table, cache.lengths) == tensors
    assert [x.data_ptr() for x in (cache.block_table, cache.lengths)] == addresses


def test_a_full_cache_says_so_and_changes_nothing() -> None:
    cache = make_cache()
    cache.extend([12, 4])
    before = held_blocks(cache)
    with pytest.raises(AttentionError, match="2 free blocks of 4 tokens, and 3 are needed; free a sequence"):
        cache.extend([0, 1, 8])
    assert held_blocks(cache) == before
    assert cache.lengths.tolist() == [12, 4, 0]
    cache.free(0)
    cache.extend([0, 1, 8])
    assert cache.num_free_blocks == 2


@pytest.mark.parametrize(
    ("num_tokens", "match"),
    [
        ([17], "sequence 0 must have at most 14 tokens, got 17"),
        ([1, -1], r"num_tokens must be at most 3 integers, none below 0, got \[1, -1\]"),
        ([1, 1, 1, 1], "num_tokens must be at most 3 integers"),
    ],
)
def test_what_does_not_fit_is_refused(num_tokens: list[int], match: str) -> None:
    with pytest.raises(AttentionError, match=match):
        make_cache().extend(num_tokens)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 2), st.lists(st.integers(0, 6), min_size=1, max_size=3)), max_size=12))
def test_no_block_is_ever_held_twice_or_lost(steps: list[int | list[int]]) -> None:
    cache = make_cache()
    lengths = [0, 0, 0]
    for step in steps:
        if isinstance(step, int):
            cache.free(step)
            lengths[step] = 0
            continue
        try:
            cache.extend(step)
        except AttentionError:
            continue
        for row, more in enumerate(step):
            lengths[row] += more
        held = held_blocks(cache)
        assert [len(blocks) for blocks in held] == [-(-length // 4) for length in lengths]
        assert cache.lengths.tolist() == lengths
        assert sorted([*itertools.chain(*held), *cache._free]) == list(range(6))


@pytest.mark.parametrize("num_tokens", [5, [8, 1.5], [float("nan"), 0], [float("inf")], [True], "12"])
def test_counts_that_are_none_are_refused_and_change_nothing(num_tokens: Any) -> None:
    cache = make_cache()
    with pytest.raises(AttentionError, match="num_tokens must be at most 3 integers"):
        cache.extend(num_tokens)
    assert cache.lengths.tolist() == [0, 0, 0]
    free = cache.num_free_blocks
    cache.extend([1])
    assert cache.num_free_blocks == free - 1


@pytest.mark.parametrize("row", [3, -1, slice(0, 2), 1.0, True])
def test_rows_that_are_none_are_not_freed(row: Any) -> None:
    cache = make_cache()
    cache.extend([1, 1, 1])
    with pytest.raises(AttentionError, match="row must be an integer from 0 to 2"):
        cache.free(row)
    assert cache.lengths.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["num_layers", "num_blocks", "block_size", "kv_heads", "head_dim", "max_length"])
def test_sizes_of_a_cache_are_positive(name: str) -> None:
    sizes: dict[str, Any] = {"num_blocks": 4, "block_size": 2, "kv_heads": 1, "head_dim": 4, "max_sequences": 2}
    with pytest.raises(AttentionError, match=f"{name} must be a positive integer, got 0"):
        BlockCache(**{"num_layers": 1, **sizes, "max_length": 4, name: 0})
