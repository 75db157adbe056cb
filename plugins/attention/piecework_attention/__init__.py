"""Attention as splitting ops: over packed sequences, and over a cache that grows in blocks.

Importing this module registers two ops; loaded as a plugin it also names them as splitting ops. Both write into the
output that they are given and return nothing, since a captured piece reads fixed addresses. ``ops`` has what they
take, ``BlockCache`` is the memory behind a cache, and docs/attention.md shows the two together.

========================================  ==========  ================  ==================================
op                                        capturable  rows_independent  for
========================================  ==========  ================  ==================================
``torch.ops.piecework.attention``         no          no                prompts, chunks, encoders: anything
``torch.ops.piecework.decode_attention``  yes         yes               one new token per sequence
========================================  ==========  ================  ==================================

``attention`` reads the lengths of its sequences on the host, which no device graph can hold, and a row of its result
depends on other rows: on the keys and values of the tokens of the same sequence.

``decode_attention`` reads no tensor on the host, and its launches follow from shapes alone. Row ``i`` of its result
depends on row ``i`` of ``q``, ``k``, ``v``, ``block_table`` and ``lengths``, and on the cache. The cache has no rows,
and the op writes to it: row ``i`` one slot, in a block that no other row may read at that place (blocks that several
sequences share are full ones). So rows stay apart, and a row whose length is 0 reads and writes nothing, which is what
makes the zeroed rows of a padded call harmless. The core pads no model that writes to an argument by itself, though:
``CompilationConfig(rows_independent=True)`` is how the author of a model says that padded rows come with length 0 (the
lengths are an argument that reaches the op as it is, and nothing is added to them on the way).
"""

from __future__ import annotations

from piecework import SplittingOp, hookimpl
from piecework_attention import ops as ops  # Registers them.
from piecework_attention.block_cache import BlockCache
from piecework_attention.checks import AttentionError

__all__ = ["AttentionError", "BlockCache"]

PIECEWORK_PLUGIN_API = 1


@hookimpl(trylast=True)
def piecework_splitting_ops() -> list[SplittingOp]:
    """Cut graphs at both ops; the decoding one may lie inside a device graph."""
    return [
        SplittingOp("piecework::attention"),
        SplittingOp("piecework::decode_attention", capturable=True, rows_independent=True),
    ]
