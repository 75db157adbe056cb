"""The capturers of the process: one per device, shared by all models, with what makes calls on it safe."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence

import torch

from piecework import torch_internals as internals
from piecework.capturing import CaptureMemory, Capturer
from piecework.config import CompilationConfig
from piecework.errors import CaptureError
from piecework.forking import renew_after_fork, usable
from piecework.plugins import PluginManager

PATIENCE_S = 0.5
"""So long a call waits for one that runs in another thread, before it does without captures."""
NESTED = "called from inside another captured call, or while something is captured"
IN_USE = "another thread was using the memory of all captures"
RECORDED = "its stream is being recorded"


class Pool:
    """A capturer, and who runs on it at the moment.

    Plans of one pool re-use each other's memory, so that one of them runs or is recorded at a time: on the
    host by ``lock``, on the device by ``switch``. A call from inside another one, through a splitting op, finds
    ``is_busy`` and runs uncaptured.
    """

    def __init__(self, device: torch.device, capturer: Capturer, plugin: str, origin: str) -> None:
        self.device = device
        self.capturer = capturer
        self.plugin, self.origin = plugin, origin
        self.lock = threading.RLock()
        self.is_busy = False
        self.stream: Hashable = None
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        """Whoever holds captures or static memory."""
        self.lent: dict[int | None, internals.StorageWeakRef] = {}
        self.is_inherited = False
        """This process was forked from the one that the capturer is of, whose handles mean nothing here."""
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Go on in a forked child without the threads that ran here, and later with a capturer of its own."""
        lock = usable(self.lock)
        if lock is not self.lock:
            self.lock, self.is_busy = lock, False
        self.stream, self.is_inherited = None, True

    def renew_capturer(self, manager: PluginManager, config: CompilationConfig) -> None:
        """Ask for a capturer anew, where the one that is there was inherited.

        Raises:
            CaptureError: nobody captures here now.
            PluginError: a plugin failed, as where the device can't be used in a forked process.
        """
        if not self.is_inherited:  # Without the lock: who holds it may wait for this thread.
            return
        with self.lock:
            if not self.is_inherited:
                return
            answer = manager.capturer(self.device, config)
            if answer is None:
                raise CaptureError(f"no plugin records graphs on {self.device} in this process, which was forked")
            self.capturer, self.plugin = answer
            self.origin, self.is_inherited = str(manager.origin(self.plugin)), False

    def wait(self) -> bool:
        """Take the lock when whoever has it is done; False where that may never be, and the lock is not taken.

        A splitting op may wait for a thread that calls a model of the same pool. If that call waited for the end of
        the op, neither would ever end.
        """
        while not self.lock.acquire(timeout=PATIENCE_S):
            if self.is_busy:
                return False
        return True

    @contextlib.contextmanager
    def being_busy(self) -> Iterator[None]:
        """Let calls from inside a block run uncaptured."""
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    def switch(self) -> bool:
        """Let the current stream wait for the one that was used last; False where it can't replay now.

        Raises:
            CaptureError: the capturer failed.
        """
        try:
            stream = self.capturer.current_stream()
            if not self.capturer.wait_for(stream if self.stream is None else self.stream):
                return False
        except Exception as error:  # of a plugin, which may raise anything
            raise self.blamed(error) from error
        self.stream = stream
        return True

    def memory(self) -> CaptureMemory:
        """Return what the captures hold now.

        Raises:
            CaptureError: the capturer failed.
        """
        try:
            return self.capturer.memory()
        except Exception as error:  # of a plugin, which may raise anything
            raise self.blamed(error) from error

    def blamed(self, error: Exception) -> CaptureError:
        """Return an error that names the plugin whose capturer raised another one."""
        return CaptureError(f"{self.origin} raised {type(error).__name__}: {error}")

    def empty(self, fake: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """Return static memory for something like ``fake``: in the pool, if it is on the pool's device."""
        if fake.device == self.device:
            return self.capturer.empty(size, stride, fake.dtype)
        return torch.empty_strided(size, stride, dtype=fake.dtype, device=fake.device)

    def lend(self, tensor: torch.Tensor) -> None:
        """Note that callers get a tensor of the pool whose memory nobody holds."""
        self.lent = {key: reference for key, reference in self.lent.items() if not reference.expired()}
        self.lent[internals.storage_key(tensor)] = internals.StorageWeakRef(tensor.untyped_storage())

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one that callers got, or a view of one: a capture may write over it."""
        reference = self.lent.get(internals.storage_key(tensor))
        return reference is not None and not reference.expired()

    def leave(self, user: object) -> None:
        """Note that somebody holds nothing any longer; the last one gives the memory back to the device."""
        with self.lock:
            was_there = user in self.users
            self.users.discard(user)
            if was_there and not self.users and not self.is_busy and not self.is_inherited:
                try:
                    self.capturer.release()
                except Exception as error:  # of a plugin, which may raise anything
                    raise self.blamed(error) from error


_pools: weakref.WeakKeyDictionary[PluginManager, dict[tuple[str, str | None], Pool | None]] = (
    weakref.WeakKeyDictionary()
)


def pool_of(device: torch.device, config: CompilationConfig, manager: PluginManager) -> Pool | None:
    """Return the pool of a device, made at the first need; None where nobody captures there.

    Raises:
        CaptureError: ``config.capturer`` names a plugin that does not capture on this device.
        PluginError: a plugin failed, or the one that is named does not capture at all.
    """
    pools = _pools.setdefault(manager, {})
    key = (str(device), config.capturer)
    if key not in pools:
        answer = manager.capturer(device, config)
        if answer is None and config.capturer not in (None, "none"):
            raise CaptureError(
                f"capturer {config.capturer!r} records nothing on {device}; leave `capturer` out to have the first "
                "plugin that does, or set it to 'none'"
            )
        there = [p for p in pools.values() if p and answer and (p.device, p.plugin) == (device, answer[1])]
        if answer and not there:
            there = [Pool(device, *answer, str(manager.origin(answer[1])))]
        pools[key] = there[0] if there else None
    if (pool := pools[key]) is not None:
        pool.renew_capturer(manager, config)
    return pools[key]
