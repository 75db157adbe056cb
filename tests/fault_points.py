"""Faults at every place where code of others runs: a plugin that fails on demand, and what is checked then.

``POINTS`` is the table of these places; what the core could call and the table lacks makes a test fail. A fault is
raised at the first time that a point is reached, at the second, and so on, until the scenario ends without one. All of
these, for errors of every kind, are gone through by hand: ``python tests/fault_points.py [POINT ...]``.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import piecework
from capture_models import plans_of
from piecework import (
    Capture,
    CaptureError,
    CompilationConfig,
    CompiledPiece,
    CustomOp,
    CustomOpImplementation,
    Piece,
    PieceworkError,
    PieceworkWarning,
    PluginError,
    SplittingOp,
    counters,
    hookimpl,
    testing,
)
from piecework.forward import compile_lock
from piecework.testing import EmulatedCapturer

# --- the faults ---------------------------------------------------------------------------------


class Faults:
    """Counts how often each point is reached, and raises or answers wrongly when it is told to."""

    def __init__(self) -> None:
        self.num_reached: Counter[str] = Counter()
        self.planned: tuple[str, int, BaseException] | None = None
        self.has_fired = False
        self.is_armed = True

    def plan(self, point: str, number: int, error: BaseException) -> None:
        """Raise an error when a point is reached for that time, from 1, counted from the start."""
        self.planned, self.has_fired = (point, number, error), False

    @contextlib.contextmanager
    def disarmed(self) -> Iterator[None]:
        """Let nothing fail in a block."""
        is_armed, self.is_armed = self.is_armed, False
        try:
            yield
        finally:
            self.is_armed = is_armed

    def reach(self, point: str) -> None:
        self.num_reached[point] += 1
        if self.planned is not None and not self.has_fired and self.is_armed:
            wanted, number, error = self.planned
            if (point, self.num_reached[point]) == (wanted, number):
                self.has_fired = True
                raise error


faults = Faults()


class FaultyCapturer(EmulatedCapturer):
    """Every method may fail."""

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        faults.reach("Capturer.session")
        with super().session():
            yield
        faults.reach("leaving Capturer.session")

    def capture(self, fn: Callable[[], tuple[torch.Tensor, ...]]) -> Capture:
        faults.reach("Capturer.capture")
        captured = super().capture(fn)
        replay = captured.replay

        def faulty_replay() -> None:
            faults.reach("Capture.replay")
            replay()

        faults.reach("after Capturer.capture")
        return Capture(faulty_replay, captured.outputs)

    def memory(self) -> Any:
        faults.reach("Capturer.memory")
        return super().memory()

    def release(self) -> None:
        faults.reach("Capturer.release")
        super().release()

    def refuses(self, graph: torch.fx.GraphModule) -> str | None:
        faults.reach("Capturer.refuses")
        if any(node.op == "call_function" and node.target is torch.tanh for node in graph.graph.nodes):
            return "it has a tanh, so that it runs between the graphs"
        return None

    def warm_up(self, fn: Callable[[], Any]) -> None:
        faults.reach("Capturer.warm_up")
        super().warm_up(fn)

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        faults.reach("Capturer.empty")
        return super().empty(size, stride, dtype)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        faults.reach("Capturer.alias")
        return super().alias(tensor)

    def current_stream(self) -> Any:
        faults.reach("Capturer.current_stream")
        return super().current_stream()

    def wait_for(self, stream: Any) -> bool:
        faults.reach("Capturer.wait_for")
        return super().wait_for(stream)


def triple(x: torch.Tensor) -> torch.Tensor:
    faults.reach("SplittingOp.implementation")
    return x * 3


def capturable(size: Any) -> bool:
    faults.reach("SplittingOp.capturable")
    return False


def copy_together(op: Any, *sources: torch.Tensor) -> None:
    faults.reach("copy_inputs")
    for destination, source in zip(op.destinations, sources, strict=True):
        destination.copy_(source)


class Scale(CustomOp, op_name="fault_scale"):
    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def scale_by_adding(op: Any, x: torch.Tensor) -> torch.Tensor:
    return x + x


class Faulty:
    """Implements every hook."""

    name = "faulty"

    @hookimpl
    def piecework_custom_op_enabled(self, op_name: str) -> bool:
        faults.reach("piecework_custom_op_enabled")
        return True

    @hookimpl
    def piecework_custom_op_implementations(self, op_name: str) -> Any:
        faults.reach("piecework_custom_op_implementations")
        if op_name == "copy_inputs":
            return [CustomOpImplementation(copy_together)]
        return [CustomOpImplementation(scale_by_adding)]

    @hookimpl
    def piecework_splitting_ops(self) -> Any:
        faults.reach("piecework_splitting_ops")
        return [SplittingOp("models::scale3", implementation=triple, capturable=capturable)]

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        faults.reach("piecework_compile_piece")

        def run(*inputs: Any) -> Any:
            faults.reach("CompiledPiece.run")
            return piece.graph.forward(*inputs)

        def save() -> bytes:
            faults.reach("CompiledPiece.save")
            return b""

        return CompiledPiece(run, save=save)

    @hookimpl
    def piecework_capturer(self, device: torch.device) -> FaultyCapturer:
        faults.reach("piecework_capturer")
        return FaultyCapturer(device)


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A place where code of others runs.

    Attributes:
        name: as ``Faults`` counts it.
        preparing: the words of the ``PluginError`` where it fails in a hook; None where that can't be.
        capturing: the words of the ``CaptureError`` where it fails while a size is captured.
        calling: the words of the note where it fails in a call: what it raises comes through as it is.
    """

    name: str
    preparing: str | None = None
    capturing: str | None = None
    calling: str | None = None


