"""``CompilationConfig``: what a user can decide about a compilation, as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from typing_extensions import Self

from piecework.config_checks import (
    CompilationLevel,
    Size,
    check_capture_sizes,
    check_custom_ops,
    check_flag,
    check_level,
    check_optional_bytes,
    check_optional_flag,
    check_optional_name,
    check_plugin_options,
    check_ratio,
    check_sizes,
    check_splitting_ops,
    check_static_inputs,
    show,
    unknown,
)
from piecework.errors import ConfigError
from piecework.pieces import SplittingOp


def checked_by(check: Callable[[Any, str], Any]) -> BeforeValidator:
    def validate(value: Any, info: ValidationInfo) -> Any:
        return check(value, str(info.field_name))

    return BeforeValidator(validate)


class CompilationConfig(BaseModel):
    """The settings of a compilation; frozen, and never changed by one.

    A field counts as given when it was named, with its default value too: ``level=None`` is given,
    and hides the level of a weaker source. Lists are taken where a tuple is meant, and copied.

    Raises:
        ConfigError: a name or a value is not allowed; one line for each that is wrong.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    level: Annotated[CompilationLevel | None, checked_by(check_level)] = None
    """0 to 3 or a level's name; ``None``: 0, and 3 for a call of ``compile`` and for ``backend="piecework"``."""
    splitting_ops: Annotated[tuple[str | SplittingOp, ...] | None, checked_by(check_splitting_ops)] = None
    """Exactly these; ``None``: those of the plugins and of ``set_attention_ops``; ``()``: none."""
    custom_ops: Annotated[tuple[str, ...], checked_by(check_custom_ops)] = ()
    """``"all"``, ``"none"``, ``"+name"``, ``"-name"``: which custom ops run other than by their native bodies; a tuple,
    or one comma-separated string."""
    compile_sizes: Annotated[tuple[Size, ...], checked_by(check_sizes)] = ()
    """Sizes to compile exactly for, besides the general shape."""
    capture_sizes: Annotated[tuple[Size, ...] | Literal["auto"] | None, checked_by(check_capture_sizes)] = None
    """Sizes to capture; ``"auto"``: a size seen three times; ``()``: nothing; ``None``: those of a compile context,
    outside of one ``"auto"`` for ``compile`` and ``backend="piecework"``, nothing for a decorated class."""
    max_padding_ratio: Annotated[float, checked_by(check_ratio)] = 2.0
    """A call may be padded to a captured size of up to so many times its own, where rows are independent."""
    rows_independent: Annotated[bool | None, checked_by(check_optional_flag)] = None
    """The user asserts that no row depends on another, or that it does; ``None``: find out."""
    max_capture_bytes: Annotated[int | None, checked_by(check_optional_bytes)] = None
    """Budget for all captures of a model; ``None``: no limit but the device's."""
    static_inputs: Annotated[tuple[str, ...] | Literal[True], checked_by(check_static_inputs)] = ()
    """Names of the arguments that the caller keeps in place, so that they are not copied; ``True``: all."""
    static_outputs: Annotated[bool, checked_by(check_flag)] = False
    """Results may be overwritten by the next call; ``False``: they are the caller's own."""
    check_parameters: Literal["sample", "always"] = "sample"
    """How soon a raw change of a parameter's storage is noticed: within some calls, or at once."""
    on_failure: Literal["error", "eager"] = "error"
    """What follows a departure from the trace, a failed compile or capture, or a stale capture."""
    piece_compiler: Annotated[str | None, checked_by(check_optional_name)] = None
    """Name of the plugin that must compile the pieces (``"eager"``: none); ``None``: the first that answers."""
    capturer: Annotated[str | None, checked_by(check_optional_name)] = None
    """Name of the plugin that must capture (``"none"``: nothing is captured); ``None``: the first that answers."""
    plugin_options: Annotated[dict[str, dict[str, Any]], checked_by(check_plugin_options)] = Field(default_factory=dict)
    """By plugin name; checked by the plugin that owns them."""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, "CompilationConfig")) from error

    @classmethod
    def from_json(cls, text: str, *, source: str = "the JSON text") -> Self:
        """Read a config from a JSON object.

        Args:
            text: for example ``{"level": 3, "splitting_ops": ["silly::attention"]}``.
            source: where the text comes from; every error begins with it.

        Raises:
            ConfigError: the text is not JSON, not an object, or holds a key or a value that is not allowed.
        """
        values = load_object(text, source)
        try:
            return cls(**values)
        except ConfigError as error:
            if isinstance(error.__cause__, ValidationError):
                raise ConfigError(explain(error.__cause__, source)) from error.__cause__
            raise

    def to_json(self) -> str:
        """Return the fields that were given as a JSON object that ``from_json`` reads.

        Raises:
            ConfigError: a splitting op holds a function.
        """
        return json.dumps(self.given(), default=encode_splitting_op)

    def given(self) -> dict[str, Any]:
        """Return the fields that were given, by name, in the order of their definition."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced; unlike pydantic's own, it checks them."""
        return type(self)(**{**self.given(), **(update or {})})


def load_object(text: str, source: str) -> dict[str, Any]:
    form = 'write a JSON object such as {"level": 3}'
    if not isinstance(text, str):
        raise ConfigError(f"{source} must be a string, got {show(text)}; {form}")

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise ConfigError(f"{source} gives {', '.join(map(repr, twice))} more than once; keep one of each")
        return values

    def refuse_constant(name: str) -> None:
        raise ConfigError(f"{source} holds {name}, which is no JSON number; write a finite number")

    try:
        values = json.loads(text, object_pairs_hook=refuse_duplicates, parse_constant=refuse_constant)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error}, got {show(text)}; {form}, with double quotes") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must be a JSON object, got {show(text)}; {form}")
    return values


def encode_splitting_op(value: object) -> dict[str, Any]:
    assert isinstance(value, SplittingOp), value
    if callable(value.capturable) or value.implementation is not None:
        raise ConfigError(
            f"splitting_ops: {value.name!r} holds a function, which JSON can't; "
            "give True or False for 'capturable' and no 'implementation', or pass the config as an object"
        )
    return {"name": value.name, "capturable": value.capturable, "rows_independent": value.rows_independent}


def explain(error: ValidationError, where: str) -> str:
    """Say in Piecework's words what pydantic found, one line per field."""
    return "\n".join(f"{where}: {explain_one(details)}" for details in error.errors())


def explain_one(details: Any) -> str:
    name = ".".join(map(str, details["loc"]))
    context = details.get("ctx", {})
    if details["type"] == "extra_forbidden":
        return unknown(name, CompilationConfig.model_fields, kind="field")
    if details["type"] == "value_error":
        return str(context["error"])
    return f"{name} must be {context['expected']}, got {show(details['input'])}"
