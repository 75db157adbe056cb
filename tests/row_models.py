"""Small functions whose rows are independent, or are not, and the experiment that shows which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from piecework import SplittingOp
from piecework import torch_internals as internals
from piecework.rows import why_rows_depend
from split_models import compiled_by, compiled_state

WIDTH = 6
Function = Callable[[torch.Tensor, torch.Tensor], Any]
"""Takes ``[rows, 6]`` of floats and ``[rows]`` of indices below 6."""


def _fixed(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


SQUARE, TABLE, SCALE = _fixed(6, 6), _fixed(16, 6), _fixed(6)
KERNEL, IMAGE_KERNEL, KEYS = _fixed(3, 2, 2), _fixed(4, 2, 1, 2), _fixed(1, 2, 5, 3)
MASK, PICKED = torch.tensor([True, False] * 3), torch.tensor([0, 2])
ONES, ZEROS = torch.ones(6), torch.zeros(6)


def set_some(x: torch.Tensor, where: Any, value: Any) -> torch.Tensor:
    y = x * 1
    y[where] = value
    return y


def filled_halves(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[:, :3] = x[:, 3:]
    out[:, 3:].copy_(x[:, :3]).mul_(2)
    return out


def written_prefix(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(16, WIDTH)
    buffer.narrow(0, 0, x.shape[0]).copy_(x)
    return x + buffer.sum()


def heads(x: torch.Tensor) -> torch.Tensor:
    """[rows, 6] to [rows, 2, 3]."""
    return x.view(-1, 2, 3)


def images(x: torch.Tensor) -> torch.Tensor:
    """[rows, 6] to [rows, 2, 1, 3]."""
    return x.view(-1, 2, 1, 3)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


INDEPENDENT: dict[str, Function] = {
    # Element by element.
    "arithmetic": lambda x, i: (x * 2 + 1) / (x.exp() + 1) - i[:, None],
    "activations": lambda x, i: F.gelu(x) + F.silu(x) + F.hardswish(x) + F.relu(x).clamp(0, 1),
    "broadcast": lambda x, i: x * SCALE + x[:, :1],
    "casts": lambda x, i: x.double().to(torch.float16).float(),
    "where": lambda x, i: torch.where(x > 0, x, SCALE).masked_fill(x < -1, 3.0),
    "mask": lambda x, i: set_some(x, x > 0, 0.5),
    "in place": lambda x, i: (x * 1).add_(1).mul_(SCALE),
    "in place on a part": lambda x, i: filled_halves(x),
    "one column set": lambda x, i: set_some(x, (slice(None), 0), 7.0),
    "without training": lambda x, i: F.dropout(x, 0.5, training=False) + 1,
    # Moved.
    "transposed": lambda x, i: x.t() * 2,
    "permuted": lambda x, i: heads(x).permute(2, 0, 1).unsqueeze(0).squeeze(0).exp(),
    "complex": lambda x, i: torch.view_as_real(torch.view_as_complex(x.view(-1, 3, 2)) * (1 + 2j)).flatten(1),
    "heads joined with rows": lambda x, i: (x.view(-1, 3).exp().sum(-1, keepdim=True) + 1).view(x.shape[0], 2),
    "copied and joined": lambda x, i: heads(x).transpose(1, 2).reshape(-1, 2).softmax(-1).view(-1, 3, 2),
    "between other dims": lambda x, i: x[None].expand(2, -1, -1).reshape(-1, 3).exp().view(2, -1, WIDTH),
    "expanded": lambda x, i: SCALE.expand(x.shape[0], -1) + SCALE.repeat(x.shape[0], 1) + x,
    "repeated inside": lambda x, i: x.repeat(1, 2) + x[:, None].repeat(1, 2, 1).flatten(1),
    "repeated heads": lambda x, i: heads(x)[:, :, None].expand(-1, -1, 2, -1).reshape(-1, 4, 3),
    "all rows": lambda x, i: x[:][0 : x.shape[0]] + 1,
    "split": lambda x, i: (torch.cat(x.split([2, 4], -1)[::-1], -1), torch.stack(x.chunk(2, 1), 1), x.unbind(1)),
    "other dim taken apart": lambda x, i: x[:, 1:5:2] + x.select(1, 0)[:, None] + heads(x)[:, 0, :2],
    "windows": lambda x, i: x.unfold(1, 2, 1) + x.t().unfold(0, 2, 1).transpose(0, 1),
    "diagonal": lambda x, i: x[:, :, None].expand(-1, -1, WIDTH).diagonal(0, 1, 2) + 1,
    # Along other dims.
    "reduced": lambda x, i: (x.sum(-1), x.mean(1, keepdim=True), x.var(1), x.std(-1), x.prod(1), x.norm(dim=1)),
    "extremes": lambda x, i: (x.amax(1), x.amin(-1), x.max(1), x.min(1), x.argmax(-1), x.aminmax(dim=1), x.median(1)),
    "logic": lambda x, i: ((x > 0).any(1), (x > 0).all(1), x.logsumexp(-1), torch.var_mean(x, 1), x.count_nonzero(1)),
    "normal": lambda x, i: (x.softmax(-1), x.log_softmax(1), F.glu(x, -1), F.normalize(x)),
    "running": lambda x, i: x.cumsum(-1) + x.cumprod(1) + x.cummax(1)[0] + x.logcumsumexp(1),
    "running over rows": lambda x, i: (x.cumsum(0), x.cumprod(0), x.cummax(0), x.logcumsumexp(0)),
    "ordered": lambda x, i: (x.sort(-1), x.topk(2, 1), x.kthvalue(2, 1), x.argsort(1)),
    "turned": lambda x, i: x.flip(1) + x.roll(1, 1),
    "triangles": lambda x, i: (x[:, :, None] + x[:, None]).tril() + (x[:, None] * x[..., None]).triu(1),
    "layer norm": lambda x, i: F.layer_norm(x, (WIDTH,), SCALE, SCALE),
    "rms norm": lambda x, i: F.rms_norm(x, (WIDTH,), SCALE),
    "group norm": lambda x, i: F.group_norm(x, 2, SCALE, SCALE),
    "batch norm of fixed statistics": lambda x, i: F.batch_norm(x, ZEROS, ONES, SCALE, SCALE),
    "padded inside": lambda x, i: F.pad(x, (1, 2)),
    # Matrices.
    "matrix": lambda x, i: x @ SQUARE,
    "linear": lambda x, i: F.linear(x, SQUARE, SCALE) + torch.addmm(x, x, SQUARE),
    "matrix on the left": lambda x, i: SQUARE @ x.t(),
    "vector": lambda x, i: x @ SCALE,
    "linear of three dims": lambda x, i: F.linear(heads(x), SQUARE[:2, :3], SCALE[:2]),
    "batches": lambda x, i: torch.bmm(heads(x), heads(x).transpose(1, 2)),
    "batches with addend": lambda x, i: torch.baddbmm(x[:, None, :2], heads(x), heads(x).transpose(1, 2)),
    "rows inside batches": lambda x, i: heads(x).transpose(0, 1) @ SQUARE.view(2, 6, 3)[:, :3],
    "einsum": lambda x, i: torch.einsum("nhd,de->nhe", heads(x), SQUARE[:3]),
    "attention within rows": lambda x, i: attend(images(x), images(x), images(x)),
    "attention within rows with a mask": lambda x, i: attend(
        *(x.view(-1, 1, 2, 3) for _ in range(3)), attn_mask=x.view(-1, 1, 2, 3)[..., :2]
    ),
    "queries only": lambda x, i: attend(heads(x).transpose(0, 1)[None], KEYS, KEYS),
    "convolution": lambda x, i: F.conv1d(heads(x), KERNEL) + 1,
    "images": lambda x, i: F.conv2d(images(x), IMAGE_KERNEL) + F.max_pool2d(images(x), (1, 2), 1)[:, :1],
    # Indices.
    "embedding": lambda x, i: F.embedding(i, TABLE) + TABLE[i] + TABLE.index_select(0, i),
    "picked columns": lambda x, i: x[:, PICKED] + x.index_select(1, PICKED),
    "picked inside rows": lambda x, i: x.gather(1, i[:, None]) + x.gather(1, x.argsort(1)),
    "rows of a table": lambda x, i: TABLE.gather(0, i[:, None].expand(-1, WIDTH)),
    "scattered": lambda x, i: torch.zeros_like(x).scatter(1, i[:, None], 2.0).scatter_add(1, i[:, None], x[:, :1]),
    "one hot": lambda x, i: F.one_hot(i, 6) * x,
    "buckets": lambda x, i: torch.bucketize(x, SCALE.sort()[0]) + torch.isin(i, PICKED)[:, None],
    # Made from sizes.
    "made": lambda x, i: x + torch.ones(x.shape[0], 1) + x.new_zeros(x.shape) + torch.full_like(x, 2),
    "counted": lambda x, i: x + torch.arange(x.shape[0])[:, None] + torch.arange(3, 3 + x.shape[0])[:, None],
    "table without rows": lambda x, i: x * TABLE.softmax(0).sum() + torch.arange(6),
    "as many of a table": lambda x, i: x + TABLE.narrow(0, 0, x.shape[0]),
    "returned sizes": lambda x, i: (x + 1, x.shape[0], x),
}
"""Nothing of these depends on padding."""

DEPENDENT: dict[str, tuple[Function, str]] = {
    "scale of all": (lambda x, i: x / x.abs().max(), "aten::max over the rows in piece_0"),
    "largest": (lambda x, i: x / x.abs().amax(), "aten::amax over the rows"),
    "quantised": (lambda x, i: (x / (x.abs().amax() / 127)).round().to(torch.int8), "aten::amax over the rows"),
    "sum": (lambda x, i: x + x.sum(0), "aten::sum over the rows"),
    "sum of all": (lambda x, i: x + x.sum(), "aten::sum over the rows"),
    "mean": (lambda x, i: x - x.mean(0, keepdim=True), "aten::mean over the rows"),
    "variance": (lambda x, i: x / torch.var_mean(x, (0, 1))[0], "aten::var_mean over the rows"),
    "any": (lambda x, i: torch.where((x > 0).any(), x, SCALE), "aten::any over the rows"),
    "argmax": (lambda x, i: x + x.argmax(0), "aten::argmax over the rows"),
    "softmax": (lambda x, i: x.softmax(0), "aten::_softmax over the rows"),
    "softmax of the transposed": (lambda x, i: x.t().softmax(-1), "aten::_softmax over the rows"),
    "sort": (lambda x, i: x.sort(0)[0], "aten::sort over the rows"),
    "largest rows": (lambda x, i: x + x.topk(1, 0)[0], "aten::topk over the rows"),
    "norm of all": (lambda x, i: x / x.norm(), "aten::linalg_vector_norm over the rows"),
    "layer norm over rows": (lambda x, i: F.layer_norm(x.t(), x.t().shape), "uses the number of rows as a number"),
    "group norm over rows": (lambda x, i: F.group_norm(x.t()[None], 2), "native_group_norm"),
    "batch norm": (
        lambda x, i: F.batch_norm(x, None, None, training=True),
        r"native_batch_norm\w* (over the rows|is not known)",
    ),
    "batch norm of rows": (
        lambda x, i: F.batch_norm(x.t(), x[:, 0] * 0, x[:, 0] ** 2 + 1),
        r"native_batch_norm\w* (over the rows|is not known)",
    ),
    "running over joined rows": (
        lambda x, i: x[None].expand(2, -1, -1).reshape(-1, WIDTH).cumsum(0).view(2, -1, WIDTH),
        "aten::cumsum over the rows",
    ),
    "squared": (lambda x, i: x @ x.t(), "aten::mm sums over the rows"),
    "summed over by a matrix": (lambda x, i: x.t() @ x, "aten::mm sums over the rows"),
    "summed over by addmm": (lambda x, i: torch.addmm(SQUARE, x.t(), x), "aten::addmm sums over the rows"),
    "summed over by batches": (
        lambda x, i: heads(x).permute(1, 2, 0) @ heads(x).permute(1, 0, 2),
        "aten::bmm sums over the rows",
    ),
    "summed over by baddbmm": (
        lambda x, i: torch.baddbmm(SCALE[:3], heads(x).permute(1, 2, 0), heads(x).permute(1, 0, 2)),
        "aten::baddbmm sums over the rows",
    ),
    "summed over by a vector": (lambda x, i: x.t() @ x[:, 0], "aten::mv sums over the rows"),
    "attention": (
        lambda x, i: attend(*(heads(x).transpose(0, 1)[None] for _ in range(3))),
        "attend to each other",
    ),
    "causal attention": (
        lambda x, i: attend(*(heads(x).transpose(0, 1)[None] for _ in range(3)), is_causal=True),
        "attend to each other|sums over the rows|is not known|in several",
    ),
    "convolution over rows": (lambda x, i: F.conv1d(x.t()[None, :2], KERNEL), "aten::convolution mixes rows"),
    "pooled rows": (lambda x, i: F.max_pool2d(x[None, None], (2, 1)), "has rows in no dim|mixes rows"),
    "flip": (lambda x, i: x.flip(0), "aten::flip moves rows"),
    "flip of both": (lambda x, i: x.flip(0, 1), "aten::flip moves rows"),
    "roll": (lambda x, i: x.roll(1, 0), "aten::roll moves rows"),
    "roll of all": (lambda x, i: x.roll(1), "aten::roll moves rows|mixes rows"),
    "first row": (lambda x, i: x + x[0], "aten::select takes rows apart"),
    "last row": (lambda x, i: x[-1] * 1, "aten::select takes rows apart"),
    "without the first": (lambda x, i: x[1:] * 1, "aten::slice takes a part of the rows"),
    "every second": (lambda x, i: x[::2] + 1, "aten::slice takes a part of the rows"),
    "halves": (lambda x, i: x + x.split(2)[0].sum() if x.shape[0] == 4 else x[:2] + 1, "slice|split|gives"),
    "unbound": (lambda x, i: x.t().diagonal() * 1, "aten::diagonal takes a part of the rows"),
    "windows of rows": (lambda x, i: x.unfold(0, 2, 1) * 1, "aten::unfold takes a part of the rows"),
    "triangle over rows": (lambda x, i: x.tril() * 1, "aten::tril takes a part of the rows"),
    "joined": (lambda x, i: torch.cat([x, x]), "aten::cat adds rows"),
    "one row more": (lambda x, i: torch.cat([x, TABLE[:1]]), "aten::cat adds rows"),
    "stacked crosswise": (lambda x, i: x[:, None] + x[None, :], "has rows in several dims"),
    "padded": (lambda x, i: F.pad(x, (0, 0, 1, 0)), "aten::constant_pad_nd pads the rows"),
    "repeated": (lambda x, i: x.repeat(2, 1), "aten::repeat has rows in no dim of their own"),
    "flat": (lambda x, i: x.view(-1) * 1, "has rows in no dim of their own"),
    "other shape": (lambda x, i: x.reshape(WIDTH, -1) * 1, "mixes rows: .rows, 6. to .6, rows."),
    "other shape of the transposed": (lambda x, i: x.t().reshape(-1, WIDTH) * 1, "mixes rows: .6, rows. to .rows, 6."),
    "as strided": (lambda x, i: x.as_strided((2, 2), (1, 1)) * 1, "aten::as_strided is not known"),
    "joined in two ways": (
        lambda x, i: x[None].expand(2, -1, -1).reshape(-1) + x.reshape(-1, 1).expand(-1, 2).reshape(-1),
        "brings different rows together",
    ),
    "random": (lambda x, i: x + torch.rand_like(x), "aten::rand_like draws random numbers"),
    "random without rows": (lambda x, i: x + torch.rand(6), "aten::rand draws random numbers"),
    "dropout": (lambda x, i: F.dropout(x, 0.5), "draws random numbers"),
    "divided by the size": (lambda x, i: x / x.shape[0], "aten::div uses the number of rows as a number"),
    "times a function of it": (lambda x, i: x * x.shape[0] ** -0.5, "aten::mul uses the number of rows as a number"),
    "filled with the size": (lambda x, i: x + torch.full((6,), x.shape[0]), "aten::full uses the number of rows"),
    "tensor of the size": (lambda x, i: x + torch.tensor(x.shape[0]), "uses the number of rows as a number"),
    "counted down": (
        lambda x, i: x + torch.arange(x.shape[0], 0, -1)[:, None],
        "arange uses the number of rows as a number",
    ),
    "counted twice": (lambda x, i: torch.arange(2 * x.shape[0]) + 1, "arange has rows in no dim of their own"),
    "identity": (lambda x, i: x @ SQUARE + torch.eye(6)[:, : x.shape[0]].sum(), "aten::slice"),
    "part up to the size": (lambda x, i: x + TABLE[x.shape[0]], "aten::select uses the number of rows as a number"),
    "part from the size": (lambda x, i: x + TABLE[x.shape[0] :].sum(), "aten::slice"),
    "picked": (lambda x, i: x[PICKED] * 1, "aten::index picks rows"),
    "picked by rows": (lambda x, i: x[i.clamp(0, 1)], "aten::index picks rows"),
    "selected": (lambda x, i: x.index_select(0, PICKED), "aten::index_select picks rows"),
    "gathered": (lambda x, i: x.gather(0, PICKED[:, None]), "aten::gather picks rows"),
    "gathered by rows": (lambda x, i: x.gather(0, i[:, None].clamp(0, 1)), "aten::gather picks rows"),
    "looked up among rows": (lambda x, i: F.embedding(PICKED, x), "aten::embedding looks up rows"),
    "scattered over rows": (
        lambda x, i: torch.zeros_like(x).scatter_add(0, i[:, None].clamp(0, 1), x[:, :1]),
        "aten::scatter_add writes to picked rows",
    ),
    "set at picked rows": (lambda x, i: set_some(x, (i.clamp(0, 1),), 1.0), "aten::index_put. writes to picked rows"),
    "set the first": (lambda x, i: set_some(x, 0, 1.0), "aten::select takes rows apart"),
    "scattered into a table": (
        lambda x, i: x + torch.zeros(6, 6).index_put((i,), x, accumulate=True).sum(),
        "aten::index_put writes to picked rows",
    ),
    "written to a prefix": (lambda x, i: written_prefix(x), "aten::copy_ writes rows to memory that has none"),
    "chosen by a mask": (lambda x, i: x + torch.masked_select(x, x > 0).sum(), "aten::masked_select is not known"),
    "counted in bins": (lambda x, i: x + torch.bincount(i, minlength=6)[:6], "aten::bincount"),
    "buckets of rows": (lambda x, i: torch.bucketize(SCALE, x[:, 0]), "aten::bucketize searches among rows"),
}
"""With the beginning of what is said of them."""


def make_inputs(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num)
    return torch.randn(num, WIDTH, generator=generator), torch.randint(0, 6, (num,), generator=generator)


def row_padding(num: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield rows of several kinds to put behind real ones."""
    x, indices = make_inputs(num)
    yield torch.zeros_like(x), torch.zeros_like(indices)
    yield x * 100, indices
    yield torch.full_like(x, float("nan")), indices
    yield torch.full_like(x, -float("inf")), indices


