"""The Inductor plugin: options, results, and the cheapest correct call of what it compiled."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import align_inputs_from_check_idxs, fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._ordered_set import OrderedSet

import piecework
import piecework_inductor
from piecework import (
    CompilationConfig,
    CompileError,
    ConfigError,
    Piece,
    PieceworkWarning,
    counters,
    hookimpl,
    read_options,
)
from piecework.testing import plugins
from piecework_inductor import compiler, inductor_internals, passes
from piecework_inductor.options import InductorOptions
from piecework_inductor.passes import UnfuseResiduals
from piecework_inductor.settings import check_settings
from split_models import compiled_by, compiled_state, ops, rows


@pytest.fixture(autouse=True)
def only_inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    with plugins(("inductor", piecework_inductor)) as manager:
        yield manager


def by_inductor(model: Any, **settings: Any) -> Any:
    return compiled_by(model, piece_compiler="inductor", **settings)


class Block(nn.Module):
    """A linear layer, a norm and a gate around an op; two pieces, both with fresh outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.inner(x).chunk(2, dim=-1)
        out = torch.empty_like(up)
        up = F.silu(gate) * up
        ops.attn(up, up, out)
        return x + self.outer(out) / x.shape[0]


# --- options --------------------------------------------------------------------------------------


def read(**given: Any) -> InductorOptions:
    return read_options(InductorOptions, CompilationConfig(plugin_options={"inductor": given}), "inductor")


def test_defaults() -> None:
    assert read() == InductorOptions()
    assert InductorOptions().compile_timeout_s == 300


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compile_timeout": 1}, "plugin_options['inductor'].compile_timeout: "),
        ({"compile_timeout_s": "1"}, "plugin_options['inductor'].compile_timeout_s: "),
        ({"compile_timeout_s": 0}, "compile_timeout_s: "),
        ({"call_inner_function": 1}, "call_inner_function: "),
        ({"config": ["max_autotune"]}, "config: "),
    ],
)
def test_wrong_option_names_it_and_all_there_are(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**given)
    assert words in str(caught.value)
    assert "the options are config, compile_timeout_s, call_inner_function" in str(caught.value)


@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_wrong_option_reaches_the_user(on_failure: str) -> None:
    settings = {"plugin_options": {"inductor": {"fast": True}}, "on_failure": on_failure}
    with pytest.raises(ConfigError, match="fast"):
        by_inductor(Block(), **settings)(rows(4))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"max_autotun": True}, r"\['max_autotun'\]: this torch has no such setting .*nearest are max_autotune"),
        ({"max_autotune": "yes"}, r"\['max_autotune'\]: Input should be a valid boolean, got 'yes'"),
        ({"max_autotune": 1}, "valid boolean, got 1"),
        ({"triton.cudagraphs": True}, "recorded by the plugin that captures"),
    ],
)
@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_wrong_setting_of_inductor_names_it(config: dict[str, Any], words: str, on_failure: str) -> None:
    settings = {"plugin_options": {"inductor": {"config": config}}, "on_failure": on_failure}
    with pytest.raises(ConfigError, match=words):
        by_inductor(Block(), **settings)(rows(4))


def test_settings_of_inductor_take_their_defaults_and_what_has_no_type_anything() -> None:
    values = {name: inductor_internals.process_wide(name) for name in inductor_internals.setting_names()}
    check_settings({name: value for name, value in values.items() if is_json(value)})
    untyped = [name for name in values if inductor_internals.setting_type(name) is type(None)]
    assert untyped
    check_settings(dict.fromkeys(untyped, "x"))


def is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def test_right_settings_of_inductor_are_taken() -> None:
    config = {"epilogue_fusion": False, "max_autotune_gemm_backends": "ATEN", "realize_reads_threshold": 4}
    block, x = Block(), rows(4)
    with torch.no_grad():
        torch.testing.assert_close(by_inductor(block, plugin_options={"inductor": {"config": config}})(x), block(x))


# --- a compile that fails or takes long -----------------------------------------------------------


def replace_compile(monkeypatch: pytest.MonkeyPatch, replacement: Callable[[torch.fx.GraphModule], Any]) -> None:
    monkeypatch.setattr(compiler.internals, "compile_graph", lambda graph, examples, config: replacement(graph))


