"""Pieces, graphs and splitting ops that do nothing, so that a call costs what the way to them costs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.capturing import Capture, CaptureMemory, Capturer
from piecework.hookspecs import hookimpl
from piecework.pieces import CompiledPiece, Piece
from piecework.tools.bench.contenders import CONTENDERS, Bench, Contender

__all__ = ["DISPATCH", "NoOps"]


class NoOps:
    """A plugin: pieces return the same tensors at every call, replays do nothing.

    Args:
        rows: of a call; what the pieces return has as many.
    """

    name = "no_ops"

    def __init__(self, rows: int) -> None:
        self.rows = rows

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        """Answer for every piece."""
        returned: Any = piece.graph.graph.output_node().args[0]
        outputs = tuple(self.like(node.meta["example_value"]) for node in returned)
        return CompiledPiece(lambda *inputs: outputs)

    @hookimpl(tryfirst=True)
    def piecework_capturer(self, device: torch.device) -> Capturer:
        """Answer for every device."""
        return NoOpCapturer(device)

    def like(self, fake: torch.Tensor) -> torch.Tensor:
        size = [dim if isinstance(dim, int) else self.rows for dim in fake.shape]
        return torch.zeros(size, dtype=fake.dtype, device=fake.device)


class NoOpCapturer(Capturer):
    """Records nothing; what the one run returned stays the result."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def capture(self, fn: Callable[[], tuple[torch.Tensor, ...]]) -> Capture:
        return Capture(_do_nothing, tuple(fn()))

    def memory(self) -> CaptureMemory:
        return CaptureMemory(0)

    def release(self) -> None:
        """Keep nothing."""


def _do_nothing() -> None:
    """Stand for the replay of a graph."""


def guards_alone(bench: Bench) -> Contender:
    """Return the forward under ``torch.compile``, with general code that does nothing behind live guards."""
    ids, model = bench.new_ids(), bench.build(bench.op.packet)
    result = (torch.zeros(bench.case.rows, bench.case.vocab, dtype=bench.case.dtype, device=bench.case.device),)
    internals.mark_dynamic(ids, 0)
    forward = torch.compile(model.forward, backend=lambda graph, example_inputs: lambda *args: result, fullgraph=True)
    forward(ids)
    return Contender(lambda: forward(ids), ids, note="guards and parameters, then nothing")


def straight_line(bench: Bench) -> Contender:
    """Return the generated code of a forward, called without the checks before it."""
    made = bench.captured(is_full=False, is_static=False)  # It has that code too, for sizes that are not captured.
    run, ids, rows = made.run, made.ids, made.rows
    return Contender(lambda: run(ids, rows), ids, note="one line per piece and op, without checks")


def _at_most_two_launches(builder: Callable[[Bench], Contender]) -> Callable[[Bench], Contender]:
    """Tell that a call launches a copy and a clone at most: no device time is worth measuring."""
    return lambda bench: replace(builder(bench), num_launches=2, is_one_graph=False)


_BUILDERS: Mapping[str, Callable[[Bench], Contender]] = {
    "torch-compile-nothing": guards_alone,
    "stitched": CONTENDERS["stitched"],
    "stitched-no-guards": CONTENDERS["stitched-no-guards"],
    "uncaptured": CONTENDERS["uncaptured"],
    "straight-line": straight_line,
    **{name: builder for name, builder in CONTENDERS.items() if name.startswith("piecewise")},
}

DISPATCH: Mapping[str, Callable[[Bench], Contender]] = {
    name: _at_most_two_launches(builder) for name, builder in _BUILDERS.items()
}
"""In the order of the table."""
