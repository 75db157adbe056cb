"""Debug mode: planted faults are found and named, models that are all right run as they do, and off it is not there."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import capture_models
import models
import piecework
from capture_models import INDEPENDENT, MinimalCapturer, capturing_by, emulated, plans_of
from piecework import (
    Capture,
    CaptureError,
    CompilationConfig,
    CompiledPiece,
    CompileError,
    Piece,
    PieceworkError,
    PluginError,
    Recordable,
    SplittingOp,
    StaleCaptureError,
    TraceDepartureError,
    hookimpl,
    testing,
)
from piecework.api import forward_of
from piecework.errors import DebugFinding
from piecework.testing import EmulatedCapturer
from piecework.testing.arena import with_storage_of

ops = torch.ops.models
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
FAULTS = ("writes", "view", "copies", "shape", "dtype", "strides", "keeps", "scribbles", "moves_weight", "moves_input")

library = torch.library.Library("faulty", "DEF")
_kept: dict[torch.device, torch.Tensor] = {}
_target: list[torch.Tensor] = []
"""What an op writes to, or moves, behind its caller."""


def _keep(x: torch.Tensor) -> torch.Tensor:
    return _kept.setdefault(x.device, torch.zeros(8, 6, device=x.device))[: len(x)].copy_(x * 3)


def _scribble(x: torch.Tensor) -> torch.Tensor:
    _target[0].view(-1)[-1:].add_(1)
    return x * 3


def _move(x: torch.Tensor) -> torch.Tensor:
    for target in _target:
        target.data = target.data.clone()
    return x * 3


for signature, real, fake in (
    ("writes(Tensor x) -> Tensor", lambda x: x.mul_(3).clone(), torch.empty_like),
    ("view(Tensor x) -> Tensor", lambda x: x[:], torch.empty_like),
    ("copies(Tensor(a!) x) -> Tensor(a!)", lambda x: x.mul_(3).clone(), lambda x: x),
    ("shape(Tensor x) -> Tensor", lambda x: (x * 3)[:1], torch.empty_like),
    ("dtype(Tensor x) -> Tensor", lambda x: (x * 3).double(), torch.empty_like),
    ("strides(Tensor x) -> Tensor", lambda x: (x * 3).t().contiguous().t(), torch.empty_like),
    ("keeps(Tensor x) -> Tensor", _keep, torch.empty_like),
    ("scribbles(Tensor x) -> Tensor", _scribble, torch.empty_like),
    ("moves_weight(Tensor x) -> Tensor", _move, torch.empty_like),
    ("moves_input(Tensor x) -> Tensor", _move, torch.empty_like),
):
    library.define(signature)
    name = signature.partition("(")[0]
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"faulty::{name}", fake, lib=library)

OPS = (*models.OPS, *capture_models.IN_PLACE, *(f"faulty::{name}" for name in FAULTS))


@pytest.fixture(autouse=True)
def _debug_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PIECEWORK_DEBUG", "1")
    with torch.no_grad():
        yield
    _target.clear()
    _kept.clear()
    piecework.reset()


@contextmanager
def planted(device: str, *plugins: object) -> Iterator[None]:
    """Use plugins with a fault besides what captures on a device."""
    with testing.plugins(*plugins, load_installed=device != "cpu"):
        yield


def compiled(target: Any, dims: Any = None, **settings: Any) -> Any:
    given = {"capture_sizes": (2, 3, 4), "splitting_ops": OPS, "max_padding_ratio": 1, "piece_compiler": "eager"}
    config = CompilationConfig(**{"level": 3, **given, **settings})
    return piecework.compile(target, config=config, dynamic_arg_dims=dims)


def rows(num: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(num, 6, device=device)


def same(call: Any, reference: Any, *args: Any) -> None:
    """Compare one call with eager: results and arguments afterwards."""
    expected_args = copy.deepcopy(args)
    expected = reference(*expected_args)
    torch.testing.assert_close(call(*args), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(args, expected_args, atol=1e-4, rtol=1e-4)


def finds(call: Any, *args: Any, error: type[PieceworkError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        call(*args)
    assert isinstance(caught.value, DebugFinding)


# --- off ---


def run_python(code: str, **environment: str) -> str:
    import os

    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIECEWORK_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**inherited, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PROGRAM = """
