"""What records runs of pieces into device graphs: the contract between the core and a capturer.

The core owns order, sizes, what is merged into one graph and what is copied; a capturer owns the
stream, the pool and the lifetimes of what it allocates there.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Recordable:
    """What a capturer records: called without arguments it does the work once.

    Attributes:
        name: the pieces and ops that it runs, for messages.
        run: does the work on the tensors that it is given; always called with ``inputs`` or with
            tensors that share their memory. Allocates what it needs, returns its results.
        inputs: every tensor that it reads and that exists before it. A graph reads their addresses.
        writes: positions in ``inputs`` of those that it writes to. A capturer that has to execute
            the work in order to record it puts their contents back.
    """

    name: str
    run: Callable[..., tuple[torch.Tensor, ...]]
    inputs: tuple[torch.Tensor, ...]
    writes: tuple[int, ...] = ()

    def __call__(self) -> tuple[torch.Tensor, ...]:
        return self.run(*self.inputs)


@dataclass(eq=False)
class Capture:
    """A recorded graph.

    Args:
        replay: runs the graph again on the current stream, without arguments, as cheaply as can be.
        outputs: the tensors that the recorded run returned; every replay writes the same memory. As long
            as one of them (or a view of one) exists, nothing that is captured later gets its memory.
    """

    replay: Callable[[], Any]
    outputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class CaptureMemory:
    """What the captures of one capturer hold at present.

    Args:
        pool_bytes: memory taken from the device for static tensors and intermediates.
        driver_bytes: what the driver keeps for the graphs themselves, as far as it can be told.
        free_bytes: what the device has left; None where there is no such limit.
    """

    pool_bytes: int
    driver_bytes: int = 0
    free_bytes: int | None = None


class Capturer(abc.ABC):
    """Records graphs on one device: the answer to ``piecework_capturer``.

    All graphs of a capturer share one pool, and the core never runs two plans of it at a time: it
    serialises calls on the host and, through ``current_stream`` and ``wait_for``, on the device. So the memory
    of a tensor that nobody holds any longer may be given to whatever is captured after it.
    """

    @abc.abstractmethod
    def session(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context around many captures; not entered twice at a time.

        It prepares what should not be done for each: the stream, garbage collection. On leaving it, whether
        or not by an exception, what is queued on the caller's stream next sees all that happened inside.
        """

    @abc.abstractmethod
    def capture(self, fn: Callable[[], tuple[torch.Tensor, ...]]) -> Capture:
        """Record one run, inside a session.

        Args:
            fn: a ``Recordable``; calling it does the work. It may run more than once, or on a device that
                only records, not take effect at all: nobody relies on what it computes.

        Raises:
            CaptureError: the device refuses something that ``fn`` does. Whatever ``fn`` itself raises is passed
                on. Afterwards the capturer is as it was, and can capture other things.
        """

    @abc.abstractmethod
    def memory(self) -> CaptureMemory:
        """Return what the captures hold now; called around captures, never on the replay path."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give all memory back to the device; called when no capture and no static tensor is in use."""

    def refuses(self, graph: torch.fx.GraphModule) -> str | None:
        """Return why a piece shall run uncaptured between the replays; None to record it.

        Called once per unique piece and size. By default, everything is recorded.
        """
        return None

    def warm_up(self, fn: Callable[[], Any]) -> None:
        """Run something once as a capture would, before it is recorded; inside a session."""
        fn()

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return static memory in the pool, as ``torch.empty_strided`` does; inside a session."""
        import torch  # Heavy, and a list of plugins needs this module.

        return torch.empty_strided(size, stride, dtype=dtype, device=self.device)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory that does not keep later captures from using it.

        It must keep the pool itself from being given back to the device. Without an implementation, all
        intermediates of all sizes stay apart: right, and far larger. The storage begins and ends where that of the
        tensor does, since offsets count from there; equal aliases may be one tensor.
        """
        return tensor

    def current_stream(self) -> Hashable:
        """Return what tells the current stream of the calling thread from others; called on every replay."""
        return None

    def wait_for(self, stream: Hashable) -> bool:
        """Let the current stream wait for all that is queued on another one that was current before.

        Returns:
            False where the current stream can't replay now, since someone is recording it: the call is then
            answered by the pieces uncaptured.
        """
        return True

    def __init__(self, device: torch.device) -> None:
        self.device = device
