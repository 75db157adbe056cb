"""The command line: ``python -m piecework``."""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from piecework.errors import PieceworkError
from piecework.implementations import hook_arguments
from piecework.plugins import PluginInfo, PluginManager
from piecework.settings import plugin_selection
from piecework.tools.bench.commands import bench_app
from piecework.tools.env import env_command
from piecework.tools.verify.command import verify_command

app = typer.Typer(
    name="piecework",
    help="Look at what Piecework would do in this environment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; what a user got wrong is told in a line, not in a traceback.

    The exit status is 2 wherever a command can't do its work: 1 says that it did, and found something.
    """
    try:
        app()
    except PieceworkError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception:  # of a program that is looked at: its own traceback, which says where
        traceback.print_exc()
        sys.exit(2)


@app.callback()
def _commands() -> None:
    """Keep the commands named, however many there are."""


# Commands that live in modules of their own are registered here.
app.command("env")(env_command)
app.command("verify")(verify_command)
app.add_typer(bench_app, name="bench")


@app.command("plugins")
def plugins_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print an object with 'plugins' and 'order'.")] = False,
) -> None:
    """List the plugins: who is asked in which order, who is blocked, who failed and why."""
    manager = PluginManager()
    manager.load(selection=plugin_selection(), report=False)
    infos = manager.infos()
    order = {hook: manager.order(hook) for hook in hook_arguments()}
    if as_json:
        print(json.dumps({"plugins": [asdict(info) for info in infos], "order": order}, indent=2))
        return
    console = Console()
    console.print(_table(infos))
    for hook, names in order.items():
        console.print(f"{hook}: {', '.join(names) or 'nobody'}", highlight=False, markup=False)


def _table(infos: tuple[PluginInfo, ...]) -> Table:
    fold = [Column(title, overflow="fold") for title in ("distribution", "hooks", "state")]
    table = Table("order", Column("name", no_wrap=True), *fold, Column("load time", no_wrap=True))
    for info in infos:
        table.add_row(
            "" if info.position is None else str(info.position),
            info.name,
            f"{info.distribution} {info.version}",
            "\n".join(hook.removeprefix("piecework_") for hook in info.hooks),
            Text(
                info.state
                if info.cause is None
                else info.cause
                if info.state == "blocked"
                else f"{info.state}: {info.cause}"
            ),  # Brackets are no markup.
            f"{info.load_s * 1e3:.1f} ms" if info.state != "blocked" else "",
        )
    return table
