"""The figures as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import piecework
from piecework.budget import format_bytes
from piecework.errors import ConfigError
from piecework.tools.bench.bounds import Bound, bounds_of_memory
from piecework.tools.bench.captured import PARTS
from piecework.tools.bench.measure import Run
from piecework.tools.bench.memory import MemoryFigures

__all__ = ["as_json", "check_json_file", "print_memory", "print_run", "write_json"]


def print_run(console: Console, run: Run, bounds: Sequence[Bound]) -> None:
    """Print the contenders, the parts of one forward, and what is promised."""
    title = f"{run.num_layers} layers"
    numbers = [Column(name, justify="right") for name in ("host us", "quartiles", "x loop", "device us")]
    table = Table(Column("contender", no_wrap=True), *numbers, Column("note", overflow="fold"), title=title)
    for one in run.contenders:
        host, device = one.host_us, one.device_us
        table.add_row(
            one.name,
            f"{host.median:.1f}" if host else "",
            f"{host.low:.1f}-{host.high:.1f}" if host else "",
            f"{one.ratio:.2f}" if one.ratio else "",
            f"{device.median:.1f}" if device else "",
            Text(one.note if one.status == "timed" else f"{one.status}: {one.note}"),
        )
    console.print(table)
    if run.parts:
        console.print(_parts_table(run.parts))
    print_bounds(console, bounds)


def _parts_table(parts: Mapping[str, Mapping[str, float]]) -> Table:
    names = (*PARTS, "whole")
    table = Table("host us of", *(Column(name, justify="right") for name in names), title="Parts of one forward")
    for contender, by_part in parts.items():
        table.add_row(contender, *(f"{by_part[name]:.1f}" for name in names))
    return table


def print_memory(console: Console, memory: MemoryFigures) -> None:
    """Print what captures take."""
    if memory.skipped is not None:
        console.print(f"memory and captures: skipped: {memory.skipped}", markup=False)
        return
    raw = (
        f", {_seconds(memory.context_s)} with torch.cuda.graph, {_seconds(memory.raw_s)} by torch.cuda.CUDAGraph itself"
        if memory.context_s and memory.raw_s
        else ""
    )
    console.print(
        f"{memory.num_layers} layers, {len(memory.sizes)} sizes up to {max(memory.sizes)}, {memory.num_graphs} graphs\n"
        f"  pool {format_bytes(memory.pool_bytes)}, of the largest alone {format_bytes(memory.largest_pool_bytes)}; "
        f"driver {format_bytes(memory.driver_bytes)}\n"
        f"  captured in {_seconds(memory.capture_s)}, of which {_seconds(memory.calls_s)} in the capture calls; "
        f"the bare calls one after the other took {_seconds(memory.bare_s)}{raw}",
        markup=False,
        highlight=False,
    )
    print_bounds(console, list(bounds_of_memory(memory)))


def _seconds(passes: Sequence[float]) -> str:
    return " / ".join(f"{seconds:.3f}" for seconds in passes) + " s"


def print_bounds(console: Console, bounds: Sequence[Bound]) -> None:
    """Print what is promised, and whether it is kept."""
    table = Table("at most", Column("measured", justify="right"), Column("limit", justify="right"), "state")
    for bound in bounds:
        table.add_row(bound.what, _number(bound.value, bound.unit), _number(bound.limit, bound.unit), bound.state)
    console.print(table)


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.1f} us" if unit == "us" else f"{value:.3f}"


def as_json(
    runs: Sequence[Run],
    bounds: Sequence[Bound],
    memories: Sequence[MemoryFigures] = (),
    *,
    command: str,
    device: torch.device,
    **arguments: Any,
) -> dict[str, Any]:
    """Return all figures, what they were measured on, and what is promised."""
    is_cuda = device.type == "cuda"
    return {
        "command": f"python -m piecework bench {command}",
        "command_line": shlex.join(["python", "-m", "piecework", *sys.argv[1:]]),
        "arguments": arguments,
        "device": torch.cuda.get_device_name(device) if is_cuda else f"cpu, torch threads: {torch.get_num_threads()}",
        "capturer": "does nothing" if command == "dispatch" else "records" if is_cuda else "emulates",
        "versions": {
            "piecework": piecework.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "runs": [dataclasses.asdict(run) for run in runs],
        "memory": [dataclasses.asdict(memory) for memory in memories],
        "bounds": [{**dataclasses.asdict(bound), "state": bound.state} for bound in bounds],
    }


def check_json_file(file: Path) -> None:
    """Check that figures can be written to a file, before minutes are spent on them.

    Raises:
        ConfigError: it is a folder, or can't be written.
    """
    target = file.resolve()
    if file.is_dir():
        problem = f"it is a folder; name a file in it, such as {str(file / 'figures.json')!r}"
    elif file.exists() and not os.access(file, os.W_OK):
        problem = "this file can't be written; allow it, or name another one"
    elif _is_stream(file):
        return
    elif not target.parent.is_dir():
        problem = f"there is no folder {str(target.parent)!r}; make it, or name a file in another one"
    elif not os.access(target.parent, os.W_OK | os.X_OK):
        problem = f"no file can be made in the folder {str(target.parent)!r}; allow it, or name a file in another one"
    else:
        return
    raise ConfigError(f"--json {str(file)!r}: {problem}")


def write_json(figures: Mapping[str, Any], file: Path) -> None:
    """Write figures to a file: whole, or not at all."""
    text = json.dumps(figures, indent=2) + "\n"
    if _is_stream(file):
        file.write_text(text)
        return
    target = file.resolve()  # A link stays one.
    temporary = target.with_name(f".piecework-{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _is_stream(file: Path) -> bool:
    """Whether a path is a device or a pipe, such as ``/dev/stdout``, which no other file may replace."""
    return file.exists() and not file.is_file()
