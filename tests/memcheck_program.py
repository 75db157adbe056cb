"""Capture and replay a small model in pieces and as one graph: what test_memcheck.py runs under compute-sanitizer."""

from __future__ import annotations

import torch

import piecework
import piecework_cudagraph
import piecework_inductor
from piecework import CompilationConfig, SplittingOp
from piecework.testing import plugins
from piecework.tools.bench.model import ATTENTION, Case, build

SIZES = (1, 2, 8)


def main() -> None:
    """Compare calls of captured, padded and uncaptured sizes with eager; print how many graphs were recorded."""
    case = Case(num_layers=3, hidden=64, rows=max(SIZES), device=torch.device("cuda"), dtype=torch.float32)
    model = build(case, ATTENTION.packet)
    for capturable in (False, True):
        op = SplittingOp(
            ATTENTION.name, capturable=capturable, rows_independent=True, implementation=ATTENTION.function
        )
        config = CompilationConfig(level=3, splitting_ops=(op,), capture_sizes=SIZES)
        fast = piecework.compile(model, config=config, dynamic_arg_dims={"ids": 0})
        ids = torch.randint(0, case.vocab, (max(SIZES),), device="cuda")
        piecework.capture(fast, SIZES, ids, show_progress=False)
        for num_rows in (8, 1, 5, 2, 8, 11, 3, 1):
            ids = torch.randint(0, case.vocab, (num_rows,), device="cuda")
            torch.testing.assert_close(fast(ids), model(ids), rtol=1e-2, atol=1e-2)
        print("graphs:", piecework.counters.num_graph_captures, flush=True)
        piecework.release(fast)
    torch.cuda.synchronize()


if __name__ == "__main__":
    with plugins(("cudagraph", piecework_cudagraph), ("inductor", piecework_inductor)), torch.no_grad():
        main()
