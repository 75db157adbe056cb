"""Compiling unique pieces: what a plugin sees, exact sizes, and what becomes of failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecework
import split_models as models
from piecework import (
    CompilationConfig,
    CompiledPiece,
    CompileError,
    ConfigError,
    InputKind,
    Piece,
    PieceworkWarning,
    PluginError,
    counters,
    hookimpl,
)
from piecework.testing import plugins
from piecework.tools import origins
from split_models import FailsAt, Recorder, compiled_by, ops, rows


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    return tmp_path


class Layers(nn.Module):
    """Three pieces that differ: with a parameter, with a buffer that it writes, with a size."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 6, bias=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ops.scale3(self.inner(x))
        self.count.add_(1)
        y = ops.scale3(y + self.count)
        return y / x.shape[0] + x


def recorded(model: Any, *args: Any, **settings: Any) -> Recorder:
    recorder = Recorder()
    with plugins(recorder):
        compiled = compiled_by(model, piece_compiler="recorder", **settings)
        torch.testing.assert_close(compiled(*args).detach(), model(*args).detach(), check_stride=False)
    return recorder


def tensors(piece: Piece) -> list[torch.Tensor]:
    return [example for example in piece.example_inputs if isinstance(example, torch.Tensor)]


# --- what a compiler sees -------------------------------------------------------------------------


def test_examples_are_fake_and_symbolic_with_one_symbol_per_size() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return ops.scale3(x + y[:, :1]) * y[:, :1] + x

    recorder = recorded(Two(), rows(4), rows(4, 3))
    assert len(recorder.pieces) == 2
    for piece in recorder.pieces:
        assert all(type(tensor).__name__ == "FakeTensor" for tensor in tensors(piece))
        firsts = [tensor.shape[0] for tensor in tensors(piece)]
        assert all(isinstance(size, torch.SymInt) for size in firsts)
        assert len({str(size) for size in firsts}) == 1
        assert all(isinstance(size, int) for tensor in tensors(piece) for size in tensor.shape[1:])
        assert piece.size is None
        copied = [node.meta["example_value"] for node in piece.graph.graph.find_nodes(op="placeholder")]
        assert [id(value) for value in copied] == [id(example) for example in piece.example_inputs]


def test_fake_aware_code_of_a_compiler_meets_no_other_mode() -> None:
    shapes: list[Any] = []

    class Runs:
        name = "runs"

        @hookimpl
        def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
            shapes.append([type(out.shape[0]).__name__ for out in piece.graph(*piece.example_inputs)])
            return CompiledPiece(piece.graph.forward)

    with plugins(Runs()):
        model = Layers()
        torch.testing.assert_close(compiled_by(model, piece_compiler="runs")(rows(4)).shape, (4, 6))
    assert shapes == [["SymInt"], ["SymInt"], ["SymInt"]]


def test_kinds_of_inputs_and_what_is_written() -> None:
    model = Layers()
    recorder = Recorder()
    with plugins(recorder):
        compiled_by(model, piece_compiler="recorder")(rows(4))
    first, second, third = recorder.pieces
    kinds = [sorted(kind.value for kind in piece.input_kinds) for piece in recorder.pieces]
    # The last piece divides by a size, which it gets as such besides the tensors that have it.
    assert kinds == [
        ["activation", "parameter", "size"],
        ["activation", "buffer", "size"],
        ["activation", "activation", "size"],
    ]
    assert second.input_kinds[second.mutated_inputs[0]] is InputKind.BUFFER
    assert (first.mutated_inputs, len(second.mutated_inputs), third.mutated_inputs) == ((), 1, ())
    assert all(piece.outputs_are_fresh and not piece.aliased_inputs for piece in recorder.pieces)
    assert len({piece.key for piece in recorder.pieces}) == 3


def test_size_that_no_tensor_has_is_an_input_of_its_own() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x.sum(0)) * x.shape[0]

    recorder = recorded(model, rows(4))
    last = recorder.pieces[-1]
    assert sorted(kind.value for kind in last.input_kinds) == ["activation", "size"]
    assert [type(example) for example in last.example_inputs if not isinstance(example, torch.Tensor)] == [torch.SymInt]