import sys, torch, piecework
from piecework import testing
import piecework_silly_attention
def model(x):
    out = torch.empty_like(x)
    torch.ops.silly.attention(x + 1, x, x, out)
    return out * 2
with torch.no_grad(), testing.plugins():
    call = piecework.compile(model, config=piecework.CompilationConfig(
        capture_sizes=(2,), splitting_ops=("silly::attention",), piece_compiler="eager"))
    call(torch.ones(2, 3)), call(torch.ones(3, 3))
print(sorted(name for name in sys.modules if "piecework.de" in name and "dedupe" not in name))
"""


def test_what_debug_mode_needs_is_imported_only_where_it_is_on() -> None:
    assert run_python(PROGRAM).strip() == "[]"
    assert "'piecework.debug'" in run_python(PROGRAM, PIECEWORK_DEBUG="1")


@pytest.mark.parametrize("text", [None, "", "0"])
def test_off_the_code_its_names_and_the_steps_are_as_if_there_were_no_such_mode(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    if text is None:
        monkeypatch.delenv("PIECEWORK_DEBUG")
    else:
        monkeypatch.setenv("PIECEWORK_DEBUG", text)
    replays: list[Any] = []

    class Notes(EmulatedCapturer):
        def capture(self, fn: Callable[[], tuple[torch.Tensor, ...]]) -> Capture:
            captured = super().capture(fn)
            replays.append(captured.replay)
            return captured

    with capturing_by(Notes(torch.device("cpu"))):
        call = compiled(models.attend)
        for size in (2, 5, 2):
            same(call, models.attend, rows(size))
        made = forward_of(call, "test").compiled
        assert made is not None
        assert made.run.source == (
            "def forward(a0, _pw_s0):\n"
            "    v1_out, v2_add = piece_0(a0, _pw_s0)\n"
            "    f0_attn_default(v2_add, a0, v1_out)\n"
            "    del v2_add\n"
            "    v3_mul, = piece_1(v1_out, _pw_s0)\n"
            "    del v1_out\n"
            "    return (v3_mul,)\n"
        )
        assert made.run.namespace["f0_attn_default"] is ops.attn.default
        pieces = [step.graph.forward for step in made.split.pieces] if made.split is not None else []
        assert [made.run.namespace["piece_0"], made.run.namespace["piece_1"]] == pieces
        assert made.entry.namespace["_pw_watch"] is made.state.watch
        assert made.entry.namespace["_pw_settle"] == made.state.settle
        plan = plans_of(call).plans[2]
        first, op, last = plan.recording.steps
        assert [first, last] == replays
        assert op.func == ops.attn.default._op  # pyright: ignore[reportFunctionMemberAccess] - a partial
        assert plan.recording.checks is None
        assert plans_of(call).functions[2].__code__.co_filename == "<piecework plan of attend>"
        replays.clear()


# --- models that are all right ---


class State(nn.Module):
    """Parameters, a buffer that is written to, and a result that is a view of another."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.count.add_(1)
        y = ops.scale3(self.linear(x)) + self.count
        up, down = ops.pair(y)
        return y, y[1:], up, down * self.count


def in_place(x: torch.Tensor) -> Any:
    y = x.sin()
    torch.ops.capture.double(y)
    z, tail = y + 1, torch.ops.capture.tail(y)
    out = torch.empty_like(z)
    ops.attn(z, y, out)
    return out, tail + 1, x


