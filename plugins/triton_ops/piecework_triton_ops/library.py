"""The namespace ``piecework_triton_ops`` of torch, and how an op gets into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import triton
from triton import knobs

__all__ = ["INTERPRETED", "jit", "register"]

jit: Any = triton.jit
"""The decorator of kernels, without its types, by which constants of a kernel aren't the values given for them."""

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether ``TRITON_INTERPRET=1`` was set when the kernels were made, so that they run on tensors of a CPU."""

_library = torch.library.Library("piecework_triton_ops", "DEF")


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an op of the namespace ``piecework_triton_ops``.

    It runs on CUDA, and on a CPU by Triton's interpreter where that was asked for; elsewhere a call says so. It has no
    gradient: its inputs belong to inference.

    Args:
        schema: the op's name, arguments and results, as ``torch.library.Library.define`` takes them.
        run: launches the kernel; it checks what it is given.
        fake: returns results of the right shapes on fake tensors, whose sizes may be symbols; it checks likewise.
    """
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CUDA")
    _library.impl(name, run if INTERPRETED else _refusal(name), "CPU")
    torch.library.register_fake(f"piecework_triton_ops::{name}", fake, lib=_library)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"piecework_triton_ops::{name} got tensors on the CPU, and its Triton kernel runs on CUDA devices; move "
            "them there, call the function of this op in piecework_triton_ops.native, or, for tests, set "
            "TRITON_INTERPRET=1 before triton is first imported"
        )

    return refuse