WHO = r"plugin 'faulty' \(registered by this program\)"
SIZE = r"sizes? (\d )?of Model can't be captured: .*"
BY_CAPTURER = rf"{SIZE}{WHO} raised "
POINTS = [
    Point(
        "piecework_custom_op_enabled", preparing=f"{WHO} failed in piecework_custom_op_enabled: "
    ),  # at the first capture, too: for copy_inputs
    Point("piecework_custom_op_implementations", preparing=f"{WHO} failed in piecework_custom_op_implementations: "),
    Point("piecework_splitting_ops", preparing=f"{WHO} failed in piecework_splitting_ops: "),
    Point("piecework_compile_piece", preparing=rf"{WHO} failed in piecework_compile_piece for 'piece_\d"),
    Point("piecework_capturer", preparing=f"{WHO} failed in piecework_capturer: "),
    Point(
        "CompiledPiece.run",
        capturing=rf"{SIZE}piece_\d, compiled by {WHO}, failed (in its warm-up|while it was recorded): ",
        calling=rf"raised in piece_\d( to piece_\d \(.*\))?, compiled by {WHO}, of Model",
    ),
    Point("CompiledPiece.save"),
    Point("SplittingOp.implementation", calling=r"raised in splitting op models::scale3 \(.*\) of Model"),
    Point("SplittingOp.capturable", capturing=rf"{SIZE}capturable of splitting op 'models::scale3' raised "),
    Point(
        "copy_inputs",
        capturing=rf"the copy of the inputs of Model can't be prepared: copy_together of {WHO} of custom op",
        calling=rf"raised in the copy of the inputs by copy_together of {WHO} of Model",
    ),
    Point("Capturer.session", capturing=BY_CAPTURER),
    Point("leaving Capturer.session", capturing=BY_CAPTURER),
    Point("Capturer.capture", capturing=BY_CAPTURER),
    Point("after Capturer.capture", capturing=BY_CAPTURER),
    Point("Capturer.warm_up", capturing=BY_CAPTURER),
    Point("Capturer.empty", capturing=BY_CAPTURER),
    Point("Capturer.alias", capturing=BY_CAPTURER),
    Point("Capturer.memory", capturing=rf"({SIZE})?{WHO} raised "),
    Point("Capturer.refuses", capturing=BY_CAPTURER),
    Point("Capturer.release", capturing=f"{WHO} raised "),
    Point("Capturer.current_stream", capturing=f"{WHO} raised ", calling=f"raised in the capturer, {WHO}, of Model"),
    Point("Capturer.wait_for", capturing=f"{WHO} raised "),
    Point("Capture.replay", calling=r"raised in piece_\d.*of Model"),
]
BY_NAME = {point.name: point for point in POINTS}


# --- the scenario -------------------------------------------------------------------------------


