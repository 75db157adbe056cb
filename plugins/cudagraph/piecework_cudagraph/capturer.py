"""Record pieces in CUDA graphs: one stream and one pool for all captures of a device.

``torch.cuda.graph`` synchronises and empties caches for each capture; here ``capture_begin`` and
``capture_end`` are called directly.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from piecework import Capture, CaptureError, CaptureMemory, Capturer, Recordable
from piecework_cudagraph import cudagraph_internals as internals
from piecework_cudagraph.driver_memory import DriverMemory
from piecework_cudagraph.options import CudaGraphOptions
from piecework_cudagraph.pool import GraphPool, destroy_unused, with_storage
from piecework_cudagraph.refusals import explain
from piecework_cudagraph.session import garbage_collection_off, make_workspaces

__all__ = ["CudaGraphCapturer"]

logger = logging.getLogger("piecework.cudagraph")


class CudaGraphCapturer(Capturer):
    """Captures on one CUDA device.

    A capture that the device refuses spoils the pool for later captures, though not for graphs that are in it
    already: the next ones get a new pool, and the old one goes with its last graph.
    """

    def __init__(self, device: torch.device, options: CudaGraphOptions) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(torch.device("cuda", index))
        self._options = options
        self._stream = torch.cuda.Stream(self.device)
        self._pool: GraphPool | None = None
        self._old_pools: list[GraphPool] = []
        self._driver_memory = DriverMemory(self.device)
        self._is_in_session = False
        self.current_stream = internals.raw_stream_getter(index)  # In place of the method, which would cost as much.

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Make the capture stream the current one, and stop garbage collection.

        Raises:
            CaptureError: a session is open, somebody captures the current stream, or memory does not suffice.
        """
        if self._is_in_session:
            raise CaptureError(f"a session of the capturer of {self.device} is open; leave it before the next one")
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    f"the current stream of {self.device} is being captured by somebody else, and captures can't be "
                    "nested; capture the sizes before"
                )
            caller = torch.cuda.current_stream()
            self._is_in_session = True
            try:
                self._stream.wait_stream(caller)
                with (
                    torch.no_grad(),
                    torch.cuda.stream(self._stream),
                    garbage_collection_off(),
                    _no_warning_of_empty_graphs(),
                ):
                    self._prepare()
                    with self._driver_memory.measured():
                        yield
            finally:
                self._is_in_session = False
                for pool in self._pools:
                    pool.forget_aliases()
                caller.wait_stream(self._stream)

    def capture(self, fn: Callable[[], tuple[torch.Tensor, ...]]) -> Capture:
        """Record one run; nothing of it takes effect.

        Raises:
            CaptureError: the device refuses something, or its memory does not suffice.
        """
        self._pool_in_session("capture")
        graph = torch.cuda.CUDAGraph()
        results = self._record(graph, fn)
        self._driver_memory.add(graph)
        if any(result.is_inference() for result in results):
            inputs = fn.inputs if isinstance(fn, Recordable) else ()
            results = tuple(_writable(result, inputs) for result in results)
        return Capture(internals.replay_of(graph), results)

    def warm_up(self, fn: Callable[[], Any]) -> None:
        """Run something once on the capture stream, in ordinary memory."""
        self._pool_in_session("warm_up")
        fn()

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the pool, with anything in it.

        Raises:
            CaptureError: the memory of the device does not suffice.
        """
        pool = self._pool_in_session("empty")
        with _enough_memory(f"a static tensor {list(size)} of {dtype}"), torch.inference_mode(False):
            return pool.empty(size, stride, dtype)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory that holds the pool only; one outside of the pool as it is."""
        for pool in self._pools:
            if (alias := pool.alias(tensor)) is not None:
                if not self._is_in_session:  # Else the pool would hold itself until the end of the next one.
                    pool.forget_aliases()
                return alias
        return tensor

    def memory(self) -> CaptureMemory:
        """Return what the pools take, and about what the driver does."""
        pool_bytes = sum(pool.num_bytes for pool in self._pools)
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        return CaptureMemory(pool_bytes, self._driver_memory.num_bytes, free_bytes)

    def release(self) -> None:
        """Give up the pool; its memory is free when the last alias and the last graph are gone."""
        self._pool = None
        self._old_pools.clear()
        destroy_unused()
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def refuses(self, graph: torch.fx.GraphModule) -> str | None:
        """Return that a piece is too small for a graph to gain, if a size was set for that."""
        num_nodes = sum(node.op.startswith("call_") for node in graph.graph.nodes)
        if num_nodes >= self._options.min_piece_nodes:
            return None
        return f"it has {num_nodes} ops, fewer than min_piece_nodes={self._options.min_piece_nodes}"

    def wait_for(self, stream: Hashable) -> bool:
        """Let the current stream wait for another, given as ``current_stream`` gave it; False in a capture."""
        assert isinstance(stream, int), stream
        # Number 0 is the default stream, but ExternalStream(0) is a new one.
        other = (
            torch.cuda.ExternalStream(stream, device=self.device) if stream else torch.cuda.default_stream(self.device)
        )
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            if torch.cuda.is_current_stream_capturing() or _is_capturing(other):
                return False
            current.wait_stream(other)
        return True

    @property
    def _pools(self) -> list[GraphPool]:
        return [*([] if self._pool is None else [self._pool]), *self._old_pools]

    def _prepare(self) -> None:
        self._old_pools = [pool for pool in self._old_pools if pool.is_used]
        destroy_unused()
        self._make_room()
        with _enough_memory("to prepare captures"):
            make_workspaces(self.device)
            self._pool = self._pool or GraphPool(self.device)

    def _make_room(self) -> None:
        """Give back what torch keeps for later tensors, where that is more than is free: captures can't use it."""
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        kept_bytes = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if kept_bytes > free_bytes:
            torch.cuda.empty_cache()

    def _pool_in_session(self, what: str) -> GraphPool:
        if not self._is_in_session or self._pool is None:
            raise CaptureError(f"{what} is called inside `with capturer.session():`; there is none for {self.device}")
        return self._pool

    def _record(
        self, graph: torch.cuda.CUDAGraph, fn: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        pool = self._pool_in_session("capture")
        num_uses = pool.num_uses
        try:
            internals.begin_capture(graph, pool.id)
            results = tuple(fn())
            # An alias has no place for a conjugation that is still to be done.
            if any(result.is_conj() or result.is_neg() for result in results):
                results = tuple(result.resolve_conj().resolve_neg() for result in results)
        except BaseException as error:  # Raised again, when the capture is ended: an interrupt must end it, too.
            refusal = self._end(graph, pool, num_uses)
            graph.reset()  # The traceback keeps the graph.
            why = explain(error) or (refusal and explain(refusal))
            if why is None or not isinstance(error, Exception) or isinstance(error, CaptureError):
                raise
            raise CaptureError(f"{_name_of(fn)} can't be captured: {why}") from error
        refusal = self._end(graph, pool, num_uses)
        if refusal is not None:
            raise CaptureError(f"{_name_of(fn)} can't be captured: {explain(refusal) or refusal}") from refusal
        return results

    def _end(self, graph: torch.cuda.CUDAGraph, pool: GraphPool, num_uses: int) -> RuntimeError | None:
        """End a capture, and return what the device says against it; the capturer is usable in any case."""
        try:
            if self.current_stream() == self._stream.cuda_stream:
                graph.capture_end()
            else:  # An exception left another one current.
                with torch.cuda.stream(self._stream):
                    graph.capture_end()
        except RuntimeError as error:
            logger.debug("a capture was refused, later ones get a new pool: %s", error)
            pool.abandon(graph, num_uses)
            self._old_pools.append(pool)
            # Its first capture also mends the generator of random numbers, which still believes to be captured.
            self._pool = GraphPool(self.device)
            return error
        return None


@contextlib.contextmanager
def _no_warning_of_empty_graphs() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # A piece may do nothing.
        yield


@contextlib.contextmanager
def _enough_memory(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CaptureError(f"{what}: {explain(error)}") from error


def _writable(result: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return a result as a tensor that can be written to outside of inference mode, where it was made inside."""
    if not result.is_inference() or any(result is tensor for tensor in inputs):
        return result
    return with_storage(result.untyped_storage(), result)


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _name_of(fn: object) -> str:
    return getattr(fn, "name", None) or getattr(fn, "__name__", None) or type(fn).__name__
