"""Random models against eager, and faults planted to show that each would be seen; by hand: ``run.py`` beside this."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fuzz_ops
from fuzz_differ import (
    ALL_MODES,
    CAPTURED,
    INDUCTOR,
    LEVEL_1,
    LEVEL_2,
    UNCAPTURED,
    Departure,
    Mode,
    Outcome,
    check_text,
    write_program,
)
from fuzz_hunt import Hunt
from piecework import CompiledPiece, Piece, hookimpl
from piecework.pieces import InputKind

TOGETHER = ((CAPTURED,), (CAPTURED, LEVEL_1), (CAPTURED, LEVEL_2), (CAPTURED, UNCAPTURED))


def test_500_random_models_agree_with_eager(tmp_path: Path) -> None:
    hunt = Hunt(TOGETHER, folder=tmp_path)
    hunt.run(500, 17)
    print(hunt.outcome.text())
    assert not hunt.failures, f"with the seed 17:\n{hunt.text()}"
    hunt.outcome.check_share_of_refusals()
    assert hunt.outcome.num_programs == 500
    counts, features = hunt.outcome.counts, hunt.outcome.features
    assert counts["programs with a capture"] > 250
    assert counts["calls that were padded"] > 10
    missing = {f"op {op.partition('::')[2]}" for op in fuzz_ops.OPS if "store" not in op} - features.keys()
    assert not missing, "these were never made"


@pytest.mark.slow
def test_random_models_with_pieces_by_inductor_agree_with_eager(tmp_path: Path) -> None:
    hunt = Hunt(((INDUCTOR,),), folder=tmp_path)
    hunt.run(25, 5)
    assert not hunt.failures, hunt.text()
    assert hunt.outcome.num_programs == 25


# --- planted faults -------------------------------------------------------------------------------------


class Broken:
    """A piece compiler that runs pieces as they are, but for one fault."""

    name = "broken"

    def __init__(self, run: Callable[[Piece, tuple[Any, ...], int], Any]) -> None:
        self.run = run

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        count = [0]

        def run(*inputs: Any) -> Any:
            count[0] += 1
            return self.run(piece, inputs, count[0])

        return CompiledPiece(run)


def miscompiled(piece: Piece, inputs: tuple[Any, ...], number: int) -> Any:
    """Half of ``tanh`` is lost."""
    results = piece.graph.forward(*inputs)
    has_tanh = any("tanh" in str(node.target) for node in piece.graph.graph.nodes)
    return tuple(result * 1.001 if has_tanh and result.is_floating_point() else result for result in results)


def slightly_off(piece: Piece, inputs: tuple[Any, ...], number: int) -> Any:
    """All floats that a piece gives are off by a little."""
    results = piece.graph.forward(*inputs)
    return tuple(result + 0.01 if result.dtype is torch.float32 else result for result in results)


def stale_buffer(piece: Piece, inputs: tuple[Any, ...], number: int) -> Any:
    """Buffers are read as they were at the first run."""
    buffers = [i for i, kind in enumerate(piece.input_kinds) if kind is InputKind.BUFFER]
    first = STALE.setdefault(piece.name, {i: inputs[i].clone() for i in buffers})
    return piece.graph.forward(*(first.get(i, value) for i, value in enumerate(inputs)))


STALE: dict[str, dict[int, torch.Tensor]] = {}


def lost_mutation(piece: Piece, inputs: tuple[Any, ...], number: int) -> Any:
    """What is written goes to a copy."""
    copies = (value.clone() if i in piece.mutated_inputs else value for i, value in enumerate(inputs))
    return piece.graph.forward(*copies)


def wrong_stride(piece: Piece, inputs: tuple[Any, ...], number: int) -> Any:
    """From the third run on, past the check of the first, results lie in memory the other way round."""
    results = piece.graph.forward(*inputs)
    if number < 3:
        return results
    return tuple(result.t().contiguous().t() if result.dim() == 2 else result for result in results)


def program(body: str, *, init: str = "pass", settings: str = "", inputs: str = "'x': Arg('n', 4)") -> str:
    """Return the text of a program with one input and some calls."""
    return f"""
import torch
from torch import nn

import fuzz_ops as ops
from fuzz_differ import Arg, Call


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        {body}


def make():
    return ops.settle(Model())


