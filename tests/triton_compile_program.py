"""Compile kernels of piecework_triton_ops for an H100 or H200, there or not, and count how they access memory.

    python tests/triton_compile_program.py

Run by test_triton_ops_library.py, as a process of its own: the kernels of the tests are those of Triton's interpreter.
Prints JSON: for each case, how often each instruction on global memory stands in the machine code's text.
"""

from __future__ import annotations

import collections
import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from piecework_triton_ops import activation, copy, norm, quantize, rotary

TARGET = GPUTarget("cuda", 90, 32)
ALIGNED = [["tt.divisibility", 16]]


def accesses(kernel: Any, num_warps: int, constants: dict[str, Any], **types: Any) -> dict[str, int]:
    """Compile with pointers and strides that are multiples of 16, as those of most calls are."""
    signature: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        kind = "constexpr" if name in constants else types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        signature[name] = kind
        if isinstance(kind, tuple):
            attributes |= {(index, item): ALIGNED for item, one in enumerate(kind) if one[0] == "*"}
        elif kind[0] == "*" or name.endswith("_stride"):
            attributes[(index,)] = ALIGNED
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=TARGET, options={"num_warps": num_warps})
    found = re.findall(r"\b(ld|st)\.global\S*?((?:\.v\d)?\.b\d+)\b", compiled.asm["ptx"])
    return dict(collections.Counter(kind + width for kind, width in found))


def cases() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for has_residual in (False, True):
        shape = {"HIDDEN": 4096, "HAS_RESIDUAL": has_residual, "BLOCK": 4096, "ROWS": 1}
        found[f"norm, {has_residual=}"] = accesses(norm._norm_kernel, 8, shape, eps="fp32")
        shape |= {"HIDDEN": 20000}
        found[f"long norm, {has_residual=}"] = accesses(norm._long_norm_kernel, 8, shape, eps="fp32")
    for name in ("silu", "gelu", "gelu_tanh"):
        shape = {"WIDTH": 4096, "ACTIVATION": name, "BLOCK": 1024, "ROWS": 1}
        found[name] = accesses(activation._activation_kernel, 4, shape)
    for is_neox in (False, True):
        shape = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 160, "ROTARY_DIM": 128, "IS_NEOX": is_neox}
        shape |= {"BLOCK": 64, "REST_BLOCK": 32, "HEADS": 16}
        types = {"positions_ptr": "*i64", "cos_sin_ptr": "*fp32"}
        found[f"rotary, {is_neox=}"] = accesses(rotary._rotary_kernel, 4, shape, **types)
    for kind, largest in (("*i8", 127), ("*fp8e4nv", 448.0), ("*fp8e5", 57344.0)):
        types = {"codes_ptr": kind, "scale_ptr": "*fp32", "scales_ptr": "*fp32"}
        shape = {"HIDDEN": 4096, "LARGEST": largest, "IS_INTEGER": kind == "*i8", "BLOCK": 4096, "ROWS": 1}
        found[f"dynamic, {kind}"] = accesses(quantize._dynamic_kernel, 8, shape, **types)
        found[f"long, {kind}"] = accesses(quantize._long_dynamic_kernel, 8, {**shape, "HIDDEN": 20000}, **types)
        shape |= {"IS_PER_ROW": True, "BLOCK": 2048}
        found[f"static, {kind}"] = accesses(quantize._static_kernel, 4, shape, **types)
    for word in (16, 8, 4, 2, 1):
        sizes = {"destinations": ("*u8",) * 3, "sources": ("*u8",) * 3, "sizes": ("i64",) * 3}
        found[f"copy by {word}"] = accesses(copy._copy_kernel, 4, {"WORD": word, "BLOCK": 256}, **sizes)
    return found


if __name__ == "__main__":
    print(json.dumps(cases(), indent=2))
