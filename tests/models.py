"""Ops and small models that several tests share; annotations here are real ones, those of the tests are strings."""

import copy
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import piecework
from piecework import CompilationConfig


@torch.library.custom_op("models::attn", mutates_args=("out",))
def attn(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``q + 2 * k``."""
    out.copy_(q + 2 * k)


@attn.register_fake
def _(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> None:
    return None


@torch.library.custom_op("models::scale3", mutates_args=())
def scale3(x: torch.Tensor) -> torch.Tensor:
    """Return a fresh ``3 * x``."""
    return x * 3


@scale3.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("models::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x + 1`` and ``x - 1``."""
    return x + 1, x - 1


@pair.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("models::checked", mutates_args=("out",))
def checked(x: torch.Tensor, out: torch.Tensor) -> None:
    """Copy ``x``, and refuse large values."""
    if x.sum() > 1e6:
        raise ValueError("too big for models::checked")
    out.copy_(x)


@checked.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None


def _triple_gradient(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 3


scale3.register_autograd(_triple_gradient)  # so that a model can train where it is not compiled

OPS = ("models::attn", "models::scale3", "models::pair", "models::checked")

both_levels = pytest.mark.parametrize("level", [2, 3])


def rows(n: int, width: int = 6) -> torch.Tensor:
    return torch.randn(n, width)


def compiled(target: Any, level: int = 3, dims: Mapping[str, Any] | None = None, **config: Any) -> Any:
    """Compile with eager pieces, cut at the ops above."""
    settings = CompilationConfig(**{"level": level, "splitting_ops": OPS, "piece_compiler": "eager", **config})
    return piecework.compile(target, config=settings, dynamic_arg_dims=dims)


def use_level(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    """Let decorated classes compile with eager pieces at a level."""
    monkeypatch.setenv("PIECEWORK_LEVEL", str(level))
    piecework.set_compilation_config(CompilationConfig(splitting_ops=OPS, piece_compiler="eager"))


def refuses(call: Callable[..., Any], *args: Any, match: str, **kwargs: Any) -> None:
    with pytest.raises(piecework.TraceDepartureError, match=match):
        call(*args, **kwargs)


def assert_same(call: Callable[..., Any], reference: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Check that both give the same result, and do the same to their arguments."""
    args2, kwargs2 = copy.deepcopy((args, kwargs))
    with torch.no_grad():
        result, expected = call(*args, **kwargs), reference(*args2, **kwargs2)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        [a for a in args if isinstance(a, torch.Tensor)], [a for a in args2 if isinstance(a, torch.Tensor)]
    )


def attend(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.models.attn(x + 1, x, out)
    return out * 2


class Linear(nn.Module):
    """Two pieces around an op; the smallest model with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(self.linear(x)) * self.scale


class Stack(nn.Module):
    """Many parameters, so that not all addresses are compared at each call."""

    def __init__(self, num_layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.ops.models.scale3(layer(x)) * 0.3
        return x


def example(name: str) -> ModuleType:
    """Return a program of ``examples/``, imported once in a process: it registers ops."""
    own = f"{name}_of_the_tests"
    if own not in sys.modules:
        spec = importlib.util.spec_from_file_location(own, Path(__file__).parents[1] / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[own] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[own])
    return sys.modules[own]
