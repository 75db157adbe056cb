"""What the ops are given, looked at before anything is computed or written.

The same checks run on fake tensors at trace time. Sizes that are symbols there are left to the real calls: a
comparison would bind the trace to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from piecework import PieceworkError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class AttentionError(PieceworkError, ValueError):
    """An attention op, or a ``BlockCache``, was given what it can't work with."""


Dims = Sequence[tuple[str, Any]]
"""Name and size of each dim; None where any size will do."""


class OpCheck:
    """The checks of one call.

    Args:
        op: what messages call it, such as ``"piecework::attention"``.
        q: ``[rows, heads, head_dim]``; the others must match its dtype and device.
        rows: what a row is, ``"tokens"`` or ``"sequences"``.
    """

    def __init__(self, op: str, q: torch.Tensor, *, rows: str) -> None:
        self.op, self.q, self.rows = op, q, rows
        if q.dtype not in FLOATS:
            self.refuse("q", f"of {', '.join(map(str, FLOATS))}", q.dtype)
        self.tensor("q", q, [(rows, None), ("heads", None), ("head_dim", None)], q.dtype)

    def refuse(self, name: str, allowed: str, given: object) -> NoReturn:
        raise AttentionError(f"{self.op}: {name} must be {allowed}, got {given}")

    def tensor(self, name: str, tensor: torch.Tensor, dims: Dims, dtype: torch.dtype) -> None:
        """Check form, dtype and device; of float tensors also that the values of a head lie side by side."""
        fits = len(dims) == tensor.dim() and not any(map(_differ, tensor.shape, (size for _, size in dims)))
        if not fits or tensor.dtype != dtype or tensor.device != self.q.device:
            names = ", ".join(label if size is None else f"{label}={size}" for label, size in dims)
            given = f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            self.refuse(name, f"[{names}] of {dtype} on {self.q.device}", given)
        if dtype in FLOATS and _differ(tensor.stride(-1), 1) and not _is_tiny(tensor):
            self.refuse(name, "contiguous in its last dim (a stride of 1)", f"strides {tensor.stride()}")

    def rows_and_heads(self, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Check what has the rows of q, and that its heads share those of k evenly."""
        num_rows, heads, head_dim = self.q.shape
        self.tensor("k", k, [(self.rows, num_rows), ("kv_heads", None), ("head_dim", head_dim)], self.q.dtype)
        kv_heads = k.shape[1]
        self.tensor("v", v, [(self.rows, num_rows), ("kv_heads", kv_heads), ("head_dim", head_dim)], self.q.dtype)
        self.tensor("out", out, [(self.rows, num_rows), ("heads", heads), ("head_dim", head_dim)], self.q.dtype)
        for label, size in (("heads", heads), ("head_dim", head_dim)):
            if isinstance(size, int) and size == 0:
                self.refuse(f"the {label} of q", "at least 1", 0)
        if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads == 0 or heads % kv_heads):
            self.refuse("the heads of q", f"a multiple of those of k and v ({kv_heads})", heads)

    def cache(
        self, k: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Check the cache against the new keys, and its tables against ``lengths``."""
        sequences = self.q.shape[0] if self.rows == "sequences" else lengths.shape[0] if lengths.dim() else None
        shape: Dims = [("blocks", None), ("block_size", None), ("kv_heads", k.shape[1]), ("head_dim", k.shape[2])]
        self.tensor("key_cache", keys, shape, k.dtype)
        labels = ("blocks", "block_size", "kv_heads", "head_dim")
        self.tensor("value_cache", values, list(zip(labels, keys.shape, strict=True)), k.dtype)
        self.tensor("lengths", lengths, [("sequences", sequences)], torch.int32)
        self.tensor("block_table", table, [("sequences", sequences), ("max_blocks", None)], torch.int32)
        if isinstance(keys.shape[1], int) and keys.shape[1] == 0:
            self.refuse("block_size", "at least 1", 0)

    def numbers(self, window: int, soft_cap: float, scale: float | None) -> None:
        if window < 0:
            self.refuse("window", "0 (none) or the number of tokens that one sees, itself included", window)
        if not 0 <= soft_cap < math.inf:
            self.refuse("soft_cap", "0 (none) or a finite number above", soft_cap)
        if scale is not None and not math.isfinite(scale):
            self.refuse("scale", "a finite number, or None", scale)


def _differ(given: object, wanted: object) -> bool:
    return isinstance(given, int) and isinstance(wanted, int) and given != wanted


def _is_tiny(tensor: torch.Tensor) -> bool:
    """Whether the last stride means nothing; symbols are taken to be large."""
    return any(isinstance(size, int) and size == 0 for size in tensor.shape) or not _differ(tensor.shape[-1], 1)
