"""Notes on exceptions of pieces and ops: the exception comes through as it is, with where it was raised.

Nothing is done for that in a call that succeeds. Generated code has a function in its globals that says what each of
its lines does; it is looked up in the traceback of an exception.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from piecework import torch_internals as internals
from piecework.errors import PieceworkError

WHERE = "piecework_where"
"""Name in the globals of generated code: ``(frame, line)`` to what the line does in words, or None."""


def note_origin(error: Exception, owner: str) -> None:
    """Add to an exception which piece or op of a model raised it.

    Errors of Piecework itself say so in their text. An op that is called inside of a piece is named too, where Python
    sees the call.

    Args:
        error: it has passed through generated code.
        owner: name of the model.
    """
    if isinstance(error, PieceworkError):
        return
    steps = list(_steps_of(error.__traceback__))
    for index, (frame, line) in enumerate(steps):
        where = frame.f_globals.get(WHERE)
        words = where(frame, line) if where is not None else None
        if words is not None:
            deeper = (below for below, _ in steps[index + 1 :])
            inner = itertools.takewhile(lambda below: WHERE not in below.f_globals, deeper)
            op = next(filter(None, map(internals.op_called_in, inner)), None)
            told = op is None or op in words
            add_note(error, f"raised in {words} of {owner}" if told else f"raised by {op} in {words} of {owner}")
            return


def add_note(error: BaseException, text: str) -> None:
    """Do as ``BaseException.add_note``, which Python 3.10 lacks; an exception that is raised again has it once."""
    notes = vars(error).setdefault("__notes__", [])
    if text not in notes:
        notes.append(text)


def modules_of(error: BaseException) -> set[str]:
    """Return the names of the modules whose code an exception has passed through."""
    return {frame.f_globals.get("__name__", "") for frame, _ in _steps_of(error.__traceback__)}


def has_passed(error: BaseException, function: Callable[..., Any]) -> bool:
    """Whether an exception came out of a function: what calls it did not raise it itself."""
    return any(frame.f_code is function.__code__ for frame, _ in _steps_of(error.__traceback__))


def _steps_of(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