def test_piece_that_outlasts_its_time_is_named_while_it_compiles_and_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said_meanwhile: list[str] = []

    def slow(graph: torch.fx.GraphModule) -> Any:
        end = time.perf_counter() + 5
        while not caplog.records and time.perf_counter() < end:
            time.sleep(0.002)
        said_meanwhile.append(caplog.text)
        return graph.forward

    replace_compile(monkeypatch, slow)
    limit = {"inductor": {"compile_timeout_s": 0.02}}
    with caplog.at_level(logging.WARNING, "piecework"), pytest.raises(CompileError) as caught:
        by_inductor(Block(), plugin_options=limit)(rows(4))
    assert "Inductor has been compiling piece_0 for more than 0.02 s (compile_timeout_s)" in said_meanwhile[0]
    assert "for piece_0, more than compile_timeout_s=0.02; raise it in plugin_options" in str(caught.value)


def test_piece_within_its_time_is_no_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    replace_compile(monkeypatch, lambda graph: graph.forward)
    with caplog.at_level(logging.WARNING, "piecework"):
        torch.testing.assert_close(by_inductor(Block())(rows(4)), Block()(rows(4)))
    assert not [record for record in caplog.records if record.name.startswith("piecework")]


def test_failed_compile_names_piece_and_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: torch.fx.GraphModule) -> Any:
        raise RuntimeError("\n\nno C++ compiler\nand more")

    replace_compile(monkeypatch, fail)
    with pytest.raises(
        CompileError, match="Inductor can't compile piece_0: RuntimeError: no C\\+\\+ compiler;"
    ) as caught:
        by_inductor(Block())(rows(4))
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.warns(PieceworkWarning, match="runs eagerly, since compiling it failed") as warned:
        torch.testing.assert_close(by_inductor(Block(), on_failure="eager")(rows(4)), Block()(rows(4)))
    assert len(warned) == 2  # one for each of the pieces


def test_piece_is_handed_over_as_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(graph: torch.fx.GraphModule) -> Any:
        run = copy.deepcopy(graph).forward
        graph.graph.erase_node(graph.graph.output_node())
        return run

    replace_compile(monkeypatch, spoil)
    compiled = by_inductor(Block())
    compiled(rows(4))
    assert all(one.unique.piece.graph.graph.output_node() for one in compiled_state(compiled).unique)


def test_exact_sizes_are_kept_in_the_cache_of_inductor() -> None:
    with fresh_cache():
        for expected in ((0, 4), (4, 0)):
            torch._dynamo.utils.counters.clear()
            torch._dynamo.reset()
            by_inductor(Block(), compile_sizes=[4], capture_sizes=())(rows(4))
            found = torch._dynamo.utils.counters["aot_autograd"]
            assert (found["autograd_cache_hit"], found["autograd_cache_miss"]) == expected
            assert found["autograd_cache_bypass"] == 0


# --- what is changed in graphs ---------------------------------------------------------------------


def graph_of_addmm(
    residual: tuple[int, ...],
    *,
    device: str = "cuda",
    is_expanded: bool = False,
    is_written: bool = False,
    then: Any = None,
    **kwargs: Any,
) -> torch.fx.Graph:
    """Return the graph of one ``addmm``, with values as Inductor keeps them; no device is needed.

    Args:
        residual: its size.
        device: where it is.
        is_expanded: whether it stands for fewer elements.
        is_written: whether the program calls ``addmm``, and not Inductor.
        then: op that the result goes through.
        kwargs: of the call.
    """
    graph = torch.fx.Graph()
    with FakeTensorMode():
        values = [torch.empty(size, device=device) for size in (residual, (8, 16), (16, 32), (8, 32))]
        if is_expanded:
            values[0] = torch.empty(32, device=device).expand(8, 32)
    nodes = [graph.placeholder(f"a{i}") for i in range(3)]
    nodes.append(graph.call_function(torch.ops.aten.addmm.default, tuple(nodes), kwargs))
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    if is_written:
        nodes[-1].meta |= {"original_aten": torch.ops.aten.addmm.default, "from_node": []}
    graph.output(nodes[-1] if then is None else graph.call_function(then, (nodes[-1],)))
    return graph


