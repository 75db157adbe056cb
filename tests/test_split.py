"""Cutting graphs: which node stands where, and what crosses a cut."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import piecework
import split_models as models
from piecework import ConfigError, PieceworkWarning, SplitError, SplittingOp, counters
from piecework.compilers import eager_piece
from piecework.op_matching import normalized_name
from piecework.testing import plugins
from split_models import check_like_eager, check_pieces, compiled_by, one, ops, rows, split_of, two

# --- where the op stands --------------------------------------------------------------------------


def last(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    doubled = x * 2
    ops.attn(doubled, doubled, out)
    return out


def first(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    ops.attn(x, x, out)
    return out + 1


def only(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    ops.attn(x, x, out)
    return out


def adjacent(x: torch.Tensor) -> torch.Tensor:
    return ops.scale3(ops.scale3(x + 1)) - 1


def none(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


@pytest.mark.parametrize(
    ("model", "make", "num_pieces", "num_compiled"),
    [(last, one, 2, 1), (first, two, 2, 1), (only, two, 1, 0), (adjacent, one, 3, 2), (none, one, 1, 1)],
    ids=["last", "first", "only", "adjacent", "none"],
)
def test_op_at_any_position(model: Any, make: Any, num_pieces: int, num_compiled: int) -> None:
    with counters.expect(num_graphs_seen=1, num_pieces_seen=num_pieces, num_capturable_pieces_seen=num_compiled):
        with_split = check_like_eager(model, make, cuts=models.CUTS[:2]).split
    assert with_split is not None
    check_pieces(with_split)


def test_result_that_is_an_argument_stays_that_argument() -> None:
    x, out = two(4)
    assert compiled_by(only)(x, out) is out


def test_golden_text_of_one_op() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        out = torch.empty_like(y)
        ops.attn(y, y, out)
        return out * 2

    assert split_of(model, rows(4)).text() == "piece_0: y, out\neager: attn_default\npiece_1: mul".replace(
        "attn_default", _op_name(model)
    )


def test_golden_text_of_adjacent_ops_with_a_view_between_them() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = ops.scale3(x)
        return ops.scale3(y[1:]).relu()

    assert split_of(model, rows(4)).text() == "eager: y, scale3_1\npiece_0: relu"


def test_golden_text_of_an_op_with_several_results() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        a, b = ops.pair(x * 2)
        return a * b

    assert split_of(model, rows(4)).text() == "piece_0: mul\neager: pair, a, b\npiece_1: mul_1"


def _op_name(model: Callable[..., Any]) -> str:
    split = split_of(model, rows(4))
    return next(node.name for step in split.steps for node in getattr(step, "ops", ()))


def test_op_may_repeat_in_layers() -> None:
    def layer(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        token = ops.update(x, cache)
        out = torch.empty_like(x)
        ops.attn_token(x, cache[: x.shape[0]], out, token)
        return out * 0.5

    def model(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = layer(x, cache)
        return x

    with counters.expect(num_pieces_seen=8, num_capturable_pieces_seen=4, num_unique_pieces=1):
        state = check_like_eager(
            model, lambda n: (rows(n), torch.zeros(16, 6)), sizes=(4, 8, 1), dims={"x": 0}, cuts=models.CUTS
        )
    assert state.split is not None
    check_pieces(state.split)


# --- several results ------------------------------------------------------------------------------


def test_both_results_one_of_them_three_pieces_later() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ops.pair(x * 2)
        a = ops.scale3(a + 1) * 2
        a = ops.scale3(a) - 1
        return a, a + b

    state = check_like_eager(model)
    assert state.split is not None
    assert (state.split.num_pieces, len(state.split.pieces)) == (7, 4)
    check_pieces(state.split)


@pytest.mark.parametrize("used", [(0,), (1,), ()], ids=["first", "second", "none"])
def test_unused_results(used: tuple[int, ...]) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        results = ops.pair(x)
        return sum((results[i] for i in used), x * 2)

    check_like_eager(model)


def test_result_returned_as_it_is() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = ops.pair(x)
        c, d = ops.pair(a)
        return d, b, c

    state = check_like_eager(model)
    assert state.split is not None
    assert not state.split.pieces


def test_op_that_returns_a_list() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        a, b, c = ops.parts(x + 1, 3)
        return ops.scale3(a + c) * b

    check_like_eager(model)


def test_results_of_a_kernel_with_several_results_cross_one_by_one() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        values, indices = torch.sort(x, dim=1)
        y = ops.scale3(values)
        return y.gather(1, indices) + torch.max(x, 1, keepdim=True).values

    state = check_like_eager(model)
    assert state.split is not None
    check_pieces(state.split)


# --- sizes ----------------------------------------------------------------------------------------


def size_whole(x: torch.Tensor) -> Any:
    size = x.size()
    y = ops.scale3(x * 2)
    return y.view(size) + 1, y.new_zeros(size[0]), y.reshape(size[0] * size[1])


def size_swapped(x: torch.Tensor) -> Any:
    b, d = x.shape
    y = ops.scale3(x)
    y = ops.scale3(y.view(d, b))
    return y.expand(2, d, b)[0]


def size_of_a_flat_result(x: torch.Tensor) -> Any:
    y = x * 2
    n = y.reshape(-1).size(0)
    z = ops.scale3(y)
    return z.new_zeros(n) + n, z.reshape(n) * n


def size_times_two(x: torch.Tensor) -> Any:
    n = x.shape[0] * 2
    y = ops.scale3(torch.cat([x, x]) + 1)
    return y[: n - 1], torch.arange(n) + y.sum()


def size_halved(x: torch.Tensor) -> Any:
    n = x.shape[0] // 2
    y = ops.scale3(x + 1)
    return y[:n] * 2, y[n:] + n


def size_as_scalar(x: torch.Tensor) -> Any:
    n = x.shape[0]
    return ops.scale3(x / n) * (n + 0.5) + n**2


def size_of_a_result_of_the_op(x: torch.Tensor) -> Any:
    y = ops.scale3(x[1:])
    return torch.ones(y.shape[0], y.size(1)) + y, y.size(0)


def size_given_to_the_op(x: torch.Tensor) -> Any:
    out = torch.empty_like(x)
    ops.many(x * 2, out, [x], n=x.shape[0], dims=[x.shape[0] * 3, 2])
    return out + 1


@pytest.mark.parametrize(
    "model",
    [
        size_whole,
        size_swapped,
        size_of_a_flat_result,
        size_times_two,
        size_halved,
        size_as_scalar,
        size_of_a_result_of_the_op,
        size_given_to_the_op,
    ],
)
def test_sizes_are_derived_again_behind_a_cut(model: Any) -> None:
    state = check_like_eager(model, sizes=(4, 7, 5, 2, 1))
    assert state.split is not None
    check_pieces(state.split)


def test_two_named_dims_stay_apart_behind_a_cut() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        y = ops.scale3(x.reshape(b * s, d) + 1)
        return y.view(b, s, d) * b + s + torch.arange(s)[:, None]

    compiled = compiled_by(model, dims={"x": {0: "batch", 1: "seq"}})
    with counters.expect(num_graphs_seen=1):
        for batch, seq in ((2, 3), (3, 2), (1, 5), (5, 1), (4, 4), (1, 1)):
            x = torch.randn(batch, seq, 4)
            torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("op", [round, lambda size: round(size, 0), int, lambda size: -round(-size) + 1])
def test_rounded_size(op: Any) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = ops.scale3(x)
        return torch.zeros(int(op(y.shape[0] * 1.5)), 1) + y.sum()

    check_like_eager(model)


# --- views and memory -----------------------------------------------------------------------------


def view_slice(x: torch.Tensor) -> Any:
    y = x * 2
    part = y[1:, ::2]
    return ops.scale3(y) + 1, part + 1


def view_transpose(x: torch.Tensor) -> Any:
    y = (x + 1).t()
    return ops.scale3(x) @ y


def view_reshape(x: torch.Tensor) -> Any:
    y = (x + 1).reshape(-1, 2, 3)
    return ops.scale3(x).reshape(-1, 2, 3) * y


def view_chunk(x: torch.Tensor) -> Any:
    a, b, c = (x + 1).chunk(3, dim=-1)
    return ops.scale3(a) + b, c - 1


def view_split(x: torch.Tensor) -> Any:
    a, b = (x + 1).split([2, 4], dim=1)
    return ops.scale3(b) * 2, a + 1


def view_unbind(x: torch.Tensor) -> Any:
    columns = (x * 2).unbind(1)
    return ops.scale3(columns[0]) + columns[5]


def view_chained(x: torch.Tensor) -> Any:
    y = (x + 1).view(-1, 2, 3).transpose(1, 2)[:, 1:].unsqueeze(0).squeeze(0)
    return ops.scale3(y) + y.expand(-1, 2, 2)


def view_given_to_the_op(x: torch.Tensor) -> Any:
    q, k = (x + 1).chunk(2, dim=1)
    out = torch.empty_like(q)
    ops.attn(q, k, out)
    return out.t() + 1


def view_returned(x: torch.Tensor) -> Any:
    y = ops.scale3(x)
    return y[1:], x[1:], (y + 1).t(), y.view(-1)


def view_of_an_input(x: torch.Tensor) -> Any:
    part = x[:, 1:]
    y = ops.scale3(x)
    return part * 2 + y[:, 1:]


VIEWS = [
    *(view_slice, view_transpose, view_reshape, view_chunk, view_split, view_unbind, view_chained),
    *(view_given_to_the_op, view_returned, view_of_an_input),
]


@pytest.mark.parametrize("model", VIEWS)
def test_views_are_taken_again_from_their_base(model: Any) -> None:
    state = check_like_eager(model)
    assert state.split is not None
    check_pieces(state.split)
    assert all(piece.outputs_are_fresh for piece in state.split.pieces)


def test_returned_view_is_a_view_of_what_eager_views() -> None:
    def model(x: torch.Tensor) -> Any:
        y = ops.scale3(x + 1)
        return x[1:], y, y[1:]

    x = rows(4)
    part, y, tail = compiled_by(model)(x)
    assert part.data_ptr() == x[1:].data_ptr()
    assert tail.data_ptr() == y[1:].data_ptr()


def inplace_crosses(x: torch.Tensor) -> Any:
    y = x * 2
    z = y.add_(1).mul_(3)
    return ops.scale3(z) + y


def inplace_operator_crosses(x: torch.Tensor) -> Any:
    y = x * 2
    y += 1
    y = F.relu(y, inplace=True)
    return ops.scale3(y) - y


def base_written_after_the_view(x: torch.Tensor) -> Any:
    y = x * 2
    v = y[1:]
    out = torch.empty_like(v)
    ops.attn(v, v, out)
    y.add_(1)
    return out + v, y


def view_written_after_the_base(x: torch.Tensor) -> Any:
    y = x * 2
    v = y[1:]
    z = ops.scale3(v)
    v.add_(z)
    return y


def item_assigned(x: torch.Tensor) -> Any:
    y = x * 2
    z = ops.scale3(y)
    y[:, 0] = z[:, 1]
    return ops.scale3(y) + z


def chunk_written(x: torch.Tensor) -> Any:
    y = x + 1
    a, b = y.chunk(2, dim=1)
    b.mul_(2)
    z = ops.scale3(y)
    a.add_(z[:, :3])
    return y, b


def argument_written(x: torch.Tensor) -> Any:
    x.add_(1)
    y = ops.scale3(x)
    x[1:].mul_(2)
    return y + x


def op_writes_views_of_one_base(x: torch.Tensor) -> Any:
    base = torch.zeros(x.shape[0], 8)
    ops.attn(x, x, base[:, 1:7])
    flat = torch.zeros(x.shape[0] * 6)
    ops.attn(x, x, flat.view(-1, 6))
    ops.attn(x[:1], x[-1:], base[:1, :6])
    return base * 2, flat + 1


MUTATIONS = [
    *(inplace_crosses, inplace_operator_crosses, base_written_after_the_view, view_written_after_the_base),
    *(item_assigned, chunk_written, argument_written, op_writes_views_of_one_base),
]


@pytest.mark.parametrize("cuts", [models.CUTS, ()], ids=["cut", "whole"])
@pytest.mark.parametrize("model", MUTATIONS)
def test_writes_are_seen_wherever_eager_sees_them(model: Any, cuts: tuple[str, ...]) -> None:
    # Torch reads whether there is one row where an item is assigned, so that one row departs from the trace.
    state = check_like_eager(model, cuts=cuts, sizes=(4, 2, 7) if model is item_assigned else (4, 2, 7, 1))
    assert state.split is not None
    check_pieces(state.split)


def test_preallocated_result_is_allocated_by_the_piece_before() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        out = torch.empty_like(y)
        ops.attn(y, y, out)
        return out

    split = split_of(model, rows(4))
    assert [node.name for node in split.pieces[0].outputs] == ["y", "out"]


def test_regions_without_a_kernel_are_no_pieces() -> None:
    def model(x: torch.Tensor, out: torch.Tensor) -> Any:
        view = x[1:].t()
        ops.attn(view, view, out)
        fresh = torch.empty(x.shape[0] * 2, 3)
        ops.attn(x[:1, :3], x[:1, :3], fresh)
        return ops.scale3(out.t()), fresh

    with counters.expect(num_capturable_pieces_seen=0, num_pieces_seen=1):
        check_like_eager(
            model, lambda n: (rows(n), torch.zeros(6, n - 1)), dims={"x": {0: "n"}, "out": {1: "m"}}, sizes=(4, 7, 2)
        )


# --- parameters, buffers, constants ---------------------------------------------------------------


class Weights(nn.Module):
    """Parameters through views, tied and reused; buffers written by pieces and by ops; plain attributes."""

    count: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.inner.weight
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(16, 6))
        self.plain = torch.full((6,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        w = self.inner.weight.t()
        y = ops.scale3(x @ w + self.plain)
        ops.update(y, self.cache)
        y = y @ w + self.tied(y) + self.cache[: x.shape[0]]
        self.cache[:1].mul_(0.5)
        return ops.scale3(y) * self.count + GLOBAL + torch.tensor([1.0, 2, 3, 4, 5, 6])


GLOBAL = torch.full((6,), 0.25)


def test_parameters_buffers_attributes_globals_and_constants() -> None:
    model, reference = Weights(), Weights()
    compiled = compiled_by(model)
    with torch.no_grad(), counters.expect(num_graphs_seen=1):
        for n in (4, 2, 1, 9):
            x = rows(n)
            torch.testing.assert_close(compiled(x), reference(x))
            torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))
    split = models.compiled_state(compiled).split
    assert split is not None
    check_pieces(split)


def test_tied_weight_is_one_input() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ops.scale3(self.a(x)) + self.b(x) * 2

    check_like_eager(Tied())


class Blocks(nn.Module):
    """Switches gradients off and on inside, and holds a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = ops.scale3(self.dropout(x))
            with torch.enable_grad():
                y = self.inner(y)
            z = ops.scale3(y + 1)
        return self.inner(z)


