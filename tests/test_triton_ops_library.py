"""The plugin as a whole: what importing it costs, what it says on a CPU, and whether its kernels compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import piecework_triton_ops.ops
from dists import ROOT, run_child

PLUGIN = ROOT / "plugins" / "triton_ops"


def test_the_entry_module_needs_no_triton() -> None:
    code = "import sys, piecework_triton_ops; print([n for n in ('torch._inductor', 'triton') if n in sys.modules])"
    done = run_child(code, PLUGIN)
    assert done.stdout.split() == ["[]"], done.stderr


def test_every_function_is_an_op() -> None:
    ops = torch.ops.piecework_triton_ops
    names = set(piecework_triton_ops.ops.__all__) - {"prepare_copy"}
    assert all(torch.Tag.pt2_compliant_tag in getattr(ops, name).default.tags for name in names)


def test_a_cpu_without_the_interpreter_is_refused_with_what_to_do() -> None:
    code = (
        "import torch, piecework_triton_ops.ops\n"
        "x = torch.ones(2, 8)\n"
        "torch.compile(torch.ops.piecework_triton_ops.silu_and_mul, backend='eager')(x.to('meta'))\n"
        "torch.ops.piecework_triton_ops.silu_and_mul(x)\n"
    )
    error = run_child(code, PLUGIN, TRITON_INTERPRET="0").stderr.splitlines()[-1]
    assert error.startswith("RuntimeError: piecework_triton_ops::silu_and_mul got tensors on the CPU")
    assert "piecework_triton_ops.native" in error
    assert "TRITON_INTERPRET=1 before triton is first imported" in error


@pytest.mark.slow
def test_kernels_compile_and_access_memory_in_16_bytes() -> None:
    """The interpreter takes what the compiler refuses; and a mask or a stride may narrow accesses without a word."""
    path = os.pathsep.join(map(str, (ROOT / "core", PLUGIN)))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    program = ROOT / "tests" / "triton_compile_program.py"
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for case, counts in found.items():
        if case.startswith("copy by"):
            continue
        assert counts.get("ld.v4.b32"), (case, counts)
        assert counts.get("st.v4.b32"), (case, counts)
        assert counts.get("ld.b16", 0) == counts.get("ld.b8", 0) == 0, (case, counts)
    assert found["norm, has_residual=True"] == {"ld.v4.b32": 6, "st.v4.b32": 4}
    assert found["copy by 16"] == {"ld.v2.b64": 6, "st.v2.b64": 6, "ld.b8": 3, "st.b8": 3}
    assert found["copy by 8"] == {"ld.b64": 6, "st.b64": 6, "ld.b8": 3, "st.b8": 3}
