"""Whatever fails in code of others, at whatever time: the caller learns whose it was, and the next call works."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch

import piecework
from capture_models import capturing_by, check, compiled, emulated, plans_of, rows, simple
from fault_points import BY_NAME, POINTS, Faulty, FaultyCapturer, Point, Scale, check_point
from piecework import (
    Capture,
    CaptureError,
    CompilationConfig,
    CompiledPiece,
    ConfigError,
    CustomOpImplementation,
    PluginError,
    SplittingOp,
    hookimpl,
    testing,
)
from piecework.implementations import hook_arguments

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
