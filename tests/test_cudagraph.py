"""The CUDA graph capturer: what every capturer does, on a card, and what only a card shows."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch

import piecework_cudagraph
from capturer_conformance import CASES, Case, assert_works, item_of, ones, record, replayed
from dists import ROOT
from piecework import CaptureError, CompilationConfig, ConfigError, Recordable, read_options
from piecework_cudagraph.capturer import CudaGraphCapturer
from piecework_cudagraph.options import CudaGraphOptions
from piecework_cudagraph.refusals import explain
from piecework_cudagraph.session import garbage_collection_off


@pytest.fixture
def capturer() -> Iterator[CudaGraphCapturer]:
    made = CudaGraphCapturer(torch.device("cuda", 0), CudaGraphOptions())
    yield made
    gc.collect()
    made.release()


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conforms(case: Case, capturer: CudaGraphCapturer) -> None:
    case(capturer)


# --- without a card -------------------------------------------------------------------------------


def test_other_devices_are_left_to_others() -> None:
    assert piecework_cudagraph.piecework_capturer(torch.device("cpu"), CompilationConfig()) is None


def test_options_are_checked() -> None:
    def read(**options: object) -> CudaGraphOptions:
        return read_options(CudaGraphOptions, CompilationConfig(plugin_options={"cudagraph": options}), "cudagraph")

    assert read() == CudaGraphOptions(min_piece_nodes=0)
    assert read(min_piece_nodes=3).min_piece_nodes == 3
    with pytest.raises(ConfigError, match=r"min_piece_node: there is no such option.*did you mean 'min_piece_nodes'"):
        read(min_piece_node=3)
    for wrong in (-1, "3"):
        with pytest.raises(ConfigError, match=r"plugin_options\['cudagraph'\]\.min_piece_nodes: "):
            read(min_piece_nodes=wrong)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore"), "host synchronisation"),
        (RuntimeError("CUDA error: capturing stream has unjoined work"), "a side stream that is left open"),
        (RuntimeError("CUDA error: dependency created on uncaptured work in another stream"), "another stream"),
        (RuntimeError("CUDA error: operation failed due to a previous error during capture"), "something"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "memory.*Tried to allocate 2.00"),
    ],
)
def test_refusals_are_said_in_plain_words(error: RuntimeError, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(explain(error))
    assert "\n" not in str(explain(error))


def test_errors_of_the_program_are_none_of_the_device() -> None:
    assert explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert explain(KeyError("CUDA error")) is None


def test_nothing_is_collected_in_a_session() -> None:
    with garbage_collection_off():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 10_000
    assert gc.isenabled()
    assert gc.get_freeze_count() < 10_000


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    with garbage_collection_off():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000
    gc.unfreeze()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_a_side_stream_left_open_is_refused_and_all_works_afterwards(capturer: CudaGraphCapturer) -> None:
    side = torch.cuda.Stream()

    def run(x: torch.Tensor, *, joins: bool) -> tuple[torch.Tensor, ...]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        if joins:
            torch.cuda.current_stream().wait_stream(side)
        return (y,)

    x = ones(capturer, 4)
    earlier = record(capturer, lambda x: run(x, joins=True), x)
    with pytest.raises(CaptureError, match="piece can't be captured: .* a side stream that is left open"):
        record(capturer, lambda x: run(x, joins=False), x)
    assert_works(capturer)
    assert replayed(earlier) == [[2.0] * 4]


@pytest.mark.cuda
def test_other_waits_for_the_host_are_refused(capturer: CudaGraphCapturer) -> None:
    x = ones(capturer, 4)
    synchronising = (
        lambda x: torch.cuda.synchronize() or (x,),
        lambda x: torch.cuda.current_stream().synchronize() or (x,),
        lambda x: (x.cpu(),),
        lambda x: (x + torch.ones(4).to(x.device),),
    )
    for run in synchronising:
        with pytest.raises(CaptureError, match="host synchronisation"):
            record(capturer, run, x)
        assert_works(capturer)


@pytest.mark.cuda
def test_a_refusal_that_the_function_swallows_is_found(capturer: CudaGraphCapturer) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        try:
            return item_of(x)
        except RuntimeError:
            return (x + 1,)

    with pytest.raises(CaptureError, match="piece can't be captured"):
        record(capturer, run, ones(capturer, 4))
    assert_works(capturer)


@pytest.mark.cuda
def test_an_empty_capture_gives_no_warning(capturer: CudaGraphCapturer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record(capturer, lambda x: (x,), ones(capturer, 4)).replay()


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_workspaces_are_not_in_the_pool(capturer: CudaGraphCapturer, dtype: torch.dtype) -> None:
    x = ones(capturer, 64, 64, dtype=dtype)
    record(capturer, lambda x: (torch.addmm(x[0], x, x), x @ x), x)
    assert capturer.memory().pool_bytes <= 2 << 20


@pytest.mark.cuda
def test_pools_that_a_refusal_replaced_go_with_their_graphs(capturer: CudaGraphCapturer) -> None:
    x = ones(capturer, 1 << 22)
    earlier = record(capturer, lambda x: (x + 1,), x)
    for _ in range(3):
        with pytest.raises(CaptureError):
            record(capturer, item_of, x)
    earlier.replay()
    assert earlier.outputs[0].sum().item() == 2 << 22
    pool_bytes = capturer.memory().pool_bytes
    assert pool_bytes >= 16 << 20
    del earlier
    gc.collect()
    with capturer.session():
        pass
    assert capturer.memory().pool_bytes <= pool_bytes - (16 << 20)


@pytest.mark.cuda
def test_release_gives_memory_back_to_the_device(capturer: CudaGraphCapturer) -> None:
    x = ones(capturer, 1 << 26)
    record(capturer, lambda x: (x + 1,), x)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    gc.collect()
    capturer.release()
    assert torch.cuda.mem_get_info()[0] >= before + (256 << 20)


PROGRAM = """
import torch
from piecework import CaptureError, Recordable
from piecework_cudagraph.capturer import CudaGraphCapturer
from piecework_cudagraph.options import CudaGraphOptions

