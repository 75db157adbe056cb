"""What a call passes: its form, the dims that vary, and the checks of later calls against the first."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.config_checks import show
from piecework.errors import CompileError, ConfigError

DimNames = dict[int, str]
MAX_DEPTH = 32
CONSTANT_TYPES = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), enum.Enum, slice),
    *(
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        type,
        types.FunctionType,
        types.BuiltinFunctionType,
    ),
)


# --- which dims vary --------------------------------------------------------------------------


@dataclass(frozen=True)
class DynamicDims:
    """The named dims of each argument.

    Attributes:
        by_argument: argument name -> dim -> dim name; None where the first call decides.
        is_explicit: the user gave them, so that a dim that a tensor lacks is an error.
    """

    by_argument: Mapping[str, DimNames] | None
    is_explicit: bool

    def of(self, argument: str) -> DimNames:
        """Return the named dims of one argument."""
        return {0: "rows"} if self.by_argument is None else self.by_argument.get(argument, {})


def dynamic_dims(
    signature: inspect.Signature,
    given: Mapping[str, int | Mapping[int, str]] | None,
    *,
    owner: str,
    namespace: Mapping[str, Any],
) -> DynamicDims:
    """Return the named dims: those given, else dim 0 of what is annotated as a tensor.

    Args:
        signature: of the traced forward, without ``self``.
        given: the user's ``dynamic_arg_dims``.
        owner: name of the model or function, for errors.
        namespace: globals in which string annotations are evaluated.

    Raises:
        ConfigError: a name is no argument, a dim is no number, or nothing was found to vary.
    """
    if given is not None:
        return DynamicDims(_given_dims(signature, given, owner), is_explicit=True)
    parameters = signature.parameters.values()
    if all(parameter.annotation is inspect.Parameter.empty for parameter in parameters):
        return DynamicDims(None, is_explicit=False)
    annotated = {p.name: {0: "rows"} for p in parameters if _is_tensor_annotation(p.annotation, namespace)}
    if not annotated:
        raise _nothing_varies(owner, list(signature.parameters))
    return DynamicDims(annotated, is_explicit=False)


def _given_dims(
    signature: inspect.Signature, given: Mapping[str, int | Mapping[int, str]], owner: str
) -> dict[str, DimNames]:
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"dynamic_arg_dims of {owner} must map argument names to dims, got {given!r}")
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    by_argument: dict[str, DimNames] = {}
    for argument, dims in given.items():
        if argument not in signature.parameters and not takes_any:
            raise ConfigError(
                f"dynamic_arg_dims names {argument!r}, which is no argument of {owner}; "
                f"its arguments are {', '.join(signature.parameters)}"
            )
        named = {dims: "rows"} if isinstance(dims, int) and not isinstance(dims, bool) else dims
        if not isinstance(named, Mapping) or not named:
            raise ConfigError(
                f"dynamic_arg_dims[{argument!r}] of {owner} must be a dim or a mapping of dims to names, "
                f'such as 0 or {{0: "batch", 1: "seq"}}, got {dims!r}'
            )
        for dim, name in named.items():
            if not isinstance(dim, int) or isinstance(dim, bool) or not isinstance(name, str) or not name:
                raise ConfigError(
                    f"dynamic_arg_dims[{argument!r}] of {owner} must map whole numbers to names, got {dim!r}: {name!r}"
                )
        by_argument[argument] = dict(named)
    return by_argument


def _is_tensor_annotation(annotation: Any, namespace: Mapping[str, Any]) -> bool:
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, dict(namespace))  # noqa: S307 - what typing.get_type_hints does, one by one
        except (NameError, AttributeError, SyntaxError, TypeError):
            # A name that exists for type checkers only, or syntax newer than this Python.
            words = annotation.replace("Optional[", "").replace("]", "").replace("None", "").replace("|", " ").split()
            return len(words) == 1 and words[0].removeprefix("torch.") in _TENSOR_NAMES
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        return len(members) == 1 and _is_tensor_annotation(members[0], namespace)
    # Models of transformers write torch.LongTensor, which is a type of its own and no class of tensors.
    is_tensor_type = isinstance(annotation, type(torch.LongTensor))
    return is_tensor_type or isinstance(annotation, type) and issubclass(annotation, torch.Tensor)


_TENSOR_NAMES = (
    *("Tensor", "LongTensor", "IntTensor", "ShortTensor", "CharTensor", "ByteTensor", "BoolTensor"),
    *("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor"),
)


def _nothing_varies(owner: str, arguments: list[str]) -> ConfigError:
    example = arguments[0] if arguments else "x"
    return ConfigError(
        f"no argument of {owner} is annotated as a tensor, so there is no dim that may vary; "
        f'name one, for example dynamic_arg_dims={{"{example}": 0}}; its arguments are {", ".join(arguments) or "none"}'
    )


# --- the form of a call -------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """A tensor among the arguments, as the trace saw it."""

    path: str
    """A Python expression over the parameters of the forward: ``"x"``, ``"cache['k']"``."""
    dtype: torch.dtype
    device: torch.device
    dims: tuple[int | str, ...]
    """A number where the dim is static, else the name of the dim."""
    dense_order: tuple[int, ...] | None
    """Dims from the outermost to the innermost, where the tensor fills its memory without gaps."""
    strides: tuple[int, ...]
    """Of the first call; these count where ``dense_order`` is None."""

    def expected_strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the strides that a tensor of this shape must have."""
        if self.dense_order is None:
            return self.strides
        strides, step = [0] * len(shape), 1
        for dim in reversed(self.dense_order):
            strides[dim] = step
            step *= max(shape[dim], 1)
        return tuple(strides)

    def mismatch(self, value: Any) -> str | None:
        """Return in words how a later argument differs from the traced one; sizes apart."""
        if not isinstance(value, torch.Tensor):
            return f"argument {self.path} was a tensor when traced, now it is {_shown(value)}"
        if (odd := oddity(value)) is not None:
            return f"argument {self.path} was a plain tensor when traced, now it is {odd}"
        facts = [("dtype", self.dtype, value.dtype), ("device", self.device, value.device)]
        facts.append(("number of dims", len(self.dims), value.dim()))
        for what, traced, now in facts:
            if traced != now:
                return f"{what} of argument {self.path} was {traced} when traced, now it is {now}"
        for dim, (traced, now) in enumerate(zip(self.dims, value.shape, strict=True)):
            if isinstance(traced, int) and traced != now:
                return (
                    f"dim {dim} of argument {self.path} was {traced} when traced, now it is {now}; "
                    f'if it varies, name it in dynamic_arg_dims, for example {{"{self.path}": {{{dim}: "name"}}}}'
                )
        expected = self.expected_strides(value.shape)
        if value.numel() and any(
            size > 1 and a != b for size, a, b in zip(value.shape, expected, value.stride(), strict=True)
        ):
            is_plain = tuple(expected) == torch.empty(value.shape, device="meta").stride()
            return (
                f"strides of argument {self.path} are {tuple(value.stride())}, the trace needs {expected} "
                f"for the shape {tuple(value.shape)}; pass it with the layout of the first call"
                f"{', through .contiguous()' if is_plain else ', which was not contiguous'}"
            )
        return None


