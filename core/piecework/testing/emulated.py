"""A capturer for the CPU, on which memory and order behave as on a device that records graphs.

This module is a plugin too; ``piecework.testing.plugins`` registers it under the name ``emulated``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from piecework.capturing import Capture, CaptureMemory, Capturer, Recordable
from piecework.errors import CaptureError
from piecework.hookspecs import hookimpl
from piecework.testing.arena import Arena, bytes_of, index_poison, poison, with_storage_of
from piecework.testing.refusing import Refusing

__all__ = ["EmulatedCapturer", "piecework_capturer", "stream"]

DRIVER_BYTES = 64 * 1024
"""What a graph is said to cost outside of the pool."""


@hookimpl(trylast=True)
def piecework_capturer(device: torch.device) -> EmulatedCapturer | None:
    """Capture on the CPU; asked after all plugins that do not mark ``trylast``."""
    return EmulatedCapturer(device) if device.type == "cpu" else None


@contextlib.contextmanager
def stream(name: Hashable, *, is_recorded: bool = False) -> Iterator[None]:
    """Make another emulated stream the current one of this thread, for one block.

    Args:
        name: tells it from others; outside of all blocks the stream is called ``"default"``.
        is_recorded: somebody captures it, so that no graph can be replayed there.
    """
    token = _current.set(_Stream(name, is_recorded))
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(frozen=True)
class _Stream:
    name: Hashable
    is_recorded: bool


_DEFAULT_STREAM = _Stream("default", False)
_current = ContextVar("_current", default=_DEFAULT_STREAM)


class EmulatedCapturer(Capturer):
    """Emulates static addresses: a replay is another run, whose results go where those of the capture lie.

    As on a device: a capture computes nothing, so its outputs hold poison until the first replay (NaN, or integers
    that are no index), and what it writes is put back; a replay reads the memory that the inputs had at capture, so
    that ``p.data = t`` is not seen by it; memory that nobody holds is poisoned and given to the next capture;
    ``.item()``, ``nonzero`` and ops marked ``torch.Tag.cudagraph_unsafe`` are refused.

    Unlike there: a replay runs Python again, memory outside of the pool is kept alive by the graphs that read it,
    and what one graph allocates and lets go is not in the pool.

    Args:
        limit_bytes: the pool can't grow beyond it: ``CaptureError``.
        fail_at: number of a capture, from 1, that fails on purpose, after the work was run.
        error: what it raises then, by default a ``CaptureError``.

    Attributes:
        num_captures: how many were tried.
        waits: for each ``wait_for``, the stream that waited and the one that it waited for.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        limit_bytes: int | None = None,
        fail_at: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        super().__init__(device)
        self.num_captures = 0
        self.waits: list[tuple[Hashable, Hashable]] = []
        self._fail_at = fail_at
        self._error: BaseException | None = error or CaptureError("this capture was asked to fail (fail_at)")
        self._limit_bytes = limit_bytes
        self._arena = Arena(limit_bytes)
        self._replays: weakref.WeakSet[_Replay] = weakref.WeakSet()
        self._is_in_session = False

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Return a context around captures; there is nothing to prepare."""
        if self._is_in_session:
            raise CaptureError(f"a session of the capturer of {self.device} is open; leave it before the next one")
        self._is_in_session = True
        try:
            yield
        finally:
            self._is_in_session = False

    def capture(self, fn: Callable[[], tuple[torch.Tensor, ...]]) -> Capture:
        """Run once to learn the form of the outputs, and put them into the pool.

        Raises:
            CaptureError: a device would refuse an op, or ``limit_bytes`` does not suffice.
        """
        self._check_in_session("capture")
        self.num_captures += 1
        work = fn if isinstance(fn, Recordable) else Recordable(_name_of(fn), fn, ())
        with _detached():
            inputs = tuple(tensor.detach() for tensor in work.inputs)
        with torch.random.fork_rng(devices=[]), self._put_back(work, inputs), _mode_for(inputs), Refusing(work.name):
            results = tuple(work.run(*inputs))
        if self.num_captures == self._fail_at and self._error is not None:
            error, self._error = self._error, None  # Its traceback keeps all that was captured before.
            raise error
        with _detached():
            outputs, blocks = self._pin(work, results, inputs)
            replay = _Replay(work.run, tuple(map(self.alias, inputs)), blocks)
        self._replays.add(replay)
        return Capture(replay, outputs)

    def warm_up(self, fn: Callable[[], Any]) -> None:
        """Run something once, in ordinary memory."""
        self._check_in_session("warm_up")
        fn()

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory in the pool, full of poison.

        Raises:
            CaptureError: ``limit_bytes`` does not suffice.
        """
        self._check_in_session("empty")
        with _detached():
            wanted = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            num_bytes = wanted.untyped_storage().nbytes()
            if num_bytes == 0:
                return torch.empty_strided(size, stride, dtype=dtype)
            return with_storage_of(
                self._take(num_bytes, dtype, f"no memory for a static tensor {list(size)} of {dtype}"), wanted
            )

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory that does not hold it; memory outside of the pool it does hold."""
        storage = tensor.untyped_storage()
        with _detached():
            memory = self._arena.at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None
            return tensor if memory is None else with_storage_of(memory, tensor)

    def memory(self) -> CaptureMemory:
        """Return the size of the arena, and a constant for each replay that is still there."""
        pool_bytes = self._arena.num_bytes
        free_bytes = None if self._limit_bytes is None else self._limit_bytes - pool_bytes
        return CaptureMemory(pool_bytes, len(self._replays) * DRIVER_BYTES, free_bytes)

    def release(self) -> None:
        """Start with an empty pool; tensors that are still there stay readable."""
        self._arena = Arena(self._limit_bytes)

    def current_stream(self) -> Hashable:
        """Return the name of the innermost ``stream`` block of this thread."""
        return _current.get().name

    def wait_for(self, stream: Hashable) -> bool:
        """Note down who waits for whom in ``waits``."""
        if _current.get().is_recorded:
            return False
        self.waits.append((_current.get().name, stream))
        return True

    def _check_in_session(self, what: str) -> None:
        if not self._is_in_session:
            raise CaptureError(f"{what} is called inside `with capturer.session():`; there is none for {self.device}")

    def _take(self, num_bytes: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        try:
            return self._arena.take(num_bytes, dtype)
        except torch.OutOfMemoryError as error:
            raise CaptureError(f"{what}: {error}; capture fewer or smaller sizes") from error

    def _pin(
        self, work: Recordable, results: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[torch.Tensor, ...], tuple[_Block, ...]]:
        """Return outputs in the pool of the form of the results; results that share memory keep sharing it.

        By storage: a result that is an input or a view of one stays what it is, and one that is expanded
        or has gaps needs no care.
        """
        not_fresh = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        blocks: dict[int, tuple[torch.Tensor, _Block]] = {}
        outputs: list[torch.Tensor] = []
        for index, result in enumerate(map(_plain, results)):
            storage = result.untyped_storage()
            address = storage.data_ptr()
            if storage.nbytes() == 0 or address in not_fresh or self._arena.at(address, 1) is not None:
                outputs.append(result)
                continue
            if address not in blocks:
                memory = self._take(
                    storage.nbytes(),
                    result.dtype,
                    f"{work.name} can't be captured, there is no memory for output {index}",
                )
                blocks[address] = memory, _Block(index, result.dtype, bytes_of(self.alias(memory)))
            outputs.append(with_storage_of(blocks[address][0], result))
        return tuple(outputs), tuple(block for _, block in blocks.values())

    @contextlib.contextmanager
    def _put_back(self, work: Recordable, inputs: tuple[torch.Tensor, ...]) -> Iterator[None]:
        """Undo what a run does to its inputs, which a device that only records does not do.

        Nor does such a device read them, so that poison among indices must not be an error.
        """
        changed = [_dense(inputs[position]) for position in work.writes]
        indices = [
            _dense(tensor)
            for tensor in inputs
            if tensor.dtype in (torch.int32, torch.int64) and self.alias(tensor) is not tensor
        ]
        with torch.inference_mode(_any_is_inference(inputs)), torch.no_grad():
            contents = [(tensor, tensor.clone()) for tensor in (*changed, *indices)]
            for tensor in indices:
                tensor.masked_fill_(tensor == index_poison(tensor.dtype), 0)
        try:
            yield
        finally:
            with torch.inference_mode(_any_is_inference(inputs)), torch.no_grad():
                for tensor, content in contents:
                    tensor.copy_(content)


@dataclass(frozen=True)
class _Block:
    """Memory of outputs, which the run gives back in the storage of one of its results."""

    index: int
    dtype: torch.dtype
    memory: torch.Tensor  # An alias: a graph writes to addresses, it does not hold them.


@dataclass(frozen=True, eq=False)
class _Replay:
    run: Callable[..., tuple[torch.Tensor, ...]]
    inputs: tuple[torch.Tensor, ...]
    blocks: tuple[_Block, ...]

    def __call__(self) -> None:
        for block in self.blocks:
            poison(block.memory, block.dtype)
        with _mode_for(self.inputs):
            results = tuple(map(_plain, self.run(*self.inputs)))
            for block in self.blocks:
                block.memory.copy_(bytes_of(results[block.index]))


@contextlib.contextmanager
def _mode_for(inputs: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Switch gradients off, and inference mode as it has to be for writing to the inputs."""
    with torch.inference_mode(_any_is_inference(inputs)), torch.no_grad():
        yield


@contextlib.contextmanager
def _detached() -> Iterator[None]:
    """Make tensors that can be written to in and outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _any_is_inference(inputs: tuple[torch.Tensor, ...]) -> bool:
    return any(tensor.is_inference() for tensor in inputs)


def _plain(result: torch.Tensor) -> torch.Tensor:
    """Return a result whose memory says it all: no gradient, no pending conjugation."""
    return result.detach().resolve_conj().resolve_neg()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without the repetitions of an expanded tensor, which can't be written to."""
    for dim, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _name_of(fn: object) -> str:
    return getattr(fn, "name", None) or getattr(fn, "__name__", None) or type(fn).__name__
