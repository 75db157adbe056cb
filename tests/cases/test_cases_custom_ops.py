"""Cases about custom ops: what they declare and do not do, what they do and do not declare, kinds of arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import case_ops
import piecework
from piecework import PieceworkWarning, counters
from ways import Way, check, close, same

# --- C56 ---


def writes_fresh(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    case_ops.bad(x, out)
    return out + 1


def writes_input(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    case_ops.bad(x, out)
    return out + 1


def writes_one_of_a_list(x: torch.Tensor) -> torch.Tensor:
    outs = [torch.zeros_like(x), torch.zeros_like(x)]
    torch.ops.cases.bad_list(x, outs)
    return outs[0] + outs[1]


MODELS = {writes_fresh: 1, writes_input: 2, writes_one_of_a_list: 1}
WORDS = r"op cases::bad\w* .*test_cases_custom_ops.py.* returns nothing and declares that it writes to nothing"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_c56_op_that_writes_what_it_does_not_declare(way: Way, model: Callable[..., Any]) -> None:
    """A splitting op is right; elsewhere it is warned about, since Inductor leaves it out."""

    def make(n: int) -> tuple[torch.Tensor, ...]:
        return tuple(way.rand(n, 6) for _ in range(MODELS[model]))

    if way.level == 3:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PieceworkWarning)
            same(way, model, make, [4, 3, 4], splitting_ops=["cases::bad", "cases::bad_list"])
        assert not caught
    with pytest.warns(PieceworkWarning, match=WORDS):
        if way.pieces == "eager":
            same(way, model, make, [4, 3, 4], splitting_ops=())
        else:
            way.compile(model, captures=[4], splitting_ops=())(*make(4))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_c56_op_that_writes_what_it_does_not_declare_at_level_1(backend: str) -> None:
    """Torch's own compile leaves it out, too, so that the same is said there."""
    call = replace(Way(1, "eager"), pieces=backend).compile(writes_fresh)
    with pytest.warns(PieceworkWarning, match=WORDS):
        result = call(torch.ones(4, 6))
    if backend == "eager":
        close(result, writes_fresh(torch.ones(4, 6)))


def test_c56_op_that_declares_what_it_never_writes(way: Way) -> None:
    def model(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        kept = x * 2
        case_ops.boasts(x, kept)
        case_ops.boasts(x, out)
        return kept + out

    for ops in ([case_ops.BOASTS], []):
        same(way, model, lambda n: (way.rand(n, 6), way.rand(n, 6)), [4, 3, 4], splitting_ops=ops)


def test_c56_op_that_gives_a_result_and_declares_what_it_never_writes(way: Way) -> None:
    def model(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.ops.cases.boasts_and_gives(x + 1, out) * out

    for ops in (["cases::boasts_and_gives"], []):
        same(way, model, lambda n: (way.rand(n, 6), way.rand(n, 6)), [4, 3, 4], splitting_ops=ops)


def test_c56_undeclared_write_through_a_view_and_of_a_buffer(way: Way) -> None:
    class Model(torch.nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            base = torch.zeros_like(x)
            case_ops.bad(x[:, :3], base[:, 3:])
            case_ops.bad(torch.ones_like(self.seen), self.seen)
            return base * 2 + self.seen

    if way.level == 3:
        same(way, Model().to(way.device), lambda n: (way.rand(n, 6),), [4, 3, 4], splitting_ops=[case_ops.BAD])
    else:
        with pytest.warns(PieceworkWarning, match=WORDS):
            way.compile(Model().to(way.device))(way.rand(4, 6))


# --- C58 ---


def every_kind(x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty_like(x)
    case_ops.many(x, out, [x, x * 2], extra, n=x.shape[0], flag=False, dims=[x.shape[1], 2])
    result = torch.empty_like(x)
    case_ops.many(out, result.view(x.shape), [], s=0.25)
    return result


def test_c58_optional_list_and_scalar_arguments(way: Way) -> None:
    ops = [case_ops.MANY]
    same(way, every_kind, lambda n: (way.rand(n, 6),), [4, 3, 4], splitting_ops=ops)
    zeros = torch.zeros
    same(way, every_kind, lambda n: (way.rand(n, 6), zeros(n, 6, device=way.device)), [4, 3], splitting_ops=ops)


def test_c58_size_that_an_op_is_given_is_the_same_on_every_call(way: Way) -> None:
    """Undeclared, the op keeps a call from being padded: it is given the real number of rows."""
    call = way.compile(every_kind, captures=[4], splitting_ops=[case_ops.MANY])
    for n in (4, 3, 3, 4, 3):
        case_ops.seen.clear()
        call(way.rand(n, 6))
        assert case_ops.seen == [n, 1]


def test_c58_size_that_an_op_is_given_keeps_a_call_from_being_padded(eager_way: Way) -> None:
    """Declared independent of other rows, yet its number of rows shows: with eager pieces, which decide nothing."""
    call = eager_way.compile(every_kind, captures=[4], splitting_ops=[replace(case_ops.MANY, rows_independent=True)])
    for n in (4, 3, 3):
        case_ops.seen.clear()
        check(call, every_kind, torch.randn(n, 6))
        assert case_ops.seen[:2] == case_ops.seen[2:] == [n, 1]


def test_c58_keyword_order_none_and_nested_lists(way: Way) -> None:
    def model(x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        case_ops.many(ks=[x.t().t(), x[:, :1]], out=out, q=x, dims=None, extra=None, name="abc", s=2.0)
        case_ops.many(out, out, [out * 1], extra[0], 3, dims=[])
        return out * 1

    with counters.expect(num_graphs_seen=1):
        same(
            way,
            model,
            lambda n: (way.rand(n, 6), way.rand(2, n, 6)),
            [4, 3, 4],
            splitting_ops=["cases::many"],
            dims={"x": {0: "n"}, "extra": {1: "n"}},
        )


def test_c58_none_at_the_first_call_and_a_tensor_later_departs(eager_way: Way) -> None:
    """An optional argument that comes and goes is another graph; eager pieces, since nothing is compiled for it."""
    call = eager_way.compile(every_kind, captures=[4], splitting_ops=[case_ops.MANY])
    check(call, every_kind, torch.randn(4, 6))
    with pytest.raises(piecework.TraceDepartureError, match="extra"):
        call(torch.randn(4, 6), torch.zeros(4, 6))
    check(call, every_kind, torch.randn(4, 6), None)
