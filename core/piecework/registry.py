"""A set of plugins: who is loaded, in which order they are asked, and who answered."""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from piecework.answers import CHECKS, recording
from piecework.errors import ConfigError, PluginError, PluginWarning
from piecework.implementations import Implementation, make_caller, read_implementations
from piecework.loading import (
    RESERVED_NAMES,
    InstalledPlugin,
    Origin,
    Selection,
    check_all_installed,
    check_plugin_api,
    find_installed_plugins,
    import_plugin,
    instantiate,
    not_installed,
    parse_selection,
)
from piecework.pieces import CompiledPiece, SplittingOp

if TYPE_CHECKING:
    import torch

    from piecework.capturing import Capturer
    from piecework.config_checks import CompilationLevel
    from piecework.custom_op_limits import CustomOpImplementation
    from piecework.pieces import Piece
    from piecework.settings import CompilationConfig

logger = logging.getLogger(__name__)

EAGER = "eager"
"""The ``piece_compiler`` that is no plugin: pieces run as they are."""
NONE = "none"
"""The ``capturer`` that is no plugin: nothing is captured."""


@dataclass(frozen=True)
class PluginInfo:
    """What is known of one plugin, whether it takes part or not."""

    name: str
    distribution: str | None
    """``None`` for a plugin that the program registered itself."""
    version: str | None
    state: Literal["active", "blocked", "failed"]
    hooks: tuple[str, ...] = ()
    position: int | None = None
    """The place in the order of asking, from 0; ``None`` unless active. ``order(hook)`` is exact where a
    plugin marks its hooks differently."""
    cause: str | None = None
    """Why it is blocked or failed."""
    load_s: float = 0.0
    """Seconds to import and check it."""


