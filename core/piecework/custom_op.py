"""``CustomOp``: a layer with several bodies, of which whoever runs the program chooses."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from piecework import torch_internals as internals
from piecework.config import CompilationConfig
from piecework.config_checks import CompilationLevel, is_custom_op_name, show
from piecework.custom_op_calls import (
    UntracedOp,
    by_op_of_process,
    choices_of_process,
    current_scope,
    forget_op,
)
from piecework.custom_op_choice import NATIVE, CallForm, Choice, CustomOpChoices, log_choice
from piecework.custom_op_limits import TensorForm, form_of
from piecework.custom_op_switch import report_names
from piecework.errors import ConfigError, PieceworkError
from piecework.process_settings import torch_compile_backend
from piecework.settings import resolve_settings
from piecework.trace import with_own_code


class CustomOp(nn.Module):
    """A layer that runs by plain PyTorch or by a kernel, as levels, plugins and settings decide.

    A subclass has ``forward_native`` in plain PyTorch, which Inductor can fuse with what is around it, and perhaps
    ``forward_triton``, ``forward_cuda``, ``forward_cpu`` and so on for other devices; each takes and returns the same.
    Plugins bring more by the hook ``piecework_custom_op_implementations``. ``forward`` runs one of them::

        class RMSNorm(piecework.CustomOp, op_name="rms_norm"):
            def __init__(self, hidden: int, eps: float = 1e-6) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(hidden))
                self.eps = eps

            def forward_native(self, x: torch.Tensor) -> torch.Tensor:
                return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

            def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
                return torch.ops.mine.rms_norm(x, self.weight, self.eps)

    An op that is on takes the first whose limits hold, in this order: plugins' implementations, ``forward_triton``,
    ``forward_<device>``; one that is off, or has none of them, takes ``forward_native``. Ops are on below level 3 and
    off at it, unless plugins, ``custom_ops`` or ``PIECEWORK_CUSTOM_OPS`` say otherwise. What was chosen, and why, is in
    ``piecework.report(model)``.

    The choice is made while a model is traced, for each place where the op stands; at level 0 at the first call of each
    op, which then keeps it (a call outside of the limits runs the native body) until the op is moved by ``.to()`` or
    ``piecework.reset()`` is called. Several classes may have one ``op_name``: a plugin that brings kernels for a name
    says what it takes an op of that name to be.

    Args of the class statement:
        op_name: what settings and plugins call it; a subclass that keeps the native body of a named class may leave it
            out.
        compile_native: where the level of the process is 1 or above, compile the native body by itself in untraced
            calls, such as those inside a splitting op, which no compiler sees.

    Raises:
        ConfigError: by the class statement, where the name is no ASCII identifier, the class has no
            ``forward_native``, defines ``forward``, or has a native body of its own under a name that it inherits.
    """

    op_name: ClassVar[str] = ""
    compile_native: ClassVar[bool] = False

    def __init_subclass__(cls, *, op_name: str | None = None, compile_native: bool | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if op_name is not None:
            cls.op_name = op_name
        if compile_native is not None:
            cls.compile_native = compile_native
        _check_class(cls, is_named=op_name is not None)
        cls.forward = _forward_like(cls.forward_native)
        _classes.setdefault(cls.op_name, weakref.WeakSet()).add(cls)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result in plain PyTorch; runs on every device."""
        raise NotImplementedError(f"{type(self).__qualname__} has no forward_native")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        forget_op(self)
        return super()._apply(*args, **kwargs)


_classes: dict[str, weakref.WeakSet[type[CustomOp]]] = {}


def registered_ops() -> dict[str, tuple[type[CustomOp], ...]]:
    """Return the classes of custom ops that are there, by op name, sorted."""
    by_name = {name: sorted(classes, key=lambda cls: cls.__qualname__) for name, classes in _classes.items()}
    return {name: tuple(classes) for name, classes in sorted(by_name.items()) if classes}


