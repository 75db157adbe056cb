"""Every underscored API of torch that this plugin touches, and what differs between 2.11 and 2.14."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["PoolId", "begin_capture", "end_allocation", "raw_stream_getter", "release_use", "replay_of"]

PoolId = tuple[int, int]


def raw_stream_getter(device_index: int) -> Callable[[], int]:
    """Return what gives the current stream of the calling thread, in 0.1 us; the public one makes an object of it."""
    get: Callable[[int], int] = torch._C._cuda_getCurrentRawStream  # pyright: ignore[reportAttributeAccessIssue]
    return functools.partial(get, device_index)


def replay_of(graph: torch.cuda.CUDAGraph) -> Callable[[], Any]:
    """Return what replays a graph, without the Python around it where that does nothing.

    On 2.14 ``CUDAGraph.replay`` looks for hooks on every replay. Hooks that exist now are kept; those that are
    registered later are not called for this graph.
    """
    hooks = ("_global_replay_start_hooks", "_global_replay_end_hooks")
    if any(getattr(torch.cuda.graphs, name, None) for name in hooks):
        return graph.replay
    return functools.partial(torch._C._CUDAGraph.replay, graph)


def begin_capture(graph: torch.cuda.CUDAGraph, pool_id: PoolId) -> None:
    """Record what the current stream is given from here on.

    Not in the mode "global": it refuses the first launch of a Triton kernel, which loads a module.
    """
    graph.capture_begin(torch.cuda._POOL_HANDLE(pool_id), capture_error_mode="thread_local")


def end_allocation(device_index: int, pool_id: PoolId) -> None:
    """Stop giving memory of a pool to a capture that ended in an error.

    ``capture_end`` does so only after ``cudaStreamEndCapture`` has succeeded (2.11 to 2.14); it may have, where
    something later failed, and then there is nothing to stop.
    """
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device_index, pool_id)


def release_use(device_index: int, pool_id: PoolId) -> None:
    """Count one user of a pool less: a graph whose capture ended in an error never does so itself (2.11 to 2.14)."""
    torch._C._cuda_releasePool(device_index, pool_id)  # pyright: ignore[reportAttributeAccessIssue]
