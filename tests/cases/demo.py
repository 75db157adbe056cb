"""The ops that models of the cases are cut at, all with right declarations."""

from __future__ import annotations

import torch
from torch import nn

from piecework import SplittingOp

library = torch.library.Library("demo", "DEF")
library.define("attn(Tensor q, Tensor k, Tensor(a!) out) -> ()")
library.define("scale3(Tensor x) -> Tensor")
library.define("pair(Tensor x) -> (Tensor, Tensor)")
library.define("update(Tensor x, Tensor(a!) cache) -> Tensor")
library.define("attn_tok(Tensor q, Tensor k, Tensor(a!) out, Tensor token) -> ()")


def _attn(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(q + 2 * k)


def _update(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache[: x.shape[0]].copy_(x)
    return x.new_empty(0)


for name, real, fake in (
    ("attn", _attn, lambda q, k, out: None),
    ("scale3", lambda x: x * 3, torch.empty_like),
    ("pair", lambda x: (x + 1, x - 1), lambda x: (torch.empty_like(x), torch.empty_like(x))),
    ("update", _update, lambda x, cache: x.new_empty(0)),
    ("attn_tok", lambda q, k, out, token: _attn(q, k, out), lambda q, k, out, token: None),
):
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"demo::{name}", fake, lib=library)

ATTN = SplittingOp("demo::attn", rows_independent=True)
"""``attn(q, k, out)`` writes ``q + 2 * k``, row by row."""
SCALE3 = SplittingOp("demo::scale3", rows_independent=True)
"""``scale3(x)`` gives a fresh ``3 * x``."""
PAIR = SplittingOp("demo::pair", rows_independent=True)
"""``pair(x)`` gives ``x + 1`` and ``x - 1``."""
UPDATE = SplittingOp("demo::update")
"""``update(x, cache)`` writes the first rows of a cache, and gives an empty tensor, which orders what follows."""
ATTN_TOK = SplittingOp("demo::attn_tok", rows_independent=True)
"""``attn_tok(q, k, out, token)`` is ``attn`` that takes such a token."""

OPS = (ATTN, SCALE3, PAIR, UPDATE, ATTN_TOK)
attn, scale3, pair = torch.ops.demo.attn, torch.ops.demo.scale3, torch.ops.demo.pair
update, attn_tok = torch.ops.demo.update, torch.ops.demo.attn_tok


class Scaled(nn.Module):
    """A linear layer before a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scale3(self.l(x)) + 1
