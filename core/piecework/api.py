"""The front ends: compile a model or a function, decorate a class, look at what became of it."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from piecework import torch_internals as internals
from piecework.arguments import DynamicDims, dynamic_dims
from piecework.config import CompilationConfig
from piecework.config_checks import CompilationLevel, Size, check_sizes
from piecework.counting import counters
from piecework.custom_op_calls import reset_choices
from piecework.errors import ConfigError, TraceDepartureError
from piecework.forward import Forward, all_forwards, compile_lock
from piecework.plugins import reset_plugin_manager
from piecework.process_settings import check_config, reset_process_settings
from piecework.trace import signature_of

GivenDims = Mapping[str, int | Mapping[int, str]]
ModuleT = TypeVar("ModuleT", bound=nn.Module)
ClassT = TypeVar("ClassT", bound=type[nn.Module])
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


# --- compile ------------------------------------------------------------------------------------


@overload
def compile(
    model_or_function: ModuleT, *, config: CompilationConfig | None = None, dynamic_arg_dims: GivenDims | None = None
) -> ModuleT: ...
@overload
def compile(
    model_or_function: FunctionT, *, config: CompilationConfig | None = None, dynamic_arg_dims: GivenDims | None = None
) -> FunctionT: ...
def compile(
    model_or_function: Any, *, config: CompilationConfig | None = None, dynamic_arg_dims: GivenDims | None = None
) -> Any:
    """Return a model or function that runs piece by piece; what was given stays eager.

    The call is a request: level 3, unless the environment, ``config`` or ``set_compilation_config``
    names a level. Nothing is traced before the first call.

    Args:
        model_or_function: a module gives a new object of a subclass of its class that shares its
            ``__dict__``: parameters, buffers, submodules and attributes are the same on both. It
            pickles, deep-copies and saves as the original does; a copy compiles for itself.
        config: settings; the environment has the last word, field by field.
        dynamic_arg_dims: the dims that vary, by argument: ``{"x": 0}`` (called ``rows``) or
            ``{"input_ids": {0: "batch", 1: "seq"}}``; equal names mean equal values. Left out:
            dim 0 of what is annotated as a tensor; without any annotation, dim 0 of every tensor.

    Raises:
        ConfigError: an argument or a setting is not usable.
    """
    check_config(config, "compile: config")
    if isinstance(model_or_function, nn.Module):
        return _compile_module(model_or_function, config, dynamic_arg_dims)
    if isinstance(model_or_function, type) or not callable(model_or_function):
        hint = "; to compile every instance of a class, decorate it with @support_torch_compile"
        raise ConfigError(
            f"compile takes a module or a function, got {model_or_function!r}"
            f"{hint if isinstance(model_or_function, type) else ''}"
        )
    return _compile_function(model_or_function, config, dynamic_arg_dims)


def _compile_function(function: Any, config: CompilationConfig | None, given: GivenDims | None) -> Any:
    owner = getattr(function, "__qualname__", type(function).__qualname__)
    _check_returns(function, owner)
    namespace = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        raise ConfigError(
            f"compile takes a function with a Python signature, got {function!r}; wrap it in one of your own"
        ) from None
    dims = dynamic_dims(signature, given, owner=owner, namespace=namespace)
    current: list[Callable[..., Any]] = [function]

    @functools.wraps(function)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        if internals.is_traced():
            return function(*args, **kwargs)
        return current[0](*args, **kwargs)

    def publish(answer: Callable[..., Any]) -> None:
        current[0] = answer

    forward = Forward(
        function,
        function,
        owner=owner,
        config=config,
        dims=dims,
        default_level=CompilationLevel.PIECEWISE,
        publish=publish,
    )
    vars(compiled)["__piecework_forward__"] = forward
    return compiled


def _check_returns(function: Any, owner: str) -> None:
    """Refuse what gives its result in parts or later: a trace has none of that in it."""
    for is_kind, kind in (
        (inspect.isgeneratorfunction, "a generator"),
        (inspect.iscoroutinefunction, "a coroutine"),
        (inspect.isasyncgenfunction, "an asynchronous generator"),
    ):
        if is_kind(function):
            raise ConfigError(
                f"compile takes a function or a forward that returns its result, and {owner} is {kind} function; "
                "compile the function that it calls for each step"
            )


class _CompiledModule:
    """What a compiled module has besides its class: calls that go elsewhere, and copies without that."""

    __slots__ = ()
    __piecework_forward__: Forward
    __piecework_request__: tuple[CompilationConfig | None, GivenDims | None]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        original = _original(self)
        return _compile_module(copy.deepcopy(original, memo), *self.__piecework_request__)

    def __copy__(self) -> Any:
        return _compile_module(copy.copy(_original(self)), *self.__piecework_request__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _compile_module, (_original(self), *self.__piecework_request__)


def _original(compiled: Any) -> nn.Module:
    return compiled.__piecework_forward__.target


def _compile_module(module: nn.Module, config: CompilationConfig | None, given: GivenDims | None) -> nn.Module:
    if isinstance(module, _CompiledModule):
        module = _original(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError("compile takes a module with a Python forward, got a ScriptModule")
    cls = type(module)
    owner = cls.__qualname__
    _check_returns(module.forward, owner)
    dims = dynamic_dims(signature_of(module), given, owner=owner, namespace=_namespace(cls))
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    subclass: Any = types.new_class(cls.__name__, (_CompiledModule, cls), exec_body=lambda space: space.update(names))
    compiled = object.__new__(subclass)
    object.__setattr__(compiled, "__dict__", module.__dict__)

    def publish(answer: Callable[..., Any]) -> None:
        subclass.__call__ = answer

    original = _eager_call(module)
    subclass.__piecework_request__ = (config, given)
    subclass.__piecework_forward__ = Forward(
        module,
        original,
        owner=owner,
        config=config,
        dims=dims,
        default_level=CompilationLevel.PIECEWISE,
        publish=publish,
    )
    return compiled


def _eager_call(module: nn.Module) -> Callable[..., Any]:
    """Return the module's own call, without Piecework if its class is decorated."""
    undecorated = getattr(type(module), "__piecework_call__", None)
    return functools.partial(undecorated, module) if undecorated is not None else module


