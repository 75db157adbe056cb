"""What compiled pieces take and give the first time: what is not as traced is refused, by the name of whose it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import piecework
import piecework_inductor
from piecework import CaptureError, CompiledPiece, CompileError, Piece, PluginError, SplittingOp, hookimpl
from piecework.piece_checks import FirstCall
from piecework.testing import plugins
from split_models import compiled_by, compiled_state, ops, rows


class Changes:
    """A compiler that changes what its pieces return."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change
        self.num_runs = 0

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece | None:
        def run(*inputs: Any) -> Any:
            self.num_runs += 1
            return self.change(piece.graph.forward(*inputs))

        return CompiledPiece(run)


def gate(x: torch.Tensor) -> torch.Tensor:
    return ops.scale3(x * 2) + 1


def halves(x: torch.Tensor) -> torch.Tensor:
    first, second = x * 2, (x + 1).to(torch.float64)
    return ops.scale3(first) + second


AS_TRACED = r"not as a tensor torch.float32\[1, 6\] on cpu, as it was traced, but "
WRONG = [
    (gate, lambda given: given[0], r"returned a tensor torch.float32\[1, 6\] on cpu, allowed: a tuple of 1 tensor$"),
    (gate, lambda given: None, "returned NoneType 'None', allowed: a tuple of 1 tensor"),
    (gate, lambda given: (*given, given[0]), "returned 2 results, allowed: a tuple of 1 tensor"),
    (gate, lambda given: (1.5,), f"result 0 {AS_TRACED}float '1.5'"),
    (gate, lambda given: (given[0].half(),), AS_TRACED + r"a tensor torch.float16\[1, 6\] on cpu"),
    (gate, lambda given: (given[0].new_zeros(2, 6),), AS_TRACED + r"a tensor torch.float32\[2, 6\] on cpu"),
    (gate, lambda given: (given[0][0],), AS_TRACED + r"a tensor torch.float32\[6\] on cpu"),
    (gate, lambda given: (given[0].to("meta"),), AS_TRACED + r"a tensor torch.float32\[1, 6\] on meta"),
    (
        gate,
        lambda given: (given[0].to_sparse(),),
        AS_TRACED + r"a tensor torch.sparse_coo torch.float32\[1, 6\] on cpu",
    ),
    (gate, lambda given: (FakeTensorMode().from_tensor(given[0]),), f"{AS_TRACED}a fake tensor"),
    (gate, lambda given: (torch.nested.nested_tensor([given[0]]),), f"{AS_TRACED}a nested tensor"),
    (halves, lambda given: torch.stack([t.float() for t in given]), "allowed: a tuple of 2 tensors"),
    (halves, lambda given: given[::-1], AS_TRACED + r"a tensor torch.float64\[1, 6\] on cpu"),
]


@pytest.mark.parametrize(("model", "change", "message"), WRONG)
def test_wrong_results_name_the_plugin_and_the_piece(model: Any, change: Callable[[Any], Any], message: str) -> None:
    whose = "what plugin 'changes' .* compiled for piece_0 .*"
    with plugins(("changes", Changes(change))):
        call = compiled_by(model, piece_compiler="changes", capture_sizes=())
        for _ in range(2):
            with pytest.raises(PluginError, match=whose + message):
                call(rows(1))
        call = compiled_by(model, piece_compiler="changes", capture_sizes=(1,))
        with pytest.raises(
            CaptureError, match=f"piece_0, compiled by plugin 'changes' .*, failed in its warm-up: PluginError: {whose}"
        ):
            call(rows(1))
        exact = compiled_by(model, piece_compiler="changes", capture_sizes=(), compile_sizes=(1,))
        with pytest.raises(PluginError, match=whose + message):
            exact(rows(1))


def test_list_is_as_good_as_a_tuple_and_is_looked_at_once() -> None:
    changes = Changes(list)
    with plugins(("changes", changes)), torch.no_grad():
        call = compiled_by(gate, piece_compiler="changes", capture_sizes=())
        call(rows(3))
        space = compiled_state(call).run.namespace
        assert not any(isinstance(value, FirstCall) for value in space.values())
        torch.testing.assert_close(call(x := rows(1)), gate(x))
        assert changes.num_runs == 4


def test_whoever_compiled_an_exact_size_is_named_and_op_by_op_is_not_looked_at() -> None:
    class ForOthers(Changes):
        @hookimpl
        def piecework_compile_piece(self, piece: Piece) -> CompiledPiece | None:
            return None if piece.size is not None else super().piecework_compile_piece(piece)

    class ForExact(Changes):
        @hookimpl
        def piecework_compile_piece(self, piece: Piece) -> CompiledPiece | None:
            return None if piece.size is None else super().piecework_compile_piece(piece)

    settings = {"piece_compiler": None, "compile_sizes": (1,)}
    with plugins(("others", ForOthers(tuple)), ("wrong", ForExact(lambda given: given[0]))):
        with pytest.raises(PluginError, match="what plugin 'wrong' .* compiled for piece_0"):
            compiled_by(gate, capture_sizes=(), **settings)(rows(1))
        with pytest.raises(CaptureError, match="what plugin 'wrong' .* compiled for piece_0"):
            compiled_by(gate, capture_sizes=(1,), **settings)(rows(1))
        compiled_by(gate, capture_sizes=(), **settings)(rows(2))


