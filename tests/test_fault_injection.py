"""Whatever fails in code of others, at whatever time: the caller learns whose it was, and the next call works."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import fault_program
import piecework
from capture_models import capturing_by, check, compiled, emulated, plans_of, rows, simple
from fault_points import BY_NAME, POINTS, Faulty, FaultyCapturer, Point, Scale, check_point
from fault_program import STAGES
from piecework import (
    Capture,
    CaptureError,
    CompilationConfig,
    CompiledPiece,
    ConfigError,
    CustomOpImplementation,
    PluginError,
    SplittingOp,
    counters,
    hookimpl,
    testing,
)
from piecework.implementations import hook_arguments
from piecework.tools.repro import LEFTOVER_S

NEVER_CALLED = {"CompiledPiece.save"}
"""Until there is a cache of artifacts."""


each_point = pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)


@each_point
def test_a_fault_is_named_and_the_next_call_works(point: Point) -> None:
    assert bool(check_point(point, ValueError, "error", (1, 4))) is (point.name not in NEVER_CALLED)


@each_point
def test_an_interrupt_comes_through_and_the_next_call_works(point: Point) -> None:
    check_point(point, KeyboardInterrupt, "error", (2,))


@each_point
def test_a_fault_is_warned_about_where_failures_run_eagerly(point: Point) -> None:
    check_point(point, ValueError, "eager", (1,))


# --- the table is whole -------------------------------------------------------------------------


def test_every_hook_is_in_the_table_and_is_implemented() -> None:
    hooks = set(hook_arguments())
    assert {name for name in BY_NAME if name.startswith("piecework_")} == hooks
    assert {name for name in vars(Faulty) if name.startswith("piecework_")} == hooks


def test_every_method_of_a_capturer_is_in_the_table() -> None:
    methods = {name for name, value in vars(piecework.Capturer).items() if inspect.isfunction(value)} - {"__init__"}
    assert {name.partition(".")[2] for name in BY_NAME if name.startswith("Capturer.")} == methods
    assert methods <= set(vars(FaultyCapturer))


@pytest.mark.parametrize("answer", [SplittingOp, CompiledPiece, Capture, CustomOpImplementation])
def test_every_function_that_a_hook_answers_with_is_in_the_table(answer: Any) -> None:
    functions = {field.name for field in fields(answer) if "Callable" in str(field.type)}
    covered = {name.partition(".")[2] for name in BY_NAME if name.startswith(f"{answer.__name__}.")}
    if answer is CustomOpImplementation:
        covered = {"function"}  # "copy_inputs"; others are traced
    assert covered == functions


# --- answers of a wrong type --------------------------------------------------------------------


class Answers:
    """Gives what it is told to in place of an answer, from one call on."""

    name = "answers"

    def __init__(self, hook: str, answer: object, first: int) -> None:
        self.answer: object = answer
        self.num_calls = 0

        def answering() -> Any:
            self.num_calls += 1
            return None if self.num_calls < first else self.answer

        answering.__name__ = hook
        setattr(self, hook, hookimpl(answering))


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("hook", [*hook_arguments()])
def test_a_hook_that_answers_with_a_wrong_type_is_named_and_the_next_call_works(hook: str, first: int) -> None:
    plugin = Answers(hook, 3.5, first)
    with testing.plugins(plugin, WithOps), torch.no_grad():
        config = CompilationConfig(level=3, capture_sizes=(2,), max_padding_ratio=1)
        call = piecework.compile(scaled, config=config, dynamic_arg_dims={"x": 0, "y": 0})
        given = rows(2), rows(2)
        if first == 1:
            with pytest.raises(PluginError, match=rf"plugin 'answers' \(.*\) answered {hook} with 3.5, allowed: "):
                call(*given)
        elif hook in ("piecework_splitting_ops", "piecework_capturer"):  # asked once
            check(call, scaled, *given)
            assert plugin.num_calls == 1
            return
        else:
            with pytest.raises(PluginError, match=rf"plugin 'answers' \(.*\) answered {hook} with 3.5, allowed: "):
                call(*given)
        plugin.answer = None
        for n in (2, 3, 2):
            check(call, scaled, rows(n), rows(n))
        assert [*plans_of(call).plans] == [2]


scale = Scale()


def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ops.models.scale3(scale(x) + 1) * 2 - y


class WithOps:
    """What a hook is asked about: ops to cut at, custom ops that are on."""

    @hookimpl(trylast=True)
    def piecework_splitting_ops(self) -> list[str]:
        return ["models::scale3"]

    @hookimpl(trylast=True)
    def piecework_custom_op_enabled(self) -> bool:
        return True

    @hookimpl(trylast=True)
    def piecework_compile_piece(self, piece: piecework.Piece) -> CompiledPiece:
        return CompiledPiece(piece.graph.forward)


# --- whose fault it is --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2**40, 2**70])
def test_a_size_that_no_memory_holds_is_not_the_capturers_fault(size: int) -> None:
    with testing.plugins(), torch.no_grad():
        call = compiled(simple, capture_sizes=())
        with pytest.raises(CaptureError, match=rf"size {size} of simple can't be captured: ") as caught:
            piecework.capture(call, [size], rows(2))
        assert "plugin" not in str(caught.value)
        check(call, simple, rows(2))


def test_a_capturer_that_asks_for_too_much_itself_is_named() -> None:
    class Greedy(type(emulated())):
        def empty(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(2**70)

    words = r"plugin 'own' \(registered by this program\) raised "
    with capturing_by(Greedy(torch.device("cpu"))), torch.no_grad(), pytest.raises(CaptureError, match=words):
        compiled(simple)(rows(2))


def test_an_op_that_gives_a_number_is_named_whatever_it_says_of_itself() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y * y.sum().item()

    op = SplittingOp("aten::item", capturable=True)
    with testing.plugins(), torch.no_grad():
        call = compiled(model, splitting_ops=[op])
        with pytest.raises(CaptureError, match=r"aten::item gives a number .*y.sum\(\).item\(\).*a graph can't follow"):
            call(rows(2))
        check(call, model, rows(5))


def test_the_session_around_many_sizes_is_the_capturers() -> None:
    class Leaving(type(emulated())):
        is_failing = True

        def session(self) -> Any:
            if self.is_failing:
                raise KeyError("odd")
            return super().session()

    capturer = Leaving(torch.device("cpu"))
    with capturing_by(capturer), torch.no_grad():
        call = compiled(simple, capture_sizes=())
        with pytest.raises(
            CaptureError, match=r"sizes of simple can't be captured: plugin 'own' .* raised KeyError: 'odd'"
        ):
            piecework.capture(call, [2, 3], rows(2))
        capturer.is_failing = False
        piecework.capture(call, [2, 3], rows(2))
        check(call, simple, rows(3))


def test_options_of_a_capturer_that_declines_are_checked() -> None:
    import piecework_cudagraph

    with testing.plugins(("cudagraph", piecework_cudagraph)), torch.no_grad():
        call = compiled(simple, plugin_options={"cudagraph": {"min_piece_node": 1}})
        with pytest.raises(ConfigError, match="did you mean 'min_piece_nodes'"):
            call(rows(2))


# --- lack of memory where no plugin's code runs -------------------------------------------------


class Runs:
    """Raises at one of the times that a function of torch is called by a module of the core."""

    def __init__(self, function: Any, module: str, number: int) -> None:
        self.function, self.module, self.number = function, module, number
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if inspect.stack(0)[1].frame.f_globals.get("__name__", "steps") == self.module:
            self.num_calls += 1
            if self.num_calls == self.number:
                raise torch.OutOfMemoryError("planned")
        return self.function(*args, **kwargs)


def text_of_failure(call: Any, *given: torch.Tensor) -> str | None:
    """Compare a call with eager; return what its CaptureError says, if there is one."""
    try:
        check(call, scaled, *given)
    except CaptureError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["error", "eager"])
@pytest.mark.parametrize("module", ["piecework.static_inputs", "piecework.segment"])
def test_no_memory_for_inputs_or_scratch(module: str, on_failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_failures = 0
    for number in itertools.count(1):
        fails = Runs(torch.zeros, module, number)
        with monkeypatch.context() as patch, testing.plugins(), torch.no_grad():
            patch.setattr(torch, "zeros", fails)
            call = compiled(scaled, dims={"x": 0, "y": 0}, on_failure=on_failure, capture_sizes=(2, 3))
            has_failed = False
            for n in (2, 3, 2, 3, 2, 3, 2, 3):
                given = rows(n), rows(n)
                before = [tensor.clone() for tensor in (*given, torch.get_rng_state())]
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    text = text_of_failure(call, *given)
                if text is not None:
                    assert on_failure == "error" and not has_failed
                    torch.testing.assert_close([*given, torch.get_rng_state()], before)
                    assert not plans_of(call).pool.is_busy
                    check(call, scaled, *given)
                elif said:
                    assert on_failure == "eager" and not has_failed
                    text = str(said[0].message)
                if text is not None:
                    assert f"size {n} of scaled can't be captured: the device has no memory for it: planned" in text
                    has_failed = True
            assert {*plans_of(call).plans} == {2, 3}
        torch._dynamo.reset()
        if not has_failed:
            assert fails.num_calls < number
            break
        num_failures += 1
    assert num_failures >= 2


def test_no_memory_for_the_copies_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the code of a plan raises comes through as it is, and says that it copies."""
    with testing.plugins(), torch.no_grad():
        call = compiled(scaled, dims={"x": 0, "y": 0}, capture_sizes=(2,))
        given = rows(2), rows(2)
        check(call, scaled, *given)
        fails = Runs(torch.Tensor.clone, "steps", 1)
        with monkeypatch.context() as patch, counters.expect(num_graph_replays=0, num_graph_captures=0):
            patch.setattr(torch.Tensor, "clone", lambda self: fails(self))
            fails.module = __name__  # of the function above, which the code of the plan calls
            with pytest.raises(torch.OutOfMemoryError, match="^planned") as caught:
                call(*given)
        assert getattr(caught.value, "__notes__", None) == ["raised in the copy of the results of scaled"]
        assert not plans_of(call).pool.is_busy
        check(call, scaled, *given)