def _namespace(cls: type) -> dict[str, Any]:
    module = sys.modules.get(cls.__module__)
    own = getattr(inspect.unwrap(getattr(cls, "forward", cls)), "__globals__", {})
    return {**vars(module), **own} if module is not None else dict(own)


# --- the decorator --------------------------------------------------------------------------------


class _InstanceState:
    """Keeps an instance's ``Forward`` in its ``__dict__``; deep copies and pickles of the instance get None.

    A shallow copy gets the same object, and knows by ``instance`` that it is another's.
    """

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self.forward: Forward | None = None
        self.answer: Callable[..., Any] | None = None

    def publish(self, answer: Callable[..., Any]) -> None:
        self.answer = answer

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_STATE = "_piecework_state"


@overload
def support_torch_compile(cls: ClassT) -> ClassT: ...
@overload
def support_torch_compile(
    *, dynamic_arg_dims: GivenDims | None = None, enable_if: Callable[[Any], bool] | None = None
) -> Callable[[ClassT], ClassT]: ...
def support_torch_compile(
    cls: Any = None, *, dynamic_arg_dims: GivenDims | None = None, enable_if: Callable[[Any], bool] | None = None
) -> Any:
    """Let the instances of a module class compile themselves, at the level that the environment says.

    The default level is 0: the class then behaves as if it were not decorated. Subclasses inherit
    it; an instance inside another compiled one is traced as a part of that.

    Args:
        cls: the class, where the decorator is used bare.
        dynamic_arg_dims: as for ``compile``; found at decoration where it is left out.
        enable_if: called with an instance at its first call; False leaves that instance eager.

    Raises:
        ConfigError: no module class with a forward, or nothing in its signature may vary.
    """
    if cls is None:
        return functools.partial(_decorate, given=dynamic_arg_dims, enable_if=enable_if)
    return _decorate(cls, given=dynamic_arg_dims, enable_if=enable_if)


