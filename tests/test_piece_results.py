"""What compiled pieces return the first time: wrong results of a plugin's code are refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import piecework
from piecework import CaptureError, CompiledPiece, Piece, PluginError, hookimpl
from piecework.piece_results import FirstCall
from piecework.testing import plugins
from split_models import compiled_by, compiled_state, ops, rows


class Changes:
    """A compiler that changes what its pieces return."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change
        self.num_runs = 0

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        def run(*inputs: Any) -> Any:
            self.num_runs += 1
            return self.change(piece.graph.forward(*inputs))

        return CompiledPiece(run)


def gate(x: torch.Tensor) -> torch.Tensor:
    return ops.scale3(x * 2) + 1


def halves(x: torch.Tensor) -> torch.Tensor:
    first, second = x * 2, (x + 1).to(torch.float64)
    return ops.scale3(first) + second


WRONG = [
    (gate, lambda given: given[0], r"returned a tensor torch.float32\[1, 6\] on cpu, allowed: a tuple of 1 tensor$"),
    (gate, lambda given: None, "returned NoneType None, allowed: a tuple of 1 tensor"),
    (gate, lambda given: (*given, given[0]), "returned 2 results, allowed: a tuple of 1 tensor"),
    (gate, lambda given: (1.5,), r"returned float 1\.5 as result 0, allowed: a tensor"),
    (
        gate,
        lambda given: (given[0].half(),),
        r"float16\[1, 6\] on cpu as result 0, traced as torch.float32\[1, 6\] on cpu",
    ),
    (gate, lambda given: (given[0].new_zeros(2, 6),), r"\[2, 6\] on cpu as result 0, traced as torch.float32\[1, 6\]"),
    (gate, lambda given: (given[0][0],), r"\[6\] on cpu as result 0, traced as torch.float32\[1, 6\]"),
    (gate, lambda given: (given[0].to("meta"),), r"on meta as result 0, traced as .* on cpu"),
    (halves, lambda given: torch.stack([t.float() for t in given]), "allowed: a tuple of 2 tensors"),
    (halves, lambda given: given[::-1], r"float64\[1, 6\] on cpu as result 0, traced as torch.float32"),
]


@pytest.mark.parametrize(("model", "change", "message"), WRONG)
def test_wrong_results_name_the_plugin_and_the_piece(model: Any, change: Callable[[Any], Any], message: str) -> None:
    whose = "what plugin 'changes' compiled for piece_0 .*"
    with plugins(("changes", Changes(change))):
        call = compiled_by(model, piece_compiler="changes", capture_sizes=())
        for _ in range(2):
            with pytest.raises(PluginError, match=whose + message):
                call(rows(1))
        call = compiled_by(model, piece_compiler="changes", capture_sizes=(1,))
        with pytest.raises(CaptureError, match=f"piece_0 failed in its warm-up: PluginError: {whose}"):
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


@torch.library.custom_op("cut::lies", mutates_args=())
def lies(x: torch.Tensor) -> torch.Tensor:
    return x.double()


@lies.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_wrong_fake_implementation_is_named_as_such() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(ops.lies(x + 1))

    with pytest.raises(
        PluginError, match="piece_0, op by op, returned .*float64.*the fake implementation of an op in it"
    ):
        compiled_by(model, capture_sizes=())(rows(3))


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
