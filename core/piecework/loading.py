"""Find installed plugins and import the ones that are wanted; nothing here knows about hooks."""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from piecework.errors import ConfigError, PluginError

ENTRY_POINT_GROUP = "piecework"
PLUGIN_API = 1
"""The version of the hooks; a plugin states the one it was written for as ``PIECEWORK_PLUGIN_API``."""
RESERVED_NAMES = {
    "eager": "piece_compiler='eager' means the core's own answer",
    "none": "capturer='none' means the core's own answer",
}


@dataclass(frozen=True)
class Origin:
    """Where a plugin comes from, for every message about it."""

    name: str
    distribution: str | None = None
    version: str | None = None

    def __str__(self) -> str:
        source = f"{self.distribution} {self.version}" if self.distribution else "registered by this program"
        return f"plugin {self.name!r} ({source})"


@dataclass(frozen=True)
class InstalledPlugin:
    """An entry point of the group ``piecework``; not imported yet."""

    origin: Origin
    entry_point: importlib.metadata.EntryPoint


@dataclass(frozen=True)
class Selection:
    """What ``PIECEWORK_PLUGINS`` asks for."""

    named: tuple[str, ...] | None = None
    """Load exactly these, and ask them in this order; ``None``: all that are not blocked."""
    blocked: frozenset[str] = field(default_factory=frozenset)

    def why_blocked(self, name: str) -> str | None:
        """Return why the plugin is not to be imported; ``None`` if it is wanted."""
        if name in self.blocked:
            return "blocked by PIECEWORK_PLUGINS"
        if self.named is not None and name not in self.named:
            return "not named in PIECEWORK_PLUGINS"
        return None


def parse_selection(text: str | None) -> Selection:
    """Read the value of ``PIECEWORK_PLUGINS``; ``None`` stands for an unset variable.

    Raises:
        ConfigError: a token is no plugin name, is given twice, or names to load and names to block are mixed.
    """
    if text is None:
        return Selection()
    if not text.strip():
        return Selection(named=())
    tokens = [token.strip() for token in text.split(",")]
    for index, token in enumerate(tokens):
        _check_token(token, tokens[:index], text)
    blocked = [token[1:].strip() for token in tokens if token.startswith("-")]
    if blocked and len(blocked) < len(tokens):
        raise ConfigError(
            f"PIECEWORK_PLUGINS must either name the plugins to load ('a,b') or the plugins to leave out ('-a,-b'), "
            f"got both in {text!r}"
        )
    return Selection(blocked=frozenset(blocked)) if blocked else Selection(named=tuple(tokens))


def _check_token(token: str, before: list[str], text: str) -> None:
    name = token.removeprefix("-").strip()
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(
            f"PIECEWORK_PLUGINS must be a comma-separated list of plugin names, each of them perhaps with '-' in front "
            f"to leave it out, got {token!r} in {text!r}; leave the variable unset to load all plugins, "
            f"set it to the empty string to load none"
        )
    if name in RESERVED_NAMES:
        raise ConfigError(
            f"PIECEWORK_PLUGINS can't name {name!r}, which is no plugin ({RESERVED_NAMES[name]}), got {text!r}; "
            f"set it to the empty string to load no plugin"
        )
    if token in before:
        raise ConfigError(f"PIECEWORK_PLUGINS must name each plugin once, got {name!r} twice in {text!r}")


def find_installed_plugins() -> tuple[InstalledPlugin, ...]:
    """List the entry points by name, then distribution, without importing any.

    Sorted, because the order of a directory listing differs between machines, and ranks must agree.
    """
    found = []
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        distribution = entry_point.dist
        origin = (
            Origin(entry_point.name, distribution.name, distribution.version)
            if distribution is not None
            else Origin(entry_point.name)
        )
        found.append(InstalledPlugin(origin, entry_point))
    return tuple(sorted(found, key=lambda plugin: (plugin.origin.name, plugin.origin.distribution or "")))


def check_all_installed(selection: Selection, installed: Iterable[InstalledPlugin]) -> None:
    """Refuse a selection that names what is not installed: a misspelt block would block nothing.

    Raises:
        PluginError: lists the nearest installed names first.
    """
    distributions = {plugin.origin.name: plugin.origin.distribution or "" for plugin in installed}
    for name in (*(selection.named or ()), *sorted(selection.blocked)):
        if name not in distributions:
            raise PluginError(f"PIECEWORK_PLUGINS: {not_installed(name, distributions)}")


def not_installed(name: str, known: dict[str, str]) -> str:
    """Say that no plugin has this name, and which have; ``known`` maps their names to distributions."""
    for plugin, distribution in known.items():
        if distribution and _folded(distribution) == _folded(name):
            return f"plugin {name!r} is not installed; the plugin of distribution {distribution} is called {plugin!r}"
    near = nearest(name, known)
    hint = f", did you mean {near!r}?" if near else ""
    names = ", ".join(sorted(known, key=lambda other: (other != near, other))) or "none"
    if any(plugin.origin.name == name for plugin in find_installed_plugins()):
        return (
            f"plugin {name!r} is installed, but not among those that are used here: {names}; "
            "piecework.testing.plugins(load_installed=True) loads it"
        )
    return f"plugin {name!r} is not installed{hint}; installed plugins: {names}"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant, whatever its case, dashes and underscores."""
    folded = {_folded(other): other for other in names}
    close = difflib.get_close_matches(_folded(name), folded, n=1)
    return folded[close[0]] if close else None


def _folded(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def import_plugin(plugin: InstalledPlugin) -> object:
    """Import what the entry point names: a module, an object, or a class, of which an instance is made.

    Raises:
        PluginError: whatever the import raised, ``SystemExit`` included. The message is a predicate: the
            caller puts the plugin before it.
    """
    try:
        target = plugin.entry_point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(f"can't be imported from {plugin.entry_point.value!r}: {describe_error(error)}") from error
    return instantiate(target)


def instantiate(target: object) -> object:
    """Return an instance of a class, and anything else as it is.

    Raises:
        PluginError: the class can't be made without arguments.
    """
    if not isinstance(target, type):
        return target
    try:
        return target()
    except (Exception, SystemExit) as error:
        raise PluginError(f"can't be made from class {target.__name__}: {describe_error(error)}") from error


def check_plugin_api(plugin: object) -> None:
    """Refuse a plugin written for other hooks than ours.

    The version stands on the plugin or on its module; absent, it is 1.

    Raises:
        PluginError: names both versions and what to upgrade.
    """
    module = sys.modules.get(getattr(plugin, "__module__", None) or "")
    version = getattr(plugin, "PIECEWORK_PLUGIN_API", getattr(module, "PIECEWORK_PLUGIN_API", 1))
    if isinstance(version, int) and not isinstance(version, bool) and version == PLUGIN_API:
        return
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise PluginError(f"must state PIECEWORK_PLUGIN_API as an integer from 1 up, got {version!r}")
    older = "piecework" if version > PLUGIN_API else "the plugin"
    raise PluginError(
        f"is written for version {version} of the hooks (PIECEWORK_PLUGIN_API), this piecework has version "
        f"{PLUGIN_API}; upgrade {older}, or leave the plugin out with PIECEWORK_PLUGINS"
    )


def describe_error(error: BaseException) -> str:
    """Return the type and text of an exception, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