@pytest.mark.parametrize("sizes", [(), (2,)], ids=["uncaptured", "captured"])
def test_no_memory_in_an_op_between_pieces(sizes: tuple[int, ...]) -> None:
    """At the n-th call of an op, for every n: uncaptured in straight-line code, captured between the graphs."""
    for number in (1, 2, 3):
        calls: list[int] = []

        def fails(x: torch.Tensor, calls: list[int] = calls, number: int = number) -> torch.Tensor:
            calls.append(1)
            if len(calls) == number:
                raise torch.OutOfMemoryError("planned")
            return x * 3

        with testing.plugins(), torch.no_grad():
            op = SplittingOp("models::scale3", implementation=fails)
            call = compiled(simple, splitting_ops=[op], capture_sizes=sizes)
            for index in (1, 2, 3):
                given = rows(2)
                if index == number:
                    with pytest.raises(torch.OutOfMemoryError, match="^planned") as caught:
                        call(given)
                    note = "".join(getattr(caught.value, "__notes__", ()))
                    assert note.startswith("raised in splitting op models::scale3")
                check(call, simple, given)
        torch._dynamo.reset()


# --- killed and interrupted ---------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_at_each_stage_leaves_the_model_usable(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Where pytest runs in the background of a shell, interrupts are ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fault_program.main("eager", stage, "SIGINT")
    finally:
        signal.signal(signal.SIGINT, before)
    num_failures = 0 if stage == "compile failed" else 1  # The interrupt comes in the place of the failure.
    assert capsys.readouterr().out.endswith(f"right after {num_failures} failures and 1 interrupts\n")