def test_gradient_blocks_and_dropout_in_eval() -> None:
    model = Blocks().eval()
    check_like_eager(model)
    x = rows(3)
    torch.testing.assert_close(compiled_by(model)(x).detach(), model(x).detach())


# --- where a graph can't be cut -------------------------------------------------------------------


def test_autocast_region_inside_a_piece() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = ops.scale3(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = y @ y.t()
        return ops.scale3(y.float()) + 1

    check_like_eager(model, rtol=1e-2)


def test_autocast_region_that_would_be_cut_names_the_line() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x.t()
            y = ops.scale3(y)  # the line
            return y @ y

    with pytest.raises(SplitError, match=r"cut::scale3.*test_split\.py.*# the line") as caught:
        compiled_by(model)(rows(4))
    assert "a context of torch.autocast, which can't be cut in two" in str(caught.value)


def test_op_inside_a_checkpoint_names_the_line() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x + 1) * 2  # the line

    def model(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, x, use_reentrant=False) + 1

    with pytest.raises(SplitError, match=r"cut::scale3.*test_split\.py.*# the line.*checkpoint"):
        compiled_by(model)(rows(4))


def test_checkpoint_without_an_op_inside_is_part_of_a_piece() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).relu() * 2

    def model(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(inner, x, use_reentrant=False)
        return ops.scale3(y) + 1

    check_like_eager(model)


def test_op_inside_cond_is_refused() -> None:
    def model(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        return torch.cond(flag.sum() > 0, lambda x: ops.scale3(x) + 1, lambda x: x * 2, (x,))

    with pytest.raises(SplitError, match="cut::scale3 stands inside the body of"):
        compiled_by(model, dims={"x": 0})(rows(4), torch.ones(2))


def test_op_that_would_run_at_each_use_is_refused() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.same(x + 1) * 2

    with pytest.raises(SplitError, match=r"cut::same, or its fake implementation, returns a view .*test_split\.py"):
        compiled_by(model, cuts=["cut::same"])(rows(4))


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (lambda x: x.t().t(), "aten::t"),
        (lambda x: x.contiguous(), "aten::contiguous"),
    ],
)
def test_view_of_torch_is_no_place_to_cut_at(op: Any, name: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return op(x + 1) * 2

    with counters.expect(num_pieces_seen=1):
        check_like_eager(model, cuts=[name])


def test_cond_without_an_op_inside_is_part_of_a_piece() -> None:
    def model(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        y = torch.cond(flag.sum() > 0, lambda x: x.sin() + 1, lambda x: x * 2, (x,))
        return ops.scale3(y) + 1

    check_like_eager(model, lambda n: (rows(n), torch.full((2,), float(n % 2))), dims={"x": 0})


def test_shape_changed_in_place_is_refused() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.t_()
        return ops.scale3(y)

    with pytest.raises(piecework.CompileError, match=r"changes the shape of a tensor in place.*test_split\.py"):
        compiled_by(model)(rows(4))


# --- which op -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["cut.scale3", "cut::scale3", "cut::scale3.default", "cut.scale3.default", SplittingOp("cut.scale3")]
)
@pytest.mark.parametrize(
    "call", [ops.scale3, ops.scale3.default, models.scale3], ids=["packet", "overload", "function"]
)
def test_every_spelling_and_every_form_of_call(name: str | SplittingOp, call: Any) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return call(x + 1) + 1

    with counters.expect(num_pieces_seen=3):
        check_like_eager(model, cuts=(name,), sizes=(3,))


def test_ops_of_a_library() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.cutlib.fill(torch.ops.cutlib.twice(x + 1) + 1, out)
        return out + 1

    with counters.expect(num_pieces_seen=5):
        check_like_eager(model, cuts=("cutlib.twice", "cutlib::fill"))


@pytest.mark.parametrize(
    ("name", "num_pieces"), [("cutlib::twice", 5), ("cutlib::twice.scaled", 3), ("cutlib.twice.default", 5)]
)
def test_one_overload_of_several(name: str, num_pieces: int) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.cutlib.twice(x + 1)
        return torch.ops.cutlib.twice(y + 1, 0.5) + 1

    with counters.expect(num_pieces_seen=num_pieces):
        check_like_eager(model, cuts=(name,))


def test_normalized_name() -> None:
    assert normalized_name("a.b.default") == normalized_name("a::b") == "a::b"
    assert normalized_name("a.b.c") == "a::b.c"
    for wrong in ("nope", "a::", "::b", "a.b.c.d", "a::b c"):
        with pytest.raises(ConfigError, match="a splitting op is named like"):
            normalized_name(wrong)


Pair = tuple[str, Callable[[torch.Tensor], torch.Tensor]]
BUILTIN: list[Pair] = [
    ("aten::silu", lambda x: F.silu(x)),
    ("aten::softmax", lambda x: F.softmax(x, -1)),
    ("aten::softmax", lambda x: torch.softmax(x, -1)),
    ("aten::softmax", lambda x: x.softmax(-1)),
    ("aten::matmul", lambda x: torch.matmul(x, WEIGHT)),
    ("aten::matmul", lambda x: x.matmul(WEIGHT)),
    ("aten::matmul", lambda x: x @ WEIGHT),
    ("aten::matmul", lambda x: torch.ops.aten.matmul(x, WEIGHT)),
    ("aten::scaled_dot_product_attention", lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0]),
    ("aten::linear", lambda x: F.linear(x, WEIGHT)),
    ("aten::embedding", lambda x: F.embedding(x.long().abs() % 6, WEIGHT).sum(1)),
    ("aten::add", lambda x: torch.add(x, 2)),
    ("aten::add", lambda x: x.add(2)),
    ("aten::add", lambda x: x + 2),
    ("aten.layer_norm", lambda x: F.layer_norm(x, (6,))),
    ("aten::gelu", lambda x: F.gelu(x)),
    ("aten::relu", lambda x: x.relu()),
    ("aten::mul", lambda x: 2 * x),
]
WEIGHT = torch.arange(36.0).reshape(6, 6) / 36


