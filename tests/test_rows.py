"""Whether rows are independent: what is said of a model, and what padding does when it is tried."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from piecework import SplittingOp
from piecework import rows as rows_module
from piecework.errors import CompileError
from piecework.row_rules import known_ops
from row_models import (
    DEPENDENT,
    INDEPENDENT,
    SCALE,
    TABLE,
    WIDTH,
    Function,
    make_inputs,
    padding_shows,
    verdict,
)
from split_models import ops, rows

IS_TORCH_2_11 = torch.__version__.startswith("2.11.")

# --- ops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", INDEPENDENT.values(), ids=list(INDEPENDENT))
def test_functions_of_independent_rows(function: Function) -> None:
    assert not padding_shows(function)
    assert verdict(function, *make_inputs(5)) is None


@pytest.mark.parametrize(("function", "why"), DEPENDENT.values(), ids=list(DEPENDENT))
def test_functions_of_dependent_rows(function: Function, why: str) -> None:
    found = verdict(function, *make_inputs(5))
    assert found is not None
    assert re.search(why, found.partition(' ("')[0]), found  # the line of the user's is the one with the pattern


def test_a_reason_names_the_op_the_piece_and_the_line() -> None:
    def scales(x: torch.Tensor) -> torch.Tensor:
        x = ops.scale3(x * 2)
        scale = x.abs().amax()
        return x / scale

    found = verdict(scales, rows(4))
    assert found is not None
    assert re.fullmatch(
        r'aten::amax over the rows in piece_1 \(".*test_rows.py", line \d+, in scales: "scale = x.abs\(\).amax\(\)"\)',
        found,
    )


@pytest.mark.skipif(IS_TORCH_2_11, reason="there the size of such a slice follows from no input")
def test_a_table_up_to_the_number_of_rows_has_those_rows() -> None:
    assert verdict(lambda x: x + TABLE[: x.shape[0]], rows(4)) is None


def test_a_size_that_follows_from_contents_is_not_followed() -> None:
    found = verdict(lambda x: x + TABLE[TABLE[:, 0] > 0].sum(), rows(4))
    assert str(found).startswith("aten::index picks rows in piece_0")


def test_the_table_names_ops_that_torch_has() -> None:
    missing = [name for name in known_ops() if not hasattr(torch.ops.aten, name.removeprefix("aten::"))]
    assert not missing


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """Look at the rows twice over: ``[2 * rows, 6]``, each copy in one stretch."""
    return x[None].expand(2, *x.shape).reshape(-1, x.shape[1])


def _set_in_place(x: torch.Tensor, dim: int) -> torch.Tensor:
    y = x.clone()
    y.select(dim, 0).fill_(0.25)
    y.narrow(1 - dim, 0, y.shape[1 - dim]).mul_(2)
    return y


CHAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t": lambda x: x.t(),
    "exp": lambda x: (x.clamp(-2, 2)).exp(),
    "nan_to_num": lambda x: x.nan_to_num(1.0, 2.0, -2.0),
    "softmax0": lambda x: x.softmax(0),
    "softmax1": lambda x: x.softmax(1),
    "sum0": lambda x: x + x.sum(0, keepdim=True),
    "sum1": lambda x: x - x.sum(1, keepdim=True),
    "mean0": lambda x: x - x.mean(0),
    "max1": lambda x: x.amax(1)[:, None] + x,
    "cumsum0": lambda x: x.cumsum(0),
    "cumsum1": lambda x: x.cumsum(1),
    "flip0": lambda x: x.flip(0),
    "flip1": lambda x: x.flip(1),
    "roll1": lambda x: x.roll(1, 1),
    "sort0": lambda x: x.sort(0)[0],
    "sort1": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(1, 1)[0] + x,
    "column": lambda x: x[:, :1] * x,
    "row": lambda x: x[:1] * x,
    "norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "normalize": lambda x: F.normalize(x, dim=1),
    "reorder": lambda x: x.reshape(x.shape[1], x.shape[0]),
    "flat": lambda x: x.reshape(-1).sin().view(x.shape[0], x.shape[1]),
    "flat_reversed": lambda x: x.reshape(-1).flip(0).view(x.shape[0], x.shape[1]),
    "flat_running": lambda x: x.reshape(-1).cumsum(0).view(x.shape[0], x.shape[1]),
    "join0": lambda x: torch.cat([x, x], 0)[: x.shape[0]],
    "join1": lambda x: torch.cat([x, -x], 1)[:, ::2],
    "stack": lambda x: torch.stack([x, x * 2], 2).sum(2),
    "copies": lambda x: _grouped(x).sin().view(2, *x.shape).sum(0),
    "running_copies": lambda x: _grouped(x).cumsum(0).view(2, *x.shape)[0],
    "ends_of_copies": lambda x: _grouped(x).cumsum(0).view(2, *x.shape)[1],
    "gram": lambda x: (x @ x.t()) @ x,
    "gram_t": lambda x: x @ (x.t() @ x),
    "numbered": lambda x: x + torch.arange(x.shape[0])[:, None],
    "numbered_columns": lambda x: x + torch.arange(x.shape[1]),
    "batches": lambda x: torch.bmm(x[:, :, None], x[:, None, :]).sum(2),
    "tril": lambda x: x.tril(),
    "inside0": lambda x: _set_in_place(x, 0),
    "inside1": lambda x: _set_in_place(x, 1),
    "shape0": lambda x: x / x.shape[0],
    "padded": lambda x: F.pad(x, (1, 0))[:, 1:],
    "diff": lambda x: x + torch.cat([x[:, 1:] - x[:, :-1], x[:, :1]], 1),
}
"""From ``[rows, 6]``, or ``[6, rows]``, to such a tensor."""


@pytest.mark.slow
@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(st.lists(st.sampled_from(sorted(CHAIN)), min_size=1, max_size=5))
def test_chains_called_independent_do_not_see_padding(names: Sequence[str]) -> None:
    _check_chain(names)


@pytest.mark.parametrize("name", CHAIN)
def test_each_link_and_its_transposed_agree_with_padding(name: str) -> None:
    _check_chain([name])
    _check_chain(["t", name])


def _check_chain(names: Sequence[str]) -> None:
    def chain(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = CHAIN[name](x)
        return x

    torch._dynamo.reset()
    try:
        found = verdict(chain, *make_inputs(5))
    except CompileError:  # the shape of the transposed fixes the size
        return
    assert found is not None or not padding_shows(chain)


# --- splitting ops, and what stands between pieces ------------------------------------------------


class Layer(nn.Module):
    """A decoder layer: RMSNorm, one linear for all of q, k and v, rotation, attention as an op, gated MLP."""

    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.weight = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate_up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    def rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.view(x.shape[0], self.num_heads, -1).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).flatten(1)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        q, k, v = self.qkv(self.norm(x)).split([width, width, width], -1)
        out = torch.empty_like(q)
        ops.attn(self.rotated(q, cos, sin) + v, self.rotated(k, cos, sin), out)
        x = x + self.out(out)
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.register_buffer("angles", torch.randn(64, 1, 4))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        angles = self.get_buffer("angles")[positions]
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return x


def test_a_decoder_has_independent_rows_if_its_attention_declares_it() -> None:
    ids = torch.arange(5)
    assert verdict(Decoder(), ids, ids) is None
    found = verdict(Decoder(), ids, ids, independent=False)
    assert found is not None
    assert found.startswith("splitting op cut::attn does not declare rows_independent (")
    assert "ops.attn(self.rotated(q, cos, sin) + v" in found


def test_layers_that_are_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    original = rows_module._why_in_piece

    def spy(step: Any, sizes: Any) -> str | None:
        looked.append(step.name)
        return original(step, sizes)

    monkeypatch.setattr(rows_module, "_why_in_piece", spy)
    ids = torch.arange(5)
    assert verdict(Decoder(8), ids, ids) is None
    assert looked[:3] == ["piece_0", "piece_1", "piece_8"]
    assert len(looked) == 3 + 9  # `verdict` asks again without the unique pieces


class Alike(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = ops.scale3(a.softmax(0))
        b = ops.scale3(b.softmax(0))
        return a, b


def test_pieces_that_are_alike_but_for_the_dim_are_both_looked_at() -> None:
    dims = {"a": {0: "first"}, "b": {0: "second"}}
    for dim, piece in (("first", "piece_0"), ("second", "piece_1")):
        found = verdict(Alike(), rows(4), rows(5), dims=dims, dim=dim)
        assert found is not None
        assert f"aten::_softmax over the rows in {piece}" in found


def test_other_named_dims_are_constants() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(1) * SCALE + x.sum(1, keepdim=True) / x.shape[1]

    args = (torch.randn(4, 5, WIDTH),)
    assert verdict(model, *args, dims={"x": {0: "batch", 1: "length"}}, dim="batch") is None
    found = verdict(model, *args, dims={"x": {0: "batch", 1: "length"}}, dim="length")
    assert found is not None
    assert found.startswith("aten::_softmax over the rows")


@torch.library.custom_op("rows::total", mutates_args=())
def total(x: torch.Tensor, num: int) -> torch.Tensor:
    return x.sum(0) * num


total.register_fake(lambda x, num: torch.empty_like(x[0]))


def _between(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    names = ("rows::total", "cut::attn", "cut::scale3")
    cuts = [SplittingOp(name, rows_independent=True) for name in names]
    found = verdict(function, *args, cuts=cuts, **options)
    assert found is not None
    return found


def test_a_splitting_op_must_keep_the_rows() -> None:
    found = _between(lambda x: x + torch.ops.rows.total(x, 1), rows(4))
    assert found.startswith("splitting op rows::total gives a result without rows: [6]")


def test_a_splitting_op_must_not_use_their_number() -> None:
    found = _between(lambda x: x + torch.ops.rows.total(x, x.shape[0]), rows(4))
    assert found.startswith("splitting op rows::total uses the number of rows as a number")


def test_a_splitting_op_may_write_to_what_the_graph_made_only() -> None:
    def model(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ops.attn(x, x, out)
        return out * 1

    assert _between(model, rows(4), rows(4)).startswith("cut::attn writes to the input l_out_ between pieces")


def test_a_splitting_op_must_not_write_to_memory_that_has_no_rows() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(16, WIDTH)
        ops.attn(x, x, buffer.narrow(0, 0, x.shape[0]))
        return x + buffer.sum(0)

    assert "writes to memory without rows" in _between(model, rows(4))


def test_a_splitting_op_must_not_be_given_a_view_that_mixes_rows() -> None:
    assert "has rows in no dim of their own" in _between(lambda x: ops.scale3(x.view(-1)), rows(4))
    assert "aten::slice takes a part of the rows between pieces" in _between(lambda x: ops.scale3(x[1:]), rows(4))


def test_a_view_that_joins_rows_and_parts_them_again_may_stand_between_pieces() -> None:
    assert verdict(lambda x: ops.scale3(x.view(-1).view(-1, 3)).view(-1, 2, 3).view(-1, WIDTH) + x, rows(4)) is not None
    assert verdict(lambda x: ops.scale3(x.view(-1).view(x.shape[0], 2, 3)).view(-1).view(x.shape) + 1, rows(4)) is None


def test_results_are_views_whose_rows_can_be_cut() -> None:
    assert verdict(lambda x: (ops.scale3(x).t(), ops.scale3(x)[:, :2], x.shape[0]), rows(4)) is None
    found = verdict(lambda x: ops.scale3(x).view(-1), rows(4))
    assert found is not None
    assert "has rows in no dim of their own: [6*rows]" in found
    assert "aten::select takes rows apart" in str(verdict(lambda x: ops.scale3(x)[0], rows(4)))


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = (x * 2).chunk(2, 1)
    return left, right


library = torch.library.Library("rowslib", "DEF")
library.define("halves(Tensor x) -> (Tensor, Tensor)")
library.impl("halves", _halves, "CompositeExplicitAutograd")
torch.library.register_fake("rowslib::halves", _halves, lib=library)


def test_a_piece_must_not_write_to_memory_that_two_of_its_inputs_share() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        left, right = torch.ops.rowslib.halves(x)
        return left.add_(1) * right

    cuts = [SplittingOp("rowslib::halves", rows_independent=True)]
    assert verdict(model, rows(4), cuts=cuts) == "piece_0 writes to memory that several of its inputs share"


# --- what is never looked into --------------------------------------------------------------------


def test_a_custom_op_inside_a_piece_is_named() -> None:
    found = verdict(lambda x: ops.scale3(x) + 1, rows(4), cuts=["cut::attn"])
    assert str(found).startswith("cut::scale3 is not known to keep rows apart in piece_0 (")


def test_a_higher_order_op_is_named() -> None:
    found = verdict(lambda x: checkpoint(torch.sin, x, use_reentrant=False), rows(4))
    assert str(found).startswith("tag_activation_checkpoint is not looked into in piece_0")


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("count").add_(1)
        return x * self.weight


def test_a_write_to_a_buffer_is_named() -> None:
    found = str(verdict(Counts(), rows(4)))
    assert re.match(r"aten::add_ writes to the input \w*count\w* in piece_0 \(", found)


def test_a_write_to_a_parameter_is_named() -> None:
    def scaled(model: Counts, x: torch.Tensor) -> torch.Tensor:
        return x * model.weight.mul_(2)

    class Model(Counts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled(self, x)

    assert "writes to the input" in str(verdict(Model().requires_grad_(False), rows(4)))


def test_a_write_to_an_argument_is_named_also_through_a_view() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x[:, 0].add_(1)
        return x * 2

    assert re.match(r"aten::add_ writes to the input l_x_ in piece_0", str(verdict(model, rows(4))))


def test_an_argument_with_rows_twice_is_refused() -> None:
    def model(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, mask + 1

    found = verdict(model, rows(4), rows(4, 4), dims={"x": 0, "mask": {0: "rows", 1: "rows"}})
    assert "has rows in several dims of [rows, rows]" in str(found)


# --- contexts -------------------------------------------------------------------------------------


def test_ops_are_seen_below_autocast_which_is_left_again() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x - x.mean(0), TABLE)

    assert "aten::mean over the rows" in str(verdict(model, rows(4)))
    assert not torch.is_autocast_enabled("cpu")


def test_ops_are_seen_below_vmap() -> None:
    assert verdict(lambda x: torch.vmap(lambda row: row.softmax(0))(x), rows(4)) is None
    assert verdict(lambda x: torch.vmap(lambda column: column.softmax(0), 1)(x), rows(4)) is not None
