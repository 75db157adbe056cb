"""The kernels of piecework_triton_ops beside Inductor's fusion, eager execution, and a copy of as many bytes.

Device times are those of a captured forward: each contender is captured in a CUDA graph that holds some dozens of
calls, and graphs are replayed in turns. Calls go round several sets of inputs, as many as fill the L2 cache twice, up
to 16; results are kept during the capture, so that each call has its own memory. Inputs of a few rows stay in the cache
all the same, as in a model, where the layer before has just written them. A time has the gap between two kernels in it,
about 1 us. A copy of as many bytes is measured by ``copy_``, whose speed depends on addresses and sizes, and by an
elementwise op of torch; the faster one counts. Host times are those of plain calls, uncaptured. Every contender's
results are first compared with float64. Compiling Inductor's version for each size takes most of the time.

    python tests/benchmarks/bench_triton_ops.py [--json FILE] [--check] [--quick] [--tune] [--ops NAME ...]

Without a CUDA device tiny tensors pass through Triton's interpreter: a test of this program, and no figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

IS_CUDA = torch.cuda.is_available()
if not IS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # Read when Triton and the kernels are imported, which is what follows.

import triton  # noqa: E402 - after the variable is set
from triton_ops_cases import OPS, Case, Tensors  # noqa: E402 - it imports Triton

from piecework_triton_ops.copy import copy_tensors_, prepare_copy  # noqa: E402 - the same
from piecework_triton_ops.launching import Launch, ceil_div  # noqa: E402 - the same

DEVICE = torch.device("cuda:0" if IS_CUDA else "cpu")
ROWS = (1, 16, 128, 1024, 4096, 16384)
HIDDEN = (4096, 8192)
COPIED_ROWS = (1, 64, 512)
ROUNDS = 9
NUM_HOST_CALLS = 30 if IS_CUDA else 1
LEAST_BYTES_OF_SHARE = 64 << 20
LEAST_SHARE = 0.85
MOST_OF_INDUCTOR = 1.05
"""Of Inductor's time: what counts as no slower, since times of a few microseconds differ by so much from run to run."""


COPIES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copy": lambda source: torch.empty_like(source).copy_(source),
    "elementwise copy": torch.bitwise_not,
}


@dataclass(frozen=True)
class Figures:
    """One op at one size; times are microseconds of one call, medians."""

    op: str
    rows: int
    hidden: int
    num_bytes: int
    device_us: Mapping[str, float]
    host_us: Mapping[str, float]

    @property
    def copy_us(self) -> float:
        """Return the time of the faster copy."""
        return min(self.device_us.get(name, math.nan) for name in COPIES)

    @property
    def share(self) -> float | None:
        """Return the bytes per second as a share of the copy's."""
        return self.copy_us / self.device_us["kernel"] if "kernel" in self.device_us else None

    @property
    def to_inductor(self) -> float | None:
        return self._ratio("kernel", "inductor")

    @property
    def to_eager(self) -> float | None:
        return self._ratio("kernel", "eager")

    def _ratio(self, name: str, other: str) -> float | None:
        times = self.device_us
        return times[name] / times[other] if name in times and other in times else None


