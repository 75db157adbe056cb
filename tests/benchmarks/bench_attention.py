"""What decoding over a block cache costs on the device, beside a copy of as many bytes and PyTorch's attention.

Device microseconds per call, from replays of CUDA graphs that hold calls on several caches in turn, so that little is
found in the device's own cache; medians of rounds in which the contenders alternate. Each is first compared with
float32 maths. A copy counts the bytes that it reads and those that it writes; it is measured by ``copy_``, whose speed
depends on addresses and sizes, and by an elementwise op of torch, and the faster one counts.

    python tests/benchmarks/bench_attention.py [--json FILE] [--check] [--tune] [--quick]

``--tune`` tries launch constants instead, and prints the best of each case. Without a CUDA device the shapes are tiny,
and the times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import piecework_attention  # noqa: F401 - registers the op
from piecework_attention.decode import decode_attention as decode_by_torch
from piecework_attention.launch import DecodeLaunch, decode_launch

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
COLD_BYTES = 512 * 2**20
"""Of keys and values that calls go through before they meet the first again: ten times the cache of an H200."""
MIN_SHARE, MIN_SHARE_BYTES = 0.8, 64 * 2**20
"""What ``--check`` wants: this share of the copy's bandwidth, from so many bytes on."""
COPIES = ("copy", "elementwise copy")
Calls = dict[str, list[Callable[[], Any]]]


@dataclass(frozen=True)
class Case:
    """A batch of equal lengths."""

    batch: int
    context: int
    heads_first: bool
    block_size: int
    device: torch.device
    dtype: torch.dtype

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch * self.context * KV_HEADS * HEAD_DIM * self.dtype.itemsize

    @property
    def name(self) -> str:
        order = "heads first" if self.heads_first else "slots first"
        return f"batch {self.batch:2}, context {self.context:5}, {order}"


@dataclass
class Inputs:
    """One call: what the op takes, and the same keys and values dense, ``[batch, kv_heads, context, head_dim]``."""

    op: tuple[torch.Tensor, ...]
    keys: torch.Tensor
    values: torch.Tensor


def make_inputs(case: Case) -> Inputs:
    """Fill a cache whose blocks lie in random order."""
    options: dict[str, Any] = {"device": case.device, "dtype": case.dtype}
    q = torch.randn(case.batch, HEADS, HEAD_DIM, **options)
    dense = [torch.randn(case.batch, KV_HEADS, case.context, HEAD_DIM, **options) for _ in range(2)]
    columns = -(-case.context // case.block_size)
    blocks = torch.randperm(case.batch * columns, device=case.device).view(case.batch, columns)
    caches = []
    for x in dense:
        inner = (KV_HEADS, case.block_size) if case.heads_first else (case.block_size, KV_HEADS)
        memory = torch.zeros(case.batch * columns, *inner, HEAD_DIM, **options)
        cache = memory.transpose(1, 2) if case.heads_first else memory
        for row in range(case.batch):  # One at a time: a copy of all would double the memory.
            cache[blocks[row]] = x[row].transpose(0, 1).unflatten(0, (columns, case.block_size))
        caches.append(cache)
    k, v = (x[:, :, -1].contiguous() for x in dense)
    lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device=case.device)
    return Inputs((q, k, v, torch.empty_like(q), *caches, blocks.int(), lengths), *dense)


def make_calls(case: Case, inputs: list[Inputs]) -> Calls:
    """Return the calls of each contender, one per cache; each returns its result but the copy."""
    options = {"scale": HEAD_DIM**-0.5, "window": 0, "soft_cap": 0.0}

    def decode(function: Callable[..., Any], one: Inputs, **settings: Any) -> torch.Tensor:
        function(*one.op, **settings)
        return one.op[3]

    def attend(one: Inputs) -> torch.Tensor:
        q = one.op[0].unsqueeze(2)
        return scaled_dot_product_attention(q, one.keys, one.values, enable_gqa=True).squeeze(2)

    def attend_grouped(one: Inputs) -> torch.Tensor:
        q = one.op[0].view(case.batch, KV_HEADS, -1, HEAD_DIM)
        return scaled_dot_product_attention(q, one.keys, one.values).view(one.op[0].shape)

    # Further apart than a power of two: at such distances copies are a third slower.
    num_words = case.kv_bytes // 16
    words = [torch.zeros(2, num_words + 12345, dtype=torch.int64, device=case.device) for _ in inputs]
    halves = [(both[0, :num_words], both[1, :num_words]) for both in words]
    op = torch.ops.piecework.decode_attention
    return {
        "op": [functools.partial(decode, op, one) for one in inputs],
        "sdpa": [functools.partial(attend, one) for one in inputs],
        "sdpa grouped": [functools.partial(attend_grouped, one) for one in inputs],
        "torch": [functools.partial(decode, decode_by_torch, one, **options) for one in inputs],
        "copy": [functools.partial(half[0].copy_, half[1]) for half in halves],
        "elementwise copy": [functools.partial(torch.bitwise_not, half[1], out=half[0]) for half in halves],
    }


def check_results(calls: Calls, inputs: list[Inputs]) -> float:
    """Compare every contender with float32 maths on its first cache; return the op's largest difference."""
    one = inputs[0]
    expected = torch.empty(one.op[0].shape, dtype=torch.float32, device=one.op[0].device)
    for row in range(len(expected)):
        q = one.op[0][row].float().view(KV_HEADS, -1, HEAD_DIM)
        weights = (q @ one.keys[row].float().mT * HEAD_DIM**-0.5).softmax(dim=-1)
        expected[row] = (weights @ one.values[row].float()).view(HEADS, HEAD_DIM)
    tolerance = 1e-5 if one.op[0].dtype == torch.float32 else 4e-3
    for name in calls:
        if name not in COPIES:
            one.op[3].fill_(float("nan"))
            torch.testing.assert_close(calls[name][0]().float(), expected, rtol=2e-2, atol=tolerance)
    calls["op"][0]()
    return (one.op[3].float() - expected).abs().max().item()


