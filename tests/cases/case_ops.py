"""Ops that single cases are about, besides those of ``demo``."""

from __future__ import annotations

import torch

from piecework import SplittingOp

library = torch.library.Library("cases", "DEF")
library.define("syncs(Tensor x) -> Tensor")
library.define("counts_positive(Tensor x) -> Tensor")
library.define("lists(Tensor x) -> Tensor")
library.define("drops(Tensor x) -> Tensor")
library.define("bad(Tensor q, Tensor out) -> ()")
library.define("bad_list(Tensor q, Tensor[] outs) -> ()")
library.define("boasts(Tensor q, Tensor(a!) out) -> ()")
library.define("boasts_and_gives(Tensor q, Tensor(a!) out) -> Tensor")
library.define(
    "many(Tensor q, Tensor(a!) out, Tensor[] ks, Tensor(b!)? extra=None, SymInt n=1, float s=0.5, bool flag=True, "
    "str name='a', SymInt[]? dims=None) -> ()"
)


def _drops(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5, True)


def _write(out: torch.Tensor, value: torch.Tensor) -> None:
    out.copy_(value)


def _many(
    q: torch.Tensor,
    out: torch.Tensor,
    ks: list[torch.Tensor],
    extra: torch.Tensor | None = None,
    n: int = 1,
    s: float = 0.5,
    flag: bool = True,
    name: str = "a",
    dims: list[int] | None = None,
) -> None:
    seen.append(n)
    total = (q * n * s if flag else q) + len(name) + sum(dims or []) + n
    for k in ks:
        total = total + k
    out.copy_(total)
    if extra is not None:
        extra.add_(out)


seen: list[int] = []
"""The numbers ``n`` that ``many`` was called with."""


for name, real, fake in (
    ("syncs", lambda x: x * float(x.sum().item() > 0), torch.empty_like),
    ("counts_positive", lambda x: x * float(bool((x > 0).any())), torch.empty_like),
    ("lists", lambda x: x * max(x.flatten().tolist()), torch.empty_like),
    ("drops", _drops, torch.empty_like),
    ("bad", lambda q, out: _write(out, q * 7), lambda q, out: None),
    ("bad_list", lambda q, outs: _write(outs[1], q * 7), lambda q, outs: None),
    ("boasts", lambda q, out: None, lambda q, out: None),
    ("boasts_and_gives", lambda q, out: q * 2, lambda q, out: torch.empty_like(q)),
    ("many", _many, lambda *args, **kwargs: None),
):
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cases::{name}", fake, lib=library)

SYNCS = SplittingOp("cases::syncs")
"""``syncs(x)`` reads a number of its input on the host."""
DROPS = SplittingOp("cases::drops")
"""``drops(x)`` sets half of its input to zero."""

BAD = SplittingOp("cases::bad")
"""``bad(q, out)`` writes ``7 * q``, and declares that it writes nothing."""
BOASTS = SplittingOp("cases::boasts")
"""``boasts(q, out)`` declares that it writes ``out``, and does nothing."""
MANY = SplittingOp("cases::many")
"""``many`` takes every kind of argument, most of them optional."""

syncs, drops = torch.ops.cases.syncs, torch.ops.cases.drops
bad, boasts, many = torch.ops.cases.bad, torch.ops.cases.boasts, torch.ops.cases.many