def test_arguments_that_share_memory_are_named() -> None:
    class Shared(nn.Module):
        whole: torch.Tensor
        part: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", torch.zeros(2, 6))
            self.register_buffer("part", self.whole[:1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.part.add_(1)
            return ops.scale3(x + self.whole.sum()) + self.part

    model, reference = Shared(), Shared()
    recorder = Recorder()
    with plugins(recorder):
        compiled = compiled_by(model, piece_compiler="recorder")
        for n in (4, 2):
            torch.testing.assert_close(compiled(rows(n)), reference(rows(n)))
    # The piece that writes to memory that two of its inputs share is offered to no compiler.
    assert len(recorder.pieces) == 1
    assert not recorder.pieces[0].mutated_inputs


def test_every_compile_comes_before_the_first_run() -> None:
    events: list[str] = []

    class Noting:
        name = "noting"

        @hookimpl
        def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
            events.append("compile")
            assert not torch.is_grad_enabled()

            def run(*inputs: Any) -> Any:
                events.append("run")
                return piece.graph.forward(*inputs)

            return CompiledPiece(run)

    with plugins(Noting()), counters.expect(num_piece_compilations=3):
        compiled_by(Layers(), piece_compiler="noting")(rows(4))
    assert events == ["compile"] * 3 + ["run"] * 3


# --- exact sizes ----------------------------------------------------------------------------------


def test_exact_size_is_compiled_exactly_and_used_there_only() -> None:
    recorder = Recorder()
    model = Layers()
    with plugins(recorder), counters.expect(num_piece_compilations=6, num_unique_pieces=3):
        compiled = compiled_by(model, piece_compiler="recorder", compile_sizes=(8,))
        compiled(rows(4))
    general, exact = recorder.pieces[:3], recorder.pieces[3:]
    assert [piece.size for piece in recorder.pieces] == [None] * 3 + [8] * 3
    assert all(isinstance(size, int) for piece in exact for tensor in tensors(piece) for size in tensor.shape)
    assert [piece.name for piece in exact] == [f"{piece.name} for size 8" for piece in general]
    assert [tuple(t.shape) for t in tensors(exact[0]) if t.shape[0] == 8] == [(8, 6)]
    for n, runs in ((8, [1, 1, 1, 1, 1, 1]), (7, [2, 2, 2, 1, 1, 1]), (8, [2, 2, 2, 2, 2, 2]), (1, [3, 3, 3, 2, 2, 2])):
        count = model.count.clone() + 1
        expected = ((model.inner(rows(n)) * 3 + count) * 3) / n + rows(n)
        torch.testing.assert_close(compiled(rows(n)), expected)
        assert recorder.num_runs == runs


def test_exact_size_with_two_named_dims() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x * x.shape[1]) + x.shape[0]

    recorder = Recorder()
    with plugins(recorder):
        compiled = compiled_by(
            model,
            piece_compiler="recorder",
            dims={"x": {0: "batch", 1: "seq"}},
            compile_sizes=({"seq": 3, "batch": 5},),
        )
        for batch, seq in ((2, 4), (5, 3), (3, 5)):
            x = torch.randn(batch, seq, 2)
            torch.testing.assert_close(compiled(x), model(x))
    assert recorder.num_runs == [2, 2, 1, 1]
    assert tuple(tensors(recorder.pieces[2])[0].shape) == (5, 3, 2)


@pytest.mark.parametrize(
    ("dims", "size", "message"),
    [
        ({"x": {0: "batch", 1: "seq"}}, 4, 'the model has the dims batch, seq, so give {"batch": 4, "seq": 4}, got 4'),
        ({"x": {0: "batch", 1: "seq"}}, {"batch": 4}, "a size needs a value for each of batch, seq, got"),
        ({"x": 0}, {"batch": 4}, "a size needs a value for each of rows, got"),
    ],
)
def test_wrong_exact_size(dims: Any, size: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compiled_by(Layers(), dims=dims, compile_sizes=(size,))(torch.randn(2, 3, 6))
    assert message in str(caught.value)


def test_pieces_that_stand_for_other_dims_are_compiled_exactly_for_each() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        return ops.scale3(ops.scale3(x.sin()).cos()), ops.scale3(y.cos())

    recorder = Recorder()
    with plugins(recorder):
        compiled = compiled_by(
            model, piece_compiler="recorder", dims={"x": {0: "n"}, "y": {0: "m"}}, compile_sizes=({"n": 2, "m": 5},)
        )
        for n, m in ((3, 4), (2, 5), (5, 2)):
            torch.testing.assert_close(compiled(rows(n), rows(m)), model(rows(n), rows(m)))
    exact = [tensors(piece)[0].shape[0] for piece in recorder.pieces if piece.size]
    assert exact == [2, 2, 5]  # sin of x, cos of x, cos of y: the latter two are one unique piece
    assert recorder.num_runs == [2, 4, 1, 1, 1]


# --- failures -------------------------------------------------------------------------------------


def test_plugin_that_raises_is_named_with_the_piece() -> None:
    with plugins(FailsAt(2, RuntimeError("not my day"))), pytest.raises(PluginError) as caught:
        compiled_by(Layers(), piece_compiler="fails_at")(rows(4))
    for words in ("fails_at", "piece_1", "not my day", "compiles this piece alone"):
        assert words in str(caught.value)
    assert type(caught.value.__cause__) is RuntimeError


def test_compile_error_of_a_plugin_comes_through_with_the_script(own_cache: Path) -> None:
    with plugins(FailsAt(3, CompileError("no such kernel"))), pytest.raises(CompileError) as caught:
        compiled_by(Layers(), piece_compiler="fails_at")(rows(4))
    (script,) = (own_cache / "repro").iterdir()
    assert str(caught.value) == f"no such kernel; {script} compiles this piece alone"
    assert script.name.startswith("piece_2_")
    assert script.suffix == ".py"


def test_plugin_that_declines_though_named() -> None:
    with plugins(FailsAt(2, None)), pytest.raises(CompileError, match=r"'fails_at' declined piece_1 of Layers"):
        compiled_by(Layers(), piece_compiler="fails_at")(rows(4))


def test_plugin_that_declines_unnamed_leaves_the_piece_eager() -> None:
    with plugins(FailsAt(2, None)), counters.expect(num_piece_compilations=2):
        compiled = compiled_by(Layers(), piece_compiler=None)
        torch.testing.assert_close(compiled(rows(4)), Layers()(rows(4)))
    assert [piece.compiler for piece in piecework.report(compiled).pieces] == ["fails_at", "eager", "fails_at"]


@pytest.mark.parametrize("answer", [RuntimeError("not my day"), CompileError("not my day"), None])
def test_failure_can_fall_back_to_eager_with_one_warning(answer: Any) -> None:
    with plugins(FailsAt(2, answer)), counters.expect(num_piece_compilations=2):
        compiled = compiled_by(Layers(), piece_compiler="fails_at", on_failure="eager")
        with pytest.warns(PieceworkWarning) as warned:
            torch.testing.assert_close(compiled(rows(4)), Layers()(rows(4)))
        assert len(warned) == 1
        text = str(warned[0].message)
        assert text.startswith("piece_1 of Layers runs eagerly, since compiling it failed: ")
        assert "fails_at" in text or "not my day" in text
        compiled(rows(2))


def test_wrong_option_is_an_error_whatever_follows_failures() -> None:
    with (
        plugins(FailsAt(1, ConfigError("no such option"))),
        pytest.raises(ConfigError, match=r"^no such option$"),
    ):
        compiled_by(Layers(), piece_compiler="fails_at", on_failure="eager")(rows(4))


def test_call_after_a_failed_compile_starts_anew() -> None:
    model = Layers()
    with plugins(FailsAt(1, RuntimeError("not my day"))), counters.expect(num_piece_compilations=3):
        compiled = compiled_by(model, piece_compiler="fails_at")
        with pytest.raises(PluginError):
            compiled(rows(4))
        torch.testing.assert_close(compiled(rows(4)), Layers()(rows(4)))


def test_no_compiler_installed_is_said_once_per_process() -> None:
    with plugins():
        with pytest.warns(PieceworkWarning, match=r'no piece compiler.*README.*"Piece compilers"') as warned:
            torch.testing.assert_close(compiled_by(Layers(), piece_compiler=None)(rows(4)), Layers()(rows(4)))
        assert len(warned) == 1
        compiled_by(Layers(), piece_compiler=None)(rows(4))
        piecework.reset()
    with plugins(), pytest.warns(PieceworkWarning, match="no piece compiler is there"):
        compiled_by(Layers(), piece_compiler=None)(rows(4))


def test_eager_pieces_by_name_are_no_warning() -> None:
    with plugins(), counters.expect(num_piece_compilations=0):
        compiled_by(Layers(), piece_compiler="eager")(rows(4))


# --- repro scripts --------------------------------------------------------------------------------


def failed_script(model: Any, folder: Path, *args: Any, number: int = 1, **settings: Any) -> Path:
    with plugins(FailsAt(number, RuntimeError('a """ and a \\'))), pytest.raises(PluginError):
        compiled_by(model, piece_compiler="fails_at", **settings)(*args)
    (script,) = (folder / "repro").iterdir()
    return script


def run_script(script: Path) -> str:
    """Run a script in its own process, with eager pieces in place of a compiler that exists here only."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment["PIECEWORK_CONFIG"] = '{"piece_compiler": "eager"}'
    finished = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr + script.read_text()
    return finished.stdout


def everything(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> Any:
    """Ops of many kinds in one piece: a constant, a nested graph, sizes, views, dtypes, an in-place write."""
    y = nn.functional.silu(x) * float("inf")
    y = torch.cond(ids.sum() > 1, lambda y: y.sin(), lambda y: y.cos(), (y,))
    z = nn.functional.embedding(ids, weight).to(torch.bfloat16)[:, ::2]
    z += 1
    flags = (x > 0) & torch.tensor([True, False, True, True, False, False])
    return y.transpose(0, 1).masked_fill(flags.t(), -1e9), z, x.new_full((x.shape[0] * 2,), 2.5, dtype=torch.float64)


def test_repro_script_runs_by_itself(own_cache: Path) -> None:
    args = (rows(4), torch.tensor([1, 0, 2, 3]), rows(5))
    script = failed_script(everything, own_cache, *args, dims={"x": 0, "ids": 0})
    assert "piece_compiler='fails_at'" in script.read_text()
    output = run_script(script)
    assert "by itself: [(" in output
    assert output.count("largest difference") == 3


def test_repro_script_of_an_exact_size_runs_by_itself(own_cache: Path) -> None:
    script = failed_script(Layers(), own_cache, rows(4), number=4, compile_sizes=(8,))
    assert "by itself: [(8, 6)]" in run_script(script)


def test_repro_script_that_can_not_be_written_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(blocked))
    with plugins(FailsAt(1, CompileError("the cause"))), pytest.raises(CompileError, match=r"^the cause$"):
        compiled_by(Layers(), piece_compiler="fails_at")(rows(4))
    assert "no repro script of piece_0 could be written" in caplog.text


def test_repro_script_is_whole_or_not_there(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from piecework.tools import repro

    def fail(source: Any, target: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(repro.os, "replace", fail)
    with plugins(FailsAt(1, CompileError("the cause"))), pytest.raises(CompileError, match=r"^the cause$"):
        compiled_by(Layers(), piece_compiler="fails_at")(rows(4))
    assert not list((own_cache / "repro").glob("*"))


def test_repro_script_that_a_killed_process_left_unfinished_is_removed(own_cache: Path) -> None:
    folder = own_cache / "repro"
    folder.mkdir(parents=True)
    old, recent, of_others = (folder / name for name in (".piecework-old.tmp", ".piecework-recent.tmp", "notes.tmp"))
    for file in (old, recent, of_others):
        file.write_text("half of")
    for file in (old, of_others):
        os.utime(file, (0, 0))
    with plugins(FailsAt(1, CompileError("the cause"))), pytest.raises(CompileError, match="^the cause; .* compiles"):
        compiled_by(Layers(), piece_compiler="fails_at")(rows(4))
    assert not old.exists() and recent.exists() and of_others.exists()


def test_repro_script_keeps_the_options_of_the_plugin(own_cache: Path) -> None:
    options = {"fails_at": {"fast": True, "sizes": [1, 2]}}
    script = failed_script(Layers(), own_cache, rows(4), plugin_options=options)
    assert f"plugin_options={options!r}" in script.read_text()
    assert CompilationConfig(plugin_options=options).plugin_options == options


def cut_model(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.cutlib.twice(x) + 1


def test_repro_script_imports_what_registers_its_ops(own_cache: Path) -> None:
    script = failed_script(cut_model, own_cache, rows(4), cuts=models.CUTS)
    assert "torch.ops.cutlib.twice" in script.read_text()
    assert "largest difference 0" in run_script(script)


def test_repro_script_says_which_import_it_lacks(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins.internals, "module_of_op", lambda name: None)  # As for an op that C++ registered.
    script = failed_script(cut_model, own_cache, rows(4), cuts=models.CUTS)
    assert "# Import here what registers cutlib::twice." in script.read_text()
