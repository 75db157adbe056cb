"""What a hook may answer: each answer is checked where it is known whose it is, and noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from piecework.capturing import Capturer
from piecework.implementations import Implementation
from piecework.pieces import CompiledPiece, SplittingOp

if TYPE_CHECKING:
    from piecework.custom_op_limits import CustomOpImplementation

_given: ContextVar[list[tuple[Implementation, Any]]] = ContextVar("piecework_answers_given")


@contextmanager
def recording() -> Iterator[list[tuple[Implementation, Any]]]:
    """Note who answers what during one call of a hook; pluggy tells only the answers."""
    given: list[tuple[Implementation, Any]] = []
    token = _given.set(given)
    try:
        yield given
    finally:
        _given.reset(token)


def check_custom_op_enabled(implementation: Implementation, answer: object) -> bool | None:
    """Return the answer, if it is one that may be given."""
    if answer is not None and not isinstance(answer, bool):
        raise implementation.refuse(answer, "True, False or None")
    if answer is not None:
        _given.get().append((implementation, answer))
    return answer


def check_custom_op_implementations(implementation: Implementation, answer: object) -> Any:
    """Return the implementations of one plugin as a tuple; of a wrapper, the list of all plugins'."""
    return _checked_list(implementation, answer, "a list or tuple of CustomOpImplementation", _as_implementations)


def _as_implementations(
    implementation: Implementation, part: object, answer: object, allowed: str
) -> tuple[CustomOpImplementation, ...]:
    from piecework.custom_op_limits import CustomOpImplementation  # It needs torch, which is there by now.

    if not isinstance(part, (list, tuple)):
        raise implementation.refuse(answer, allowed)
    for item in part:
        if not isinstance(item, CustomOpImplementation):
            raise implementation.refuse(answer, f"{allowed}; {item!r} is none")
    return tuple(part)


def check_splitting_ops(implementation: Implementation, answer: object) -> Any:
    """Return the ops of one plugin as a tuple; of a wrapper, the list of all plugins' ops."""
    return _checked_list(implementation, answer, "a list or tuple of SplittingOp or names", _as_splitting_ops)


def _checked_list(implementation: Implementation, answer: object, allowed: str, as_typed: Callable[..., Any]) -> Any:
    """Return an answer to a hook that unites all plugins': one plugin's, or a wrapper's list of all."""
    if implementation.is_wrapper:
        if not isinstance(answer, (list, tuple)):
            raise implementation.refuse(answer, f"a list with {allowed} for each plugin")
        checked: Any = [as_typed(implementation, part, answer, allowed) for part in answer]
    elif answer is None:
        return None
    else:
        checked = as_typed(implementation, answer, answer, allowed)
    _given.get().append((implementation, checked))
    return checked


def _as_splitting_ops(
    implementation: Implementation, part: object, answer: object, allowed: str
) -> tuple[SplittingOp, ...]:
    if not isinstance(part, (list, tuple)):
        raise implementation.refuse(answer, allowed)
    for item in part:
        if not isinstance(item, (SplittingOp, str)) or not (item if isinstance(item, str) else item.name):
            raise implementation.refuse(answer, f"{allowed}; {item!r} is neither")
    return tuple(SplittingOp(item) if isinstance(item, str) else item for item in part)


def check_compiled_piece(implementation: Implementation, answer: object) -> CompiledPiece | None:
    """Return the answer, if it is one that may be given."""
    if answer is not None and (not isinstance(answer, CompiledPiece) or not callable(answer.run)):
        raise implementation.refuse(answer, "a CompiledPiece with a function as its run, or None")
    return _noted(implementation, answer, "compiled the piece; to compile pieces")


def check_capturer(implementation: Implementation, answer: object) -> Capturer | None:
    """Return the answer, if it is one that may be given."""
    if answer is not None and not isinstance(answer, Capturer):
        raise implementation.refuse(answer, "an instance of a subclass of piecework.Capturer, or None")
    return _noted(implementation, answer, "captures; to capture")


def _noted(implementation: Implementation, answer: Any, what_nobody_does: str) -> Any:
    """Note who gave the first answer; a wrapper may give none of its own."""
    if answer is None:
        return None
    given = _given.get()
    if implementation.is_wrapper and not given:
        raise implementation.refuse(
            answer, f"None where nobody {what_nobody_does}, implement the hook without wrapper=True"
        )
    given.append((implementation, answer))
    return answer


CHECKS = {
    "piecework_custom_op_enabled": check_custom_op_enabled,
    "piecework_custom_op_implementations": check_custom_op_implementations,
    "piecework_splitting_ops": check_splitting_ops,
    "piecework_compile_piece": check_compiled_piece,
    "piecework_capturer": check_capturer,
}
"""What becomes of an answer, by hook: returned as its typed form, or refused."""
