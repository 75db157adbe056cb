"""``CustomOp``: what runs, at each level and for each form of call, and what the report says of it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import piecework
from piecework import (
    CompilationConfig,
    ConfigError,
    CustomOp,
    CustomOpImplementation,
    Limits,
    PieceworkError,
    PluginError,
    TraceDepartureError,
    hookimpl,
    testing,
)
from piecework.api import forward_of

ran: list[str] = []
"""Which body ran or was traced, in order."""


def note(body: str) -> None:
    # Dynamo evaluates it as a constant, so that traced bodies are noted too.
    ran.append(body)


note_traced = torch.compiler.assume_constant_result(note)


class Norm(CustomOp, op_name="test_norm"):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden))
        self.eps = 1e-6

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        note_traced("native")
        return norm(self, x, residual)


def norm(op: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    total = x if residual is None else x + residual
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + op.eps) * op.weight
    return normed if residual is None else (normed, total)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Norm()
        self.second = Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, total = self.second(self.first(x), residual=x)
        return normed + total


def brought(name: str, **limits: Any) -> CustomOpImplementation:
    def function(op: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        note_traced(name)
        return norm(op, x, residual)

    attributes = limits.pop("attributes", ())
    return CustomOpImplementation(function, name=name, limits=Limits(**limits), attributes=attributes)


def plugin(name: str, *implementations: CustomOpImplementation, op_name: str = "test_norm") -> Any:
    class Plugin:
        @hookimpl
        def piecework_custom_op_implementations(self, op_name: str, device: torch.device) -> Any:
            return list(implementations) if op_name == wanted else None

    wanted = op_name
    made: Any = Plugin()
    made.name = name
    return made


@pytest.fixture(autouse=True)
def nothing_ran() -> Any:
    ran.clear()
    with testing.plugins(), torch.no_grad():
        yield
    ran.clear()


def config(level: int, custom_ops: str = "", **more: Any) -> CompilationConfig:
    return CompilationConfig(level=level, custom_ops=custom_ops, piece_compiler="eager", **more)


def check(
    model: nn.Module, compiled: Any, rows: tuple[int, ...] = (3, 5, 1), dtype: torch.dtype = torch.float32
) -> None:
    for number in rows:
        x = torch.randn(number, 8, dtype=dtype)
        total = x + (first := norm(model.first, x))
        torch.testing.assert_close(compiled(x), norm(model.second, first, x)[0] + total)


# --- which body -----------------------------------------------------------------------------------


@pytest.mark.parametrize("custom_ops", ["", "all", "none", "none,+test_norm", "-test_norm", "+test_norm"])
@pytest.mark.parametrize("level", range(4))
def test_levels_and_tokens_decide_which_body_runs(level: int, custom_ops: str) -> None:
    is_on = {"": level < 3, "all": True, "none": False, "-test_norm": False}.get(custom_ops, True)
    model = Model()
    with testing.plugins(plugin("fast", brought("kernel"))):
        compiled = piecework.compile(model, config=config(level, custom_ops))
        check(model, compiled)
        assert set(ran) == {"kernel" if is_on else "native"}
        made = piecework.report(compiled).custom_ops
        assert {op.implementation for op in made} == {"kernel" if is_on else "forward_native"}
        assert {op.is_on for op in made} == {is_on}


class Device(CustomOp, op_name="test_device"):
    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        note_traced("cpu")
        return x + 1

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not on a CPU")

    @Limits(dtypes=(torch.float64,))
    def forward_triton(self, x: torch.Tensor) -> torch.Tensor:
        note_traced("triton")
        return x + 1


@pytest.mark.parametrize("level", [0, 2, 3])
def test_candidates_are_asked_in_order_and_the_first_within_its_limits_wins(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    a = plugin("a", brought("a1", dtypes=(torch.float16,)), brought("a2", sizes={-1: (9, None)}), op_name="test_device")
    b = plugin("b", brought("b1", multiples={-1: 8}), op_name="test_device")
    wanted = {
        (torch.float32, 7): "cpu",
        (torch.float32, 8): "b1",
        (torch.float32, 9): "a2",
        (torch.float16, 7): "a1",
        (torch.float64, 7): "triton",
    }

    def only(op: Any, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for one in (a, b):
        for implementation in one.piecework_custom_op_implementations("test_device", torch.device("cpu")):
            object.__setattr__(implementation, "function", only)
    for (dtype, hidden), name in wanted.items():
        with testing.plugins(a, b):
            compiled = piecework.compile(nn.Sequential(Device()), config=config(level, "all"))
            compiled(torch.zeros(2, hidden, dtype=dtype))
            (made,) = piecework.report(compiled).custom_ops
        assert made.implementation == {"cpu": "forward_cpu", "triton": "forward_triton"}.get(name, name)


def test_every_candidate_before_the_chosen_one_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fast = plugin(
        "fast",
        brought("half", dtypes=(torch.float16,)),
        brought("few", sizes={"rows": (1, 4)}),
        brought("hopper", min_capability=(9, 0)),
        brought("scaled", attributes=("eps", "scale")),
        CustomOpImplementation(lambda op: None, name="bare"),
        op_name="test_device",
    )
    with testing.plugins(fast):
        compiled = piecework.compile(nn.Sequential(Device()), config=config(2))
        compiled(torch.zeros(2, 8))
        (made,) = piecework.report(compiled).custom_ops
    whose = " of plugin 'fast' (registered by this program)"
    assert made.skipped == {
        f"half{whose}": "dtype float32, allowed: float16",
        f"few{whose}": "rows vary, allowed: 1 to 4",
        f"hopper{whose}": "it needs a CUDA device of compute capability 9.0 or more, and runs on cpu",
        f"scaled{whose}": "the op has no attribute 'eps', 'scale'",
        f"bare{whose}": "it can't be called as the op is: too many positional arguments",
        "forward_triton": "Triton is not installed",
    }
    assert (made.implementation, made.plugin, made.num_places) == ("forward_cpu", None, 1)
    text = "\n".join(made.lines())
    assert "  custom op test_device (Device) on cpu: forward_cpu, 1 place; on: the default at level 2" in text
    assert "    not forward_triton: Triton is not installed" in text


def test_triton_is_skipped_on_a_device_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    compiled = piecework.compile(nn.Sequential(Device()), config=config(0))
    compiled(torch.zeros(2, 8, dtype=torch.float64))
    (made,) = piecework.report(compiled).custom_ops
    assert made.skipped == {"forward_triton": "Triton runs on cuda and xpu, not on cpu"}


@pytest.mark.parametrize("level", range(4))
def test_the_plugin_of_what_ran_is_reported(level: int) -> None:
    model = Model()
    with testing.plugins(plugin("fast", brought("kernel"))):
        compiled = piecework.compile(model, config=config(level, "all"))
        check(model, compiled)
        made = piecework.report(compiled).custom_ops
        assert {op.plugin for op in made} == {"plugin 'fast' (registered by this program)"}
        assert sum(op.num_places for op in made) == 2
        assert all("'all' by the config of this model" in op.lines()[0] for op in made)


def test_a_dim_that_varies_lies_within_no_limit_on_its_size_and_gets_no_guard() -> None:
    model = Model()
    with testing.plugins(plugin("fast", brought("few", sizes={"rows": (1, 4)}), brought("any", sizes={-1: (8, 8)}))):
        compiled = piecework.compile(model, config=config(3, "all"))
        check(model, compiled)
        assert {op.implementation for op in piecework.report(compiled).custom_ops} == {"any"}
        assert not piecework.report(compiled).relations


def test_one_choice_is_made_per_place_while_tracing_and_none_per_call() -> None:
    asked: list[str] = []

    class Counting:
        name = "counting"

        @hookimpl
        def piecework_custom_op_enabled(self, op_name: str) -> bool:
            asked.append("enabled")
            return True

        @hookimpl
        def piecework_custom_op_implementations(self, op_name: str, device: torch.device) -> Any:
            asked.append("implementations")
            return [brought("kernel")]

    model = Model()
    with testing.plugins(Counting()):
        for level in (2, 3):
            asked.clear()
            compiled = piecework.compile(model, config=config(level))
            check(model, compiled)
            assert asked == ["enabled", "implementations"]
        asked.clear()
        eager = piecework.compile(model, config=config(0))
        check(model, eager)
        assert asked == ["enabled", "implementations"]
        asked.clear()
        check(model, model)
        assert len(asked) == 4  # Outside of a compiled model, each op asks at its first call.
        check(model, model)
        assert len(asked) == 4


# --- level 0 and untraced calls -------------------------------------------------------------------


def test_an_eager_op_keeps_what_it_chose_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = Norm(), torch.randn(2, 8)
    with testing.plugins(plugin("fast", brought("kernel"))):
        op(x)
        monkeypatch.setenv("PIECEWORK_CUSTOM_OPS", "none")
        op(x)
        assert ran == ["kernel", "kernel"]
        Norm()(x)
        assert ran == ["kernel", "kernel", "native"]  # The process remembers nothing.
        piecework.reset()
    op(x)
    assert ran[3:] == ["native"]


def test_an_eager_call_outside_of_the_limits_runs_the_native_body_and_is_counted() -> None:
    model = Model()
    with testing.plugins(plugin("fast", brought("few", sizes={"rows": (1, 4)}))):
        compiled = piecework.compile(model, config=config(0))
        check(model, compiled, rows=(3,))
        check(model, compiled, rows=(5, 4))
        assert ran == ["few", "few", "native", "native", "few", "few"]
        made = piecework.report(compiled).custom_ops
        assert sum(op.num_outside for op in made) == 2
        assert "    1 call outside of its limits ran by forward_native" in str(piecework.report(compiled)) or (
            "    2 calls outside of its limits ran by forward_native" in str(piecework.report(compiled))
        )


def test_an_eager_call_in_another_form_runs_the_native_body() -> None:
    def only_x(op: Any, x: torch.Tensor) -> torch.Tensor:
        note_traced("kernel")
        return norm(op, x)

    op, x = Norm(), torch.randn(2, 8)
    with testing.plugins(plugin("fast", CustomOpImplementation(only_x))):
        op(x)
        op(x, residual=x)
        op(x, x)
        op(x)
    assert ran == ["kernel", "native", "native", "kernel"]


def test_an_eager_call_on_another_device_runs_the_native_body() -> None:
    op = Device()
    op(torch.zeros(2, 8))
    assert op(torch.zeros(2, 8, device="meta")).device.type == "meta"
    op(torch.zeros(2, 8))
    assert ran == ["cpu", "cpu"]


def test_limits_may_be_about_an_argument_behind_others() -> None:
    class Many(CustomOp, op_name="test_many"):
        def forward_native(self, *xs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            note_traced("native")
            return xs[0] * scale

    def many(op: Any, *xs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        note_traced("kernel")
        return xs[0] * scale

    x = torch.ones(2)
    for argument, bodies in (("scale", ["kernel", "native"]), ("xs", ["native", "native"])):
        limits = Limits(dtypes=(torch.float32,), argument=argument)
        ran.clear()
        with testing.plugins(plugin("fast", CustomOpImplementation(many, limits=limits), op_name="test_many")):
            op = Many()
            op(x, x, x, scale=x)
            op(x, x, x, scale=x.double())
        assert ran == bodies


def test_an_op_and_what_it_keeps_are_gone_without_a_collection() -> None:
    op = Norm()
    with testing.plugins(plugin("fast", brought("kernel"))):
        op(torch.zeros(2, 8))
    gone = weakref.ref(op.weight)
    gc.disable()
    try:
        del op
        assert gone() is None
    finally:
        gc.enable()


def test_an_op_that_is_moved_chooses_anew() -> None:
    model = Model()
    with testing.plugins(plugin("fast", brought("single", dtypes=(torch.float32,)), brought("double"))):
        check(model, model)
        model.double()
        check(model, model, dtype=torch.float64)
    assert ran == ["single"] * 6 + ["double"] * 6


def test_ops_inside_a_compiled_model_do_not_share_choices_with_the_eager_one() -> None:
    model = Model()
    with testing.plugins(plugin("fast", brought("kernel"))):
        off = piecework.compile(model, config=config(0, "none"))
        on = piecework.compile(model, config=config(0, "all"))
        check(model, off, rows=(2,))
        check(model, on, rows=(2,))
        check(model, model, rows=(2,))
        check(model, off, rows=(2,))
    assert ran == ["native"] * 2 + ["kernel"] * 4 + ["native"] * 2


@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_what_the_trace_does_not_answer_goes_by_the_same_settings(on_failure: str) -> None:
    model = Model()
    with testing.plugins(plugin("fast", brought("kernel"))):
        compiled = piecework.compile(model, config=config(3, "all", on_failure=on_failure))
        check(model, compiled)
        ran.clear()
        assert compiled(torch.zeros(0, 8)).shape == (0, 8)
        assert ran == ["kernel", "kernel"]
        if on_failure == "eager":
            with pytest.warns(piecework.PieceworkWarning, match="answers a call eagerly"):
                compiled(torch.zeros(2, 8, dtype=torch.float64))
            assert ran == ["kernel"] * 4


def test_ops_are_copied_pickled_and_forgotten_as_other_modules() -> None:
    with testing.plugins(plugin("fast", brought("kernel"))):
        model = Model()
        check(model, model)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
            check(copied, copied)
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        assert set(model.state_dict()) == {"first.weight", "second.weight"}
        op = Norm()
        op(torch.zeros(2, 8))
        gone = weakref.ref(op)
        del op
        gc.collect()
        assert gone() is None


def test_threads_call_ops_for_the_first_time_at_once() -> None:
    op, x = Norm(), torch.randn(4, 8)
    failures: list[BaseException] = []
    barrier = threading.Barrier(8)

    def call() -> None:
        barrier.wait()
        try:
            with torch.no_grad():
                torch.testing.assert_close(op(x), norm(op, x))
        except BaseException as error:  # Raised below, in the thread of the test.
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_limits_may_be_about_a_named_argument() -> None:
    class Mix(CustomOp, op_name="test_mix"):
        def forward_native(self, ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            note_traced("native")
            return x + ids

    def mix(op: Any, ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        note_traced("kernel")
        return x + ids

    ids, x = torch.arange(3), torch.randn(3)

    def bodies(argument: str, *args: Any, **kwargs: Any) -> list[str]:
        limits = Limits(dtypes=(torch.float32,), argument=argument)
        brings = plugin("fast", CustomOpImplementation(mix, limits=limits), op_name="test_mix")
        ran.clear()
        with testing.plugins(brings):
            op = Mix()
            torch.testing.assert_close(op(*args, **kwargs), args[1] + ids)
            piecework.compile(Mix(), config=config(2))(*args, **kwargs)
            torch.testing.assert_close(op(ids, x.double()), x.double() + ids)
        return ran.copy()

    assert bodies("x", ids, x) == ["kernel", "kernel", "native"]
    assert bodies("x", ids, x, y=x) == ["kernel", "kernel", "native"]
    assert bodies("x", ids, x.double()) == ["native", "native", "native"]
    assert bodies("y", ids, x) == ["native", "native", "native"]
    assert bodies("z", ids, x) == ["native", "native", "native"]
    assert bodies("ids", ids, x) == ["native", "native", "native"]


# --- other front ends -----------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "custom_ops", "body"), [
    ("eager", None, "kernel"),
    ("eager", "none", "native"),
    ("piecework", None, "native"),
    ("piecework", "+test_norm", "kernel"),
])  # fmt: skip
def test_torch_compile_goes_by_the_level_of_its_backend(
    backend: str, custom_ops: str | None, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"piece_compiler": "eager", "capture_sizes": ()}
    if custom_ops is not None and backend == "piecework":
        options["custom_ops"] = custom_ops
    elif custom_ops is not None:
        monkeypatch.setenv("PIECEWORK_CUSTOM_OPS", custom_ops)
    model = Model()
    with testing.plugins(plugin("fast", brought("kernel"))):
        compiled = torch.compile(
            model, backend=backend, fullgraph=True, options=options if backend == "piecework" else None
        )
        check(model, compiled)
    assert set(ran) == {body}


def test_a_decorated_class_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    @piecework.support_torch_compile
    class Decorated(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    monkeypatch.setenv("PIECEWORK_CONFIG", '{"piece_compiler": "eager"}')
    for level, body in (("0", "kernel"), ("1", "kernel"), ("2", "kernel"), ("3", "native")):
        monkeypatch.setenv("PIECEWORK_LEVEL", level)
        ran.clear()
        with testing.plugins(plugin("fast", brought("kernel"))):
            model = Decorated()
            check(model, model)
            assert set(ran) == {body}
            assert {op.num_places for op in piecework.report(model).custom_ops} == {2}


def test_an_op_is_compiled_by_itself_and_as_a_function() -> None:
    op = Norm()
    with testing.plugins(plugin("fast", brought("kernel"))):
        compiled = piecework.compile(op, config=config(3, "all"))
        for rows in (2, 5):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), norm(op, x))

        def function(x: torch.Tensor) -> torch.Tensor:
            return op(x) * 2

        other = piecework.compile(function, config=config(2))
        torch.testing.assert_close(other(x), norm(op, x) * 2)
        assert set(ran) == {"kernel"}
        assert [op.num_places for op in piecework.report(other).custom_ops] == [1]


def test_forward_has_the_signature_of_the_native_body() -> None:
    compiled = piecework.compile(Norm(), config=config(2))
    assert list(compiled(x=torch.zeros(2, 8), residual=torch.zeros(2, 8))[0].shape) == [2, 8]
    with pytest.raises(TraceDepartureError, match="residual"):
        compiled(torch.zeros(2, 8))


def test_a_compile_in_another_thread_changes_nothing_here() -> None:
    model = Model()
    with testing.plugins(plugin("fast", brought("kernel"))):
        compiled = {level: piecework.compile(model, config=config(level, "none")) for level in (0, 2, 3)}
        for one in compiled.values():
            check(model, one)
        is_inside, is_done = threading.Event(), threading.Event()

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            is_inside.set()
            assert is_done.wait(60)
            return graph.forward

        other = threading.Thread(target=lambda: torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2)))
        other.start()
        assert is_inside.wait(60)
        try:
            ran.clear()
            model.first.eps = 0.5  # An event, which must not be lost.
            compiled[0](torch.zeros(2, 8))
            assert ran == ["native", "native"]
        finally:
            is_done.set()
            other.join()
        for level in (2, 3):
            with pytest.raises(TraceDepartureError, match="eps"):
                compiled[level](torch.ones(2, 8))


def test_export_runs_through_an_op() -> None:
    with testing.plugins(plugin("fast", brought("kernel"))):
        for strict in (True, False):
            exported = torch.export.export(Model(), (torch.zeros(2, 8),), strict=strict)
            assert "aten.rsqrt" in str(exported.graph)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_training_runs_by_bodies_that_have_gradients(level: int, has_gradient: bool) -> None:
    fast = plugin("fast", brought("kernel", has_gradient=has_gradient))
    with testing.plugins(fast), torch.enable_grad():
        model = nn.Sequential(nn.Linear(8, 8), Norm())
        compiled = piecework.compile(model, config=config(level, "all"))
        compiled(torch.randn(3, 8)).sum().backward()
        assert model[0].weight.grad is not None
        assert set(ran) == {"kernel" if has_gradient else "native"}
        ran.clear()
        with torch.no_grad():
            compiled(torch.randn(3, 8))
        assert set(ran) == {"kernel"}


def test_an_op_that_needs_no_gradient_runs_by_the_kernel_with_gradients_on() -> None:
    with testing.plugins(plugin("fast", brought("kernel"))), torch.enable_grad():
        op = Norm().requires_grad_(False)
        op(torch.randn(2, 8))
        op(torch.randn(2, 8, requires_grad=True)).sum().backward()
        torch.func.grad(lambda x: op(x).sum())(torch.randn(2, 8))
    assert ran == ["kernel", "native", "native"]


# --- native bodies that are compiled by themselves ------------------------------------------------


class Alone(CustomOp, op_name="test_alone", compile_native=True):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 3.0))
        self.offset = 1

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        note_traced("native")
        return self.helper(x) + self.offset


def plus_one(module: nn.Module, args: Any, output: Any) -> Any:
    return output + 1


alone: Alone | None = None
_library = torch.library.Library("test_custom_op", "DEF")
_library.define("opaque(Tensor x) -> Tensor")


@torch.library.impl(_library, "opaque", "CompositeExplicitAutograd")
def _opaque(x: torch.Tensor) -> torch.Tensor:
    assert alone is not None
    return alone(x)


@torch.library.register_fake("test_custom_op::opaque", lib=_library)
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("level", ["0", "3"])
def test_a_native_body_inside_an_opaque_op_is_compiled_by_itself(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    global alone
    monkeypatch.setenv("PIECEWORK_LEVEL", level)
    monkeypatch.setenv("PIECEWORK_CONFIG", '{"piece_compiler": "eager", "splitting_ops": ["test_custom_op::opaque"]}')
    alone = Alone()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.test_custom_op.opaque(x + 1) * 2

    compiled = piecework.compile(function)
    num_graphs = 0 if level == "0" else 2  # The function, and the body inside of the op.
    with piecework.counters.expect(num_graphs_seen=num_graphs):
        for rows in (2, 3, 3, 3, 3):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), ((x + 1) * alone.scale + 1) * 2)
    assert ran == (["native"] * 5 if level == "0" else ["native"])
    alone.scale.data = torch.full((8,), 5.0)
    alone.offset = 4
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(x), ((x + 1) * 5.0 + 4) * 2)


def test_a_native_body_that_is_compiled_takes_other_dtypes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_LEVEL", "3")
    monkeypatch.setenv("PIECEWORK_CONFIG", '{"piece_compiler": "eager"}')
    op = Alone()
    op.register_forward_hook(plus_one)
    torch.testing.assert_close(op(torch.ones(2, 8)), torch.full((2, 8), 5.0))
    torch.testing.assert_close(op(torch.ones(2, 8, dtype=torch.float64)), torch.full((2, 8), 5.0, dtype=torch.float64))


# --- what is refused ------------------------------------------------------------------------------


def define(name: Any = "test_defined", **space: Any) -> Callable[[], type]:
    def forward_native(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    space = {"forward_native": forward_native, **space}
    return lambda: type("Defined", (CustomOp,), {k: v for k, v in space.items() if v is not None}, op_name=name)


@pytest.mark.parametrize("name", ["", "all", "none", "rms norm", "rms-norm", "+a", "1a", "ä", 3])
def test_a_name_that_no_token_could_give_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="op_name must be an ASCII identifier"):
        define(name)()


def test_a_class_without_a_native_body_or_with_a_forward_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no forward_native"):
        define(forward_native=None)()
    with pytest.raises(ConfigError, match="defines forward, .* name its body forward_native"):
        define(forward=lambda self, x: x)()
    with pytest.raises(ConfigError, match=r"write class Nameless\(piecework.CustomOp, op_name="):
        type("Nameless", (CustomOp,), {"forward_native": lambda self, x: x})


def test_subclasses_inherit_the_name_and_several_classes_may_have_it() -> None:
    class Scaled(Norm, op_name="test_norm"):
        def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            note_traced("scaled")
            return norm(self, x, residual) * 2

    class Other(CustomOp, op_name="test_norm"):
        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            note_traced("other")
            return x

    piecework.set_compilation_config(CompilationConfig(custom_ops="-test_norm"))
    x = torch.randn(2, 8)

    class Renamed(Norm):
        """Keeps the body, and the name with it."""

    for op in (Scaled(), Norm(), Other(), Renamed()):
        op(x)
    assert ran == ["scaled", "native", "other", "native"]


def test_a_native_body_under_an_inherited_name_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="Gemma has a forward_native of its own, so what runs 'test_norm' may compute"
    ):

        class Gemma(Norm):
            def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
                return norm(self, x, residual) * 2


def test_a_native_body_may_come_from_a_mixin() -> None:
    class Mixin:
        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    make: Any = type
    mixed = make("Mixed", (Mixin, CustomOp), {}, op_name="test_mixed")
    torch.testing.assert_close(mixed()(torch.zeros(2)), torch.ones(2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"function": None},
        {"name": 7},
        {"limits": 5},
        {"attributes": "weight"},
        {"attributes": ("a b",)},
        {"attributes": (1,)},
    ],
)
def test_implementations_of_another_form_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="CustomOpImplementation"):
        CustomOpImplementation(**{"function": norm, **wrong})


class Failing:
    name = "failing"

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    @hookimpl
    def piecework_custom_op_implementations(self, op_name: str) -> Any:
        return self.answer()


def fail() -> Any:
    raise RuntimeError("no kernels today")


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (fail, "plugin 'failing' .* failed in piecework_custom_op_implementations: RuntimeError: no kernels today"),
        (lambda: 3, "answered piecework_custom_op_implementations with 3, allowed: a list or tuple of Custom"),
        (lambda: [norm], "allowed: a list or tuple of CustomOpImplementation; .* is none"),
    ],
)
def test_a_plugin_that_fails_is_named_at_every_level(level: int, answer: Callable[[], Any], words: str) -> None:
    with testing.plugins(Failing(answer)):
        compiled = piecework.compile(Model(), config=config(level, "all"))
        with pytest.raises(PluginError, match=words):
            compiled(torch.zeros(2, 8))
        with pytest.raises(PieceworkError):
            compiled(torch.zeros(2, 8))  # Nothing half-made is left.
    with testing.plugins():
        compiled(torch.zeros(2, 8))


def test_release_forgets_what_was_chosen() -> None:
    model = Model()
    with testing.plugins(plugin("fast", brought("kernel"))):
        compiled = piecework.compile(model, config=config(0))
        check(model, compiled, rows=(2,))
        piecework.release(compiled)
        assert forward_of(compiled, "test").custom_ops is None
        assert piecework.report(compiled).custom_ops == ()
