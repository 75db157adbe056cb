"""What each node of a traced graph writes to and shares memory with."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import capture_models  # registers the ops
import piecework
import split_models  # registers the ops
from piecework import CompileError
from piecework import torch_internals as internals
from piecework.effects import Effects, aten_name, find_effects, fresh_fake, line_of, op_name, overload_of, tensors_in
from split_models import ops, rows


def effects_of(function: Callable[..., Any], *args: Any) -> tuple[dict[str, torch.fx.Node], Effects]:
    """Trace a function with a size that varies; return the nodes by name, and their effects."""
    found: list[tuple[torch.fx.GraphModule, Effects]] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        found.append((graph, find_effects(graph, internals.current_fake_mode())))
        return graph.forward

    torch._dynamo.mark_dynamic(args[0], 0)
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    (graph, effects), *_ = found
    return {node.name: node for node in graph.graph.nodes}, effects


def nodes_with(nodes: dict[str, torch.fx.Node], target: str) -> list[torch.fx.Node]:
    return [node for node in nodes.values() if target in str(getattr(node.target, "__name__", node.target))]


def test_views_are_told_from_new_tensors() -> None:
    def model(x: torch.Tensor) -> Any:
        y = x * 2
        contiguous = y.reshape(-1, 2, 3)
        copied = y.t().reshape(-1)
        return contiguous, copied, y.t(), y.contiguous(), y.to(torch.float32), y.clone()

    nodes, effects = effects_of(model, rows(4))
    (product,) = nodes_with(nodes, "mul")
    first, second = nodes_with(nodes, "reshape")
    assert effects.is_view(first)
    assert effects.aliased[first] is product
    assert not effects.is_view(second)
    assert all(effects.is_view(node) for node in nodes_with(nodes, "t") if node.target == "t")
    for name in ("contiguous", "to"):  # Both give the very tensor here, and are repeated where they are used.
        (node,) = [node for node in nodes.values() if node.target == name]
        assert effects.is_view(node)
        assert node in effects.identical
    (clone,) = nodes_with(nodes, "clone")
    assert clone not in effects.aliased


def test_writes_through_views_reach_the_storage_of_the_base() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[1:].t().add_(1)
        return y

    nodes, effects = effects_of(model, rows(4))
    (product,), (add,) = nodes_with(nodes, "mul"), nodes_with(nodes, "add_")
    assert effects.written[add] == set(effects.storages[product])
    assert not effects.is_view(add)
    assert effects.aliased[add] is not product  # but the view that it writes to
    assert add in effects.identical


def test_operators_functions_and_items_that_write() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y += 1
        y[0] = 3
        F.relu(y, inplace=True)
        torch.add(x, 1, out=y)
        return y

    nodes, effects = effects_of(model, rows(4))
    (product,) = nodes_with(nodes, "mul")
    writers = [node for node in nodes.values() if effects.written.get(node)]
    assert [str(getattr(node.target, "__name__", node.target)) for node in writers] == [
        "iadd",
        "setitem",
        "relu",
        "add",
    ]
    assert {key for node in writers for key in effects.written[node]} == set(effects.storages[product])


def test_declared_writes_count_without_a_version() -> None:
    def model(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        ops.attn(x, x, out)
        ops.many(x, out, [x], cache)
        ops.many(x, q := torch.empty_like(x), [], extra=cache)
        ops.bad(x, q)
        return out

    nodes, effects = effects_of(model, rows(4), rows(4))
    cache = nodes["l_cache_"]
    attention, first, second, undeclared = (nodes_with(nodes, name) for name in ("attn", "many", "many", "bad"))
    out, q = nodes_with(nodes, "empty_like")
    assert effects.written[attention[0]] == set(effects.storages[out])
    assert effects.written[first[0]] == {*effects.storages[out], *effects.storages[cache]}
    assert effects.written[second[1]] == {*effects.storages[q], *effects.storages[cache]}
    x = nodes["l_x_"]  # What declares nothing may write to whatever it is given.
    assert effects.written[undeclared[0]] == {*effects.storages[x], *effects.storages[q]}


def test_numbers_that_follow_from_sizes() -> None:
    def model(x: torch.Tensor) -> Any:
        n = x.shape[0] * 2
        return x.new_zeros(n), x.reshape(-1).shape[0] // 3, x.sum()

    nodes, effects = effects_of(model, rows(4))
    numbers = {node.name for node in nodes.values() if node.op == "call_function" and effects.is_scalar(node)}
    assert numbers
    assert all(isinstance(effects.values[nodes[name]], (int, torch.SymInt)) for name in numbers)
    (total,) = nodes_with(nodes, "sum")
    assert not effects.is_scalar(total)


def test_items_of_an_op_with_several_results_are_its_own() -> None:
    def model(x: torch.Tensor) -> Any:
        a, b = ops.pair(x)
        c, d = (x + 1).chunk(2, dim=1)
        return a, b, c, d

    nodes, effects = effects_of(model, rows(4))
    items = [node for node in nodes.values() if node.target is operator.getitem]
    views = [node.args[0].name for node in items if effects.is_view(node)]  # pyright: ignore
    assert len(items) == 4
    assert set(views) == {"chunk"}


def test_items_of_an_op_that_gives_back_what_it_wrote_to_are_its_arguments() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        a, b = capture_models.more.rotate(x, y)
        c, d = capture_models.more.tail_and_sum(y)
        return a, b, c, d

    nodes, effects = effects_of(model, rows(4), rows(4))
    items = [node for node in nodes.values() if node.target is operator.getitem]
    assert [node in effects.identical for node in items] == [True, True, False, False]
    assert [effects.aliased[node].name for node in items[:2]] == ["l_x_", "l_y_"]
    assert not any(effects.is_view(node) for node in items), "an op that writes would run once for each look"


def test_allocations() -> None:
    def model(x: torch.Tensor) -> Any:
        n = x.shape[0]
        fresh = torch.empty_like(x), torch.empty(n, 2), x.new_empty(n), torch.empty_strided((n, 2), (2, 1))
        return (*fresh, torch.zeros(n))

    nodes, effects = effects_of(model, rows(4))
    made = {node.name: effects.is_allocation(node) for node in nodes.values() if "size" not in node.name}
    assert sum(made.values()) == 4
    assert [name for name in made if "zeros" in name and made[name]] == []


def test_shape_changed_in_place_names_the_line() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.unsqueeze_(0)  # the line
        return y

    with pytest.raises(Exception, match=r"changes the shape of a tensor in place.*test_effects\.py.*# the line"):
        effects_of(model, rows(4))


def test_fresh_fake_has_a_storage_of_its_own() -> None:
    mode = internals.new_fake_mode()
    with mode:
        parameter = torch.nn.Parameter(torch.empty(3, 4).t(), requires_grad=False)
        made = fresh_fake(parameter)
    assert isinstance(made, torch.nn.Parameter)
    assert (made.shape, made.stride(), made.requires_grad) == ((4, 3), (1, 4), False)
    assert internals.storage_key(made) != internals.storage_key(parameter)
    assert fresh_fake(7) == 7


def test_tensors_in_nests() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    assert [id(t) for t in tensors_in((a, [None, {"k": b}], 3))] == [id(a), id(b)]


def test_line_of_a_node_without_a_stack_is_empty() -> None:
    assert line_of(torch.fx.Graph().placeholder("x")) == ""


def call(target: Any, *args: Any, method: bool = False) -> torch.fx.Node:
    graph = torch.fx.Graph()
    return graph.call_method(target, args) if method else graph.call_function(target, args)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch.softmax, "aten::softmax"),
        (F.softmax, "aten::softmax"),
        (F.silu, "aten::silu"),
        (F.linear, "aten::linear"),
        (F.embedding, "aten::embedding"),
        (F.layer_norm, "aten::layer_norm"),
        (F.scaled_dot_product_attention, "aten::scaled_dot_product_attention"),
        (operator.matmul, "aten::matmul"),
        (operator.add, "aten::add"),
        (operator.iadd, "aten::add_"),
        (operator.truediv, "aten::div"),
        (operator.getitem, None),
        (torch.ops.aten.mm.default, "aten::mm"),
        (torch.ops.aten.softmax, "aten::softmax"),
        (torch.ops.cut.scale3.default, None),
        (print, None),
    ],
)
def test_aten_names(target: Any, name: str | None) -> None:
    assert aten_name(call(target)) == name


def test_names_of_methods_and_custom_ops() -> None:
    assert aten_name(call("softmax", method=True)) == "aten::softmax"
    assert aten_name(call("no_such_method", method=True)) is None
    assert op_name(call(ops.scale3)) == op_name(call(ops.scale3.default)) == "cut::scale3"
    assert op_name(call(torch.ops.cutlib.twice.scaled)) == "cutlib::twice"


def test_packet_picks_its_overload_by_the_arguments() -> None:
    twice = torch.ops.cutlib.twice
    x = torch.zeros(2)
    assert overload_of(call(twice), (x,), {}) is twice.default
    assert overload_of(call(twice), (x, 0.5), {}) is twice.scaled
    assert overload_of(call(twice.scaled), (x,), {}) is twice.scaled
    assert overload_of(call(ops.scale3), (x,), {}) is ops.scale3.default
    assert overload_of(call(torch.softmax), (x,), {}) is None
    assert split_models.library is not None


def test_declared_writes_of_an_op_of_a_library() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.cutlib.fill(x, out)
        return out

    nodes, effects = effects_of(model, rows(4))
    (fill,), (out,) = nodes_with(nodes, "fill"), nodes_with(nodes, "empty_like")
    assert effects.written[fill] == set(effects.storages[out])


def test_running_statistics_of_norms_are_written_in_training_only() -> None:
    def model(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(x, mean, var, training=True)
        y = y + F.batch_norm(x, mean, var, training=False)
        y = y + torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False)
        return y + F.instance_norm(x.unsqueeze(2).expand(-1, -1, 3), mean, var, use_input_stats=True)[:, :, 0]

    nodes, effects = effects_of(model, rows(4), torch.zeros(6), torch.ones(6))
    norms = nodes_with(nodes, "norm")
    assert [len(effects.written[node]) for node in norms] == [2, 0, 2, 2]


_runs_of_fake: list[torch.Tensor] = []


def _fake_of_once(x: torch.Tensor) -> torch.Tensor:
    """Do as kernels that run on fakes while Dynamo traces, and not on those of any size afterwards."""
    _runs_of_fake.append(x)
    if len(_runs_of_fake) > 1:
        raise RuntimeError("no such tensors\nand much more")
    return torch.empty_like(x)


torch.library.define("effects::once", "(Tensor x) -> Tensor")
torch.library.impl("effects::once", "CompositeExplicitAutograd", lambda x: x * 3)
torch.library.register_fake("effects::once", _fake_of_once)


@pytest.mark.parametrize("cuts", [(), ("effects::once",)])
def test_op_that_can_not_run_on_fakes_is_a_compile_error_with_its_name(cuts: tuple[str, ...]) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.effects.once(x + 1) * 2

    _runs_of_fake.clear()
    settings: dict[str, Any] = {"piece_compiler": "eager", "splitting_ops": cuts}
    text = r"effects::once can't run on fake tensors.*RuntimeError: no such tensors; .*register_fake.*once\(x"
    with pytest.raises(CompileError, match=text):
        piecework.compile(model, config=piecework.CompilationConfig(**settings))(torch.randn(3, 4))
    _runs_of_fake.clear()
    call = piecework.compile(model, config=piecework.CompilationConfig(**settings, on_failure="eager"))
    with pytest.warns(piecework.PieceworkWarning, match="runs eagerly from now on: effects::once"):
        assert torch.equal(call(x := torch.randn(3, 4)), model(x))
