"""Memory that stands for the pool of a device: carved into blocks, and carved again when nobody holds them.

So on a CPU too, whoever reads memory that was given to somebody else reads wrong numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from piecework.poison import index_poison, poison

__all__ = ["Arena", "bytes_of", "index_poison", "poison", "with_storage_of"]

ALIGNMENT = 256
"""In bytes; what device allocators give at least."""


class Arena:
    """Hands out memory as long as a limit allows; an address never moves.

    A block is held by the storage that was handed out with it, thus by every view of that tensor. Blocks that
    are no longer held are found at the next allocation.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._segments: list[_Segment] = []

    @property
    def num_bytes(self) -> int:
        """What was taken from the process; it does not shrink when blocks are let go."""
        return sum(segment.num_bytes for segment in self._segments)

    def take(self, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return that many bytes, full of poison, as a tensor that holds them.

        Raises:
            torch.OutOfMemoryError: the limit does not allow it.
        """
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        for segment in self._segments:
            start = segment.first_fit(size)
            if start is not None:
                break
        else:
            segment, start = self._grow(size), 0
        memory = segment.bytes_at(start, num_bytes)
        segment.hold(_Block(start, start + size, StorageWeakRef(memory.untyped_storage())))
        poison(memory, dtype)
        return memory

    def at(self, address: int, num_bytes: int) -> torch.Tensor | None:
        """Return the bytes at an address as a tensor that does not hold them; None if they lie elsewhere.

        They stay readable as long as it exists, whatever becomes of the arena.
        """
        for segment in self._segments:
            if segment.address <= address < segment.address + segment.num_bytes:
                return segment.bytes_at(address - segment.address, num_bytes)
        return None

    def _grow(self, size: int) -> _Segment:
        if self.limit_bytes is not None and self.num_bytes + size > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"the emulated pool holds {self.num_bytes} bytes and needs {size} more, its limit is {self.limit_bytes}"
            )
        self._segments.append(_Segment(size))
        return self._segments[-1]


@dataclass(frozen=True)
class _Block:
    start: int
    stop: int
    holder: StorageWeakRef


@dataclass
class _Segment:
    """One piece of the process's memory, and the blocks of it that were handed out, in order."""

    num_bytes: int
    blocks: list[_Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._buffer = bytearray(self.num_bytes + ALIGNMENT)
        address = torch.frombuffer(self._buffer, dtype=torch.uint8).data_ptr()
        self._offset = -address % ALIGNMENT
        self.address = address + self._offset

    def first_fit(self, size: int) -> int | None:
        """Return where the first gap of that size starts, None if there is none."""
        self.blocks = [block for block in self.blocks if not block.holder.expired()]
        free_from = 0
        for block in self.blocks:
            if block.start - free_from >= size:
                return free_from
            free_from = block.stop
        return free_from if self.num_bytes - free_from >= size else None

    def hold(self, block: _Block) -> None:
        self.blocks = sorted([*self.blocks, block], key=lambda held: held.start)

    def bytes_at(self, start: int, num_bytes: int) -> torch.Tensor:
        # A storage of its own, which keeps the buffer alive.
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=num_bytes, offset=self._offset + start)


def with_storage_of(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the form of another one, at the same place in the storage of ``memory``."""
    made = torch.empty(0, dtype=like.dtype, device=memory.device)
    return made.set_(memory.untyped_storage(), like.storage_offset(), like.size(), like.stride())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the storage of a tensor, as a tensor over it."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
