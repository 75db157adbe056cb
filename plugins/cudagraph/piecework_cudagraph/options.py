"""The options of this plugin: ``plugin_options={"cudagraph": {...}}``."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from piecework import ConfigError

if TYPE_CHECKING:
    from piecework import CompilationConfig


class CudaGraphOptions(BaseModel):
    """What a user may set.

    Attributes:
        min_piece_nodes: a piece of fewer ops runs uncaptured between the replays. A replay costs as much on the host
            as launching one or two kernels, so that the smallest pieces gain nothing; 0 captures all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    min_piece_nodes: int = Field(default=0, ge=0)


def read_options(config: CompilationConfig) -> CudaGraphOptions:
    """Return the checked options of a compilation.

    Raises:
        ConfigError: an option is unknown or of a wrong type.
    """
    given = config.plugin_options.get("cudagraph", {})
    try:
        return CudaGraphOptions.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        known = list(CudaGraphOptions.model_fields)
        near = difflib.get_close_matches(where, known, n=1) if first["type"] == "extra_forbidden" else []
        what = "there is no such option" if first["type"] == "extra_forbidden" else first["msg"]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"plugin_options['cudagraph'].{where}: {what}, got {first['input']!r}{hint}; the options are "
            f"{', '.join(known)}"
        ) from None
