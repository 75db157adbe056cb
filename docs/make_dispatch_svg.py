"""Draw ``dispatch.svg``: what one forward costs on the host, by the way to run it.

python docs/make_dispatch_svg.py [FILE]

FILE is what ``python -m piecework bench toy-llama --json FILE`` wrote, with 32 layers.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "tests/benchmarks/figures/toy_llama_h200_32.json"
NUM_LAYERS = 32
GROUPS = {
    "No graphs": {
        "eager": "eager",
        "torch-compile": "torch.compile",
        "torch-compile-varied": "torch.compile, sizes vary",
        "uncaptured": "Piecework, uncaptured",
    },
    "Graphs between the splitting ops": {
        "reduce-overhead-split": "Inductor, cut at tagged ops",
        "stitched": "stitched module, guards",
        "stitched-no-guards": "stitched module, no guards",
        "breakable": "Meta's breakable graphs",
        "piecewise": "Piecework",
        "piecewise-static": "Piecework, static tensors",
        "piecewise-static-loop": "bare loop over the same steps",
    },
    "One graph": {
        "reduce-overhead": "Inductor, reduce-overhead",
        "full": "Piecework",
        "full-static": "Piecework, static tensors",
        "manual-graph": "torch.cuda.CUDAGraph by hand",
    },
}
WIDTH, LEFT, RIGHT, BAR, ROW, HEAD = 784, 236, 716, 16, 22, 30
LEAST, MOST = 1.0, 20_000.0  # Microseconds at the ends of the axis.
STYLE = """
text{font:13px sans-serif;fill:#1f2933}.title{font-size:15px;font-weight:bold}.group{font-weight:bold}
.name{text-anchor:end}.note{font-size:11.5px;fill:#52606d}.tick{text-anchor:middle}
.paper{fill:#ffffff}.grid{stroke:#d5dbe1}.ours{fill:#3b82c4}.other{fill:#9aa5b1}
@media (prefers-color-scheme:dark){
text{fill:#e4e7eb}.note{fill:#9aa5b1}.paper{fill:#0d1117}.grid{stroke:#30363d}.ours{fill:#58a6ff}.other{fill:#6e7681}
}
"""


def position(microseconds: float) -> float:
    """Return where a time is on the axis, which is logarithmic."""
    share = math.log(max(LEAST, microseconds) / LEAST) / math.log(MOST / LEAST)
    return round(LEFT + share * (RIGHT - LEFT), 1)


def number(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:,.0f}"


def rows(times: Mapping[str, float], top: int) -> Iterator[tuple[int, str]]:
    """Yield the groups and bars, each with where it ends; contenders that were not measured are left out."""
    for group, names in GROUPS.items():
        measured = {name: label for name, label in names.items() if name in times}
        if not measured:
            continue
        top += HEAD
        yield top, f'<text x="16" y="{top - 8}" class="group">{group}</text>'
        for name, label in measured.items():
            end, kind = position(times[name]), "ours" if label.startswith("Piecework") else "other"
            middle = top + BAR // 2 + 5
            bar = f'<rect x="{LEFT}" y="{top}" width="{end - LEFT:.1f}" height="{BAR}" rx="2" class="{kind}"/>'
            value = f'<text x="{end + 6:.1f}" y="{middle}">{number(times[name])}</text>'
            top += ROW
            yield top, f'<text x="{LEFT - 8}" y="{middle}" class="name">{label}</text>{bar}{value}'


def drawing(figures: Mapping[str, Any]) -> str:
    """Return the picture of what a benchmark wrote."""
    run = next((run for run in figures["runs"] if run["num_layers"] == NUM_LAYERS), None)
    if run is None:
        raise SystemExit(f"there is no run with {NUM_LAYERS} layers in these figures")
    times = {one["name"]: one["host_us"]["median"] for one in run["contenders"] if one["host_us"] is not None}
    top = 40
    drawn = list(rows(times, top))
    bottom = drawn[-1][0] + 4
    grid = [
        f'<path d="M{position(tick)} {top + HEAD - 6}V{bottom}" class="grid"/>'
        f'<text x="{position(tick)}" y="{bottom + 15}" class="note tick">{tick:,}</text>'
        for tick in (1, 10, 100, 1_000, 10_000)
    ]
    given, versions = figures["arguments"], figures["versions"]
    captions = (
        f"Median time on the host to submit one forward of a toy Llama, in microseconds, on a logarithmic axis. "
        f"{NUM_LAYERS} layers,",
        f"{given['hidden']} wide, {given['rows']} rows, {given['dtype'].removeprefix('torch.')}; "
        f"{figures['device']}, torch {versions['torch']}, Python {versions['python']}, "
        f"piecework {versions['piecework']}.",
    )
    notes = [f'<text x="16" y="{bottom + 40 + 16 * i}" class="note">{text}</text>' for i, text in enumerate(captions)]
    height = bottom + 40 + 16 * len(captions)
    title = f'<text x="16" y="28" class="title">What one forward costs on the host: {NUM_LAYERS} layers</text>'
    parts = [
        f'<rect width="{WIDTH}" height="{height}" class="paper"/>',
        title,
        *grid,
        *(row for _, row in drawn),
        *notes,
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"><style>{STYLE}</style>'
    return "\n".join((head, *parts, "</svg>", ""))


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES
    Path(__file__).with_name("dispatch.svg").write_text(drawing(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