def microseconds(calls: Calls, rounds: int, device: torch.device) -> dict[str, float]:
    """Return the median time of one call of each contender, measured in turns."""
    runs = {name: graph_of(each) if device.type == "cuda" else in_turn(each) for name, each in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, device) / len(calls[name]))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def in_turn(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    def run() -> None:
        for call in calls:
            call()

    return run


def graph_of(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """Record the calls as one graph; results are dropped, so all may use the same memory."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_turn(calls)()
    return graph.replay


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Return the microseconds of one run, on the device where there is one."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e3


def cases(arguments: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    on_cuda = device.type == "cuda"
    batches, contexts = ((1, 8, 64), (1024, 8192, 32768)) if on_cuda else ((1, 2), (64, 160))
    if arguments.quick:
        batches, contexts = batches[:2], contexts[:2]
    dtype = torch.bfloat16 if on_cuda else torch.float32
    for batch, context, heads_first in itertools.product(batches, contexts, (False, True)):
        yield Case(batch, context, heads_first, arguments.block_size, device, dtype)


def inputs_of(case: Case) -> list[Inputs]:
    """Return as many calls as keep the device's own cache cold."""
    torch.manual_seed(0)
    num_caches = max(1, min(128, COLD_BYTES // case.kv_bytes)) if case.device.type == "cuda" else 1
    return [make_inputs(case) for _ in range(num_caches)]


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Return one row of the table."""
    inputs = inputs_of(case)
    calls = make_calls(case, inputs)
    difference = check_results(calls, inputs)
    times = microseconds(calls, rounds, case.device)
    return {
        "case": case.name,
        "kv_bytes": case.kv_bytes,
        "microseconds": times,
        "gigabytes_per_s": case.kv_bytes / times["op"] / 1e3,
        "share_of_copy": min(times[name] for name in COPIES) / times["op"],
        "ratio_to_sdpa": times["op"] / min(times["sdpa"], times["sdpa grouped"]),
        "largest_difference": difference,
        "launch": dataclasses.asdict(chosen_launch(case)),
    }


def chosen_launch(case: Case) -> DecodeLaunch:
    on_cuda = case.device.type == "cuda"
    num = torch.cuda.get_device_properties(case.device).multi_processor_count if on_cuda else 1
    return decode_launch(
        rows=case.batch,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        itemsize=case.dtype.itemsize,
        capacity=case.context,
        num_multiprocessors=num,
    )


def print_row(row: dict[str, Any]) -> None:
    times = ", ".join(f"{name} {value:8.1f}" for name, value in row["microseconds"].items())
    print(
        f"{row['case']}: KV {row['kv_bytes'] / 2**20:7.1f} MiB, {row['gigabytes_per_s']:6.0f} GB/s, "
        f"{row['share_of_copy']:.2f} of copy, {row['ratio_to_sdpa']:.2f} of SDPA's time | {times} us",
        flush=True,
    )


def tune(case: Case, rounds: int) -> None:
    """Print the best launch constants of a case, and the time of those that would be chosen."""
    from triton.runtime.errors import OutOfResources

    from piecework_attention.decode_triton import decode_attention_triton  # Only where there is a device.

    inputs, chosen = inputs_of(case), chosen_launch(case)
    options = {"scale": HEAD_DIM**-0.5, "window": 0, "soft_cap": 0.0}
    splits = sorted({max(1, min(128, round(chosen.num_splits * factor))) for factor in (0.25, 0.5, 1, 2, 4)})
    launches = [chosen]
    for num_splits, tokens, warps, stages in itertools.product(splits, (32, 64, 128), (2, 4, 8), (2, 3, 4)):
        launches.append(DecodeLaunch(num_splits, tokens, num_warps=warps, num_stages=stages))
    found = []
    for launch in launches:
        function = functools.partial(decode_attention_triton, launch=launch, **options)
        try:
            times = microseconds({"op": [functools.partial(function, *one.op) for one in inputs]}, rounds, case.device)
        except OutOfResources:
            continue
        found.append((times["op"], launch))
    print(f"{case.name}: chosen {found[0][0]:.1f} us with {found[0][1]}")
    for time_us, launch in sorted(found, key=lambda one: one[0])[:3]:
        print(f"    {time_us:8.1f} us with {launch}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--check", action="store_true", help="fail where the op is below its bound")
    parser.add_argument("--tune", action="store_true", help="try launch constants")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.tune and device.type != "cuda":
        parser.error("--tune needs a CUDA device")
    rows = []
    with torch.no_grad():
        for case in cases(arguments, device):
            if arguments.tune:
                tune(case, rounds=5)
                continue
            rows.append(measure(case, arguments.rounds))
            print_row(rows[-1])
    if arguments.json:
        about = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
            "torch": torch.__version__,
            "triton": triton_version(),
            "command": sys.argv,
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(about | {"rows": rows}, file, indent=2)
    return is_too_slow(rows) if arguments.check and device.type == "cuda" else 0


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def is_too_slow(rows: list[dict[str, Any]]) -> int:
    """Print the cases below the bound; return 1 where there are some."""
    slow = [row for row in rows if row["kv_bytes"] >= MIN_SHARE_BYTES and row["share_of_copy"] < MIN_SHARE]
    for row in slow:
        print(f"too slow: {row['case']}: {row['share_of_copy']:.2f} of a copy's bandwidth, at least {MIN_SHARE} wanted")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
