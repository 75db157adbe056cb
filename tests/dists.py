"""Tiny distributions in a folder: metadata and a module each, as if installed, and a child to meet them."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

COMPILER = """
import sys
from piecework.hookspecs import hookimpl
from piecework.pieces import CompiledPiece
print("imported", __name__)

@hookimpl
def piecework_compile_piece(piece):
    return CompiledPiece(lambda *inputs: inputs)
"""


@dataclass(frozen=True)
class Dist:
    """One distribution; its module is called as the plugin, with ``_`` for anything odd."""

    plugin: str
    source: str = COMPILER
    name: str = ""
    target: str = ""
    version: str = "0.3"

    @property
    def distribution(self) -> str:
        return self.name or f"piecework-{self.plugin}"

    @property
    def module(self) -> str:
        return f"mod_{self.plugin}".replace("-", "_").replace(".", "_")


def make_dists(folder: Path, *dists: Dist) -> Path:
    """Write the distributions, in the order given, and return the folder for ``sys.path``."""
    folder.mkdir(exist_ok=True)
    for dist in dists:
        (folder / f"{dist.module}.py").write_text(dist.source)
        info = folder / f"{dist.distribution.replace('-', '_')}-{dist.version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist.distribution}\nVersion: {dist.version}\n")
        (info / "entry_points.txt").write_text(f"[piecework]\n{dist.plugin} = {dist.target or dist.module}\n")
    return folder


@functools.cache
def other_packages() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """A folder with links to all installed packages but ours, whose plugins a test must not see by chance."""
    kept = tempfile.TemporaryDirectory()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"(__editable__.*)?piecework|__pycache__|.*\.pth$", path.name):
            (Path(kept.name) / path.name).symlink_to(path)
    return Path(kept.name), kept


def run_child(code: str, *paths: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a fresh process that sees the core, the given folders and these variables.

    ``code`` is a program, or the options of the interpreter (``-m piecework plugins``).
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIECEWORK_")}
    clean["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "core", *paths, other_packages()[0])))
    clean["COLUMNS"] = "200"
    return subprocess.run(
        [sys.executable, "-S", *(["-c", code] if not code.startswith("-") else code.split())],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


FORKS = """
import gc, os, sys, traceback
import torch
import piecework
_compiled = piecework.compile(lambda x: x + 1, dynamic_arg_dims={{"x": 0}}, config=piecework.CompilationConfig(
    capturer="none", piece_compiler="eager", level=3))
_compiled(torch.ones(2))
piecework.report(_compiled)
for _name in [name for name in sys.modules if name.split(".")[0] == "piecework"]:
    del sys.modules[_name]  # What it needs stays.
del piecework, _compiled
gc.freeze()
for _number, _variables in enumerate({environments!r}):
    if os.fork() == 0:
        for _stream in (1, 2):
            os.dup2(os.open(os.path.join({folder!r}, f"{{_number}}.{{_stream}}"), os.O_CREAT | os.O_WRONLY), _stream)
        os.environ.update(_variables)
        sys.path[:0] = filter(None, os.environ.pop("PATHS", "").split(os.pathsep))
        try:
            exec({code!r}, {{"__name__": "__main__", "torch": torch}})
            _code = 0
        except BaseException:  # As the interpreter does at the end of a program.
            traceback.print_exc()
            _code = 1
        sys.stdout.flush()
        os._exit(_code)  # Tearing down what the parent imported would take seconds.
    _, _status = os.wait()
    with open(os.path.join({folder!r}, f"{{_number}}.status"), "w") as _file:
        _file.write(str(os.waitstatus_to_exitcode(_status)))
"""


def run_forks(
    code: str, environments: Sequence[Mapping[str, str]], folder: Path, *paths: Path
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program once for each set of variables, in forks of one child that has imported what Piecework needs.

    Piecework itself is imported by each. ``PATHS`` among the variables goes before ``sys.path``.
    """
    folder.mkdir()
    whole = FORKS.format(environments=list(map(dict, environments)), folder=str(folder), code=code)
    child = run_child(whole, *paths)
    assert child.returncode == 0, child.stderr
    return [
        subprocess.CompletedProcess(
            code,
            int((folder / f"{number}.status").read_text()),
            (folder / f"{number}.1").read_text(),
            (folder / f"{number}.2").read_text(),
        )
        for number in range(len(environments))
    ]
