"""From the first call on: levels, counts, the choice of splitting ops and compilers, and concurrent first calls."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import models
import piecework
from models import Linear, Stack, assert_same, attend, both_levels, compiled, rows
from piecework import (
    CompilationConfig,
    CompileError,
    ConfigError,
    PieceworkWarning,
    SplittingOp,
    counters,
    testing,
)
from piecework.build import size_values
from piecework.torch_internals import FakeTensor


class FakeCompiler:
    """Runs graphs as they are, and can fail."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.pieces: list[piecework.Piece] = []

    @piecework.hookimpl
    def piecework_compile_piece(self, piece: piecework.Piece) -> piecework.CompiledPiece:
        self.pieces.append(piece)
        if self.fails:
            raise CompileError("no luck today")
        return piecework.CompiledPiece(run=piece.graph.forward)


def test_twelve_layers_are_three_unique_pieces() -> None:
    model, compiler = Stack(12), FakeCompiler()
    expected = {"num_pieces_seen": 25, "num_capturable_pieces_seen": 13, "num_unique_pieces": 3}
    with testing.plugins(compiler), counters.expect(num_graphs_seen=1, num_piece_compilations=3, **expected):
        call = compiled(model, piece_compiler=None)
        for n in (4, 2):
            assert_same(call, model, rows(n))
    assert len(compiler.pieces) == 3


def test_level_2_has_no_pieces() -> None:
    with counters.expect(num_graphs_seen=1, num_pieces_seen=0, num_piece_compilations=0):
        compiled(attend, 2)(rows(4))


def test_splitting_ops_of_the_process_are_used_where_the_config_names_none() -> None:
    piecework.set_attention_ops(["models.attn"])
    with testing.plugins():
        with counters.expect(num_pieces_seen=3):
            compiled(attend, splitting_ops=None)(rows(4))
        with counters.expect(num_pieces_seen=1):
            compiled(attend, splitting_ops=())(rows(4))
        piecework.set_attention_ops([SplittingOp("models::scale3")])
        with counters.expect(num_pieces_seen=1):
            compiled(attend, splitting_ops=None)(rows(4))


