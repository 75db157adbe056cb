"""Ops, compilers and helpers that the tests of splitting, dedupe, compiling and running share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

import piecework
from piecework import CompilationConfig, CompiledPiece, Piece, SplittingOp, hookimpl
from piecework import torch_internals as internals
from piecework.api import forward_of
from piecework.build import Compiled
from piecework.split import EagerStep, PieceStep, SplitGraph

# --- ops by torch.library.custom_op -------------------------------------------------------------


@torch.library.custom_op("cut::attn", mutates_args=("out",))
def attn(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(q + 2 * k)


@torch.library.custom_op("cut::scale3", mutates_args=())
def scale3(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@torch.library.custom_op("cut::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x - 1


@torch.library.custom_op("cut::parts", mutates_args=())
def parts(x: torch.Tensor, num: int) -> list[torch.Tensor]:
    return [x * i for i in range(num)]


@torch.library.custom_op("cut::update", mutates_args=("cache",))
def update(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache[: x.shape[0]] += x
    return x.new_empty(0)


@torch.library.custom_op("cut::attn_token", mutates_args=("out",))
def attn_token(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, token: torch.Tensor) -> None:
    out.copy_(q + 2 * k)


@torch.library.custom_op("cut::many", mutates_args=("out", "extra"))
def many(
    q: torch.Tensor,
    out: torch.Tensor,
    ks: list[torch.Tensor],
    extra: Optional[torch.Tensor] = None,  # noqa: UP045 - custom_op reads it
    n: int = 1,
    s: float = 0.5,
    flag: bool = True,
    name: str = "a",
    dims: Optional[list[int]] = None,  # noqa: UP045
) -> None:
    total = (q * n * s if flag else q) + len(name) + sum(dims or [])
    out.copy_(total + sum(ks, torch.zeros(())))
    if extra is not None:
        extra.add_(out)


@torch.library.custom_op("cut::named", mutates_args=())
def named(x: torch.Tensor, weight: torch.Tensor, scale: float, layer: str) -> torch.Tensor:
    return x * weight * scale


torch.library.define("cut::same", "(Tensor(a) x) -> Tensor(a)")


@torch.library.impl("cut::same", "default")
def same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


@torch.library.register_fake("cut::same")
def same_fake(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


@torch.library.custom_op("cut::checked", mutates_args=("out",))
def checked(x: torch.Tensor, out: torch.Tensor) -> None:
    if x.sum() > 1e6:
        raise ValueError("too big")
    out.copy_(x)


@torch.library.custom_op("cut::bad", mutates_args=())
def bad(q: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(q * 7)


spied: list[Callable[[], None]] = []
"""Called by ``cut::spy`` while it runs with real tensors."""


@torch.library.custom_op("cut::spy", mutates_args=())
def spy(x: torch.Tensor) -> torch.Tensor:
    for look in spied:
        look()
    return x.clone()


for op in (attn, attn_token, many, checked, bad):
    op.register_fake(lambda *args, **kwargs: None)
for op in (scale3, spy):
    op.register_fake(lambda x: torch.empty_like(x))
named.register_fake(lambda x, weight, scale, layer: torch.empty_like(x))
pair.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
parts.register_fake(lambda x, num: [torch.empty_like(x) for _ in range(num)])
update.register_fake(lambda x, cache: x.new_empty(0))

# --- ops by Library.define ------------------------------------------------------------------------

library = torch.library.Library("cutlib", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.define("twice.scaled(Tensor x, float scale) -> Tensor")
library.define("fill(Tensor x, Tensor(a!) out) -> ()")
library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
library.impl("twice.scaled", lambda x, scale: x * 2 * scale, "CompositeExplicitAutograd")


def fill(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 5)


library.impl("fill", fill, "CompositeExplicitAutograd")
torch.library.register_fake("cutlib::twice", lambda x: torch.empty_like(x), lib=library)
torch.library.register_fake("cutlib::twice.scaled", lambda x, scale: torch.empty_like(x), lib=library)
torch.library.register_fake("cutlib::fill", lambda x, out: None, lib=library)

ops = torch.ops.cut
CUTS = tuple(f"cut::{name}" for name in ("attn", "scale3", "pair", "parts", "update", "attn_token", "many", "spy"))

# --- compiling and comparing ----------------------------------------------------------------------


def compiled_by(
    model: Any,
    *,
    cuts: Sequence[str | SplittingOp] = CUTS,
    dims: Any = None,
    piece_compiler: str | None = "eager",
    **settings: Any,
) -> Any:
    """Compile at level 3, by eager pieces unless said otherwise."""
    config = CompilationConfig(level=3, splitting_ops=tuple(cuts), piece_compiler=piece_compiler, **settings)
    return piecework.compile(model, config=config, dynamic_arg_dims=dims)


def rows(num: int, width: int = 6, *, seed: int = 0) -> torch.Tensor:
    """Return random rows that depend on the arguments alone."""
    return torch.randn(num, width, generator=torch.Generator().manual_seed(100 * seed + num))


def one(num: int) -> tuple[torch.Tensor, ...]:
    return (rows(num),)


def two(num: int) -> tuple[torch.Tensor, ...]:
    return rows(num), rows(num, seed=1)


def check_like_eager(
    model: Any,
    make: Callable[[int], tuple[Any, ...]] = one,
    *,
    sizes: Sequence[int] = (4, 2, 7, 1),
    cuts: Sequence[str | SplittingOp] = CUTS,
    dims: Any = None,
    rtol: float = 1e-5,
    **settings: Any,
) -> Compiled:
    """Compare results and arguments after the call with eager at each size, in turn on one trace."""
    compiled = compiled_by(model, cuts=cuts, dims=dims, **settings)
    for size in sizes:
        by_eager = make(size)
        given = copy.deepcopy(by_eager)
        with torch.no_grad():
            reference = model(*by_eager)
            result = compiled(*given)
        torch.testing.assert_close(result, reference, rtol=rtol, atol=rtol)
        torch.testing.assert_close(given, by_eager, rtol=rtol, atol=rtol)
        for tensor in internals.pytree.tree_leaves(result):
            assert not isinstance(tensor, torch.Tensor) or type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return compiled_state(compiled)


def compiled_state(model: Any) -> Compiled:
    """Return what a compiled model became."""
    compiled = forward_of(model, "test").compiled
    assert compiled is not None
    return compiled


def split_of(model: Any, *args: Any, **kwargs: Any) -> SplitGraph:
    """Compile for one call and return the split graph."""
    compiled = compiled_by(model, **kwargs)
    compiled(*args)
    split = compiled_state(compiled).split
    assert split is not None
    return split


def check_pieces(split: SplitGraph) -> None:
    """Check what holds for every piece: outputs are tensors, none a view of an input or of another output."""
    for piece in split.pieces:
        inside = internals.pytree.tree_leaves([node.meta["example_value"] for node in _nodes(piece, "placeholder")])
        assert all(isinstance(value, (torch.Tensor, torch.SymInt, int)) for value in inside)
        keys: list[int | None] = []
        for node in piece.outputs:
            assert isinstance(split.effects.values[node], torch.Tensor), node
            keys += split.effects.storages[node]
        written = {key for keys in split.effects.written.values() for key in keys}
        given = [node for node in piece.inputs if isinstance(node, torch.fx.Node)]
        taken = [key for node in given for key in split.effects.storages[node]]
        assert len(set(keys)) == len(keys), f"results of {piece.name} share memory"
        assert not set(keys) & (set(taken) - written), f"{piece.name} returns a view of an input"
    crossing = [key for piece in split.pieces for node in piece.outputs for key in split.effects.storages[node]]
    assert len(set(crossing)) == len(crossing), "a value crosses cuts together with a view of it"
    for step in split.steps:
        assert not isinstance(step, EagerStep) or step.nodes


def _nodes(piece: PieceStep, op: str) -> list[torch.fx.Node]:
    return list(piece.graph.graph.find_nodes(op=op))


# --- compilers ------------------------------------------------------------------------------------


class Recorder:
    """A piece compiler that keeps what it is given, runs pieces as they are, and counts their calls."""

    name = "recorder"

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.num_runs: list[int] = []

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        index = len(self.pieces)
        self.pieces.append(piece)
        self.num_runs.append(0)

        def run(*inputs: Any) -> Any:
            self.num_runs[index] += 1
            return piece.graph.forward(*inputs)

        return CompiledPiece(run)


class FailsAt:
    """A piece compiler that fails at one piece, counted from 1: raises, or answers with what it is given."""

    name = "fails_at"

    def __init__(self, number: int, answer: Any) -> None:
        self.number = number
        self.answer = answer
        self.count = 0

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece | None:
        self.count += 1
        if self.count == self.number:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer
        return CompiledPiece(piece.graph.forward)
