"""Cases about memory: what is gone when a model is gone, and what many sizes take."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import demo
import piecework
from piecework import CompilationConfig, CompiledPiece, CompileError, counters, support_torch_compile, testing
from piecework.api import forward_of
from piecework.testing import EmulatedCapturer
from ways import CAPTURED_WAY, CUDA_WAYS, Way, check

SIZES = (2, 4, 8)


class Big(nn.Module):
    """Two pieces with a weight."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.l = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return demo.scale3(self.l(x)) + 1


def assert_gone(*references: weakref.ref[Any]) -> None:
    gc.collect()
    assert [reference() is None for reference in references] == [True] * len(references)


def rounds(way: Way, num: int, work: Callable[[], tuple[weakref.ref[Any], ...]]) -> None:
    """Run rounds after each of which all is gone, and memory is no more than after the third."""
    reserved = []
    for _ in range(num):
        assert_gone(*work())
        if way.device == "cuda":
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
    assert not reserved or reserved[-1] <= reserved[2]


# --- C32 ---


def test_c32_memory_of_a_model_that_is_gone(way: Way) -> None:
    def work() -> tuple[weakref.ref[Any], ...]:
        model = Big().to(way.device)
        call = way.compile(model, captures=SIZES)
        for n in (2, 4, 8, 3):
            result = call(way.rand(n, 64))
        return weakref.ref(model), weakref.ref(call), weakref.ref(model.l.weight), weakref.ref(result)

    rounds(way, 10 if way.device == "cuda" else 3, work)


def test_c32_failed_compile_leaves_nothing(eager_way: Way) -> None:
    """The error is kept, and still holds neither the model nor its weights once its traceback is dropped."""

    class Fails:
        name = "fails"

        @piecework.hookimpl
        def piecework_compile_piece(self) -> CompiledPiece:
            raise RuntimeError("planned")

    def work() -> tuple[weakref.ref[Any], ...]:
        model = Big()
        call = eager_way.compile(model, captures=SIZES, piece_compiler="fails")
        with pytest.raises(piecework.PluginError, match="planned") as caught:
            call(torch.randn(2, 64))
        kept.append(caught.value)
        error: BaseException | None = caught.value
        while error is not None:
            error = error.with_traceback(None).__cause__
        return weakref.ref(model), weakref.ref(model.l.weight)

    kept: list[BaseException] = []
    with testing.plugins(Fails(), load_installed=True):
        rounds(eager_way, 3, work)


def test_c32_failed_trace_leaves_nothing(way: Way) -> None:
    class Breaks(Big):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    def work() -> tuple[weakref.ref[Any], ...]:
        model = Breaks().to(way.device)
        call = way.compile(model, captures=SIZES)
        with pytest.raises(CompileError, match="graph break|graph_break"):
            call(way.rand(2, 64))
        return weakref.ref(model), weakref.ref(model.l.weight)

    rounds(way, 3, work)


def test_c32_graphs_are_dropped_and_the_module_stays(way: Way) -> None:
    model = Big().to(way.device)
    call = way.compile(model, captures=SIZES)
    for n in (2, 4):
        check(call, model, way.rand(n, 64))
    behind = weakref.ref(forward_of(call, "test").compiled)
    piecework.release(call)
    assert_gone(behind)
    with counters.expect(num_graphs_seen=1):
        for n in (2, 4):
            check(call, model, way.rand(n, 64))


def test_c32_function_over_a_model_and_a_kept_result(way: Way) -> None:
    """What is kept is a result alone: the model behind the function goes."""

    def work() -> tuple[weakref.ref[Any], ...]:
        model = Big().to(way.device)

        def function(x: torch.Tensor) -> torch.Tensor:
            return model(x) * 2

        call = way.compile(function, captures=SIZES)
        x = way.rand(4, 64)
        with torch.no_grad():
            kept.append((call(x), function(x)))
        return weakref.ref(model), weakref.ref(model.l.weight), weakref.ref(call)

    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(3):
        assert_gone(*work())
    for result, expected in kept:
        torch.testing.assert_close(result, expected)


def test_c32_instances_of_a_decorated_class(eager_way: Way) -> None:
    """Eager pieces: what differs from ``compile`` is where the trace is kept."""

    @support_torch_compile
    class Decorated(Big):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return demo.scale3(self.l(x)) + 1

    def work() -> tuple[weakref.ref[Any], ...]:
        model = Decorated()
        for n in (2, 4, 8, 3):
            result = model(torch.randn(n, 64))
        twin = copy.deepcopy(model)
        twin(torch.randn(2, 64))
        return tuple(map(weakref.ref, (model, model.l.weight, twin, twin.l.weight, result)))

    sizes = SIZES if eager_way.is_captured else ()
    config = CompilationConfig(level=3, splitting_ops=demo.OPS, piece_compiler="eager", capture_sizes=sizes)
    piecework.set_compilation_config(config)
    rounds(eager_way, 4, work)