class Model(nn.Module):
    """Three pieces, the second of which is not captured; writes and draws random numbers in the last one only."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = Scale()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.ops.models.scale3(self.scale(self.linear(x)) + y)
        h = torch.ops.models.scale3(torch.tanh(h))
        self.count.add_(1)
        y.add_(1)
        return h + torch.rand_like(h) + self.count


def arguments(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 4), torch.randn(size, 4)


Step = tuple[int, Callable[[Any, tuple[torch.Tensor, ...]], Any]]


def call_it(call: Any, given: tuple[torch.Tensor, ...]) -> Any:
    return call(*given)


def call_on_another_stream(call: Any, given: tuple[torch.Tensor, ...]) -> Any:
    with testing.emulated.stream("another"):
        return call(*given)


def capture_it(call: Any, given: tuple[torch.Tensor, ...]) -> None:
    piecework.capture(call, [4], given)


def report_it(call: Any, given: tuple[torch.Tensor, ...]) -> None:
    piecework.report(call)


def release_it(call: Any, given: tuple[torch.Tensor, ...]) -> None:
    piecework.release(call)


SCENARIO: list[Step] = [
    (2, call_it),  # traced, compiled, captured
    (3, call_it),  # captured
    (5, call_it),  # not captured
    (2, call_it),
    (2, call_on_another_stream),
    (4, capture_it),
    (4, call_it),
    (4, report_it),
    (4, release_it),  # so that the calls after the scenario begin anew
]
CAPTURED = (2, 3, 4)
NUM_GRAPHS = 2


class Attempt:
    """A model on its way through the scenario, beside one that runs eagerly."""

    def __init__(self, on_failure: str) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.reference = copy.deepcopy(self.model)
        config = CompilationConfig(level=3, capture_sizes=CAPTURED, max_padding_ratio=1, on_failure=on_failure)  # pyright: ignore[reportArgumentType]
        self.call = piecework.compile(self.model, config=config, dynamic_arg_dims={"x": 0, "y": 0})
        self.pool: Any = None

    def state(self, given: tuple[torch.Tensor, ...]) -> tuple[Any, list[torch.Tensor]]:
        """What a call that fails must leave as it was."""
        modes = (
            *(gc.isenabled(), gc.get_freeze_count(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            *(torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
            *(torch.compiler.is_compiling(), torch._C._len_torch_dispatch_stack()),
            *(type(self.call).__name__, counters.num_graph_replays),
        )
        tensors = [*self.model.state_dict().values(), *given, torch.get_rng_state()]
        return modes, [tensor.clone() for tensor in tensors]

    def check_nothing_is_held(self) -> None:
        """No lock, no session, nothing that makes other calls run uncaptured."""
        locks: list[Any] = [compile_lock._lock]
        if piecework.api.forward_of(self.call, "test").compiled is not None:
            pool = plans_of(self.call).pool
            assert isinstance(pool.capturer, EmulatedCapturer)
            assert not pool.is_busy and not pool.capturer._is_in_session
            assert not plans_of(self.call).captures.is_recording
            locks.append(pool.lock)
        for lock in locks:
            assert is_free(lock)

    def take(self, step: Step, seed: int, *, may_raise: bool) -> BaseException | None:
        """Do one step; return what it raised. One that succeeds is compared with eager."""
        size, do = step
        torch.manual_seed(seed)
        given = arguments(size)
        expected_given = tuple(tensor.clone() for tensor in given)
        before = self.state(given)
        try:
            result = do(self.call, given)
        except BaseException as error:  # whatever was planned, interrupts too
            if not may_raise:
                raise
            after = self.state(given)
            assert after[0] == before[0]
            torch.testing.assert_close(after[1], before[1])
            self.check_nothing_is_held()
            return error
        self.check_nothing_is_held()
        if result is not None:
            torch.manual_seed(seed)
            arguments(size)  # moves the generator
            with faults.disarmed():
                expected = self.reference(*expected_given)
            torch.testing.assert_close(result, expected)
            torch.testing.assert_close(given, expected_given)
            torch.testing.assert_close(self.model.state_dict(), self.reference.state_dict())
        return None


def is_free(lock: Any) -> bool:
    """Whether another thread could take a lock."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


@dataclass
class Outcome:
    has_fired: bool
    raised: list[BaseException]
    warned: list[str]
    step: int = -1