def test_splitting_op_may_bring_its_implementation() -> None:
    def double(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(q * 2)

    call = compiled(attend, splitting_ops=[SplittingOp("models::attn", implementation=double)])
    torch.testing.assert_close(call(x := rows(4)), (x + 1) * 4)


def test_pieces_are_compiled_from_fake_inputs_before_the_first_run() -> None:
    def guarded(x: torch.Tensor) -> torch.Tensor:
        y, out = x + 1, torch.empty_like(x)
        torch.ops.models.checked(y, out)
        return out + 1

    compiler = FakeCompiler()
    with testing.plugins(compiler):
        call = piecework.compile(guarded, config=CompilationConfig(splitting_ops=models.OPS))
        with pytest.raises(ValueError, match="too big"):
            call(torch.ones(4, 6) * 1e9)
    assert len(compiler.pieces) == 2
    for piece in compiler.pieces:
        tensors = [value for value in piece.example_inputs if isinstance(value, torch.Tensor)]
        assert tensors and all(isinstance(tensor, FakeTensor) for tensor in tensors)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_pieces_are_compiled_without_gradients_whoever_calls(mode: Any) -> None:
    grad_modes: list[bool] = []

    class Compiler:
        @piecework.hookimpl
        def piecework_compile_piece(self, piece: piecework.Piece) -> piecework.CompiledPiece:
            grad_modes.append(torch.is_grad_enabled())
            assert not torch.is_inference_mode_enabled()
            return piecework.CompiledPiece(run=piece.graph.forward)

    with testing.plugins(Compiler()), mode():
        piecework.compile(Linear(), config=CompilationConfig(splitting_ops=models.OPS, compile_sizes=[2]))(rows(4))
    assert grad_modes == [False] * 4


def test_failed_piece_is_an_error_and_the_next_call_tries_again() -> None:
    compiler = FakeCompiler(fails=True)
    with testing.plugins(compiler):
        model = Linear()
        call = piecework.compile(model, config=CompilationConfig(splitting_ops=models.OPS))
        for _ in range(2):
            with pytest.raises(CompileError, match="no luck today"):
                call(rows(4))
        compiler.fails = False
        assert_same(call, model, rows(4))


def test_failed_piece_may_run_eagerly_with_a_warning() -> None:
    model = Linear()
    with testing.plugins(FakeCompiler(fails=True)):
        config = CompilationConfig(splitting_ops=models.OPS, on_failure="eager")
        call = piecework.compile(model, config=config)
        with pytest.warns(PieceworkWarning, match="no luck today"):
            assert_same(call, model, rows(4))
        assert_same(call, model, rows(3))


@both_levels
def test_first_calls_from_eight_threads_trace_once(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    barrier = threading.Barrier(8)

    def work(n: int) -> bool:
        barrier.wait()
        x = rows(1 + n)
        with torch.no_grad():
            return torch.allclose(call(x), model(x), atol=1e-5)

    with counters.expect(num_graphs_seen=1), ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_decorated_instance_called_from_eight_threads_traces_once(monkeypatch: pytest.MonkeyPatch) -> None:
    models.use_level(monkeypatch, 3)

    @piecework.support_torch_compile
    class Shared(Linear):
        pass

    model = Shared()
    barrier = threading.Barrier(8)

    def work(n: int) -> bool:
        barrier.wait()
        x = rows(1 + n)
        with torch.no_grad():
            return torch.allclose(model(x), model.forward(x), atol=1e-5)

    with counters.expect(num_graphs_seen=1), ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_replacing_parameters_while_others_call_gives_old_or_new_values_only() -> None:
    model = Linear()
    model.linear.weight.data.zero_()
    model.linear.bias.data.zero_()
    call = compiled(model)
    x = torch.ones(2, 6)
    call(x)
    allowed = {0.0, 6.0}  # bias 0 or 1
    seen: set[float] = set()
    until = time.monotonic() + 1.0

    def work() -> None:
        while time.monotonic() < until:
            with torch.no_grad():
                seen.update(call(x).flatten().tolist())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    value = 0.0
    while time.monotonic() < until:
        value = 1.0 - value
        model.linear.bias = torch.nn.Parameter(torch.full((6,), value))
    for thread in threads:
        thread.join()
    assert seen and seen <= allowed
    assert_same(call, model, x)


@pytest.mark.parametrize(
    ("size", "dims", "message"),
    [
        (4, ["batch", "seq"], 'the model has the dims batch, seq, so give {"batch": 4, "seq": 4}, got 4'),
        ({"batch": 4}, ["batch", "seq"], "a size needs a value for each of batch, seq, got {'batch': 4}"),
        ({"rows": 4, "x": 1}, ["rows"], "a size needs a value for each of rows"),
    ],
)
def test_size_of_other_dims_is_refused(size: Any, dims: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size_values(size, dims, "here")


def test_size_has_a_value_for_each_dim() -> None:
    assert size_values(4, ["rows"], "here") == {"rows": 4}
    assert list(size_values({"seq": 1, "batch": 4}, ["batch", "seq"], "here").items()) == [("batch", 4), ("seq", 1)]


def test_compile_sizes_of_two_dims_run_their_own_code() -> None:
    ran: list[Any] = []

    class Compiler:
        @piecework.hookimpl
        def piecework_compile_piece(self, piece: piecework.Piece) -> piecework.CompiledPiece:
            forward, size = piece.graph.forward, piece.size

            def run(*args: Any) -> Any:
                ran.append(size)
                return forward(*args)

            return piecework.CompiledPiece(run=run)

    with testing.plugins(Compiler()):
        config = CompilationConfig(splitting_ops=models.OPS, compile_sizes=[{"batch": 2, "seq": 3}])
        call = piecework.compile(attend, config=config, dynamic_arg_dims={"x": {0: "batch", 1: "seq"}})
        for size in ((4, 3), (2, 3), (3, 2)):
            ran.clear()
            assert_same(call, attend, rows(*size))
            assert all((one is not None) is (size == (2, 3)) for one in ran) and ran


def test_zero_rows_at_the_first_call_trace_nothing() -> None:
    call = compiled(attend)
    with counters.expect(num_graphs_seen=0):
        assert call(rows(0)).shape == (0, 6)
    with counters.expect(num_graphs_seen=1):
        assert_same(call, attend, rows(4))


def test_unknown_splitting_op_fails_at_the_first_call_with_the_nearest_names() -> None:
    with pytest.raises(piecework.PieceworkError, match=r"models::atn.*models::attn"):
        compiled(attend, splitting_ops=["models::atn"])(rows(4))


def test_inductor_pieces_are_equal_to_eager() -> None:
    pytest.importorskip("piecework_inductor")
    model = Stack(3)
    call = compiled(model, piece_compiler="inductor")
    with counters.expect(num_graphs_seen=1, num_unique_pieces=3, num_piece_compilations=3):
        for n in (4, 1, 9):
            assert_same(call, model, rows(n))
    model.layers[0].weight = torch.nn.Parameter(torch.randn(6, 6))
    assert_same(call, model, rows(4))
