"""What start-up costs: by stage and number of layers, and against ``torch.compile(dynamic=True)``.

(a) Trace, split, dedupe and compile of a toy Llama of 12, 32 and 80 layers: the compile stage must
not grow with the layers, since layers that are alike compile once.
(b) From trace to first result for 32 layers, at level 3 and by ``torch.compile(dynamic=True)`` in
its default mode. Caches of artifacts are off; Inductor's precompiled C++ header is made before.

Each measurement is a process of its own. About four minutes on two cores.

    python tests/benchmarks/bench_startup.py [--json FILE] [--check]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAYERS = (12, 32, 80)
HIDDEN = 128


def measure(contender: str, num_layers: int) -> dict[str, Any]:
    """Run one measurement in this process."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    import toy_llama  # pyright: ignore[reportMissingImports]

    import piecework

    model = toy_llama.build(num_layers, hidden=HIDDEN, tractable=False)
    ids, positions = torch.randint(0, 100, (16,)), torch.arange(16)
    make_header(torch)
    start = time.perf_counter()
    with torch.no_grad():
        if contender == "piecework":
            compiled = toy_llama.compile_model(model)
        else:
            compiled = torch.compile(model, dynamic=True)
        result = compiled(ids, positions)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        torch.testing.assert_close(result, model(ids, positions), atol=1e-4, rtol=1e-4)
    stages = dict(piecework.report(compiled).stage_seconds) if contender == "piecework" else {}
    unique = piecework.report(compiled).num_unique_pieces if contender == "piecework" else None
    return {"seconds": seconds, "stages": stages, "num_unique_pieces": unique}


def make_header(torch: Any) -> None:
    """Compile something small, so that the header and the imports are there for both contenders."""
    torch.compile(lambda x: x + 1, dynamic=True)(torch.zeros(4))
    torch._dynamo.reset()


def in_a_process(contender: str, num_layers: int) -> dict[str, Any]:
    """Run one measurement in a process of its own, without caches of artifacts."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PIECEWORK_")},
        "PIECEWORK_LEVEL": "3",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }
    command = [sys.executable, __file__, "--measure", contender, str(num_layers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{contender} with {num_layers} layers failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound of the project is not kept")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure[0], int(given.measure[1]))))
        return
    by_layers = {layers: in_a_process("piecework", layers) for layers in LAYERS}
    peer = in_a_process("torch.compile", 32)
    compile_12 = by_layers[12]["stages"]["compile"]
    print("layers  unique   trace    split   dedupe  compile  compile against 12 layers")
    for layers, figures in by_layers.items():
        s = figures["stages"]
        print(
            f"{layers:6}  {figures['num_unique_pieces']:6}  {s['trace']:5.2f} s  {s['split']:5.2f} s  "
            f"{s['dedupe']:5.2f} s  {s['compile']:5.2f} s  {s['compile'] / compile_12:.2f}"
        )
    ratio = by_layers[32]["seconds"] / peer["seconds"]
    print(
        f"32 layers, trace to first result: level 3 {by_layers[32]['seconds']:.1f} s, torch.compile(dynamic=True) "
        f"{peer['seconds']:.1f} s: {ratio:.2f} of it"
    )
    if given.json:
        Path(given.json).write_text(json.dumps({"piecework": by_layers, "torch.compile": peer}, indent=2))
    growth = by_layers[80]["stages"]["compile"] / compile_12
    if given.check and (growth > 1.3 or ratio >= 0.5):
        sys.exit(f"the compile stage grew {growth:.2f} times (bound 1.3), or start-up is {ratio:.2f} (bound 0.5)")


if __name__ == "__main__":
    main()
