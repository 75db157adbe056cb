"""The plugins that a benchmark runs with: those that are installed, and on a CPU the emulated capturer."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

import piecework.testing
from piecework.errors import ConfigError
from piecework.plugins import PluginManager, use_plugin_manager
from piecework.settings import plugin_selection

__all__ = ["Plugins"]


@dataclass(frozen=True)
class Plugins:
    """Makes sets of plugins that are alike; each has capturers, and so pools, of its own.

    Args:
        device: on a CPU, where no plugin captures, the emulated capturer stands in.
        modules: names of modules to register besides what is installed, where they are not.
        registered: plugins in hand, asked in place of all that are installed.
    """

    device: torch.device
    modules: Sequence[str] = ()
    registered: Sequence[object] = ()

    @contextmanager
    def in_use(self) -> Iterator[PluginManager]:
        """Use a new set in one block; what is captured in it stays usable afterwards."""
        with ExitStack() as stack:
            if self.registered:
                yield stack.enter_context(piecework.testing.plugins(*self.registered))
                return
            if self.device.type == "cpu":
                manager = stack.enter_context(piecework.testing.plugins(load_installed=True))
            else:
                manager = PluginManager()
                manager.load(selection=plugin_selection())
                stack.enter_context(use_plugin_manager(manager))
            there = {info.name for info in manager.infos()}
            for module in self.modules:
                name = module.removeprefix("piecework_")
                if name not in there:
                    manager.register(_imported(module), name=name)
            yield manager


def _imported(module: str) -> object:
    """Import a module that the user named.

    Raises:
        ConfigError: it can't be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"--plugin {module}: {error}; give the name of a module that is installed or on PYTHONPATH"
        ) from error
