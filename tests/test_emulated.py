"""The emulated capturer: what every capturer does, and what it does to show mistakes on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import standalone_compile

from capturer_conformance import CASES, Case, record
from piecework import CaptureError, Recordable
from piecework.testing import EmulatedCapturer, emulated
from piecework.testing.arena import Arena, index_poison

CPU = torch.device("cpu")
INDEX_POISON = index_poison(torch.int64)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conforms(case: Case) -> None:
    case(EmulatedCapturer(CPU, limit_bytes=64 << 20))


@pytest.fixture
def capturer() -> EmulatedCapturer:
    return EmulatedCapturer(CPU)


# --- memory ---------------------------------------------------------------------------------------


def test_an_arena_carves_the_first_gap_that_fits() -> None:
    arena = Arena()
    blocks = [arena.take(size, torch.uint8) for size in (1000, 300, 1000, 300)]
    places = [block.data_ptr() for block in blocks]
    assert all(place % 256 == 0 for place in places)
    num_bytes = arena.num_bytes
    del blocks[2], blocks[0]
    assert arena.take(800, torch.uint8).data_ptr() == places[0]
    kept = [arena.take(256, torch.uint8) for _ in range(3)]
    assert [block.data_ptr() - places[0] for block in kept] == [0, 256, 512]
    assert arena.take(900, torch.uint8).data_ptr() == places[2]
    assert arena.num_bytes == num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_static_memory_is_nan_at_first(capturer: EmulatedCapturer, dtype: torch.dtype) -> None:
    with capturer.session():
        assert capturer.empty((3,), (1,), dtype).to(torch.complex64).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_static_integers_are_no_index_at_first(capturer: EmulatedCapturer, dtype: torch.dtype) -> None:
    with capturer.session():
        ids = capturer.empty((3,), (1,), dtype)
    with pytest.raises(IndexError):
        torch.ones(1000)[ids]


def test_an_output_is_poison_until_the_first_replay(capturer: EmulatedCapturer) -> None:
    capture = record(capturer, lambda x: (x + 1,), torch.ones(3))
    assert capture.outputs[0].isnan().all()


def test_a_replay_poisons_its_outputs_before_it_runs(capturer: EmulatedCapturer) -> None:
    seen = []

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(outputs[0].tolist() if outputs else None)
        return (x + 1,)

    outputs: tuple[torch.Tensor, ...] = ()
    capture = record(capturer, run, torch.ones(2, dtype=torch.int64))
    outputs = capture.outputs
    capture.replay()
    outputs[0].fill_(5)
    capture.replay()
    assert seen == [None, [INDEX_POISON] * 2, [INDEX_POISON] * 2]
    assert outputs[0].tolist() == [2, 2]


def test_memory_read_after_it_was_given_away_shows_as_wrong_numbers(capturer: EmulatedCapturer) -> None:
    x = torch.ones(8)
    first = record(capturer, lambda x: (x + 1,), x)
    first.replay()
    alias = capturer.alias(first.outputs[0])
    del first
    record(capturer, lambda x: (x + 1,), x)
    assert alias.isnan().all()


def test_graphs_hold_neither_their_static_inputs_nor_their_outputs(capturer: EmulatedCapturer) -> None:
    with capturer.session():
        static = capturer.empty((64,), (1,), torch.float32)
        place = static.data_ptr()
        replay = capturer.capture(Recordable("piece", lambda s: (s + 1, s), (static,))).replay
        del static
        assert capturer.empty((64,), (1,), torch.float32).data_ptr() == place
    replay()


def test_indices_that_are_poison_do_no_harm_to_a_capture(capturer: EmulatedCapturer) -> None:
    table = torch.arange(10.0)
    with capturer.session():
        ids = capturer.empty((3,), (1,), torch.int64)
        before = ids.tolist()
        capture = capturer.capture(Recordable("piece", lambda t, i: (t[i], i + 1), (table, ids)))
        expanded = capture.outputs[1].expand(2, 3)
        other = capturer.capture(Recordable("next", lambda t, i: (t[i],), (table, expanded)))
    assert ids.tolist() == before
    ids.copy_(torch.tensor([1, 2, 3]))
    capture.replay()
    other.replay()
    assert capture.outputs[0].tolist() == [1.0, 2.0, 3.0]
    assert other.outputs[0].tolist() == [[2.0, 3.0, 4.0]] * 2


def test_graphs_cost_driver_memory_as_long_as_their_replay_exists(capturer: EmulatedCapturer) -> None:
    captures = [record(capturer, lambda x: (x + 1,), torch.ones(3)) for _ in range(3)]
    assert capturer.memory().driver_bytes == 3 * emulated.DRIVER_BYTES
    replay = captures.pop().replay
    captures.clear()
    assert capturer.memory().driver_bytes == emulated.DRIVER_BYTES
    del replay
    assert capturer.memory().driver_bytes == 0


def test_the_limit_counts_the_pool_alone_and_says_the_sizes() -> None:
    capturer = EmulatedCapturer(CPU, limit_bytes=4096)
    assert capturer.memory().free_bytes == 4096
    with capturer.session():
        held = capturer.empty((3, 256), (256, 1), torch.float32)
        assert capturer.memory().free_bytes == 1024
        with pytest.raises(CaptureError, match="holds 3072 bytes and needs 2048 more, its limit is 4096"):
            capturer.empty((512,), (1,), torch.float32)
        del held
        capturer.empty((512,), (1,), torch.float32)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda x: (x * int(x.sum()),), "reads a number from a tensor"),
        (lambda x: (x if x.sum() > 0 else -x,), "reads a number from a tensor"),
        (lambda x: (torch.masked_select(x, x > 0),), r"aten::masked_select.*inside a custom op that is a splitting op"),
        (lambda x: (torch.unique(x),), "aten::_unique2"),
        (lambda x: (x[x > 0],), "mask"),
        (lambda x: (x.index_put_((x > 0,), x + 1),), "mask"),
        (lambda x: (x * torch.equal(x, x),), "aten::equal"),
        (lambda x: (x.repeat_interleave(x.long()),), "aten::repeat_interleave"),
    ],
)
@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_what_a_device_refuses_is_named(run: object, words: str, in_inference_mode: bool) -> None:
    capturer = EmulatedCapturer(CPU)
    with torch.inference_mode(in_inference_mode):
        x = torch.ones(3)
        with pytest.raises(CaptureError, match=f"^layers.3 can't be captured: .*{words}"):
            record(capturer, run, x, name="layers.3")  # pyright: ignore[reportArgumentType] - a list of lambdas
    assert x.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "run",
    [
        lambda x: (x[torch.zeros(3, dtype=torch.long)],),
        lambda x: (x.clone().masked_fill_(x > 0, 2),),
        lambda x: (torch.where(x > 0, x, 0),),
        lambda x: (x.clone().index_put_((x > 0,), torch.tensor(2.0)),),
        lambda x: (x.repeat_interleave(torch.full((3,), 2), output_size=6),),
        lambda x: (torch.nn.functional.linear(x, x[None]),),
    ],
)
@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_what_a_device_records_is_recorded(run: object, in_inference_mode: bool) -> None:
    capturer = EmulatedCapturer(CPU)
    with torch.inference_mode(in_inference_mode):
        x = torch.ones(3)
        capture = record(capturer, run, x)  # pyright: ignore[reportArgumentType] - a list of lambdas
        capture.replay()
        torch.testing.assert_close(capture.outputs, run(x))  # pyright: ignore[reportCallIssue]


def test_an_op_marked_as_unsafe_for_graphs_is_refused(capturer: EmulatedCapturer) -> None:
    with torch.library._scoped_library("emulated_test", "DEF") as library:
        library.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        library.impl("unsafe", lambda x: x + 1, "CompositeExplicitAutograd")
        with pytest.raises(CaptureError, match=r"emulated_test::unsafe is marked as unsafe .*'emulated_test::unsafe'"):
            record(capturer, torch.ops.emulated_test.unsafe, torch.ones(3))


def test_what_the_body_of_an_op_reads_is_refused_and_the_op_is_named(capturer: EmulatedCapturer) -> None:
    with torch.library._scoped_library("emulated_test", "DEF") as library:
        for name in ("inner", "outer", "lists", "quiet"):
            library.define(f"{name}(Tensor x) -> Tensor")
        ops = torch.ops.emulated_test
        bodies = {
            "inner": lambda x: x * float(x.sum()),
            "outer": lambda x: ops.inner(x) + 1,
            "lists": lambda x: x * x.tolist()[0],
            "quiet": lambda x: x + x.sum(),
        }
        for name, body in bodies.items():
            library.impl(name, body, "CompositeExplicitAutograd")
        for op, named in ((ops.inner, "inner"), (ops.outer, "inner"), (ops.lists, "lists")):
            with pytest.raises(CaptureError, match=rf"in emulated_test::{named}, .*\['emulated_test::{named}'\]"):
                record(capturer, lambda x, op=op: (op(x) * 2,), torch.ones(3))
        capture = record(capturer, lambda x: (ops.quiet(x),), torch.ones(3))
        capture.replay()
        assert capture.outputs[0].tolist() == [4.0] * 3


def test_a_capture_fails_on_purpose_after_the_work_was_run() -> None:
    capturer = EmulatedCapturer(CPU, fail_at=2, error=torch.OutOfMemoryError("on purpose"))
    x, calls = torch.ones(3), []

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(x)
        return (x.add_(1),)

    record(capturer, run, x, writes=(0,))
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        record(capturer, run, x, writes=(0,))
    record(capturer, run, x, writes=(0,))
    assert (len(calls), capturer.num_captures, x.tolist()) == (3, 3, [1.0] * 3)
    with pytest.raises(CaptureError, match="fail_at"):
        record(EmulatedCapturer(CPU, fail_at=1), run, x, writes=(0,))


# --- streams --------------------------------------------------------------------------------------


def test_streams_are_told_apart_and_waits_are_noted(capturer: EmulatedCapturer) -> None:
    assert capturer.current_stream() == "default"
    with emulated.stream("side"):
        assert capturer.current_stream() == "side"
        assert capturer.wait_for("default")
    assert capturer.current_stream() == "default"
    assert capturer.waits == [("side", "default")]
    with emulated.stream("side", is_recorded=True):
        assert not capturer.wait_for("default")
    assert capturer.waits == [("side", "default")]


def test_pieces_compiled_by_inductor_can_be_captured(capturer: EmulatedCapturer) -> None:
    graph = torch.fx.symbolic_trace(lambda x, w: (torch.relu(x @ w) + 1, x.sum(0)))
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    with torch.no_grad():
        compiled = standalone_compile(graph, [x, weight], dynamic_shapes="from_example_inputs")
    capture = record(capturer, compiled, x, weight)
    x.copy_(torch.randn(3, 4))
    capture.replay()
    torch.testing.assert_close(capture.outputs, (torch.relu(x @ weight) + 1, x.sum(0)))