def ignore_torch_compile(cls: ClassT) -> ClassT:
    """Undo ``support_torch_compile`` for a class that inherits it.

    Raises:
        ConfigError: not a module class.
    """
    _check_module_class(cls, "ignore_torch_compile")
    cls.__piecework_decoration__ = None  # pyright: ignore[reportAttributeAccessIssue]
    return cls


def _decorate(cls: Any, *, given: GivenDims | None, enable_if: Callable[[Any], bool] | None) -> Any:
    _check_module_class(cls, "support_torch_compile")
    if enable_if is not None and not callable(enable_if):
        raise ConfigError(f"enable_if must be a function of the instance, got {enable_if!r}")
    dims = _class_dims(cls, given)
    cls.__piecework_decoration__ = (cls, given, dims, enable_if)
    if hasattr(cls, "__piecework_call__"):
        return cls  # inherited: the call of the decorated base looks the decoration up by class
    original_call = cls.__call__
    cls.__piecework_call__ = original_call

    @functools.wraps(original_call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if internals.is_traced():
            return original_call(self, *args, **kwargs)
        state = self.__dict__.get(_STATE)  # None in a deep copy of an instance that was called
        if state is not None and state.instance is self:
            return state.answer(self, *args, **kwargs)
        return _first_call_of_instance(self, original_call)(self, *args, **kwargs)

    cls.__call__ = __call__
    return cls


def _class_dims(cls: type[nn.Module], given: GivenDims | None) -> DynamicDims:
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    signature = inspect.Signature(parameters)
    return dynamic_dims(signature, given, owner=cls.__qualname__, namespace=_namespace(cls))


def _first_call_of_instance(instance: Any, original_call: Callable[..., Any]) -> Callable[..., Any]:
    cls = type(instance)
    original = functools.partial(original_call, instance)
    state = _InstanceState(instance)
    decoration = cls.__piecework_decoration__
    if decoration is None or (decoration[3] is not None and not decoration[3](instance)):
        state.answer = original_call
    else:
        decorated, given, dims, _ = decoration
        if cls.forward is not decorated.forward:
            dims = _class_dims(cls, given)  # a subclass with a forward of its own, or one that inherits from such
        state.forward = Forward(
            instance,
            original,
            owner=cls.__qualname__,
            config=None,
            dims=dims,
            default_level=CompilationLevel.NO_COMPILATION,
            publish=state.publish,
        )
    with compile_lock:
        there: Any = instance.__dict__.get(_STATE)
        if there is None or there.instance is not instance:
            instance.__dict__[_STATE] = there = state
    answer = there.answer
    assert answer is not None
    return answer


def _check_module_class(cls: Any, what: str) -> None:
    if not isinstance(cls, type) or not issubclass(cls, nn.Module) or cls.forward is nn.Module.forward:
        raise ConfigError(f"{what} decorates a subclass of torch.nn.Module that has a forward, got {cls!r}")


# --- what became of it ----------------------------------------------------------------------------


def forward_of(model: Any, what: str) -> Forward:
    """Return what stands behind a compiled model, function or decorated instance.

    Raises:
        ConfigError: it is none of these.
    """
    forward = getattr(model, "__piecework_forward__", None)
    state = getattr(model, "__dict__", {}).get(_STATE)
    if forward is None and isinstance(state, _InstanceState) and state.instance is model:
        forward = state.forward
    if isinstance(forward, Forward):
        return forward
    if is_decorated(model):
        if isinstance(state, _InstanceState):
            raise ConfigError(f"{what}: this {type(model).__qualname__} stays eager (enable_if, ignore_torch_compile)")
        raise ConfigError(f"{what}: this {type(model).__qualname__} has not been called yet")
    kind = type(model).__qualname__
    hint = "; for torch.compile(backend='piecework') look at piecework.counters" if isinstance(model, nn.Module) else ""
    raise ConfigError(
        f"{what} takes what piecework.compile returned, or an instance of a decorated class, got a {kind}{hint}"
    )


def started_forward_of(model: Any, what: str) -> Forward:
    """Return what stands behind a model, also where that is an instance of a decorated class that was never called.

    Raises:
        ConfigError: it is not compiled, or stays eager.
    """
    if is_decorated(model) and _STATE not in vars(model):
        _first_call_of_instance(model, type(model).__piecework_call__)
    return forward_of(model, what)


def is_decorated(model: Any) -> bool:
    """Whether a model is an instance of a class that compiles its instances."""
    return getattr(type(model), "__piecework_decoration__", None) is not None


def is_compiled(model: Any) -> bool:
    """Whether ``compile`` returned a model, or its class is decorated."""
    return getattr(model, "__piecework_forward__", None) is not None or is_decorated(model)


def capture(
    model: Any,
    sizes: Sequence[Size],
    example_inputs: tuple[Any, ...] | list[Any] | Mapping[str, Any] | torch.Tensor,
    *,
    show_progress: bool | None = None,
) -> None:
    """Capture sizes at once, the largest first; traces and compiles before, where that has not been done.

    Nothing of the model is run for its result: no splitting op runs, and no parameter, buffer or argument changes.

    Args:
        model: what ``compile`` returned, or an instance of a decorated class at level 3.
        sizes: numbers of rows, or a value per named dim such as ``{"batch": 4, "seq": 1}``.
        example_inputs: the arguments of one call: a tuple, or a dict of keyword arguments, or one tensor. Those
            with a dim that varies may have any size; others, such as a cache, are the ones that calls will pass.
        show_progress: a bar on stderr with the size, the seconds and the free memory; None: on a terminal.

    Raises:
        ConfigError: the model, the sizes or the inputs are not usable.
        CaptureError: a size can't be captured, and ``on_failure`` is ``"error"``; those captured before it stay.
    """
    from piecework.tools.progress import capture_progress  # It needs rich.

    forward = started_forward_of(model, "capture")
    checked = tuple(check_sizes(sizes, "capture: sizes"))
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), dict(example_inputs)
    elif isinstance(example_inputs, torch.Tensor):
        args, kwargs = (example_inputs,), {}
    elif isinstance(example_inputs, (tuple, list)):
        args, kwargs = tuple(example_inputs), {}
    else:
        raise ConfigError(
            f"capture: example_inputs must be a tuple of arguments or a dict of keyword ones, got {example_inputs!r}"
        )
    with capture_progress(forward.owner, len(checked), show=show_progress) as on_size:
        forward.capture(checked, args, kwargs, on_size)


