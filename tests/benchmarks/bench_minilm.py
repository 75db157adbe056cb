"""Throughput of MiniLM on sentences of mixed lengths, in batches of 32 as they come, not sorted by length.

Compares transformers' padded forward, eager and under ``torch.compile(dynamic=True)``, with Piecework on packed rows.
All are warmed up on every batch, then take turns; medians are reported, and what was still compiled meanwhile.

    python tests/benchmarks/bench_minilm.py --check --json results.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._dynamo.utils import counters as dynamo_counters

import piecework

EAGER = "padded, eager"
COMPILED = "padded, torch.compile(dynamic=True)"
BATCH_SIZE = 32


@dataclass
class Result:
    """What was measured of one way to embed."""

    name: str
    warm_up_s: float
    """The first pass over all batches, compilations included."""
    num_recompiles: int = 0
    """Graphs that Dynamo compiled after the warm-up."""
    seconds: list[float] = field(default_factory=list)
    """One pass over all sentences, per round."""
    sentences_per_s: float = 0.0


def load_minilm() -> ModuleType:
    """Import ``examples/minilm.py``, which is no package."""
    path = Path(__file__).parents[2] / "examples" / "minilm.py"
    spec = importlib.util.spec_from_file_location("minilm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["minilm"] = module
    spec.loader.exec_module(module)
    return module


def make_sentences(tokenizer: Any, num_sentences: int, *, seed: int = 0) -> list[str]:
    """Make sentences of 3 to 150 tokens, most of them short: the lengths are log-normal around 20."""
    rng = random.Random(seed)
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 3)
    lengths = [min(150, max(3, round(rng.lognormvariate(3.0, 0.8)))) for _ in range(num_sentences)]
    # The tokenizer adds a first and a last token to every sentence.
    return [" ".join(rng.choices(words, k=length - 2)) for length in lengths]


def measure(levels: Sequence[int], *, num_sentences: int, num_rounds: int) -> list[Result]:
    """Warm up each way to embed, then let them take turns; their results are compared first."""
    minilm = load_minilm()
    encoder, tokenizer = minilm.load_encoder()
    padded = minilm.load_bert("sdpa")
    sentences = make_sentences(tokenizer, num_sentences)

    def embed_padded(bert: Callable[..., Any]) -> Callable[[], torch.Tensor]:
        return lambda: minilm.embed_padded(bert, tokenizer, sentences, batch_size=BATCH_SIZE)

    def embed_packed(level: int) -> Callable[[], torch.Tensor]:
        compiled = minilm.compile_encoder(encoder, level)
        return lambda: minilm.embed(compiled, tokenizer, sentences, batch_size=BATCH_SIZE)

    ways = {EAGER: embed_padded(padded), COMPILED: embed_padded(torch.compile(padded, dynamic=True))}
    ways |= {f"packed, level {level}": embed_packed(level) for level in levels}

    results: dict[str, Result] = {}
    reference = ways[EAGER]()
    for name, way in ways.items():
        began = time.perf_counter()
        embeddings = way()
        results[name] = Result(name, time.perf_counter() - began)
        torch.testing.assert_close(embeddings, reference, rtol=1e-4, atol=1e-5)
    for _ in range(num_rounds):
        for name, way in ways.items():
            num_graphs = dynamo_counters["stats"]["unique_graphs"]
            began = time.perf_counter()
            way()
            results[name].seconds.append(time.perf_counter() - began)
            results[name].num_recompiles += dynamo_counters["stats"]["unique_graphs"] - num_graphs
    for result in results.values():
        result.sentences_per_s = num_sentences / statistics.median(result.seconds)
    return list(results.values())


def print_table(results: Sequence[Result]) -> None:
    """Print one line per way, with its throughput relative to both padded ways."""
    by_name = {result.name: result.sentences_per_s for result in results}
    print(f"{'':36} {'warm-up s':>9} {'sentences/s':>11} {'/ eager':>8} {'/ compile':>9} {'recompiles':>10}")
    for result in results:
        ratios = [result.sentences_per_s / by_name[name] for name in (EAGER, COMPILED)]
        print(
            f"{result.name:36} {result.warm_up_s:9.1f} {result.sentences_per_s:11.1f}"
            f" {ratios[0]:8.2f} {ratios[1]:9.2f} {result.num_recompiles:10}"
        )


def failures(results: Sequence[Result]) -> list[str]:
    """Say what falls short: level 3 is at least as fast as both padded ways, and nothing recompiles."""
    by_name = {result.name: result for result in results}
    level_3 = by_name["packed, level 3"]
    wrong = [
        f"level 3 gives {level_3.sentences_per_s:.1f} sentences/s, {name} {by_name[name].sentences_per_s:.1f}"
        for name in (EAGER, COMPILED)
        if level_3.sentences_per_s < by_name[name].sentences_per_s
    ]
    if level_3.num_recompiles:
        wrong.append(f"level 3 recompiled {level_3.num_recompiles} times")
    return wrong


def main() -> None:
    """Measure, print, and check if asked to."""
    parser = argparse.ArgumentParser(description="MiniLM's throughput on sentences of mixed lengths.")
    parser.add_argument("--levels", default="0,2,3", help="of the packed rows (default: %(default)s)")
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, help="1 is steadier where other work shares the cores (default: torch's)"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--check", action="store_true", help="fail if level 3 is slower than padded, or recompiles")
    arguments = parser.parse_args()
    if "PIECEWORK_LEVEL" in os.environ:
        parser.error("PIECEWORK_LEVEL would win over the levels that are compared: unset it")
    levels = [int(level) for level in arguments.levels.split(",")]
    if arguments.check and 3 not in levels:
        parser.error("--check needs level 3 among --levels")

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = measure(levels, num_sentences=arguments.sentences, num_rounds=arguments.rounds)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.sentences} sentences, fp32")
    print_table(results)
    if arguments.json:
        setting = {
            "torch": torch.__version__,
            "piecework": piecework.__version__,
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        }
        arguments.json.write_text(json.dumps({**setting, "results": [asdict(r) for r in results]}, indent=2) + "\n")
    if arguments.check and (wrong := failures(results)):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
