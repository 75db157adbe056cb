"""Find what a script has to import so that the ops and plugins of a program are there."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.fx import GraphModule

from piecework import torch_internals as internals
from piecework.effects import name_of
from piecework.plugins import plugin_manager


@dataclass(frozen=True)
class Lines:
    """Part of a script.

    Attributes:
        lines: of Python.
        missing: what has to be added to them by hand first, in words; nothing where they are complete.
    """

    lines: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __add__(self, other: Lines) -> Lines:
        """Put two parts one after the other, each line once."""
        lines = dict.fromkeys([*self.lines, *other.lines])
        return Lines(tuple(lines), tuple(dict.fromkeys([*self.missing, *other.missing])))


def import_of_op(name: str, program: str | None = None) -> Lines:
    """Return the import that registers an op.

    Args:
        name: ``"ns::op"``.
        program: the module of the user's model, which is imported where nobody knows who registered the op.
    """
    if name.partition("::")[0] in ("aten", "prims", "higher_order"):
        return Lines()
    for module in (internals.module_of_op(name), program):
        lines = _import(module) if module is not None else None
        if lines is not None:
            return Lines(lines)
    return Lines((f"# Import here what registers {name}.",), ("add the import of your op",))


def imports_of_ops(graph: GraphModule, program: str | None = None) -> Lines:
    """Return the imports that register the ops of a graph, and of the graphs inside it; the rest as above."""
    graphs = [module for module in graph.modules() if isinstance(module, GraphModule)]
    targets = [node.target for one in graphs for node in one.graph.nodes]
    ops = [target for target in targets if isinstance(target, (internals.OpOverload, internals.OpOverloadPacket))]
    made = Lines()
    for name in sorted({str(name_of(op)) for op in ops}):
        made += import_of_op(name, program)
    return made


def reference(value: Any) -> tuple[tuple[str, ...], str] | None:
    """Return the import of a module, or of a module's name, and the expression for it; None where it has no name."""
    if isinstance(value, ModuleType):
        lines = _import(value.__name__)
        return None if lines is None else (lines, value.__name__)
    module = getattr(value, "__module__", None)
    names = vars(sys.modules[module]) if module in sys.modules else {}
    found = next((name for name, there in names.items() if there is value and name.isidentifier()), None)
    lines = _import(module) if module is not None and found is not None else None
    return None if lines is None else (lines, f"{module}.{found}")


def registration_of_plugins(names: Sequence[str]) -> Lines:
    """Return what registers those plugins that the program registered itself: installed ones are loaded anyway."""
    registered = plugin_manager().registered()
    made = Lines()
    for name in [name for name in names if name in registered]:
        plugin = registered[name]
        found = reference(plugin)
        if found is None and not getattr(plugin, "__dict__", {}):  # The class makes one that is equal.
            found = reference(type(plugin))
        condition = f"if {name!r} not in {{info.name for info in plugin_manager().infos()}}:"
        if found is None:
            says = f'    print("register the plugin {name!r} in this script first", file=sys.stderr)'
            lines = (f"# Register here the plugin {name!r}.", "import sys", condition, says, "    sys.exit(2)")
            made += Lines(("from piecework.plugins import plugin_manager", *lines), (f"register the plugin {name!r}",))
        else:
            lines = (*found[0], condition, f"    plugin_manager().register({found[1]}, name={name!r})")
            made += Lines(("from piecework.plugins import plugin_manager", *lines))
    return made


def _import(module: str) -> tuple[str, ...] | None:
    """Return the import of a module from where it was found; None where a new process can't import it by its name."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or file is None or module.partition(".")[0] in ("torch", "piecework"):
        return (f"import {module}",) if module.partition(".")[0] == "piecework" else None
    path, parts = Path(file).resolve(), module.split(".")
    place = path.parent if path.name == "__init__.py" else path.with_suffix("")
    if list(place.parts[-len(parts) :]) != parts:
        return None
    root = str(place.parents[len(parts) - 1])
    if root in {str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib", "stdlib")}:
        return (f"import {module}",)
    return ("import sys", f"sys.path.insert(0, {root!r})", f"import {module}")
