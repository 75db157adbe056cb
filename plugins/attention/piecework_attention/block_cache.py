"""The memory behind a cache that grows in blocks, and who holds which block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecework_attention.checks import AttentionError


class BlockCache:
    """Keys and values of sequences of different lengths, in blocks that are handed out as they grow.

    A sequence has a row of ``block_table`` and ``lengths`` from its first token until it is freed. Both are tensors on
    the device that stay in place, as the memory does, so captured graphs may hold their addresses: models get them, or
    views such as ``lengths[:4]``, as arguments. Blocks are handed out on the host before a forward (``extend``); the
    attention ops fill them.

    Args:
        num_layers: each has keys and values of its own, and all share the table.
        num_blocks: that the sequences share.
        block_size: tokens per block.
        kv_heads: heads of the keys.
        head_dim: of each head.
        max_sequences: rows of the table.
        max_length: tokens of the longest sequence.
        dtype: of keys and values.
        device: of all tensors.
        heads_first: memory in the order ``[blocks, kv_heads, block_size, head_dim]``; the views that are given are the
            same in form either way.

    Raises:
        AttentionError: a number is not a positive integer.

    Attributes:
        keys: one tensor per layer, ``[blocks, block_size, kv_heads, head_dim]``.
        values: the same.
        block_table: ``[max_sequences, max_blocks]`` int32; -1 where there is no block.
        lengths: ``[max_sequences]`` int32; 0 for rows that are free.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        max_sequences: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        heads_first: bool = False,
    ) -> None:
        counts = {"num_blocks": num_blocks, "block_size": block_size, "kv_heads": kv_heads, "head_dim": head_dim}
        counts |= {"num_layers": num_layers, "max_sequences": max_sequences, "max_length": max_length}
        for name, count in counts.items():
            if not _is_count(count) or count == 0:
                raise AttentionError(f"{name} must be a positive integer, got {count!r}")
        self.block_size, self.max_length = block_size, max_length
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        inner = (kv_heads, block_size) if heads_first else (block_size, kv_heads)
        for memory in (self.keys, self.values):
            for _ in range(num_layers):
                blocks = torch.empty(num_blocks, *inner, head_dim, dtype=dtype, device=device)
                memory.append(blocks.transpose(1, 2) if heads_first else blocks)
        max_blocks = -(-max_length // block_size)
        self.block_table = torch.full((max_sequences, max_blocks), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_sequences, dtype=torch.int32, device=device)
        self._table = torch.full((max_sequences, max_blocks), -1, dtype=torch.int32)
        self._blocks: list[list[int]] = [[] for _ in range(max_sequences)]
        self._lengths = [0] * max_sequences
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def length(self, row: int) -> int:
        """Return the tokens of a sequence, without a look at the device."""
        return self._lengths[row]

    def extend(self, num_tokens: Sequence[int]) -> None:
        """Make room for new tokens, whose keys and values the next forward writes.

        Args:
            num_tokens: of each row from the first on; 0 leaves a row as it is.

        Raises:
            AttentionError: a sequence would grow beyond ``max_length``, or the blocks do not suffice; nothing is
                changed then.
        """
        max_rows = len(self._blocks)
        are_counts = isinstance(num_tokens, list | tuple) and all(map(_is_count, num_tokens))
        if not are_counts or len(num_tokens) > max_rows:
            raise AttentionError(f"num_tokens must be at most {max_rows} integers, none below 0, got {num_tokens!r}")
        lengths = [length + more for length, more in zip(self._lengths, num_tokens, strict=False)]
        needed = [-(-length // self.block_size) for length in lengths]
        for row, length in enumerate(lengths):
            if length > self.max_length:
                raise AttentionError(f"sequence {row} must have at most {self.max_length} tokens, got {length}")
        missing = [max(0, number - len(held)) for number, held in zip(needed, self._blocks, strict=False)]
        if sum(missing) > len(self._free):
            raise AttentionError(
                f"the cache has {len(self._free)} free blocks of {self.block_size} tokens, and {sum(missing)} are "
                f"needed; free a sequence, or make the cache larger"
            )
        for row, number in enumerate(missing):
            for _ in range(number):
                self._table[row, len(self._blocks[row])] = self._free[-1]
                self._blocks[row].append(self._free.pop())
        self._lengths[: len(lengths)] = lengths
        self._publish(table=sum(missing) > 0)

    def free(self, row: int) -> None:
        """Take back the blocks of a sequence; its row may serve another one.

        Raises:
            AttentionError: there is no such row.
        """
        if not _is_count(row) or row >= len(self._blocks):
            raise AttentionError(f"row must be an integer from 0 to {len(self._blocks) - 1}, got {row!r}")
        self._free += reversed(self._blocks[row])
        self._blocks[row] = []
        self._table[row] = -1
        self._lengths[row] = 0
        self._publish(table=True)

    def _publish(self, *, table: bool) -> None:
        """Bring the device up to date; what is under way there still reads the old numbers, in its order."""
        self.lengths.copy_(torch.tensor(self._lengths, dtype=torch.int32))
        if table:
            self.block_table.copy_(self._table)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
