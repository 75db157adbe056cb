"""What a traced forward returns: every leaf explained, so that it can be rebuilt without Dynamo."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from piecework.errors import CompileError


@dataclass(frozen=True)
class OutputSpec:
    """How the caller's result is built from what the graph returns.

    Attributes:
        text: a Python expression over ``_pw_o`` (the graph's outputs), the parameters of the
            forward and the names in ``constants`` and ``returned_inputs``.
        constants: values that the expression refers to.
        returned_inputs: sources of parameters and buffers that are returned as they are, by name.
    """

    text: str
    constants: dict[str, Any]
    returned_inputs: dict[str, str]


def describe_outputs(
    returned: Any, texts: Mapping[int, str], sources: Mapping[int, str], sizes: Mapping[int, str], *, owner: str
) -> OutputSpec:
    """Explain every leaf of what the traced call returned.

    Args:
        returned: the value, with tokens where the graph's outputs stand.
        texts: identity of each token and of each fake argument -> Python for it.
        sources: identity of each parameter and buffer -> its source.
        sizes: what a dim was when ``returned`` was read -> Python for it; in a shape no other number is the same.
        owner: name of the model or function, for errors.

    Raises:
        CompileError: something is returned that can't be rebuilt at later calls.
    """
    describer = _Describer(texts, sources, sizes, owner)
    return OutputSpec(describer.expression(returned, "the result"), describer.constants, describer.returned_inputs)


def _is_bare_function(value: Any) -> bool:
    """Whether a value is a function that holds nothing of the traced call."""
    return isinstance(value, types.FunctionType) and not value.__closure__ and not value.__defaults__


_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range, type, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, types.BuiltinFunctionType),
)


@dataclass
class _Describer:
    texts: Mapping[int, str]
    sources: Mapping[int, str]
    sizes: Mapping[int, str]
    owner: str
    constants: dict[str, Any] = field(default_factory=dict)
    returned_inputs: dict[str, str] = field(default_factory=dict)

    def expression(self, value: Any, where: str) -> str:
        if id(value) in self.texts:
            return self.texts[id(value)]
        if isinstance(value, torch.Tensor):
            return self.returned_state(value, where)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise self.unexplained(value, where)
        if isinstance(value, torch.Size):
            return self.shape(value, where)
        if type(value) in (tuple, list, dict):
            return self.builtin_container(value, where)
        if type(value) is set and all(isinstance(item, _CONSTANTS) for item in value):
            return f"{{*{self.constant(tuple(value))}}}"  # of its own at each call
        if isinstance(value, (tuple, list, dict)) or dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.other_container(value, where)
        if isinstance(value, (*_CONSTANTS, torch.nn.Module)) or _is_bare_function(value):
            return self.constant(value)
        raise self.unexplained(value, where)

    def builtin_container(self, value: Any, where: str) -> str:
        if isinstance(value, dict):
            items = (
                f"{self.constant(key)}: {self.expression(item, f'{where}[{key!r}]')}" for key, item in value.items()
            )
            return f"{{{', '.join(items)}}}"
        items = [self.expression(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"

    def shape(self, value: torch.Size, where: str) -> str:
        items = [
            self.sizes[item] if type(item) is int and item in self.sizes else self.expression(item, f"{where}[{i}]")
            for i, item in enumerate(value)
        ]
        return f"{self.constant(torch.Size)}([{', '.join(items)}])"

    def other_container(self, value: Any, where: str) -> str:
        """Rebuild a subclass of a container or a dataclass from an empty copy of the traced one."""
        fields = getattr(value, "_fields", None)
        if isinstance(value, tuple) and fields is not None:
            pairs = zip(fields, value, strict=True)
            items = ", ".join(self.expression(item, f"{where}.{name}") for name, item in pairs)
            return f"{self.constant(type(value))}({items})"
        if isinstance(value, (tuple, list)):
            return f"{self.constant(type(value))}({self.builtin_container(list(value), where)})"
        attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
        entries = dict(value) if isinstance(value, dict) else {}
        if not attributes and not entries and dataclasses.is_dataclass(value):
            attributes = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
        shell = _Shell(type(value), getattr(value, "default_factory", None))
        parts = (self.builtin_container(entries, where), self.builtin_container(attributes, where))
        return f"{self.constant(shell)}({', '.join(parts)})"

    def returned_state(self, value: torch.Tensor, where: str) -> str:
        if id(value) not in self.sources:
            raise self.unexplained(value, where)
        name = f"_pw_returned_{len(self.returned_inputs)}"
        self.returned_inputs[name] = self.sources[id(value)]
        return name

    def constant(self, value: Any) -> str:
        if value is None or isinstance(value, (bool, int, str)) and type(value) in (bool, int, str):
            return repr(value)
        name = f"_pw_c{len(self.constants)}"
        self.constants[name] = value
        return name

    def unexplained(self, value: Any, where: str) -> CompileError:
        return CompileError(
            f"{where} of {self.owner} is a {type(value).__module__}.{type(value).__qualname__} that the trace can't "
            "explain; return tensors, numbers, and tuples, lists, dicts or dataclasses of these, or use level 1"
        )


def numbers_in_shapes(value: Any) -> set[int]:
    """Return the plain numbers in every ``torch.Size`` of a result."""
    if isinstance(value, torch.Size):
        return {item for item in value if type(item) is int}
    children: list[Any] = []
    if isinstance(value, dict):
        children += value.values()
    elif isinstance(value, (tuple, list)):
        children += value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        children += (getattr(value, entry.name) for entry in dataclasses.fields(value))
    return {number for child in children for number in numbers_in_shapes(child)}


class _Shell:
    """Makes objects of one class without calling its ``__init__``, whose effects were traced."""

    def __init__(self, kind: type, default_factory: Any) -> None:
        self.kind = kind
        self.default_factory = default_factory

    def __call__(self, entries: dict[Any, Any], attributes: dict[str, Any]) -> Any:
        made: Any = self.kind.__new__(self.kind)  # pyright: ignore[reportCallIssue]
        if issubclass(self.kind, defaultdict):
            made.default_factory = self.default_factory
        store: Any = OrderedDict.__setitem__ if isinstance(made, OrderedDict) else dict.__setitem__
        for key, value in entries.items():
            store(made, key, value)
        for name, value in attributes.items():
            object.__setattr__(made, name, value)
        return made
