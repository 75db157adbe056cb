"""The calls to verify: arguments of each size, run again and again on memory that is put back in between."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.arguments import DynamicDims, dense_order, describe_call
from piecework.config_checks import Size
from piecework.errors import ConfigError, PieceworkError
from piecework.forward import Forward
from piecework.inputs import size_values
from piecework.tools.verify.comparing import clone
from piecework.trace import signature_of

Inputs = tuple[Any, ...] | list[Any] | Mapping[str, Any] | torch.Tensor


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    size: Size | None
    """As the user wrote it; None for the inputs as they are."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors among the arguments, by what a user would call them."""
        named = [*((f"argument {i}", value) for i, value in enumerate(self.args)), *self.kwargs.items()]
        return {name: tensor for top, value in named for name, tensor in _tensors(value, top)}


def calls_of_sizes(forward: Forward, inputs: Inputs | Callable[[Any], Inputs], sizes: list[Size]) -> Iterator[Call]:
    """Yield one call per size, or the one that is given where there are none.

    Raises:
        ConfigError: the inputs don't fit the model, or can't be brought to a size.
    """
    if callable(inputs) and not isinstance(inputs, torch.Tensor):
        if not sizes:
            raise ConfigError("verify: inputs is a function of the size, so name sizes, for example sizes=[1, 8]")
        for size in sizes:
            call = Call(size, *_args_and_kwargs(inputs(size), forward))
            _check_size(call, forward)
            yield call
        return
    args, kwargs = _args_and_kwargs(inputs, forward)
    if not sizes:
        yield Call(None, args, kwargs)
    for size in sizes:
        yield resized(Call(size, args, kwargs), forward.dims, signature_of(forward.target), forward.owner)


def _args_and_kwargs(inputs: Any, forward: Forward) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    elif isinstance(inputs, torch.Tensor):
        args, kwargs = (inputs,), {}
    elif isinstance(inputs, (tuple, list)):
        args, kwargs = tuple(inputs), {}
    else:
        raise ConfigError(
            "verify: inputs must be a tuple of arguments, a dict of keyword ones, one tensor, or a function that "
            f"returns one of these for a size; got {inputs!r:.80}"
        )
    signature = signature_of(forward.target)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"verify: inputs don't fit {forward.owner}{signature}: {error}") from None
    return args, kwargs


def _check_size(call: Call, forward: Forward) -> None:
    """Check that what a function returned for a size is of that size.

    Raises:
        ConfigError: it is of another one, or the size names other dims than the model has.
    """
    signature = signature_of(forward.target)
    try:
        arguments, _ = describe_call(signature, forward.dims, call.args, call.kwargs, owner=forward.owner)
    except PieceworkError:
        return  # Arguments that can't be traced have no size; where they have to be, the call says so.
    assert call.size is not None
    wanted = size_values(call.size, tuple(arguments.sizes), f"verify: size {call.size} of {forward.owner}")
    if arguments.sizes != wanted:
        given = ", ".join(f"{number} {name}" for name, number in arguments.sizes.items())
        raise ConfigError(f"verify: inputs({call.size!r}) returned arguments of another size: {given}")


def resized(call: Call, dims: DynamicDims, signature: inspect.Signature, owner: str) -> Call:
    """Return a call whose named dims have the values of its size: rows are left out, or come again from the first on.

    Raises:
        ConfigError: the size names other dims than the model has, or there is no row to repeat.
    """
    bound = signature.bind(*call.args, **call.kwargs)
    by_argument = dims.by_argument or {"": dims.of("")}
    names = dict.fromkeys(name for named in by_argument.values() for name in named.values())
    assert call.size is not None
    values = size_values(call.size, tuple(names), f"verify: size {call.size} of {owner}")

    def bring(argument: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            wanted = {dim: values[name] for dim, name in dims.of(argument).items() if dim < value.dim()}
            return _with_lengths(value, wanted, argument)
        return _map_tensors(value, lambda tensor: bring(argument, tensor))

    for argument, value in bound.arguments.items():
        if signature.parameters[argument].kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[argument] = {name: bring(name, item) for name, item in value.items()}
        else:
            bound.arguments[argument] = bring(argument, value)
    return Call(call.size, bound.args, bound.kwargs)


def _with_lengths(tensor: torch.Tensor, lengths: Mapping[int, int], argument: str) -> torch.Tensor:
    """Return a tensor with other lengths of some dims, laid out as a trace of the given one asks for."""
    if all(tensor.size(dim) == length for dim, length in lengths.items()):
        return tensor
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    with torch.no_grad():
        made = tensor.permute(order)
        for dim, length in lengths.items():
            if tensor.size(dim) == 0:
                raise ConfigError(f"verify: argument {argument} has no rows along dim {dim} that could come again")
            index = torch.arange(length, device=tensor.device) % tensor.size(dim)
            made = made.index_select(order.index(dim), index)
        made = made.permute([order.index(dim) for dim in range(tensor.dim())])
        return made if dense_order(tensor) is not None else _with_strides(made, tensor.stride())


def _with_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor laid out by strides; as it is, where its elements would meet."""
    rows = tensor
    for dim, step in enumerate(strides):
        rows = rows.narrow(dim, 0, 1) if step == 0 else rows  # Expanded: the same all along.
    span = 1
    for step, size in sorted(zip(strides, rows.shape, strict=True)):
        if size > 1 and step < span:
            return tensor
        span += step * (size - 1)
    return (
        torch.empty_strided(rows.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(rows).expand_as(tensor)
    )


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [_map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return type(value)((key, _map_tensors(item, function)) for key, item in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _map_tensors(getattr(value, f.name), function) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}[{index}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), f"{name}.{field.name}")


class Kept:
    """The contents of some tensors, all of their storages, to be put back after a run has changed them.

    It takes as much memory again as they do.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {name: t for name, t in tensors.items() if t.layout is torch.strided and t.device.type != "meta"}
        storages = {internals.storage_key(tensor): tensor for tensor in self.tensors.values()}
        self._contents = {key: (_bytes_of(t), _bytes_of(t).clone()) for key, t in storages.items() if key is not None}

    def put_back(self) -> None:
        """Give all tensors the contents that they had."""
        for memory, content in self._contents.values():
            memory.copy_(content)

    def changed(self) -> dict[str, torch.Tensor]:
        """Return copies of the tensors whose storages hold something else now."""
        keys = {key for key, (memory, content) in self._contents.items() if not torch.equal(memory, content)}
        return {name: clone(t) for name, t in self.tensors.items() if internals.storage_key(t) in keys}


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a storage as a tensor over it, which may be written to in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        storage = tensor.untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Let every run draw the same numbers, and put the generators back afterwards."""
    with random_numbers_put_back(device):
        torch.manual_seed(0)
        yield


@contextlib.contextmanager
def random_numbers_put_back(device: torch.device) -> Iterator[None]:
    """Have what follows draw the numbers again that are drawn inside."""
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        yield


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Return what changes whenever a number is drawn."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
