"""Which ATen ops keep rows apart, and along which dims: an op that is not in this table does not.

A row may also depend on rows before it: what is padded stands behind all real rows, so
``cumsum`` along them is fine. Nothing may rely on what padding holds: it may be NaN, so a sum
in which padded rows have the weight zero is not fine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from piecework import torch_internals as internals
from piecework.row_calls import RowCall

Check = Callable[[RowCall], bool]


@dataclass(frozen=True)
class Rule:
    """What has to hold for a call to keep rows apart."""

    check: Check
    """Called where an argument or a result has rows."""
    why: str
    """What the op does otherwise, in words that follow its name."""
    shapes: tuple[str, ...] = ()
    """Arguments that may depend on the number of rows, since they only show in the shape of the result."""
    keeps_order: bool = False
    """A view of the same elements in the same order, which may join dims."""
    makes_constants: bool = False
    """Results follow from shapes and constants alone."""
    may_drop_rows: bool = False
    """Results without rows, such as the state of a generator, follow from no row."""


def rule_for(op: internals.OpOverload, name: str) -> Rule | None:
    """Return the rule of an op; None where there is none."""
    if torch.Tag.pointwise in op.tags:
        return _POINTWISE
    return _RULES.get(name)


def known_ops() -> list[str]:
    """Return the names of the ops that have a rule of their own."""
    return list(_RULES)


def may_be_random(op: internals.OpOverload, call: RowCall) -> bool:
    """Whether a call draws random numbers: how many it draws depends on the number of rows."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    return call.arguments.get("dropout_p") != 0.0


# --- checks -----------------------------------------------------------------------------------


def _always(call: RowCall) -> bool:
    return True


def _is_aligned(call: RowCall) -> bool:
    """Whether the rows of all arguments and results meet when shapes are broadcast."""
    places = {call.from_right(tensor) for tensor in (*call.with_rows(), *call.results)}
    return len(places) == 1


def _is_off(argument: str = "dim") -> Check:
    """The dim, or the dims, that the op works along are others than the rows; none means all of them."""

    def check(call: RowCall) -> bool:
        first = call.first()
        dims = call.arguments.get(argument)
        listed = [dims] if isinstance(dims, int) else dims
        return bool(listed) and call.row_dim_of(first) not in {dim % max(first.dim(), 1) for dim in listed}

    return check


def _is_off_pair(call: RowCall) -> bool:
    return _is_off("dim1")(call) and _is_off("dim2")(call)


def _is_before_last(num: int) -> Check:
    def check(call: RowCall) -> bool:
        dim = call.row_dim_of(call.first())
        return dim is not None and dim < call.first().dim() - num

    return check


def _is_off_or_forward(call: RowCall) -> bool:
    """Along the rows, a running result of a row sees those before it; not so if outer dims are joined to them."""
    place = call.places[id(call.first())]
    return _is_off()(call) or (place is not None and place.outer == 1)


def _is_off_normalized(call: RowCall) -> bool:
    only_input = not call.with_rows("input")
    return only_input and _is_before_last(len(call.arguments["normalized_shape"]))(call)


def _is_batch(call: RowCall) -> bool:
    """Whether rows are the first dim of the first argument, and nothing else has any."""
    first = call.first()
    return call.row_dim_of(first) == 0 and _only_first(call)


def _only_first(call: RowCall) -> bool:
    return all(tensor is call.first() for tensor in call.with_rows())


def _is_group_norm_batch(call: RowCall) -> bool:
    size = call.sizes.size
    return _is_batch(call) and size(call.arguments["N"]) == size(call.first().shape[0])


def _is_batched_convolution(call: RowCall) -> bool:
    return _is_batch(call) and call.first().dim() == call.tensors("weight")[0].dim()


def _is_batch_norm_of_fixed_statistics(call: RowCall) -> bool:
    return not call.arguments.get("training") and call.row_dim_of(call.first()) != 1 and _only_first(call)


def _is_matrix_row(left: str, right: str, bias: str = "") -> Check:
    """Whether rows are a batch, rows of the left matrix or columns of the right, and never summed over."""

    def check(call: RowCall) -> bool:
        places = tuple(
            None if (place := call.from_right(tensor)) is None else place
            for tensor in (*call.tensors(left), *call.tensors(right))
        )
        (added,) = [call.from_right(tensor) for tensor in call.tensors(bias)] or [None]
        aligned = added is None or added == call.from_right(call.results[0])
        return aligned and not call.with_rows(left, right, bias) and places in _MATRIX_ROWS

    return check


_MATRIX_ROWS = {(-2, None), (None, -1), (-3, -3)}


