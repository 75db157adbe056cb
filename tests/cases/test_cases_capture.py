"""Cases about capture: which sizes, what a device refuses, captures that fail, random numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import case_ops
import demo
import piecework
from dists import ROOT, run_child
from piecework import CaptureError, Capturer, PieceworkWarning, SplittingOp, TraceDepartureError, counters, testing
from piecework.testing import EmulatedCapturer
from ways import CAPTURED_WAY, CUDA_WAYS, Way, check, close, same

CUDA_CAPTURED_WAY = next(way for way in CUDA_WAYS if way.is_captured)


def attends(x: torch.Tensor) -> torch.Tensor:
    """One op between two pieces."""
    y, out = x * 2, torch.empty_like(x)
    demo.attn(y, x, out)
    return out + 1


def replayed(call: Callable[..., Any], way: Way, sizes: range) -> list[int]:
    """Return the sizes of calls that replayed graphs; all are compared with eager."""
    used = []
    for n in sizes:
        before = counters.num_graph_replays
        check(call, attends, way.rand(n, 6))
        if counters.num_graph_replays > before:
            used.append(n)
    return used


# --- C25 ---


class Limited(nn.Module):
    """Takes at most 16 rows: a position each."""

    table: torch.Tensor

    def __init__(self, *, is_looked_up: bool) -> None:
        super().__init__()
        self.is_looked_up = is_looked_up
        self.register_buffer("table", torch.randn(16, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        positions = self.table[torch.arange(n, device=x.device)] if self.is_looked_up else self.table[:n]
        return demo.scale3(x + positions) * 2


def test_c25_batch_at_the_borders_of_the_captured_sizes(way: Way) -> None:
    is_replayed = way.is_captured
    call = way.compile(attends, captures=[2, 4, 8])
    assert replayed(call, way, range(11)) == [*range(1, 9)] * is_replayed
    undeclared = way.compile(attends, captures=[2, 4, 8], splitting_ops=["demo::attn"])
    assert replayed(undeclared, way, range(11)) == [2, 4, 8] * is_replayed


def test_c25_size_that_the_model_refuses_does_not_spoil_another(way: Way) -> None:
    model = Limited(is_looked_up=False).to(way.device)
    call = way.compile(model, captures=[4, 32])
    for n in (3, 4, 1):
        check(call, model, way.rand(n, 6))
    with pytest.raises(
        TraceDepartureError, match=r"holds for rows (== min\(16, rows\)|<= 16).* this call has rows = 32"
    ):
        call(way.rand(32, 6))
    with counters.expect(num_graph_replays=4 * way.is_captured, num_graph_captures=0):
        for n in (3, 4, 1):
            check(call, model, way.rand(n, 6))


@pytest.mark.parametrize("is_looked_up", [False, True])
def test_c25_legal_call_next_to_a_size_that_the_model_refuses(eager_way: Way, is_looked_up: bool) -> None:
    """16 rows would be padded to 32; with eager pieces on a CPU, where a bad index is an exception."""
    model = Limited(is_looked_up=is_looked_up)
    call = eager_way.compile(model, captures=[4, 32])
    check(call, model, eager_way.rand(3, 6))
    if eager_way.is_captured:
        with pytest.warns(
            PieceworkWarning,
            match=r"answers size 16 uncaptured: size 32 .* (failed in its warm-up|the trace holds for)",
        ):
            check(call, model, eager_way.rand(16, 6))
    for n in (16, 15, 3):
        check(call, model, eager_way.rand(n, 6))
    with pytest.raises((IndexError, TraceDepartureError), match=r"index .*out of|rows = 32"):
        call(eager_way.rand(32, 6))
    check(call, model, eager_way.rand(4, 6))


def test_c25_capture_of_many_sizes_names_the_one_that_the_model_refuses() -> None:
    """With eager pieces on a CPU: what is looked at is the list of sizes."""
    with testing.plugins(load_installed=True):
        model = Limited(is_looked_up=True)
        call = CAPTURED_WAY.compile(model)
        piecework.capture(call, [4], (torch.randn(4, 6),))
        with pytest.raises(CaptureError, match=r"size 32 of Limited can't be captured: piece_0, .*IndexError"):
            piecework.capture(call, [2, 32, 8], (torch.randn(4, 6),))
        with counters.expect(num_graph_replays=2, num_graph_captures=0):
            check(call, model, torch.randn(3, 6))


# --- C28 ---


def test_c28_op_that_synchronises_is_fine_between_the_graphs(way: Way) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return case_ops.syncs(x + 1) * 2

    with counters.expect(num_graph_captures=2 * way.is_captured):
        same(way, model, lambda n: (way.rand(n, 6),), [4, 4], splitting_ops=[case_ops.SYNCS])


@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_c28_host_sync_inside_a_captured_piece_is_named(way: Way, on_failure: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return case_ops.syncs(x + 1) * 2

    call = way.compile(model, captures=[4], splitting_ops=(), on_failure=on_failure)
    if not way.is_captured:
        check(call, model, way.rand(4, 6))
        return
    words = r"(?s)piece_0 .*splitting.* op.* cases::syncs in piece_0 .*case_ops.syncs\(x \+ 1\) \* 2"
    if on_failure == "error":
        with pytest.raises(CaptureError, match=words):
            call(way.rand(4, 6))
    else:
        with pytest.warns(PieceworkWarning, match=words):
            check(call, model, way.rand(4, 6))
    if way.device == "cuda":
        torch.cuda.synchronize()
    check(call, model, way.rand(5, 6))
    with counters.expect(num_graph_captures=2):
        same(way, attends, lambda n: (way.rand(n, 6),), [4, 4])


@pytest.mark.parametrize("op", ["counts_positive", "lists"])
def test_c28_other_reads_in_the_body_of_an_op(eager_way: Way, op: str) -> None:
    """A branch on a tensor and a list of its numbers; eager pieces, since the op is the same in compiled code."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return getattr(torch.ops.cases, op)(x + 1) * 2

    call = eager_way.compile(model, captures=[4], splitting_ops=())
    if eager_way.is_captured:
        with pytest.raises(CaptureError, match=rf"in cases::{op}, .*splitting_ops=\['cases::{op}'\]"):
            call(torch.randn(4, 6))
    else:
        check(call, model, torch.randn(4, 6))
    same(eager_way, model, lambda n: (torch.randn(n, 6),), [4, 4], splitting_ops=[f"cases::{op}"])


