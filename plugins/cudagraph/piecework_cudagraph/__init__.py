"""Capture pieces in CUDA graphs; torch is asked for them when the first model needs a capturer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piecework import hookimpl, read_options

if TYPE_CHECKING:
    import torch

    from piecework import Capturer, CompilationConfig

PIECEWORK_PLUGIN_API = 1


@hookimpl(trylast=True)
def piecework_capturer(device: torch.device, config: CompilationConfig) -> Capturer | None:
    """Capture on CUDA devices; asked after all third-party capturers."""
    from piecework_cudagraph.options import CudaGraphOptions

    options = read_options(CudaGraphOptions, config, "cudagraph")  # Where it declines too: a typo is one everywhere.
    if device.type != "cuda":
        return None
    from piecework_cudagraph.capturer import CudaGraphCapturer  # Only here is torch needed.

    return CudaGraphCapturer(device, options)