class PluginManager:
    """Holds plugins and asks them, in a fixed order.

    Several may live in one process; ``plugin_manager()`` gives the one that a compilation uses.
    """

    def __init__(self) -> None:
        self._active: dict[str, PluginInfo] = {}
        self._absent: list[PluginInfo] = []
        self._registered: dict[str, object] = {}
        self._implementations: list[Implementation] = []
        self._named: tuple[str, ...] = ()
        self._said_who_is_asked: set[str] = set()
        self._arrange()

    def load(self, *, selection: str | None = None, report: bool = True) -> None:
        """Import and register the installed plugins that are wanted, in the order of their names.

        Args:
            selection: the value of ``PIECEWORK_PLUGINS``; ``None`` if it is not set.
            report: whether a plugin that fails raises (when named in ``selection``) or warns (when not). With
                ``False`` it is only listed by ``infos()``.

        Raises:
            ConfigError: ``selection`` can't be read.
            PluginError: ``selection`` names a plugin that is not installed, or one that fails.
        """
        wanted = parse_selection(selection)
        installed = find_installed_plugins()
        check_all_installed(wanted, installed)
        self._named = wanted.named or ()
        failures = []
        for plugin in installed:
            error = self._load_one(plugin, wanted, installed)
            if error is not None and report and plugin.origin.name in self._named:
                raise error
            if error is not None:
                failures.append((plugin.origin.name, error))
        self._arrange()
        for name, error in failures if report else ():
            message = f"{error}; it is left out, and PIECEWORK_PLUGINS=-{name} does so without this warning"
            warnings.warn(PluginWarning(message), stacklevel=2)

    def _load_one(
        self, plugin: InstalledPlugin, wanted: Selection, installed: tuple[InstalledPlugin, ...]
    ) -> PluginError | None:
        origin = plugin.origin
        why_blocked = wanted.why_blocked(origin.name)
        if why_blocked is not None:
            self._absent.append(PluginInfo(**vars(origin), state="blocked", cause=why_blocked))
            return None
        start = time.perf_counter()
        try:
            _check_name_is_free(origin, installed)
            self._add(import_plugin(plugin), origin, start)
        except PluginError as error:
            load_s = time.perf_counter() - start
            self._absent.append(PluginInfo(**vars(origin), state="failed", cause=str(error), load_s=load_s))
            failure = PluginError(f"{origin} {error}")
            failure.__cause__ = error.__cause__
            return failure
        logger.debug("loaded %s in %.3f s", origin, self._active[origin.name].load_s)
        return None

    def register(self, plugin: object, *, name: str | None = None) -> str:
        """Register a plugin that the program has in hand, and return its name.

        It takes its place by name and marks, as an installed plugin does.

        Args:
            plugin: a module, an object, or a class, of which an instance is made.
            name: left out, the plugin's ``name``, ``__name__`` or class name.

        Raises:
            PluginError: the name is taken, or the plugin is not usable. Nothing is registered then.
        """
        start = time.perf_counter()
        origin = Origin(name or _own_name(plugin))
        try:
            if origin.name in self._active:
                raise PluginError(f"can't be registered: {origin.name!r} is the name of another plugin")
            self._add(instantiate(plugin), origin, start)
        except PluginError as error:
            raise PluginError(f"{origin} {error}") from error.__cause__
        self._registered[origin.name] = plugin
        self._arrange()
        return origin.name

    def registered(self) -> dict[str, object]:
        """Return what the program gave to ``register``, by name."""
        return dict(self._registered)

    def _add(self, plugin: object, origin: Origin, start: float) -> None:
        """Take in a plugin only after all checks, so that a bad one leaves nothing behind."""
        if origin.name in RESERVED_NAMES:
            raise PluginError(f"can't have the name {origin.name!r}: {RESERVED_NAMES[origin.name]}")
        check_plugin_api(plugin)
        implementations = read_implementations(plugin, origin)
        self._implementations += implementations
        hooks = tuple(dict.fromkeys(implementation.hook for implementation in implementations))
        self._active[origin.name] = PluginInfo(
            **vars(origin), state="active", hooks=hooks, load_s=time.perf_counter() - start
        )

    def _arrange(self) -> None:
        self._implementations.sort(key=self._rank)
        self._caller = make_caller(self._implementations, CHECKS)

    def _rank(self, implementation: Implementation) -> tuple[int, int, str]:
        name = implementation.origin.name
        if name in self._named:
            return (0, self._named.index(name), name)
        return (1, implementation.mark, name)

    def infos(self) -> tuple[PluginInfo, ...]:
        """Describe all plugins: the active ones in the order of asking, then the others by name."""
        ranks = {name: self._rank_of_plugin(name) for name in self._active}
        ordered = sorted(self._active.values(), key=lambda info: ranks[info.name])
        active = [replace(info, position=index) for index, info in enumerate(ordered)]
        return (*active, *sorted(self._absent, key=lambda info: (info.name, info.distribution or "")))

    def _rank_of_plugin(self, name: str) -> tuple[int, int, str]:
        own = [self._rank(i) for i in self._implementations if i.origin.name == name]
        if own:
            return min(own)
        return (0, self._named.index(name), name) if name in self._named else (1, 1, name)

    def order(self, hook: str) -> tuple[str, ...]:
        """Return the names of the plugins that implement a hook, wrappers too, in the order of asking."""
        names = (i.origin.name for i in self._implementations if i.hook == hook)
        return tuple(dict.fromkeys(names))

    def custom_op_enabled(
        self, op_name: str, level: CompilationLevel, config: CompilationConfig
    ) -> tuple[bool, Origin] | None:
        """Ask whether a custom op is on, and return the answer with the plugin that gave it; None if nobody did.

        Raises:
            PluginError: a plugin failed, or answered with something other than a bool or None.
        """
        with recording() as given:
            answer = self._caller.hook.piecework_custom_op_enabled(op_name=op_name, level=level, config=config)
        # The last one: a wrapper may have changed what it was given.
        return (answer, given[-1][0].origin) if answer is not None else None

    def custom_op_implementations(
        self, op_name: str, device: torch.device
    ) -> tuple[tuple[CustomOpImplementation, Origin], ...]:
        """Ask all plugins what they bring for a custom op, and return each with its plugin, in the order of asking.

        Raises:
            PluginError: a plugin failed, or answered with something other than a list of implementations.
        """
        with recording() as given:
            answers = self._caller.hook.piecework_custom_op_implementations(op_name=op_name, device=device)
        owners = _owners_by_identity(given)
        return tuple((brought, owners[id(brought)]) for brought in itertools.chain(*answers))

    def splitting_ops(self, config: CompilationConfig) -> tuple[tuple[SplittingOp, str], ...]:
        """Ask all plugins where to cut, and return each op with the name of the plugin that named it.

        An op that several plugins name in equal words appears once, for the first of them.

        Raises:
            PluginError: a plugin failed, or answered with something other than a list of ops.
        """
        with recording() as given:
            answers = self._caller.hook.piecework_splitting_ops(config=config)
        owners = _owners_by_identity(given)
        united: list[tuple[SplittingOp, str]] = []
        for op in itertools.chain(*answers):
            if all(op != other for other, _ in united):
                united.append((op, owners[id(op)].name))
        return tuple(united)

    def compile_piece(self, piece: Piece, config: CompilationConfig) -> tuple[CompiledPiece, str] | None:
        """Ask for a compiled piece, and return it with the name of the plugin that compiled it.

        Returns:
            ``None`` if nobody compiled it: no plugin wanted to, ``config.piece_compiler`` is ``"eager"``, or the
            plugin that it names answered ``None``.

        Raises:
            PluginError: a plugin failed or answered with something else, or ``config.piece_compiler`` names a
                plugin that can't compile pieces.
        """
        call = self._caller_of("piecework_compile_piece", config, "piece_compiler", EAGER)
        with recording() as given:
            compiled = call(piece=piece, config=config)
        return (compiled, given[0][0].origin.name) if compiled is not None else None

    def capturer(self, device: torch.device, config: CompilationConfig) -> tuple[Capturer, str] | None:
        """Ask for the capturer of a device, and return it with the name of its plugin.

        Returns:
            ``None`` if nobody captures there: no plugin wanted to, ``config.capturer`` is ``"none"``, or the plugin
            that it names answered ``None``.

        Raises:
            PluginError: a plugin failed or answered with something else, or ``config.capturer`` names a plugin
                that can't capture.
        """
        call = self._caller_of("piecework_capturer", config, "capturer", NONE)
        with recording() as given:
            capturer = call(device=device, config=config)
        return (capturer, given[0][0].origin.name) if capturer is not None else None

    def _caller_of(self, hook: str, config: CompilationConfig, setting: str, own_answer: str) -> Any:
        """Return what calls a hook: all that implement it, or the one that a setting chooses."""
        chosen = getattr(config, setting)
        if chosen is None:
            self._say_who_is_asked(hook, setting)
            return getattr(self._caller.hook, hook)
        self._check_implements(chosen, hook, setting, own_answer)
        others = [
            registered
            for registered in self._caller.get_plugins()
            if registered.implementation.hook == hook
            and not registered.implementation.is_wrapper
            and registered.implementation.origin.name != chosen
        ]
        return self._caller.subset_hook_caller(hook, others)

    def _say_who_is_asked(self, hook: str, setting: str) -> None:
        names = self._names_of_answering(hook)
        if len(names) > 1 and hook not in self._said_who_is_asked:
            self._said_who_is_asked.add(hook)
            logger.info("%s asks %s, in this order; %s chooses one", hook, ", ".join(names), setting)

    def check_options(self, config: CompilationConfig) -> None:
        """Check that the plugins that ``plugin_options`` names are there; each checks what its own say.

        Raises:
            ConfigError: one is not installed.
        """
        known = {info.name: info.distribution or "" for info in self.infos()}
        for name in config.plugin_options:
            if name not in known:
                raise ConfigError(f"plugin_options: {not_installed(name, known)}")

    def origin(self, name: str) -> Origin:
        """Return where a plugin that takes part comes from."""
        info = self._active[name]
        return Origin(info.name, info.distribution, info.version)

    def names_of_compilers(self) -> tuple[str, ...]:
        """Return the plugins that compile pieces, in the order of asking; a wrapper does not count."""
        return self._names_of_answering("piecework_compile_piece")

    def _names_of_answering(self, hook: str) -> tuple[str, ...]:
        names = (i.origin.name for i in self._implementations if i.hook == hook and not i.is_wrapper)
        return tuple(dict.fromkeys(names))

    def _check_implements(self, name: str, hook: str, setting: str, own_answer: str) -> None:
        able = self._names_of_answering(hook)
        if name == own_answer or name in able:
            return
        absent = [info for info in self._absent if info.name == name]
        if absent:
            causes = "; ".join(f"{info.state}: {info.cause}" for info in absent)
            raise PluginError(f"{setting}={name!r}: the plugin is installed but {causes}")
        if name in self._active:
            raise PluginError(
                f"{setting}={name!r}: the plugin does not implement {hook} (a wrapper does not count); "
                f"those that do: {', '.join((*able, own_answer))}"
            )
        known = {info.name: info.distribution or "" for info in self.infos()}
        raise PluginError(f"{setting}={name!r}: {not_installed(name, {**known, own_answer: ''})}")


def _owners_by_identity(given: Iterable[tuple[Implementation, Any]]) -> dict[int, Origin]:
    """Return who named each thing first: what a wrapper does to the list must not move one to another plugin."""
    owners: dict[int, Origin] = {}
    for implementation, answer in given:
        for item in itertools.chain(*answer) if implementation.is_wrapper else answer:
            owners.setdefault(id(item), implementation.origin)
    return owners


def _own_name(plugin: object) -> str:
    for attribute in ("name", "__name__"):
        name = getattr(plugin, attribute, None)
        if isinstance(name, str) and name:
            return name
    return type(plugin).__name__


def _check_name_is_free(origin: Origin, installed: tuple[InstalledPlugin, ...]) -> None:
    count = Counter(plugin.origin.name for plugin in installed)[origin.name]
    if count > 1:
        owners = ", ".join(str(p.origin.distribution) for p in installed if p.origin.name == origin.name)
        raise PluginError(
            f"shares its name with a plugin of another distribution ({owners}), and none of them is loaded; "
            f"uninstall all but one"
        )
