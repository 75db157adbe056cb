"""The options of this plugin: ``plugin_options={"cudagraph": {...}}``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CudaGraphOptions(BaseModel):
    """What a user may set.

    Attributes:
        min_piece_nodes: a piece of fewer ops runs uncaptured between the replays. A replay costs as much on the host
            as launching one or two kernels, so that the smallest pieces gain nothing; 0 captures all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    min_piece_nodes: int = Field(default=0, ge=0)