def _is_scaled_matrix_row(call: RowCall) -> bool:
    rows = [call.row_dim(name) for name in ("self", "mat2", "scale_b", "bias", "scale_result")]
    return rows == [0, None, None, None, None] and call.row_dim("scale_a") in (None, 0)


def _is_attention_batch(call: RowCall) -> bool:
    """Whether rows are batches or heads, or queries alone; keys are summed over."""
    dims = tuple(call.row_dim(name) for name in ("query", "key", "value"))
    rank = call.tensors("query")[0].dim()
    fits = dims in {(0, 0, 0), (1, 1, 1)} and rank == 4
    fits = fits or (dims == (rank - 2, None, None) and not call.arguments.get("is_causal"))
    masks = [*call.tensors("attn_mask"), *call.tensors("attn_bias")]
    places = {call.from_right(mask) for mask in masks} - {None}
    others = call.with_rows("query", "key", "value", "attn_mask", "attn_bias")
    return fits and not others and places <= {call.from_right(call.tensors("query")[0])}


def _is_joined_elsewhere(call: RowCall) -> bool:
    tensors = call.tensors("tensors")
    dims = {call.row_dim_of(tensor) for tensor in call.with_rows()}
    return len(dims) == 1 and call.arguments["dim"] % tensors[0].dim() not in dims


def _is_stacked(call: RowCall) -> bool:
    return len({call.row_dim_of(tensor) for tensor in call.tensors("tensors")}) == 1


def _is_whole_slice(call: RowCall) -> bool:
    """Whether a slice takes all rows, or something from each, or as many of something else as there are rows."""
    first, arguments = call.first(), call.arguments
    start = arguments["start"]
    is_from_start = (start is None or call.sizes.size(start) == 0) and arguments["step"] == 1
    along = arguments["dim"] % first.dim()
    dim = call.row_dim_of(first)
    if dim is None:
        return is_from_start and call.sizes.row_dim(call.results[0]) == along
    return is_from_start if dim == along else not call.sizes.depends(arguments["end"])


def _is_unpadded(call: RowCall) -> bool:
    dim, pad = call.row_dim_of(call.first()), call.arguments["pad"]
    at = 2 * (call.first().dim() - 1 - dim) if dim is not None else 0
    return all(isinstance(num, int) and num == 0 for num in pad[at : at + 2])


def _is_looked_up(call: RowCall) -> bool:
    """Whether rows are looked up in something that has none."""
    return call.row_dim("weight") is None


def _is_indexed_apart(call: RowCall) -> bool:
    """Whether rows are indices into something without rows, or are left whole by the indices."""
    (source,) = call.tensors("self")
    indices = call.arguments["indices"]
    dim = call.row_dim_of(source)
    if dim is None:
        return len({call.from_right(index) for index in call.with_rows()}) == 1
    given = [index for index in indices if index is not None]
    is_whole = dim >= len(indices) or indices[dim] is None
    return is_whole and not any(index.dtype in (torch.bool, torch.uint8) for index in given) and _only_first(call)


def _is_selected_apart(call: RowCall) -> bool:
    (source,) = call.tensors("self")
    rows = (call.row_dim_of(source), call.row_dim("index"))
    return rows[0] is None or (rows[1] is None and _is_off()(call))


def _is_gathered_apart(call: RowCall) -> bool:
    source, index = call.row_dim("self"), call.row_dim("index")
    return source is None or (source == index and _is_off()(call))


def _is_scattered_apart(call: RowCall) -> bool:
    dims = {call.row_dim(name) for name in ("self", "index", "src") if call.tensors(name)}
    return len(dims) == 1 and _is_off()(call)


def _is_filled_at_mask(call: RowCall) -> bool:
    """Whether ``x[mask] = number`` is a choice element by element."""
    (source,), indices, (values,) = call.tensors("self"), call.arguments["indices"], call.tensors("values")
    masks = [index for index in indices if index is not None]
    if len(indices) != 1 or len(masks) != 1 or masks[0].dtype is not torch.bool or values.dim() != 0:
        return False
    return call.row_dim_of(source) == call.row_dim_of(masks[0])


def _only(argument: str) -> Check:
    """Whether only that argument has rows, and each of its elements is worked on alone."""

    def check(call: RowCall) -> bool:
        return not call.with_rows(argument) and _is_aligned(call)

    return check


# --- the table --------------------------------------------------------------------------------


_POINTWISE = Rule(_is_aligned, "brings different rows together")
_RULES: dict[str, Rule] = {}


