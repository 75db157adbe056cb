"""Check the option ``config`` against Inductor's own settings, by their names and declared types."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from piecework import ConfigError
from piecework_inductor import inductor_internals as internals

__all__ = ["check_settings"]

GRAPHS = "triton.cudagraphs"


def check_settings(config: Mapping[str, Any]) -> None:
    """Check values that pieces are to be compiled with; Inductor itself finds a wrong one late, or never.

    Raises:
        ConfigError: this torch has no such setting, it is of another type, or it is not the user's to set.
    """
    known = internals.setting_names()
    for name, value in config.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise ConfigError(_about(name, f"this torch has no such setting in torch._inductor.config{hint}"))
        if name == GRAPHS and value:
            raise ConfigError(_about(name, "graphs are recorded by the plugin that captures; capture_sizes says which"))
        _check_type(name, value)


def _check_type(name: str, value: object) -> None:
    declared = internals.setting_type(name)
    if declared is type(None):
        return  # Nothing is declared, and None is the default.
    try:
        adapter = TypeAdapter[Any](declared, config=ConfigDict(arbitrary_types_allowed=True))
        adapter.validate_json(json.dumps(value), strict=True)  # JSON has no tuples, and a whole number may be a float.
    except ValidationError as error:
        raise ConfigError(_about(name, f"{error.errors()[0]['msg']}, got {value!r}")) from None
    except (PydanticSchemaGenerationError, PydanticUserError):
        return  # A pass or a function, which no JSON gives: Inductor looks at those itself.


def _about(name: str, what: str) -> str:
    return f"plugin_options['inductor'].config[{name!r}]: {what}"
