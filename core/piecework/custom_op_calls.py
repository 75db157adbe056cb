"""Untraced calls of custom ops: what answers each op, and the settings of which compiled model it goes by."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from piecework import torch_internals as internals
from piecework.config_checks import CompilationLevel
from piecework.custom_op_choice import Choice, CustomOpChoices
from piecework.custom_op_limits import form_of
from piecework.errors import PieceworkError
from piecework.settings import resolve_settings

if TYPE_CHECKING:
    from piecework.custom_op import CustomOp


MOST_FORMS = 1000
"""Of tensors that are remembered, as long as sequences of ever other lengths come."""


class UntracedOp:
    """What answers the untraced calls of one op: what was chosen at the first, and the native body outside of that.

    A choice holds for a device, within its limits, and for calls that need no gradients it has none of. That is looked
    at in every call, since a kernel that is given what it was not made for may answer with wrong numbers.

    Args:
        choice: what was chosen.
        native: called with the op first: its native body, or that compiled by itself.
    """

    def __init__(self, choice: Choice, native: Callable[..., Any]) -> None:
        self.choice = choice
        self.native = native
        self.num_outside = 0
        """Calls that the native body answered, since they were outside of the limits."""
        self._readers: dict[tuple[int, tuple[str, ...]], Callable[..., Any] | None] = {}
        """By the form of a call: what returns the tensor that limits are about; None where it can't be so called."""

        self._within: set[tuple[torch.dtype, torch.Size]] = set()
        """Of tensors that limits were looked at for, and held."""

    def answer(self, op: CustomOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call."""
        if self.choice.is_native:
            return self.native(op, *args, **kwargs)
        if self._is_within_limits(op, args, kwargs):
            return self.choice.implementation.function(op, *args, **kwargs)
        self.num_outside += 1
        return self.native(op, *args, **kwargs)

    def _is_within_limits(self, op: CustomOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        form = (len(args), tuple(kwargs))
        if form not in self._readers:
            self._readers[form] = self._reader(args, kwargs)
        read = self._readers[form]
        if read is None:
            return False
        limits = self.choice.implementation.limits
        if not limits.has_gradient and torch.is_grad_enabled() and needs_gradient(op, args, kwargs):
            return False
        first = first_tensor(args, kwargs)
        if first is not None and first.device != self.choice.device:
            return False
        limited = read(args, kwargs)
        if not isinstance(limited, torch.Tensor):
            return limits.refusal(None) is None
        seen = (limited.dtype, limited.shape)
        if seen not in self._within:
            if limits.refusal(form_of(limited)) is not None:
                return False
            if len(self._within) >= MOST_FORMS:
                self._within.clear()
            self._within.add(seen)
        return True

    def _reader(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        implementation = self.choice.implementation
        signature, argument = inspect.signature(implementation.function), implementation.limits.argument
        try:
            signature.bind(None, *args, **kwargs)
        except TypeError:
            return None
        if argument is None:
            return first_tensor
        position = list(signature.parameters).index(argument) - 1
        if argument not in kwargs and position < len(args):
            return lambda args, kwargs: args[position]
        return lambda args, kwargs: kwargs.get(argument)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the first tensor among the arguments of a call."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    return None


def needs_gradient(op: CustomOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether something that goes into a call asks for a gradient."""
    given = [value for value in (*args, *kwargs.values(), *op.parameters()) if isinstance(value, torch.Tensor)]
    return any(value.requires_grad or internals.is_functorch_wrapped_tensor(value) for value in given)


# --- whose settings count -----------------------------------------------------------------------


@dataclass
class Scope:
    """A block whose custom ops go by the settings of one compilation."""

    choices: CustomOpChoices
    failure: PieceworkError | None = None
    """What went wrong in a choice while Dynamo was tracing, which wraps every error in one of its own."""
    words: tuple[Any, ...] = ()
    """Of the failure, as they were."""


_scopes: weakref.WeakSet[CustomOpChoices] = weakref.WeakSet()
"""The choices of all compiled models that have called ops."""
_by_op_of_process: weakref.WeakKeyDictionary[CustomOp, UntracedOp] = weakref.WeakKeyDictionary()
_scope: ContextVar[Scope | None] = ContextVar("piecework_custom_op_scope", default=None)


def current_scope() -> Scope | None:
    """Return the scope of the compiled model that is traced or called, None outside of any."""
    return _scope.get()


@contextlib.contextmanager
def choosing(choices: CustomOpChoices) -> Iterator[None]:
    """Let custom ops inside a block go by the settings of one compilation.

    Raises:
        PieceworkError: what went wrong in a choice while tracing, in place of what Dynamo made of it.
    """
    _scopes.add(choices)
    scope = Scope(choices)
    token = _scope.set(scope)
    try:
        yield
    except Exception:  # Raised again: as it is, or as it was before Dynamo wrapped it.
        if scope.failure is not None:
            error, scope.failure.args = scope.failure, scope.words  # Dynamo adds to the text.
            raise error from error.__cause__
        raise
    finally:
        _scope.reset(token)


def by_op_of_process() -> weakref.WeakKeyDictionary[CustomOp, UntracedOp]:
    """Return what answers the calls of ops outside of any compiled model."""
    return _by_op_of_process


def choices_of_process() -> CustomOpChoices:
    """Return what chooses for an op outside of any compiled model: by the settings of the process as they are now."""
    return CustomOpChoices("this process", resolve_settings(None, default_level=CompilationLevel.NO_COMPILATION))


def forget_op(op: CustomOp) -> None:
    """Have an op choose anew at its next untraced call, since it was moved to another device or dtype."""
    for by_op in (_by_op_of_process, *(choices.by_op for choices in list(_scopes))):
        by_op.pop(op, None)


def reset_choices() -> None:
    """Forget the choices of the process."""
    _by_op_of_process.clear()
