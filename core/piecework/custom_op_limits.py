"""What plugins bring for custom ops: implementations, and where each may be chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from piecework.config_checks import show
from piecework.errors import ConfigError

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Dim = int | Literal["rows"]
"""A dim of a tensor, counted from the end if negative, or all dims but the last taken together."""


class TensorForm(NamedTuple):
    """What is known of a tensor when an implementation is chosen."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | None, ...]
    """None where a dim varies between the calls that the choice is for."""


def form_of(tensor: torch.Tensor) -> TensorForm:
    """Return the form of a tensor that is there, all of whose dims are known."""
    return TensorForm(tensor.dtype, tensor.device, tuple(tensor.shape))


@dataclass(frozen=True, kw_only=True, eq=False)
class Limits:
    """Where an implementation of a custom op may be chosen; outside, the next candidate is looked at.

    All but ``min_capability`` are about one tensor among the arguments of a call, the first if none is named. A dim
    that varies between the calls of one compilation has no size that could lie within a limit, so that the
    implementation is skipped there.

    Also a decorator for methods of a ``CustomOp``::

        @Limits(dtypes=(torch.bfloat16, torch.float16), multiples={-1: 8}, sizes={"rows": (1, 512)})
        def forward_cuda(self, x): ...

    Args:
        dtypes: the allowed ones; empty: any.
        sizes: the smallest and the largest allowed size of a dim, None for no bound. Dims are numbers as in
            ``tensor.size(dim)``, and ``"rows"`` stands for the product of all but the last.
        multiples: by dim, what its size must be divisible by.
        argument: the name of the parameter whose tensor is looked at.
        has_gradient: it may run where its result is asked for gradients; a kernel without a backward would lose them.
        min_capability: the least compute capability of a CUDA device, such as ``(9, 0)``; no other device has one.

    Raises:
        ConfigError: a limit is not of that form.
    """

    dtypes: Sequence[torch.dtype] = ()
    sizes: Mapping[Dim, tuple[int | None, int | None]] = field(default_factory=dict)
    multiples: Mapping[Dim, int] = field(default_factory=dict)
    argument: str | None = None
    has_gradient: bool = False
    min_capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dtypes, torch.dtype) or not all(isinstance(dtype, torch.dtype) for dtype in self.dtypes):
            raise ConfigError(f"Limits: dtypes must be a tuple of torch dtypes, got {show(self.dtypes)}")
        for dim in (*self.sizes, *self.multiples):
            if dim != "rows" and (not isinstance(dim, int) or isinstance(dim, bool)):
                raise ConfigError(f"Limits: a dim must be an integer or 'rows', got {show(dim)}")
        for dim, bounds in self.sizes.items():
            are_two = isinstance(bounds, tuple | list) and len(bounds) == 2
            if not are_two or not all(bound is None or _is_count(bound) for bound in bounds):
                raise ConfigError(f"Limits: sizes[{dim!r}] must be (smallest, largest), got {show(bounds)}")
            if None not in bounds and bounds[0] > bounds[1]:  # pyright: ignore[reportOperatorIssue]
                raise ConfigError(f"Limits: sizes[{dim!r}] holds no size, got {show(bounds)}")
        for dim, factor in self.multiples.items():
            if not _is_count(factor) or factor < 1:
                raise ConfigError(f"Limits: multiples[{dim!r}] must be a positive integer, got {show(factor)}")
        capability = self.min_capability
        are_two = isinstance(capability, tuple | list) and len(capability) == 2 and all(map(_is_count, capability))
        if capability is not None and not are_two:
            raise ConfigError(f"Limits: min_capability must be like (9, 0), got {show(capability)}")
        if self.argument is not None and not isinstance(self.argument, str):
            raise ConfigError(f"Limits: argument must be the name of a parameter, got {show(self.argument)}")

    def __call__(self, function: FunctionT) -> FunctionT:
        """Give a method of a ``CustomOp`` these limits."""
        vars(function)["__piecework_limits__"] = self
        return function

    def refusal_of_device(self, device: torch.device) -> str | None:
        """Return why not on this device, or None."""
        if self.min_capability is None:
            return None
        needed = "{}.{}".format(*self.min_capability)
        if device.type != "cuda":
            return f"it needs a CUDA device of compute capability {needed} or more, and runs on {device.type}"
        capability = torch.cuda.get_device_capability(device)
        if capability >= tuple(self.min_capability):
            return None
        return "compute capability {}.{}, needed: {} or more".format(*capability, needed)

    def refusal(self, form: TensorForm | None) -> str | None:
        """Return why not for calls whose tensor is of this form, or None."""
        if not (self.dtypes or self.sizes or self.multiples):
            return None
        if form is None:
            return "no argument is a tensor" if self.argument is None else f"{self.argument} is no tensor"
        if self.dtypes and form.dtype not in self.dtypes:
            return f"dtype {_short(form.dtype)}, allowed: {', '.join(map(_short, self.dtypes))}"
        for dim, (smallest, largest) in self.sizes.items():
            size = _size(form.shape, dim)
            if size is None or size < (smallest or 0) or (largest is not None and size > largest):
                return f"{_named(dim, size, form)}, allowed: {_range(smallest, largest)}"
        for dim, factor in self.multiples.items():
            size = _size(form.shape, dim)
            if size is None or size % factor:
                return f"{_named(dim, size, form)}, allowed: multiples of {factor}"
        return None

    def __str__(self) -> str:
        parts = [", ".join(map(_short, self.dtypes))] if self.dtypes else []
        parts += [f"{_name(dim)} {_range(*bounds)}" for dim, bounds in self.sizes.items()]
        parts += [f"{_name(dim)} a multiple of {factor}" for dim, factor in self.multiples.items()]
        about = f"{self.argument}: " if self.argument is not None and parts else ""
        parts += ["compute capability {}.{} or more".format(*self.min_capability)] if self.min_capability else []
        return about + "; ".join(parts)


