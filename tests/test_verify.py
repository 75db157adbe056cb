"""What ``verify`` finds: planted faults by name, and nothing where all is right."""

from __future__ import annotations

import copy
import importlib
import json
import operator
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node
from typer.testing import CliRunner

import capture_models
import models
import piecework
from piecework import (
    Capture,
    CompilationConfig,
    CompiledPiece,
    ConfigError,
    Piece,
    Recordable,
    SplittingOp,
    Verification,
    counters,
    testing,
)
from piecework.testing import EmulatedCapturer
from piecework.tools import origins
from piecework.tools.cli import app, main
from piecework_cudagraph.capturer import CudaGraphCapturer
from piecework_cudagraph.options import CudaGraphOptions

ops = torch.ops.models


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    return tmp_path


def config(**settings: Any) -> CompilationConfig:
    return CompilationConfig(**{"level": 3, "splitting_ops": models.OPS, **settings})


def steps(x: torch.Tensor) -> torch.Tensor:
    """Two pieces; the second multiplies, then adds."""
    y = ops.scale3(x + 1)
    z = y.sigmoid()
    return z * 2 + y


class Miscompiling:
    """A piece compiler that gets one op wrong: what it should multiply by, it multiplies by a hundredth more."""

    name = "miscompiling"
    factor = 1.01

    @piecework.hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        graph = copy.deepcopy(piece.graph)
        for node in graph.graph.nodes:
            if node.target is operator.mul and not isinstance(node.args[1], Node):
                node.args = (node.args[0], node.args[1] * self.factor)
        graph.recompile()
        return CompiledPiece(graph.forward)


def shows(script: Path) -> None:
    """Run a script that shows a departure in this process."""
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(script))
    assert caught.value.code == 1


def run_elsewhere(script: Path) -> tuple[int, str]:
    """Run a script in a new process, in another folder; return its exit status and what it says."""
    done = subprocess.run([sys.executable, script], cwd="/", capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_a_miscompiled_op_is_named(own_cache: Path) -> None:
    before = torch.get_rng_state()
    with testing.plugins(Miscompiling()):
        found = piecework.verify(steps, (torch.ones(4, 6),), [3, 4], config=config(piece_compiler="miscompiling"))
    assert torch.equal(torch.get_rng_state(), before)
    assert not found.is_right
    assert [one.size for one in found.sizes] == [3, 4]
    departure = found.departures[0]
    assert (departure.kind, departure.place) == ("piece", "piece_1")
    assert departure.difference.largest is not None
    assert 0 < departure.difference.largest < 0.02
    assert departure.op is not None
    assert departure.op.startswith("aten::mul (")
    assert "z * 2 + y" in departure.op
    assert departure.script is not None
    assert departure.script.parent == own_cache / "verify"
    text = str(found)
    for word in ("steps at level 3: WRONG", "piece_1", "first op: aten::mul", "rtol 0.0001", str(departure.script)):
        assert word in text, word


def test_the_script_shows_the_miscompiled_op_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with testing.plugins(Miscompiling()):
        found = piecework.verify(steps, (torch.randn(4, 6),), config=config(piece_compiler="miscompiling"))
        (departure,) = found.departures
        assert departure.script is not None
        shows(departure.script)
    printed = capsys.readouterr().out
    assert "largest difference 0.0" in printed  # a hundredth of a sigmoid, times two
    assert "largest difference 0\n" not in printed
    source = departure.script.read_text()
    assert source.count("sigmoid") == 1
    assert "+" not in source.partition("def forward")[2].partition("return")[0]  # what comes after the op is left out


def test_a_miscompiled_op_is_named_where_no_script_can_be_written(tmp_path: Path) -> None:
    (no_folder := tmp_path / "file").write_text("mine")
    given = (torch.ones(4, 6),)
    with testing.plugins(Miscompiling()):
        found = piecework.verify(steps, given, [4], config=config(piece_compiler="miscompiling"), folder=no_folder)
    (departure,) = found.departures
    assert departure.op is not None
    assert departure.op.startswith("aten::mul (")
    assert departure.script is None
    assert re.search(r"no script could be written \(`folder` says where\): FileExistsError: .*file", str(found))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert no_folder.read_text() == "mine"


class Rounding(Miscompiling):
    """A miscompilation that the tolerance by dtype lets pass."""

    name = "rounding"
    factor = 1.00001


def thrice_and_a_bit(x: torch.Tensor) -> torch.Tensor:
    return x * 3.00003


IMPLEMENTED = SplittingOp("models::scale3", implementation=thrice_and_a_bit)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({"piece_compiler": "rounding"}, "piece"), ({"splitting_ops": (IMPLEMENTED,)}, "implementation")],
    ids=["piece", "op"],
)
def test_the_script_compares_with_the_tolerance_of_verify(settings: dict[str, Any], kind: str) -> None:
    given = (steps, (torch.randn(4, 6),))
    with testing.plugins(Rounding()):
        chosen = config(**{"piece_compiler": "eager", **settings})
        assert piecework.verify(*given, config=chosen).is_right
        (departure,) = piecework.verify(*given, config=chosen, rtol=1e-6, atol=0.0).departures
        assert departure.kind == kind
        assert departure.script is not None
        shows(departure.script)


