"""Look once at what a compiled piece is given and gives: its code, and the code around it, would take anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from piecework import torch_internals as internals
from piecework.effects import Effects, line_of, op_name
from piecework.errors import CompileError, PluginError
from piecework.inputs import Sizes
from piecework.pieces import EAGER, PieceRun
from piecework.split import PieceStep

Numbers = Mapping[sympy.Basic, sympy.Basic]


def piece_check(step: PieceStep, piece: PieceRun, effects: Effects, sizes: Sizes) -> PieceCheck | None:
    """Return what looks at a compiled piece; None for one that runs op by op: as eager does, whatever was traced."""
    return None if piece.compiler == EAGER else PieceCheck(step, effects, sizes, piece.origin)


@dataclass(frozen=True)
class Traced:
    """What a trace says about a tensor: read once, since its fake one lies while another thread runs fakes.

    While ops run on fakes of a mode, ``device`` of all its tensors is ``meta``, in every thread.
    """

    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    shape: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]

    @classmethod
    def of(cls, value: object, sizes: Sizes) -> Traced | None:
        """Return it for a traced value; None for one that is no tensor."""
        if not isinstance(value, torch.Tensor):
            return None
        steps = value.stride() if value.layout is torch.strided else ()
        shape, strides = (
            tuple(internals.size_expression(size, sizes.shape_env) for size in given) for given in (value.shape, steps)
        )
        return cls(value.dtype, value.device, value.layout, shape, strides)


class PieceCheck:
    """Compares what goes in and out of a compiled piece with what was traced.

    That is dtypes, devices and shapes, and of what goes in strides, too.

    Args:
        step: where the piece stands.
        effects: has the traced values.
        sizes: what the symbols of the graph mean.
        origin: the plugin that compiled the piece, and its distribution.
    """

    def __init__(self, step: PieceStep, effects: Effects, sizes: Sizes, origin: str) -> None:
        self.step, self.origin = step, origin
        self.traced = {
            node: Traced.of(effects.values[node], sizes)
            for node in (*step.inputs, *step.outputs)
            if isinstance(node, Node)
        }

    def inputs(self, args: Sequence[Any]) -> None:
        """Check what the piece is called with, before its code reads memory by what was traced.

        Raises:
            CompileError: an op before it gave something else than its fake implementation.
        """
        numbers = self.numbers(args)
        for value, arg in zip(self.step.inputs, args, strict=True):
            traced = self.traced[value] if isinstance(value, Node) else None
            if traced is None:
                continue
            differs = self.difference(arg, traced, numbers) or self.other_strides(arg, traced, numbers)
            if differs is not None:
                assert isinstance(value, Node)
                raise CompileError(
                    f"{self.step.name} was compiled for {value.name!r} as {differs}; {op_name(value) or value.target}"
                    f"{line_of(value)} gives something else than its fake implementation, which is to be mended"
                )

    def results(self, results: object, args: Sequence[Any]) -> None:
        """Check what one run gave.

        Args:
            results: what it returned.
            args: what it was called with, which sizes of results follow from.

        Raises:
            PluginError: it is no tuple of tensors, or they are not as traced.
        """
        outputs = self.step.outputs
        allowed = f"a tuple of {len(outputs)} tensor{'s' * (len(outputs) != 1)}"
        if not isinstance(results, (tuple, list)):
            raise self.error(f"returned {_described(results)}, allowed: {allowed}")
        if len(results) != len(outputs):
            raise self.error(f"returned {len(results)} results, allowed: {allowed}")
        numbers = self.numbers(args)
        for index, (result, node) in enumerate(zip(results, outputs, strict=True)):
            traced = self.traced[node]
            if traced is None:
                continue  # A number that follows from data.
            if differs := self.difference(result, traced, numbers):
                raise self.error(f"returned result {index} not as {differs}")

    def difference(self, real: object, traced: Traced, numbers: Numbers) -> str | None:
        """Return what was traced and what is there, where that differs."""
        sizes = [self.number(size, numbers) for size in traced.shape]
        if isinstance(real, torch.Tensor) and not isinstance(real, internals.FakeTensor) and not real.is_nested:
            facts = (real.dtype, real.device, real.layout, real.dim())
            if facts == (traced.dtype, traced.device, traced.layout, len(traced.shape)) and all(
                size in (None, length) for size, length in zip(sizes, real.shape, strict=True)
            ):
                return None
        wanted = ["?" if size is None else size for size in sizes]
        return f"a tensor {traced.dtype}{wanted} on {traced.device}, as it was traced, but {_described(real)}"

    def other_strides(self, real: torch.Tensor, traced: Traced, numbers: Numbers) -> str | None:
        """Return the strides that were traced and those that are there, where elements are elsewhere by them."""
        if real.layout is not torch.strided or not real.numel():
            return None
        wanted = [self.number(step, numbers) for step in traced.strides]
        there = zip(real.shape, real.stride(), wanted, strict=True)
        if not any(size > 1 and step not in (None, has) for size, has, step in there):
            return None
        known = tuple("?" if step is None else step for step in wanted)
        return f"a tensor with strides {known}, as it was traced, but they are {tuple(real.stride())}"

    def numbers(self, args: Sequence[Any]) -> Numbers:
        """Return the value of each symbol that the inputs tell, those that are given as such before others."""
        numbers: dict[sympy.Basic, sympy.Basic] = {}
        for value, arg in zip(self.step.inputs, args, strict=True):
            if isinstance(value, sympy.Symbol):
                numbers[value] = sympy.Integer(arg)
        for value, arg in zip(self.step.inputs, args, strict=True):
            traced = self.traced[value] if isinstance(value, Node) else None
            if traced is not None and isinstance(arg, torch.Tensor) and arg.dim() == len(traced.shape):
                for size, length in zip(traced.shape, arg.shape, strict=True):
                    if isinstance(size, sympy.Symbol):
                        numbers.setdefault(size, sympy.Integer(length))
        return numbers

    def number(self, size: sympy.Expr, numbers: Numbers) -> int | None:
        """Return a size as a number; None where it follows from data."""
        expression = size.xreplace(dict(numbers))
        return None if expression.free_symbols else int(internals.evaluate_number(expression))

    def error(self, what: str) -> PluginError:
        """Return the error that says whose fault it is."""
        return PluginError(f"what {self.origin} compiled for {self.step.name} {what}")


class FirstCall:
    """Runs a piece in the place of its function until it was looked at once.

    Args:
        run: the compiled piece.
        check: looks at what goes in and out.
        namespace: of the code that calls it.
    """

    def __init__(self, run: Callable[..., Any], check: PieceCheck, namespace: dict[str, Any]) -> None:
        self.run, self.check, self.namespace = run, check, namespace

    def __call__(self, *args: Any) -> Any:
        self.check.inputs(args)
        results = self.run(*args)
        self.check.results(results, args)
        self.namespace[self.check.step.name] = self.run
        return results


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {repr(value)[:60]!r}"
    if value.is_nested or isinstance(value, internals.FakeTensor):
        return f"a {'nested' if value.is_nested else 'fake'} tensor"
    layout = "" if value.layout is torch.strided else f"{value.layout} "
    return f"a tensor {layout}{value.dtype}{list(value.shape)} on {value.device}"
