"""What debug mode costs: the same calls with ``PIECEWORK_DEBUG=1`` and without, captured and not.

python tests/benchmarks/bench_debug.py [--json FILE] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import piecework
import piecework.testing
from piecework import CompilationConfig

ROUNDS = 10
CALLS = 5

library = torch.library.Library("bench_debug", "DEF")
library.define("attn(Tensor q, Tensor k, Tensor(a!) out) -> ()")


def _attn(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(q + 2 * k)


library.impl("attn", _attn, "CompositeExplicitAutograd")
torch.library.register_fake("bench_debug::attn", lambda q, k, out: None, lib=library)


class Layers(nn.Module):
    """A linear layer and a splitting op, some times."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q = layer(x)
            out = torch.empty_like(q)
            torch.ops.bench_debug.attn(q, x, out)
            x = out.tanh()
        return x


def milliseconds(calls: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Return the median time of one call of each, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / CALLS * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def compiled(model: nn.Module, x: torch.Tensor, *, is_debug: bool, is_captured: bool) -> Callable[[], Any]:
    """Return a call of a model that has been compiled, and captured or not."""
    os.environ["PIECEWORK_DEBUG"] = str(int(is_debug))
    config = CompilationConfig(
        level=3,
        splitting_ops=("bench_debug::attn",),
        capture_sizes=(len(x),) if is_captured else (),
        piece_compiler="eager",
    )
    call = piecework.compile(model, config=config)
    for _ in range(2):
        call(x)
    return lambda: call(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", help="write all medians, in milliseconds, to this file")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    device = torch.device(given.device)
    model, x = Layers(4, 64).to(device), torch.randn(8, 64, device=device)
    with piecework.testing.plugins(load_installed=device.type == "cuda"), torch.no_grad():
        times = milliseconds(
            {
                f"{'captured' if is_captured else 'uncaptured'}, {'debug' if is_debug else 'normal'}": compiled(
                    model, x, is_debug=is_debug, is_captured=is_captured
                )
                for is_captured in (True, False)
                for is_debug in (False, True)
            },
            device,
        )
    print(f"torch {torch.__version__}, {device}: 4 layers of width 64, 8 rows, ms per call")
    for kind in ("captured", "uncaptured"):
        normal, debug = times[f"{kind}, normal"], times[f"{kind}, debug"]
        print(f"  {kind:<10} normal {normal:8.3f}, debug {debug:8.3f}, debug/normal {debug / normal:6.1f}")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"milliseconds": times, "torch": torch.__version__, "device": str(device)}, file, indent=2)


if __name__ == "__main__":
    main()
