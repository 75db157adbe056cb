"""What a call costs on the host besides its pieces and ops: against the same calls in a bare loop.

(d) The straight-line code of a 32-layer forward whose pieces and splitting ops do nothing, and the
whole call with all checks, against a bare loop over the same calls with the same arguments.
(e) What levels 2 and 3 add to the compiled code called directly, for one, three and eight inputs,
beside what ``torch.compile`` adds with its guards.
(prices) What each row of docs/assumptions.md costs per call.

    python tests/benchmarks/bench_dispatch.py [--json FILE] [--check]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import piecework
import piecework.testing
from piecework import CompilationConfig, SplittingOp
from piecework.api import forward_of
from piecework.tools.bench.captured import UncapturedModel
from piecework.tools.bench.dispatch import NoOps
from piecework.tools.bench.model import NOTHING, Case, build

ROUNDS = 40
CALLS = 50


def microseconds(contenders: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median time of one call of each, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def straight_line(num_layers: int = 32) -> dict[str, float]:
    """Measure (d)."""
    case = Case(num_layers, hidden=64, rows=8, device=torch.device("cpu"), dtype=torch.float32)
    model = build(case, NOTHING.packet)
    op = SplittingOp(NOTHING.name, implementation=NOTHING.function)
    config = CompilationConfig(level=3, splitting_ops=[op], capture_sizes=())
    ids = torch.zeros(8, dtype=torch.int64)
    with piecework.testing.plugins(NoOps(rows=8)), torch.no_grad():
        made = UncapturedModel(model, config, ids, NOTHING)
        run, compiled = made.run, made.model
        calls = recorded_calls(made.compiled.run.namespace, run, ids)

        def bare_loop() -> None:
            for function, arguments in calls:
                function(*arguments)

        return microseconds(
            {"bare loop": bare_loop, "straight line": lambda: run(ids, 8), "whole call": lambda: compiled(ids)}
        )


def recorded_calls(namespace: dict[str, Any], run: Callable[..., Any], x: torch.Tensor) -> list[tuple[Any, Any]]:
    """Run once with every function of the generated code recording how it is called."""
    calls: list[tuple[Any, Any]] = []
    originals = {name: value for name, value in namespace.items() if name.startswith(("piece_", "f"))}

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any) -> Any:
            calls.append((function, arguments))
            return function(*arguments)

        return record

    namespace.update({name: recording(value) for name, value in originals.items() if callable(value)})
    run(x, 8)
    namespace.update(originals)
    return calls


def checks(num_inputs: int) -> dict[str, float]:
    """Measure (e)."""
    names = ", ".join(f"x{i}" for i in range(num_inputs))
    namespace: dict[str, Any] = {"torch": torch}
    exec(f"def f({names}):\n    return torch.add(x0, x{num_inputs - 1})", namespace)
    function = namespace["f"]
    inputs = [torch.zeros(8, 64) for _ in range(num_inputs)]
    with piecework.testing.plugins(NoOps(rows=8)), torch.no_grad():
        result = torch.zeros(8, 64)
        piecework.set_torch_compile_backend(lambda graph, example_inputs: lambda *_: (result,))
        at_2 = piecework.compile(function, config=CompilationConfig(level=2))
        at_3 = piecework.compile(function, config=CompilationConfig(level=3, splitting_ops=(), capture_sizes=()))
        guarded = torch.compile(function, backend=lambda graph, example_inputs: lambda *_: (result,), dynamic=True)
        for compiled in (at_2, at_3, guarded):
            compiled(*inputs)
        direct = {level: forward_of(compiled, "bench").compiled for level, compiled in ((2, at_2), (3, at_3))}
        used = sorted({0, num_inputs - 1})
        arguments = [*(inputs[i] for i in used), 8]
        run_2, run_3 = (direct[level].run.function for level in (2, 3))  # type: ignore[union-attr]
        times = microseconds(
            {
                "compiled code, level 2": lambda: run_2(*arguments),
                "compiled code, level 3": lambda: run_3(*arguments),
                "level 2": lambda: at_2(*inputs),
                "level 3": lambda: at_3(*inputs),
                "torch.compile, guards live": lambda: guarded(*inputs),
            }
        )
    piecework.reset()
    return times


class Weights(nn.Module):
    """Has many parameters, all of which the graph reads."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(4, 64), False) for _ in range(num_parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + weight[0]
        return x


