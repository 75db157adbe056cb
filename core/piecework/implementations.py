"""What a plugin implements: read once, checked against the hook specifications, called with blame."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from piecework import hookspecs
from piecework.errors import PieceworkError, PluginError
from piecework.loading import PLUGIN_API, Origin, describe_error, nearest

PROJECT = "piecework"


@dataclass(frozen=True, eq=False)
class Implementation:
    """One plugin's implementation of one hook."""

    origin: Origin
    hook: str
    function: Callable[..., Any]
    accepted: frozenset[str]
    """The arguments of the hook that the function wants."""
    is_wrapper: bool
    mark: int
    """0 for ``tryfirst``, 1 for none, 2 for ``trylast``."""

    def call(self, arguments: dict[str, Any]) -> Any:
        """Call the function; what it raises names the plugin, unless it is one of our own errors."""
        try:
            return self.function(**{name: value for name, value in arguments.items() if name in self.accepted})
        except PieceworkError:
            raise
        except Exception as error:
            raise self.blame(error, arguments) from error

    def wrap(self, arguments: dict[str, Any]) -> Generator[None, Any, Any]:
        """Run the wrapper around one ``yield``: result and exception of what it wraps go through it.

        Taken in steps, not by ``yield from``: only here is it known whose wrapper yields too often.
        """
        generator = self.call(arguments)
        try:
            next(generator)
        except StopIteration:
            raise PluginError(f"{self.origin}: the wrapper of {self.hook} must yield once, it did not yield") from None
        except PieceworkError:
            raise
        except Exception as error:
            raise self.blame(error, arguments) from error
        failure: BaseException | None = None
        inner: Any = None
        try:
            inner = yield
        except BaseException as error:  # Thrown into the wrapper below, which lets it go on.
            failure = error
        try:
            if failure is not None:
                generator.throw(failure)
            else:
                generator.send(inner)
        except StopIteration as stop:
            return stop.value
        except PieceworkError:
            raise
        except Exception as error:
            raise self.blame(error, arguments) from error
        generator.close()
        raise PluginError(f"{self.origin}: the wrapper of {self.hook} must yield once, it yielded twice")

    def blame(self, error: Exception, arguments: dict[str, Any]) -> PluginError:
        """Return the error that says which plugin failed, in which hook, on what."""
        piece = arguments.get("piece")
        where = f" for {piece.name!r}" if piece is not None else ""
        return PluginError(f"{self.origin} failed in {self.hook}{where}: {describe_error(error)}")

    def refuse(self, value: object, allowed: str) -> PluginError:
        """Return the error that says which plugin answered with what."""
        kind = "wrapper of " if self.is_wrapper else ""
        return PluginError(f"{self.origin} answered {kind}{self.hook} with {value!r}, allowed: {allowed}")


def hook_arguments() -> dict[str, tuple[str, ...]]:
    """Return the arguments of each hook, by the hook's name, in the order of one forward."""
    return {
        name: tuple(inspect.signature(function).parameters)
        for name, function in vars(hookspecs).items()
        if hasattr(function, f"{PROJECT}_spec")
    }


def read_implementations(plugin: object, origin: Origin) -> tuple[Implementation, ...]:
    """Find and check all hook implementations of a plugin, calling none.

    pluggy lets a misspelt hook pass until it is asked, so the check is made here, where the plugin is known.

    Raises:
        PluginError: a hook is unknown, its arguments are wrong, or it is not marked. The message is a
            predicate: the caller puts the plugin before it.
    """
    reader = pluggy.PluginManager(PROJECT)
    try:
        reader.register(plugin, origin.name)
    except (Exception, SystemExit) as error:
        raise PluginError(f"can't be searched for hooks: {describe_error(error)}") from error
    known = hook_arguments()
    found = []
    for caller in reader.get_hookcallers(plugin) or ():
        for marked in caller.get_hookimpls():
            if caller.name in known:
                found.append(_checked(marked, caller.name, known[caller.name], origin))
            elif not marked.optionalhook:
                raise PluginError(_unknown_hook(caller.name, known))
    _check_all_marked(plugin, {implementation.function.__name__ for implementation in found}, known)
    return tuple(sorted(found, key=lambda implementation: list(known).index(implementation.hook)))


def _unknown_hook(name: str, known: dict[str, tuple[str, ...]]) -> str:
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else f"the hooks are {', '.join(known)}."
    return (
        f"implements unknown hook {name!r}; {hint} (This piecework has version {PLUGIN_API} of the hooks; a hook of a "
        "later version is marked optionalhook=True.)"
    )


def _checked(marked: pluggy.HookImpl, hook: str, arguments: tuple[str, ...], origin: Origin) -> Implementation:
    if marked.hookwrapper:
        raise PluginError(f"implements {hook} with hookwrapper=True, allowed: wrapper=True (one yield, then return)")
    if marked.wrapper and not inspect.isgeneratorfunction(marked.function):
        raise PluginError(f"implements {hook} with wrapper=True, but the function does not yield")
    parameters = inspect.signature(marked.function).parameters.values()
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for name in required:
        if name not in arguments or name not in by_name:
            raise PluginError(
                f"implements {hook} with argument {name!r}, which the hook does not pass; "
                f"the signature is {hook}({', '.join(arguments)}) in version {PLUGIN_API} of the hooks, which this "
                "piecework has"
            )
    mark = 2 if marked.trylast else 0 if marked.tryfirst else 1
    return Implementation(
        origin, hook, marked.function, frozenset(by_name & set(arguments)), is_wrapper=bool(marked.wrapper), mark=mark
    )


def _check_all_marked(plugin: object, marked: set[str], known: dict[str, tuple[str, ...]]) -> None:
    for hook in known:
        function = inspect.getattr_static(plugin, hook, None)
        if inspect.isfunction(function) and hook not in marked and not hasattr(function, f"{PROJECT}_spec"):
            raise PluginError(f"defines {hook} without @piecework.hookimpl, so that it would never be called")


def make_caller(
    implementations: Sequence[Implementation], checks: Mapping[str, Callable[[Implementation, Any], Any]]
) -> pluggy.PluginManager:
    """Build what calls the implementations in exactly the given order, each answer checked.

    Each is registered by itself and without its marks, last one first: pluggy asks in reverse, and its
    ``trylast`` would reverse the order of those that have it.
    """
    caller = pluggy.PluginManager(PROJECT)
    caller.add_hookspecs(hookspecs)
    for index, implementation in reversed(list(enumerate(implementations))):
        caller.register(_Registered(implementation, checks[implementation.hook]), f"{index}")
    return caller


class _Registered:
    """One implementation, as a plugin of pluggy: so order, choice and blame are each by implementation."""

    def __init__(self, implementation: Implementation, check: Callable[[Implementation, Any], Any]) -> None:
        self.implementation = implementation
        specification = getattr(hookspecs, implementation.hook)
        names = hook_arguments()[implementation.hook]

        def answer(*values: Any) -> Any:
            return check(implementation, implementation.call(dict(zip(names, values, strict=True))))

        def wrap(*values: Any) -> Generator[None, Any, Any]:
            result = yield from implementation.wrap(dict(zip(names, values, strict=True)))
            return check(implementation, result)

        function: Any = wrap if implementation.is_wrapper else answer
        function.__wrapped__ = specification  # Where pluggy reads which arguments to pass.
        hookspecs.hookimpl(function, wrapper=implementation.is_wrapper)
        setattr(self, implementation.hook, function)
