"""Ops of transformers as Triton kernels; Triton is asked for them when ``piecework_triton_ops.ops`` is imported."""

from __future__ import annotations

PIECEWORK_PLUGIN_API = 1
