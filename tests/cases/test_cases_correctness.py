"""Cases about values: attributes and weights that change later, one tensor given twice, padded rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import demo
import piecework
from piecework import PieceworkWarning, SplittingOp, TraceDepartureError, counters
from ways import Way, check, close

# --- C05: attributes that change ----------------------------------------------------------------


class Scaled(nn.Module):
    """Reads a float, a bool, an optional part, what the part holds, and a nested list."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.neg = 2.0, False
        self.extra: nn.Module | None = None
        self.factors = {"row": [1.0, 0.5]}
        self.inner = Shifted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(demo.scale3(x) * self.k) * self.factors["row"][1]
        if self.extra is not None:
            y = y + self.extra(x)
        return -y if self.neg else y


class Shifted(nn.Module):
    UNIT = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.shift = 1.0
        self.parts = nn.ModuleList([nn.Tanh()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x + self.shift * self.UNIT


Change = tuple[Callable[[Any], Any], Callable[[Any], Any], str]
"""A change, what undoes it, and what the error says."""
CHANGES: list[Change] = [
    (lambda m: setattr(m, "k", 3.0), lambda m: setattr(m, "k", 2.0), "self.k == 2.0, now it is 3.0"),
    (lambda m: setattr(m, "neg", True), lambda m: setattr(m, "neg", False), "self.neg == False, now it is True"),
    (
        lambda m: setattr(m, "extra", nn.Linear(6, 6)),
        lambda m: (delattr(m, "extra"), setattr(m, "extra", None)),
        "self.extra is no longer held where it was when traced, now it is a Linear",
    ),
]
SIBLING_CHANGES: list[Change] = [
    (
        lambda m: setattr(m.inner, "shift", 4.0),
        lambda m: setattr(m.inner, "shift", 1.0),
        "self.inner.shift == 1.0, now it is 4.0",
    ),
    (
        lambda m: m.inner.parts.append(nn.Tanh()),
        lambda m: m.inner.parts._modules.pop("1"),
        "len(self.inner.parts._modules) == 1, now it is 2",
    ),
    (
        lambda m: delattr(m.inner, "shift"),
        lambda m: setattr(m.inner, "shift", 1.0),
        "self.inner.shift is no longer held where it was when traced, now it is gone",
    ),
]


def _departs_and_comes_back(way: Way, changes: list[Change]) -> tuple[Scaled, Any]:
    x, model = way.rand(4, 6), Scaled().to(way.device)
    call = way.compile(model, captures=[4])
    other = Scaled().to(way.device)
    other_call = way.compile(other, captures=[4])
    check(call, model, x)
    check(other_call, other, x)
    for change, undo, named in changes:
        change(model)
        for _ in range(2):
            with pytest.raises(TraceDepartureError, match=re.escape(named)):
                call(x)
        check(other_call, other, x)
        undo(model)
        check(call, model, x)
    return model, call


def test_c05_changed_attribute_is_named_and_a_release_takes_it_in(way: Way) -> None:
    model, call = _departs_and_comes_back(way, CHANGES)
    for change, _, _ in CHANGES:
        change(model)
    model.to(way.device)
    piecework.release(call)
    with counters.expect(num_graphs_seen=1):
        for _ in range(2):
            check(call, model, way.rand(4, 6))


def test_c05_changed_attribute_of_a_part_is_named(way: Way) -> None:
    _departs_and_comes_back(way, SIBLING_CHANGES)


def test_c05_departed_calls_are_answered_eagerly_where_asked_for(way: Way) -> None:
    model = Scaled().to(way.device)
    call = way.compile(model, captures=[4], on_failure="eager")
    check(call, model, way.rand(4, 6))
    for change, undo, named in CHANGES:
        change(model)
        model.to(way.device)
        with pytest.warns(PieceworkWarning, match=re.escape(named)):
            check(call, model, way.rand(4, 6))
        check(call, model, way.rand(4, 6))
        undo(model)
        with counters.expect(num_graph_replays=way.is_captured, num_graphs_seen=0):
            check(call, model, way.rand(4, 6))


def test_c05_level_1_follows_every_change(eager_way: Way) -> None:
    # Level 1 is torch.compile as it is: nothing of ours runs, so that the other ways say nothing more.
    x, model = eager_way.rand(4, 6), Scaled()
    call = eager_way.compile(model, level=1)
    check(call, model, x)
    for change, undo, _ in CHANGES:
        change(model)
        check(call, model, x)
        undo(model)
        check(call, model, x)


def test_c05_changes_without_an_event_are_found_where_the_docs_say(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    x, model = way.rand(4, 6), Scaled().to(way.device)
    call = way.compile(model, captures=[4], check_parameters="always")
    check(call, model, x)
    model.factors["row"][1] = 7.0
    with pytest.raises(TraceDepartureError, match=re.escape("self.factors['row'][1] == 0.5, now it is 7.0")):
        call(x)
    model.factors["row"][1] = 0.5
    check(call, model, x)
    # What a part has from its class is looked at on demand only.
    piecework.verify_assumptions(call)
    monkeypatch.setattr(Shifted, "UNIT", 3.0)
    with pytest.raises(TraceDepartureError, match=re.escape("type(self.inner).UNIT == 1.0, now it is 3.0")):
        piecework.verify_assumptions(call)


# --- C07: one tensor for two arguments ----------------------------------------------------------


def _attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(q)
    demo.attn(q, k, out)
    return out - k


def test_c07_first_call_passes_one_tensor_twice(way: Way) -> None:
    a, b = way.rand(4, 6), way.rand(4, 6)
    for order in ([(a, a), (a, b), (b, a)], [(a, b), (a, a), (b, b)]):
        call = way.compile(_attend, captures=[4])
        with counters.expect(num_graphs_seen=1, num_graph_captures=way.is_captured):
            for q, k in order:
                check(call, _attend, q, k)


def test_c07_views_of_one_tensor(way: Way) -> None:
    rows = way.rand(8, 6)
    call = way.compile(_attend, captures=[4])
    for q, k in ((rows[:4], rows[:4]), (rows[:4], rows[2:6]), (rows[4:], rows[:4])):
        check(call, _attend, q, k)


def test_c07_one_tensor_twice_in_a_list_and_by_name(way: Way) -> None:
    def total(parts: list[torch.Tensor], k: torch.Tensor) -> torch.Tensor:
        return demo.scale3(parts[0] * 2) - parts[1] * k

    a, b = way.rand(4, 6), way.rand(4, 6)
    call = way.compile(total, captures=[4], dims={"parts": 0, "k": 0})
    for parts, k in (([a, a], a), ([a, b], a), ([b, a], b), ([b, b], a)):
        check(call, total, parts, k=k)


class _Holds(nn.Module):
    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(6))

    def forward(self, bias: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kept, demo.scale3(x + bias)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_c07_argument_that_is_a_buffer_of_the_model_at_one_call(level: int) -> None:
    """Level 1, too, gives the buffer at later calls, and not what is passed in its place."""
    model = _Holds()
    call = Way(level, "eager").compile(model, dims={"x": 0})
    with torch.no_grad():
        for n, bias in ((4, torch.ones(6)), (5, model.kept), (4, torch.full((6,), 9.0)), (5, model.kept)):
            x = torch.randn(n, 6)
            kept, result = call(bias, x)
            assert kept is model.kept
            close(result, (x + bias) * 3)


def test_c07_tensors_that_a_model_writes_to_must_not_be_one(way: Way) -> None:
    def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return demo.scale3(x) - y

    a, b = way.rand(4, 6), way.rand(4, 6)
    call = way.compile(writes, captures=[4])
    check(call, writes, a, b)
    with pytest.raises(TraceDepartureError, match="arguments x and y share memory, and the model writes to x"):
        call(a, a)
    before = a.clone()
    with pytest.raises(TraceDepartureError, match="arguments x and y share memory"):
        call(a, a[:].view(4, 6))
    close(a, before)
    check(call, writes, b, a)


# --- C09: rubbish in padded rows ----------------------------------------------------------------

library = torch.library.Library("demo_rows", "DEF")
library.define("real_rows_only(Tensor x, Tensor(a!) out) -> ()")
library.define("seen(Tensor x) -> Tensor")
num_real_rows: list[int] = []
"""What an engine tells its attention by a context of its own: rows beyond are skipped."""
seen_by_op: list[torch.Tensor] = []


def _real_rows_only(x: torch.Tensor, out: torch.Tensor) -> None:
    n = num_real_rows[-1]
    out[:n].copy_(x[:n] * 3)


def _seen(x: torch.Tensor) -> torch.Tensor:
    seen_by_op.append(x.clone())
    return x + 0


for name, real, fake in (
    ("real_rows_only", _real_rows_only, lambda x, out: None),
    ("seen", _seen, torch.empty_like),
):
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"demo_rows::{name}", fake, lib=library)
real_rows_only, seen = torch.ops.demo_rows.real_rows_only, torch.ops.demo_rows.seen
ROW_OPS = (
    demo.SCALE3,
    SplittingOp("demo_rows::real_rows_only", rows_independent=True),
    SplittingOp("demo_rows::seen", rows_independent=True),
)


@pytest.fixture(autouse=True)
def _no_rows_left() -> None:
    num_real_rows.clear()
    seen_by_op.clear()


def _rowwise(x: torch.Tensor) -> torch.Tensor:
    return demo.scale3(x * 2) + 1


def _by_amax(x: torch.Tensor) -> torch.Tensor:
    y = demo.scale3(x)
    return y / y.abs().amax()


def _minus_mean(x: torch.Tensor) -> torch.Tensor:
    return demo.scale3(x - x.mean(0))


def _skipping(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    real_rows_only(x * 2, out)
    return out + 1


def _skipping_by_amax(x: torch.Tensor) -> torch.Tensor:
    y = _skipping(x)
    return y / y.abs().amax()


def _after_rubbish(way: Way, model: Callable[..., Any], *, is_padded: bool, **settings: Any) -> None:
    """Call with 8 rows of rubbish, then with fewer, padded or not."""
    call = way.compile(model, captures=[8], splitting_ops=settings.pop("splitting_ops", ROW_OPS), **settings)
    for rubbish in (float("nan"), float("inf")):
        num_real_rows.append(8)
        check(call, model, torch.full((8, 6), rubbish, device=way.device))
        for n in (5, 7, 5):
            num_real_rows.append(n)
            with counters.expect(num_graph_captures=0, num_graph_replays=2 * is_padded * way.is_captured):
                result = check(call, model, way.rand(n, 6))
            assert result.shape == (n, 6) and result.isfinite().all()


def test_c09_rubbish_of_a_larger_batch_stays_out_of_real_rows(way: Way) -> None:
    for model in (_rowwise, _skipping):
        _after_rubbish(way, model, is_padded=True)
    for model in (_by_amax, _minus_mean, _skipping_by_amax):
        _after_rubbish(way, model, is_padded=False)


def test_c09_op_that_declares_nothing_is_padded_only_by_assertion(eager_way: Way) -> None:
    # What decides is the declaration of an op, which all compilers of pieces have in common.
    undeclared = (SplittingOp("demo::scale3"),)
    _after_rubbish(eager_way, _rowwise, is_padded=False, splitting_ops=undeclared)
    _after_rubbish(eager_way, _rowwise, is_padded=True, splitting_ops=undeclared, rows_independent=True)
    _after_rubbish(eager_way, _rowwise, is_padded=False, rows_independent=False)


def test_c09_padded_rows_are_filled_anew_at_every_call(way: Way) -> None:
    def looks(x: torch.Tensor) -> torch.Tensor:
        return seen(x * 2) + 1

    _after_rubbish(way, looks, is_padded=True)
    # An op sees whole batches of rubbish, and else no row of it: eager's calls are among these.
    assert all(rows.isfinite().all() or not rows.isfinite().any() for rows in seen_by_op)
    assert any(len(rows) == 8 and rows.isfinite().all() for rows in seen_by_op) is way.is_captured


def test_c09_rubbish_along_two_dims(way: Way) -> None:
    def two_dims(x: torch.Tensor) -> torch.Tensor:
        return demo.scale3(x * 2) + 1

    def by_seq(x: torch.Tensor) -> torch.Tensor:
        return demo.scale3(x * 2).softmax(1)

    for model, num_padded in ((two_dims, 3), (by_seq, 1)):
        sizes = [{"batch": 4, "seq": 8}]
        call = way.compile(model, captures=sizes, dims={"x": {0: "batch", 1: "seq"}})
        check(call, model, torch.full((4, 8, 6), float("nan"), device=way.device))
        before = counters.num_graph_replays
        for batch, seq in ((4, 5), (3, 8), (3, 7)):
            assert check(call, model, way.rand(batch, seq, 6)).isfinite().all()
        assert counters.num_graph_replays - before == 2 * num_padded * way.is_captured


# --- C10: weights that change -------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers with one weight, and a buffer that was derived from it."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.t = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.t.weight = self.l.weight
        self.register_buffer("norm", self.l.weight.detach().norm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.t(demo.scale3(self.l(x) / self.norm))


def _tied_state(model: Tied) -> dict[str, torch.Tensor]:
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    return state | {"t.weight": state["l.weight"]}


def _replace_both(model: Tied) -> None:
    model.l.weight = model.t.weight = nn.Parameter(torch.randn_like(model.l.weight))


UNTIED = "relies on self.l.weight is self.t.weight"
WEIGHT_CHANGES: dict[str, tuple[Callable[[Tied], Any], bool, str | None]] = {
    # how, whether memory moves, what the error says
    "copy_": (lambda m: m.l.weight.copy_(torch.randn_like(m.l.weight)), False, None),
    "load_state_dict": (lambda m: m.load_state_dict(_tied_state(m)), False, None),
    "assign": (lambda m: m.load_state_dict(_tied_state(m), assign=True), True, UNTIED),
    "setattr": (lambda m: setattr(m.l, "weight", nn.Parameter(torch.randn_like(m.l.weight))), True, UNTIED),
    "data": (lambda m: setattr(m.l.weight, "data", torch.randn_like(m.l.weight)), True, None),
    "to": (lambda m: m.to(torch.bfloat16), True, "dtype of argument x was torch.float32"),
    "derived": (lambda m: setattr(m, "norm", m.l.weight.norm() * 5), True, None),
    "both": (_replace_both, True, None),
}


def _follows(way: Way, names: list[str]) -> None:
    """Change weights in each way in turn, on one model as long as it is tied."""
    model = Tied().to(way.device)
    call = way.compile(model, captures=[4])
    x = way.rand(4, 6)
    check(call, model, x)
    for name in names:
        change, is_moved, problem = WEIGHT_CHANGES[name]
        with torch.no_grad():
            change(model)
        given = x.to(model.l.weight.dtype)
        if problem is None:
            num_captures = 2 * is_moved * way.is_captured
            with counters.expect(num_graphs_seen=0, num_graph_captures=num_captures):
                for _ in range(2):
                    check(call, model, given)
            assert model.t.weight is model.l.weight
            continue
        with pytest.raises(TraceDepartureError, match=f"{re.escape(problem)}.*Call piecework.release"):
            call(given)
        piecework.release(call)
        with counters.expect(num_graphs_seen=1, num_graph_captures=2 * way.is_captured):
            for _ in range(2):
                torch.testing.assert_close(call(given), model(given))
        model = Tied().to(way.device)
        call = way.compile(model, captures=[4])
        check(call, model, x)


def test_c10_weights_are_changed_in_six_ways(way: Way) -> None:
    _follows(way, ["copy_", "load_state_dict", "data", "assign", "setattr", "to"])


def test_c10_derived_buffer_and_both_of_the_tied_weights_are_replaced(way: Way) -> None:
    _follows(way, ["derived", "both", "copy_", "derived"])


def test_c10_weights_move_between_padded_calls_and_in_inference_mode(way: Way) -> None:
    model = Tied().to(way.device)
    call = way.compile(model, captures=[4])
    check(call, model, way.rand(3, 6))
    with torch.inference_mode():
        for change in ("copy_", "both", "derived", "data"):
            WEIGHT_CHANGES[change][0](model)
            check(call, model, way.rand(3, 6))
            check(call, model, way.rand(4, 6))


def test_c10_moved_weight_of_one_instance_leaves_another_alone(way: Way) -> None:
    first, second = Tied().to(way.device), Tied().to(way.device)
    calls = [way.compile(model, captures=[4]) for model in (first, second)]
    x = way.rand(4, 6)
    for call, model in zip(calls, (first, second), strict=True):
        check(call, model, x)
    _replace_both(first)
    with counters.expect(num_graph_captures=2 * way.is_captured, num_graphs_seen=0):
        check(calls[1], second, x)
        check(calls[0], first, x)
    second.load_state_dict(first.state_dict())
    with counters.expect(num_graph_captures=0):
        check(calls[1], second, x)


def test_c10_moved_weights_are_stale_after_freeze(eager_way: Way) -> None:
    # What is asked is whether a capture is made, not what runs in it.
    model = Tied()
    call = eager_way.compile(model, captures=[4])
    x = eager_way.rand(4, 6)
    check(call, model, x)
    piecework.freeze()
    with torch.no_grad():
        model.l.weight.copy_(torch.randn(6, 6))
    check(call, model, x)
    _replace_both(model)
    if eager_way.is_captured:
        with pytest.raises(piecework.StaleCaptureError, match=r"size 4 of .*Tied.*weight.* replaced or moved"):
            call(x)
    else:
        check(call, model, x)