def _check_class(cls: type[CustomOp], *, is_named: bool) -> None:
    what = f"custom op {cls.__qualname__}"
    if not isinstance(cls.op_name, str) or not is_custom_op_name(cls.op_name):
        raise ConfigError(
            f"{what}: op_name must be an ASCII identifier other than 'all' and 'none', got {show(cls.op_name)}; "
            f'write class {cls.__name__}(piecework.CustomOp, op_name="rms_norm")'
        )
    if "forward" in vars(cls):
        raise ConfigError(f"{what} defines forward, which chooses what runs; name its body forward_native")
    if cls.forward_native is CustomOp.forward_native:
        raise ConfigError(f"{what} has no forward_native, the body in plain PyTorch that runs everywhere")
    if "forward_native" in vars(cls) and not is_named:
        raise ConfigError(
            f"{what} has a forward_native of its own, so what runs {cls.op_name!r} may compute something else; give "
            f'it a name of its own, or op_name="{cls.op_name}" again where kernels for that name are right'
        )


def _forward_like(native: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``forward`` of a class, with the signature of its native body."""

    @functools.wraps(native)
    def forward(self: CustomOp, *args: Any, **kwargs: Any) -> Any:
        if internals.is_traced():
            return _traced(self, args, kwargs)
        scope = current_scope()
        by_op = by_op_of_process() if scope is None else scope.choices.by_op
        untraced = by_op.get(self)
        if untraced is None:
            by_op[self] = untraced = _choose_untraced(self, args, kwargs)
        return untraced.answer(self, args, kwargs)

    forward.__name__ = "forward"
    forward.__qualname__ = native.__qualname__.replace(NATIVE, "forward")
    return forward


# --- untraced: level 0, and what no compiler sees -------------------------------------------------


def _choose_untraced(op: CustomOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UntracedOp:
    """Choose what answers the calls of an op from now on."""
    scope, op_class = current_scope(), type(op)
    choices = choices_of_process() if scope is None else scope.choices
    call = CallForm(tuple(map(_form_of, args)), tuple((name, _form_of(value)) for name, value in kwargs.items()))
    present = tuple(name for name in choices.attributes_asked(op_class, call.device) if hasattr(op, name))
    choice = choices.choose(op_class, call, present)
    log_choice(choices.owner, choice)
    if scope is None:
        report_names(choices.settings, registered_ops(), [op_class.op_name], owner=choices.owner)
    level = choices.settings.level
    is_compiled = op_class.compile_native and level > CompilationLevel.NO_COMPILATION
    return UntracedOp(choice, _compiled_native(op_class, level) if is_compiled else op_class.forward_native)


def _form_of(value: Any) -> TensorForm | None:
    return form_of(value) if isinstance(value, torch.Tensor) else None


def _compiled_native(op_class: type[CustomOp], level: CompilationLevel) -> Callable[..., Any]:
    """Return the native body, compiled by itself behind torch's guards: an op may change between calls.

    Nothing of it is captured: it may run inside of a graph that is recorded.
    """
    from piecework.dynamo_backend import piecework_backend  # It imports what uses this module.

    body: Any = op_class.forward_native
    body = types.FunctionType(body.__code__, body.__globals__, body.__name__, body.__defaults__, body.__closure__)
    body.__kwdefaults__ = op_class.forward_native.__kwdefaults__
    if level is not CompilationLevel.PIECEWISE:
        return torch.compile(with_own_code(body), dynamic=True, backend=torch_compile_backend())
    options = {"capture_sizes": (), "level": level}
    return torch.compile(with_own_code(body), dynamic=True, backend=piecework_backend, options=options)


# --- traced: inside of Dynamo ---------------------------------------------------------------------


class _Brought:
    """Holds what plugins bring under names, since Dynamo can take no function as a constant, but the name of one."""

    names: ClassVar[dict[int, str]] = {}
    """By the identity of a function, which is kept."""
    numbers: ClassVar[Iterator[int]] = itertools.count()

    @classmethod
    def name_of(cls, function: Callable[..., Any]) -> str:
        """Return the name of a function, which is kept for the life of the process: traces refer to it."""
        key = id(function)
        if key not in cls.names:
            name = f"function_{next(cls.numbers)}"
            setattr(cls, name, staticmethod(function))
            cls.names[key] = name
        return cls.names[key]


def _traced(op: CustomOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what is chosen for this place; Dynamo traces it, and evaluates the choice as a constant.

    Lists, since Dynamo must see them filled; a dim that varies is None, so that no guard on its size is made.
    """
    call_args = tuple([_traced_form(value) for value in args])
    call_kwargs = tuple([(name, _traced_form(value)) for name, value in kwargs.items()])
    asked = _attributes_asked(type(op), call_args, call_kwargs)
    present = tuple([name for name in asked.split() if hasattr(op, name)])
    name = _name_of_choice(type(op), call_args, call_kwargs, present)
    return getattr(type(op) if name.startswith("forward_") else _Brought, name)(op, *args, **kwargs)


def _traced_form(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, torch.Tensor):
        return None
    sizes = [size if internals.has_static_value(size) else None for size in value.shape]
    return (value.dtype, value.device, tuple(sizes))


@torch.compiler.assume_constant_result
def _attributes_asked(op_class: type[CustomOp], args: Any, kwargs: Any) -> str:
    """Return the names of the attributes that candidates want, in one string: Dynamo takes no tuple as a constant."""
    with _keeping_failure():
        return " ".join(_choices_of_trace().attributes_asked(op_class, _call_form(args, kwargs).device))


@torch.compiler.assume_constant_result
def _name_of_choice(op_class: type[CustomOp], args: Any, kwargs: Any, present: tuple[str, ...]) -> str:
    with _keeping_failure():
        # No trace of ours records gradients; a user's torch.compile may, and has a guard on the mode.
        call = replace(_call_form(args, kwargs), has_gradient=torch.is_grad_enabled())
        choice: Choice = _choices_of_trace().choose_in_trace(op_class, call, present)
        return choice.title if choice.origin is None else _Brought.name_of(choice.implementation.function)


def _call_form(args: Any, kwargs: Any) -> CallForm:
    forms = tuple(None if form is None else TensorForm(*form) for form in args)
    return CallForm(forms, tuple((name, None if form is None else TensorForm(*form)) for name, form in kwargs))


@contextlib.contextmanager
def _keeping_failure() -> Iterator[None]:
    """Keep what goes wrong for ``choosing`` to raise: Dynamo wraps it in an error of its own."""
    try:
        yield
    except PieceworkError as error:
        if (scope := current_scope()) is not None:
            scope.failure, scope.words = error, error.args
        raise


def _choices_of_trace() -> CustomOpChoices:
    """Return the choices for what Dynamo traces now: those of a compiled model, or of a user's ``torch.compile``."""
    if (scope := current_scope()) is not None:
        return scope.choices
    graph = internals.graph_being_traced()
    if graph is None:
        return choices_of_process()  # Traced by other means, as by a non-strict export.
    if _last_trace.graph() is not graph:
        backend, options = internals.backend_being_traced_for(graph)
        argument, level = None, CompilationLevel.NO_COMPILATION
        if backend == "piecework":
            argument, level = CompilationConfig(**options) if options else None, CompilationLevel.PIECEWISE
        settings = resolve_settings(argument, default_level=level)
        _last_trace.choices = CustomOpChoices(f"torch.compile(backend={backend!r})", settings)
        _last_trace.graph = weakref.ref(graph)
    return _last_trace.choices


class _LastTrace(threading.local):
    """The graph that a user's ``torch.compile`` traces in a thread, and the choices for it."""

    graph: Callable[[], object] = staticmethod(lambda: None)
    choices: CustomOpChoices


_last_trace = _LastTrace()
