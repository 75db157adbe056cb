"""Notice changes of a traced model's state by events, before its next answer.

This is the only place where classes of the user's are touched: ``__setattr__``, ``__delattr__``,
``_apply``, ``load_state_dict`` and what registers forward hooks of the traced modules' classes tell of a
change, and so do the dicts that hold parameters, buffers and submodules. What goes past both is found by the sample of
addresses (``p.data = t``) or by ``verify_assumptions`` only (writes through ``__dict__``).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from piecework import torch_internals as internals
from piecework.forking import Lock

_WATCHED_METHODS = (
    *("__setattr__", "__delattr__", "_apply", "load_state_dict"),
    *("register_forward_hook", "register_forward_pre_hook"),
)
_STATE_DICTS = ("_parameters", "_buffers", "_modules")

_watches: dict[int, weakref.WeakSet[Watch]] = {}
"""Watches by the identity of a module's ``__dict__``: a compiled module shares it with the original."""
_patched: weakref.WeakSet[type] = weakref.WeakSet()
_counted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose dicts count; those of a watch that was collected as garbage, too."""


def _count_again() -> None:
    """Have the dicts of modules count that a thread made plain for a moment, which a forked child does not have."""
    for module in list(_counted):
        _put_counting_dicts(module)


_lock = Lock(when_lost=_count_again)


class Watch:
    """Says whether anything happened to the modules of one traced model since it was last settled."""

    def __init__(self) -> None:
        self.changed = False
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def cover(self, modules: Iterable[nn.Module]) -> None:
        """Watch these too, such as a submodule that took the place of a traced one."""
        with _lock:
            for module in modules:
                if module not in self.modules:
                    self.modules.add(module)
                    _watch_module(module, self)

    def close(self) -> None:
        """Stop watching."""
        with _lock:
            for module in self.modules:
                watches = _watches.get(id(module.__dict__))
                if watches is not None:
                    watches.discard(self)
                if not watches:
                    _take_counting_dicts(module)  # A later trace looks at what is there.


def watched_modules() -> list[nn.Module]:
    """Return every module that some watch covers, or did."""
    with _lock:
        return list(_counted)


@contextlib.contextmanager
def plain_dicts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put ordinary dicts in place for a moment: traces and recorded guards ask for exactly those."""
    with _lock:
        counting = [(module, _take_counting_dicts(module)) for module in modules]
        try:
            yield
        finally:
            for module, dicts in counting:
                for name, counted in dicts.items():
                    plain = module.__dict__.get(name)
                    if type(plain) is dict:
                        # Another thread may have written to it meanwhile. By identity: == asks tensors.
                        if [*map(id, plain.values())] != [*map(id, counted.values())] or [*plain] != [*counted]:
                            counted.clear()
                            counted.update(plain)
                        module.__dict__[name] = counted


def _watch_module(module: nn.Module, watch: Watch) -> None:
    key = id(module.__dict__)
    if key not in _watches:
        _watches[key] = weakref.WeakSet()
        weakref.finalize(module, _watches.pop, key, None).atexit = False
    _watches[key].add(watch)
    _patch(type(module))
    _put_counting_dicts(module)
    _counted.add(module)


def _put_counting_dicts(module: nn.Module) -> None:
    for name in _STATE_DICTS:
        held = module.__dict__.get(name)
        if type(held) is dict:
            module.__dict__[name] = _CountingDict(held, id(module.__dict__))


def _take_counting_dicts(module: nn.Module) -> dict[str, _CountingDict]:
    taken = {name: held for name in _STATE_DICTS if isinstance(held := module.__dict__.get(name), _CountingDict)}
    for name, held in taken.items():
        module.__dict__[name] = dict(held)
    return taken


def _tell(module: nn.Module) -> None:
    watches = _watches.get(id(module.__dict__))
    if watches:
        for watch in list(watches):
            watch.changed = True


class _CountingDict(dict[str, Any]):
    """A dict that tells of every write; copies and pickles of it are ordinary dicts."""

    __slots__ = ("key",)

    def __init__(self, items: dict[str, Any], key: int) -> None:
        super().__init__(items)
        self.key = key

    def tell(self) -> None:
        for watch in list(_watches.get(self.key, ())):
            watch.changed = True

    def __reduce_ex__(self, protocol: Any) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)

    def copy(self) -> dict[str, Any]:
        return dict(self)


def _telling(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    @functools.wraps(original)
    def method(self: _CountingDict, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not internals.is_traced():
            self.tell()
        return result

    return method


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(_CountingDict, _name, _telling(_name))


def _patch(cls: type) -> None:
    """Wrap the methods through which a module's state changes, once per class."""
    if cls in _patched:
        return
    _patched.add(cls)
    for name in _WATCHED_METHODS:
        setattr(cls, name, _wrapped(getattr(cls, name)))


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not internals.is_traced():
            _tell(self)
        return result

    return method
