"""What a child made by ``os.fork`` begins anew: locks of threads that it does not have, and captures.

Counters begin anew by ``counting.py``. It keeps the rest: plugins, settings, traces and compiled code.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class Inherited(Protocol):
    """Something that a forked child can't use as it stands."""

    def after_fork(self) -> None:
        """Become usable in a child, which has the thread that forked and no other; called in the child alone."""
        ...


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def renew_after_fork(one: Inherited) -> None:
    """Have ``after_fork`` called in every child that is forked while this is there."""
    _inherited.add(one)


def usable(lock: threading.RLock) -> threading.RLock:
    """Return a lock, or in its place a new one where it is held by a thread that is not there."""
    if not lock.acquire(blocking=False):
        return threading.RLock()
    lock.release()
    return lock


class Lock:
    """A re-entrant lock that a forked child can have, whichever thread of its parent held it.

    Args:
        when_lost: called in a child where another thread held it: what it guards may be half done.
    """

    def __init__(self, when_lost: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.RLock()
        self._when_lost = when_lost
        renew_after_fork(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._lock.release()

    def after_fork(self) -> None:
        """Be free in a child where a thread held it that is not there."""
        lock = usable(self._lock)
        if lock is not self._lock:
            self._lock = lock
            self._when_lost()


def _after_fork() -> None:
    for one in list(_inherited):
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
