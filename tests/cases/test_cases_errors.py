"""Cases about errors: what a user reads when an op, a piece or a compiler fails, and what works afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import piecework
from capture_models import compiled, rows
from piecework import CompilationConfig, CompiledPiece, Piece, PluginError, counters, hookimpl, testing

pytestmark = pytest.mark.usefixtures("emulation")


def f(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.models.checked(x, out)
    return out + 1


def all_notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def notes_of(error: BaseException) -> str:
    return "\n".join(all_notes_of(error))


CAPTURED = pytest.mark.parametrize("sizes", [(), (3,)], ids=["uncaptured", "captured"])
LEVELS = pytest.mark.parametrize("level", [2, 3])


@LEVELS
@CAPTURED
@pytest.mark.parametrize("fails_first", [False, True])
def test_c62_exception_inside_a_splitting_op(level: int, sizes: tuple[int, ...], fails_first: bool) -> None:
    call = compiled(f, level=level, capture_sizes=sizes)
    good, bad = rows(3), rows(3).abs() * 1e9
    if not fails_first:
        torch.testing.assert_close(call(good), f(good))
    before = bad.clone()
    num_replays = counters.num_graph_replays
    for _ in range(2):
        with pytest.raises(ValueError, match="^too big for models::checked") as caught:
            call(bad)
        assert type(caught.value) is ValueError and str(caught.value) == "too big for models::checked"
        (note,) = all_notes_of(caught.value)
        assert "models::checked" in note and note.endswith(" of f")
        if level == 3:
            assert "splitting op models::checked" in note and "torch.ops.models.checked(x, out)" in note
    assert counters.num_graph_replays == num_replays
    torch.testing.assert_close(bad, before)
    num_graphs = 1 if level == 3 and sizes else 0  # what is before the op needs no kernel
    with counters.expect(num_graphs_seen=0, num_graph_replays=num_graphs):
        torch.testing.assert_close(call(good), f(good))


def g(x: torch.Tensor) -> torch.Tensor:
    y = torch.ops.models.scale3(x + 1)
    y = torch.ops.models.scale3(y.relu() * 2)
    return y - 3


class FailsOn:
    """A compiler whose hook, or the code that it made, fails at one of the pieces as long as it is told to."""

    name = "fails_on"

    def __init__(self, piece: str, *, compiling: bool) -> None:
        self.piece, self.compiling, self.is_failing = piece, compiling, True

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        def fail() -> None:
            if self.is_failing and piece.name == self.piece:
                raise RuntimeError("planned")

        def run(*inputs: Any) -> Any:
            fail()
            return piece.graph.forward(*inputs)

        if self.compiling:
            fail()
        return CompiledPiece(piece.graph.forward if self.compiling else run)


@CAPTURED
def test_c62_back_end_raises_for_one_piece(sizes: tuple[int, ...]) -> None:
    plugin = FailsOn("piece_1", compiling=True)
    with testing.plugins(plugin):
        call = compiled(g, capture_sizes=sizes, piece_compiler=None)
        x = rows(3)
        with pytest.raises(
            PluginError, match=r"'fails_on' \(registered by this program\).*'piece_1'.*planned"
        ) as caught:
            call(x)
        assert type(caught.value.__cause__) is RuntimeError
        plugin.is_failing = False
        torch.testing.assert_close(call(x), g(x))


@pytest.mark.parametrize("captured_at", [2, 3])
def test_c62_exception_inside_a_compiled_piece(captured_at: int) -> None:
    """At a size that is captured it is in the chain of the CaptureError; in a call it comes through as it is."""
    plugin = FailsOn("piece_1", compiling=False)
    plugin.is_failing = False
    with testing.plugins(plugin):
        call = compiled(g, capture_sizes=(captured_at,), piece_compiler=None)
        x = rows(2)
        torch.testing.assert_close(call(x), g(x))
        plugin.is_failing = True
        num_replays = counters.num_graph_replays
        with pytest.raises(RuntimeError, match="^planned") as caught:
            call(x)
        assert type(caught.value) is RuntimeError and counters.num_graph_replays == num_replays
        assert notes_of(caught.value) == (
            "raised in piece_1, compiled by plugin 'fails_on' (registered by this program), of g"
        )
        if captured_at == 3:
            with pytest.raises(piecework.CaptureError, match="size 3 of g .*piece_1.*planned"):
                call(rows(3))
        plugin.is_failing = False
        for n in (2, 3, 2):
            torch.testing.assert_close(call(x := rows(n)), g(x))


@LEVELS
def test_c62_exception_while_the_model_is_traced(level: int) -> None:
    is_failing = True

    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.models.scale3(x)
        if is_failing:
            raise AttributeError("planned in the model")
        return y + 1

    call = compiled(model, level=level)
    with pytest.raises(piecework.CompileError, match="planned in the model") as caught:
        call(rows(3))
    assert "AttributeError" in str(caught.value) and "test_cases_errors.py" in str(caught.value)
    is_failing = False
    torch.testing.assert_close(call(x := rows(3)), model(x))


# --- siblings -----------------------------------------------------------------------------------


def test_an_op_that_fails_inside_of_an_eager_piece_is_named() -> None:
    call = compiled(f, splitting_ops=(), capture_sizes=())
    call(rows(3))
    with pytest.raises(ValueError, match="^too big for models::checked") as caught:
        call(rows(3).abs() * 1e9)
    assert notes_of(caught.value) == "raised by models::checked in piece_0, run op by op, of f"


def test_a_model_inside_of_an_op_is_named_before_the_op() -> None:
    inner = compiled(f, capture_sizes=())

    def call_inner(x: torch.Tensor) -> torch.Tensor:
        return inner(x * 1e9)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(x) - 1

    op = piecework.SplittingOp("models::scale3", implementation=call_inner)
    call = compiled(outer, splitting_ops=(op,), capture_sizes=())
    with pytest.raises(ValueError, match="^too big") as caught:
        call(rows(3).abs())
    inner_note, outer_note = all_notes_of(caught.value)
    assert "models::checked" in inner_note and inner_note.endswith(" of f")
    assert "models::scale3" in outer_note and outer_note.endswith(".outer")


def test_the_backend_of_torch_compile_says_it_too() -> None:
    options = {"splitting_ops": ("models::checked",), "piece_compiler": "eager"}
    call = torch.compile(f, backend="piecework", options=options)
    torch.testing.assert_close(call(x := rows(3)), f(x))
    for num_notes in (1, 1):
        with pytest.raises(ValueError, match="^too big") as caught:
            call(rows(3).abs() * 1e9)
        assert len(all_notes_of(caught.value)) == num_notes and "splitting op models::checked" in notes_of(caught.value)
    torch.testing.assert_close(call(x := rows(3)), f(x))


def test_an_exception_object_that_is_raised_again_is_noted_once() -> None:
    planned = ValueError("the same object")

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise planned

    op = piecework.SplittingOp("models::scale3", implementation=fail)
    call = piecework.compile(g, config=CompilationConfig(splitting_ops=(op,), piece_compiler="eager"))
    for _ in range(3):
        with pytest.raises(ValueError, match="^the same object"):
            call(rows(3))
    assert len(all_notes_of(planned)) == 1


def test_interrupts_get_no_note() -> None:
    def interrupt(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    op = piecework.SplittingOp("models::scale3", implementation=interrupt)
    call = piecework.compile(g, config=CompilationConfig(splitting_ops=(op,), piece_compiler="eager"))
    with pytest.raises(KeyboardInterrupt) as caught:
        call(rows(3))
    assert notes_of(caught.value) == ""
