"""Generate greedily with a small decoder and a key-value cache that grows in blocks, and compare with eager.

Prompts of different lengths are packed into one forward through ``piecework::attention``, which cuts the graph; each
further token of all sequences is one forward through ``piecework::decode_attention``, which a device graph can hold:
on a CUDA device a step of decoding is one graph, whatever the lengths are. Weights are random; the text means nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

import piecework
from piecework_attention import BlockCache, piecework_splitting_ops

piecework.set_attention_ops(piecework_splitting_ops())  # Not needed where the plugin is installed.

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 16
HIDDEN = HEADS * HEAD_DIM
NUM_LAYERS, VOCAB, BLOCK_SIZE = 2, 256, 16


class Layer(nn.Module):
    """Attention over the cache and an MLP, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv_proj = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        query_starts: torch.Tensor | None,
    ) -> torch.Tensor:
        heads = self.qkv_proj(self.input_norm(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if query_starts is None:
            torch.ops.piecework.decode_attention(q, k, v, out, keys, values, block_table, lengths)
        else:
            cache = {"key_cache": keys, "value_cache": values, "block_table": block_table, "lengths": lengths}
            torch.ops.piecework.attention(q, k, v, out, query_starts, **cache)
        x = x + self.o_proj(out.flatten(1))
        return x + self.down(nn.functional.silu(self.up(self.post_norm(x))))


class TinyDecoder(nn.Module):
    """A decoder without positions, which its causal attention does without."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        query_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take new token ids ``[rows]`` and the cache; return logits ``[rows, vocab]``.

        With ``query_starts`` the rows are packed sequences, without it one new token of each.
        """
        x = self.embedding(input_ids)
        for layer, layer_keys, layer_values in zip(self.layers, keys, values, strict=True):
            x = layer(x, layer_keys, layer_values, block_table, lengths, query_starts)
        return self.lm_head(self.norm(x))


def generate(
    prefill: Callable[..., torch.Tensor],
    decode: Callable[..., torch.Tensor],
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    device: torch.device,
) -> torch.Tensor:
    """Return the ``[prompts, num_tokens]`` ids that follow, each the most likely one."""
    cache = BlockCache(
        NUM_LAYERS,
        num_blocks=32,
        block_size=BLOCK_SIZE,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_sequences=len(prompts),
        max_length=128,
        device=device,
    )
    lengths = [len(prompt) for prompt in prompts]
    ends = list(itertools.accumulate(lengths))
    query_starts = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    packed = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    cache.extend(lengths)
    logits = prefill(packed, cache.keys, cache.values, cache.block_table, cache.lengths, query_starts)
    last = torch.tensor(ends, device=device) - 1
    tokens = [logits[last].argmax(dim=-1)]
    for _ in range(num_tokens - 1):
        cache.extend([1] * len(prompts))
        logits = decode(tokens[-1], cache.keys, cache.values, cache.block_table, cache.lengths)
        tokens.append(logits.argmax(dim=-1))
    return torch.stack(tokens, dim=1)


def main() -> None:
    """Print what follows three prompts, and what was counted on the way to it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = TinyDecoder().to(device).eval()
    prompts = [[1, 2, 3, 4, 5], [7], list(range(20, 60))]
    rows = {"input_ids": {0: "rows"}}
    # Two forwards of one model, with the same parameters: they differ in whether query_starts is there.
    prefill = piecework.compile(model, dynamic_arg_dims=rows)
    decode = piecework.compile(model, dynamic_arg_dims=rows | {"block_table": {0: "rows"}, "lengths": {0: "rows"}})
    with torch.no_grad():
        by_eager = generate(model, model, prompts, 40, device)
        compiled = generate(prefill, decode, prompts, 40, device)
    for prompt, tokens in zip(prompts, compiled.tolist(), strict=True):
        print(f"{len(prompt):2} tokens, then {tokens[:8]} ...")
    print("equal to eager:", torch.equal(compiled, by_eager))
    for name, count in piecework.counters.snapshot().items():
        print(f"{name}: {count}")


if __name__ == "__main__":
    main()
