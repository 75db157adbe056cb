"""One call against what the trace assumed: sizes, overlap, gradients, autocast; and calls that go elsewhere."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.autograd import forward_ad

import models
import piecework
from models import Linear, assert_same, attend, both_levels, compiled, refuses, rows
from piecework import CompilationConfig, GradientNotSupported, PieceworkWarning, counters, testing

# --- sizes ------------------------------------------------------------------------------------------


@both_levels
@pytest.mark.parametrize("first", [1, 5, 0])
def test_one_trace_serves_twenty_sizes(level: int, first: int) -> None:
    call = compiled(attend, level)
    with counters.expect(num_graphs_seen=1):
        for n in (first, *range(1, 21)):
            x = rows(n)
            result = call(x)
            assert result.shape == (n, 6)
            torch.testing.assert_close(result, attend(x))


def test_one_inductor_trace_serves_sizes_from_one_row_up() -> None:
    pytest.importorskip("piecework_inductor")
    call = compiled(attend, piece_compiler="inductor")
    with counters.expect(num_graphs_seen=1):
        for n in (1, 5, 2, 17):
            assert_same(call, attend, rows(n))


@both_levels
def test_zero_rows_are_answered_by_the_original_and_counted(level: int) -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(x) if x.shape[0] else torch.full((2, 2), 7.0)

    call = compiled(branches, level)
    torch.testing.assert_close(call(rows(0)), torch.full((2, 2), 7.0))
    assert_same(call, branches, rows(4))
    for _ in range(2):
        torch.testing.assert_close(call(rows(0)), torch.full((2, 2), 7.0))
    assert piecework.report(call).num_eager_calls == {"zero rows": 2}
    assert_same(call, branches, rows(4))


@both_levels
def test_relation_between_sizes_is_checked_and_quotes_the_line(level: int) -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.models.scale3(x)
        if x.shape[0] > 3:
            y = y + 1
        return y

    call = compiled(branches, level)
    for n in (5, 4, 9):
        assert_same(call, branches, rows(n))
    refuses(call, rows(3), match=r"the trace holds for.*rows.*read.* at: .*if x.shape\[0\] > 3.*this call has rows = 3")
    assert_same(call, branches, rows(6))
    assert any("x.shape[0] > 3" in relation for relation in piecework.report(call).relations)


@both_levels
def test_relation_between_two_dims_is_checked(level: int) -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(x) * (2 if x.shape[0] < 2 * x.shape[1] else 3)

    call = compiled(branches, level, {"x": {0: "batch", 1: "seq"}})
    for size in ((4, 3), (1, 1), (5, 9)):
        assert_same(call, branches, rows(*size))
    refuses(call, rows(6, 3), match="batch = 6, seq = 3")


@both_levels
def test_model_that_branches_on_one_row_is_noticed_there(level: int) -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(x) if x.shape[0] == 1 else -x

    call = compiled(branches, level)
    for n in (4, 2):
        assert_same(call, branches, rows(n))
    refuses(call, rows(1), match=r"if x.shape\[0\] == 1|x.shape\[0\] == 1")


@both_levels
def test_model_that_squeezes_its_rows_is_noticed_at_one_row(level: int) -> None:
    def squeezes(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(x).squeeze(0)

    call = compiled(squeezes, level)
    assert_same(call, squeezes, rows(4))
    try:
        assert_same(call, squeezes, rows(1))
    except piecework.TraceDepartureError as error:
        assert "rows = 1" in str(error)  # noqa: PT017 - either is right, a wrong shape is not


# --- arguments that are the same or overlap -----------------------------------------------------------


@both_levels
def test_same_tensor_twice_at_the_first_call_is_traced_as_two(level: int) -> None:
    def mix(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        torch.ops.models.attn(q, k, out)
        return out - k

    a, b = rows(4), rows(4)
    for order in ([(a, a), (a, b), (b, a)], [(a, b), (a, a)]):
        call = compiled(mix, level)
        with counters.expect(num_graphs_seen=1):
            for q, k in order:
                torch.testing.assert_close(call(q, k), mix(q, k))


@both_levels
def test_overlap_with_a_written_argument_is_refused(level: int) -> None:
    def write(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        q.add_(k)
        return torch.ops.models.scale3(q) + k

    call = compiled(write, level)
    assert_same(call, write, rows(4), rows(4))
    base = rows(8)
    untouched = base.clone()
    message = "arguments q and k share memory, and the model writes to q; they were traced as separate"
    refuses(call, base[:4], base[:4], match=message)
    refuses(call, base[:4], base[3:7], match=message)
    same = base[:4]
    refuses(call, same, same, match=message)
    torch.testing.assert_close(base, untouched)
    assert_same(call, write, base[:4], base[4:])


# --- inference only ------------------------------------------------------------------------------------


@both_levels
def test_backward_through_a_compiled_model_is_refused(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    result = call(rows(4))
    assert result.requires_grad
    with pytest.raises(GradientNotSupported, match="compiled for inference"):
        result.sum().backward()
    assert model.linear.weight.grad is None


@both_levels
def test_forward_mode_derivative_is_refused(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    with forward_ad.dual_level():
        assert_same(call, model, rows(4))  # plain tensors are as ever
        with pytest.raises(GradientNotSupported, match=r"forward-mode derivative .*call the original model"):
            call(forward_ad.make_dual(rows(4), rows(4)))
    call(rows(4))


@both_levels
def test_forward_mode_derivative_among_others_is_refused(level: int) -> None:
    call = compiled(lambda x, pair: models.attend(x) + pair[0], level, dims={"x": 0, "pair": 0})
    call(rows(4), (rows(4), 1))
    with forward_ad.dual_level(), pytest.raises(GradientNotSupported, match="forward-mode derivative"):
        call(rows(4), (forward_ad.make_dual(rows(4), rows(4)), 1))


@both_levels
def test_gradient_is_refused_where_the_loss_has_other_parts_too(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    x = rows(4).requires_grad_()
    with pytest.raises(GradientNotSupported):
        torch.autograd.grad(call(x).sum() + x.sum(), x)
    weight = model.linear.weight
    with pytest.raises(GradientNotSupported):
        torch.autograd.grad(call(x).sum() + weight.sum(), weight)
    with pytest.raises(GradientNotSupported):
        torch.autograd.grad(call(x).sum(), x, allow_unused=True)


@both_levels
def test_results_require_no_grad_without_need(level: int) -> None:
    assert not compiled(attend, level)(rows(4)).requires_grad
    model = Linear()
    call = compiled(model, level)
    with torch.no_grad():
        assert not call(rows(4)).requires_grad
    model.requires_grad_(False)
    assert not call(rows(4)).requires_grad
    assert call(rows(4).requires_grad_()).requires_grad


@both_levels
def test_results_may_be_changed_in_place(level: int) -> None:
    call, x = compiled(Linear(), level), rows(4)
    expected = call(x).detach() + 1
    result = call(x)
    result.add_(1)
    torch.testing.assert_close(result.detach(), expected)
    with torch.no_grad():
        call(x).zero_()


@both_levels
def test_integer_results_carry_no_node(level: int) -> None:
    class Best(Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return y, y.argmax(-1), y > 0

    values, indices, positive = compiled(Best(), level)(rows(4))
    assert values.requires_grad
    assert not indices.requires_grad and indices.grad_fn is None and positive.grad_fn is None
    assert indices.dtype == torch.int64


@both_levels
def test_grad_modes_may_change_from_call_to_call(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    with counters.expect(num_graphs_seen=1):
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
            for n in (4, 1):
                x = rows(n)
                with mode():
                    torch.testing.assert_close(call(x).detach(), model(x).detach())


@both_levels
def test_tensors_made_under_inference_mode_are_no_departure(level: int) -> None:
    with torch.inference_mode():
        inner = rows(4)
    model = Linear()
    for order in ((inner, rows(4)), (rows(4), inner)):
        call = compiled(model, level)
        with counters.expect(num_graphs_seen=1):
            for x in order:
                assert_same(call, model, x)
                with torch.inference_mode():
                    torch.testing.assert_close(call(x), model(x))


@both_levels
def test_such_tensors_have_the_strides_that_their_size_asks_for(level: int) -> None:
    call = compiled(attend, level)
    assert_same(call, attend, rows(6, 4).t())
    with torch.inference_mode():
        for n in (3, 5):
            x = rows(6, n).t()
            torch.testing.assert_close(call(x), attend(x))
    refuses(call, rows(3), match=r"strides of argument x are \(6, 1\), the trace needs \(1, 3\) for the shape \(3, 6\)")


@both_levels
def test_results_feed_back_as_inputs(level: int) -> None:
    call = compiled(attend, level)
    kept = [(x, call(x)) for x in (rows(4) for _ in range(5))]
    for x, result in kept:
        torch.testing.assert_close(result, attend(x))
    z = w = rows(4)
    for _ in range(5):
        z, w = call(z), attend(w)
    torch.testing.assert_close(z, w)
    torch.testing.assert_close(call(z[1:3]), attend(w[1:3]))


@both_levels
def test_model_that_reads_the_grad_mode_is_noticed_when_it_changes(level: int) -> None:
    call, x = compiled(reads_grad_mode, level), rows(4)
    with torch.no_grad():
        assert_same(call, reads_grad_mode, x)
    refuses(call, x, match=r"asks torch.is_grad_enabled\(\), which was False when traced, now it is True")
    with torch.no_grad():
        assert_same(call, reads_grad_mode, x)


def reads_grad_mode(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.models.scale3(x) + (1 if torch.is_grad_enabled() else 2)


@pytest.mark.parametrize("first", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_backend_of_level_2_compiles_for_inference(first: Any) -> None:
    grad_modes: list[bool] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        grad_modes.append(torch.is_grad_enabled())
        return lookup_backend("aot_eager")(graph, example_inputs)

    piecework.set_torch_compile_backend(backend)
    model = Linear()
    call = compiled(model, 2)
    for mode in (first, torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            torch.testing.assert_close(call(x := rows(4)).detach(), model(x).detach())
    assert grad_modes == [False]


# --- autocast ------------------------------------------------------------------------------------------


@both_levels
def test_autocast_around_the_model_is_traced_and_checked(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for n in (4, 3):
            x = rows(n)
            result, expected = call(x), model(x)
            assert result.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(result, expected)
    refuses(call, rows(4), match=r"autocast was \{'cpu': torch.bfloat16\} when traced, now it is off")
    with torch.autocast("cpu", torch.float16):
        refuses(call, rows(4), match=r"autocast was .*bfloat16.* now it is \{'cpu': torch.float16\}")


@both_levels
def test_autocast_that_was_off_is_checked(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    for n in (4, 3):
        call(rows(n))
    with torch.autocast("cpu", torch.bfloat16):
        refuses(call, rows(4), match="autocast was off when traced, now it is")
    assert_same(call, model, rows(5))


# --- a departure answered eagerly -----------------------------------------------------------------------


@both_levels
def test_departure_may_be_answered_eagerly_with_one_warning_per_problem(level: int) -> None:
    model = Linear()
    call = compiled(model, level, on_failure="eager")
    assert_same(call, model, rows(4))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(PieceworkWarning, match="Linear answers a call eagerly: autocast was off"):
            assert call(rows(4)).dtype == torch.bfloat16
        assert call(rows(3)).dtype == torch.bfloat16  # another warning would be an error
    model.scale = 5.0
    with pytest.warns(PieceworkWarning, match="answers a call eagerly.*scale"):
        assert_same(call, model, rows(4))
    for n in (3, 4):
        assert_same(call, model, rows(n))
    assert piecework.report(call).num_eager_calls == {"departure from the trace": 5}
    model.scale = 2.0
    assert_same(call, model, rows(4))
    assert piecework.report(call).num_eager_calls == {"departure from the trace": 5}


@both_levels
def test_eager_answer_of_a_departing_function_is_the_functions_own(level: int) -> None:
    def add(x: torch.Tensor, *more: torch.Tensor, k: float = 2.0, **named: float) -> torch.Tensor:
        y = torch.ops.models.scale3(x) * k
        for tensor in more:
            y = y + tensor
        return y + sum(named.values())

    call = compiled(add, level, on_failure="eager")
    assert_same(call, add, rows(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PieceworkWarning)
        assert_same(call, add, rows(4), rows(4), rows(4), k=3.0, extra=1.0)
        assert_same(call, add, rows(4).double())
    assert piecework.report(call).num_eager_calls == {"departure from the trace": 2}


# --- inside something else ------------------------------------------------------------------------------


def test_exception_of_a_splitting_op_comes_through_and_the_next_call_works() -> None:
    def guarded(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.models.checked(x, out)
        return out + 1

    big = torch.ones(3, 6) * 1e9
    for calls in ((rows(3), big, rows(3)), (big, rows(3), big, rows(2))):
        call = compiled(guarded)
        with counters.expect(num_graphs_seen=1):
            for x in calls:
                if x is big:
                    with pytest.raises(ValueError, match="too big for models::checked"):
                        call(x)
                    assert torch.is_grad_enabled()
                else:
                    torch.testing.assert_close(call(x), x + 1)


@both_levels
def test_compiled_model_inside_another_compiled_model_is_traced_through(level: int) -> None:
    inner_module = Linear()
    inner = compiled(inner_module, level)
    outer_module = nn.Sequential(inner, nn.ReLU())
    outer = compiled(outer_module, level, {"input": 0})
    reference = nn.Sequential(inner_module, nn.ReLU())
    with counters.expect(num_graphs_seen=1):
        for n in (4, 2):
            assert_same(outer, reference, rows(n))
    with counters.expect(num_graphs_seen=1):
        assert_same(inner, inner_module, rows(4))
        assert_same(inner, inner_module, rows(3))
    warm = compiled(nn.Sequential(inner, nn.ReLU()), level, {"input": 0})
    with counters.expect(num_graphs_seen=1):
        assert_same(warm, reference, rows(4))


@both_levels
@pytest.mark.parametrize("warm", [False, True])
def test_compiled_model_and_function_inside_torch_compile(level: int, warm: bool) -> None:
    module = Linear()
    model, function = compiled(module, level), compiled(attend, level)
    if warm:
        model(rows(4))
        function(rows(4))

    def around(x: torch.Tensor) -> torch.Tensor:
        return function(model(x)) + 1

    call = torch.compile(around, backend="eager", fullgraph=True)
    with counters.expect(num_graphs_seen=0):
        for n in (4, 3):
            assert_same(call, lambda x: attend(module(x)) + 1, rows(n))


@both_levels
def test_eight_threads_on_a_cold_and_a_warm_model(level: int) -> None:
    call = compiled(attend, level)

    def work(seed: int) -> int:
        generator = torch.Generator().manual_seed(seed)
        wrong = 0
        for i in range(40):
            x = torch.randn(1 + (seed + i) % 8, 6, generator=generator)
            wrong += not torch.allclose(call(x), attend(x))
        return wrong

    for graphs in (1, 0):
        with counters.expect(num_graphs_seen=graphs), ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == [0] * 8


def test_compile_sizes_run_their_own_code() -> None:
    seen: list[Any] = []

    class Compiler:
        @piecework.hookimpl
        def piecework_compile_piece(self, piece: piecework.Piece) -> piecework.CompiledPiece:
            seen.append(piece.size)
            size = piece.size
            forward = piece.graph.forward

            def run(*args: Any) -> Any:
                ran.append(size)
                return forward(*args)

            return piecework.CompiledPiece(run=run)

    ran: list[Any] = []
    with testing.plugins(Compiler()):
        config = CompilationConfig(splitting_ops=models.OPS, compile_sizes=[2])
        call = piecework.compile(attend, config=config)
        for n in (4, 2, 1):
            ran.clear()
            assert_same(call, attend, rows(n))
            assert set(ran) == {2 if n == 2 else None}
    assert set(seen) == {None, 2}