class ClaimingTooMuch(EmulatedCapturer):
    """A capturer whose graphs read copies of their inputs, made at the capture: stale addresses."""

    def capture(self, fn: Callable[[], tuple[torch.Tensor, ...]]) -> Capture:
        assert isinstance(fn, Recordable)
        stale = tuple(tensor.clone() for tensor in fn.inputs)
        return super().capture(Recordable(fn.name, fn.run, stale, fn.writes))


def test_a_stale_address_is_named(own_cache: Path) -> None:
    with capture_models.capturing_by(ClaimingTooMuch(torch.device("cpu"))):
        call = piecework.compile(steps, config=config(piece_compiler="eager", capturer="own", capture_sizes=(4,)))
        found = piecework.verify(call, (torch.randn(4, 6),))
        (departure,) = found.departures
        assert (departure.kind, departure.place) == ("capture", "piece_0")
        assert departure.op is not None
        assert "stale address" in str(found)
        assert departure.script is not None
        shows(departure.script)


class Misplacing(EmulatedCapturer):
    """A capturer that gives the results of ops another address than the graphs that read them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.set_aside: list[torch.Tensor] = []

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.set_aside.append(super().empty(size, stride, dtype))
        return self.set_aside[-1]

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.set_aside and tensor is self.set_aside[-1]:
            return self.set_aside.pop().clone()
        return super().alias(tensor)


def test_a_result_that_is_misplaced_between_graphs_is_named() -> None:
    with capture_models.capturing_by(Misplacing(torch.device("cpu"))):
        call = piecework.compile(steps, config=config(piece_compiler="eager", capturer="own", capture_sizes=(4,)))
        (departure,) = piecework.verify(call, (torch.randn(4, 6),)).departures
    assert departure.kind == "between graphs"
    assert departure.place.startswith("models::scale3")


def overwrites(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Ops write to what a piece gave, and to what an op gave."""
    y = x * 2
    z = ops.scale3(y)
    ops.attn(x, z, y)
    ops.attn(x, y, z)
    return y, z, y + z


@pytest.mark.parametrize(("capturable", "num_graphs"), [(False, 2), (True, 1)], ids=["between graphs", "in a graph"])
def test_values_that_are_written_over_later_are_found_right(capturable: bool, num_graphs: int) -> None:
    chosen = tuple(SplittingOp(name, capturable=capturable) for name in models.OPS)
    with testing.plugins():
        settings = config(splitting_ops=chosen, piece_compiler="eager", capture_sizes=(4,))
        found = piecework.verify(overwrites, (torch.randn(4, 6),), config=settings)
    assert found.is_right, str(found)
    assert found.sizes[0].num_graphs == num_graphs


def test_nothing_of_a_capture_by_verify_stays() -> None:
    """Neither where it was the only one, nor beside one of the model's."""
    with testing.plugins(), torch.no_grad():
        call = piecework.compile(steps, config=config(piece_compiler="eager", capture_sizes=(4,)))
        assert piecework.verify(call, (torch.randn(64, 6),)).sizes[0].num_graphs == 2
        plans = capture_models.plans_of(call)
        assert not plans.pool.users
        call(torch.randn(4, 6))
        buffers = list(plans.statics.buffers.values())
        assert piecework.verify(call, (torch.randn(64, 6),)).sizes[0].num_graphs == 2
        assert all(one is other for one, other in zip(plans.statics.buffers.values(), buffers, strict=True))


def test_a_model_that_verify_compiles_gives_its_memory_back() -> None:
    capturer = EmulatedCapturer(torch.device("cpu"))
    with capture_models.capturing_by(capturer):
        settings = config(piece_compiler="eager", capturer="own", capture_sizes=(4,))
        assert piecework.verify(steps, (torch.randn(4, 6),), config=settings).sizes[0].num_graphs == 2
    assert capturer.num_captures > 0
    assert capturer.memory().pool_bytes == 0


library = torch.library.Library("verify", "DEF")
library.define("sneaky(Tensor q, Tensor out) -> Tensor")
library.impl("sneaky", lambda q, out: (out.copy_(q * 7), q + 1)[1], "CompositeExplicitAutograd")
torch.library.register_fake("verify::sneaky", lambda q, out: torch.empty_like(q), lib=library)

library.define("centred(Tensor x) -> Tensor")
library.impl("centred", lambda x: x - x.mean(0), "CompositeExplicitAutograd")
torch.library.register_fake("verify::centred", torch.empty_like, lib=library)


