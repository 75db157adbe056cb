"""What a traced forward returns: every leaf explained, so that it can be rebuilt without Dynamo."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecework.arguments import Arguments
from piecework.errors import CompileError


@dataclass
class OutputSpec:
    """How the caller's result is built from what the graph returns.

    Attributes:
        text: a Python expression over ``_pw_o`` (the graph's outputs), the parameters of the
            forward and the names in ``constants``.
        constants: values that the expression refers to.
        returned_inputs: sources of parameters and buffers that are returned as they are, by name.
    """

    text: str = "None"
    constants: dict[str, Any] = field(default_factory=dict)
    returned_inputs: dict[str, str] = field(default_factory=dict)


def describe_outputs(
    returned: Any,
    tokens: Sequence[Any],
    tensor_index: Mapping[int, int],
    bound: Mapping[int, str | None],
    arguments: Arguments,
    sizes: Mapping[str, int],
    target: Any,
    owner: str,
) -> OutputSpec:
    """Explain every leaf of what the traced call returned.

    Args:
        returned: the value, with tokens where the graph's outputs stand.
        tokens: the graph's outputs at the trace, in order.
        tensor_index: identity of each fake argument -> its position among the tensors.
        bound: identity of each parameter and buffer of the graph -> its source.
        arguments: the form of the call.
        sizes: what the dims were when ``returned`` was read; in a shape no other number is the same.
        target: the traced module or function, which may return itself.
        owner: name of the model or function, for errors.

    Raises:
        CompileError: something is returned that can't be rebuilt at later calls.
    """
    return _Describer(tokens, tensor_index, bound, arguments, sizes, target, owner).run(returned)


class _Describer:
    def __init__(
        self,
        tokens: Sequence[Any],
        tensor_index: Mapping[int, int],
        bound: Mapping[int, str | None],
        arguments: Arguments,
        sizes: Mapping[str, int],
        target: Any,
        owner: str,
    ) -> None:
        self.token_index = {id(token): i for i, token in enumerate(tokens)}
        self.tensor_index = tensor_index
        self.bound = bound
        self.paths = [spec.path for spec in arguments.tensors]
        self.dim_of_number = {size: dim for dim, size in sizes.items()}
        self.where_read = {
            dim: f"{spec.path}.size({position})" for spec in arguments.tensors for position, dim in enumerate(spec.dims)
        }
        self.parameters = self.names_of_parameters(target)
        self.owner = owner
        self.spec = OutputSpec()

    @staticmethod
    def names_of_parameters(target: Any) -> dict[int, str]:
        if not isinstance(target, torch.nn.Module):
            return {}
        named = [*target.named_parameters(), *target.named_buffers()]
        return {id(tensor): name for name, tensor in named}

    def run(self, returned: Any) -> OutputSpec:
        self.spec.text = self.expression(returned, "the result")
        return self.spec

    def expression(self, value: Any, where: str) -> str:
        if id(value) in self.token_index:
            return f"_pw_o[{self.token_index[id(value)]}]"
        if id(value) in self.tensor_index:
            return self.paths[self.tensor_index[id(value)]]
        if isinstance(value, torch.Tensor):
            return self.returned_state(value, where)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise self.unexplained(value, where)
        if isinstance(value, torch.Size):
            return self.shape(value, where)
        if type(value) in (tuple, list, dict):
            return self.builtin_container(value, where)
        if isinstance(value, (tuple, list, dict)) or dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.other_container(value, where)
        if not isinstance(value, (type(None), bool, int, float, complex, str, bytes)):
            self.refuse_hidden_tensors(value, where)
        return self.constant(value)

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
            self.where_read[self.dim_of_number[item]]
            if type(item) is int and item in self.dim_of_number
            else self.expression(item, f"{where}[{i}]")
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
        source = self.bound.get(id(value))
        if source is None:
            path = self.parameters.get(id(value))
            if path is None:
                raise self.unexplained(value, where)
            getter = "get_parameter" if isinstance(value, torch.nn.Parameter) else "get_buffer"
            source = f"L['_pw_target'].{getter}({path!r})"
        name = f"_pw_returned_{len(self.spec.returned_inputs)}"
        self.spec.returned_inputs[name] = source
        return name

    def constant(self, value: Any) -> str:
        if value is None or isinstance(value, (bool, int, str)) and type(value) in (bool, int, str):
            return repr(value)
        name = f"_pw_c{len(self.spec.constants)}"
        self.spec.constants[name] = value
        return name

    def refuse_hidden_tensors(self, value: Any, where: str) -> None:
        """Refuse an object that holds a tensor in a place that can't be rebuilt."""
        held = (
            vars(value).values()
            if hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module))
            else ()
        )
        if any(id(item) in self.token_index or isinstance(item, (torch.Tensor, torch.SymInt)) for item in held):
            raise self.unexplained(value, where)

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
        made: Any = self.kind.__new__(self.kind)  # pyright: ignore[reportCallIssue] - any class
        if isinstance(made, defaultdict):
            made.default_factory = self.default_factory
        store: Any = OrderedDict.__setitem__ if isinstance(made, OrderedDict) else dict.__setitem__
        for key, value in entries.items():
            store(made, key, value)
        for name, value in attributes.items():
            object.__setattr__(made, name, value)
        return made
