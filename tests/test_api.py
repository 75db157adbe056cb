"""The front ends: what a compiled model is to its user, and what the decorator makes of a class."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import models
import piecework
from models import Linear, Stack, assert_same, attend, both_levels, compiled, rows, use_level
from piecework import (
    CompilationConfig,
    CompilationLevel,
    ConfigError,
    TraceDepartureError,
    counters,
    ignore_torch_compile,
    support_torch_compile,
)

if TYPE_CHECKING:
    from nowhere import Mask  # pyright: ignore[reportMissingImports]


@support_torch_compile
class Decorated(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


# --- compile of a module ------------------------------------------------------------------------------


def test_compiled_module_looks_like_the_original() -> None:
    model = Linear()
    call = compiled(model)
    assert call is not model and isinstance(call, Linear)
    assert type(call).__name__ == "Linear" and type(call).__module__ == "models"
    assert repr(call) == repr(model)
    assert call.__dict__ is model.__dict__
    assert list(call.state_dict()) == list(model.state_dict()) == ["linear.weight", "linear.bias"]
    assert [*call.parameters()] == [*model.parameters()] and call.linear is model.linear


@both_levels
def test_edits_on_either_side_are_seen_by_both(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    call(rows(4))
    call.linear.weight = nn.Parameter(torch.ones(6, 6))
    assert torch.equal(model.linear.weight, torch.ones(6, 6))
    assert_same(call, model, rows(4))
    model.linear.bias = nn.Parameter(torch.ones(6))
    assert torch.equal(call.linear.bias, torch.ones(6))
    assert_same(call, model, rows(4))
    call.scale = 3.0
    assert model.scale == 3.0
    with pytest.raises(TraceDepartureError, match=r"self.scale"):
        call(rows(4))
    call.eval()
    assert not model.training and not model.linear.training


def test_original_stays_eager_and_trains() -> None:
    model = Linear()
    call = compiled(model)
    call(rows(4))
    with counters.expect(num_graphs_seen=0):
        model(rows(4))
        model.linear(rows(3)).sum().backward()
        model.double()(rows(4).double())
    assert model.linear.weight.grad is not None
    assert type(model) is Linear


def test_compiling_twice_gives_two_forwards_of_one_original() -> None:
    model = Linear()
    first = compiled(model)
    second = compiled(first, level=2)
    assert isinstance(second, Linear) and type(second).__mro__.count(type(first)) == 0
    with counters.expect(num_graphs_seen=2):
        assert_same(first, model, rows(4))
        assert_same(second, model, rows(4))
    assert piecework.report(first).level == 3 and piecework.report(second).level == 2


def test_nothing_is_traced_before_the_first_call() -> None:
    with counters.expect(num_graphs_seen=0):
        call = compiled(Linear())
    assert piecework.report(call).level is None
    assert "not called yet" in str(piecework.report(call))


@pytest.mark.parametrize("called", [False, True])
def test_copies_and_pickles_compile_for_themselves(called: bool) -> None:
    model, x = Linear(), rows(4)
    call = compiled(model)
    if called:
        call(x)
    for twin in (copy.deepcopy(call), pickle.loads(pickle.dumps(call))):
        assert isinstance(twin, Linear) and type(twin).__name__ == "Linear" and type(twin) is not type(call)
        with counters.expect(num_graphs_seen=1):
            assert_same(twin, model, x)
        with torch.no_grad():
            twin.linear.weight.zero_()
        with counters.expect(num_graphs_seen=0):
            torch.testing.assert_close(twin(x), model.linear.bias.expand(4, 6) * 3 * 2)
        assert piecework.report(twin).level == 3
    shallow = copy.copy(call)
    assert shallow.linear is model.linear and shallow.__dict__ is not model.__dict__
    assert_same(shallow, model, x)
    assert_same(call, model, x)


def test_pickled_original_is_an_original() -> None:
    model = Linear()
    compiled(model)(rows(4))
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin) is Linear and all(
        type(twin.linear.__dict__[name]) is dict for name in ("_parameters", "_buffers")
    )
    torch.testing.assert_close(twin.linear.weight, model.linear.weight)


def test_saved_state_loads_into_a_plain_model() -> None:
    model = Linear()
    call = compiled(model)
    call(rows(4))
    buffer = io.BytesIO()
    torch.save(call.state_dict(), buffer)
    buffer.seek(0)
    fresh = Linear()
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert_same(call, fresh, rows(4))


@both_levels
def test_nothing_outlives_a_compiled_model(level: int) -> None:
    def use() -> list[weakref.ref[Any]]:
        model = Stack(4)
        call = compiled(model, level)
        results = [call(rows(n)) for n in (4, 2, 1)]
        piecework.verify_assumptions(call)
        found: list[Any] = [model, call, model.layers[0].weight, results[-1]]
        return [weakref.ref(each) for each in found]

    for _ in range(2):
        references = use()
        gc.collect()
        assert [reference() for reference in references] == [None] * 4


def test_nothing_outlives_a_decorated_model_or_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(monkeypatch, 3)

    def use() -> list[weakref.ref[Any]]:
        model = Decorated()
        result = model(rows(4))
        held = torch.ones(6)
        function = compiled(lambda x: torch.ops.models.scale3(x) + held)
        function(rows(4))
        return [weakref.ref(each) for each in (model, model.linear.weight, result, function, held)]

    references = use()
    gc.collect()
    assert [reference() for reference in references] == [None] * 5


def test_nothing_outlives_a_failed_compile() -> None:
    class Prints(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("no")
            return super().forward(x)

    def use() -> list[weakref.ref[Any]]:
        model = Prints()
        call = compiled(model)
        with pytest.raises(piecework.CompileError):
            call(rows(4))
        return [weakref.ref(model), weakref.ref(model.linear.weight)]

    references = use()
    gc.collect()
    assert [reference() for reference in references] == [None] * 2


# --- compile of a function ------------------------------------------------------------------------------


@both_levels
def test_function_keeps_its_name_and_stays_eager_itself(level: int) -> None:
    call = compiled(attend, level)
    assert call.__name__ == "attend" and call.__wrapped__ is attend
    with counters.expect(num_graphs_seen=1):
        assert_same(call, attend, rows(4))
    with counters.expect(num_graphs_seen=0):
        attend(rows(4))


@both_levels
def test_bound_method_is_compiled(level: int) -> None:
    class Engine:
        def __init__(self) -> None:
            self.linear = nn.Linear(6, 6)

        def embed(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.models.scale3(self.linear(x))

    engine = Engine()
    call = compiled(engine.embed, level)
    for n in (4, 2):
        assert_same(call, engine.embed, rows(n))


def test_lambda_without_annotations_is_compiled() -> None:
    call = compiled(lambda x: torch.ops.models.scale3(x) + 1)
    for n in (4, 2):
        torch.testing.assert_close(call(x := rows(n)), x * 3 + 1)


@both_levels
def test_two_closures_of_one_code_do_not_take_each_others_trace(level: int) -> None:
    def make(k: float) -> Any:
        return lambda x: torch.ops.models.scale3(x) * k

    calls = [(compiled(make(k), level), k) for k in (1.0, 2.0, 3.0)]
    for _ in range(2):
        for call, k in calls:
            torch.testing.assert_close(call(x := rows(4)), x * 3 * k)


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Linear, "compile takes a module or a function, got .*Linear.*decorate it with @support_torch_compile"),
        (3, "compile takes a module or a function, got 3"),
        (None, "compile takes a module or a function, got None"),
        ("model", "compile takes a module or a function, got 'model'"),
    ],
)
def test_compile_of_what_is_no_module_or_function_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        piecework.compile(given)


def test_config_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compile: config.*CompilationConfig\(\*\*"):
        piecework.compile(attend, config={"level": 3})  # pyright: ignore


@pytest.mark.parametrize("look", [piecework.report, piecework.release, piecework.verify_assumptions])
def test_looking_at_what_is_not_compiled_is_refused(look: Any) -> None:
    for other in (Linear(), attend, 3):
        with pytest.raises(ConfigError, match=r"takes what piecework.compile returned"):
            look(other)
    with pytest.raises(ConfigError, match="this Decorated has not been called yet"):
        look(Decorated())


def test_verify_before_the_first_call_is_refused_and_release_is_not() -> None:
    call = compiled(Linear())
    with pytest.raises(ConfigError, match="Linear has no trace yet: call it first, at level 2 or 3"):
        piecework.verify_assumptions(call)
    piecework.release(call)
    assert_same(call, Linear.forward.__get__(call), rows(4))


def test_an_instance_at_level_0_has_no_trace_to_verify() -> None:
    model = Decorated()
    model(rows(4))
    with pytest.raises(ConfigError, match="Decorated has no trace yet"):
        piecework.verify_assumptions(model)
    assert piecework.report(model).level == 0


# --- the decorator -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_decorated_class_follows_the_environment(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    use_level(monkeypatch, level)
    model = Decorated()
    with counters.expect(num_graphs_seen=int(level >= 2), num_pieces_seen=3 if level == 3 else 0):
        for n in (4, 1, 3):
            assert_same(model, model.forward, rows(n))
    assert piecework.report(model).level == level


def test_decorated_class_is_at_level_0_by_default() -> None:
    model = Decorated()
    with counters.expect(num_graphs_seen=0):
        result = model(rows(4))
    result.sum().backward()
    assert model.linear.weight.grad is not None


def test_decorated_class_follows_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    piecework.set_compilation_config(CompilationConfig(level=2))
    with counters.expect(num_graphs_seen=1, num_pieces_seen=0):
        Decorated()(rows(4))
    monkeypatch.setenv("PIECEWORK_LEVEL", "0")
    with counters.expect(num_graphs_seen=0):
        Decorated()(rows(4))


def test_level_is_read_once_per_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(monkeypatch, 2)
    model = Decorated()
    model(rows(4))
    monkeypatch.setenv("PIECEWORK_LEVEL", "0")
    with counters.expect(num_graphs_seen=0):
        assert not model(rows(4)).detach().requires_grad
    assert piecework.report(model).level == 2
    piecework.release(model)
    model(rows(4))
    assert piecework.report(model).level == 0


def test_level_0_in_the_environment_switches_compile_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_LEVEL", "0")
    model = Linear()
    call = compiled(model, level=3)
    with counters.expect(num_graphs_seen=0):
        call(rows(4)).sum().backward()
    assert model.linear.weight.grad is not None and piecework.report(call).level is CompilationLevel.NO_COMPILATION


def test_dims_are_given_to_the_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(monkeypatch, 3)

    @support_torch_compile(dynamic_arg_dims={"x": {0: "batch", 1: "seq"}})
    class Grid(nn.Module):
        def forward(self, x, mask=None):  # type: ignore[no-untyped-def]
            return torch.ops.models.scale3(x) * x.shape[1]

    model = Grid()
    with counters.expect(num_graphs_seen=1):
        for size in ((4, 4), (4, 5), (1, 1)):
            assert_same(model, model.forward, rows(*size))
    with pytest.raises(ConfigError, match="names 'y', which is no argument of Linear; its arguments are x"):
        support_torch_compile(dynamic_arg_dims={"y": 0})(type("Linear", (Linear,), {}))


def test_string_annotations_and_one_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(monkeypatch, 3)

    @support_torch_compile
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None, mask: Mask | None = None) -> Any:
            y = torch.ops.models.scale3(x)
            return y if bias is None else y + bias

    model = Masked()
    with counters.expect(num_graphs_seen=1):
        for n in (4, 2):
            assert_same(model, model.forward, rows(n), rows(n))


def test_enable_if_leaves_an_instance_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(monkeypatch, 3)
    asked: list[Any] = []

    def wants(instance: Any) -> bool:
        asked.append(instance)
        return instance.scale > 2

    @support_torch_compile(enable_if=wants)
    class Maybe(Linear):
        pass

    eager, fast = Maybe(), Maybe()
    fast.scale = 3.0
    with counters.expect(num_graphs_seen=1):
        for model in (eager, fast, eager, fast):
            assert_same(model, model.forward, rows(4))
    assert asked == [eager, fast]
    with pytest.raises(ConfigError, match="enable_if must be a function of the instance, got 3"):
        support_torch_compile(enable_if=3)(Linear)  # pyright: ignore


def test_twenty_instances_have_one_graph_each_and_so_have_subclasses(monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(monkeypatch, 3)

    @support_torch_compile
    class Scaled(nn.Module):
        def __init__(self, k: float) -> None:
            super().__init__()
            self.k = k
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.models.scale3(self.linear(x)) * self.k

    class More(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    class Same(Scaled):
        pass

    @support_torch_compile
    class Again(Scaled):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # pyright: ignore
            return super().forward(x) - y

    made = [*(Scaled(float(i)) for i in range(20)), More(2.0), Same(3.0)]
    with counters.expect(num_graphs_seen=len(made)):
        for _ in range(2):
            for model in made:
                assert_same(model, model.forward, rows(4))
    again = Again(2.0)
    with counters.expect(num_graphs_seen=1):
        for n in (4, 3):
            assert_same(again, again.forward, rows(n), rows(n))
    nested = nn.Sequential(Scaled(1.0), More(2.0), Same(3.0))

    def reference(x: torch.Tensor) -> torch.Tensor:
        for layer in nested:
            x = layer.forward(x)
        return x

    with counters.expect(num_graphs_seen=1):
        assert_same(compiled(nested, dims={"input": 0}), reference, rows(4))


@pytest.mark.parametrize("depth", [1, 2])
def test_dims_are_those_of_the_forward_that_a_subclass_has(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    use_level(monkeypatch, 3)

    @support_torch_compile
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.models.scale3(x)

    class Shifted(Scaled):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # pyright: ignore
            return super().forward(x) - y

    class Inherits(Shifted):
        pass

    model = (Shifted, Inherits)[depth - 1]()
    with counters.expect(num_graphs_seen=1):
        for n in (4, 3):
            assert_same(model, model.forward, rows(n), rows(n))


def test_decorated_module_inside_a_decorated_one_is_inlined(monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(monkeypatch, 3)

    @support_torch_compile
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Decorated()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    model = Outer()
    with counters.expect(num_graphs_seen=1):
        for n in (4, 2):
            assert_same(model, lambda x: model.inner.forward(x) + 1, rows(n))


def test_ignore_torch_compile_undoes_it_for_a_subclass(monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(monkeypatch, 3)

    @ignore_torch_compile
    class Plain(Decorated):
        pass

    with counters.expect(num_graphs_seen=0):
        model = Plain()
        model(rows(4)).sum().backward()
    assert model.linear.weight.grad is not None
    with counters.expect(num_graphs_seen=1):
        Decorated()(rows(4))
    with pytest.raises(ConfigError, match=r"ignore_torch_compile decorates a subclass of torch.nn.Module"):
        ignore_torch_compile(3)  # pyright: ignore


def test_decorating_twice_is_as_good_as_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(monkeypatch, 3)

    @support_torch_compile
    @support_torch_compile
    class Twice(Linear):
        pass

    model = Twice()
    with counters.expect(num_graphs_seen=1):
        for n in (4, 2):
            assert_same(model, model.forward, rows(n))


@pytest.mark.parametrize("given", [int, attend, 3, nn.Module, object])
def test_decorating_what_is_no_module_class_is_refused(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"support_torch_compile decorates a subclass of torch.nn.Module that has a f"
    ):
        support_torch_compile(given)


def test_decorating_a_class_whose_forward_varies_in_nothing_is_refused() -> None:
    class Counts(nn.Module):
        def forward(self, n: int) -> int:
            return n

    with pytest.raises(ConfigError, match=r'name one, for example dynamic_arg_dims={"n": 0}'):
        support_torch_compile(Counts)


def test_copies_and_pickles_of_a_decorated_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(monkeypatch, 3)
    model, x = Decorated(), rows(4)
    model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert type(twin) is Decorated and list(twin.state_dict()) == list(model.state_dict())
        torch.testing.assert_close(twin(x).detach(), model.forward(x).detach())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.linear.weight.zero_()
    torch.testing.assert_close(twin(x).detach(), (twin.linear.bias * 6).detach().expand(4, 6))
    torch.testing.assert_close(model(x).detach(), model.forward(x).detach())


def test_shallow_copy_of_a_decorated_instance_answers_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(monkeypatch, 3)
    model = Decorated()
    model(rows(4))
    twin = copy.copy(model)
    twin.scale = 5.0
    x = rows(4)
    torch.testing.assert_close(twin(x).detach(), twin.forward(x).detach())
    torch.testing.assert_close(model(x).detach(), model.forward(x).detach())


def test_compile_of_a_decorated_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decorated()
    call = compiled(model)
    with counters.expect(num_graphs_seen=1):
        for n in (4, 2):
            assert_same(call, model.forward, rows(n))
    with counters.expect(num_graphs_seen=0):
        model(rows(4)).sum().backward()


# --- settings and levels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_compile_at_each_level_is_equal_to_eager(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    monkeypatch.setenv("PIECEWORK_LEVEL", str(level))
    model = Linear()
    call = compiled(model, level=3)
    for n in (4, 1, 0, 7):
        assert_same(call, model, rows(n))
    assert piecework.report(call).level == level


def test_backend_as_a_callable_serves_levels_1_and_2_and_not_3() -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    piecework.set_torch_compile_backend(backend)
    for level, called in ((0, 0), (1, 1), (2, 1), (3, 0)):
        graphs.clear()
        model = Linear()
        assert_same(compiled(model, level), model, rows(4))
        assert len(graphs) == called, level


def test_backend_by_name_serves_levels_1_and_2(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def spy(graph: torch.fx.GraphModule, example_inputs: list[Any], **_: Any) -> Any:
        seen.append("spy")
        return graph.forward

    torch._dynamo.register_backend(spy, name="models_spy")
    piecework.set_torch_compile_backend("models_spy")
    for level in (1, 2, 3):
        model = Linear()
        assert_same(compiled(model, level), model, rows(4))
    assert seen == ["spy"] * 2
    piecework.set_torch_compile_backend(None)
    assert_same(compiled(attend, 2), attend, rows(4))
    assert seen == ["spy"] * 2


def test_set_compilation_config_decides_where_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    piecework.set_compilation_config(CompilationConfig(level=2, piece_compiler="eager"))
    call = piecework.compile(attend)
    call(rows(4))
    assert piecework.report(call).level == 2
    argument = piecework.compile(attend, config=CompilationConfig(level=3))
    argument(rows(4))
    assert piecework.report(argument).level == 3
    monkeypatch.setenv("PIECEWORK_LEVEL", "DYNAMO_AS_IS")
    environment = piecework.compile(attend, config=CompilationConfig(level=3))
    environment(rows(4))
    assert piecework.report(environment).level == 1


def test_level_1_allows_what_one_trace_does_not() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(x) if x.sum() > 0 else -x

    call = compiled(branches, 1)
    for x in (torch.ones(4, 6), -torch.ones(4, 6), torch.ones(4, 5)):
        assert_same(call, branches, x)


def test_level_1_has_guards_and_a_limit_of_its_own_per_instance() -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    piecework.set_torch_compile_backend(backend)
    for _ in range(12):
        model = Linear()
        call = compiled(model, 1)
        assert_same(call, model, rows(4))
        model.double()
        assert_same(call, model, rows(4).double())
    assert len(graphs) == 24


@both_levels
def test_release_traces_anew_at_the_next_call(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    call(rows(4))
    model.scale = 5.0
    piecework.release(call)
    assert piecework.report(call).level is None
    with counters.expect(num_graphs_seen=1):
        assert_same(call, model, rows(4, 6))
        assert_same(call, model, rows(3))
    model.scale = 6.0
    with pytest.raises(TraceDepartureError):
        call(rows(4))


def test_reset_forgets_everything() -> None:
    call = compiled(attend)
    call(rows(4))
    piecework.set_compilation_config(CompilationConfig(level=2))
    piecework.set_torch_compile_backend("aot_eager")
    piecework.set_attention_ops(["models::attn"])
    piecework.reset()
    assert counters.num_graphs_seen == 0
    assert piecework.report(call).level is None
    other = piecework.compile(attend)
    with counters.expect(num_graphs_seen=2, num_pieces_seen=3 + 1):
        call(rows(4))
        other(rows(4))
    assert piecework.report(other).level == 3


def test_report_tells_levels_pieces_and_calls() -> None:
    call = compiled(attend)
    call(rows(4))
    call(rows(0))
    report = piecework.report(call)
    assert (report.num_pieces, report.num_capturable_pieces, report.num_unique_pieces) == (3, 2, 2)
    text = str(report)
    assert "attend: level 3 (PIECEWISE)" in text and "1 call answered by the original forward: zero rows" in text
    assert models.OPS[0].partition("::")[0] in report.source or "attn" in report.source