capturer = CudaGraphCapturer(torch.device("cuda", 0), CudaGraphOptions())
x = torch.ones(4, device="cuda")
with capturer.session():
    kept = [capturer.capture(Recordable("a", lambda x: (x + 1,), (x,)))]
    alias = capturer.alias(kept[0].outputs[0])
    try:
        capturer.capture(Recordable("b", lambda x: (x * x.sum().item(),), (x,)))
    except CaptureError:
        kept.append(capturer.capture(Recordable("c", lambda x: (x + 2,), (x,))))
capturer.release()
del capturer
for capture in kept:
    capture.replay()
print(alias.tolist(), kept[1].outputs[0].tolist())
"""


@pytest.mark.cuda
def test_a_program_ends_well_whatever_is_still_there() -> None:
    paths = [str(ROOT / "core"), str(ROOT / "plugins" / "cudagraph")]
    program = f"import sys; sys.path[:0] = {paths}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, f"{[2.0] * 4} {[3.0] * 4}\n"), done.stderr


# --- streams --------------------------------------------------------------------------------------


def sleep() -> None:
    torch.cuda._sleep(200_000_000)  # About a tenth of a second.


@pytest.mark.cuda
def test_a_session_comes_after_the_work_of_the_caller_and_before_what_follows(capturer: CudaGraphCapturer) -> None:
    x = torch.zeros(1 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.record_stream(torch.cuda.current_stream())
        sleep()
        x.fill_(1)
        with capturer.session():
            y = x + 1

            def work() -> None:
                sleep()
                y.add_(x)

            capturer.warm_up(work)
        assert (y * 1).sum().item() == 3 << 20


@pytest.mark.cuda
def test_a_replay_waits_for_another_stream(capturer: CudaGraphCapturer) -> None:
    x = ones(capturer, 1 << 20)
    capture = record(capturer, lambda x: (x + 1,), x)
    side = torch.cuda.Stream()
    default = capturer.current_stream()
    for slow, fast in ((side, torch.cuda.default_stream()), (torch.cuda.default_stream(), side)):
        x.fill_(1)
        torch.cuda.synchronize()
        with torch.cuda.stream(slow):
            sleep()
            x.fill_(5)
            number = capturer.current_stream()
        with torch.cuda.stream(fast):
            assert capturer.current_stream() != number
            assert capturer.wait_for(number)
            capture.replay()
            assert capture.outputs[0].sum().item() == 6 << 20
    assert capturer.current_stream() == default == 0


@pytest.mark.cuda
def test_nothing_is_replayed_or_captured_while_the_program_captures(capturer: CudaGraphCapturer) -> None:
    x = ones(capturer, 4)
    record(capturer, lambda x: (x + 1,), x)
    outside = capturer.current_stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        inside = capturer.current_stream()
        assert not capturer.wait_for(outside)
        with pytest.raises(CaptureError, match="being captured by somebody else"), capturer.session():
            pytest.fail("the block must not be entered")
        with torch.cuda.stream(torch.cuda.Stream()):
            assert not capturer.wait_for(inside)
    graph.replay()
    assert y.tolist() == [2.0] * 4
    assert capturer.wait_for(inside)
    assert_works(capturer)


@pytest.mark.cuda
def test_small_pieces_are_left_alone_if_asked_for() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x.sin() + 1)
    for min_piece_nodes, why in ((0, None), (2, None), (3, "it has 2 ops, fewer than min_piece_nodes=3")):
        made = CudaGraphCapturer(torch.device("cuda", 0), CudaGraphOptions(min_piece_nodes=min_piece_nodes))
        assert made.refuses(graph) == why


@pytest.mark.cuda
def test_kernels_of_inductor_can_be_captured(capturer: CudaGraphCapturer) -> None:
    x = ones(capturer, 1000)
    compiled = torch.compile(lambda x: torch.relu(x * 3 + 1).cumsum(0))
    with torch.no_grad():
        compiled(x)
    capture = record(capturer, lambda x: (compiled(x),), x)
    capture.replay()
    torch.testing.assert_close(capture.outputs[0], torch.arange(1, 1001, device="cuda") * 4.0)


@pytest.mark.cuda
def test_captures_are_made_on_the_device_of_the_capturer() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    capturer = CudaGraphCapturer(torch.device("cuda", 1), CudaGraphOptions())
    x = ones(capturer, 4)
    assert torch.cuda.current_device() == 0
    with capturer.session():
        static = capturer.empty((4,), (1,), torch.float32)
        capture = capturer.capture(Recordable("piece", lambda x, s: (x + s,), (x, static)))
    assert torch.cuda.current_device() == 0
    assert static.device == capturer.alias(capture.outputs[0]).device == x.device
    static.fill_(2)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        assert replayed(capture) == [[3.0] * 4]
    assert_works(capturer)