@dataclass(frozen=True)
class ConstantSpec:
    """Anything that is no tensor and was built into the trace."""

    path: str
    value: Any

    def mismatch(self, value: Any) -> str | None:
        """Return in words how a later value differs from the traced one."""
        if type(value) is type(self.value) and (value is self.value or _same_constant(value, self.value)):
            return None
        return f"argument {self.path} was {_shown(self.value)} when traced, now it is {_shown(value)}"


@dataclass(frozen=True)
class ContainerSpec:
    """A tuple, list, dict, named tuple or dataclass among the arguments."""

    path: str
    kind: type
    keys: tuple[Any, ...]
    """Positions, keys or field names."""
    children: tuple[Spec, ...]

    def mismatch(self, value: Any) -> str | None:
        """Return in words how a later container, or what it holds, differs from the traced one."""
        if type(value) is not self.kind:
            return f"argument {self.path} was a {self.kind.__name__} when traced, now it is {_shown(value)}"
        keys = _keys(value)
        if keys != self.keys:
            return f"argument {self.path} held {list(self.keys)} when traced, now it holds {list(keys)}"
        found = (child.mismatch(_item(value, key)) for key, child in zip(keys, self.children, strict=True))
        return next((problem for problem in found if problem), None)


Spec = TensorSpec | ConstantSpec | ContainerSpec