def padding_shows(function: Function, num: int = 5, num_padded: int = 3) -> bool:
    """Whether real rows get other results when rows of some kind are put behind them."""
    real = function(*make_inputs(num))
    for padding in row_padding(num_padded):
        padded = function(*(torch.cat(pair) for pair in zip(make_inputs(num), padding, strict=True)))
        pairs = zip(internals.pytree.tree_leaves(real), internals.pytree.tree_leaves(padded), strict=True)
        for one, other in pairs:
            if isinstance(one, torch.Tensor) and not torch.allclose(*_cut(one, other), rtol=1e-4, equal_nan=True):
                return True
    return False


def _cut(real: torch.Tensor, padded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert all(size <= larger for size, larger in zip(real.shape, padded.shape, strict=True))
    return real.double() if not real.is_complex() else real, padded[tuple(map(slice, real.shape))].to(
        torch.float64 if not real.is_complex() else real.dtype
    )


def verdict(
    model: Any, *args: Any, dim: str = "rows", independent: bool = True, dims: Any = None, **settings: Any
) -> str | None:
    """Compile for one call, and return why its rows depend on each other; the trace must stay as it is."""
    cuts = [
        SplittingOp(f"cut::{name}", rows_independent=independent)
        for name in ("attn", "scale3", "pair", "parts", "update", "many")
    ]
    compiled = compiled_by(model, dims=dims, **{"cuts": cuts, **settings})
    compiled(*args)
    state = compiled_state(compiled)
    split, shape_env = state.split, state.trace.shape_env
    assert split is not None
    before = len(internals.shape_guards(shape_env)), dict(shape_env.replacements), torch.is_autocast_enabled("cpu")
    why = why_rows_depend(split, state.trace.sizes, dim, unique=[one.unique for one in state.unique])
    after = len(internals.shape_guards(shape_env)), dict(shape_env.replacements), torch.is_autocast_enabled("cpu")
    assert after == before, "looking at rows changed what is known of the trace"
    assert (why_rows_depend(split, state.trace.sizes, dim) is None) is (why is None)
    return why
