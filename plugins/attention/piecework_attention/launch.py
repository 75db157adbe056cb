"""How the decoding kernel is launched: numbers that follow from shapes and the device, never from data.

A captured launch stays as it is while sequences grow, so how the work is divided is decided for the longest that
the table holds; how much of it there is, the kernel reads from the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_SPLIT_TOKENS = 256
"""Below it, combining what the splits found takes longer than reading the tokens in turn."""
MAX_SPLITS = 128
"""The combining kernel holds all splits of a head at once."""
PROGRAMS_PER_MULTIPROCESSOR = 3
"""That sequences are divided into. More run at once, and find less to read each: on an H200 they gain nothing."""
TILE_BYTES = 8 * 1024
"""Of keys, and again of values, that a program reads at a time; several tiles are on their way at once."""


@dataclass(frozen=True)
class DecodeLaunch:
    """The constants of one launch.

    Args:
        num_splits: programs that share the tokens of one sequence and key head.
        block_tokens: tokens that a program reads at a time; a power of two, at least 16.
        num_warps: of a program.
        num_stages: tiles that are on their way at once.
        min_split_tokens: fewer tokens than this are not divided; a multiple of ``block_tokens``.
    """

    num_splits: int
    block_tokens: int
    num_warps: int = 4
    num_stages: int = 3
    min_split_tokens: int = MIN_SPLIT_TOKENS


def decode_launch(
    *, rows: int, kv_heads: int, head_dim: int, itemsize: int, capacity: int, num_multiprocessors: int
) -> DecodeLaunch:
    """Choose the constants for a batch.

    Args:
        rows: sequences, inactive ones included.
        kv_heads: heads of the keys.
        head_dim: of each head.
        itemsize: bytes per element of the cache.
        capacity: tokens that a row of the block table has room for.
        num_multiprocessors: of the device.
    """
    block_tokens = min(128, max(16, TILE_BYTES // (power_of_two(head_dim) * itemsize)))
    wanted = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // max(1, rows * kv_heads)
    num_splits = max(1, min(wanted, capacity // MIN_SPLIT_TOKENS, MAX_SPLITS))
    return DecodeLaunch(num_splits=num_splits, block_tokens=block_tokens)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
