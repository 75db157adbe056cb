"""The figures as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import piecework
from piecework.budget import megabytes
from piecework.tools.bench.bounds import Bound, bounds_of_memory, bounds_of_run
from piecework.tools.bench.captured import PARTS
from piecework.tools.bench.measure import Run
from piecework.tools.bench.memory import MemoryFigures

__all__ = ["as_json", "print_memory", "print_run", "write_json"]


def print_run(console: Console, run: Run, *, title: str, with_bounds: bool = True) -> None:
    """Print the contenders, the parts of one forward, and what is promised."""
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
    if with_bounds:
        print_bounds(console, list(bounds_of_run(run)))


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
    raw = f", {_seconds(memory.raw_s)} by torch.cuda.CUDAGraph itself" if memory.raw_s else ""
    console.print(
        f"{memory.num_layers} layers, {len(memory.sizes)} sizes up to {max(memory.sizes)}, {memory.num_graphs} graphs\n"
        f"  pool {megabytes(memory.pool_bytes)}, of the largest alone {megabytes(memory.largest_pool_bytes)}; "
        f"driver {megabytes(memory.driver_bytes)}\n"
        f"  captured in {_seconds(memory.capture_s)}; the bare capture calls took {_seconds(memory.bare_s)}{raw}",
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
    runs: Sequence[Run], memories: Sequence[MemoryFigures], *, command: str, device: torch.device, **arguments: Any
) -> dict[str, Any]:
    """Return all figures, what they were measured on, and what is promised."""
    bounds = [bound for run in runs for bound in bounds_of_run(run)] if command != "dispatch" else []
    bounds += [bound for memory in memories for bound in bounds_of_memory(memory)]
    is_cuda = device.type == "cuda"
    return {
        "command": f"python -m piecework bench {command}",
        "command_line": shlex.join(["python", "-m", "piecework", *sys.argv[1:]]),
        "arguments": arguments,
        "device": torch.cuda.get_device_name(device) if is_cuda else f"cpu, torch threads: {torch.get_num_threads()}",
        "capturer_is_emulated": not is_cuda,
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


def write_json(figures: Mapping[str, Any], file: Path) -> None:
    """Write figures to a file."""
    file.write_text(json.dumps(figures, indent=2) + "\n")
