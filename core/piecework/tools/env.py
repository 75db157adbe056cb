"""``python -m piecework env``: what Piecework would go by in this environment, and who decided it."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from json import dumps
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import piecework
from piecework.errors import PieceworkError
from piecework.plugins import PluginManager
from piecework.settings import (
    ENVIRONMENT,
    CompilationLevel,
    attention_ops,
    cache_dir,
    plugin_selection,
    read_environment,
    resolve_settings,
    torch_compile_backend,
)


@dataclass(frozen=True)
class EnvRow:
    """One line of the report."""

    section: str
    """``"settings"``, ``"environment"``, ``"process"``, ``"custom ops"`` or ``"versions"``."""
    name: str
    value: Any
    """None for a variable that is not set."""
    origin: str = ""
    """Who decided a setting; a remark on a variable that Piecework does not read."""


def env_command(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    modules: Annotated[
        list[str] | None, typer.Option("--import", help="Import a module first, to show the custom ops in it.")
    ] = None,
) -> None:
    """Print each setting with its origin, the environment variables, custom ops and the versions."""
    try:
        for name in modules or ():
            importlib.import_module(name)
        rows = env_rows()
        remarks = names_that_switch_nothing()
    except ModuleNotFoundError as error:
        typer.echo(f"--import: {error}", err=True)
        raise typer.Exit(2) from None
    except PieceworkError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    for remark in remarks:
        typer.echo(remark, err=True)
    if json:
        typer.echo(rows_as_json(rows))
    else:
        Console(file=sys.stdout).print(rows_as_table(rows))


def env_rows() -> list[EnvRow]:
    """Return all lines of the report, section by section.

    Plugins are loaded, as those bring custom ops.

    Raises:
        ConfigError: the environment is not usable.
        PluginError: ``PIECEWORK_PLUGINS`` names a plugin that is not there, or one failed when asked.
    """
    from piecework.tools.custom_ops import describe_custom_ops  # It needs torch.

    settings = resolve_settings(None, default_level=CompilationLevel.NO_COMPILATION)
    rows = [EnvRow("settings", name, value, settings.origins[name]) for name, value in settings.config]
    for name, value in read_environment().items():
        rows.append(EnvRow("environment", name, value, "" if name in ENVIRONMENT else unknown_variable(name)))
    rows.append(EnvRow("process", "attention_ops", list(attention_ops())))
    rows.append(EnvRow("process", "torch_compile_backend", torch_compile_backend()))
    rows.append(EnvRow("process", "cache_dir", str(cache_dir())))
    manager = PluginManager()
    manager.load(selection=plugin_selection(), report=False)
    for name, described in describe_custom_ops(settings, manager).items():
        rows.append(EnvRow("custom ops", name, described))
    rows.append(EnvRow("versions", "python", platform.python_version()))
    rows.append(EnvRow("versions", "torch", torch_version()))
    rows.append(EnvRow("versions", "piecework", piecework.__version__))
    return rows


def names_that_switch_nothing() -> list[str]:
    """Return a sentence for each name in ``custom_ops`` that no op has which is registered here."""
    from piecework.custom_op import registered_ops  # It needs torch.
    from piecework.custom_op_switch import unregistered_names

    settings = resolve_settings(None, default_level=CompilationLevel.NO_COMPILATION)
    return unregistered_names(settings, registered_ops())


def unknown_variable(name: str) -> str:
    nearest = difflib.get_close_matches(name, ENVIRONMENT, n=1)
    return f"not read; did you mean {nearest[0]}?" if nearest else "not read"


def torch_version() -> str | None:
    # From the metadata: importing torch takes seconds.
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def rows_as_json(rows: list[EnvRow]) -> str:
    """Return an object of sections; a setting is ``{"value": ..., "origin": ...}``, all else its value."""
    report: dict[str, dict[str, Any]] = {}
    for row in rows:
        value = {"value": row.value, "origin": row.origin} if row.section == "settings" else row.value
        report.setdefault(row.section, {})[row.name] = value
    return dumps(report, indent=2, default=repr)


def rows_as_table(rows: list[EnvRow]) -> Table:
    table = Table("section", Column("name", no_wrap=True), "value", "origin", caption=caption(rows))
    for index, row in enumerate(rows):
        is_last = index + 1 == len(rows) or rows[index + 1].section != row.section
        # Text: brackets in a value are no markup.
        cells = (row.section, row.name, value_as_text(row), row.origin)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells), end_section=is_last)
    return table


def value_as_text(row: EnvRow) -> str:
    if row.value is None and row.section == "environment":
        return "unset"
    if isinstance(row.value, CompilationLevel):
        return f"{row.value.value} ({row.value.name})"
    if row.section == "custom ops" and row.value is not None:
        from piecework.tools.custom_ops import custom_op_as_text  # It needs torch, which is there by now.

        return custom_op_as_text(row.value)
    return row.value if row.section == "versions" and row.value else repr(row.value)


def caption(rows: list[EnvRow]) -> str | None:
    level_is_open = any(row.name == "level" and row.origin == "default" for row in rows)
    return "level: 3 in a call of piecework.compile" if level_is_open else None