def one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def three(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return x + y + z


def with_scalars(x: torch.Tensor, scale: float = 2.0, flag: bool = True, name: str = "mean") -> torch.Tensor:
    return x * scale + len(name) if flag else x


def with_relation(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.shape[0] > 4 and x.shape[0] % 2 == 0 else x


def with_write(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache.add_(x)
    return x + 1


def added(target: Any, inputs: tuple[Any, ...], *, gradients: bool = False, **settings: Any) -> float:
    """Return the microseconds that a call costs besides its compiled code, which does nothing."""
    config = CompilationConfig(level=3, splitting_ops=(), capture_sizes=(), **settings)
    with piecework.testing.plugins(NoOps(rows=8)), torch.set_grad_enabled(gradients):
        compiled = piecework.compile(target, config=config)
        compiled(*inputs)
        made = forward_of(compiled, "bench").compiled
        assert made is not None
        run, tensors = made.run.function, [value for value in inputs if isinstance(value, torch.Tensor)]
        times = microseconds({"call": lambda: compiled(*inputs), "run": lambda: run(*tensors, 8)})
    piecework.reset()
    return times["call"] - times["run"]


def prices() -> dict[str, float]:
    """Measure the rows of docs/assumptions.md."""
    x, y, z = (torch.zeros(8, 64) for _ in range(3))
    base = added(one, (x,))
    few, many = Weights(8), Weights(194)
    return {
        "one tensor, all fixed costs": base,
        "two more tensors": added(three, (x, y, z)) - base,
        "three scalars": added(with_scalars, (x, 2.0, True, "mean")) - base,
        "two relations between sizes": added(with_relation, (x,)) - base,
        "one pair with a written argument": added(with_write, (x, y)) - added(three, (x, y, z)) / 2 - base / 2,
        "gradients on, nothing requires them": added(one, (x,), gradients=True) - base,
        "gradients on, an input requires them": added(one, (x.clone().requires_grad_(),), gradients=True) - base,
        "addresses of eight parameters": added(few, (x,)) - base,
        "addresses of 194 parameters, sample": added(many, (x,)) - base,
        "addresses of 194 parameters, always": added(many, (x,), check_parameters="always") - base,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", help="write all medians, in microseconds, to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound of the project is not kept")
    given = parser.parse_args()
    line = straight_line()
    bare = line["bare loop"]
    print(f"torch {torch.__version__}, 32 layers: 33 pieces and 32 splitting ops that do nothing")
    for name, value in line.items():
        print(f"  {name:<16} {value:8.2f} us  {value / bare:5.2f} times the bare loop, {value - bare:+.2f} us")
    by_inputs = {count: checks(count) for count in (1, 3, 8)}
    print("what a call adds to the compiled code")
    for count, times in by_inputs.items():
        added = {level: times[f"level {level}"] - times[f"compiled code, level {level}"] for level in (2, 3)}
        guards = times["torch.compile, guards live"] - times["compiled code, level 2"]
        print(
            f"  {count} inputs: level 2 {added[2]:.2f} us, level 3 {added[3]:.2f} us, torch.compile {guards:.2f} us "
            f"({added[3] / guards:.2f} of it)"
        )
    rows = prices()
    print("what each kind of check costs")
    for name, value in rows.items():
        print(f"  {name:<38} {value:6.2f} us")
    if given.json:
        with open(given.json, "w") as file:
            json.dump(
                {"straight_line": line, "checks": by_inputs, "prices": rows, "torch": torch.__version__}, file, indent=2
            )
    kept = line["straight line"] < 1.5 * bare and line["whole call"] - line["straight line"] <= 4
    if given.check and not kept:
        sys.exit("the straight line costs more than 1.5 times the bare loop, or the call more than 4 us besides")


if __name__ == "__main__":
    main()
