"""The memory that graphs share: one pool of the caching allocator, and what keeps it from ending the process.

``MemPool``'s destructor terminates the process if a graph still uses the pool, and at the end of a program Python
destroys objects in any order. So a pool is never destroyed but by ``destroy_unused``.
"""

from __future__ import annotations

import bisect
import ctypes
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from piecework_cudagraph import cudagraph_internals as internals

__all__ = ["GraphPool", "destroy_unused", "with_storage"]


class GraphPool:
    """A pool for the graphs and static tensors of one capturer; made on the stream that captures.

    It gives no memory back to the device as long as it, or an alias of its memory, exists.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._segments: list[tuple[int, int]] = []
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._aliases: dict[tuple[Any, ...], torch.Tensor] = {}
        self._pool = torch.cuda.MemPool()
        _keep_for_good(self._pool)
        self.id: internals.PoolId = self._pool.id
        # The allocator of pinned memory forgets a pool with its last graph, and refuses the next capture there.
        anchor = _make_small_graph(self.id, device)
        weakref.finalize(self, _let_go, self._pool, anchor).atexit = False

    @property
    def num_bytes(self) -> int:
        """What the pool has taken from the device."""
        return sum(segment["total_size"] for segment in self._snapshot())

    @property
    def num_uses(self) -> int:
        """How many graphs use the pool, plus two."""
        return self._pool.use_count()

    @property
    def is_used(self) -> bool:
        """Whether a graph or a tensor other than an alias needs the pool."""
        return self.num_uses > 2 or any(segment["active_size"] for segment in self._snapshot())

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the pool; never called while something is captured into it."""
        with torch.cuda.use_mem_pool(self._pool, device=self._device):
            return torch.empty_strided(size, stride, dtype=dtype, device=self._device)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor over memory of the pool that holds the pool, but not the block; None for other memory.

        Layers that are alike use the same blocks in turn: equal aliases are made once, until ``forget_aliases``.
        """
        storage = tensor.untyped_storage()
        block = (storage.data_ptr(), storage.nbytes())
        form = (block, tensor.storage_offset(), tensor.dtype, tensor.size(), tensor.stride())
        alias = self._aliases.get(form)
        if alias is None and block[1] and self._holds(block[0]):
            if block not in self._storages:
                memory = torch.as_tensor(_Bytes(self, *block), device=self._device)
                self._storages[block] = memory.untyped_storage()
            self._aliases[form] = alias = with_storage(self._storages[block], tensor)
        return alias

    def forget_aliases(self) -> None:
        """Let go of the aliases, which hold the pool; those that others have go on to hold it."""
        self._aliases.clear()
        self._storages.clear()

    def abandon(self, graph: torch.cuda.CUDAGraph, num_uses: int) -> None:
        """Mend the allocator's books after a capture that ended in an error; no other can follow in this pool.

        Args:
            graph: what was to be captured.
            num_uses: what it was before that capture.
        """
        graph.reset()
        # The allocator of pinned memory can't be told, and goes on asking this graph whose memory it allocates.
        _failed.append(graph)
        internals.end_allocation(self._device.index, self.id)
        for _ in range(self.num_uses - num_uses):
            internals.release_use(self._device.index, self.id)

    def _holds(self, address: int) -> bool:
        """Whether an address lies in the pool."""
        if not self._knows(address):
            segments = ((s["address"], s["address"] + s["total_size"]) for s in self._snapshot())
            self._segments = sorted(segments)
        return self._knows(address)

    def _knows(self, address: int) -> bool:
        at = bisect.bisect_right(self._segments, (address, sys.maxsize)) - 1
        return at >= 0 and address < self._segments[at][1]

    def _snapshot(self) -> list[dict[str, int]]:
        return self._pool.snapshot(include_traces=False)


def with_storage(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the form of another one over a storage; writable in and outside of inference mode."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return with_storage(storage, like)
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    return made.set_(storage, like.storage_offset(), like.size(), like.stride())


class _Bytes:
    """Memory as ``torch.as_tensor`` takes it; the tensor keeps this object, and with it the pool."""

    def __init__(self, pool: GraphPool, address: int, num_bytes: int) -> None:
        self.pool = pool
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _make_small_graph(pool_id: internals.PoolId, device: torch.device) -> torch.cuda.CUDAGraph:
    with torch.inference_mode(False):
        scratch = torch.zeros(1, device=device)
        graph = torch.cuda.CUDAGraph()
        internals.begin_capture(graph, pool_id)
        scratch.zero_()
        graph.capture_end()
    return graph


_failed: list[torch.cuda.CUDAGraph] = []
_unused: list[tuple[torch.cuda.MemPool, torch.cuda.CUDAGraph]] = []


def _let_go(pool: torch.cuda.MemPool, anchor: torch.cuda.CUDAGraph) -> None:
    if sys.is_finalizing():
        return
    _unused.append((pool, anchor))
    if not torch.cuda.is_current_stream_capturing():  # Else freeing would end that capture with an error.
        destroy_unused()


def destroy_unused() -> None:
    """Destroy the pools that nobody needs, as soon as the last graph is gone; called where nothing is captured."""
    waiting = _unused[:]
    _unused.clear()
    while waiting:
        pool, anchor = waiting.pop()
        anchor.reset()
        if pool.use_count() > 1:
            _unused.append((pool, anchor))
        else:
            _keep_no_longer(pool)


def _keep_for_good(pool: torch.cuda.MemPool) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


def _keep_no_longer(pool: torch.cuda.MemPool) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(pool))