def test_c28_op_whose_body_reads_nothing_is_captured_inside_a_piece(way: Way) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        demo.attn(x * 2, demo.scale3(x), out)
        return out + 1

    with counters.expect(num_graph_captures=2 * way.is_captured):
        same(way, model, lambda n: (way.rand(n, 6),), [4, 2, 4], splitting_ops=())


# --- C29 ---


class Flaky:
    """A wrapper around a capturer that fails once while it captures four rows."""

    name = "flaky"

    def __init__(self) -> None:
        self.is_armed = True

    @piecework.hookimpl(wrapper=True)
    def piecework_capturer(self) -> Generator[None, Capturer | None, Capturer | None]:
        capturer = yield
        assert capturer is not None
        original = capturer.capture

        def capture(fn: Any) -> Any:
            if self.is_armed and any(tensor.shape[:1] == (4,) for tensor in fn.inputs):
                self.is_armed = False
                raise RuntimeError("planned")
            return original(fn)

        capturer.capture = capture
        return capturer


class Counting(nn.Module):
    """Counts its calls in a buffer, so that a capture that is tried twice would show."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return demo.scale3(x * 2) + self.count


def check_flaky(way: Way, on_failure: str) -> None:
    flaky = Flaky()
    with testing.plugins(flaky, load_installed=True):
        model, twin = Counting().to(way.device), Counting().to(way.device)
        call = way.compile(model, captures=[2, 4, 8], on_failure=on_failure)
        check(call, twin, way.rand(2, 6))
        if on_failure == "error":
            with pytest.raises(CaptureError, match=r"size 4 of Counting can't be captured: .*RuntimeError: planned"):
                call(way.rand(4, 6))
        else:
            with pytest.warns(PieceworkWarning, match="size 4 of Counting can't be captured: .*planned"):
                check(call, twin, way.rand(4, 6))
        assert not flaky.is_armed
        close(model.count, twin.count)
        for n in (2, 4, 8, 4, 2):
            check(call, twin, way.rand(n, 6))
            close(model.count, twin.count)
        for _ in range(4):
            check(call, twin, way.rand(4, 6))
        assert sorted(size.size for size in piecework.report(call).sizes) == [2, 4, 8]


@pytest.mark.parametrize("pieces", ["eager", "inductor"])
@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_c29_capture_that_fails_by_an_exception(pieces: str, on_failure: str) -> None:
    """More stages and kinds of failures: test_capture_failures.py."""
    check_flaky(Way(3, pieces, is_captured=True), on_failure)


@pytest.mark.cuda
@pytest.mark.parametrize("pieces", ["eager", "inductor"])
@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_c29_capture_on_the_device_that_fails_by_an_exception(pieces: str, on_failure: str) -> None:
    check_flaky(Way(3, pieces, is_captured=True, device="cuda"), on_failure)


def big(x: torch.Tensor) -> torch.Tensor:
    return demo.scale3(x * 2) + x


def test_c29_capture_that_lacks_memory_in_emulation() -> None:
    capturer = EmulatedCapturer(torch.device("cpu"), limit_bytes=4 << 20)

    class Small:
        name = "small"

        @piecework.hookimpl
        def piecework_capturer(self) -> Capturer:
            return capturer

    with testing.plugins(Small(), load_installed=True):
        call = CAPTURED_WAY.compile(big, captures=[2, 64, 1 << 17])  # the last takes 3 MB per tensor
        with pytest.raises(CaptureError, match="size 131072 of big can't be captured: .*limit is"):
            call(torch.randn(1 << 17, 6))
        assert capturer.memory().pool_bytes == 0
        for n in (2, 64, 2):
            check(call, big, torch.randn(n, 6))
        assert sorted(size.size for size in piecework.report(call).sizes) == [2, 64]


@pytest.mark.cuda
def test_c29_capture_that_lacks_memory_of_the_device() -> None:
    with testing.plugins(load_installed=True):
        way = CUDA_CAPTURED_WAY
        gc.collect()
        torch.cuda.empty_cache()
        check(way.compile(big, captures=[4]), big, way.rand(4, 64))  # Kernels are loaded, which takes memory, too.
        x = way.rand(1 << 20, 64)  # 256 MB
        free_bytes, _ = torch.cuda.mem_get_info()
        hog = [torch.empty(free_bytes - (128 << 20), dtype=torch.uint8, device="cuda")]
        call = way.compile(big, captures=[1 << 20])
        try:
            with pytest.raises((CaptureError, torch.OutOfMemoryError), match="memory"):
                call(x)
        finally:
            hog.clear()  # A test that fails keeps its frame, and with it the memory of the whole device.
        torch.cuda.synchronize()
        # What was freed is torch's still, and no other tensor has been made of it: captures are to get it.
        close(way.compile(big, captures=[1 << 20])(x), big(x))
        check(call, big, x)
        check(call, big, way.rand(5, 64))
        torch.cuda.empty_cache()


def test_c29_nothing_is_said_at_exit_after_a_failed_capture() -> None:
    """In a process of its own; a failed first capture of a model, and one of a model that has others."""
    program = """
