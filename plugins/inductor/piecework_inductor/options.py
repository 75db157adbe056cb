"""The options of this plugin: ``plugin_options={"inductor": {...}}``."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class InductorOptions(BaseModel):
    """What a user may set.

    Attributes:
        config: values for ``torch._inductor.config``, for pieces only, such as ``{"max_autotune": true}``.
        compile_timeout_s: a piece that takes longer is named in a warning while it compiles, and counts
            as failed when it is done.
        call_inner_function: call the function that Inductor generated without the layers around it,
            where nothing needs them; it saves some microseconds per piece and call.
        unfuse_residuals: on CUDA, add a residual after the product and not in it, where results of the piece and
            pointwise ops alone need the sum, as Inductor does inside of a graph; it saves a kernel per residual.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    config: dict[str, Any] = Field(default_factory=dict)
    compile_timeout_s: float = Field(default=300.0, gt=0)
    call_inner_function: bool = True
    unfuse_residuals: bool = True