class Mixed(nn.Module):
    """An op whose traced dtypes are others than those of its kernel, in torch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, mean, _ = torch.native_layer_norm(x.bfloat16(), [6], self.weight, self.bias, 1e-5)
        return ops.scale3(y) + mean


def test_pieces_that_run_op_by_op_do_what_eager_does() -> None:
    model, x = Mixed(), rows(4)
    with torch.no_grad():
        for sizes in ((), (4,)):
            torch.testing.assert_close(compiled_by(model, capture_sizes=sizes)(x), model(x))


torch.library.define("cut::lies", "(Tensor x) -> Tensor")
torch.library.impl("cut::lies", "CompositeExplicitAutograd", lambda x: x.argmax(1).int())
torch.library.register_fake("cut::lies", lambda x: x.new_empty(x.shape[0], dtype=torch.int64))


@pytest.mark.parametrize("piece_compiler", ["changes", "inductor"])
@pytest.mark.parametrize("settings", [{"capture_sizes": ()}, {"capture_sizes": (4,)}, {"compile_sizes": (4,)}])
@pytest.mark.parametrize("capturable", [False, True])
def test_op_that_gives_something_else_than_its_fake_is_named_before_compiled_code_reads_it(
    piece_compiler: str, settings: dict[str, Any], capturable: bool
) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.lies(x + 1) * 2

    cuts = [SplittingOp("cut::lies", capturable=capturable)]
    with plugins(("changes", Changes(tuple)), ("inductor", piecework_inductor)), torch.no_grad():
        call = compiled_by(model, cuts=cuts, piece_compiler=piece_compiler, **{"capture_sizes": (), **settings})
        with pytest.raises((CompileError, CaptureError), match="fake implementation") as caught:
            call(rows(4))
    if settings.get("capture_sizes") != (4,) or capturable:
        assert re.search(
            r"piece_1 was compiled for '\w+' as a tensor torch.int64\[4\] on cpu, as it was traced, but a tensor "
            r"torch.int32\[4\] on cpu; cut::lies.*test_piece_checks.py.* gives something else than its fake",
            str(caught.value),
        )


torch.library.define("cut::turned", "(Tensor x) -> Tensor")
torch.library.impl("cut::turned", "CompositeExplicitAutograd", lambda x: (3 * x).t().contiguous().t())
torch.library.register_fake("cut::turned", lambda x: torch.empty_like(x))


@pytest.mark.parametrize("piece_compiler", ["changes", "inductor"])
def test_op_with_other_strides_than_its_fake_is_named_before_compiled_code_reads_it(piece_compiler: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.turned(x + 1) * 2

    with plugins(("changes", Changes(tuple)), ("inductor", piecework_inductor)), torch.no_grad():
        call = compiled_by(model, cuts=("cut::turned",), piece_compiler=piece_compiler, capture_sizes=())
        with pytest.raises(
            CompileError,
            match=r"strides \(6, 1\), as it was traced, but they are \(1, 4\); cut::turned.* gives something else",
        ):
            call(rows(4))
        torch.testing.assert_close(call(x := rows(1)), 6 * (x + 1))  # Whose strides say nothing.


class RunsFakes:
    """A compiler whose first piece leaves the mode of the trace as another thread does while an op runs on fakes."""

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece | None:
        mode = next(one.fake_mode for one in piece.example_inputs if isinstance(one, FakeTensor))

        def run(*inputs: Any) -> Any:
            mode.in_kernel_invocation = True
            return piece.graph.forward(*inputs)

        return CompiledPiece(run)


@pytest.mark.parametrize("debug", ["0", "1"])
def test_nothing_is_read_from_fakes_which_another_thread_may_be_running(
    debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_DEBUG", debug)

    def model(x: torch.Tensor) -> torch.Tensor:
        y, out = x * 2, torch.empty_like(x)
        return ops.scale3(y) + out.zero_()

    with plugins(("runs", RunsFakes())), torch.no_grad():
        call = compiled_by(model, piece_compiler="runs", capture_sizes=())
        torch.testing.assert_close(call(x := rows(4)), 6 * x)


def test_results_whose_size_follows_from_data_may_have_any() -> None:
    def model(x: torch.Tensor) -> Any:
        y = ops.scale3(x)
        return y[y[:, 0] > 0], y + 1

    def reference(x: torch.Tensor) -> Any:
        return 3 * x[x[:, 0] > 0], 3 * x + 1

    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = compiled_by(model, capture_sizes=())
        for num in (5, 3):
            torch.testing.assert_close(call(x := rows(num)), reference(x))
    piecework.release(call)
