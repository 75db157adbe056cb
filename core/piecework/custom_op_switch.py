"""Which custom ops are on: the level's default, plugins, ``all`` or ``none``, ``+name`` or ``-name``.

Each of these beats those before it. Off means that the op runs by its native body. The grammar and the defaults per
level follow vLLM's pull requests 9300 and 9715.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from piecework.config_checks import CompilationLevel, unknown
from piecework.errors import PieceworkWarning
from piecework.process_settings import is_first_time

if TYPE_CHECKING:
    from piecework.registry import PluginManager
    from piecework.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """Whether an op is on, and who said so."""

    is_on: bool
    why: str


def decide(op_name: str, settings: Settings, manager: PluginManager) -> Verdict:
    """Return whether a custom op runs by other than its native body.

    Raises:
        PluginError: a plugin failed when asked, or answered with something other than a bool or None.
    """
    given, origin = settings.config.custom_ops, settings.origins["custom_ops"]
    for token in (f"+{op_name}", f"-{op_name}", "all", "none"):
        if token in given:
            return Verdict(token[0] in "+a", f"{token!r} by {_words(origin)}")
    answer = manager.custom_op_enabled(op_name, settings.level, settings.config)
    if answer is not None:
        is_on, plugin = answer
        return Verdict(is_on, f"{plugin} says so")
    return Verdict(settings.level < CompilationLevel.PIECEWISE, f"the default at level {settings.level.value}")


def _words(origin: str) -> str:
    return {"argument": "the config of this model"}.get(origin, origin)


def report_names(settings: Settings, registered: Collection[str], used: Collection[str], *, owner: str) -> None:
    """Say which names in the settings switch nothing: warn of those that nobody registered, once each.

    Args:
        settings: of the compilation.
        registered: names of the ops whose classes are there.
        used: names of those that the model has.
        owner: name of the model, for the log.
    """
    origin = _words(settings.origins["custom_ops"])
    for token in settings.config.custom_ops:
        name = token[1:]
        if token in ("all", "none") or name in used:
            continue
        if name in registered:
            logger.info("%s: %r by %s switches nothing: the op is registered, not in this model", owner, token, origin)
        elif is_first_time(f"unknown custom op {name}"):
            warnings.warn(PieceworkWarning(_words_on_unknown(token, origin, registered)), stacklevel=2)


def unregistered_names(settings: Settings, registered: Collection[str]) -> list[str]:
    """Return a sentence for each name in the settings that no registered op has."""
    origin = _words(settings.origins["custom_ops"])
    tokens = (token for token in settings.config.custom_ops if token not in ("all", "none"))
    return [_words_on_unknown(token, origin, registered) for token in tokens if token[1:] not in registered]


def _words_on_unknown(token: str, origin: str, registered: Collection[str]) -> str:
    name = token[1:]
    what = unknown(name, registered, kind="custom op") if registered else f"no custom op {name!r} is registered"
    return f"custom_ops: {token!r} by {origin} switches nothing: {what}; importing its module registers an op"
