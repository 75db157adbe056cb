"""Options of plugins: each plugin says what it takes in a model of its own, and has it checked here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, get_origin

from pydantic import BaseModel, ValidationError

from piecework.config_checks import show
from piecework.errors import ConfigError

if TYPE_CHECKING:
    from piecework.config import CompilationConfig

Options = TypeVar("Options", bound=BaseModel)


def read_options(model: type[Options], config: CompilationConfig, plugin_name: str) -> Options:
    """Return the checked options that a compilation gives a plugin.

    For hooks of plugins: ``read_options(FooOptions, config, "foo")``. What is not given has the model's default.

    Args:
        model: a pydantic model, a field for each option. With ``extra="forbid"`` it refuses names that it does not
            know, and with ``strict=True`` values of another type; pydantic's own defaults let both pass.
        config: the settings of the compilation, as a hook gets them.
        plugin_name: the plugin's name, the key of its options in ``config.plugin_options``.

    Raises:
        ConfigError: an option is unknown, of a wrong type or of a value that is not allowed.
    """
    given = config.plugin_options.get(plugin_name, {})
    try:
        return model.model_validate(given)
    except ValidationError as error:
        details = error.errors()[0]
    path, is_unknown = details["loc"], details["type"] == "extra_forbidden"
    known = _names_at(model, path[:-1])
    near = difflib.get_close_matches(str(path[-1]), known, n=1) if is_unknown else []
    where = "".join(f".{step}" for step in path)
    what = "there is no such option" if is_unknown else details["msg"]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"plugin_options[{plugin_name!r}]{where}: {what}, got {show(details['input'])}{hint}; the options are "
        f"{', '.join(known)}"
    )


def _names_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Return the names of the options in the innermost model that a path leads through."""
    for step in path:
        field = model.model_fields.get(str(step))
        inner = None if field is None else field.annotation
        # Python 3.10 says that list[int] is a type, and raises when asked whether it is a subclass.
        if get_origin(inner) is not None or not isinstance(inner, type) or not issubclass(inner, BaseModel):
            break
        model = inner
    return list(model.model_fields)
