"""Compare two results leaf by leaf, and say in words where and by how much they differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

DEFAULT_TOLERANCES: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-9),
    torch.float32: (1e-4, 2e-5),
    torch.float16: (1e-2, 2e-3),
    torch.bfloat16: (5e-2, 1.6e-2),
}
"""By dtype: the relative tolerance, and the absolute one as a share of the largest number in the tensor.

Sums in another order differ by a share of their largest terms, so that one that cancels is far off relative to itself.
"""
FLOAT8_TOLERANCE = (0.25, 0.13)


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may lie apart; None: by dtype, as in ``DEFAULT_TOLERANCES``."""

    rtol: float | None = None
    atol: float | None = None

    def of(self, expected: torch.Tensor) -> tuple[float, float]:
        """Return the relative and the absolute tolerance for one tensor."""
        dtype = expected.real.dtype if expected.is_complex() else expected.dtype
        rtol, share = DEFAULT_TOLERANCES.get(dtype, FLOAT8_TOLERANCE) if dtype.is_floating_point else (0.0, 0.0)
        if self.rtol is not None:
            rtol = self.rtol
        if self.atol is not None or not dtype.is_floating_point:
            return rtol, self.atol or 0.0
        numbers = _as_numbers(expected)
        finite = numbers[numbers.isfinite()]
        return rtol, share * (finite.abs().max().item() if finite.numel() else 0.0)


EXACT = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class Difference:
    """Where two results differ.

    Attributes:
        what: which part of a result.
        text: how it differs, in words.
        largest: the largest difference of two numbers; infinity where one of them is no number, None where the form
            differs already.
        rtol: the relative tolerance that it was compared with.
        atol: the absolute one.
    """

    what: str
    text: str
    largest: float | None = None
    rtol: float = 0.0
    atol: float = 0.0

    def __str__(self) -> str:
        return f"{self.what} {self.text}"


def first_difference(result: Any, expected: Any, what: str, tolerance: Tolerance) -> Difference | None:
    """Return the first leaf in which a result differs from what was expected; None where none does."""
    return next(differences(result, expected, what, tolerance), None)


def differences(result: Any, expected: Any, what: str, tolerance: Tolerance) -> Iterator[Difference]:
    """Yield every leaf in which a result differs: tensors by form and numbers, all else by equality."""
    if isinstance(expected, torch.Tensor):
        difference = _of_tensors(result, expected, what, tolerance)
        if difference is not None:
            yield difference
    elif type(result) is not type(expected):
        yield Difference(what, f"is a {type(result).__qualname__}, expected a {type(expected).__qualname__}")
    elif isinstance(expected, Mapping):
        if list(result) != list(expected):
            yield Difference(what, f"has the keys {list(result)}, expected {list(expected)}")
            return
        for key, item in expected.items():
            yield from differences(result[key], item, f"{what}[{key!r}]", tolerance)
    elif isinstance(expected, (tuple, list)):
        if len(result) != len(expected):
            yield Difference(what, f"has {len(result)} items, expected {len(expected)}")
            return
        for index, item in enumerate(expected):
            yield from differences(result[index], item, f"{what}[{index}]", tolerance)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            pair = getattr(result, field.name), getattr(expected, field.name)
            yield from differences(*pair, f"{what}.{field.name}", tolerance)
    elif not (result is expected or result == expected or (result != result and expected != expected)):  # or both NaN
        yield Difference(what, f"is {result!r:.60}, expected {expected!r:.60}")


def _of_tensors(result: Any, expected: torch.Tensor, what: str, tolerance: Tolerance) -> Difference | None:
    if not isinstance(result, torch.Tensor):
        return Difference(what, f"is a {type(result).__qualname__}, expected a tensor")
    for fact in ("dtype", "shape", "device", "layout"):
        has, should = getattr(result, fact), getattr(expected, fact)
        if has != should:
            pair = (list(has), list(should)) if fact == "shape" else (has, should)
            return Difference(what, "has the {} {}, expected {}".format(fact, *pair))
    rtol, atol = tolerance.of(expected)
    a, b = _as_numbers(result), _as_numbers(expected)
    is_same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs().masked_fill(is_same, 0)
    is_wrong = ~is_same & ~(gap <= atol + rtol * b.abs())
    num_wrong = int(is_wrong.sum())
    if not num_wrong:
        return None
    gap = gap.nan_to_num(math.inf, math.inf).masked_fill(~is_wrong, 0)
    position = int(gap.argmax())
    place = [int(index) for index in torch.unravel_index(torch.tensor(position), b.shape)] if b.dim() else []
    largest = gap.flatten()[position].item()
    numbers = (a.flatten()[position].item(), b.flatten()[position].item())
    text = (
        f"differs in {num_wrong} of {b.numel()} numbers, by up to {largest:.3g}: at {place} it is {numbers[0]:.6g}, "
        f"expected {numbers[1]:.6g} (rtol {rtol:.1g}, atol {atol:.1g})"
    )
    return Difference(what, text, largest, rtol, atol)


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return what can be subtracted: float64, complex numbers as pairs."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
        tensor = tensor.float()  # Eight-bit formats convert to no other.
    return tensor.double()


def clone(value: Any) -> Any:
    """Return a nest of results with copies of its tensors, laid out alike."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        items = [clone(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: clone(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {key: clone(item) for key, item in value.items()}
    return value