def writes_to_inputs(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    y = ops.scale3(x)
    x.add_(y)
    return y - 1


def integers(x: torch.Tensor) -> torch.Tensor:
    index = (x.sum(1) > 0).long()
    return ops.scale3(x)[index % x.shape[0]] + index.unsqueeze(1)


def nan(x: torch.Tensor) -> torch.Tensor:
    y = (x - 100).log()
    return ops.scale3(y).nan_to_num(7.0) + x


RIGHT = (models.Linear, State, models.Stack, lambda: models.attend, lambda: in_place, lambda: writes_to_inputs,
         lambda: integers, lambda: nan)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", [
    {},
    {"static_outputs": True},
    {"capture_sizes": "auto"},
    {"splitting_ops": tuple(SplittingOp(name, capturable=True) for name in OPS)},
    {"splitting_ops": INDEPENDENT, "capture_sizes": (4,), "max_padding_ratio": 4, "rows_independent": True},
    {"capture_sizes": ()},
    {"capture_sizes": (), "compile_sizes": (3,)},
    {"level": 2},
    {"level": 1},
    {"level": 0},
], ids=["plain", "static_outputs", "auto", "capturable", "padded", "uncaptured", "exact", "2", "1", "0"])  # fmt: skip
@pytest.mark.parametrize("make", RIGHT, ids=["linear", "state", "stack", "attend", "in place", "inputs", "int", "nan"])
def test_models_that_are_all_right_run_as_eager_does(make: Any, settings: dict[str, Any], device: str) -> None:
    model = make()
    if isinstance(model, nn.Module):
        model.to(device)
    twin = copy.deepcopy(model)
    if settings.get("rows_independent") and model is integers:
        settings = {**settings, "rows_independent": False}
    if settings.get("splitting_ops") is INDEPENDENT:
        settings = {**settings, "splitting_ops": (*INDEPENDENT, *capture_models.IN_PLACE)}
    with planted(device):
        call = compiled(model, {"x": 0}, **settings)
        for size in (4, 2, 7, 2, 3, 3, 3, 1):
            same(call, twin, rows(size, device))
            if isinstance(model, nn.Module) and isinstance(twin, nn.Module):
                torch.testing.assert_close(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(2, 4), ()])