@dataclass(frozen=True)
class Contender:
    """What is called, and the sets of inputs that its calls go round."""

    call: Callable[..., Any]
    sets: Sequence[Tensors]

    @property
    def num_calls(self) -> int:
        """Return how many calls one graph holds: all sets equally often, and fewer calls of larger inputs."""
        num_bytes = sum(x.nbytes for x in self.sets[0])
        num_calls = max(8, min(48, (1 << 30) // max(1, num_bytes)))
        return num_calls + -num_calls % len(self.sets)


@dataclass(frozen=True)
class Captured:
    """A graph of many calls, and how many."""

    graph: torch.cuda.CUDAGraph
    num_calls: int

    def us(self) -> float:
        """Replay it, and return the microseconds of one call."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3 / self.num_calls


def capture(contender: Contender) -> Captured:
    """Capture calls that go round sets of inputs."""
    call, sets, num_calls = contender.call, contender.sets, contender.num_calls
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call(*sets[0])
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        kept = [call(*sets[index % len(sets)]) for index in range(num_calls)]
    del kept
    return Captured(graph, num_calls)


def device_times(contenders: Mapping[str, Contender]) -> dict[str, float]:
    """Return the median microseconds of one call of each, on the device, measured in turns."""
    if not IS_CUDA:
        return host_times(contenders)
    captured = {name: capture(one) for name, one in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in captured}
    for index in range(ROUNDS + 1):
        for name, one in captured.items():
            us = one.us()
            if index > 0:
                times[name].append(us)
    return {name: statistics.median(values) for name, values in times.items()}


def host_times(contenders: Mapping[str, Contender]) -> dict[str, float]:
    """Return the median microseconds until a plain call of each returns, its queue being empty at first."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(5 if IS_CUDA else 1):
        for name, one in contenders.items():
            call, inputs = one.call, one.sets[0]
            call(*inputs)
            synchronize()
            start = time.perf_counter()
            for _ in range(NUM_HOST_CALLS):
                call(*inputs)
            times[name].append((time.perf_counter() - start) / NUM_HOST_CALLS * 1e6)
            synchronize()
    return {name: statistics.median(values) for name, values in times.items()}


def synchronize() -> None:
    if IS_CUDA:
        torch.cuda.synchronize()


def sets_of(make: Callable[[], Tensors]) -> list[Tensors]:
    """Return sets of inputs that fill the L2 cache twice, from 2 to 16 of them."""
    first = make()
    cache = torch.cuda.get_device_properties(DEVICE).L2_cache_size if IS_CUDA else 0
    num_sets = min(16, max(2, -(-2 * cache // max(1, sum(x.nbytes for x in first)))))
    return [first, *(make() for _ in range(num_sets - 1))]


def measure(case: Case) -> Figures:
    """Measure an op at one size beside its rivals."""
    op = case.op
    sets = sets_of(lambda: op.inputs(case.rows, case.hidden, DEVICE))
    contenders = {"kernel": Contender(op.kernel, sets), "eager": Contender(op.plain, sets)}
    if IS_CUDA:
        torch._dynamo.reset()  # Or it stops to compile at the eighth size.
        contenders["inductor"] = Contender(torch.compile(op.plain, dynamic=False, fullgraph=True), sets)
    for name, one in contenders.items():
        case.check(name, sets[0], one.call(*sets[0]))
    num_bytes = bytes_moved(case, sets[0])
    half = [(torch.zeros(ceil_div(num_bytes, 16), dtype=torch.int64, device=DEVICE),) for _ in sets]
    copies = {name: Contender(copy, half) for name, copy in COPIES.items()}
    device_us = device_times({**contenders, **copies})
    return Figures(op.name, case.rows, case.hidden, num_bytes, device_us, host_times(contenders))


def bytes_moved(case: Case, inputs: Tensors) -> int:
    """Return the bytes that have to be read and written: of tables, only the rows that positions name."""
    results = case.op.kernel(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    read = sum(x.nbytes for x in inputs)
    if case.op.name.startswith("rotary"):
        table = inputs[-1]
        read += min(0, case.rows - table.shape[0]) * table[0].nbytes
    return read + sum(x.nbytes for x in results)


def inputs_of_a_call(rows: int, hidden: int) -> Tensors:
    """Return the inputs of a decode call: ids, positions and hidden states."""
    ids, positions = (torch.randint(1000, (rows,), device=DEVICE) for _ in range(2))
    return ids, positions, torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)


def measure_copies(rows: int, hidden: int) -> Figures:
    """Measure the copy of a decode call's inputs into static memory."""
    sets = sets_of(lambda: inputs_of_a_call(rows, hidden))
    static = [torch.zeros_like(x) for x in sets[0]]
    integers, floats = static[:2], static[2:]

    def foreach(ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        torch._foreach_copy_(integers, [ids, positions])  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_copy_(floats, [states])  # pyright: ignore[reportPrivateImportUsage]

    calls: dict[str, Callable[..., Any]] = {
        "prepared": prepare_copy(static, is_checked=False),
        "prepared, checked": prepare_copy(static),
        "function": lambda *sources: copy_tensors_(static, sources),
        "op": lambda *sources: torch.ops.piecework_triton_ops.copy_tensors_(static, sources),
        "foreach": foreach,
    }
    for name, call in calls.items():
        for one in static:
            one.zero_()
        call(*sets[0])
        if not all(torch.equal(one, source) for one, source in zip(static, sets[0], strict=True)):
            raise SystemExit(f"copy of {rows} rows: {name} is wrong")
    num_bytes = 2 * sum(x.nbytes for x in static)
    contenders = {name: Contender(call, sets) for name, call in calls.items()}
    return Figures("copy", rows, hidden, num_bytes, device_times(contenders), host_times(contenders))


def tune(case: Case) -> None:
    """Print the launch constants that are fastest, beside those that are chosen."""
    sets = sets_of(lambda: case.op.inputs(case.rows, case.hidden, DEVICE))

    def with_launch(launch: Launch | None) -> Callable[..., Any]:
        return lambda *inputs: case.op.kernel(*inputs, launch=launch)

    tried = {str(launch): Contender(with_launch(launch), sets) for launch in (None, *case.op.launches(case.hidden))}
    for name, one in tried.items():
        case.check(name, sets[0], one.call(*sets[0]))
    print_fastest(case.name, device_times(tried))


def tune_copies(rows: int, hidden: int) -> None:
    """Print the launch constants that copy the inputs of a decode call fastest."""
    sets = sets_of(lambda: inputs_of_a_call(rows, hidden))
    static = [torch.zeros_like(x) for x in sets[0]]
    grid = [Launch(num_warps, block) for num_warps in (1, 2, 4, 8) for block in (64, 128, 256, 512, 1024)]
    copies = {str(launch): prepare_copy(static, launch=launch) for launch in (None, *grid)}
    print_fastest(f"copy {rows} x {hidden}", device_times({name: Contender(one, sets) for name, one in copies.items()}))


def print_fastest(what: str, times: dict[str, float]) -> None:
    print(f"{what}: chosen {times.pop('None'):.2f} us")
    for name, us in sorted(times.items(), key=lambda item: item[1])[:4]:
        print(f"    {us:9.2f} us  {name}", flush=True)


def report(figures: Figures) -> str:
    """Return a row of the table."""
    times = figures.device_us
    gigabytes = figures.num_bytes / times["kernel"] / 1e3
    columns = [times["kernel"], *(times.get(name, math.nan) for name in ("inductor", "eager")), figures.copy_us]
    ratios = [figures.share, figures.to_inductor, figures.to_eager]
    return (
        f"{figures.op:<22}{figures.rows:>6}{figures.hidden:>6}{figures.num_bytes / 1e6:>10.2f}"
        + "".join(f"{value:>10.2f}" for value in columns)
        + f"{gigabytes:>8.0f}"
        + "".join(f"{'-' if value is None else format(value, '.2f'):>7}" for value in ratios)
        + f"{figures.host_us['kernel']:>8.1f}{figures.host_us.get('inductor', math.nan):>8.1f}"
    )


HEADER = (
    f"{'op':<22}{'rows':>6}{'width':>6}{'MB':>10}{'kernel us':>10}{'inductor':>10}{'eager':>10}{'copy':>10}{'GB/s':>8}"
    f"{'share':>7}{'/ind':>7}{'/eager':>7}{'host us':>8}{'ind':>8}"
)


def misses(all_figures: Sequence[Figures]) -> list[str]:
    """Return where the project's bounds are not kept."""
    found = []
    for one in all_figures:
        where, share, ratio = f"{one.op} {one.rows} x {one.hidden}", one.share, one.to_inductor
        if share is not None and one.num_bytes >= LEAST_BYTES_OF_SHARE and share < LEAST_SHARE:
            found.append(f"{where}: {share:.2f} of a copy's bytes per second, at least {LEAST_SHARE} are promised")
        if ratio is not None and ratio > MOST_OF_INDUCTOR:
            found.append(f"{where}: {ratio:.2f} times as long as Inductor's, at most {MOST_OF_INDUCTOR} is promised")
    return found


def write_json(path: str, all_figures: Sequence[Figures]) -> None:
    properties = {
        "command": sys.argv,
        "device": torch.cuda.get_device_name(DEVICE) if IS_CUDA else "cpu, by Triton's interpreter",
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "figures": [dataclasses.asdict(one) for one in all_figures],
    }
    with open(path, "w") as file:
        json.dump(properties, file, indent=2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = sorted({op.name for op in OPS} | {"copy"})
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound of the project is not kept")
    parser.add_argument("--quick", action="store_true", help="a third of the sizes")
    parser.add_argument("--tune", action="store_true", help="try launch constants instead of rivals")
    parser.add_argument("--ops", nargs="+", choices=names, metavar="NAME", help=f"only these of {', '.join(names)}")
    parser.add_argument("--rows", nargs="+", type=int, help="in place of the usual numbers of rows")
    parser.add_argument("--hidden", nargs="+", type=int, help="in place of the usual widths")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    rows = given.rows or ((1, 4) if not IS_CUDA else (1, 128, 4096) if given.quick else ROWS)
    widths = given.hidden or ((128,) if not IS_CUDA else HIDDEN[:1] if given.quick else HIDDEN)
    ops = [op for op in OPS if not given.ops or op.name in given.ops]
    cases = [Case(op, count, width) for op in ops for width in widths for count in rows]
    copied_rows = (given.rows or COPIED_ROWS) if IS_CUDA else rows[:1]
    copied_rows = copied_rows if not given.ops or "copy" in given.ops else ()
    if given.tune:
        for case in cases:
            tune(case)
        for count in copied_rows:
            tune_copies(count, widths[0])
        return
    print(HEADER)
    all_figures = []
    for case in cases:
        all_figures.append(measure(case))
        print(report(all_figures[-1]), flush=True)
        if IS_CUDA:
            torch.cuda.empty_cache()
    for count in copied_rows:
        one = measure_copies(count, widths[0])
        all_figures.append(one)
        for name, us in one.device_us.items():
            print(f"copy of 3 tensors, {count} rows, {name}: device {us:.2f} us, host {one.host_us[name]:.2f} us")
    if given.json:
        write_json(given.json, all_figures)
    missed = misses(all_figures) if IS_CUDA else []
    print(*missed or ["no bound is missed" if IS_CUDA else "no figures without a CUDA device"], sep="\n")
    if given.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    gc.freeze()  # Each capture collects garbage first; what was imported is none.
    try:
        main()
    finally:
        gc.unfreeze()
