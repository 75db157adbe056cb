"""Ways of breaking it that once worked: each gave a wrong answer or an internal error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import models
import piecework
import piecework_silly_attention  # noqa: F401 - registers an op
from models import Linear, assert_same, both_levels, compiled, refuses, rows
from piecework import CompilationConfig, CompileError, ConfigError, SplitError, TraceDepartureError, hookimpl, testing


def triple(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.models.scale3(x)


# --- state that raises no event on the model itself -------------------------------------------------


class Settings:
    def __init__(self) -> None:
        self.scale = 2.0


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.numbers = [1.0]
        self.table = {"a": 3.0}
        self.hidden = [nn.Linear(6, 6)]
        self.settings = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return triple(self.linear(x)) * self.numbers[0] * self.settings.scale * self.table["a"] + self.hidden[0](x)


def set_number(model: Holder) -> None:
    model.numbers[0] = 7.0


def set_setting(model: Holder) -> None:
    model.settings.scale = 5.0


def set_entry(model: Holder) -> None:
    model.table["a"] = 4.0


def replace_hidden(model: Holder) -> None:
    model.hidden[0] = nn.Linear(6, 6)


def replace_hidden_weight(model: Holder) -> None:
    model.hidden[0].weight = nn.Parameter(torch.ones(6, 6))


def answers_right_or_departs(call: Any, model: Any) -> None:
    """Within the stated number of calls, either the new answer or a departure."""
    x = rows(4)
    with torch.no_grad():
        for _ in range(piecework.report(call).num_calls_for_all_addresses):
            try:
                call(x)
            except TraceDepartureError:
                return
        torch.testing.assert_close(call(x), model(x))


CHANGES = [set_number, set_setting, set_entry, replace_hidden, replace_hidden_weight]


@both_levels
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("as_function", [False, True])
def test_what_containers_and_plain_objects_hold_is_looked_at_in_turns(
    level: int, change: Any, as_function: bool
) -> None:
    model = Holder()
    call = compiled((lambda x: model(x)) if as_function else model, level)
    assert_same(call, model, rows(4))
    change(model)
    answers_right_or_departs(call, model)


@both_levels
def test_a_submodule_in_place_of_a_traced_one_is_watched(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    assert_same(call, model, rows(4))
    model.linear = nn.Linear(6, 6)
    assert_same(call, model, rows(4))
    model.linear.weight = nn.Parameter(torch.ones(6, 6))
    assert_same(call, model, rows(4))


@both_levels
def test_the_model_behind_a_compiled_function_is_watched(level: int) -> None:
    model = Linear()
    for target in (lambda x: model(x), model.forward):
        call = compiled(target, level)
        call(rows(4))
        model.linear.weight = nn.Parameter(torch.randn(6, 6))
        assert_same(call, model, rows(4))


@both_levels
def test_a_second_compile_that_fails_leaves_the_first_watching(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    call(rows(4))
    with pytest.raises(piecework.PieceworkError):
        piecework.compile(model, config=CompilationConfig(level=3, splitting_ops=["silly::nope"]))(rows(4))
    model._parameters["scale"] = model.linear._parameters["weight"]
    model.linear._parameters["weight"] = nn.Parameter(torch.ones(6, 6))
    assert_same(call, model, rows(4))


# --- memory that is shared -----------------------------------------------------------------------------


class Doubling(nn.Module):
    b: torch.Tensor
    d: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(6))
        self.register_buffer("d", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.d
        self.b.mul_(2)
        return triple(y)


@both_levels
def test_an_argument_that_is_a_written_buffer_departs(level: int) -> None:
    model = Doubling()
    call = compiled(model, level)
    call(rows(4))
    refuses(call, model.b[None], match="shares memory with a parameter or buffer")


@both_levels
def test_buffers_that_become_one_depart_where_one_is_written(level: int) -> None:
    model = Doubling()
    call = compiled(model, level)
    call(rows(4))
    model.d = model.b
    refuses(call, rows(4), match="share memory now")


# --- odd tensors and arguments --------------------------------------------------------------------------


@both_levels
def test_tensors_of_other_kinds_are_refused(level: int) -> None:
    call = compiled(models.attend, level)
    call(rows(4))
    nested = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(1, 6)], layout=torch.strided)
    for odd in (torch.complex(rows(4), rows(4)).conj().imag, nested, rows(4).to_sparse_csr()):
        refuses(call, odd, match="argument x was a plain tensor when traced, now it is")
    with pytest.raises(TraceDepartureError, match=r"torch.func"):
        torch.vmap(call)(torch.ones(2, 4, 6))


@both_levels
def test_containers_that_can_not_be_checked_are_refused(level: int) -> None:
    def takes(x: torch.Tensor, more: Any) -> torch.Tensor:
        return triple(x)

    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CompileError, match="holds itself"):
        compiled(takes, level)(rows(4), loop)
    with pytest.raises(CompileError, match="keys must be strings or numbers"):
        compiled(takes, level)(rows(4), {torch.float32: 1})
    call = compiled(takes, level)
    call(rows(4), {"{q}": torch.ones(4, 2)})
    refuses(call, rows(4), {"{q}": torch.ones(5, 2)}, match=r"\{q\}")


def test_one_dim_under_two_names_is_refused() -> None:
    call = piecework.compile(lambda x: x + 1, dynamic_arg_dims={"x": {0: "a", -2: "b"}})
    with pytest.raises(ConfigError, match="twice: 'a' and 'b'"):
        call(rows(4))


def yields(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x + 1


async def awaits(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Yielding(nn.Module):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x + 1


@pytest.mark.parametrize(("target", "kind"), [(yields, "generator"), (awaits, "coroutine"), (Yielding(), "generator")])
def test_what_gives_its_result_later_is_refused(target: Any, kind: str) -> None:
    """A trace held the steps as if all were done at the call, and gave a tensor in the place of a coroutine."""
    with pytest.raises(ConfigError, match=f"returns its result, and .* is a {kind} function"):
        piecework.compile(target)


def test_a_builtin_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="Python signature"):
        piecework.compile(torch.relu)


# --- results -----------------------------------------------------------------------------------------------


@both_levels
@pytest.mark.parametrize(
    "form",
    [
        lambda y: lambda: y,
        lambda y: {y},
        lambda y: iter([y]),
        lambda y: {"a": y}.values(),
        lambda y: y.numpy(),
    ],
    ids=["closure", "set", "iterator", "values", "numpy"],
)
def test_results_that_would_hold_fake_tensors_are_refused(level: int, form: Any) -> None:
    with pytest.raises(CompileError):
        compiled(lambda x: form(triple(x)), level)(rows(4))


# --- graphs -------------------------------------------------------------------------------------------------

twice: Any = torch.compiler.allow_in_graph(lambda x: x * 2.0)
fivefold: Any = torch.compiler.allow_in_graph(lambda x: x * 5.0)


def test_functions_of_one_name_are_told_apart() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return triple(fivefold(triple(twice(x))))

    assert_same(compiled(model, 3), model, rows(4))


@both_levels
def test_a_vmap_inside_a_model_stays_together(level: int) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return triple(torch.vmap(lambda row: row * 2 + row.sum())(x)) + 1

    for n in (4, 2):
        assert_same(compiled(model, level), model, rows(n))


def derived(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.func.grad(lambda x: function(x).sum())


def gradients_off_inside(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        constant = x * 2
    return constant * x**2


def derive_with_gradients_on(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():  # Dynamo leaves out what switches on again inside
        return derived(torch.sin)(x) * 2


def derive_and_leave_gradients_on(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return derived(gradients_off_inside)(x) + derived(torch.cos)(x)


@both_levels
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize(
    "derive",
    [
        derived(torch.sin),
        derived(derived(lambda x: x**3)),
        derived(gradients_off_inside),
        torch.vmap(derived(torch.sin)),
        lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
        derive_with_gradients_on,
        derive_and_leave_gradients_on,
    ],
)
def test_derivatives_inside_a_model(derive: Callable[[torch.Tensor], torch.Tensor], compiler: str, level: int) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = derive(triple(x) + 1)
        return triple(y) + y, y * 2

    assert derive(torch.ones(2, 3)).abs().sum() > 0.1
    config = CompilationConfig(
        level=level,
        splitting_ops=("models::scale3",) if level == 3 else None,
        piece_compiler=compiler,
        capture_sizes=(),
    )
    with testing.plugins(load_installed=compiler == "inductor"):
        call = piecework.compile(model, config=config, dynamic_arg_dims={"x": 0})
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                for n in (4, 3):
                    torch.testing.assert_close(call(x := rows(n)), model(x))
                    assert torch.is_grad_enabled() == grad


vjp: Any = torch.func.vjp


def pull_back_a_tripled_argument(x: torch.Tensor) -> torch.Tensor:
    _, pull_back = vjp(torch.sin, x)
    return pull_back(triple(x))[0] + 1


def pull_back_a_tripled_result(x: torch.Tensor) -> torch.Tensor:
    y, pull_back = vjp(lambda x: x.sin() * x, x)
    return pull_back(triple(y))[0] + y


@pytest.mark.parametrize("model", [pull_back_a_tripled_argument, pull_back_a_tripled_result])
def test_a_derivative_on_both_sides_of_a_cut_is_refused(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
    call = compiled(model, 3)
    with pytest.raises(SplitError, match=r"torch\.func.*crosses a cut.*take it before"):
        call(rows(4))


@both_levels
def test_numbers_rounded_from_sizes_cross_cuts(level: int) -> None:
    import math

    def model(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        return triple(x + 1) * int(n * 0.5) + math.ceil(n / 3) + math.floor(n / 3)

    call = compiled(model, level)
    for n in (4, 7, 2):
        assert_same(call, model, rows(n))


def test_batch_norm_in_training_compiles_by_inductor() -> None:
    model, original = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    config = CompilationConfig(level=3, splitting_ops=(), piece_compiler="inductor")
    with torch.no_grad(), testing.plugins(load_installed=True):
        call = piecework.compile(model, config=config, dynamic_arg_dims={"input": 0})
        for n in (4, 7):
            x = rows(n)
            torch.testing.assert_close(call(x), original(x))
    torch.testing.assert_close(model.running_var, original.running_var)


class Spoiling:
    name = "spoiling"

    @hookimpl
    def piecework_compile_piece(self, piece: piecework.Piece) -> None:
        for node in list(piece.graph.graph.nodes):
            if node.op == "call_function":
                node.args = (node.args[0], 100)
        piece.graph.recompile()


def test_a_compiler_that_spoils_a_graph_and_declines_changes_nothing() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return triple(x + 1) + 2

    with testing.plugins(Spoiling()), torch.no_grad():
        call = piecework.compile(model, config=CompilationConfig(level=3, splitting_ops=models.OPS))
        x = rows(4)
        torch.testing.assert_close(call(x), model(x))


def test_products_of_three_dims_are_looked_through_with_their_sizes_symbolic() -> None:
    weight = torch.randn(6, 6)

    def model(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight) + x @ weight

    config = CompilationConfig(level=3, splitting_ops=(), piece_compiler="eager")
    call = piecework.compile(model, config=config, dynamic_arg_dims={"x": {0: "batch", 1: "seq"}})
    with torch.no_grad():
        for shape in ((2, 3, 6), (4, 5, 6)):
            x = torch.randn(shape)
            torch.testing.assert_close(call(x), model(x))
