"""How kernels are launched: constants that tuning chooses, rows of a tensor, memory of results, the right device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from piecework_triton_ops.library import INTERPRETED

__all__ = [
    "MAX_BLOCK",
    "Launch",
    "Rows",
    "bound_launcher",
    "ceil_div",
    "new_result",
    "next_power_of_2",
    "on_device",
    "rounded",
    "rows_of",
]

MAX_BLOCK = 16384
"""Elements that a program holds in registers at most: 64 KiB as float32, a quarter of the registers of an SM."""


@dataclass(frozen=True)
class Launch:
    """What one launch is made with; it changes how fast a kernel is, and nothing of its results but the order of sums.

    Attributes:
        num_warps: warps of 32 threads in one program, a power of two.
        block: columns that a program holds at a time, a power of two.
        rows: rows (of rotary embeddings, heads) that a program holds at a time, a power of two.
    """

    num_warps: int
    block: int
    rows: int = 1


@dataclass(frozen=True)
class Rows:
    """A tensor ``[..., width]`` as a kernel reads it.

    Attributes:
        tensor: the given one, or a copy; elements of a row are neighbours.
        count: how many rows it has.
        stride: from row to row, in elements.
    """

    tensor: torch.Tensor
    count: int
    stride: int


def rows_of(x: torch.Tensor) -> Rows:
    """Return a tensor that isn't empty as rows, copied only if no single stride leads from row to row."""
    width = x.shape[-1]
    if not x.is_contiguous():
        x = x.reshape(-1, width)
        if x.stride(1) == 1 or width == 1:
            return Rows(x, x.shape[0], x.stride(0))
        x = x.contiguous()
    return Rows(x, x.numel() // width, width)


def new_result(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return contiguous memory for a kernel's result, which ``rounded`` turns into the result.

    Triton's interpreter (3.6 to 3.9) truncates float32 to bfloat16, and rounds wrongly to float8, where devices round
    to nearest. Under it kernels write float32, and torch rounds.
    """
    stored = torch.float32 if INTERPRETED and dtype.is_floating_point else dtype
    return torch.empty(shape, dtype=stored, device=like.device)


def rounded(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return memory of ``new_result`` as what it was made for; on a device it is that already."""
    return result.to(dtype)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a device current, since Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def next_power_of_2(value: int) -> int:
    """Return the least power of two that isn't less."""
    return 1 << max(0, value - 1).bit_length()


def ceil_div(value: int, by: int) -> int:
    """Return how many parts of a size cover a value."""
    return -(-value // by)


def bound_launcher(
    kernel: Any, device: torch.device, example: Sequence[Any], num_warps: int
) -> Callable[[int, Sequence[Any]], None]:
    """Compile a kernel for one specialisation, and return what launches it with the least Python.

    A launch by ``kernel[grid](...)`` binds and specialises all arguments again: more than the copy of a small batch
    takes. This goes past it to ``CompiledKernel.run``, as ``JITFunction.run`` calls it in Triton 3.6, 3.8 and 3.9:
    grid, stream, function, metadata, three hooks of profilers (none here), then all arguments, constants among them.
    Pointers may be addresses, as integers. None of this is public in Triton; no other function relies on it.

    Args:
        example: arguments with the types and alignments of all later calls; nothing is launched with them.

    Returns:
        A function of the number of programs and the arguments, which launches on the current stream of the device. The
        alignments of the example are its caller's promise.
    """
    with on_device(device):
        compiled = kernel.warmup(*example, grid=(1,), num_warps=num_warps)
        compiled = compiled.result() if hasattr(compiled, "result") else compiled  # Where compiling is asynchronous.
        run = compiled.run  # Reading it loads the binary, which gives ``function`` its value.
    function, metadata, index = compiled.function, compiled.packed_metadata, device.index
    driver: Any = triton.runtime.driver.active
    current_stream = driver.get_current_stream

    def launch(num_programs: int, arguments: Sequence[Any]) -> None:
        run(num_programs, 1, 1, current_stream(index), function, metadata, None, None, None, *arguments)

    def launch_there(num_programs: int, arguments: Sequence[Any]) -> None:
        with torch.cuda.device(device):
            launch(num_programs, arguments)

    return launch if torch.cuda.device_count() == 1 else launch_there