def sneaky(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    y = torch.ops.verify.sneaky(x + 1, out)
    return y + out


@pytest.mark.parametrize("splitting_ops", [("verify::sneaky",), ()], ids=["splitting", "inside"])
def test_an_undeclared_mutation_is_named(splitting_ops: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with testing.plugins():
        settings = config(splitting_ops=splitting_ops, piece_compiler="eager")
        found = piecework.verify(sneaky, (torch.randn(4, 6),), config=settings)
    (departure,) = found.departures
    assert departure.kind == "declaration"
    assert departure.op is not None
    assert departure.op.startswith("verify::sneaky (")
    assert "argument 'out'" in str(departure.difference)
    assert departure.script is not None
    shows(departure.script)
    assert str(departure.difference).strip() in capsys.readouterr().out


def test_an_implementation_that_differs_from_its_op_is_named() -> None:
    wrong = SplittingOp("models::scale3", implementation=lambda x: x * 3.5)
    with testing.plugins():
        found = piecework.verify(
            steps, (torch.randn(4, 6),), config=config(splitting_ops=(wrong,), piece_compiler="eager")
        )
    (departure,) = found.departures
    assert departure.kind == "implementation"
    assert "models::scale3" in departure.place


def test_rows_that_are_not_independent_are_named() -> None:
    claimed = SplittingOp("verify::centred", rows_independent=True)

    def centred(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.verify.centred(x + 1) * 2

    with testing.plugins():
        settings = config(splitting_ops=(claimed,), piece_compiler="eager")
        found = piecework.verify(centred, (torch.randn(4, 6),), [1, 4], config=settings)
    assert [one.departures == () for one in found.sizes] == [True, False]  # One row has no rows before it.
    (departure,) = found.departures
    assert (departure.kind, departure.op) == ("rows", departure.place)
    assert "verify::centred" in departure.place


FACTOR = 2.0


def by_global(x: torch.Tensor) -> torch.Tensor:
    return ops.scale3(x + 1) * FACTOR


def test_a_trace_that_no_longer_holds_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with testing.plugins():
        call = piecework.compile(by_global, config=config(piece_compiler="eager"))
        x = torch.randn(4, 6)
        call(x)
        monkeypatch.setitem(by_global.__globals__, "FACTOR", 3.0)  # What calls don't look at.
        found = piecework.verify(call, (x,))
    (departure,) = found.departures
    assert departure.kind == "trace"
    assert departure.op is not None
    assert departure.op.startswith("aten::mul")
    assert "x + 1) * FACTOR" in departure.op
    assert departure.assumption is not None
    assert re.fullmatch(r"the trace relies on .*FACTOR == 2.0.*", departure.assumption)
    assert departure.assumption in str(found)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_model_that_is_right_is_found_right_at_every_level(level: int) -> None:
    model = models.Linear()
    state = copy.deepcopy(model.state_dict())
    with testing.plugins():
        found = piecework.verify(
            model, (torch.randn(4, 6),), [1, 3, 9], config=config(level=level, piece_compiler="eager")
        )
    assert found.is_right, str(found)
    assert f"level {level}: right" in str(found)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    if level == 3:
        assert [(one.num_pieces, one.num_ops, one.num_graphs) for one in found.sizes] == [(2, 1, 2)] * 3


def test_a_wrong_backend_of_level_2_is_named() -> None:
    def doubling(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return lambda *given: [result * 2 for result in graph.forward(*given)]

    piecework.set_torch_compile_backend(doubling)
    with testing.plugins():
        (departure,) = piecework.verify(steps, (torch.randn(4, 6),), config=config(level=2)).departures
    assert (departure.kind, departure.place) == ("piece", "the whole graph")


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(6, 4).t(),
    "every second column": lambda: torch.randn(4, 12)[:, ::2],
    "wider rows": lambda: torch.randn(4, 9)[:, 2:8],
    "wider columns": lambda: torch.randn(6, 9).t()[:4],
    "one row for all": lambda: torch.randn(1, 6).expand(4, 6),
    "one column for all": lambda: torch.randn(4, 1).expand(4, 6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_sizes_are_laid_out_as_the_inputs_are(layout: str) -> None:
    x = LAYOUTS[layout]()
    content = x.clone()
    with testing.plugins():
        found = piecework.verify(steps, (x,), [4, 3, 9, 1], config=config(piece_compiler="eager"))
    assert found.is_right, str(found)
    assert all("the pieces" in one.answered_by for one in found.sizes)
    assert torch.equal(x, content)


def test_sizes_that_fit_no_such_layout_are_told() -> None:
    with testing.plugins():
        x = LAYOUTS["wider columns"]()
        found = piecework.verify(steps, (x,), [4, 10], config=config(piece_compiler="eager"))
    (departure,) = found.departures
    assert departure.kind == "refused"
    assert "strides of argument x" in str(departure.difference)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x) * self.scale


def test_a_call_that_departs_from_the_trace_is_told_with_the_reason() -> None:
    model, x = Scaled(), torch.randn(4, 6)
    with testing.plugins():
        call = piecework.compile(model, config=config(piece_compiler="eager"))
        call(x)
        model.scale = 3.0
        found = piecework.verify(call, (x,), [4, 3])
    assert [one.kind for one in found.departures] == ["refused"] * 2
    assert "the trace relies on self.scale == 2.0, now it is 3.0" in str(found)
    assert "no step was compared" in str(found)


def _wrongly_shaped(x: torch.Tensor) -> torch.Tensor:
    return x * 3


torch.library.custom_op("verify::wrongly_shaped", _wrongly_shaped, mutates_args=()).register_fake(
    lambda x: x.new_empty(x.shape[0], 5)
)


def test_an_op_whose_fake_stops_the_trace_is_named() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.verify.wrongly_shaped(x + 1) + x

    with testing.plugins():
        found = piecework.verify(model, (torch.randn(4, 6),), [4], config=config(piece_compiler="eager"))
    (departure,) = found.departures
    assert (departure.kind, departure.op) == ("declaration", "verify::wrongly_shaped")
    assert "(4, 6)" in str(departure.difference)
    assert "(4, 5)" in str(departure.difference)
    assert "CompileError" in found.sizes[0].answered_by


_KEPT: dict[tuple[int, ...], torch.Tensor] = {}


def _keeps(x: torch.Tensor) -> torch.Tensor:
    return _KEPT.setdefault(tuple(x.shape), torch.empty_like(x)).copy_(x)


torch.library.custom_op("verify::keeps", _keeps, mutates_args=()).register_fake(torch.empty_like)


@pytest.mark.parametrize("cuts", [("verify::keeps",), ()], ids=["splitting", "inside a piece"])
def test_an_op_that_keeps_its_memory_is_named_whatever_ran_before(cuts: tuple[str, ...]) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.verify.keeps(x + 1) * 2

    with testing.plugins():
        for _ in range(2):
            settings = config(piece_compiler="eager", splitting_ops=cuts)
            (departure,) = piecework.verify(model, (torch.randn(4, 6),), config=settings).departures
            assert departure.kind == "declaration"
            assert "verify::keeps" in departure.place or "verify::keeps" in str(departure.difference)
            assert "in memory that an earlier call of it returned" in str(departure.difference)


def test_a_call_without_rows_is_answered_by_the_original() -> None:
    with testing.plugins():
        found = piecework.verify(steps, (torch.randn(0, 6),), config=config(piece_compiler="eager"))
    assert found.sizes[0].answered_by == "the original"


class Stateful(nn.Module):
    """Writes to a buffer and to an argument."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, cache: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.total.add_(x.sum(0))
        cache["k"].index_copy_(0, torch.arange(x.shape[0], device=x.device), x)
        y = ops.scale3(self.linear(x)) + self.total
        return {"y": y, "cache": cache["k"].sum(1)}


def test_what_a_model_writes_is_compared_and_put_back() -> None:
    model, cache = Stateful(), {"k": torch.zeros(8, 6)}
    with testing.plugins():
        call = piecework.compile(
            model, config=config(piece_compiler="eager", capture_sizes=(2, 4)), dynamic_arg_dims={"x": 0}
        )
        found = piecework.verify(call, (torch.randn(4, 6), cache), [2, 3, 4])
        assert found.is_right, str(found)
        assert not model.total.any()
        assert not cache["k"].any()
        assert "captures of size 4" in found.sizes[2].answered_by
        with torch.no_grad():
            call(torch.ones(4, 6), cache)  # The captures are still there, and right.
    assert model.total.tolist() == [4.0] * 6


class Interrupts:
    """Interrupts the n-th run of an op, as Ctrl-C would."""

    def __init__(self, at: int) -> None:
        self.at, self.num_runs = at, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        if self.num_runs == self.at:
            raise KeyboardInterrupt
        return x * 3


def test_an_interrupt_at_any_run_of_an_op_leaves_all_as_it_was() -> None:
    model, cache, x = Stateful(), {"k": torch.zeros(8, 6)}, torch.randn(4, 6)
    model.total.fill_(2)
    state = copy.deepcopy(model.state_dict())
    op = Interrupts(0)
    settings = config(
        piece_compiler="eager",
        capture_sizes=(4,),
        splitting_ops=(SplittingOp("models::scale3", implementation=op),),
    )
    is_done, at = False, 0
    with testing.plugins(), torch.no_grad():
        call = piecework.compile(model, config=settings, dynamic_arg_dims={"x": 0})
        call(x, cache)
        model.load_state_dict(state)
        cache["k"].zero_()
        while not is_done:
            at += 1
            op.at, op.num_runs = at, 0
            before = torch.get_rng_state()
            try:
                found = piecework.verify(call, (x, cache), [4, 3])
                is_done = True
                assert found.is_right, str(found)
            except KeyboardInterrupt:
                pass
            assert torch.equal(torch.get_rng_state(), before)
            torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
            assert not cache["k"].any()
        op.at = 0
        with counters.expect(num_graphs_seen=0, num_graph_captures=0):
            call(x, cache)
        torch.testing.assert_close(model.total, 2 + x.sum(0))
    assert at > 10


def test_a_weight_that_moved_is_named() -> None:
    model, x = nn.Sequential(*(nn.Linear(6, 6) for _ in range(12))), torch.randn(4, 6)
    settings = config(piece_compiler="eager", capture_sizes=(4,))
    with testing.plugins(), torch.no_grad():
        call = piecework.compile(model, config=settings, dynamic_arg_dims={"input": 0})
        for _ in range(3):
            call(x)  # Each looks at a few addresses, and those of the last layer come later.
        model[11].weight.data = torch.randn(6, 6)
        found = piecework.verify(call, (x,))
    (departure,) = found.departures
    assert (departure.kind, departure.moved) == ("call", ("11.weight",))
    assert "11.weight lies elsewhere in memory than at the capture" in str(found)


class ForgettingBuffers:
    """A piece compiler whose code loses what a piece writes to its inputs."""

    name = "forgetting"

    @piecework.hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        def run(*inputs: Any) -> Any:
            return piece.graph.forward(*(i.clone() if isinstance(i, torch.Tensor) else i for i in inputs))

        return CompiledPiece(run)


def test_a_lost_write_is_named() -> None:
    with testing.plugins(ForgettingBuffers()):
        found = piecework.verify(
            Stateful(),
            (torch.randn(4, 6), {"k": torch.zeros(8, 6)}),
            config=config(piece_compiler="forgetting"),
            dynamic_arg_dims={"x": 0},
        )
    (departure,) = found.departures
    assert (departure.kind, departure.place) == ("piece", "piece_0")
    assert "was not written to" in str(departure.difference)


class Raising:
    """A piece compiler whose code raises where a piece holds a sigmoid."""

    name = "raising"

    @piecework.hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        def run(*inputs: Any) -> Any:
            if "sigmoid" in piece.graph.code:
                raise ZeroDivisionError("planned")
            return piece.graph.forward(*inputs)

        return CompiledPiece(run)


def test_compiled_code_that_raises_is_named() -> None:
    with testing.plugins(Raising()):
        found = piecework.verify(
            steps, (torch.randn(4, 6),), config=config(piece_compiler="raising", on_failure="eager")
        )
    (departure,) = found.departures
    assert "answered by an error: PluginError" in str(found) or "answered by an error: ZeroDivision" in str(found)
    assert "ZeroDivisionError: planned" in str(found)
    assert "answer and eager" not in str(found)
    assert departure.kind in ("call", "piece")


torch.library.define("cut::draws", "(Tensor x) -> Tensor")
torch.library.impl("cut::draws", "CompositeExplicitAutograd", lambda x: x + random.random())
torch.library.register_fake("cut::draws", lambda x: torch.empty_like(x))


@torch.library.custom_op("cut::doubles", mutates_args=("x",))
def doubles(x: torch.Tensor) -> None:
    x.mul_(2)


doubles.register_fake(lambda x: None)


def test_what_a_later_op_of_the_same_graph_writes_to_is_not_compared_too_late() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        doubles(y)
        return y, y + 1

    cut = SplittingOp("cut::doubles", capturable=True)
    with testing.plugins():
        found = piecework.verify(
            model, (torch.randn(4, 6),), config=config(piece_compiler="eager", splitting_ops=[cut])
        )
    assert found.is_right, str(found)
    assert found.sizes[0].num_graphs == 1


def test_inputs_may_be_a_function_of_the_size() -> None:
    asked: list[Any] = []

    def inputs(size: Any) -> tuple[torch.Tensor, ...]:
        asked.append(size)
        return (torch.randn(size["b"], size["s"], 6),)

    with testing.plugins():
        found = piecework.verify(
            steps,
            inputs,
            [{"b": 2, "s": 3}, {"b": 3, "s": 5}],
            config=config(piece_compiler="eager"),
            dynamic_arg_dims={"x": {0: "b", 1: "s"}},
        )
    assert found.is_right, str(found)
    assert asked == [{"b": 2, "s": 3}, {"b": 3, "s": 5}]


@pytest.mark.parametrize(
    ("inputs", "sizes", "match"),
    [
        ((torch.ones(2, 6), 3), [1], "don't fit steps"),
        ("x", [1], "inputs must be a tuple"),
        ((torch.ones(2, 6),), ["4"], "sizes"),
        ((torch.ones(2, 6),), [{"cols": 4}], "a value for each of rows"),
        ((torch.ones(0, 6),), [4], "no rows"),
        (lambda size: (torch.ones(size, 6),), (), "function of the size"),
        (lambda size: (torch.ones(3, 6),), [4], r"inputs\(4\) returned arguments of another size: 3 rows"),
        (lambda size: (torch.ones(3, 6),), [{"cols": 4}], "a value for each of rows"),
    ],
)
def test_what_can_not_be_verified_is_refused(inputs: Any, sizes: Any, match: str) -> None:
    with testing.plugins(), pytest.raises(ConfigError, match=match):
        piecework.verify(steps, inputs, sizes, config=config(piece_compiler="eager"))


def test_a_compiled_model_brings_its_own_config() -> None:
    with testing.plugins(), pytest.raises(ConfigError, match="its own config"):
        piecework.verify(piecework.compile(steps), (torch.ones(2, 6),), config=config())


def test_a_decorated_class_is_verified_at_the_level_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    @piecework.support_torch_compile
    class Decorated(models.Linear):
        pass

    models.use_level(monkeypatch, 3)
    with testing.plugins():
        found = piecework.verify(Decorated(), (torch.randn(4, 6),), [2])
    assert found.is_right, str(found)
    assert isinstance(found, Verification)
    assert found.sizes[0].num_pieces == 2


@pytest.mark.parametrize("settings", [{"level": 2}, {}, {"splitting_ops": (*models.OPS, "cut::draws")}])
def test_an_original_that_differs_from_itself_is_not_called_a_wrong_trace(settings: dict[str, Any]) -> None:
    def drawn(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.cut.draws(ops.scale3(x)) + 1

    with testing.plugins():
        found = piecework.verify(drawn, (torch.randn(4, 6),), config=config(piece_compiler="eager", **settings))
    (departure,) = found.departures
    assert departure.kind == "original"
    assert departure.op is not None
    assert departure.op.startswith("cut::draws")
    assert "its result in the run before" in str(departure.op_difference)
    assert "when it runs again on the same inputs" in str(found)


def test_random_numbers_are_drawn_alike_by_every_run() -> None:
    def dropped(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(torch.nn.functional.dropout(x, 0.5)) + torch.rand_like(x)

    x, before = torch.randn(8, 6), torch.get_rng_state()
    with testing.plugins():
        found = piecework.verify(dropped, (x,), config=config(piece_compiler="eager"))
    assert found.is_right, str(found)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def inductor() -> Iterator[None]:
    with testing.plugins(load_installed=True):
        yield


@pytest.mark.usefixtures("inductor")
def test_other_random_numbers_of_compiled_code_are_said_and_not_compared() -> None:
    def dropped(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(torch.nn.functional.dropout(x, 0.5)).sigmoid()

    found = piecework.verify(dropped, (torch.randn(8, 6),), config=config(piece_compiler="inductor"))
    assert found.is_right, str(found)
    assert found.sizes[0].random_pieces == ("piece_0",)
    assert "not compared: piece_0 (other random numbers)" in str(found)


@pytest.mark.usefixtures("inductor")
def test_inductor_pieces_are_found_right() -> None:
    found = piecework.verify(
        models.Linear(), (torch.randn(4, 6),), [2, 4], config=config(piece_compiler="inductor", capture_sizes=(4,))
    )
    assert found.is_right, str(found)
    assert found.sizes[1].num_graphs == 2


# --- the command line ---------------------------------------------------------------------------

PROGRAM = """
import torch
import piecework
from piecework import CompiledPiece

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.GELU())


def make_model():
    return model


def inputs(size):
    return (torch.randn(size, 6),)


example = (torch.randn(3, 6),)
dims = {"rows": 0}


class Wrong:
    @piecework.hookimpl
    def piecework_compile_piece(self, piece):
        return CompiledPiece(lambda *given: [result * 1.5 for result in piece.graph.forward(*given)])
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "verified_program.py").write_text(PROGRAM)
    (tmp_path / "piecework_wrong_code.py").write_text(
        "from verified_program import Wrong\n\nplugin = Wrong()\n"
        "piecework_compile_piece = plugin.piecework_compile_piece\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["verify", *arguments])


EAGER = ("--config", '{"piece_compiler": "eager", "capture_sizes": [4]}')


def test_command_says_that_a_model_is_right(program: Path) -> None:
    given = ("verified_program:model", "--inputs", "verified_program:inputs", "--size", "1,4", "--size", "9")
    result = run(*given, *EAGER, "--dims", '{"input": 0}')
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Sequential at level 3: right")
    assert "size 4: answered by the captures of size 4" in result.output
    assert result.output.count("answer and eager: equal") == 3
    example = ("--inputs", "verified_program:example", *EAGER)
    named = ("--dims", '{"input": {"0": "batch"}}', "--size", '{"batch": 9}')
    assert "size {'batch': 9}: answered by" in run("verified_program:model", *example, *named).output
    made = run("verified_program:make_model", "--make", *example, "--json")
    assert json.loads(made.output)["is_right"] is True


def test_command_fails_where_something_departs(program: Path) -> None:
    result = run(
        *("verified_program:model", "--inputs", "verified_program:example", "--plugin", "piecework_wrong_code"),
        *("--config", '{"piece_compiler": "wrong_code"}', "--folder", str(program / "scripts"), "--json"),
    )
    assert result.exit_code == 1, result.output
    report = json.loads(result.output)
    (departure,) = report["sizes"][0]["departures"]
    assert (departure["kind"], departure["compiler"]) == ("piece", "wrong_code")
    script = Path(departure["script"])
    assert script.parent == program / "scripts"
    status, output = run_elsewhere(script)  # It registers the plugin.
    assert status == 1, output
    assert "differs in" in output


@pytest.mark.parametrize("tolerance", [("--rtol", "1"), ("--rtol", "0", "--atol", "100")])
def test_command_compares_with_the_tolerance_that_is_given(program: Path, tolerance: tuple[str, ...]) -> None:
    given = ("verified_program:model", "--inputs", "verified_program:example", "--plugin", "piecework_wrong_code")
    result = run(*given, "--config", '{"piece_compiler": "wrong_code"}', *tolerance)
    assert result.exit_code == 0, result.output
    assert "answer and eager: apart by" in result.output


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("nowhere", "--inputs", "verified_program:example"), "MODEL must be MODULE:NAME"),
        (("verified_program:make_model", "--inputs", "verified_program:example"), "did you mean --make"),
        (("verified_program:Wrong", "--inputs", "verified_program:example"), "did you mean --make"),
        (("no_such_module:model", "--inputs", "verified_program:example"), "No module named 'no_such_module'"),
        (
            ("verified_program:inputs", "--make", "--inputs", "verified_program:example"),
            "without arguments, which does",
        ),
        (("verified_program:modl", "--inputs", "verified_program:example"), "did you mean 'model'"),
        (("verified_program:model", "--inputs", "verified_program:example", "--size", "four"), "--size takes numbers"),
        (("verified_program:model", "--inputs", "verified_program:example", "--size", '{"a": '), "--size is no JSON"),
        (
            ("verified_program:model", "--inputs", "verified_program:example", "--dims", "[1]"),
            "--dims must be an object",
        ),
        (("verified_program:model", "--inputs", "verified_program:example", "--config", '{"levl": 3}'), "--config"),
    ],
)
def test_command_refuses_what_it_can_not_read(program: Path, arguments: tuple[str, ...], match: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert match in str(result.exception)


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("where", ["module", "forward"])
def test_command_passes_no_program_that_ends_itself(program: Path, status: int, where: str) -> None:
    ends = f"import sys; sys.exit({status})"
    text = ends if where == "module" else f"def model(x):\n    {ends}"
    (program / f"ends_by_{status}_in_{where}.py").write_text(text)
    result = run(f"ends_by_{status}_in_{where}:model", "--inputs", "verified_program:example", *EAGER)
    assert isinstance(result.exception, ConfigError)
    assert f"ended the program by sys.exit({status})" in str(result.exception)


FAILING = """
def model(x):
    raise ValueError("raised by the model")


def make():
    raise ValueError("raised by the factory")


def inputs(size):
    raise ValueError("raised by the inputs")
"""


@pytest.mark.parametrize("who", ["model", "factory", "inputs"])
def test_status_of_the_command_is_not_that_of_a_departure_where_nothing_can_be_compared(
    program: Path, who: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"failing_{who}"
    (program / f"{name}.py").write_text(FAILING)
    model = {"model": (f"{name}:model",), "factory": (f"{name}:make", "--make")}.get(who, ("verified_program:model",))
    inputs = f"{name}:inputs" if who == "inputs" else "verified_program:example"
    monkeypatch.setattr(sys, "argv", ["piecework", "verify", *model, "--inputs", inputs, "--size", "4", *EAGER])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.err.endswith(f"ValueError: raised by the {who}\n")
    assert said.out == ""


# --- scripts in a process of their own ----------------------------------------------------------

OPS = """
import torch
from piecework import SplittingOp


def op(name, fake=torch.empty_like):
    def define(function):
        torch.library.custom_op(f"verified_ops::{name}", function, mutates_args=()).register_fake(fake)
    return define


@op("writes")
def writes(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2) + 1


@op("wide", lambda x: torch.empty_like(x, dtype=torch.float64))
def wide(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@op("centred")
def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


def write(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.verified_ops.writes(x + 1) * 2


def widen(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.verified_ops.wide(x + 1) * 2


def centre(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.verified_ops.centred(x + 1) * 2
"""


OTHER = """
def other_centred(x):
    return x - x.sum(0)
"""


@pytest.fixture
def ops_of_program(program: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (program / "verified_ops.py").write_text(OPS)
    (program / "verified_others.py").write_text(OTHER)
    monkeypatch.syspath_prepend(str(program))
    module = importlib.import_module("verified_ops")
    yield module
    del sys.modules["verified_ops"]
    sys.modules.pop("verified_others", None)


@pytest.mark.parametrize(
    ("splitting", "name", "model", "says"),
    [
        (True, "writes", "write", "wrote to argument 'x', which it declares that it only reads"),
        (False, "writes", "write", "wrote to argument 'x', which it declares that it only reads"),
        (True, "wide", "widen", "with dtype torch.float32, where its fake implementation gives torch.float64"),
    ],
)
def test_the_script_of_an_op_runs_by_itself(
    ops_of_program: Any, splitting: bool, name: str, model: str, says: str
) -> None:
    settings = config(splitting_ops=(f"verified_ops::{name}",) if splitting else (), piece_compiler="eager")
    with testing.plugins():
        found = piecework.verify(getattr(ops_of_program, model), (torch.randn(4, 6),), config=settings)
    (departure,) = found.departures
    assert departure.script is not None
    status, output = run_elsewhere(departure.script)
    assert status == 1, output
    assert says in output


@pytest.mark.parametrize("is_told", [True, False], ids=["of the op", "of the model"])
def test_the_script_of_an_op_imports_the_module(
    ops_of_program: Any, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """The one that registered the op, or that of the model where torch can't tell."""

    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.verified_ops.writes(x + 1) * 2

    if not is_told:
        monkeypatch.setattr(origins.internals, "module_of_op", lambda name: None)
    settings = config(splitting_ops=("verified_ops::writes",), piece_compiler="eager")
    with testing.plugins():
        model = elsewhere if is_told else ops_of_program.write
        (departure,) = piecework.verify(model, (torch.randn(4, 6),), config=settings).departures
    assert departure.missing == ()
    assert departure.script is not None
    assert "import verified_ops" in departure.script.read_text().splitlines()


@pytest.mark.parametrize("kind", ["rows", "implementation"])
def test_the_script_of_an_op_calls_it_as_verify_did(ops_of_program: Any, tmp_path: Path, kind: str) -> None:
    other = importlib.import_module("verified_others").other_centred if kind == "implementation" else None
    op = SplittingOp("verified_ops::centred", implementation=other, rows_independent=kind == "rows")
    with testing.plugins():
        found = piecework.verify(
            ops_of_program.centre, (torch.randn(4, 6),), config=config(splitting_ops=(op,), piece_compiler="eager")
        )
    (departure,) = found.departures
    assert departure.kind == kind
    assert departure.script is not None
    status, output = run_elsewhere(departure.script)
    assert status == 1, output
    assert "differs in" in output
    (tmp_path / "verified_ops.py").write_text(OPS.replace("x - x.mean(0)", "x * 3"))
    (tmp_path / "verified_others.py").write_text(OTHER.replace("x - x.sum(0)", "x * 3"))
    assert run_elsewhere(departure.script) == (0, "it does not show here\n")


def test_a_script_says_what_it_lacks(program: Path) -> None:
    wrong = SplittingOp("models::scale3", implementation=lambda x: x * 3.5)
    with testing.plugins():
        found = piecework.verify(
            steps, (torch.randn(4, 6),), config=config(splitting_ops=(wrong,), piece_compiler="eager")
        )
    (departure,) = found.departures
    assert departure.missing == ("import the implementation as `implementation`",)
    assert "shows it (first import the implementation" in str(found)


class Offset:
    """A piece compiler that a script can't make: it was made with an argument."""

    name = "offset"

    def __init__(self, offset: float) -> None:
        self.offset = offset

    @piecework.hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        return CompiledPiece(lambda *given: [result + self.offset for result in piece.graph.forward(*given)])


def test_a_script_does_not_pass_without_its_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    with testing.plugins(Offset(1.0)):
        found = piecework.verify(steps, (torch.randn(4, 6),), config=config(piece_compiler="offset"))
    (departure,) = found.departures
    text = str(found)
    assert "(compiled by plugin 'offset')" in text
    assert "shows it (first register the plugin 'offset')" in text
    assert departure.script is not None
    with testing.plugins(), pytest.raises(SystemExit) as caught:
        runpy.run_path(str(departure.script))
    assert caught.value.code == 2  # 1 says that the departure shows.
    assert "register the plugin 'offset' in this script first" in capsys.readouterr().err
    with testing.plugins(Offset(1.0)):
        shows(departure.script)
    with testing.plugins(Offset(0.0)), pytest.raises(SystemExit) as caught:
        runpy.run_path(str(departure.script))
    assert caught.value.code == 0


def test_scripts_of_an_op_do_not_overwrite_each_other(ops_of_program: Any) -> None:
    with testing.plugins():
        found = piecework.verify(
            ops_of_program.write,
            (torch.randn(4, 6),),
            [3, 4],
            config=config(splitting_ops=("verified_ops::writes",), piece_compiler="eager"),
        )
    text = str(found)
    assert text.count("looked at 1 piece and 1 splitting op before it stopped") == 2
    assert "sizes 3, 4:\n" in text
    assert text.count("wrote to argument 'x'") == 1
    assert "first op" not in text
    scripts = {departure.script for departure in found.departures}
    assert len(scripts) == 2
    assert all(script is not None and script.exists() for script in scripts)


# --- on a card ----------------------------------------------------------------------------------


class StaleOnCard(CudaGraphCapturer):
    """A capturer whose graphs read copies of their inputs, made at the capture."""

    def capture(self, fn: Callable[[], tuple[torch.Tensor, ...]]) -> Capture:
        assert isinstance(fn, Recordable)
        self.copies = getattr(self, "copies", [])
        self.copies.append(tuple(tensor.clone() for tensor in fn.inputs))
        return super().capture(Recordable(fn.name, fn.run, self.copies[-1], fn.writes))


@pytest.mark.cuda
@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize("piece_compiler", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captures_on_a_card_are_found_right(piece_compiler: str, dtype: torch.dtype) -> None:
    model = models.Stack(4).to("cuda", dtype)
    x = torch.randn(8, 6, device="cuda", dtype=dtype)
    call = piecework.compile(model, config=config(piece_compiler=piece_compiler, capture_sizes=(1, 4, 8)))
    found = piecework.verify(call, (x,), [1, 3, 4, 8, 9])
    assert found.is_right, str(found)
    assert [one.num_graphs for one in found.sizes] == [5] * 5
    assert "captures of size 8" in found.sizes[3].answered_by
    given = (x.float(), {"k": torch.zeros(8, 6, device="cuda")})
    settings = config(piece_compiler=piece_compiler)
    found = piecework.verify(Stateful().cuda(), given, config=settings, dynamic_arg_dims={"x": 0})
    assert found.is_right, str(found)


@pytest.mark.cuda
def test_a_stale_address_on_a_card_is_named() -> None:
    capturer = StaleOnCard(torch.device("cuda", torch.cuda.current_device()), CudaGraphOptions())
    with capture_models.capturing_by(capturer):
        call = piecework.compile(steps, config=config(piece_compiler="eager", capturer="own", capture_sizes=(4,)))
        found = piecework.verify(call, (torch.randn(4, 6, device="cuda"),))
        (departure,) = found.departures
        assert (departure.kind, departure.place) == ("capture", "piece_0")
        assert departure.op is not None


@pytest.mark.cuda
def test_a_miscompiled_op_on_a_card_is_named() -> None:
    with testing.plugins(Miscompiling()):
        found = piecework.verify(
            steps, (torch.randn(4, 6, device="cuda"),), config=config(piece_compiler="miscompiling")
        )
    (departure,) = found.departures
    assert departure.op is not None
    assert departure.op.startswith("aten::mul")
