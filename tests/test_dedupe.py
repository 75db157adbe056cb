"""Pieces that are the same compile once; pieces that are not never share code."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models import example
from piecework import CompilationConfig, counters
from piecework import compile as piecewise
from piecework.dedupe import CanonicalForm, canonical_form, explain_difference
from piecework.pieces import InputKind
from piecework.split import PieceStep
from piecework.testing import plugins
from split_models import CUTS, Recorder, compiled_by, compiled_state, ops, rows

Part = Callable[..., Any]


class Pairwise(nn.Module):
    """Two pieces, one per part, each between splitting ops of its own."""

    def __init__(self, first: Part, second: Part) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = first, second
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.trained = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("buffer", torch.randn(6, 6))
        self.register_buffer("whole", torch.randn(2, 6))
        self.register_buffer("part", self.whole[0])  # pyright: ignore
        self.register_buffer("apart", torch.randn(6))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return self.cut(self.first(self, ops.scale3(a))), self.cut(self.second(self, ops.scale3(b)))

    def cut(self, value: Any) -> Any:
        return [ops.scale3(item) for item in value] if isinstance(value, tuple) else ops.scale3(value)


N = {"a": {0: "n"}, "b": {0: "n"}}


def forms(
    first: Part, second: Part, a: torch.Tensor | None = None, b: torch.Tensor | None = None, dims: Any = None
) -> tuple[CanonicalForm, CanonicalForm, int]:
    """Return the forms of both pieces, and how many of them were compiled."""
    a, b = rows(4) if a is None else a, rows(4, seed=1) if b is None else b
    model = Pairwise(first, second)
    recorder = Recorder()
    with plugins(recorder), torch.no_grad():
        compiled = compiled_by(model, piece_compiler="recorder", dims=dims or N)
        reference = copy.deepcopy(model)(a, b)
        torch.testing.assert_close(compiled(a, b), reference)
    state = compiled_state(compiled)
    assert state.split is not None
    places = {place: one.unique for one in state.unique for place in one.unique.places}
    assert sorted(places) == [0, 1]
    assert len(recorder.pieces) == len(state.unique)
    return places[0].form, places[1].form, len(state.unique)


def relu(model: Any, y: torch.Tensor) -> torch.Tensor:
    return y.relu()


def made(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def scaled(y: torch.Tensor) -> torch.Tensor:
        return y * scale

    torch._dynamo.allow_in_graph(scaled)
    return scaled


TWICE, THRICE = made(2.0), made(3.0)


def both(model: Any, y: torch.Tensor) -> Any:
    p = y.sin()
    return p, p.cos()


def last_only(model: Any, y: torch.Tensor) -> Any:
    return y.sin().cos()


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (lambda m, y: y + 1, lambda m, y: y + 2, "argument 1 of _operator.add: 1 / 2"),
        (lambda m, y: y + 1, lambda m, y: y + 1.0, "argument 1 of _operator.add: 1 / 0x1.0"),
        (lambda m, y: y + 1, lambda m, y: y + True, "argument 1 of _operator.add: 1 / True"),
        (lambda m, y: y * 0.0, lambda m, y: y * -0.0, "argument 1 of _operator.mul: 0x0.0p+0 / -0x0.0p+0"),
        (lambda m, y: y.to(torch.float64), lambda m, y: y.to(torch.float16), "float64 / torch.float16"),
        (lambda m, y: y.sin(), lambda m, y: y.cos(), "they differ at sin: sin / cos"),
        (lambda m, y: y.sum(1, keepdim=True), lambda m, y: y.sum(1, keepdim=False), "argument 'keepdim' of sum: True"),
        (lambda m, y: y.sum(1), lambda m, y: y.sum(1, keepdim=True), "they differ in the number of arguments of sum"),
        (lambda m, y: y.flip([0]), lambda m, y: y.flip((0,)), None),
        (lambda m, y: y[:, 1:] * 2, lambda m, y: y[:, 2:] * 2, "getitem"),
        (lambda m, y: y @ m.trained, lambda m, y: y @ m.buffer, "(kind): parameter / buffer"),
        (lambda m, y: y @ m.trained, lambda m, y: y @ m.frozen, "(requires_grad): True / False"),
        (lambda m, y: y + m.whole[1] + m.part, lambda m, y: y + m.whole[1] + m.apart, "what shares memory"),
        (lambda m, y: m.apart.add_(y[0]) * 2, lambda m, y: m.apart.add(y[0]) * 2, "add_ / add"),
        (both, last_only, None),
        (lambda m, y: TWICE(y), lambda m, y: THRICE(y), "scaled"),
        (lambda m, y: y.sin().cos(), lambda m, y: y.sin(), "inputs and ops"),
    ],
)
def test_pieces_that_differ_compile_apart(first: Part, second: Part, words: str | None) -> None:
    one, other, num_unique = forms(first, second)
    assert num_unique == 2
    assert one.key != other.key
    explained = explain_difference(one, other)
    assert explained is not None
    assert words is None or words in explained


@pytest.mark.parametrize(
    ("a", "b", "dims", "words"),
    [
        (rows(4), rows(4).double(), N, "(dtype): torch.float32 / torch.float64"),
        (rows(4), rows(4, 7), N, "(shape)"),
        (rows(4), rows(6, 4).t(), N, "(strides)"),
        (rows(4), rows(4), {"a": {0: "n"}, "b": {1: "m"}}, "(shape)"),
    ],
    ids=["dtype", "width", "strides", "dim"],
)
def test_inputs_that_differ_compile_apart(a: torch.Tensor, b: torch.Tensor, dims: Any, words: str) -> None:
    one, other, num_unique = forms(relu, relu, a, b, dims)
    assert num_unique == 2
    explained = explain_difference(one, other)
    assert explained is not None
    assert words in explained


def test_one_size_twice_is_not_two_sizes() -> None:
    def model(a: torch.Tensor, b: torch.Tensor) -> Any:
        return ops.scale3(ops.scale3(a + a.t()).relu()), ops.scale3(ops.scale3(b).relu())

    compiled = compiled_by(model, dims={"a": {0: "n", 1: "n"}, "b": {0: "n", 1: "m"}})
    for n, m in ((4, 6), (3, 5)):
        a, b = rows(n, n), rows(n, m)
        torch.testing.assert_close(compiled(a, b), model(a, b))
    square, oblong = [one.unique.form for one in compiled_state(compiled).unique][1:]
    assert explain_difference(square, oblong) == "they differ at input 1 (shape): ('s0', 's0') / ('s0', 's1')"


@pytest.mark.parametrize(
    ("first", "second", "dims"),
    [
        (relu, relu, N),
        (relu, relu, {"a": {0: "n"}, "b": {0: "m"}}),
        (lambda m, y: m.linear(y), lambda m, y: m.other(y), N),
        (lambda m, y: y + 1, lambda model, value: value + 1, N),
        (lambda m, y: y * float("nan") * float("inf"), lambda m, y: y * float("nan") * float("inf"), N),
        (lambda m, y: TWICE(y), lambda m, y: TWICE(y), N),
        (lambda m, y: y / y.shape[0], lambda m, y: y / y.shape[0], {"a": {0: "n"}, "b": {0: "m"}}),
        (both, both, N),
    ],
    ids=["equal", "other size", "other parameters", "other names", "odd floats", "one closure", "sizes", "results"],
)
def test_pieces_that_are_the_same_compile_once(first: Part, second: Part, dims: Any) -> None:
    a, b = rows(4), rows(4 if dims is N else 7, seed=1)
    model = Pairwise(first, second)
    recorder = Recorder()
    with torch.no_grad(), plugins(recorder):
        compiled = compiled_by(model, piece_compiler="recorder", dims=dims)
        for given in ((a, b), (b, a)):
            torch.testing.assert_close(compiled(*given), model(*given), equal_nan=True)
    (unique,) = compiled_state(compiled).unique
    assert unique.unique.places == (0, 1)
    assert recorder.num_runs == [4]


def test_order_of_results_is_part_of_the_form() -> None:
    model = Pairwise(both, both)
    compiled = compiled_by(model, dims=N)
    compiled(rows(4), rows(4))
    state = compiled_state(compiled)
    assert state.split is not None
    piece = state.split.pieces[0]
    swapped = copy.deepcopy(piece.graph)
    output = swapped.graph.output_node()
    output.args = (tuple(reversed(output.args[0])),)  # pyright: ignore
    kinds = [InputKind.ACTIVATION] * len(piece.inputs)
    one = form_of(piece, kinds, state)
    other = form_of(dataclasses.replace(piece, graph=swapped), kinds, state)
    assert one.key != other.key
    assert explain_difference(one, one) is None
    assert "differ" in str(explain_difference(one, other))


@pytest.mark.parametrize(
    "change",
    [{"written": (0,)}, {"aliased": ((0, 0),)}, {"outputs_are_fresh": False}],
    ids=lambda change: next(iter(change)),
)
def test_facts_about_a_piece_are_part_of_the_form(change: dict[str, Any]) -> None:
    compiled = compiled_by(Pairwise(relu, relu), dims=N)
    compiled(rows(4), rows(4))
    state = compiled_state(compiled)
    assert state.split is not None
    piece = state.split.pieces[0]
    kinds = [InputKind.ACTIVATION] * len(piece.inputs)
    assert form_of(piece, kinds, state).key != form_of(dataclasses.replace(piece, **change), kinds, state).key


def form_of(piece: PieceStep, kinds: list[InputKind], state: Any) -> CanonicalForm:
    return canonical_form(piece, kinds, state.trace.shape_env)


def test_packet_and_overload_are_not_taken_for_each_other() -> None:
    one, other, num_unique = forms(
        lambda m, y: torch.ops.cutlib.twice(y, 0.5), lambda m, y: torch.ops.cutlib.twice.scaled(y, 0.5)
    )
    assert num_unique == 2
    assert "cutlib::twice / cutlib::twice.scaled" in str(explain_difference(one, other))


# --- models of many layers ------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [12, 32])
def test_layers_that_are_alike_compile_once(num_layers: int) -> None:
    model = example("toy_llama").build(num_layers, hidden=16, mlp=32, vocab=16, tractable=False)
    recorder = Recorder()
    expected = {
        "num_graphs_seen": 1,
        "num_pieces_seen": 2 * num_layers + 1,
        "num_capturable_pieces_seen": num_layers + 1,
        "num_unique_pieces": 3,
        "num_piece_compilations": 3,
    }
    config = CompilationConfig(level=3, splitting_ops=("toy::attention",), piece_compiler="recorder")
    with plugins(recorder), counters.expect(**expected):
        compiled = piecewise(model, config=config, dynamic_arg_dims={"input_ids": 0, "positions": 0})
        for num_rows in (4, 1, 9):
            ids, positions = torch.arange(num_rows) % 16, torch.arange(num_rows)
            torch.testing.assert_close(compiled(ids, positions), model(ids, positions), rtol=1e-4, atol=1e-4)
    assert recorder.num_runs == [3, 3 * (num_layers - 1), 3]


def test_unsplit_model_is_one_piece() -> None:
    model = example("toy_llama").build(2, hidden=16, mlp=32, vocab=16)
    config = CompilationConfig(level=3, splitting_ops=(), piece_compiler="recorder")
    one = dict.fromkeys(
        (
            "num_graphs_seen",
            "num_pieces_seen",
            "num_capturable_pieces_seen",
            "num_unique_pieces",
            "num_piece_compilations",
        ),
        1,
    )
    with plugins(Recorder()), counters.expect(**one):
        compiled = piecewise(model, config=config, dynamic_arg_dims={"input_ids": 0, "positions": 0})
        compiled(torch.arange(4), torch.arange(4))


def test_models_whose_pieces_look_alike_keep_their_own_weights_and_constants() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float, bias: bool) -> None:
            super().__init__()
            self.scale = scale
            self.inner, self.outer = nn.Linear(6, 6, bias=bias), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(ops.scale3(self.inner(x)) * self.scale)

    for order in ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0)):
        kept = [Scaled(scale, bias=scale == 1.0) for scale in order]
        compiled = [compiled_by(model, cuts=CUTS) for model in kept]
        for model, fast in [*zip(kept, compiled, strict=True), *reversed(list(zip(kept, compiled, strict=True)))]:
            torch.testing.assert_close(fast(rows(4)).detach(), model(rows(4)).detach())
