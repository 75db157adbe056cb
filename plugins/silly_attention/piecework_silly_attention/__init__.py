"""``silly::attention``: an op whose results are known by hand, at which graphs are cut.

Importing this module registers the op; loaded as a plugin it also names it as a splitting op.
"""

from __future__ import annotations

import torch

from piecework import SplittingOp, hookimpl

__all__ = ["num_calls", "reset_calls"]

PIECEWORK_PLUGIN_API = 1

_library = torch.library.Library("silly", "DEF")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()")
_num_calls = 0


def num_calls() -> int:
    """Return how often the op ran with real tensors since ``reset_calls``."""
    return _num_calls


def reset_calls() -> None:
    """Count from zero again."""
    global _num_calls
    _num_calls = 0


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    global _num_calls
    _num_calls += 1
    out.copy_(q)
    out[:1] += 1  # A slice, so that zero rows are fine too.


@torch.library.register_fake("silly::attention", lib=_library)
def _attention_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    return None


@hookimpl(trylast=True)
def piecework_splitting_ops() -> list[SplittingOp]:
    """Cut graphs at the op."""
    return [SplittingOp("silly::attention")]
