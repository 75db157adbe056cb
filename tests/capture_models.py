"""Ops, models, plugins and checks that the tests of captures share."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

import models
import piecework
from piecework import (
    Capture,
    CaptureMemory,
    Capturer,
    CompilationConfig,
    CompiledPiece,
    Piece,
    Recordable,
    SplittingOp,
    testing,
)
from piecework.api import forward_of
from piecework.plans import Plans
from piecework.testing import EmulatedCapturer

OPS = ("models::attn", "models::scale3", "models::pair", "models::checked")
INDEPENDENT = tuple(SplittingOp(name, rows_independent=True) for name in OPS)
ops = torch.ops.models
more = torch.ops.capture

library = torch.library.Library("capture", "DEF")
library.define("rotate(Tensor(a!) q, Tensor(b!) k) -> (Tensor(a!), Tensor(b!))")
library.define("double(Tensor(a!) x) -> Tensor(a!)")
library.define("tail(Tensor(a!) x) -> Tensor(a!)")
library.define("tail_and_sum(Tensor(a!) x) -> (Tensor(a!), Tensor)")
library.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
library.define("log(Tensor x, Tensor(a!) count) -> Tensor")
library.define("log_parts(Tensor x, Tensor(a!) count) -> (Tensor, Tensor)")


def _rotate(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.mul_(2), k.add_(1)


def _tail_and_sum(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mul_(2)[:, 1:], x.sum(1)


def _log(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    count.add_(1)
    return x[x[:, 0] > 0]


def _some_rows_of(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[1])


for name, real, fake in (
    ("rotate", _rotate, lambda q, k: (q, k)),
    ("double", lambda x: x.mul_(2), lambda x: x),
    ("tail", lambda x: x.mul_(2)[:, 1:], lambda x: x[:, 1:]),
    ("tail_and_sum", _tail_and_sum, lambda x: (x[:, 1:], x.new_empty(x.shape[0]))),
    ("unsafe", lambda x: x * 2 + 1, torch.empty_like),
    ("log", _log, lambda x, count: _some_rows_of(x)),
    ("log_parts", lambda x, count: (_log(x, count), x + 1), lambda x, count: (_some_rows_of(x), torch.empty_like(x))),
):
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"capture::{name}", fake, lib=library)

IN_PLACE = ("capture::rotate", "capture::double", "capture::tail", "capture::tail_and_sum")


def simple(x: torch.Tensor) -> torch.Tensor:
    """Two pieces around an op."""
    return ops.scale3(x + 1) * 2


def compiled(target: Any, dims: Any = None, **settings: Any) -> Any:
    """Compile with eager pieces that are captured at 2, 3 and 4 rows, never padded unless said otherwise."""
    given = {"capture_sizes": (2, 3, 4), "max_padding_ratio": 1, "splitting_ops": (*OPS, *IN_PLACE), **settings}
    return piecework.compile(
        target,
        config=CompilationConfig(**{"level": 3, "piece_compiler": "eager", **given}),
        dynamic_arg_dims={"x": 0} if dims is None else dims,
    )


def rows(num: int, width: int = 4) -> torch.Tensor:
    return torch.randn(num, width)


def check(call: Callable[..., Any], reference: Callable[..., Any], *args: Any) -> Any:
    """Compare one call with eager: results and arguments afterwards; return the result."""
    expected_args = copy.deepcopy(args)
    expected = reference(*expected_args)
    result = call(*args)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(args, expected_args)
    return result


def check_sizes(call: Callable[..., Any], reference: Callable[..., Any], *sizes: int) -> None:
    for size in sizes:
        check(call, reference, rows(size))


def plans_of(call: Any) -> Plans:
    compiled = forward_of(call, "test").compiled
    assert compiled is not None and compiled.plans is not None
    return compiled.plans


def reasons(call: Any, size: Any) -> str:
    """Return why calls of a size ran uncaptured."""
    return "; ".join(piecework.report(call).num_uncaptured_calls.get(size, {}))


def in_threads(num: int, work: Callable[[int], object]) -> None:
    """Run ``work(index)`` in so many threads at once, without gradients; raise what one of them raised."""
    barrier = threading.Barrier(num)

    def run(index: int) -> None:
        barrier.wait()
        with torch.no_grad():
            work(index)

    with ThreadPoolExecutor(num) as pool:
        for _ in pool.map(run, range(num)):
            pass


def counting(runs: list[int]) -> SplittingOp:
    """Return a splitting op that adds to a list whenever it runs."""

    def implementation(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x * 3

    return SplittingOp("models::scale3", rows_independent=True, implementation=implementation)


class Noting:
    """A piece compiler that runs pieces as they are, and calls something before each run."""

    name = "noting"

    def __init__(self, note: Callable[[Piece], object]) -> None:
        self.note = note

    @piecework.hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        def run(*inputs: Any) -> Any:
            self.note(piece)
            return piece.graph.forward(*inputs)

        return CompiledPiece(run)


@contextmanager
def capturing_by(capturer: Capturer) -> Iterator[None]:
    """Let a capturer be the answer of a plugin called ``own``."""

    class Own:
        name = "own"

        @piecework.hookimpl
        def piecework_capturer(self, device: torch.device) -> Capturer:
            return capturer

    with testing.plugins(Own()):
        yield


def emulated(**settings: Any) -> EmulatedCapturer:
    return EmulatedCapturer(torch.device("cpu"), **settings)


class MinimalCapturer(Capturer):
    """Nothing but the abstract methods: a replay runs again, and copies to where the results of the capture are."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_captures = 0
        self.num_releases = 0

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def capture(self, fn: Callable[[], tuple[torch.Tensor, ...]]) -> Capture:
        assert isinstance(fn, Recordable)
        self.num_captures += 1
        before = [(fn.inputs[i], fn.inputs[i].clone()) for i in fn.writes]
        outputs = fn()
        for tensor, content in before:
            tensor.copy_(content)

        def replay() -> None:
            for kept, fresh in zip(outputs, fn(), strict=True):
                if kept.data_ptr() != fresh.data_ptr():
                    kept.copy_(fresh)

        return Capture(replay, outputs)

    def memory(self) -> CaptureMemory:
        return CaptureMemory(pool_bytes=0)

    def release(self) -> None:
        self.num_releases += 1


assert models.OPS == OPS
