"""``python -m piecework verify``: compare a model of a program with eager, and name what departs."""

from __future__ import annotations

import difflib
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from inspect import isfunction, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from piecework.errors import ConfigError

if TYPE_CHECKING:
    from piecework.tools.bench.plugins import Plugins
    from piecework.tools.verify.report import Verification

__all__ = ["verify_command"]


def verify_command(
    model: Annotated[str, typer.Argument(help="MODULE:NAME of a model or function, or of a function that makes one.")],
    inputs: Annotated[
        str, typer.Option(help="MODULE:NAME of the arguments of a call, or of a function that returns them for a size.")
    ],
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--size", help='A number of rows, or a JSON object such as {"batch": 4, "seq": 1}; commas, or repeated.'
        ),
    ] = None,
    make: Annotated[bool, typer.Option("--make", help="Call what MODEL names: it returns the model.")] = False,
    config: Annotated[str | None, typer.Option(help="A JSON object as in PIECEWORK_CONFIG.")] = None,
    dims: Annotated[str | None, typer.Option(help='dynamic_arg_dims as JSON, such as {"x": {"0": "rows"}}.')] = None,
    rtol: Annotated[float | None, typer.Option(min=0, help="Relative tolerance; by dtype, if left out.")] = None,
    atol: Annotated[float | None, typer.Option(min=0, help="Absolute tolerance; by dtype, if left out.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where scripts that show a departure are written.")] = None,
    plugins: Annotated[
        list[str] | None, typer.Option("--plugin", help="A module to register as a plugin besides those installed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Compare a model with eager step by step; the exit status is 1 where something departs, 2 where it can't be told.

    Modules are looked for in the current folder, too: python -m piecework verify my_model:model --inputs
    my_model:inputs --size 1,8. On a CPU, captures are emulated where no plugin makes them.
    """
    from piecework.config import CompilationConfig
    from piecework.tools.verify.verifying import verify  # It needs torch.

    settings = CompilationConfig.from_json(config, source="--config") if config else None
    named_dims = _dims(dims) if dims else None
    chosen = [size for text in sizes or () for size in _sizes(text)]
    folder_here = str(Path.cwd())
    sys.path.insert(0, folder_here)
    try:
        target, arguments = _named(model, "MODEL"), _named(inputs, "--inputs")
        if make:
            target = _made(target, model)
        elif isinstance(target, type) or (isfunction(target) and not signature(target).parameters):
            raise ConfigError(f"MODEL: {model} takes no inputs of a call: {target!r}; did you mean --make?")
        with _plugins(plugins or ()).in_use():
            found = verify(
                target,
                arguments,
                chosen,
                config=settings,
                dynamic_arg_dims=named_dims,
                rtol=rtol,
                atol=atol,
                folder=folder,
            )
    except SystemExit as error:  # Else its status would be taken for what was found.
        text = f"{model} or {inputs} ended the program by sys.exit({error.code!r}) before anything was found"
        raise ConfigError(f"{text}; keep what runs a program under `if __name__ == '__main__'`") from error
    finally:
        sys.path.remove(folder_here)
    typer.echo(_as_json(found) if as_json else str(found))
    if not found.is_right:
        raise typer.Exit(1)


def _plugins(modules: Sequence[str]) -> Plugins:
    import torch

    from piecework.tools.bench.plugins import Plugins

    return Plugins(torch.device("cuda" if torch.cuda.is_available() else "cpu"), tuple(modules))


def _named(text: str, what: str) -> Any:
    """Return what MODULE:NAME stands for.

    Raises:
        ConfigError: there is no such module, or it has no such name.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{what} must be MODULE:NAME, such as my_model:model, got {text!r}")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what}: {error}; modules are looked for in {Path.cwd()}, too") from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{what}: {module} has no {name!r}{hint}")
        found = getattr(found, part)
    return found


def _made(factory: Any, name: str) -> Any:
    """Return the model that a function, or a class, makes.

    Raises:
        ConfigError: it can't be called without arguments.
    """
    try:
        signature(factory).bind()
    except TypeError as error:
        text = f"MODEL: --make calls {name}() without arguments, which does not work: {error}"
        raise ConfigError(f"{text}; name a function without parameters that returns the model") from None
    return factory()


def _sizes(text: str) -> list[Any]:
    """Return the sizes in one option: an object, or numbers between commas."""
    if text.lstrip().startswith("{"):
        return [_json(text, "--size")]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f'--size takes numbers between commas, or an object such as {{"batch": 4}}, got {text!r}')
    return [int(part) for part in parts]


def _dims(text: str) -> dict[str, Any]:
    """Return ``dynamic_arg_dims``: the keys of JSON are strings, those of dims are numbers."""
    given = _json(text, "--dims")
    if not isinstance(given, dict):
        raise ConfigError(f'--dims must be an object such as {{"x": {{"0": "rows"}}}}, got {text!r}')
    try:
        return {
            name: {int(dim): called for dim, called in dims.items()} if isinstance(dims, dict) else dims
            for name, dims in given.items()
        }
    except ValueError as error:
        raise ConfigError(f"--dims: dims are numbers: {error}") from None


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what} is no JSON: {error}; got {text!r}") from None


def _as_json(found: Verification) -> str:
    report = {"owner": found.owner, "level": found.level, "is_right": found.is_right}
    return json.dumps(report | {"sizes": [asdict(one) for one in found.sizes]}, indent=2, default=str)