@dataclass(frozen=True)
class Arguments:
    """The form of the first call, which every later call must have."""

    signature: inspect.Signature
    num_positional: int
    """So many arguments were given by position at the first call; the original is called alike."""
    given: frozenset[str]
    """Parameters that the first call gave a value."""
    specs: Mapping[str, Spec]
    sizes: Mapping[str, int]
    """Value of each named dim at the first call."""

    @property
    def tensors(self) -> list[TensorSpec]:
        """Return all tensors among the arguments, in order."""
        return [spec for top in self.specs.values() for spec in _leaves(top) if isinstance(spec, TensorSpec)]

    def explain(self, values: Sequence[Any]) -> str | None:
        """Return in words how the values of a later call, in the order of parameters, differ; or None."""
        found = (spec.mismatch(value) for spec, value in zip(self.specs.values(), values, strict=True))
        return next((problem for problem in found if problem), None)

    def tensors_in(self, values: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors among the values of a call, in order; the call has this form."""
        scope = dict(values)
        return [eval(spec.path, scope) for spec in self.tensors]  # noqa: S307 - paths of our own

    def call_text(self, function: str) -> str:
        """Return Python source for calling ``function`` in the style of the first call."""
        given: list[str] = []
        for position, parameter in enumerate(self.signature.parameters.values()):
            name = parameter.name
            if parameter.kind is parameter.VAR_POSITIONAL:
                given.append(f"*{name}")
            elif parameter.kind is parameter.VAR_KEYWORD:
                given.append(f"**{name}")
            elif parameter.kind is parameter.POSITIONAL_ONLY or (
                parameter.kind is parameter.POSITIONAL_OR_KEYWORD and position < self.num_positional
            ):
                given.append(name)
            elif name in self.given:
                given.append(f"{name}={name}")
        return f"{function}({', '.join(given)})"


def describe_call(
    signature: inspect.Signature, dims: DynamicDims, args: tuple[Any, ...], kwargs: dict[str, Any], *, owner: str
) -> tuple[Arguments, dict[str, Any]]:
    """Return the form of a call, and the values of all parameters with defaults filled in.

    Raises:
        TypeError: the call does not fit the signature.
        CompileError: an argument is of a kind that can't be traced once for all calls.
        ConfigError: dims of equal names differ, a tensor lacks a named dim, or nothing varies.
    """
    bound = signature.bind(*args, **kwargs)
    given = frozenset(bound.arguments)
    bound.apply_defaults()
    reader = _Reader(dims, owner)
    specs: dict[str, Spec] = {}
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            children = tuple(reader.read(item, f"{name}[{key!r}]", dims.of(key)) for key, item in value.items())
            specs[name] = ContainerSpec(name, dict, tuple(value), children)
        else:
            specs[name] = reader.read(value, name, dims.of(name))
    if not reader.sizes:
        raise _nothing_varies(owner, list(signature.parameters))
    positional = min(len(args), sum(p.kind in (0, 1) for p in signature.parameters.values()))
    return Arguments(signature, positional, given, specs, reader.sizes), dict(bound.arguments)


class _Reader:
    def __init__(self, dims: DynamicDims, owner: str) -> None:
        self.dims = dims
        self.owner = owner
        self.sizes: dict[str, int] = {}
        self.first_seen: dict[str, str] = {}

    def read(self, value: Any, path: str, named: DimNames) -> Spec:
        if isinstance(value, torch.Tensor):
            return self.read_tensor(value, path, named)
        if isinstance(value, (tuple, list, dict)) or (
            dataclasses.is_dataclass(value) and not isinstance(value, (type, enum.Enum))
        ):
            keys = _keys(value)
            self.check_container(value, keys, path)
            children = (self.read(_item(value, key), _item_path(value, path, key), named) for key in keys)
            return ContainerSpec(path, type(value), keys, tuple(children))
        if isinstance(value, CONSTANT_TYPES):
            return ConstantSpec(path, value)
        raise CompileError(
            f"argument {path} of {self.owner} is a {type(value).__module__}.{type(value).__qualname__}, and what "
            "such an object holds can't be checked at later calls; pass tensors, numbers, strings, and tuples, lists, "
            "dicts or dataclasses of these, or use level 1 (DYNAMO_AS_IS)"
        )

    def check_container(self, value: Any, keys: tuple[Any, ...], path: str) -> None:
        odd = [key for key in keys if type(key) not in (str, int, bool, float, type(None))]
        if odd:
            raise CompileError(
                f"argument {path} of {self.owner} has the key {odd[0]!r}; keys must be strings or numbers"
            )
        if path.count("[") + path.count(".") > MAX_DEPTH:
            raise CompileError(f"argument {path[:40]}... of {self.owner} holds itself, or is nested too deeply")

    def read_tensor(self, value: torch.Tensor, path: str, named: DimNames) -> TensorSpec:
        if (odd := oddity(value)) is not None:
            raise CompileError(f"argument {path} of {self.owner} is {odd}; only plain strided tensors can be arguments")
        dims: list[int | str] = list(value.shape)
        for dim, name in named.items():
            if not -value.dim() <= dim < value.dim():
                if self.dims.is_explicit:
                    raise ConfigError(
                        f"dynamic_arg_dims names dim {dim} of argument {path} of {self.owner}, "
                        f"which has {value.dim()} dims"
                    )
                continue
            dim %= value.dim()
            if isinstance(other := dims[dim], str):
                raise ConfigError(
                    f"dynamic_arg_dims names dim {dim} of argument {path} of {self.owner} twice: {other!r} and {name!r}"
                )
            size = value.shape[dim]
            if self.sizes.setdefault(name, size) != size:
                raise ConfigError(
                    f"dim {name!r} is {self.sizes[name]} in argument {self.first_seen[name]} of {self.owner} but "
                    f"{size} in argument {path}; dims of one name must be equal: give them different names in "
                    f'dynamic_arg_dims, for example {{"{path}": {{{dim}: "other"}}}}, or leave one out'
                )
            self.first_seen.setdefault(name, path)
            dims[dim] = name
        strides = tuple(value.stride())
        return TensorSpec(path, value.dtype, value.device, tuple(dims), dense_order(value), strides)


def oddity(tensor: torch.Tensor) -> str | None:
    """Return in words what makes a tensor other than a plain strided one; compiled code does not look at that."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    if internals.is_functorch_wrapped(tensor):
        return "a tensor inside torch.func or vmap"
    if internals.is_jit_tracing():
        return "a tensor inside torch.jit.trace, which sees nothing of compiled code; trace the original model"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return "a nested tensor" if tensor.is_nested else f"a Tensor of layout {tensor.layout}"
    for what in ("is_quantized", "is_conj", "is_neg"):
        told = getattr(tensor, what)
        if told() if callable(told) else told:
            return f"a tensor with {what} set; call .resolve_conj(), .resolve_neg() or .dequantize()"
    return None


def dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims from the outermost to the innermost; None where there are gaps, or elements share memory."""
    natural = tuple(range(tensor.dim()))
    by_stride = tuple(sorted(natural, key=lambda dim: (-tensor.stride(dim), dim)))
    for order in (natural, by_stride):
        step = 1
        for dim in reversed(order):
            if tensor.shape[dim] != 1 and tensor.stride(dim) != step:
                break
            step *= tensor.shape[dim]
        else:
            return order
    return None


def _keys(container: Any) -> tuple[Any, ...]:
    if isinstance(container, dict):
        return tuple(container)
    if isinstance(container, (tuple, list)):
        return tuple(range(len(container)))
    return tuple(field.name for field in dataclasses.fields(container))


def _item(container: Any, key: Any) -> Any:
    return container[key] if isinstance(container, (dict, tuple, list)) else getattr(container, key)


def _item_path(container: Any, path: str, key: Any) -> str:
    return f"{path}[{key!r}]" if isinstance(container, (dict, tuple, list)) else f"{path}.{key}"


def _leaves(spec: Spec) -> Iterator[Spec]:
    if isinstance(spec, ContainerSpec):
        for child in spec.children:
            yield from _leaves(child)
    else:
        yield spec


def _same_constant(a: Any, b: Any) -> bool:
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)  # nan is nan, and 0.0 is not -0.0
    return bool(a == b)


def _shown(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else f"{show(value)} ({type(value).__name__})"


# --- fake arguments for the trace ---------------------------------------------------------------


def trace_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Choose a size of at least 2 for each named dim, and no size twice.

    At 1, torch could take the dim for a broadcast one; two dims of one size could be taken for the
    same. The first call's own sizes are kept where they can be, since the model may have limits.
    """
    chosen: dict[str, int] = {}
    for name, size in sizes.items():
        candidate, step = max(size, 2), 1
        while candidate in chosen.values() or candidate < 2:
            candidate, step = candidate + (-step if step % 2 else step), step + 1
        chosen[name] = candidate
    return chosen


def fake_value(spec: Spec, value: Any, sizes: Mapping[str, int]) -> Any:
    """Return an argument with every tensor replaced by a fake one of the chosen sizes, dims marked.

    It is called under the fake mode that shall own the tensors.
    """
    if isinstance(spec, ConstantSpec):
        return value
    if isinstance(spec, ContainerSpec):
        pairs = zip(spec.keys, spec.children, strict=True)
        return rebuilt(value, {key: fake_value(child, _item(value, key), sizes) for key, child in pairs})
    shape = [dim if isinstance(dim, int) else sizes[dim] for dim in spec.dims]
    fake = torch.empty_strided(shape, spec.expected_strides(shape), dtype=spec.dtype, device=spec.device)
    for dim, name in enumerate(spec.dims):
        if isinstance(name, str):
            internals.mark_dynamic(fake, dim)
    return fake


def rebuilt(container: Any, items: Mapping[Any, Any]) -> Any:
    """Return a copy of a container that holds other items under the same keys."""
    if isinstance(container, dict):
        made = copy.copy(container)
        made.update(items)
        return made
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return type(container)(*items.values())
    if isinstance(container, (tuple, list)):
        return type(container)(items.values())
    made = copy.copy(container)
    for name, item in items.items():
        object.__setattr__(made, name, item)
    return made
