"""The Inductor plugin: options, results, and the cheapest correct call of what it compiled."""

from __future__ import annotations

import copy
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

import piecework
import piecework_inductor
from piecework import CompilationConfig, CompileError, ConfigError, Piece, PieceworkWarning, counters, hookimpl
from piecework.testing import plugins
from piecework_inductor import compiler, inductor_internals
from piecework_inductor.options import InductorOptions, read_options
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


def options(**given: Any) -> CompilationConfig:
    return CompilationConfig(plugin_options={"inductor": given})


def test_defaults() -> None:
    assert read_options(CompilationConfig()) == InductorOptions()
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
        read_options(options(**given))
    assert words in str(caught.value)
    assert "the options are config, compile_timeout_s, call_inner_function" in str(caught.value)


@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_wrong_option_reaches_the_user(on_failure: str) -> None:
    settings = {"plugin_options": {"inductor": {"fast": True}}, "on_failure": on_failure}
    with pytest.raises(ConfigError, match="fast"):
        by_inductor(Block(), **settings)(rows(4))


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
    return getattr(run, "__qualname__", "").startswith("_taking_a_list")


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