@pytest.mark.parametrize(("name", "call"), BUILTIN, ids=[f"{i}-{name}" for i, (name, _) in enumerate(BUILTIN)])
def test_builtin_ops_by_aten_name(name: str, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return call(x.sin()).cos()

    with counters.expect(num_pieces_seen=3, num_capturable_pieces_seen=2):
        # One row may choose another kernel for attention, which torch notes as a relation of the trace.
        check_like_eager(model, cuts=(name,), sizes=(3, 5) if "attention" in name else (3, 1))


@pytest.mark.parametrize(
    "model",
    [lambda x: ops.scale3(x.contiguous()) + 1, lambda x: ops.scale3(x).reshape(-1) + 1],
    ids=["contiguous", "reshape"],
)
def test_looking_for_a_named_op_that_is_not_there_leaves_all_sizes_open(model: Callable[..., Any]) -> None:
    # On fakes these ask whether there is one row, which would be noted as a relation of the trace.
    check_like_eager(model, cuts=("cut::scale3", "aten::add_"), sizes=(4, 1, 7))


def test_op_that_only_appears_after_decomposition_says_which_to_name() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, WEIGHT) + 1

    with pytest.raises(SplitError, match=r"aten::mm only appears when aten::linear is decomposed.*name aten::linear"):
        compiled_by(model, cuts=("aten::mm",))(rows(4))


