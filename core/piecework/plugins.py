"""The plugins of the process, loaded at the first need; and those of a block, in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from piecework.errors import PluginError
from piecework.forking import Lock
from piecework.registry import PluginInfo, PluginManager
from piecework.settings import plugin_selection

__all__ = ["PluginInfo", "PluginManager", "plugin_manager", "reset_plugin_manager", "use_plugin_manager"]


def plugin_manager() -> PluginManager:
    """Return the plugins that a compilation uses: those of the innermost block, or the process's.

    The process's are loaded at the first call, exactly once, whichever thread comes first. A forked child
    keeps them, since what their import registered is there too; a spawned one loads anew.

    Raises:
        ConfigError: ``PIECEWORK_PLUGINS`` can't be read.
        PluginError: it names a plugin that is not installed or fails; or a plugin asks while it is being loaded.
    """
    if _process.blocks:
        return _process.blocks[-1]
    if _process.loaded is not None:
        return _process.loaded
    with _process.lock:
        if _process.loaded is None:
            _process.loaded = _load_for_process()
        return _process.loaded


def reset_plugin_manager() -> None:
    """Forget the process's plugins, so that the next need loads them again; meant for tests."""
    with _process.lock:
        _process.loaded = None


@contextmanager
def use_plugin_manager(manager: PluginManager) -> Iterator[PluginManager]:
    """Make every thread of the process use these plugins, for one block."""
    _process.blocks.append(manager)
    try:
        yield manager
    finally:
        _process.blocks.remove(manager)


class _Process:
    """The state behind ``plugin_manager()``; empty until the first need."""

    def __init__(self) -> None:
        self.loaded: PluginManager | None = None
        self.blocks: list[PluginManager] = []
        self.is_loading = False
        self.lock = Lock(when_lost=self.forget_loading)

    def forget_loading(self) -> None:
        """A child forked while another thread loads begins anew: it does not have that thread."""
        self.is_loading = False


_process = _Process()


def _load_for_process() -> PluginManager:
    if _process.is_loading:
        raise PluginError("a plugin asks for the plugins while it is being loaded; import it lightly, compile in hooks")
    _process.is_loading = True
    try:
        manager = PluginManager()
        manager.load(selection=plugin_selection())
        return manager
    finally:
        _process.is_loading = False
