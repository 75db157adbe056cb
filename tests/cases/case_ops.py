"""Ops that single cases are about, besides those of ``demo``."""

from __future__ import annotations

import torch

from piecework import SplittingOp

library = torch.library.Library("cases", "DEF")
library.define("syncs(Tensor x) -> Tensor")
library.define("counts_positive(Tensor x) -> Tensor")
library.define("lists(Tensor x) -> Tensor")
library.define("drops(Tensor x) -> Tensor")


def _drops(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5, True)


for name, real, fake in (
    ("syncs", lambda x: x * float(x.sum().item() > 0), torch.empty_like),
    ("counts_positive", lambda x: x * float(bool((x > 0).any())), torch.empty_like),
    ("lists", lambda x: x * max(x.flatten().tolist()), torch.empty_like),
    ("drops", _drops, torch.empty_like),
):
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cases::{name}", fake, lib=library)

SYNCS = SplittingOp("cases::syncs")
"""``syncs(x)`` reads a number of its input on the host."""
DROPS = SplittingOp("cases::drops")
"""``drops(x)`` sets half of its input to zero."""

syncs, drops = torch.ops.cases.syncs, torch.ops.cases.drops