def called(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_a_residual_is_added_after_the_product() -> None:
    graph = graph_of_addmm((8, 32))
    UnfuseResiduals()(graph)
    graph.lint()
    assert called(graph) == ["aten.mm.default", "aten.add.Tensor"]
    assert all(node.meta["val"].shape == (8, 32) for node in graph.nodes if node.op == "call_function")
    given = [torch.randn(size) for size in ((8, 32), (8, 16), (16, 32))]
    torch.testing.assert_close(torch.fx.GraphModule({}, graph)(*given), torch.addmm(*given))


@pytest.mark.parametrize(
    "graph",
    [
        lambda: graph_of_addmm((32,)),
        lambda: graph_of_addmm((8, 32), alpha=2),
        lambda: graph_of_addmm((8, 32), beta=0.5),
        lambda: graph_of_addmm((8, 32), device="cpu"),
        lambda: graph_of_addmm((8, 32), is_expanded=True),
        lambda: graph_of_addmm((8, 32), is_written=True),
        lambda: graph_of_addmm((8, 32), then=torch.ops.aten.sum.default),
    ],
)
def test_everything_else_stays_fused(graph: Callable[[], torch.fx.Graph]) -> None:
    made = graph()
    UnfuseResiduals()(made)
    assert called(made)[0] == "aten.addmm.default"


def test_a_residual_that_goes_into_the_next_one_is_unfused_too() -> None:
    graph = graph_of_addmm((8, 32), then=torch.ops.aten.relu.default)
    *inputs, first, relu, output = graph.nodes
    with graph.inserting_before(output):
        second = graph.call_function(torch.ops.aten.addmm.default, (first, *inputs[1:]))
    second.meta["val"] = first.meta["val"]
    output.args = ((relu, second),)
    UnfuseResiduals()(graph)
    graph.lint()
    assert called(graph) == [
        "aten.mm.default",
        "aten.add.Tensor",
        "aten.relu.default",
        "aten.mm.default",
        "aten.add.Tensor",
    ]


def test_additions_and_what_the_program_calls_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def look(self: UnfuseResiduals, graph: torch.fx.Graph) -> None:
        nodes = graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
        found.extend(inductor_internals.is_written_as(node, torch.ops.aten.addmm.default) for node in nodes)

    monkeypatch.setattr(UnfuseResiduals, "__call__", look)
    with inductor_config.patch(force_disable_caches=True), torch.no_grad():
        for model in (lambda x: x + x @ (x.t() @ x), lambda x: torch.addmm(x, x, x.t() @ x)):
            by_inductor(model)(rows(4))
    assert found == [False, True]


class CountingPass(CustomGraphPass):
    """A pass of a user's."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.num_calls += 1

    def uuid(self) -> str:
        return "counting"


@pytest.mark.parametrize("unfuse_residuals", [False, True])
def test_a_pass_of_the_process_runs_too(monkeypatch: pytest.MonkeyPatch, unfuse_residuals: bool) -> None:
    num_ours: list[int] = []
    monkeypatch.setattr(UnfuseResiduals, "__call__", lambda self, graph: num_ours.append(1))
    own = CountingPass()
    with inductor_config.patch(post_grad_custom_post_pass=own, force_disable_caches=True), torch.no_grad():
        by_inductor(Block(), plugin_options={"inductor": {"unfuse_residuals": unfuse_residuals}})(rows(4))
    assert (own.num_calls, len(num_ours)) == (2, 2 if unfuse_residuals else 0)


def test_a_pass_that_can_not_be_cached_makes_the_pair_uncacheable() -> None:
    ours = UnfuseResiduals()
    assert passes._Both(CountingPass(), ours).uuid() == ("counting", ours.uuid())
    assert passes._Both(lambda graph: None, ours).uuid() is None


# --- addresses ------------------------------------------------------------------------------------


def test_inputs_at_odd_addresses_go_through_the_check_of_inductor() -> None:
    def call(given: list[Any]) -> tuple[Any, ...]:
        return ("checked", *given)

    checking = align_inputs_from_check_idxs(lambda given: ("unchecked", *given), [0, 2], OrderedSet())
    aligned, positions = inductor_internals._without_check_of_alignment(checking)
    assert (aligned([1]), positions) == (("unchecked", 1), (0, 2))  # Inductor still builds it as we take it apart.
    run = compiler._taking_arguments(inductor_internals.InnerFunction(call, 1, aligned, positions), 4)
    even, odd = torch.zeros(8), torch.zeros(8)[1:]
    assert run(even, odd, even, 7)[0] == "unchecked"
    assert run(odd, even, even, 7)[0] == "checked"
    assert run(even, even, odd, 7)[0] == "checked"
    assert run(even, odd, even, 7)[1:] == (even, odd, even, 7)


@pytest.mark.cuda
def test_inputs_at_odd_addresses_are_answered_on_a_card() -> None:
    model = Block().cuda().requires_grad_(False)
    call = by_inductor(model, capture_sizes=())
    memory = torch.randn(6 * 8 + 3, device="cuda")
    for offset in (0, 1, 3):
        x = memory[offset : offset + 48].view(8, 6)
        torch.testing.assert_close(call(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.cuda
def test_a_piece_that_returns_its_residual_stream_has_no_kernel_to_copy_it() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(64, 64, bias=False), nn.RMSNorm(64), nn.Linear(64, 64)
            self.middle = nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = x + self.up(x)
            stream = first + self.middle(self.norm(first))
            return stream, self.down(self.norm(stream))

    model = Residual().cuda().to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    num_kernels = {}
    for unfuse in (False, True):
        options = {"inductor": {"unfuse_residuals": unfuse}}
        call = by_inductor(model, capture_sizes=(), plugin_options=options)
        torch.testing.assert_close(call(x), model(x), atol=0.1, rtol=0.1)
        num_kernels[unfuse] = num_kernels_of(lambda call=call: call(x))
    assert num_kernels == {False: 7, True: 5}


def num_kernels_of(call: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.self_device_time_total)


# --- results --------------------------------------------------------------------------------------


class Watching:
    """Keeps what Inductor answers with, by piece."""

    name = "watching"

    def __init__(self) -> None:
        self.runs: dict[str, Any] = {}

    @hookimpl(wrapper=True)
    def piecework_compile_piece(self, piece: Piece) -> Any:
        compiled = yield
        self.runs[piece.name] = compiled.run
        return compiled


def is_inner(run: Any) -> bool:
    return "aligned_call" in getattr(run, "__globals__", {})


def test_equal_to_eager_at_every_size_and_with_replaced_weights() -> None:
    model = Block()
    watching = Watching()
    with (
        plugins(("inductor", piecework_inductor), watching),
        torch.no_grad(),
        counters.expect(num_piece_compilations=2),
    ):
        compiled = by_inductor(model)
        for n in (5, 1, 2, 33):
            torch.testing.assert_close(compiled(rows(n)), model(rows(n)))
        model.inner.weight.copy_(torch.randn(8, 6))
        torch.testing.assert_close(compiled(rows(5)), model(rows(5)))
        model.outer.weight = nn.Parameter(torch.randn(6, 4))
        torch.testing.assert_close(compiled(rows(2)), model(rows(2)))
    assert [is_inner(run) for run in watching.runs.values()] == [True, True]
    assert {piece.compiler for piece in piecework.report(compiled).pieces} == {"inductor"}


def test_inner_function_can_be_switched_off() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x + 1)

    watching = Watching()
    with plugins(("inductor", piecework_inductor), watching):
        compiled = by_inductor(model, plugin_options={"inductor": {"call_inner_function": False}})
        torch.testing.assert_close(compiled(rows(4)), model(rows(4)))
    assert [is_inner(run) for run in watching.runs.values()] == [False]


class Writing(nn.Module):
    """A buffer written in place, an argument written in place, and a base whose view was handed out."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.count.add_(1)
        x.mul_(2)
        y = x * 2
        v = y[1:]
        z = ops.scale3(y)
        v.add_(z[1:] + self.count)
        return ops.scale3(y) * self.count, y


def test_writes_reach_buffers_arguments_and_results() -> None:
    model, reference = Writing(), Writing()
    compiled = by_inductor(model)
    for n in (4, 2, 7):
        x, y = rows(n), rows(n)
        torch.testing.assert_close(compiled(x), reference(y))
        torch.testing.assert_close((x, model.count), (y, reference.count))


def test_dropout_draws_anew_and_follows_the_seed() -> None:
    def model(x: torch.Tensor) -> Any:
        a = F.dropout(x, 0.5, True)
        return a, F.dropout(torch.ones_like(ops.scale3(a)), 0.5, True)

    compiled = by_inductor(model)
    x = torch.ones(128, 64)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0] != 0, first[1] != 0)
    assert 0.45 < (first[0] == 0).float().mean() < 0.55
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(compiled(x))
    torch.testing.assert_close(*results)


