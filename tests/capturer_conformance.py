"""What every capturer has to do: the same list runs on the emulated one and on a card.

Each entry of ``CASES`` takes a fresh capturer; its device is the capturer's.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from piecework import Capture, CaptureError, Capturer, Recordable

Case = Callable[[Capturer], None]
CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def record(
    capturer: Capturer,
    run: Callable[..., tuple[torch.Tensor, ...]],
    *inputs: torch.Tensor,
    writes: tuple[int, ...] = (),
    name: str = "piece",
) -> Capture:
    """Capture one thing in a session of its own."""
    with capturer.session():
        return capturer.capture(Recordable(name, run, inputs, writes))


def ones(capturer: Capturer, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size, dtype=dtype, device=capturer.device)


def replayed(capture: Capture) -> list[Any]:
    capture.replay()
    return [output.tolist() for output in capture.outputs]


def assert_works(capturer: Capturer) -> None:
    """The capturer captures, and random numbers come outside of captures."""
    torch.rand(4, device=capturer.device)
    x = ones(capturer, 4)
    capture = record(capturer, lambda x: (x * 3 + torch.rand_like(x) * 0,), x)
    assert replayed(capture) == [[3.0] * 4]


# --- results --------------------------------------------------------------------------------------


@case
def replays_follow_the_contents_of_their_inputs(capturer: Capturer) -> None:
    x, p = ones(capturer, 3), ones(capturer, 3)
    capture = record(capturer, lambda x, p: (x + p, x * p), x, p)
    places = [output.data_ptr() for output in capture.outputs]
    for value in (2.0, 5.0):
        x.fill_(value)
        assert replayed(capture) == [[value + 1] * 3, [value] * 3]
    p.mul_(4)
    assert replayed(capture) == [[9.0] * 3, [20.0] * 3]
    assert [output.data_ptr() for output in capture.outputs] == places


@case
def any_function_without_arguments_can_be_captured(capturer: Capturer) -> None:
    x = ones(capturer, 3)
    with capturer.session():
        capture = capturer.capture(lambda: (x + 1,))
    x.fill_(5)
    assert replayed(capture) == [[6.0] * 3]


@case
def data_given_to_a_parameter_later_is_not_seen(capturer: Capturer) -> None:
    x, p = ones(capturer, 3), torch.nn.Parameter(ones(capturer, 3))
    capture = record(capturer, lambda x, p: (x + p,), x, p)
    before = p.data
    p.data = torch.full_like(before, 10)
    assert replayed(capture) == [[2.0] * 3]
    before.fill_(3)
    assert replayed(capture) == [[4.0] * 3]


@case
def a_capture_leaves_what_it_writes_and_each_replay_writes_once(capturer: Capturer) -> None:
    x, cache = ones(capturer, 3), ones(capturer, 2, 3)

    def run(x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache[0].add_(x)
        return (cache.sum(0),)

    capture = record(capturer, run, x, cache, writes=(1,))
    assert cache.tolist() == [[1.0] * 3, [1.0] * 3]
    assert replayed(capture) == [[3.0] * 3]
    assert replayed(capture) == [[4.0] * 3]
    assert cache.tolist() == [[3.0] * 3, [1.0] * 3]


@case
def a_returned_input_stays_that_input(capturer: Capturer) -> None:
    x = ones(capturer, 2, 3)
    capture = record(capturer, lambda x: (x, x[1], x + 1), x)
    assert capture.outputs[0].data_ptr() == x.data_ptr()
    x.fill_(2)
    assert replayed(capture) == [[[2.0] * 3] * 2, [2.0] * 3, [[3.0] * 3] * 2]
    x.fill_(7)
    assert capture.outputs[1].tolist() == [7.0] * 3


@case
def expanded_and_aliased_outputs_keep_their_form(capturer: Capturer) -> None:
    x = ones(capturer, 3)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return y[:, None].expand(3, 4), y, y.view(torch.int32), y[1:]

    capture = record(capturer, run, x)
    expanded, y, bits, tail = capture.outputs
    assert expanded.stride() == (1, 0)
    assert (tail.storage_offset(), bits.dtype) == (1, torch.int32)
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    capture.replay()
    assert expanded.tolist() == [[2.0] * 4, [3.0] * 4, [4.0] * 4]
    y.fill_(9)
    assert expanded.tolist() == [[9.0] * 4] * 3
    assert tail.tolist() == [9.0, 9.0]


@case
def a_pending_conjugation_is_not_lost(capturer: Capturer) -> None:
    z = torch.complex(ones(capturer, 2), ones(capturer, 2))
    capture = record(capturer, lambda z: ((z * 2).conj(),), z)
    assert replayed(capture) == [[2 - 2j] * 2]
    assert capturer.alias(capture.outputs[0]).tolist() == [2 - 2j] * 2


@case
def static_memory_that_is_returned_stays_where_it_is(capturer: Capturer) -> None:
    with capturer.session():
        static = capturer.empty((3,), (1,), torch.float32)
        capture = capturer.capture(lambda: (static, static + 1))
    assert capture.outputs[0].data_ptr() == static.data_ptr()
    static.fill_(2)
    assert replayed(capture) == [[2.0] * 3, [3.0] * 3]


@case
def outputs_without_elements_are_fine(capturer: Capturer) -> None:
    x = ones(capturer, 3)
    capture = record(capturer, lambda x: (x[:0] + 1, x.new_empty(2, 0), x * 2), x)
    assert replayed(capture) == [[], [[], []], [2.0] * 3]


@case
def a_capture_that_does_nothing_is_fine(capturer: Capturer) -> None:
    x = ones(capturer, 3)
    capture = record(capturer, lambda x: (x,), x)
    nothing = record(capturer, lambda: ())
    nothing.replay()
    assert replayed(capture) == [[1.0] * 3]


@case
def results_are_right_in_inference_mode_too(capturer: Capturer) -> None:
    def run(x: torch.Tensor, y: torch.Tensor, static: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y[1:].add_(static[1:])
        return x + y, static

    with torch.inference_mode():
        x, y = ones(capturer, 3), ones(capturer, 3)
        with capturer.session():
            static = capturer.empty((3,), (1,), torch.float32)
            capture = capturer.capture(Recordable("piece", run, (x, y, static), writes=(1,)))
        static.fill_(1)
        assert replayed(capture) == [[2.0, 3.0, 3.0], [1.0] * 3]
    assert replayed(capture) == [[2.0, 4.0, 4.0], [1.0] * 3]
    static[1:].fill_(2)  # An error for a tensor that was made in inference mode.
    capture.outputs[0][1:].fill_(2)


# --- random numbers -------------------------------------------------------------------------------


@case
def replays_advance_the_generator_and_a_capture_does_not(capturer: Capturer) -> None:
    x = ones(capturer, 8)
    torch.manual_seed(7)
    expected = torch.rand(8, device=capturer.device)
    torch.manual_seed(7)
    capture = record(capturer, lambda x: (x * torch.rand_like(x),), x)
    torch.testing.assert_close(torch.rand(8, device=capturer.device), expected)
    first, second = replayed(capture), replayed(capture)
    assert first != second


# --- memory ---------------------------------------------------------------------------------------


@case
def empty_gives_the_form_that_was_asked_for(capturer: Capturer) -> None:
    forms = [((0, 3), (3, 1)), ((), ()), ((2, 3), (3, 1)), ((2, 3), (1, 2)), ((2, 3), (8, 2)), ((4, 2), (0, 1))]
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn]
    with capturer.session():
        for dtype in dtypes:
            for size, stride in forms:
                made = capturer.empty(size, stride, dtype)
                assert (made.size(), made.stride(), made.dtype) == (size, stride, dtype)
                assert made.device == torch.empty(0, device=capturer.device).device
                assert made.data_ptr() % 256 == 0


@case
def an_alias_has_the_form_of_its_tensor(capturer: Capturer) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn]
    with capturer.session():
        for dtype in dtypes:
            made = capturer.empty((6, 4), (4, 1), dtype)
            raw = made.view(torch.uint8) if dtype is not torch.bool else made
            raw.copy_((torch.arange(raw.numel()) % 2).view(raw.shape))
            views = [made, made[2:5, 1:3], made[0, 0], made[:0], made.t(), made[1, :1].expand(3)]
            for view in views:
                alias = capturer.alias(view)
                assert (alias.size(), alias.stride(), alias.dtype) == (view.size(), view.stride(), view.dtype)
                assert alias.device == view.device
                if view.numel():
                    assert alias.data_ptr() == view.data_ptr()
                    assert alias.untyped_storage()._cdata != view.untyped_storage()._cdata
                assert torch.equal(alias.cpu().to(torch.complex64), view.cpu().to(torch.complex64))


@case
def the_storage_of_an_alias_begins_and_ends_with_that_of_its_tensor(capturer: Capturer) -> None:
    with capturer.session():
        blocks = [capturer.empty((6, 4), (4, 1), torch.bfloat16), capturer.empty((300,), (1,), torch.float32)]
        for made in [*blocks, *blocks]:
            view = made[1:]
            alias = capturer.alias(view)
            assert alias.storage_offset() == view.storage_offset()
            assert alias.untyped_storage().data_ptr() == made.data_ptr()
            assert alias.untyped_storage().nbytes() == made.untyped_storage().nbytes()
            assert alias.as_strided((2,), (1,), 0).data_ptr() == made.data_ptr()


@case
def aliases_do_not_end_with_their_session(capturer: Capturer) -> None:
    x = ones(capturer, 3)
    with capturer.session():
        captures = [capturer.capture(Recordable("piece", lambda x, i=i: (x + i,), (x,))) for i in range(3)]
        aliases = [capturer.alias(capture.outputs[0]) for capture in captures]
    capturer.release()
    gc.collect()
    with capturer.session():
        capturer.capture(Recordable("other", lambda x: (x * 7,), (x,)))
    for capture in captures:
        capture.replay()
    assert [alias.tolist() for alias in aliases] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


@case
def an_alias_sees_what_replays_write(capturer: Capturer) -> None:
    x = ones(capturer, 3)
    capture = record(capturer, lambda x: (x + 1,), x)
    alias = capturer.alias(capture.outputs[0])
    x.fill_(4)
    capture.replay()
    assert alias.tolist() == [5.0] * 3


@case
def memory_outside_of_the_pool_is_its_own_alias(capturer: Capturer) -> None:
    x = ones(capturer, 3)
    assert capturer.alias(x) is x


@case
def a_held_output_keeps_its_memory_and_one_let_go_is_used_again(capturer: Capturer) -> None:
    x = ones(capturer, 1000)
    with capturer.session():
        first = capturer.capture(Recordable("first", lambda x: (x + 1,), (x,)))
        place, view = first.outputs[0].data_ptr(), first.outputs[0][10:]
        alias, replay = capturer.alias(first.outputs[0]), first.replay
        del first
        second = capturer.capture(Recordable("second", lambda x: (x + 2,), (x,)))
        assert second.outputs[0].data_ptr() != place
        del view
        third = capturer.capture(Recordable("third", lambda x: (x + 3,), (x,)))
        assert third.outputs[0].data_ptr() == place
    replay()
    assert alias[0].item() == 2
    third.replay()
    assert alias[0].item() == 4


@case
def static_memory_let_go_is_used_again(capturer: Capturer) -> None:
    with capturer.session():
        made = capturer.empty((1000,), (1,), torch.float32)
        place = made.data_ptr()
        del made
        assert capturer.empty((900,), (1,), torch.float32).data_ptr() == place


@case
def intermediates_of_35_sizes_lie_in_the_memory_of_the_largest(capturer: Capturer) -> None:
    weight = torch.randn(256, 256, device=capturer.device) / 16

    def capture_chain(rows: int) -> None:
        static = capturer.empty((rows, 256), (256, 1), torch.float32)
        current = static
        for index in range(10):
            capture = capturer.capture(Recordable(f"{index}", lambda x, w: (torch.relu(x @ w),), (current, weight)))
            kept.append((capture.replay, capturer.alias(capture.outputs[0])))
            current = capture.outputs[0]
        static_inputs.append((capturer.alias(static), capturer.alias(current)))

    kept: list[Any] = []
    static_inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    step = 232 if capturer.device.type == "cuda" else 8
    sizes = [step * (36 - index) for index in range(35)]
    with capturer.session():
        capture_chain(sizes[0])
        alone = capturer.memory().pool_bytes
        for rows in sizes[1:]:
            capture_chain(rows)
    assert alone <= capturer.memory().pool_bytes <= 1.12 * alone
    for index, (static, result) in reversed(list(enumerate(static_inputs))):
        x = torch.randn(sizes[index], 256, device=capturer.device)
        static.copy_(x)
        for replay, _ in kept[10 * index : 10 * index + 10]:
            replay()
        for _ in range(10):
            x = torch.relu(x @ weight)
        torch.testing.assert_close(result, x, rtol=1e-3, atol=1e-3)


@case
def memory_grows_and_is_given_back(capturer: Capturer) -> None:
    x = ones(capturer, 1 << 22)
    capture = record(capturer, lambda x: (x + 1,), x)
    first = capturer.memory()
    assert first.pool_bytes >= 16 << 20
    more = record(capturer, lambda x: (x + 1, x + 2), x)
    second = capturer.memory()
    assert second.pool_bytes >= first.pool_bytes + (16 << 20)
    assert second.driver_bytes >= first.driver_bytes >= 0
    del capture, more
    gc.collect()
    capturer.release()
    assert capturer.memory().pool_bytes < 16 << 20
    assert_works(capturer)


@case
def an_alias_outlives_the_release(capturer: Capturer) -> None:
    x = ones(capturer, 1 << 20)
    capture = record(capturer, lambda x: (x + 1,), x)
    capture.replay()
    alias = capturer.alias(capture.outputs[0])
    del capture
    capturer.release()
    assert alias.sum().item() == 2 << 20
    assert_works(capturer)


# --- refusals -------------------------------------------------------------------------------------


def mask_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x[x > 0],)


def item_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * x.sum().item(),)


def nonzero_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.nonzero(),)


def unique_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.unique(x),)


@case
def what_needs_the_host_is_refused_and_all_works_afterwards(capturer: Capturer) -> None:
    x = ones(capturer, 4)
    earlier = record(capturer, lambda x: (x + 1, torch.rand_like(x)), x)
    held = [output.data_ptr() for output in earlier.outputs]
    for run in (item_of, nonzero_of, mask_of, unique_of):
        with pytest.raises(CaptureError, match=r"layers\.3 .*host synchronisation.*splitting op"):
            record(capturer, run, x, name="layers.3")
        assert_works(capturer)
        x.fill_(2)
        assert replayed(earlier)[0] == [3.0] * 4
        with capturer.session():
            assert capturer.empty((4,), (1,), torch.float32).data_ptr() not in held
    assert capturer.memory().pool_bytes > 0


@case
def a_refusal_in_the_middle_leaves_the_session_usable(capturer: Capturer) -> None:
    x = ones(capturer, 4)
    with capturer.session():
        first = capturer.capture(Recordable("first", lambda x: (x + 1,), (x,)))
        with pytest.raises(CaptureError):
            capturer.capture(Recordable("second", lambda x: item_of(x.add_(1)), (x,), writes=(0,)))
        assert x.tolist() == [1.0] * 4
        static = capturer.empty((4,), (1,), torch.float32)
        third = capturer.capture(Recordable("third", lambda x, s: (x + s,), (first.outputs[0], static)))
    static.fill_(5)
    first.replay()
    assert replayed(third) == [[7.0] * 4]


@case
def what_the_function_raises_passes_through(capturer: Capturer) -> None:
    x = ones(capturer, 4)

    def fails(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.add_(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        record(capturer, fails, x, writes=(0,))
    assert x.tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match=r"shape|size"):
        record(capturer, lambda x: (x @ x.new_empty(5, 5),), x)
    assert_works(capturer)


@case
def too_little_memory_is_said_so_and_all_works_afterwards(capturer: Capturer) -> None:
    x = ones(capturer, 1)
    free_bytes = capturer.memory().free_bytes
    assert free_bytes is not None
    huge = free_bytes // 2  # In elements of four bytes each.
    with pytest.raises(CaptureError, match=r"(?s)piece.*memory") as caught:
        record(capturer, lambda x: (x.new_empty(huge),), x)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert_works(capturer)
    with capturer.session(), pytest.raises(CaptureError, match="memory"):
        capturer.empty((huge,), (1,), torch.float32)
    assert_works(capturer)


# --- sessions, streams, threads -------------------------------------------------------------------


@contextlib.contextmanager
def garbage_collection(enabled: bool) -> Iterator[None]:
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if was else gc.disable)()


@case
def a_session_leaves_garbage_collection_as_it_was(capturer: Capturer) -> None:
    for enabled in (True, False):
        with garbage_collection(enabled):
            for is_frozen in (False, True):
                if is_frozen:
                    gc.freeze()
                with capturer.session():
                    pass
                assert (gc.isenabled(), gc.get_freeze_count() > 10_000) == (enabled, is_frozen)
                with pytest.raises(KeyError), capturer.session():
                    raise KeyError
                assert (gc.isenabled(), gc.get_freeze_count() > 10_000) == (enabled, is_frozen)
                gc.unfreeze()


@case
def a_session_is_not_entered_twice(capturer: Capturer) -> None:
    with capturer.session():
        with pytest.raises(CaptureError, match="a session .* is open"), capturer.session():
            pytest.fail("the block must not be entered")
        x = ones(capturer, 4)
        capture = capturer.capture(Recordable("piece", lambda x: (x + 1,), (x,)))
    assert replayed(capture) == [[2.0] * 4]
    assert_works(capturer)


@case
def captures_are_made_in_a_session(capturer: Capturer) -> None:
    for call in (
        lambda: capturer.capture(lambda: ()),
        lambda: capturer.empty((1,), (1,), torch.float32),
        lambda: capturer.warm_up(lambda: None),
    ):
        with pytest.raises(CaptureError, match="session"):
            call()


@case
def warm_up_runs_once(capturer: Capturer) -> None:
    x, calls = ones(capturer, 3), []
    with capturer.session():
        capturer.warm_up(lambda: calls.append(x.add_(1)))
    assert len(calls) == 1
    assert x.tolist() == [2.0] * 3


@case
def the_stream_of_a_thread_stays_the_same(capturer: Capturer) -> None:
    outside = capturer.current_stream()
    with capturer.session():
        capturer.capture(lambda: ())
    assert capturer.current_stream() == outside
    assert capturer.wait_for(outside)


@case
def threads_capture_one_after_the_other(capturer: Capturer) -> None:
    x = ones(capturer, 64, 64)
    captures: list[Capture] = []

    def work(value: int) -> None:
        captures.append(record(capturer, lambda x: (x @ x + value,), x))
        captures[-1].replay()

    for value in range(3):
        thread = threading.Thread(target=work, args=(value,))
        thread.start()
        thread.join()
    assert len(captures) == 3
    for value, capture in enumerate(captures):
        capture.replay()
        assert capture.outputs[0][0, 0].item() == 64 + value
