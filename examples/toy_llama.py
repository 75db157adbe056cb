"""Compile a toy Llama whose results are known by hand, and compare it with plain Python arithmetic and with eager.

The layers are those of a Llama (RMSNorm, residuals, a SiLU-gated MLP), only attention is a stand-in that needs no
cache: ``out = q + k + v``, after the positions were added to q and k. It is a splitting op, so a model of ``n`` layers
is cut into ``n + 1`` pieces, three of which are unique: the first, the last, and the one that all between share.

Norm and activation are custom ops. Their plain bodies run unless a plugin brings kernels for them: with
``piecework-triton-ops`` on a CUDA device, below level 3 or with ``PIECEWORK_CUSTOM_OPS=all``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import nn

import piecework

NORM_EPS = 1e-6

torch.library.define("toy::attention", "(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``q + k + v`` into ``out``."""
    torch.add(q, k, out=out)
    out += v


torch.library.impl("toy::attention", "default", attention)


@torch.library.register_fake("toy::attention")
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Return nothing, as the op does: its result is what it writes."""


class RMSNorm(piecework.CustomOp, op_name="rms_norm"):
    """Llama's norm, over the last dim."""

    def __init__(self, hidden: int, eps: float = NORM_EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SiluAndMul(piecework.CustomOp, op_name="silu_and_mul"):
    """Gate one half of the last dim by the other."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class Attention(nn.Module):
    """Project, add the positions, and let the splitting op mix q, k and v."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        offset = positions.unsqueeze(-1).to(x.dtype)
        q = q + offset
        k = k + offset
        out = torch.empty_like(q)
        torch.ops.toy.attention(q, k, v, out)
        return self.o_proj(out)


class MLP(nn.Module):
    """Llama's gated MLP: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, mlp: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * mlp, bias=False)
        self.activation = SiluAndMul()
        self.down_proj = nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, hidden: int, mlp: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(hidden)
        self.attention = Attention(hidden)
        self.post_attention_norm = RMSNorm(hidden)
        self.mlp = MLP(hidden, mlp)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x), positions)
        return x + self.mlp(self.post_attention_norm(x))


class ToyLlama(nn.Module):
    """A Llama without a cache: token ids and positions of all rows in, logits of all rows out."""

    def __init__(self, num_layers: int, *, hidden: int, mlp: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, mlp) for _ in range(num_layers))
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Take ids and positions ``[rows]``; return logits ``[rows, vocab]``."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, positions)
        return self.lm_head(self.norm(x))


def build(
    num_layers: int = 12, *, hidden: int = 128, mlp: int = 256, vocab: int = 128, tractable: bool = True, seed: int = 0
) -> ToyLlama:
    """Make an eager toy Llama.

    Args:
        num_layers: also the number of splitting ops.
        hidden: width of a row.
        mlp: inner width of the MLP.
        vocab: number of token ids, and of logits per row.
        tractable: identity-like weights, for which ``expected`` gives the results; otherwise random ones.
        seed: of the random weights.
    """
    torch.manual_seed(seed)
    model = ToyLlama(num_layers, hidden=hidden, mlp=mlp, vocab=vocab).eval().requires_grad_(False)
    if tractable:
        for name, weight in model.named_parameters():
            if "embedding" in name:
                rows = [[embedding_value(token, channel) for channel in range(hidden)] for token in range(vocab)]
                weight.copy_(torch.tensor(rows))
            elif "norm" in name:
                weight.fill_(1)
            else:
                # What is projected several times from one input (q, k, v; gate, up) gets one identity each.
                num_parts = 3 if "qkv" in name else 2 if "gate_up" in name else 1
                part = torch.eye(weight.shape[0] // num_parts, weight.shape[1])
                weight.copy_(part.repeat(num_parts, 1))
    return model


def embedding_value(token: int, channel: int) -> float:
    """Give the tractable embedding: small numbers of both signs that differ between tokens and channels."""
    return (token % 7 - 3 + channel % 5) / 4


def expected(
    input_ids: Sequence[int],
    positions: Sequence[int],
    *,
    num_layers: int = 12,
    hidden: int = 128,
    mlp: int = 256,
    vocab: int = 128,
) -> list[list[float]]:
    """Compute what the tractable model must return, in plain Python.

    All projections are (cut or zero-filled) identities, so no channel meets another one but in the norms.
    """
    logits = []
    for token, position in zip(input_ids, positions, strict=True):
        x = [embedding_value(token, channel) for channel in range(hidden)]
        for _ in range(num_layers):
            x = [a + (3 * b + 2 * position) for a, b in zip(x, _normalize(x), strict=True)]
            gated = [b * b / (1 + math.exp(-b)) for b in _normalize(x)]
            gated = gated[:mlp] + [0.0] * (hidden - mlp)
            x = [a + b for a, b in zip(x, gated, strict=True)]
        row = _normalize(x)[:vocab]
        logits.append(row + [0.0] * (vocab - hidden))
    return logits


def _normalize(x: list[float]) -> list[float]:
    scale = 1 / math.sqrt(sum(value * value for value in x) / len(x) + NORM_EPS)
    return [value * scale for value in x]


def compile_model(model: ToyLlama, *, split: bool = True) -> ToyLlama:
    """Compile at level 3, unless the environment names another one; cut at attention, or not at all."""
    splitting_ops = ("toy::attention",) if split else ()
    return piecework.compile(
        model,
        config=piecework.CompilationConfig(splitting_ops=splitting_ops),
        dynamic_arg_dims={"input_ids": {0: "rows"}, "positions": {0: "rows"}},
    )


def main() -> None:
    """Compare compiled, eager and hand-computed logits for several numbers of rows."""
    parser = argparse.ArgumentParser(description="Compile a toy Llama whose results are known by hand.")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--random", action="store_true", help="random weights: compare with eager only")
    parser.add_argument("--no-split", action="store_true", help="one graph, attention inside")
    arguments = parser.parse_args()

    model = build(arguments.layers, tractable=not arguments.random)
    compiled = compile_model(model, split=not arguments.no_split)
    for num_rows in (16, 2, 1, 5):
        input_ids = torch.arange(num_rows) * 11 % model.embedding.num_embeddings
        positions = torch.arange(num_rows)
        logits = compiled(input_ids, positions)
        by_eager = model(input_ids, positions)
        line = f"{num_rows:2} rows: largest difference from eager {_difference(logits, by_eager):.1e}"
        if not arguments.random:
            by_hand = torch.tensor(expected(input_ids.tolist(), positions.tolist(), num_layers=arguments.layers))
            line += f", from plain Python {_difference(logits, by_hand):.1e}"
        print(line)
    for name, count in piecework.counters.snapshot().items():
        print(f"{name}: {count}")


def _difference(actual: torch.Tensor, reference: torch.Tensor) -> float:
    torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-4)
    return (actual - reference).abs().max().item()


if __name__ == "__main__":
    main()