# --- C34 ---


def layers(x: torch.Tensor) -> torch.Tensor:
    """Four pieces."""
    for _ in range(3):
        x = demo.scale3(x * 0.5) - 1
    return x


MANY = range(64, 1025, 64)


def check_all(call: Callable[..., Any], way: Way, sizes: Any, width: int) -> None:
    """Compare with eager, with the results of two sizes alive at once."""
    kept = None
    for n in sizes:
        x = way.rand(n, width)
        result = call(x)
        torch.testing.assert_close(result, layers(x))
        if kept is not None:
            torch.testing.assert_close(kept[0], kept[1])
        kept = result, layers(x)


@pytest.mark.parametrize("pieces", ["eager", "inductor"])
def test_c34_memory_of_many_sizes_in_emulation(pieces: str) -> None:
    def cost(sizes: Any) -> int:
        capturer = EmulatedCapturer(torch.device("cpu"))

        class Own:
            name = "own"

            @piecework.hookimpl
            def piecework_capturer(self) -> EmulatedCapturer:
                return capturer

        with testing.plugins(Own(), load_installed=True):
            way = Way(3, pieces, is_captured=True)
            call = way.compile(layers, captures=sizes)
            for n in sorted(sizes, reverse=True):
                call(way.rand(n, 16))
            with counters.expect(num_graph_captures=0):
                check_all(call, way, sizes, 16)
            return capturer.memory().pool_bytes

    sizes = MANY if pieces == "eager" else MANY[3::4]
    one, many = cost([1024]), cost(sizes)
    assert one < 5 * 1024 * 16 * 4  # Of the results of 4 pieces and 3 ops, few are needed at a time.
    assert many < 1.5 * one < 0.7 * one * sum(sizes) / 1024  # the last: all of them apart


@pytest.mark.cuda
@pytest.mark.parametrize("pieces", ["eager", "inductor"])
def test_c34_memory_of_many_sizes_on_the_device(pieces: str) -> None:
    way = next(way for way in CUDA_WAYS if way.is_captured and way.pieces == pieces)

    def cost(sizes: Any) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        base = torch.cuda.memory_reserved()
        call = way.compile(layers, captures=sizes)
        for n in sorted(sizes, reverse=True):
            call(way.rand(n, 4096))
        torch.cuda.synchronize()
        taken = torch.cuda.memory_reserved() - base
        check_all(call, way, sizes, 4096)
        piecework.release(call)
        return taken

    with testing.plugins(load_installed=True):
        one, many = cost([1024]), cost(MANY)
    assert many < 2.5 * one, (one, many)


def test_c34_capturing_at_once_takes_the_room_of_the_largest_in_any_order() -> None:
    """Sizes that calls capture in rising order find no room in the memory of those before them; these do."""

    def pool_bytes(sizes: Any) -> int:
        call = CAPTURED_WAY.compile(layers)
        piecework.capture(call, [*sizes], (torch.randn(2, 16),))
        with counters.expect(num_graph_captures=0):
            for n in sizes:
                check(call, layers, torch.randn(n, 16))
        memory = piecework.report(call).memory
        assert memory is not None
        piecework.release(call)
        return memory.pool_bytes

    with testing.plugins(load_installed=True):
        assert pool_bytes(MANY) < 1.5 * pool_bytes([1024])


def test_c34_two_models_share_the_memory_of_their_captures(eager_way: Way) -> None:
    """Eager pieces: compiled code allocates the same results."""
    named = {"capturer": "emulated"} if eager_way.is_captured else {}  # The plugin that the other one finds.
    calls = [eager_way.compile(layers, captures=SIZES, **settings) for settings in ({}, named)]
    sizes = []
    for call in calls:
        for n in reversed(SIZES):
            check(call, layers, torch.randn(n, 64))
        memory = piecework.report(call).memory
        sizes.append(memory.pool_bytes if memory is not None and eager_way.is_captured else 0)
    assert sizes[1] <= 1.6 * sizes[0]
    plans = [compiled.plans for call in calls if (compiled := forward_of(call, "test").compiled) is not None]
    assert len({id(one.pool) for one in plans if one is not None}) == eager_way.is_captured
    for n in SIZES:  # results of one are kept while the other runs
        x = torch.randn(n, 64)
        kept = calls[0](x)
        calls[1](torch.randn(n, 64))
        torch.testing.assert_close(kept, layers(x))
