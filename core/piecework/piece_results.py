"""Look at what a compiled piece returns the first time: the code around it would unpack anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from piecework import torch_internals as internals
from piecework.effects import Effects
from piecework.errors import PluginError
from piecework.inputs import Sizes
from piecework.split import PieceStep


class ResultCheck:
    """Knows what a piece has to return, as it was traced.

    Args:
        step: where the piece stands.
        effects: has the traced values.
        sizes: what the symbols of the graph mean.
        compiler: name of the plugin that compiled the piece; ``"eager"`` for none.
    """

    def __init__(self, step: PieceStep, effects: Effects, sizes: Sizes, compiler: str) -> None:
        self.step, self.effects, self.sizes, self.compiler = step, effects, sizes, compiler

    def __call__(self, results: object, args: Sequence[Any]) -> None:
        """Check what one run gave.

        Args:
            results: what it returned.
            args: what it was called with, which sizes of results follow from.

        Raises:
            PluginError: it is no tuple of tensors, or they are of other dtypes, devices or shapes than traced.
        """
        outputs = self.step.outputs
        allowed = f"a tuple of {len(outputs)} tensor{'s' * (len(outputs) != 1)}"
        if not isinstance(results, (tuple, list)):
            raise self.error(f"returned {_described(results)}, allowed: {allowed}")
        if len(results) != len(outputs):
            raise self.error(f"returned {len(results)} results, allowed: {allowed}")
        numbers = self.numbers(args)
        for index, (result, node) in enumerate(zip(results, outputs, strict=True)):
            if isinstance(self.effects.values[node], torch.Tensor):
                self.check(f"result {index}", result, self.effects.values[node], numbers)

    def check(self, what: str, result: object, traced: torch.Tensor, numbers: dict[Any, Any]) -> None:
        if not isinstance(result, torch.Tensor):
            raise self.error(f"returned {_described(result)} as {what}, allowed: a tensor")
        shape = [self.number(size, numbers) for size in traced.shape]
        fits = len(shape) == result.dim() and all(
            size is None or size == real for size, real in zip(shape, result.shape, strict=True)
        )
        if not fits or (result.dtype, result.device) != (traced.dtype, traced.device):
            wanted = f"{traced.dtype}{['?' if size is None else size for size in shape]} on {traced.device}"
            raise self.error(f"returned {_described(result)} as {what}, traced as {wanted}")

    def numbers(self, args: Sequence[Any]) -> dict[Any, Any]:
        """Return the value of each symbol that the inputs tell."""
        numbers: dict[Any, Any] = {}
        for value, arg in zip(self.step.inputs, args, strict=True):
            if isinstance(value, sympy.Symbol):
                numbers[value] = sympy.Integer(arg)
            elif isinstance(value, Node) and isinstance(arg, torch.Tensor):
                for size, real in zip(self.effects.values[value].shape, arg.shape, strict=True):
                    symbol = internals.size_expression(size, self.sizes.shape_env)
                    if isinstance(symbol, sympy.Symbol):
                        numbers[symbol] = sympy.Integer(real)
        return numbers

    def number(self, size: int | torch.SymInt, numbers: dict[Any, Any]) -> int | None:
        """Return a size as a number; None where it follows from data."""
        expression = internals.size_expression(size, self.sizes.shape_env).xreplace(numbers)
        return None if expression.free_symbols else int(internals.evaluate_number(expression))

    def error(self, what: str) -> PluginError:
        """Return the error that says whose fault it is."""
        name = self.step.name
        if self.compiler == "eager":
            return PluginError(f"{name}, op by op, {what}; the fake implementation of an op in it tells otherwise")
        return PluginError(f"what plugin {self.compiler!r} compiled for {name} {what}")


class FirstCall:
    """Runs a piece in the place of its function until its results were looked at once.

    Args:
        run: the compiled piece.
        check: looks at the results.
        namespace: of the code that calls it.
        name: of the piece, in that code.
    """

    def __init__(self, run: Callable[..., Any], check: ResultCheck, namespace: dict[str, Any], name: str) -> None:
        self.run, self.check, self.namespace, self.name = run, check, namespace, name

    def __call__(self, *args: Any) -> Any:
        results = self.run(*args)
        self.check(results, args)
        self.namespace[self.name] = self.run
        return results


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {value.dtype}{list(value.shape)} on {value.device}"
    return f"{type(value).__name__} {str(value)[:60]}"
