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
        self._segments: dict[int, int] = {}
        self._starts: list[int] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        """By where they begin: one storage per segment is a third of the cost of one per alias."""
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

        Layers that are alike use the same memory in turn: equal aliases are made once, until ``forget_aliases``.
        """
        form = (tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride())
        alias = self._aliases.get(form)
        if alias is None:
            address = tensor.untyped_storage().data_ptr()
            start = self._segment_of(address)
            if start is None:
                return None
            if start not in self._storages:
                self._storages[start] = self._storage(start, self._segments[start])
            alias = with_storage(self._storages[start], tensor, bytes_ahead=address - start)
            self._aliases[form] = alias
        return alias

    def own_alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return such a tensor with a storage that has nothing else in it."""
        storage = tensor.untyped_storage()
        if self._segment_of(storage.data_ptr()) is None:
            return None
        return with_storage(self._storage(storage.data_ptr(), storage.nbytes()), tensor)

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

    def _segment_of(self, address: int) -> int | None:
        """Return where the segment begins that an address lies in; None where it lies in none."""
        start = self._known_segment_of(address)
        if start is None:
            self._segments = {segment["address"]: segment["total_size"] for segment in self._snapshot()}
            self._starts = sorted(self._segments)
            self._storages.clear()  # A segment may have grown.
            start = self._known_segment_of(address)
        return start

    def _known_segment_of(self, address: int) -> int | None:
        at = bisect.bisect_right(self._starts, address) - 1
        start = self._starts[at] if at >= 0 else None
        return start if start is not None and address < start + self._segments[start] else None

    def _storage(self, address: int, num_bytes: int) -> torch.UntypedStorage:
        return torch.as_tensor(_Bytes(self, address, num_bytes), device=self._device).untyped_storage()

    def _snapshot(self) -> list[dict[str, int]]:
        return self._pool.snapshot(include_traces=False)


def with_storage(storage: torch.UntypedStorage, like: torch.Tensor, *, bytes_ahead: int = 0) -> torch.Tensor:
    """Return a tensor of the form of another one over a storage; writable in and outside of inference mode.

    Args:
        storage: whose memory.
        like: sizes, strides and offset.
        bytes_ahead: where in ``storage`` the memory begins that the offset counts from.
    """
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return with_storage(storage, like, bytes_ahead=bytes_ahead)
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    offset = bytes_ahead // like.element_size() + like.storage_offset()
    return made.set_(storage, offset, like.size(), like.stride())


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
