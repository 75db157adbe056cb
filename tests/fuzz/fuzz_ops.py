"""Ops and submodules of the programs that the fuzz makes: real ones, with right fakes and declarations.

Programs use them by ``torch.ops.fuzz``. Each op stands for one form that a splitting op may have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from piecework import SplittingOp

library = torch.library.Library("fuzz", "DEF")


def _fresh(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x * 0.5 + 1)


def _attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(q * 0.5 - k + v)


def _double_(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def _bump_(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.add_(n)


def _tail_(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)[..., 1:]


def _pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x).copy_(x + 1), torch.empty_like(x).copy_(x - 1)


def _rotate_(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.mul_(2), k.add_(1)


def _parts(x: torch.Tensor, num: int) -> list[torch.Tensor]:
    return [torch.empty_like(x).copy_(x + i) for i in range(num)]


def _joined(xs: Sequence[torch.Tensor], bias: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
    out = torch.empty_like(xs[0])
    total = torch.stack([x.to(torch.float64) for x in xs]).sum(0) * scale
    return out.copy_(total if bias is None else total + bias)


def _shift(x: torch.Tensor, n: int, *, name: str = "up") -> torch.Tensor:
    return torch.empty_like(x).copy_(x + n if name == "up" else x - n)


def _log(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    count.add_(1)
    return torch.empty_like(x).copy_(x + 3)


def _bump_all(xs: Sequence[torch.Tensor]) -> None:
    for x in xs:
        x.add_(1)


def _fill(x: torch.Tensor, out: torch.Tensor, extra: torch.Tensor | None = None, *, times: int = 1) -> None:
    out.copy_(x * times)
    if extra is not None:
        extra.copy_(x + 2)


def _mix(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x + x.sum(0, keepdim=True))


def _checked(x: torch.Tensor) -> torch.Tensor:
    if bool((x > 1000).any()):
        raise ValueError("a value above 1000 came to fuzz::checked")
    return torch.empty_like(x).copy_(x)


def _narrow(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], 2).copy_(x[:, :2])


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[1], x.shape[0]).copy_(x.t()).t()


def _store(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    cache.index_copy_(0, slots, x)


def _none(*_: Any, **__: Any) -> None:
    return None


def _like(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _like_first(xs: Sequence[torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(xs[0])


def _of_op(schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> str:
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fuzz::{name}", fake, lib=library)
    return f"fuzz::{name}"


OPS = tuple(
    _of_op(*one)
    for one in (
        ("fresh(Tensor x) -> Tensor", _fresh, _like),
        ("attn(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()", _attn, _none),
        ("double_(Tensor(a!) x) -> Tensor(a!)", _double_, lambda x: x),
        ("bump_(Tensor(a!) x, SymInt n) -> Tensor(a!)", _bump_, lambda x, n: x),
        ("tail_(Tensor(a!) x) -> Tensor(a!)", _tail_, lambda x: x[..., 1:]),
        ("pair(Tensor x) -> (Tensor, Tensor)", _pair, lambda x: (torch.empty_like(x), torch.empty_like(x))),
        ("rotate_(Tensor(a!) q, Tensor(b!) k) -> (Tensor(a!), Tensor(b!))", _rotate_, lambda q, k: (q, k)),
        ("parts(Tensor x, int num) -> Tensor[]", _parts, lambda x, num: [torch.empty_like(x) for _ in range(num)]),
        ("joined(Tensor[] xs, Tensor? bias=None, *, float scale=1.0) -> Tensor", _joined, _like_first),
        ('shift(Tensor x, SymInt n, *, str name="up") -> Tensor', _shift, _like),
        ("log(Tensor x, Tensor(a!) count) -> Tensor", _log, _like),
        ("bump_all(Tensor(a!)[] xs) -> ()", _bump_all, _none),
        ("fill(Tensor x, Tensor(a!) out, Tensor(b!)? extra=None, *, int times=1) -> ()", _fill, _none),
        ("mix(Tensor x) -> Tensor", _mix, _like),
        ("checked(Tensor x) -> Tensor", _checked, _like),
        ("narrow(Tensor x) -> Tensor", _narrow, lambda x: x.new_empty(x.shape[0], 2)),
        ("turned(Tensor x) -> Tensor", _turned, lambda x: x.new_empty(x.shape[1], x.shape[0]).t()),
        ("store(Tensor x, Tensor(a!) cache, Tensor slots) -> ()", _store, _none),
    )
)  # fmt: skip

MIXING = frozenset({"fuzz::mix", "fuzz::turned"})
"""Ops whose rows depend on others, or are no rows of dim 0."""

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"fuzz::fresh": _fresh, "fuzz::attn": _attn, "fuzz::pair": _pair}


def splitting_op(name: str, *, capturable: bool | int = False, direct: bool = False) -> str | SplittingOp:
    """Return a splitting op as the settings take it; a number for ``capturable`` is the largest size that is."""
    if name not in OPS:
        return name

    def up_to(size: int | dict[str, int]) -> bool:
        return max(size.values() if isinstance(size, dict) else (size,)) <= capturable

    return SplittingOp(
        name,
        capturable=capturable if isinstance(capturable, bool) else up_to,
        rows_independent=name not in MIXING,
        implementation=IMPLEMENTATIONS.get(name) if direct else None,
    )


# --- values -----------------------------------------------------------------------------------------


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, kind: str = "plain") -> torch.Tensor:
    """Return numbers that depend on the arguments alone; floats are eighths, so that small sums are exact.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        seed: other numbers for each.
        kind: ``"index"`` for numbers from 0 to 3, ``"slots"`` for different ones below 12.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "slots":
        (num,) = shape
        return torch.randperm(12, generator=generator)[:num].to(dtype)
    if kind == "index":
        return torch.randint(0, 4, shape, generator=generator).to(dtype)
    drawn = torch.randint(-16, 17, shape, generator=generator)
    if dtype is torch.bool:
        return drawn > 0
    return (drawn.double() / 8).to(dtype) if dtype.is_floating_point else drawn.to(dtype)


def settle(model: nn.Module) -> nn.Module:
    """Give every parameter numbers that are exact in eighths."""
    for index, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            parameter.copy_(values(*parameter.shape, seed=1000 + index).clamp(-1, 1))
    return model


# --- submodules -------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * 0.25


class Attend(nn.Module):
    """A layer around an op that writes its result."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        out = torch.empty_like(q)
        torch.ops.fuzz.attn(q, k, v, out)
        return x + out * 0.25


class Counted(nn.Module):
    """A layer with buffers that it writes to, one of them not kept in its state."""

    calls: torch.Tensor
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y = self.norm(x)
        self.last.copy_(y.reshape(-1, 4).sum(0))
        return y + self.last * 0.125
