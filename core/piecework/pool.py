"""The capturers of the process: one per device, shared by all models, with what makes calls on it safe."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence

import torch

from piecework.capturing import Capturer
from piecework.config import CompilationConfig
from piecework.errors import CaptureError
from piecework.plugins import PluginManager


class Pool:
    """A capturer, and who runs on it at the moment.

    Plans of one pool re-use each other's memory, so that one of them runs at a time: on the host by
    ``lock``, on the device by ``switch``. A call from inside another one, through a splitting op, finds
    ``is_busy`` and runs uncaptured.
    """

    def __init__(self, device: torch.device, capturer: Capturer, plugin: str) -> None:
        self.device = device
        self.capturer = capturer
        self.plugin = plugin
        self.lock = threading.RLock()
        self.is_busy = False
        self.stream: Hashable = None
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        """Whoever holds captures or static memory."""

    def join(self) -> bool:
        """Order what follows on the current stream after all earlier calls; False where it can't replay now."""
        stream = self.capturer.current_stream()
        return stream == self.stream or self.switch(stream)

    def switch(self, stream: Hashable) -> bool:
        """Let a stream that was not the last one wait for it; False where it can't replay now."""
        if not self.capturer.wait_for(stream if self.stream is None else self.stream):
            return False
        self.stream = stream
        return True

    def empty(self, fake: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """Return static memory for something like ``fake``: in the pool, if it is on the pool's device."""
        if fake.device == self.device:
            return self.capturer.empty(size, stride, fake.dtype)
        return torch.empty_strided(size, stride, dtype=fake.dtype, device=fake.device)

    def leave(self, user: object) -> None:
        """Note that somebody holds nothing any longer; the last one gives the memory back to the device."""
        with self.lock:
            was_there = user in self.users
            self.users.discard(user)
            if was_there and not self.users and not self.is_busy:
                self.capturer.release()


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
        pools[key] = there[0] if there else Pool(device, *answer) if answer else None
    return pools[key]
