"""The ways in which each case runs: level, what runs its pieces, captured or not, and where."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import demo
import piecework
from piecework import CompilationConfig, CompileError


@dataclass(frozen=True)
class Way:
    """One combination; ``str`` of it is the test's id."""

    level: int
    pieces: str
    """The piece compiler of level 3, and the backend of level 2."""
    is_captured: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        captured = "-captured" if self.is_captured else ""
        return f"{self.device}-level{self.level}-{self.pieces}{captured}"

    def compile(self, target: Any, *, dims: Any = None, captures: Sequence[Any] | str = (), **config: Any) -> Any:
        """Compile a model or function.

        Args:
            target: the model, on the device of this way.
            dims: ``dynamic_arg_dims``; the first dim of each tensor, if None.
            captures: sizes to capture where this way captures.
            **config: other fields of the config.
        """
        piecework.set_torch_compile_backend(self.pieces)
        settings: dict[str, Any] = {"level": self.level, "splitting_ops": demo.OPS, "piece_compiler": self.pieces}
        settings |= {"capture_sizes": captures if isinstance(captures, str) else tuple(captures)}
        if not self.is_captured:
            settings |= {"capture_sizes": (), "capturer": "none"}
        return piecework.compile(target, config=CompilationConfig(**(settings | config)), dynamic_arg_dims=dims)

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return random numbers on the device of this way."""
        return torch.randn(*shape, dtype=dtype, device=self.device)


PIECES = ("eager", "inductor")
CPU_WAYS = [
    *(Way(2, pieces) for pieces in PIECES),
    *(Way(3, pieces, is_captured) for pieces in PIECES for is_captured in (False, True)),
]
CUDA_WAYS = [Way(way.level, way.pieces, way.is_captured, "cuda") for way in CPU_WAYS]
EAGER_WAY = Way(3, "eager")
CAPTURED_WAY = Way(3, "eager", is_captured=True)


IS_TORCH_2_11 = torch.__version__.startswith("2.11.")


@contextmanager
def slices_of_unknown_length(way: Way | None) -> Iterator[None]:
    """Expect Inductor to refuse, on torch 2.11, what uses slices such as ``x[:2]`` of a dim that varies.

    That torch gives such a slice a size of its own, as if it followed from data: docs/limits.md says so. A way that
    is None refuses nothing.
    """
    if IS_TORCH_2_11 and way is not None and way.pieces == "inductor":
        with pytest.raises(CompileError, match="possible memo disaster|Could not guard on data-dependent expression"):
            yield
    else:
        yield


def check(call: Callable[..., Any], reference: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compare one call with eager: values, dtypes and tree of the result, and the arguments afterwards.

    Returns:
        The result of ``call``.
    """
    args_after, kwargs_after = copy.deepcopy((args, kwargs))
    expected = reference(*args_after, **kwargs_after)
    result = call(*args, **kwargs)
    close(result, expected)
    close((args, kwargs), (args_after, kwargs_after))
    return result


def close(result: Any, expected: Any) -> None:
    """Check values within 1e-5, dtypes, devices and tree."""
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def same(
    way: Way,
    target: Any,
    make_args: Callable[[int], tuple[Any, ...]],
    sizes: Sequence[int],
    *,
    captures: Sequence[Any] | None = None,
    **settings: Any,
) -> Any:
    """Compare one compiled instance with eager for each size in turn, the buffers of a module, too.

    Args:
        way: how to compile.
        target: a module or a function.
        make_args: returns the arguments of a call of so many rows, on the device of ``way``.
        sizes: rows of the calls.
        captures: sizes to capture; those of the calls, if None.
        **settings: as for ``Way.compile``.

    Returns:
        The compiled instance.
    """
    twin = copy.deepcopy(target)
    call = way.compile(target, captures=sorted({*sizes} - {0}) if captures is None else captures, **settings)
    for size in sizes:
        check(call, twin, *make_args(size))
        if isinstance(target, nn.Module):
            close(target.state_dict(), twin.state_dict())
    return call
