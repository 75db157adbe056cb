"""Graphs read and write no memory but their own, as compute-sanitizer sees it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("memcheck_program.py")


def compute_sanitizer() -> str | None:
    """Return where the program is: it comes with CUDA."""
    return shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")


@pytest.mark.cuda
@pytest.mark.skipif(compute_sanitizer() is None, reason="needs compute-sanitizer, which comes with CUDA")
def test_captured_models_are_clean_under_memcheck() -> None:
    command = [str(compute_sanitizer()), "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(PROGRAM)]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    child = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-4000:]
    assert "graphs: 12\ngraphs: 15\n" in child.stdout
    assert "ERROR SUMMARY: 0 errors" in child.stdout