def test_bfloat16_is_no_further_from_the_truth_than_eager() -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return ops.scale3((y.to(x.dtype) * w) * x.sigmoid())

    x, w = rows(16, 256).bfloat16(), rows(1, 256)[0].bfloat16()
    truth = model(x.double(), w.double())
    result = by_inductor(model, dims={"x": 0})(x, w)
    assert result.dtype == torch.bfloat16
    assert (result - truth).abs().max() <= 1.5 * (model(x, w) - truth).abs().max() + 1e-6


def test_exact_size() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x.sin() + x.shape[0])

    with counters.expect(num_piece_compilations=2):
        compiled = by_inductor(model, compile_sizes=(8,))
        for n in (3, 8, 1, 8):
            torch.testing.assert_close(compiled(rows(n)), model(rows(n)))


def number(x: torch.Tensor) -> torch.Tensor:
    return ops.scale3(x + 1) * 3 + x.sum().item()


def nonzero(x: torch.Tensor) -> torch.Tensor:
    indices = torch.nonzero(x[:, 0] > 0)[:, 0]
    return ops.scale3(x + 1) + x[indices].sum(0)


@pytest.mark.parametrize("model", [number, nonzero])
@pytest.mark.parametrize("compile_sizes", [(), (4,)])
def test_what_follows_from_data_compiles(model: Callable[..., Any], compile_sizes: Any) -> None:
    call = by_inductor(model, compile_sizes=compile_sizes, capture_sizes=())
    for n in (4, 2, 7):
        torch.testing.assert_close(call(rows(n)), model(rows(n)))