def test_pieces_that_inductor_compiles_are_all_right(sizes: tuple[int, ...], device: str) -> None:
    with testing.plugins(load_installed=True):
        model = State().to(device)
        twin = copy.deepcopy(model)
        call = compiled(model, piece_compiler="inductor", capture_sizes=sizes)
        for size in (4, 2, 3, 2):
            same(call, twin, rows(size, device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_is_held_written_and_replaced(device: str) -> None:
    def model(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[:2].add_(x[:1])
        return ops.scale3(x + cache[1:2]) * 2

    with planted(device):
        call = compiled(model, {"x": 0})
        cache = rows(5, device)
        for size in (2, 3, 2):
            same(call, model, rows(size, device), cache)
        for _ in range(5):
            same(call, model, rows(2, device), rows(5, device))


def test_weights_are_replaced_and_a_released_model_starts_anew() -> None:
    model = models.Linear()
    with planted("cpu"):
        call = compiled(model)
        for _ in range(2):
            for _ in range(2):
                same(call, model, rows(2))
            model.linear.weight = nn.Parameter(torch.randn(6, 6))
            same(call, model, rows(2))
            model.linear.weight.data = torch.randn(6, 6)
            same(call, model, rows(2))
            piecework.release(call)


def test_capturers_of_few_means_and_the_backend_of_dynamo() -> None:
    with capturing_by(MinimalCapturer()):
        model = State()
        twin = copy.deepcopy(model)
        call = compiled(model)
        for size in (4, 2, 2):
            same(call, twin, rows(size))
    with planted("cpu"):
        reference: Any = models.Linear()
        options: dict[str, Any] = {"splitting_ops": OPS, "piece_compiler": "eager"}
        by_torch = torch.compile(reference, backend="piecework", options=options)
        for size in (4, 4, 4, 4, 2):
            same(by_torch, reference, rows(size))


def test_memory_of_graphs_is_gone_when_they_are_dropped() -> None:
    capturer = emulated()
    with capturing_by(capturer):
        call = compiled(models.attend)
        for size in (2, 3, 2):
            call(rows(size))
        assert capturer.memory().driver_bytes
        piecework.release(call)
        assert capturer.memory().driver_bytes == 0


# --- planted faults: ops ---

OP_FAULTS = {
    "writes": "faulty::writes wrote to argument 'x', which it declares that it only reads; declare it as mut",
    "view": "faulty::view returned its result in the memory of argument 'x', and declares it fresh; return a copy",
    "copies": "faulty::copies returned its result in other memory than that of argument 'x', which its schema",
    "shape": r"faulty::shape gave its result with shape \(1, 6\), where its fake implementation gives \(\d, 6\); mend",
    "dtype": "faulty::dtype gave its result with dtype torch.float64, where its fake implementation gives torch.float",
    "strides": r"faulty::strides gave its result with strides \(1, \d\), where its fake implementation gives \(6, 1\)",
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("on_failure", ["error", "eager"])
@pytest.mark.parametrize("sizes", [(4,), ()], ids=["captured", "uncaptured"])
@pytest.mark.parametrize("name", OP_FAULTS)
def test_an_op_that_does_not_do_what_it_declares(
    name: str, sizes: tuple[int, ...], on_failure: str, device: str
) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return getattr(torch.ops.faulty, name)(x + 1).sum() + x

    with planted(device):
        call = compiled(model, {"x": 0}, capture_sizes=sizes, on_failure=on_failure)
        for _ in range(2):
            finds(call, rows(4, device), error=CompileError, match=OP_FAULTS[name])


@pytest.mark.parametrize("name", ["view", "shape", "dtype", "strides"])
def test_an_op_inside_of_a_graph_that_does_not_do_what_it_declares(name: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return getattr(torch.ops.faulty, name)(x + 1).sum() + x

    with planted("cpu"):
        call = compiled(
            model, {"x": 0}, splitting_ops=[SplittingOp(f"faulty::{name}", capturable=True)], on_failure="eager"
        )
        finds(call, rows(4), error=CompileError, match=OP_FAULTS[name])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(4,), ()], ids=["captured", "uncaptured"])
def test_an_op_that_returns_memory_that_it_keeps(sizes: tuple[int, ...], device: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        first = torch.ops.faulty.keeps(x)
        return torch.ops.faulty.keeps(x + 1) - first

    with planted(device):
        call = compiled(model, {"x": 0}, capture_sizes=sizes)
        finds(
            call, rows(4, device), error=CompileError, match="faulty::keeps returned its result in memory that an earl"
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", ["weight", "buffer"])
def test_an_op_that_writes_to_state_of_the_model_behind_its_back(what: str, device: str) -> None:
    class Behind(models.Linear):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.faulty.scribbles(self.linear(x)) + self.mean

    model = Behind().to(device)
    with planted(device):
        call = compiled(model)
        _target[:] = [torch.zeros(1, device=device)]
        call(rows(4, device))
        _target[:] = [model.linear.weight.detach() if what == "weight" else model.mean]
        name = "linear.weight" if what == "weight" else "mean"
        finds(call, rows(4, device), error=CaptureError, match=f"a call changed {name}, which the model only reads")


@pytest.mark.parametrize("device", DEVICES)
def test_an_op_that_writes_to_a_value_that_is_alive(device: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return torch.ops.faulty.scribbles(x * 2) + y

    with planted(device):
        call = compiled(model, {"x": 0})
        _target[:] = [torch.zeros(1, device=device)]
        call(rows(4, device))
        checks = plans_of(call).plans[4].recording.checks
        assert checks is not None
        _target[:] = [next(place.tensor for place in checks.pooled if place.node.name == "y")]
        finds(
            call, rows(4, device), error=CaptureError, match="faulty::scribbles.* wrote to y .*, which it must leave as"
        )


@pytest.mark.parametrize("device", DEVICES)
def test_an_op_that_moves_a_weight(device: str) -> None:
    class Moves(models.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.ops.faulty.moves_weight(self.linear(x)))

    model = Moves().to(device)
    with planted(device):
        call = compiled(model)
        same(call, model, rows(4, device))
        _target[:] = [model.linear.bias]
        finds(
            call,
            rows(4, device),
            error=StaleCaptureError,
            match="linear.bias is at another address than when .*piece_1",
        )
        _target.clear()
        same(call, model, rows(4, device))


@pytest.mark.parametrize("device", DEVICES)
def test_an_op_that_moves_an_input(device: str) -> None:
    def model(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return torch.ops.faulty.moves_input(x + cache[:1]) + cache[1:2]

    cache = rows(4, device)
    with planted(device):
        call = compiled(model, {"x": 0})
        same(call, model, rows(3, device), cache)
        _target[:] = [cache]
        finds(
            call, rows(3, device), cache, error=StaleCaptureError, match="argument cache of .* moved while a call ran"
        )


# --- planted faults: compilers ---


class Compiler:
    """A piece compiler whose code does something besides."""

    name = "faulty"

    def __init__(self, run: Callable[[Piece, tuple[Any, ...]], Any]) -> None:
        self.run = run

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        return CompiledPiece(lambda *inputs: self.run(piece, inputs))


def chain(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = ops.scale3(y) * 2
    w = ops.scale3(z) - 3
    return ops.scale3(w).tanh()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(4,), ()], ids=["captured", "uncaptured"])
def test_a_compiler_whose_code_writes_to_an_input(sizes: tuple[int, ...], device: str) -> None:
    def run(piece: Piece, inputs: tuple[Any, ...]) -> Any:
        results = piece.graph.forward(*inputs)
        if piece.name == "piece_1":
            inputs[0].add_(1)
        return results

    with planted(device, Compiler(run)):
        call = compiled(chain, {"x": 0}, capture_sizes=sizes, piece_compiler="faulty", on_failure="eager")
        if sizes:
            finds(call, rows(4, device), error=CaptureError, match="piece_1 wrote to scale3 .*, which it must leave")
        else:
            finds(
                call,
                rows(4, device),
                error=PluginError,
                match=r"plugin 'faulty' .*compiled for piece_1 wrote to its inp",
            )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(2, 4), ()], ids=["captured", "uncaptured"])
def test_a_compiler_whose_results_have_other_strides_at_a_later_size(sizes: tuple[int, ...], device: str) -> None:
    def run(piece: Piece, inputs: tuple[Any, ...]) -> Any:
        results = piece.graph.forward(*inputs)
        if len(results[0]) == 4 and piece.name == "piece_0":
            results = tuple(result.t().contiguous().t() for result in results)
        return results

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return ops.scale3(y) * y

    with planted(device, Compiler(run)):
        call = compiled(model, {"x": 0}, capture_sizes=sizes, piece_compiler="faulty")
        same(call, model, rows(2, device))
        match = r"'faulty' .*compiled for piece_0 returned result 0 with strides \(1, 4\).*compiled for \(6, 1\)"
        finds(call, rows(4, device), error=PluginError, match=match)


@pytest.mark.parametrize("sizes", [(2, 4), ()], ids=["captured", "uncaptured"])
@pytest.mark.parametrize(("change", "match"), [
    (lambda given, inputs: (given[0].half(), *given[1:]), "returned result 0 not as a tensor torch.float32"),
    (lambda given, inputs: (inputs[0].view_as(inputs[0]), *given[1:]), "returned result 0 in the memory of its input"),
    (lambda given, inputs: (given[0], given[0]), "returned results 0 and 1 in the same memory"),
])  # fmt: skip
def test_a_compiler_whose_results_are_wrong_at_a_later_size(
    change: Callable[..., Any], match: str, sizes: tuple[int, ...]
) -> None:
    def run(piece: Piece, inputs: tuple[Any, ...]) -> Any:
        results = piece.graph.forward(*inputs)
        return change(results, inputs) if len(results[0]) == 4 and piece.name == "piece_0" else results

    def model(x: torch.Tensor) -> torch.Tensor:
        y, z = x + 1, x * 2
        return ops.scale3(y) * z

    with planted("cpu", Compiler(run)):
        call = compiled(model, {"x": 0}, capture_sizes=sizes, piece_compiler="faulty", on_failure="eager")
        same(call, model, rows(2))
        finds(call, rows(4), error=PluginError, match=f"'faulty' .*compiled for piece_0 {match}")


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_that_reads_a_value_after_its_last_use(device: str) -> None:
    stale: list[torch.Tensor] = []

    def run(piece: Piece, inputs: tuple[Any, ...]) -> Any:
        results = piece.graph.forward(*inputs)
        if piece.name == "piece_1":
            stale[:] = [inputs[0].detach()]
        if piece.name == "piece_2":
            results = tuple(result + 0 * stale[0] for result in results)
        return results

    with planted(device, Compiler(run)):
        call = compiled(chain, {"x": 0}, capture_sizes=(4,), piece_compiler="faulty")
        finds(
            call, rows(4, device), error=CaptureError, match="piece_2 reads memory that nobody owns when it runs: .*w "
        )


# --- planted faults: capturers ---


class Stale(EmulatedCapturer):
    """Its graphs read copies that were made when they were captured."""

    def capture(self, fn: Callable[[], tuple[torch.Tensor, ...]]) -> Capture:
        assert isinstance(fn, Recordable)
        outputs = super().capture(fn).outputs
        copies = tuple(tensor.clone() for tensor in fn.inputs)

        def replay() -> None:
            for kept, made in zip(outputs, fn.run(*copies), strict=True):
                kept.copy_(made)

        return Capture(replay, outputs)


class OneBlock(EmulatedCapturer):
    """Gives the memory of the first graph's result to that of the second."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.first: torch.Tensor | None = None

    def capture(self, fn: Callable[[], tuple[torch.Tensor, ...]]) -> Capture:
        captured = super().capture(fn)
        if self.first is None:
            self.first = captured.outputs[0]
            return captured
        own = captured.outputs[0]
        shared = with_storage_of(self.first, own)

        def replay() -> None:
            captured.replay()
            shared.copy_(own)

        return Capture(replay, (shared, *captured.outputs[1:]))


def skips_one(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = ops.scale3(x) * 2
    return ops.scale3(z) * y


@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_a_capturer_whose_graphs_read_copies(on_failure: str) -> None:
    with capturing_by(Stale(torch.device("cpu"))):
        call = compiled(chain, {"x": 0}, on_failure=on_failure)
        finds(
            call, rows(4), error=CaptureError, match="plugin 'own' runs piece_0 on a copy of argument x, so that its g"
        )


@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_a_capturer_that_gives_one_block_to_two_values_that_live(on_failure: str) -> None:
    with capturing_by(OneBlock()):
        call = compiled(skips_one, {"x": 0}, on_failure=on_failure)
        finds(
            call, rows(4), error=CaptureError, match="piece_1 gives z .* memory that y .* of piece_0 still needs: plug"
        )


def test_a_result_that_the_next_call_writes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    import piecework.plan_code

    clones = piecework.plan_code._clones
    monkeypatch.setattr(piecework.plan_code, "_clones", lambda results, static_outputs: clones(results, True))
    with planted("cpu"):
        finds(
            compiled(chain, {"x": 0}), rows(4), error=CaptureError, match="result 0 of chain lies in memory that later"
        )
        compiled(chain, {"x": 0}, static_outputs=True)(rows(4))


# --- what the caller does ---

offset = 1.0


def with_global(x: torch.Tensor) -> torch.Tensor:
    return ops.scale3(x) + offset


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_a_global_that_is_rebound(monkeypatch: pytest.MonkeyPatch, level: int, on_failure: str) -> None:
    with planted("cpu"):
        call = compiled(with_global, {"x": 0}, level=level, on_failure=on_failure)
        same(call, with_global, rows(4))
        monkeypatch.setitem(globals(), "offset", 2.0)
        for _ in range(2):
            finds(call, rows(4), error=TraceDepartureError, match="offset")
        monkeypatch.setitem(globals(), "offset", 1.0)
        same(call, with_global, rows(4))


@pytest.mark.parametrize("level", [2, 3])
def test_state_that_is_swapped_through_dict(level: int) -> None:
    model = models.Linear()
    with planted("cpu"):
        call = compiled(model, level=level)
        same(call, model, rows(4))
        model.linear.__dict__["_parameters"] = {**model.linear._parameters, "weight": nn.Parameter(torch.randn(6, 6))}
        same(call, model, rows(4))  # bound anew, as if it were assigned
        model.__dict__["scale"] = 3.0
        finds(call, rows(4), error=TraceDepartureError, match="self.scale")


def test_an_input_that_the_caller_promised_to_keep_in_place() -> None:
    with planted("cpu"):
        call = compiled(chain, {"x": 0}, static_inputs=["x"])
        x = rows(4)
        for num in (4, 2, 4):
            same(call, chain, x[:num])
        finds(
            call, rows(4), error=StaleCaptureError, match="argument x of chain is not where it was when size 4 was capt"
        )
        same(call, chain, x)
