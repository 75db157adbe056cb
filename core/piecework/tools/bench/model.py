"""The toy Llama that is measured: RMSNorm, one projection for q, k and v, an attention op, a gated MLP.

The attention op is a stand-in that launches two kernels and writes into what it is given, as real ones do.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from piecework.trace import with_own_code

__all__ = ["ATTENTION", "ATTENTION_TAGGED", "NOTHING", "Attention", "Case", "ToyLlama", "attention", "build"]

SCALE = 0.5


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``q + k + v`` into ``out``, by two kernels."""
    torch.add(q, k, out=out)
    torch.add(out, v, out=out)


def nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Do nothing, so that only the way to an op costs something."""


@dataclass(frozen=True)
class Attention:
    """An op of this module: by its name for torch, and the Python function behind it."""

    name: str
    function: Callable[..., None]
    tags: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        torch.library.define(self.name, "(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()", tags=self.tags)
        torch.library.impl(self.name, "default", self.function)
        torch.library.register_fake(self.name, nothing)

    @property
    def packet(self) -> Callable[..., None]:
        """Return what a model calls."""
        namespace, _, name = self.name.partition("::")
        return getattr(getattr(torch.ops, namespace), name)


ATTENTION = Attention("piecework_bench::attention", attention)
ATTENTION_TAGGED = Attention("piecework_bench::attention_tagged", attention, (torch.Tag.cudagraph_unsafe,))
"""The same for Inductor, which cuts its graphs at ops with this tag."""
NOTHING = Attention("piecework_bench::nothing", nothing)


@dataclass(frozen=True)
class Case:
    """What is measured, and how large."""

    num_layers: int
    hidden: int
    rows: int
    device: torch.device
    dtype: torch.dtype
    vocab: int = 1024


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, hidden: int, mlp: int, op: Callable[..., None]) -> None:
        super().__init__()
        self.op = op
        self.input_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.post_attention_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate_up_proj = nn.Linear(hidden, 2 * mlp, bias=False)
        self.down_proj = nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Scaled, so that each has memory of its own: whoever passes views between pieces has to take them
        # again at every call, which would be charged to some contenders only.
        q, k, v = (part * SCALE for part in self.qkv_proj(self.input_norm(x)).chunk(3, dim=-1))
        out = torch.empty_like(q)
        self.op(q, k, v, out)
        x = x + self.o_proj(out)
        gate, up = self.gate_up_proj(self.post_attention_norm(x)).chunk(2, dim=-1)
        return x + self.down_proj(nn.functional.silu(gate) * up)


class ToyLlama(nn.Module):
    """A Llama without a cache."""

    def __init__(self, case: Case, op: Callable[..., None]) -> None:
        super().__init__()
        hidden = case.hidden
        mlp = max(8, hidden * 43 // 16 // 8 * 8)  # Llama's proportion.
        self.embedding = nn.Embedding(case.vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, mlp, op) for _ in range(case.num_layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.lm_head = nn.Linear(hidden, case.vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Take token ids ``[rows]``; return logits ``[rows, vocab]``."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def build(case: Case, op: Callable[..., None], *, seed: int = 0) -> ToyLlama:
    """Make a model with random weights, the same ones for every op, and a forward with a code object of its own.

    Dynamo keeps what it compiled per code object, and looks through all of it at every call: contenders that shared
    one would pay for each other.
    """
    torch.manual_seed(seed)
    plain: Any = ToyLlama.forward
    forward = with_own_code(types.FunctionType(plain.__code__, plain.__globals__, "forward"))
    cls = type("ToyLlama", (ToyLlama,), {"forward": forward, "__module__": __name__})
    return cls(case, op).eval().requires_grad_(False).to(case.device, case.dtype)