INPUTS = {{{inputs}}}
DIMS = {{"x": {{0: "n"}}}}
SETTINGS = dict(splitting_ops=("fuzz::fresh",), capture_sizes=(2, 3), {settings})
AHEAD = False
INFERENCE_MODE = False
CALLS = [Call({{"n": n}}, seed=i) for i, n in enumerate((2, 3, 5, 2, 3, 5, 2))]
FEATURES = []
"""


TANH = "return torch.ops.fuzz.fresh(torch.tanh(x)) + torch.tanh(x)"
BUFFER = "self.register_buffer('b', ops.values(4))"
COUNT = "self.b.add_(1); return torch.ops.fuzz.fresh(x) * self.b"
LOST = "x.mul_(2); return torch.ops.fuzz.fresh(x)"
level_3 = pytest.mark.parametrize("mode", [UNCAPTURED, CAPTURED], ids=lambda mode: mode.name)


@level_3
@pytest.mark.parametrize(
    ("fault", "body", "said"),
    [
        (miscompiled, TANH, "has other values"),
        (stale_buffer, COUNT, "the result, leaf 0 has other values|state b has other values"),
        (lost_mutation, LOST, "argument x has other values"),
    ],
)
def test_planted_fault_is_seen(mode: Mode, fault: Callable[..., Any], body: str, said: str) -> None:
    text = program(body, init=BUFFER)
    check_text(text, (mode,))
    STALE.clear()
    with pytest.raises(Departure, match=said):
        check_text(text, (mode,), (Broken(fault),))


def test_wrong_stride_is_seen() -> None:
    with pytest.raises(Departure, match=r"level 3, call .* has the strides"):
        check_text(program(TANH), (UNCAPTURED,), (Broken(wrong_stride),))


def test_result_that_a_later_call_overwrites_is_seen() -> None:
    with pytest.raises(Departure, match="the result of call 0, kept, leaf 0 (has other values|and)"):
        check_text(program(TANH, settings="static_outputs=True"), (CAPTURED,))


def test_padding_where_rows_depend_is_seen() -> None:
    body = "return torch.ops.fuzz.fresh(x) + x.sum(0) + x.shape[0]"
    check_text(program(body, settings="max_padding_ratio=4"), (CAPTURED,))
    text = program(body, settings="max_padding_ratio=4, rows_independent=True").replace("(2, 3)", "(5, 3)")
    with pytest.raises(Departure, match="has other values"):
        check_text(text, (CAPTURED,))


@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name)
def test_error_that_eager_does_not_raise_is_seen(mode: Mode) -> None:
    body = "return torch.ops.fuzz.fresh(x) + (torch.zeros(3).view(2) if torch.compiler.is_compiling() else 1)"
    with pytest.raises(Departure, match="raises"):
        check_text(program(body), (mode,))


@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name)
def test_error_that_only_eager_raises_is_seen(mode: Mode) -> None:
    body = "return torch.ops.fuzz.fresh(x) + (1 if torch.compiler.is_compiling() else 1 / 0)"
    with pytest.raises(Departure, match="eager raises ZeroDivisionError"):
        check_text(program(body), (mode,))


def test_too_many_refusals_fail() -> None:
    outcome = Outcome()
    outcome.calls["level 2"] = 100
    outcome.refusals["layout"] = 19
    outcome.check_share_of_refusals()
    outcome.refusals["scalar"] = 2
    with pytest.raises(AssertionError, match="21 of 100 calls were refused"):
        outcome.check_share_of_refusals()


def test_refusal_counts_only_where_the_call_can_meet_it() -> None:
    text = program("return torch.ops.fuzz.fresh(x) + 1")
    moved = text.replace("seed=i)", "seed=i, layouts={'x': 'transposed'} if i == 3 else {})")
    assert check_text(moved, (LEVEL_2, CAPTURED)).refusals == {"layout": 2}
    odd = text.replace("return ops.settle(Model())", "model = ops.settle(Model()); model.double(); return model")
    assert check_text(odd, (LEVEL_2,)).refusals == {}


def test_random_models_find_a_planted_fault_and_write_it_into_a_file(tmp_path: Path) -> None:
    hunt = Hunt(((UNCAPTURED,),), folder=tmp_path, shrink_s=2, plugins=(Broken(slightly_off),))
    hunt.run(30, 3, say=lambda _: None)
    found = [failure for failure in hunt.failures.values() if "has other values" in failure.said]
    assert found
    assert all(failure.path is not None and failure.text in failure.path.read_text() for failure in found)


def test_file_of_a_failing_program_reruns_it(tmp_path: Path) -> None:
    path = write_program(program(TANH, settings="static_outputs=True"), tmp_path, "fails", "it departs")
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "level 3 captured, call" in ran.stdout
    assert "kept" in ran.stdout