def test_results_that_alias_go_through_the_artifact() -> None:
    """A piece that returns an input is not met by splitting, so it is made here by hand."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((x, graph.call_function(torch.add, (x, 1))))
    fake = torch._subclasses.FakeTensorMode().from_tensor(torch.zeros(3, 2))
    x.meta["example_value"] = fake
    kinds = (piecework.InputKind.ACTIVATION,)
    facts: dict[str, Any] = {"input_kinds": kinds, "mutated_inputs": (), "aliased_inputs": (), "key": "k"}
    piece = Piece("piece_0", torch.fx.GraphModule({}, graph), (fake,), outputs_are_fresh=False, **facts)
    with torch.no_grad():
        compiled = compiler.compile_piece(piece, InductorOptions())
        given = torch.ones(3, 2)
        same, more = compiled.run(given)
    assert not is_inner(compiled.run)
    assert same.data_ptr() == given.data_ptr()
    torch.testing.assert_close(more, given + 1)


def test_inner_function_that_is_not_found_leaves_the_artifact() -> None:
    assert inductor_internals.inner_function(lambda *inputs: inputs) is None


# --- imports --------------------------------------------------------------------------------------


def test_importing_the_plugin_is_light() -> None:
    program = "import sys, piecework_inductor; print([n for n in ('torch._inductor', 'triton') if n in sys.modules])"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert finished.stdout.strip() == "[]", finished.stderr


def test_pieces_that_write_to_inputs_of_any_size_compile() -> None:
    def model(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum(0))
        x.mul_(2)
        return x + total

    config = CompilationConfig(level=3, splitting_ops=(), capture_sizes=())
    call = piecework.compile(model, config=config, dynamic_arg_dims={"x": 0})
    totals = torch.zeros(6), torch.zeros(6)
    with torch.no_grad():
        for n in (4, 1, 7):
            x = rows(n)
            x2 = x.clone()
            torch.testing.assert_close(call(x, totals[0]), model(x2, totals[1]))
            torch.testing.assert_close((x, totals[0]), (x2, totals[1]))