def _add(rule: Rule, names: str) -> None:
    _RULES.update(dict.fromkeys((f"aten::{name}" for name in names.split()), rule))


def _add_all(rules: Iterable[tuple[Rule, str]]) -> None:
    for rule, names in rules:
        _add(rule, names)


_add_all(
    [
        (
            _POINTWISE,
            "copy fill zero masked_fill where _to_copy detach alias lift_fresh lift_fresh_copy contiguous _conj "
            "_neg_view hardswish log_sigmoid_forward complex polar floor_divide _prelu_kernel",
        ),
        # Views, and copies that are like views.
        (
            Rule(_always, "mixes rows", shapes=("size",), keeps_order=True),
            "view _unsafe_view _reshape_alias _reshape_copy",
        ),
        (
            Rule(_always, "mixes rows"),
            "t transpose permute unsqueeze squeeze view_as_real view_as_complex",
        ),
        (Rule(_always, "repeats rows", shapes=("size", "repeats")), "expand repeat"),
        (Rule(_is_whole_slice, "takes a part of the rows", shapes=("end",)), "slice"),
        (
            Rule(_is_off(), "takes rows apart"),
            "split split_with_sizes unsafe_split unsafe_split_with_sizes unbind select",
        ),
        (Rule(_is_off_pair, "takes a part of the rows"), "diagonal"),
        (Rule(_is_off("dimension"), "takes a part of the rows"), "unfold"),
        # Along a dim.
        (
            Rule(_is_off(), "over the rows"),
            "sum nansum mean amax amin max min var var_mean std std_mean prod any all norm linalg_vector_norm "
            "argmax argmin logsumexp count_nonzero aminmax median nanmedian mode kthvalue topk sort "
            "_softmax _safe_softmax _log_softmax glu",
        ),
        (Rule(_is_off_or_forward, "over the rows"), "cumsum cumprod cummax cummin logcumsumexp"),
        (Rule(_is_off("dims"), "moves rows"), "flip roll"),
        (Rule(_is_before_last(2), "takes a part of the rows"), "tril triu"),
        (Rule(_is_off_normalized, "over the rows"), "native_layer_norm _fused_rms_norm"),
        (Rule(_is_unpadded, "pads the rows"), "constant_pad_nd"),
        (Rule(_is_joined_elsewhere, "adds rows"), "cat"),
        (Rule(_is_stacked, "brings different rows together"), "stack"),
        # Matrices.
        (Rule(_is_matrix_row("self", "mat2"), "sums over the rows"), "mm bmm _int_mm"),
        (Rule(_is_matrix_row("mat1", "mat2", "self"), "sums over the rows"), "addmm _addmm_activation"),
        (Rule(_is_matrix_row("batch1", "batch2", "self"), "sums over the rows"), "baddbmm"),
        (Rule(_is_batch, "sums over the rows"), "mv _weight_int8pack_mm _weight_int4pack_mm"),
        (Rule(_is_scaled_matrix_row, "sums over the rows"), "_scaled_mm"),
        (
            Rule(_is_attention_batch, "lets rows attend to each other", may_drop_rows=True),
            "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
            "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math",
        ),
        # Batches.
        (Rule(_is_batched_convolution, "mixes rows"), "convolution"),
        (
            Rule(_is_batch, "mixes rows"),
            "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d",
        ),
        (Rule(_is_group_norm_batch, "over the rows", shapes=("N",)), "native_group_norm"),
        (
            Rule(_is_batch_norm_of_fixed_statistics, "over the rows", may_drop_rows=True),
            "native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm",
        ),
        # Indices.
        (Rule(_is_looked_up, "looks up rows"), "embedding"),
        (Rule(_is_indexed_apart, "picks rows"), "index _unsafe_index"),
        (Rule(_is_selected_apart, "picks rows"), "index_select"),
        (Rule(_is_gathered_apart, "picks rows"), "gather"),
        (Rule(_is_scattered_apart, "writes to picked rows"), "scatter scatter_add scatter_reduce"),
        (Rule(_is_filled_at_mask, "writes to picked rows"), "index_put"),
        (Rule(_only("self"), "searches among rows"), "bucketize"),
        (Rule(_only("elements"), "searches among rows"), "isin"),
        # Constants.
        (
            Rule(_always, "", shapes=("size", "stride"), makes_constants=True),
            "full zeros ones empty empty_strided empty_permuted scalar_tensor full_like zeros_like ones_like "
            "empty_like new_full new_zeros new_ones new_empty new_empty_strided",
        ),
        (Rule(_always, "", shapes=("end",), makes_constants=True), "arange"),
    ]
)
