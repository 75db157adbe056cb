"""What tests of plugins, and of programs that use Piecework, need; works without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from piecework.plugins import PluginManager, use_plugin_manager
from piecework.settings import plugin_selection
from piecework.testing import emulated
from piecework.testing.emulated import EmulatedCapturer

__all__ = ["EmulatedCapturer", "emulated", "plugins"]


@contextmanager
def plugins(*registered: object, load_installed: bool = False) -> Iterator[PluginManager]:
    """Use these plugins for one block, in every thread, and of others only the emulated capturer.

    That one, ``piecework.testing.emulated``, captures on the CPU as a device would, so that level 3 can be tested
    without one. It is asked after every capturer that does not mark ``trylast``; ``capturer="none"`` in
    the config switches it off.

    ::

        with piecework.testing.plugins(MyCompiler(), ("other", other_module)) as manager:
            piecework.compile(model)(x)

    Args:
        *registered: modules, objects, or classes, of which an instance is made; or pairs of a name and one of
            these. Without a name: the plugin's ``name``, ``__name__`` or class name. The order of asking follows
            names and marks, as for installed plugins.
        load_installed: whether installed plugins are loaded besides.

    Raises:
        PluginError: a plugin is not usable; nothing is registered then.
    """
    manager = PluginManager()
    if load_installed:
        manager.load(selection=plugin_selection())
    for item in registered:
        if isinstance(item, tuple):
            name, plugin = item
            manager.register(plugin, name=name)
        else:
            manager.register(item)
    manager.register(emulated, name="emulated")
    with use_plugin_manager(manager):
        yield manager