NO_LIMITS = Limits()


@dataclass(frozen=True, eq=False)
class CustomOpImplementation:
    """What a plugin brings for custom ops of one name.

    Args:
        function: called as ``function(op, *args, **kwargs)`` with what ``forward_native`` of the op is called with,
            and must return the same: same form, shapes and dtypes. Dynamo traces it, so that it calls torch ops.
        name: shown in reports; left out, the function's name.
        limits: where it may be chosen.
        attributes: names of attributes that it reads from the op, such as ``("weight", "eps")``; an op without one of
            them is not given to it.

    Raises:
        ConfigError: one of these is something else.
    """

    function: Callable[..., Any]
    name: str = field(default="", kw_only=True)
    limits: Limits = field(default=NO_LIMITS, kw_only=True)
    attributes: Sequence[str] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        what = f"CustomOpImplementation {self.name!r}"
        if not callable(self.function):
            raise ConfigError(f"{what}: function must be callable, got {show(self.function)}")
        if not isinstance(self.name, str):
            raise ConfigError(f"CustomOpImplementation: name must be a string, got {show(self.name)}")
        if not isinstance(self.limits, Limits):
            raise ConfigError(f"{what}: limits must be Limits(...), got {show(self.limits)}")
        names = self.attributes
        if isinstance(names, str) or not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise ConfigError(f"{what}: attributes must be a tuple of names such as ('weight',), got {show(names)}")

    @property
    def title(self) -> str:
        """Return the name to show."""
        return self.name or getattr(self.function, "__name__", type(self.function).__name__)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _size(shape: tuple[int | None, ...], dim: Dim) -> int | None:
    if dim == "rows":
        product = 1
        for size in shape[:-1]:
            if size is None:
                return None
            product *= size
        return product
    return shape[dim] if -len(shape) <= dim < len(shape) else None


def _named(dim: Dim, size: int | None, form: TensorForm) -> str:
    if size is not None:
        return f"{_name(dim)} {'are' if dim == 'rows' else 'is'} {size}"
    if dim != "rows" and not -len(form.shape) <= dim < len(form.shape):
        return f"there is no {_name(dim)} among {len(form.shape)}"
    return f"{_name(dim)} {'vary' if dim == 'rows' else 'varies'}"


def _name(dim: Dim) -> str:
    return "rows" if dim == "rows" else f"dim {dim}"


def _range(smallest: int | None, largest: int | None) -> str:
    return f"{smallest or 0} to {largest}" if largest is not None else f"{smallest or 0} or more"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