def run_scenario(on_failure: str, point: str, number: int, error: BaseException) -> Outcome:
    """Go through the scenario with one fault; each step that fails is taken once more."""
    global faults
    faults = Faults()
    faults.plan(point, number, error)
    counters.reset()
    torch._dynamo.reset()
    outcome = Outcome(False, [], [])
    with testing.plugins(Faulty()), torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attempt = Attempt(on_failure)
        for index, step in enumerate(SCENARIO):
            was_fired = faults.has_fired
            raised = attempt.take(step, index, may_raise=not was_fired)
            if faults.has_fired and not was_fired:
                outcome.step = index
            if raised is not None:
                outcome.raised.append(raised)
                assert attempt.take(step, index, may_raise=False) is None
        faults.is_armed = False
        for _ in range(6):  # A size that failed with on_failure="eager" is tried again after some calls.
            for size in (2, 3):
                attempt.take((size, call_it), size, may_raise=False)
        assert {2, 3} <= {*plans_of(attempt.call).plans}
        with counters.expect(num_graph_captures=0, num_graph_replays=2 * NUM_GRAPHS):
            for size in (2, 3):
                attempt.take((size, call_it), size, may_raise=False)
    outcome.has_fired = faults.has_fired
    outcome.warned = [str(warning.message) for warning in caught if warning.category is PieceworkWarning]
    return outcome


def chain_of(error: BaseException) -> list[BaseException]:
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


# --- errors -------------------------------------------------------------------------------------


def check_error(point: Point, raised: BaseException, planned: BaseException) -> None:
    """It is of the documented class, says whose fault it is, and has the original behind it."""
    if not isinstance(planned, Exception):
        assert raised is planned and not hasattr(raised, "__notes__")
    elif raised is planned and isinstance(raised, PieceworkError):
        assert not hasattr(raised, "__notes__")  # One of ours comes through unchanged.
    elif raised is planned:
        assert point.calling is not None, raised
        (note,) = raised.__notes__  # pyright: ignore[reportAttributeAccessIssue]
        assert re.search(point.calling, note), note
    else:
        words = point.capturing if isinstance(raised, CaptureError) else point.preparing
        if isinstance(planned, CaptureError):
            words = f"{SIZE}|the copy of the inputs of Model can't be prepared: "
        if isinstance(planned, torch.OutOfMemoryError) and isinstance(raised, CaptureError):
            words = rf"(sizes? (\d )?of Model can't be captured: |{WHO} raised |can't be prepared: ).*planned"
        else:
            assert isinstance(raised, CaptureError | PluginError)
        assert words is not None and re.search(words, str(raised), re.DOTALL), (words, str(raised))
        assert "planned" in str(raised)
        assert any(cause is planned for cause in chain_of(raised))


def check_point(point: Point, kind: type[BaseException], on_failure: str, numbers: Iterable[int]) -> int:
    """Let a point fail at the first time, the second and so on, each in a run of its own; return how often."""
    num_fired = 0
    for number in numbers:
        planned = kind("planned")
        outcome = run_scenario(on_failure, point.name, number, planned)
        if not outcome.has_fired:
            assert not outcome.raised and not outcome.warned
            break
        num_fired += 1
        if outcome.raised:
            (raised,) = outcome.raised
            assert not outcome.warned
            check_error(point, raised, planned)
        else:
            assert on_failure == "eager" and isinstance(planned, Exception), (point.name, number)
            (text,) = outcome.warned
            assert "planned" in text
            assert re.search("Model answers size . uncaptured: |of Model runs eagerly, since compiling it failed", text)
    return num_fired


# --- by hand ------------------------------------------------------------------------------------

KINDS = (ValueError, torch.OutOfMemoryError, CaptureError, KeyboardInterrupt, SystemExit)


def main(names: Sequence[str]) -> None:
    """Go through every time that each point is reached, for errors of every kind."""
    for point in [BY_NAME[name] for name in names] or POINTS:
        for kind in KINDS:
            for on_failure in ("error", "eager"):
                start = time.perf_counter()
                num_fired = check_point(point, kind, on_failure, itertools.count(1))
                seconds = time.perf_counter() - start
                print(f"{point.name}: {num_fired} faults, {kind.__name__}, {on_failure}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
