"""One trace: what is refused with the user's own line, and what a failed first call leaves behind."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import piecework
from models import Linear, assert_same, both_levels, compiled, refuses, rows
from piecework import CompileError, PieceworkWarning, TraceDepartureError, counters
from piecework.forward import compile_lock

LOG: list[int] = []
COUNT = 0


def triple(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.models.scale3(x)


# --- side effects ---------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.seen: list[Any] = []
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return triple(x)


class Appending(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        return triple(x)


class Keeping(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = triple(x)
        return self.last + 1


def appends_to_global(x: torch.Tensor) -> torch.Tensor:
    LOG.append(1)
    return triple(x)


def sets_global(x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return triple(x)


def appends_to_argument(x: torch.Tensor, cache: list[Any]) -> torch.Tensor:
    cache.append(x + 1)
    return triple(x)


def prints(x: torch.Tensor) -> torch.Tensor:
    print("hello")
    return triple(x)


class Switching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mode = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mode = "busy"
        y = triple(x) if self.mode == "busy" else x
        self.mode = None
        return y


@both_levels
def test_state_that_ends_as_it_began_is_no_side_effect(level: int) -> None:
    """Models of transformers switch a global on and off in each forward."""
    model = Switching()
    call = compiled(model, level)
    assert_same(call, model, rows(4))
    assert model.mode is None
    assert_same(call, model, rows(2))


@both_levels
@pytest.mark.parametrize(
    ("make", "args", "message"),
    [
        (Counting, (), r"Counting changes Python state in its forward: self\.n;"),
        (Appending, (), r"Appending changes Python state in its forward: self\.seen;"),
        (Keeping, (), r"Keeping changes Python state in its forward: self\.last;"),
        (lambda: appends_to_global, (), r"appends_to_global changes Python state in its forward: test_trace\.LOG;"),
        (lambda: sets_global, (), r"sets_global changes Python state in its forward: test_trace\.COUNT;"),
        (lambda: appends_to_argument, ([],), "appends_to_argument changes Python state in its forward: cache;"),
        (lambda: prints, (), r'prints .*print\("hello"\)'),
    ],
    ids=["attribute", "list", "tensor-attribute", "global-list", "global", "argument", "print"],
)
def test_side_effect_is_refused_by_name(level: int, make: Any, args: Any, message: str) -> None:
    target = make()
    before = (list(LOG), COUNT)
    for _ in range(2):
        with pytest.raises(CompileError, match=message):
            compiled(target, level)(rows(4), *args)
    assert before == (LOG, COUNT)
    if isinstance(target, Counting):
        assert target.n == 0 and target.seen == [] and target.last is None


# --- graph breaks and fixed dims --------------------------------------------------------------------------


def reads_a_value(x: torch.Tensor) -> torch.Tensor:
    y = triple(x)
    return y + 1 if y.sum().item() > 0 else y


def calls_python(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return triple(x)


@both_levels
@pytest.mark.parametrize(
    ("function", "line"),
    [(reads_a_value, r"y\.sum\(\)\.item\(\) > 0"), (calls_python, r"torch\._dynamo\.graph_break\(\)")],
)
def test_graph_break_names_the_users_line(level: int, function: Any, line: str) -> None:
    with pytest.raises(CompileError, match=rf"can't be traced as one graph.*test_trace.py:\d+ in \w+: .*{line}"):
        compiled(function, level)(rows(4))


def branches_on_four(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    if n == 4:
        x = x + 1
    return triple(x)


def takes_int(x: torch.Tensor) -> torch.Tensor:
    return triple(x) * float(int(x.shape[0]))


def adds_fixed(x: torch.Tensor) -> torch.Tensor:
    return triple(x) + torch.ones(4, 6)


def views_fixed(x: torch.Tensor) -> torch.Tensor:
    return triple(x).view(4, 6)


@both_levels
@pytest.mark.parametrize(
    ("function", "line"), [(branches_on_four, "if n == 4"), (adds_fixed, r"torch\.ones\(4, 6\)"), (views_fixed, "view")]
)
def test_fixed_dim_names_argument_dim_value_and_line(level: int, function: Any, line: str) -> None:
    message = r"dim 0 \('rows'\) of argument x is meant to vary, but the model fixes it to 4"
    with pytest.raises(CompileError, match=rf"{message}, .*{line}.*tracing {function.__name__}"):
        compiled(function, level)(rows(4))


@both_levels
def test_sizes_as_numbers_stay_right_for_other_sizes(level: int) -> None:
    call = compiled(takes_int, level)
    try:
        for n in (4, 7):
            assert_same(call, takes_int, rows(n))
    except CompileError as error:
        assert "int(x.shape[0])" in str(error)  # noqa: PT017 - refused by its line is right as well


def waves(x: torch.Tensor) -> torch.Tensor:
    angle = math.sin(x.shape[0] / 3)
    y = triple(x) * angle
    return triple(y) + math.tanh(x.shape[0]) * angle


@both_levels
def test_functions_that_torch_has_no_form_of_follow_the_size(level: int) -> None:
    call = compiled(waves, level)
    with counters.expect(num_graphs_seen=1):
        for n in (4, 7, 1):
            assert_same(call, waves, rows(n))


@both_levels
def test_slice_of_a_fixed_buffer_is_no_fixed_dim(level: int) -> None:
    class Positions(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(64.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return triple(x) + self.table[: x.shape[0], None]

    model = Positions()
    call = compiled(model, level)
    with counters.expect(num_graphs_seen=1):
        for n in (4, 1, 64):
            assert_same(call, model, rows(n))
    # torch 2.11 leaves an assertion in the graph, and no guard.
    refused = pytest.raises((TraceDepartureError, RuntimeError), match="rows = 65|Runtime assertion failed")
    with refused:
        call(rows(65))


@both_levels
def test_model_that_is_limited_to_some_sizes_is_traced_at_the_first_calls_size(level: int) -> None:
    def limited(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] % 8 == 0
        return triple(x)

    call = compiled(limited, level)
    for n in (8, 16):
        assert_same(call, limited, rows(n))
    refuses(call, rows(9), match="x.shape")


# --- failed first calls --------------------------------------------------------------------------------------


@both_levels
def test_failed_first_call_leaves_nothing_and_the_next_works(level: int) -> None:
    class Strict(Linear):
        def forward(self, x: torch.Tensor, how: str = "good") -> torch.Tensor:
            if how == "bad":
                print(how)
            return super().forward(x)

    model = Strict()
    call = compiled(model, level)
    for bad in ((rows(4), "bad"), (object(),), (rows(4, 5),)):
        with counters.expect(num_graphs_seen=0), pytest.raises(Exception):  # noqa: B017, PT011
            call(*bad)
        assert piecework.report(call).num_pieces == 0
        assert type(model.linear._parameters) is dict
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with pytest.raises(TypeError):
        call()
    with counters.expect(num_graphs_seen=1):
        for n in (4, 2):
            assert_same(call, model, rows(n))


@both_levels
def test_error_of_the_models_own_names_its_line(level: int) -> None:
    def raises(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32:
            raise ValueError("wants doubles")
        return triple(x)

    call = compiled(raises, level)
    with pytest.raises(CompileError, match=r"wants doubles|raise ValueError"):
        call(rows(4))
    assert_same(call, raises, rows(4).double())


@both_levels
def test_wrong_shapes_name_the_line(level: int) -> None:
    with pytest.raises(CompileError, match=r"can't be traced.*models.py:\d+ in forward|linear.py"):
        compiled(Linear(), level)(rows(4, 5))


def weighs(x: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return triple(x) * ((starts[1:] - starts[:-1]) * weights).sum()


def adds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return triple(x) + y


@both_levels
def test_dims_that_go_together_say_what_they_were_traced_as(level: int) -> None:
    dims = {"x": {0: "rows"}, "starts": {0: "starts"}, "weights": {0: "sequences"}}
    message = r"an op raised .*must match.*test_trace\.py:\d+ in weighs.*with rows = 3, starts = 4, sequences = 2: dims"
    with pytest.raises(CompileError, match=message):
        compiled(weighs, level, dims)(rows(3), torch.ones(4), torch.ones(3))
    call = compiled(weighs, level, dims)
    for num in (3, 1, 4):  # as the message says: the first call has sizes that differ
        assert_same(call, weighs, rows(5), torch.rand(num + 1), torch.rand(num))
    with pytest.raises(CompileError, match=r"a = 4, b = 3.*give them one name"):
        compiled(adds, level, {"x": {0: "a"}, "y": {0: "b"}})(rows(4), rows(4))
    assert_same(compiled(adds, level), adds, rows(4), rows(4))


@both_levels
def test_trace_that_fails_may_be_answered_eagerly_with_one_warning(level: int) -> None:
    call = compiled(reads_a_value, level, on_failure="eager")
    with pytest.warns(PieceworkWarning, match="reads_a_value runs eagerly from now on:.*item"):
        assert_same(call, reads_a_value, rows(4))
    assert "\n  runs eagerly: reads_a_value can't be traced" in str(piecework.report(call))
    for n in (3, 2):  # another warning would be an error
        assert_same(call, reads_a_value, rows(n))


@both_levels
def test_opaque_argument_may_be_answered_eagerly(level: int) -> None:
    def take(x: torch.Tensor, other: Any) -> torch.Tensor:
        return triple(x)

    call = compiled(take, level, on_failure="eager")
    with pytest.warns(PieceworkWarning, match="runs eagerly from now on"):
        torch.testing.assert_close(call(x := rows(4), object()), x * 3)


DURING_A_TRIPLE: list[Callable[[], None]] = []
"""What the next call of the op below does besides."""


@torch.library.custom_op("models::triple_of_floats", mutates_args=())
def triple_of_floats(x: torch.Tensor) -> torch.Tensor:
    while DURING_A_TRIPLE:
        DURING_A_TRIPLE.pop()()
    if x.isinf().any():
        raise KeyboardInterrupt
    if x.dtype is not torch.float32:
        raise ValueError(f"got {x.dtype}")
    if x.isnan().any():
        raise ValueError("got nan")
    return 3 * x


@triple_of_floats.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def call_triple_of_floats(x: torch.Tensor) -> torch.Tensor:
    return triple_of_floats(x) + 1


SPLIT_AT_TRIPLE = ("models::triple_of_floats",)
"""It reads numbers from a tensor, which no graph holds."""


@both_levels
@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_first_call_that_fails_when_it_runs_does_not_bind_later_ones(level: int, on_failure: str) -> None:
    call = compiled(call_triple_of_floats, level, on_failure=on_failure)
    for _ in range(2):
        with pytest.raises(ValueError, match="float64"):
            call(rows(4).double())
    with counters.expect(num_graphs_seen=1):
        for n in (4, 2):
            assert_same(call, call_triple_of_floats, rows(n))


@both_levels
def test_first_call_that_fails_by_its_values_is_not_traced_again(level: int) -> None:
    call = compiled(call_triple_of_floats, level)
    with counters.expect(num_graphs_seen=1):
        with pytest.raises(ValueError, match="nan"):
            call(rows(4) * float("nan"))
        assert_same(call, call_triple_of_floats, rows(4))
    with counters.expect(num_graphs_seen=0), pytest.raises(TraceDepartureError, match="float64"):
        call(rows(4).double())  # One call was answered, so that the trace is what is meant.


def of_two_branches(x: torch.Tensor) -> torch.Tensor:
    return triple_of_floats(x) * 2 if x.shape[0] > 6 else triple_of_floats(x) * 3


@both_levels
@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_failed_first_call_does_not_bind_later_ones_to_its_branch(level: int, on_failure: str) -> None:
    call = compiled(of_two_branches, level, on_failure=on_failure)
    with counters.expect(num_graphs_seen=2):
        with pytest.raises(ValueError, match="nan"):
            call(rows(8) * float("nan"))
        assert_same(call, of_two_branches, rows(4))


@both_levels
def test_interrupted_first_call_does_not_bind_later_ones(level: int) -> None:
    call = compiled(call_triple_of_floats, level)
    with pytest.raises(KeyboardInterrupt):
        call(rows(4).double() * float("inf"))
    assert_same(call, call_triple_of_floats, rows(4))


def test_failed_first_call_leaves_the_promises_of_freeze_and_of_captures(emulation: Any) -> None:
    for is_captured in (False, True):
        call = compiled(call_triple_of_floats, capture_sizes=(), splitting_ops=SPLIT_AT_TRIPLE)
        x = rows(4) * float("nan")
        with torch.no_grad():
            with pytest.raises(ValueError, match="nan"):
                call(x)
            if is_captured:
                piecework.capture(call, [4], rows(4))
                with pytest.raises(TraceDepartureError, match="float64"):
                    call(x.double())
                assert len(piecework.report(call).sizes) == 1
            piecework.freeze()
            for _ in range(2):
                with pytest.raises(TraceDepartureError, match="float64"):
                    call(x.double())
            assert_same(call, call_triple_of_floats, rows(4))
        piecework.reset()


def test_captures_after_a_failed_first_call_are_of_their_own_example(emulation: Any) -> None:
    call = compiled(call_triple_of_floats, capture_sizes=(), splitting_ops=SPLIT_AT_TRIPLE)
    with torch.no_grad(), pytest.raises(ValueError, match="float64"):
        call(rows(4).double())
    with counters.expect(num_graph_captures=1):
        piecework.capture(call, [4], rows(4))
    assert_same(call, call_triple_of_floats, rows(4))


@both_levels
def test_calls_that_the_original_answers_say_nothing_for_a_trace(level: int) -> None:
    call = compiled(call_triple_of_floats, level)
    with pytest.raises(ValueError, match="float64"):
        call(rows(4).double())
    assert_same(call, call_triple_of_floats, rows(0))
    assert_same(call, call_triple_of_floats, rows(4))


@both_levels
def test_odd_arguments_after_a_failed_first_call_are_answered_as_ever(level: int) -> None:
    def take(x: torch.Tensor, other: Any = None) -> torch.Tensor:
        return triple_of_floats(x)

    call = compiled(take, level, on_failure="eager")
    with pytest.raises(ValueError, match="nan"):
        call(rows(4) * float("nan"))
    with pytest.warns(PieceworkWarning, match="eager"):
        torch.testing.assert_close(call(x := rows(4), object()), 3 * x)


@both_levels
def test_first_call_does_not_wait_for_what_others_compile(level: int) -> None:
    is_inside, may_end = threading.Event(), threading.Event()
    results: list[torch.Tensor] = []

    def wait() -> None:
        is_inside.set()
        assert may_end.wait(60)

    call = compiled(call_triple_of_floats, level)
    DURING_A_TRIPLE.append(wait)
    thread = threading.Thread(target=lambda: results.append(call(torch.ones(4, 6))))
    thread.start()
    try:
        assert is_inside.wait(60)
        with compile_lock:  # as long as another model is compiled
            may_end.set()
            thread.join(60)
            assert not thread.is_alive()
    finally:
        may_end.set()
        thread.join()
    torch.testing.assert_close(results[0].detach(), torch.full((4, 6), 4.0))


# --- what a trace leaves alone -------------------------------------------------------------------------------


@both_levels
def test_trace_computes_nothing_and_marks_nothing(level: int) -> None:
    x = rows(4)
    before = dict(vars(x))
    model = Linear()
    random = torch.get_rng_state()
    call = compiled(model, level)
    call(x)
    assert vars(x) == before and torch.equal(torch.get_rng_state(), random)


@both_levels
def test_tensors_of_globals_and_closures_are_inputs(level: int) -> None:
    held = torch.ones(6)

    def add(x: torch.Tensor) -> torch.Tensor:
        return triple(x) + held

    call = compiled(add, level)
    assert_same(call, add, rows(4))
    held.add_(1)
    assert_same(call, add, rows(3))


@both_levels
def test_two_models_of_one_class_do_not_take_each_others_trace(level: int) -> None:
    first, second = Linear(), Linear()
    second.scale = 5.0
    calls = [(compiled(model, level), model) for model in (first, second)]
    with counters.expect(num_graphs_seen=2):
        for _ in range(2):
            for call, model in calls:
                assert_same(call, model, rows(4))


@both_levels
def test_dropout_in_training_draws_anew_and_follows_the_seed(level: int) -> None:
    def drop(x: torch.Tensor) -> torch.Tensor:
        return triple(nn.functional.dropout(x, 0.5, True))

    call, ones = compiled(drop, level), torch.ones(64, 8)
    assert not torch.equal(call(ones), call(ones))
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(call(ones))
    torch.testing.assert_close(*results)


def test_error_of_the_backend_of_level_2_is_told() -> None:
    def backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        raise ValueError("no lowering for this\nmore about it")

    piecework.set_torch_compile_backend(backend)
    with pytest.raises(CompileError, match="backend of level 2 failed on waves: ValueError: no lowering for this$"):
        compiled(waves, 2)(rows(4))