def start(folder: Path, compiler: str, stage: str, how: str) -> subprocess.Popen[str]:
    """Start the program with caches of its own, as the leader of a group of processes."""
    caches = {"PIECEWORK_CACHE_DIR": f"{folder}/own", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    environment = {**os.environ, **caches, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, fault_program.__file__, compiler, stage, how]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, start_new_session=True)


def wait_until_gone(group: int) -> None:
    """No process of a group is left after a while."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"processes of group {group} outlive the program")


def check_what_is_left(folder: Path, compiler: str) -> None:
    """Scripts are whole; a second process works with what is in the caches, and leaves nothing beside them."""
    for script in (folder / "own").rglob("*.py"):
        compile(script.read_text(), script.name, "exec")
    again = start(folder, compiler, "none", "none")
    out, _ = again.communicate(timeout=300)
    assert again.returncode == 0 and "right after" in out
    recent = [path for path in (folder / "own").rglob("*.tmp") if time.time() - path.stat().st_mtime <= LEFTOVER_S]
    left = [path for path in (folder / "own").rglob("*") if path.is_file() and path.suffix != ".py"]
    assert left == recent


KILLS = [
    ("eager", "compile failed", "SIGKILL"),
    ("eager", "capture", "SIGKILL"),
    ("eager", "replay", "SIGTERM"),
    ("inductor", "compile exact", "SIGKILL"),
    ("inductor", "compile exact", "SIGTERM"),
]
"""What is killed where: only Inductor has processes and files of its own, and these only while it compiles."""


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "stage", "how"), KILLS)
def test_a_process_that_is_killed_at_a_stage_harms_no_later_one(
    tmp_path: Path, compiler: str, stage: str, how: str
) -> None:
    killed = start(tmp_path, compiler, stage, how)
    out, _ = killed.communicate(timeout=300)
    assert killed.returncode == -signal.Signals[how] and out.splitlines()[-1] == stage
    wait_until_gone(killed.pid)
    check_what_is_left(tmp_path, compiler)


@pytest.mark.slow
def test_processes_that_are_killed_at_random_harm_no_later_one(tmp_path: Path) -> None:
    random.seed(0)
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        killed = start(tmp_path, "inductor", "none", "none")
        assert killed.stdout is not None
        assert killed.stdout.readline() == "trace\n"  # Before, nothing of ours has run.
        with contextlib.suppress(subprocess.TimeoutExpired):
            killed.wait(timeout=random.uniform(0, 8))
        if killed.poll() is None:
            killed.send_signal(how)
        killed.communicate(timeout=300)
        wait_until_gone(killed.pid)
    check_what_is_left(tmp_path, "inductor")