import torch, demo, piecework
from piecework import CaptureError, testing
from test_cases_capture import Counting, Flaky
from ways import CAPTURED_WAY
with testing.plugins(Flaky()):
    call = CAPTURED_WAY.compile(Counting(), captures=[2, 4])
    call(torch.randn(2, 6))
    try:
        call(torch.randn(4, 6))
    except CaptureError as error:
        kept = error
    print("failed", "planned" in str(kept))
"""
    child = run_child(program, Path(__file__).parent, ROOT / "tests", ROOT / "plugins" / "inductor")
    assert (child.returncode, child.stdout, child.stderr) == (0, "failed True\n", "")


# --- C31 ---


def draws(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dropout in two pieces, and in the op between."""
    a = F.dropout(x, 0.5, True)
    z = case_ops.drops(torch.ones_like(a))
    return a, F.dropout(torch.ones_like(z), 0.5, True), z


def test_c31_random_numbers_in_captured_pieces(way: Way) -> None:
    call = way.compile(draws, captures=[512], splitting_ops=[case_ops.DROPS])
    ones = torch.ones(512, 64, device=way.device)
    first, second = call(ones), call(ones)
    for one, other in zip(first, second, strict=True):
        assert not torch.equal(one, other)
    masks = [result != 0 for result in first]
    for i, mask in enumerate(masks):
        assert 0.47 < mask.float().mean() < 0.53
        assert not any(torch.equal(mask, other) for other in masks[:i])
    torch.manual_seed(7)
    seeded = call(ones)
    torch.manual_seed(7)
    close(call(ones), seeded)
    if way.pieces == "eager":  # Inductor draws other numbers than eager does, by design.
        torch.manual_seed(7)
        close(seeded, draws(ones))


def test_c31_equal_pieces_draw_different_numbers(way: Way) -> None:
    """They share their compiled code."""

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for _ in range(3):
            x = demo.scale3(F.dropout(torch.ones_like(x), 0.5, True))
            results.append(x)
        return tuple(results)

    call = way.compile(model, captures=[64])
    for _ in range(3):
        masks = [result != 0 for result in call(way.rand(64, 32))]
        assert not any(torch.equal(masks[i], masks[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
        assert all(0.4 < mask.float().mean() < 0.6 for mask in masks)


def test_c31_captures_and_padding_take_no_numbers_from_the_caller(eager_way: Way) -> None:
    """Numbers are those of eager, whatever is captured or padded meanwhile: with eager pieces, which draw the same."""
    call = eager_way.compile(draws, captures=[2, 4, 8], splitting_ops=[SplittingOp("cases::drops")])
    ones = [torch.ones(n, 64) for n in (4, 3, 8, 2, 5, 4, 1)]
    torch.manual_seed(3)
    results = [call(x) for x in ones]
    state = torch.get_rng_state()
    torch.manual_seed(3)
    close(results, [draws(x) for x in ones])
    close(state, torch.get_rng_state())
