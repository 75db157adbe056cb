"""The options of this plugin: ``plugin_options={"inductor": {...}}``."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from piecework import ConfigError

if TYPE_CHECKING:
    from piecework import CompilationConfig


class InductorOptions(BaseModel):
    """What a user may set.

    Attributes:
        config: values for ``torch._inductor.config``, for pieces only, such as ``{"max_autotune": true}``.
        compile_timeout_s: a piece that takes longer is named in a warning while it compiles, and counts
            as failed when it is done.
        call_inner_function: call the function that Inductor generated without the layers around it,
            where nothing needs them; it saves some microseconds per piece and call.
        unfuse_residuals: on CUDA, add a residual that a piece returns after the product and not in it, as Inductor
            does inside of a graph; it saves a kernel per layer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    config: dict[str, Any] = Field(default_factory=dict)
    compile_timeout_s: float = Field(default=300.0, gt=0)
    call_inner_function: bool = True
    unfuse_residuals: bool = True


def read_options(config: CompilationConfig) -> InductorOptions:
    """Return the checked options of a compilation.

    Raises:
        ConfigError: an option is unknown or of a wrong type.
    """
    given = config.plugin_options.get("inductor", {})
    try:
        return InductorOptions.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        known = list(InductorOptions.model_fields)
        near = difflib.get_close_matches(where, known, n=1) if first["type"] == "extra_forbidden" else []
        what = "there is no such option" if first["type"] == "extra_forbidden" else first["msg"]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"plugin_options['inductor'].{where}: {what}, got {first['input']!r}{hint}; the options are "
            f"{', '.join(known)}"
        ) from None
