"""Both ops in a compiled model: the general one between the graphs, the decoding one inside of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

import piecework
import piecework_attention
import piecework_cudagraph
from attention_reference import DEVICES
from piecework import CompilationConfig, counters, testing
from piecework_attention import BlockCache

HEADS, KV_HEADS, HEAD_DIM, NUM_LAYERS = 4, 2, 16, 2


@pytest.fixture(autouse=True)
def _plugins() -> Iterator[None]:
    with testing.plugins(piecework_attention, piecework_cudagraph), torch.no_grad():
        yield


class Layer(nn.Module):
    """Attention behind one projection, then a residual."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.project = nn.Linear(width, width + 2 * KV_HEADS * HEAD_DIM)
        self.join = nn.Linear(width, width)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
        return tuple(part.unflatten(-1, (-1, HEAD_DIM)) for part in self.project(x).split(sizes, dim=-1))


class Packed(nn.Module):
    """Prompts and chunks."""

    def __init__(self, layers: nn.ModuleList, **options: Any) -> None:
        super().__init__()
        self.layers, self.options = layers, options

    def forward(
        self,
        x: torch.Tensor,
        query_starts: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        block_table: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        for index, layer in enumerate(cast("list[Layer]", self.layers)):
            q, k, v = layer.heads(x)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            cache = {"key_cache": keys[index], "value_cache": values[index]}
            cache |= {"block_table": block_table, "lengths": lengths}
            torch.ops.piecework.attention(q, k, v, out, query_starts, **cache, **self.options)
            x = x + layer.join(out.flatten(1))
        return x


class Decoding(nn.Module):
    """One token of each sequence."""

    def __init__(self, layers: nn.ModuleList, **options: Any) -> None:
        super().__init__()
        self.layers, self.options = layers, options

    def forward(
        self,
        x: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        for index, layer in enumerate(cast("list[Layer]", self.layers)):
            q, k, v = layer.heads(x)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            cache = keys[index], values[index], block_table, lengths
            torch.ops.piecework.decode_attention(q, k, v, out, *cache, **self.options)
            x = x + layer.join(out.flatten(1))
        return x


def make_layers(device: str) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(NUM_LAYERS)).to(device)


def make_cache(device: str, **settings: Any) -> BlockCache:
    shape = {"num_blocks": 20, "block_size": 4, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return BlockCache(NUM_LAYERS, **shape, max_sequences=4, max_length=40, device=device, **settings)


def random(device: str, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, HEADS * HEAD_DIM, device=device)


def config(**settings: Any) -> CompilationConfig:
    return CompilationConfig(piece_compiler="eager", **settings)


OPTIONS = [{}, {"window": 5}, {"soft_cap": 2.0}]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_general_op_splits_and_is_never_captured(options: dict[str, Any], device: str) -> None:
    model = Packed(make_layers(device), **options)
    compiled = piecework.compile(model, config=config(capture_sizes=(5, 8)), dynamic_arg_dims={"x": {0: "rows"}})
    ours, theirs = make_cache(device), make_cache(device)
    starts = torch.zeros(4, dtype=torch.int32, device=device)
    num_pieces = NUM_LAYERS + 1
    expected = {"num_graphs_seen": 1, "num_pieces_seen": num_pieces + NUM_LAYERS}
    # Five tokens, a size that is not captured, eight, and five again: among the same three sequences.
    with counters.expect(**expected, num_graph_captures=2 * num_pieces, num_graph_replays=3 * num_pieces):
        for new in ([3, 1, 1], [2, 0, 1], [1, 4, 3], [5, 0, 0]):
            x = random(device, sum(new))
            starts.copy_(torch.tensor([0, *itertools.accumulate(new)]))
            results = []
            for call, cache in ((compiled, ours), (model, theirs)):
                cache.extend(new)
                table, lengths = cache.block_table[:3], cache.lengths[:3]
                results.append(call(x, starts, cache.keys, cache.values, table, lengths))
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    for a, b in zip([*ours.keys, *ours.values], [*theirs.keys, *theirs.values], strict=True):
        used = [block for row in theirs.block_table.tolist() for block in row if block >= 0]
        torch.testing.assert_close(a[used][:, 0], b[used][:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads_first", [False, True], ids=["slots_first", "heads_first"])
def test_decoding_is_one_graph_per_size_over_growing_lengths(
    heads_first: bool, options: dict[str, Any], device: str
) -> None:
    model = Decoding(make_layers(device), **options)
    dims = {"x": {0: "rows"}, "block_table": {0: "rows"}, "lengths": {0: "rows"}}
    compiled = piecework.compile(model, config=config(capture_sizes=(1, 3)), dynamic_arg_dims=dims)
    ours, theirs = (make_cache(device, heads_first=heads_first) for _ in range(2))
    with counters.expect(num_graph_captures=2, num_graph_replays=24):
        for step in range(24):
            rows = 3 if step < 12 else 1
            x = random(device, rows)
            results = []
            for call, cache in ((compiled, ours), (model, theirs)):
                cache.extend([1, step % 2, 1][:rows])
                results.append(call(x, cache.block_table[:rows], cache.lengths[:rows], cache.keys, cache.values))
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert ours.lengths.tolist() == [24, 6, 12, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_padded_rows_have_length_zero_and_write_nothing(device: str) -> None:
    model = Decoding(make_layers(device))
    dims = {"x": {0: "rows"}, "block_table": {0: "rows"}, "lengths": {0: "rows"}}
    settings = config(capture_sizes=(4,), rows_independent=True)
    compiled = piecework.compile(model, config=settings, dynamic_arg_dims=dims)
    ours, theirs = make_cache(device), make_cache(device)
    with counters.expect(num_graph_captures=1, num_graph_replays=8):
        for _ in range(8):
            x = random(device, 3)
            results = []
            for call, cache in ((compiled, ours), (model, theirs)):
                cache.extend([1, 1, 1])
                results.append(call(x, cache.block_table[:3], cache.lengths[:3], cache.keys, cache.values))
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    # A zeroed row has a table of zeros: it would write to the first slot of block 0, which may be anyone's.
    used = theirs.block_table[theirs.block_table >= 0].long()
    torch.testing.assert_close(ours.keys[1][used][:, 0], theirs.keys[1][used][:, 0], rtol=1e-4, atol=1e-4)


def test_a_model_that_decodes_is_not_padded_unasked() -> None:
    dims = {"x": {0: "rows"}, "block_table": {0: "rows"}, "lengths": {0: "rows"}}
    compiled = piecework.compile(Decoding(make_layers("cpu")), config=config(capture_sizes=(4,)), dynamic_arg_dims=dims)
    cache = make_cache("cpu")
    with counters.expect(num_graph_captures=0):
        cache.extend([1, 1, 1])
        compiled(random("cpu", 3), cache.block_table[:3], cache.lengths[:3], cache.keys, cache.values)
    assert "writes to the input" in str(piecework.report(compiled))