@pytest.mark.parametrize(
    ("name", "near"), [("cut::scal3", "cut::scale3"), ("cutlib::twice.scald", "cutlib::twice.scaled")]
)
def test_unknown_op_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{near}"):
        compiled_by(none, cuts=(name,))(rows(4))


def test_op_that_does_not_occur_is_said(caplog: pytest.LogCaptureFixture) -> None:
    compiled_by(none, cuts=("cut::scale3",))(rows(4))
    assert "nothing is cut: none of the splitting ops cut::scale3 occurs" in caplog.text


def test_implementation_is_called_instead_of_the_dispatcher() -> None:
    calls: list[Any] = []

    def direct(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[0])
        return x * 3

    check_like_eager(adjacent, cuts=(SplittingOp("cut::scale3", implementation=direct),), sizes=(4, 2))
    assert calls == [4, 4, 2, 2]


def test_facts_about_an_op_win_over_its_bare_name() -> None:
    calls: list[Any] = []

    def direct(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x * 3

    op = SplittingOp("cut::scale3", implementation=direct)
    for cuts in (("cut.scale3", op), (op, "cut.scale3")):
        calls.clear()
        compiled_by(adjacent, cuts=cuts)(rows(2))
        assert len(calls) == 2


# --- arguments ------------------------------------------------------------------------------------


def test_optional_list_scalar_and_keyword_arguments() -> None:
    def model(x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty_like(x)
        ops.many(x, out, [x, x * 2], extra, n=x.shape[0], flag=False, dims=[x.shape[1], 2])
        ops.many(out, out.view(x.shape), [], s=0.25)
        return out

    check_like_eager(model)
    check_like_eager(model, lambda n: (rows(n), torch.zeros(n, 6)))


def writes_without_saying_so(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    ops.bad(x, out)
    return out + 1


def test_op_that_writes_without_saying_so_is_kept_where_it_splits() -> None:
    check_like_eager(writes_without_saying_so, cuts=("cut::bad",))


def test_op_that_writes_without_saying_so_is_suspect_inside_a_piece() -> None:
    with pytest.warns(PieceworkWarning, match=r"op cut::bad .*ops\.bad\(x, out\).*returns nothing") as warned:
        compiled_by(writes_without_saying_so, cuts=())(rows(4))
    assert len(warned) == 1


def test_error_of_an_op_comes_through_and_the_next_call_works() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        ops.checked(x, out)
        return out + 1

    compiled = compiled_by(model, cuts=("cut::checked",))
    for _ in range(2):
        with pytest.raises(ValueError, match="too big"):
            compiled(torch.full((3, 6), 1e9))
        torch.testing.assert_close(compiled(rows(3)), rows(3) + 1)


def test_set_attention_ops_with_the_plugin_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("piecework_silly_attention")  # registers the op
    monkeypatch.setenv("PIECEWORK_PLUGINS", "-silly_attention")

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        out = torch.empty_like(y)
        torch.ops.silly.attention(y, y, y, out)
        return out * 2

    config = piecework.CompilationConfig(piece_compiler="eager")
    for given, num_pieces in (((), 1), (("silly.attention",), 3)):
        piecework.set_attention_ops(given)
        with counters.expect(num_pieces_seen=num_pieces):
            compiled = piecework.compile(model, config=config)
            assert compiled(torch.zeros(2, 1)).tolist() == [[4], [2]]


def test_fresh_results_of_an_op_survive_the_allocator() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x + 1) * 2 - x

    compiled = compiled_by(model)
    keep = []
    for i in range(12):
        keep.append(torch.empty(1 + 997 * i))
        x = rows(4, seed=i)
        torch.testing.assert_close(compiled(x), model(x))
        if i % 3 == 0:
            keep.clear()


def test_eager_pieces_run_the_graph_of_the_piece() -> None:
    split = split_of(adjacent, rows(2))
    recorder = models.Recorder()
    with plugins(recorder):
        compiled_by(adjacent, piece_compiler="recorder")(rows(2))
    (result,) = eager_piece(recorder.pieces[0]).run(rows(3), 3)
    torch.testing.assert_close(result, rows(3) + 1)
    assert len(split.pieces) == 2