def release(model: Any) -> None:
    """Drop the trace of a compiled model and all that was made of it; the next call starts anew.

    The memory of its captures goes back to the device, unless other models capture in the same pool.

    Raises:
        ConfigError: not a compiled model, function or decorated instance.
    """
    forward_of(model, "release").release()


def verify_assumptions(model: Any) -> None:
    """Check everything that the trace of a model assumed, and not only what calls check.

    That is all that Dynamo recorded: globals, patched functions, hooks of modules,
    attributes written through ``__dict__``, and the address of every parameter. It takes some
    microseconds per recorded fact, so that it is called on demand.

    Raises:
        TraceDepartureError: something is no longer as it was traced; the message names it.
        ConfigError: the model has no trace.
    """
    forward = forward_of(model, "verify_assumptions")
    if forward.compiled is None:
        raise ConfigError(f"{forward.owner} has no trace yet: call it first, at level 2 or 3")
    problem = forward.compiled.state.settle()
    if problem is not None:
        raise TraceDepartureError(f"{forward.owner}: {problem}")


def reset() -> None:
    """Forget everything of this process: traces, counters, settings and loaded plugins; meant for tests."""
    for forward in all_forwards():
        forward.release()
    counters.reset()
    reset_choices()
    reset_process_settings()
    reset_plugin_manager()
