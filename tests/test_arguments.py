"""What a call may pass, which dims vary, and how a call that differs from the first is refused."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import pytest
import torch

import models
import piecework
from models import assert_same, both_levels, compiled, refuses, rows
from piecework import CompileError, ConfigError, counters
from piecework.arguments import trace_sizes

if TYPE_CHECKING:
    from nowhere import Mask  # pyright: ignore[reportMissingImports]


def scale(x: torch.Tensor, k: Any = 2.0) -> torch.Tensor:
    return torch.ops.models.scale3(x) * k


# --- which dims vary ----------------------------------------------------------------------------


@both_levels
def test_dim_0_of_an_annotated_tensor_varies(level: int) -> None:
    call = compiled(models.attend, level)
    with counters.expect(num_graphs_seen=1):
        for n in (4, 1, 7):
            assert_same(call, models.attend, rows(n))
    refuses(call, rows(4, 5), match="dim 1 of argument x was 6 when traced, now it is 5")


def test_string_and_optional_annotations_are_understood() -> None:
    def add(x: torch.Tensor, y: torch.Tensor | None = None, z: Optional[torch.Tensor] = None) -> torch.Tensor:  # noqa: UP045
        assert y is not None and z is not None
        return torch.ops.models.scale3(x + y) + z

    call = compiled(add)
    for n in (4, 3):
        assert_same(call, add, rows(n), rows(n), rows(n))


def test_an_annotation_that_does_not_resolve_hides_no_other() -> None:
    def masked(x: torch.Tensor, mask: Mask | None = None) -> torch.Tensor:
        return torch.ops.models.scale3(x)

    call = compiled(masked)
    with counters.expect(num_graphs_seen=1):
        for n in (4, 3):
            assert_same(call, masked, rows(n))


def test_without_annotations_dim_0_of_every_tensor_varies() -> None:
    def add(x, y, k=2):  # type: ignore[no-untyped-def]
        return torch.ops.models.scale3(x) + y * k

    call = compiled(add)
    for n in (4, 3):
        assert_same(call, add, rows(n), rows(n))


@both_levels
def test_two_named_dims_vary_apart_even_when_the_first_call_has_them_equal(level: int) -> None:
    def mix(ids: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(ids.float()) + ids.shape[0] * 10 + ids.shape[1]

    call = compiled(mix, level, {"ids": {0: "batch", 1: "seq"}})
    with counters.expect(num_graphs_seen=1):
        for batch, seq in ((4, 4), (4, 5), (2, 7), (1, 1), (7, 2)):
            assert_same(call, mix, torch.ones(batch, seq, dtype=torch.int64))


def test_sizes_of_the_trace_are_at_least_two_and_differ() -> None:
    assert trace_sizes({"rows": 7}) == {"rows": 7}
    for sizes in ({"rows": 1}, {"a": 4, "b": 4, "c": 4}, {"a": 2, "b": 1, "c": 1}, {"a": 0}):
        chosen = trace_sizes(sizes)
        assert list(chosen) == list(sizes)
        assert min(chosen.values()) >= 2 and len(set(chosen.values())) == len(chosen)


def test_dim_may_be_counted_from_the_end() -> None:
    call = compiled(scale, dims={"x": {-1: "width"}})
    for width in (6, 4):
        assert_same(call, scale, rows(3, width))
    refuses(call, rows(4), match="dim 0 of argument x was 3")


@both_levels
def test_equal_named_dims_must_be_equal(level: int) -> None:
    def top(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(x).sum() + y.sum()

    call = compiled(top, level)
    assert_same(call, top, rows(4), rows(4))
    refuses(call, rows(4), rows(5), match="dim 'rows' is 4 in argument x but 5 in argument y")
    assert_same(call, top, rows(5), rows(5))
    with pytest.raises(ConfigError, match=r"dim 'rows' is 4 in argument x of .*top but 5 in argument y; .*\"other\""):
        compiled(top, level)(rows(4), rows(5))


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"y": 0}, "names 'y', which is no argument of scale; its arguments are x, k"),
        ({"x": "rows"}, "must be a dim or a mapping of dims to names.*got 'rows'"),
        ({"x": True}, "must be a dim or a mapping of dims to names.*got True"),
        ({"x": {"0": "rows"}}, "must map whole numbers to names, got '0'"),
        ({"x": {0: 3}}, "must map whole numbers to names, got 0: 3"),
        ({"x": {}}, "must be a dim or a mapping"),
        ({}, "must map argument names to dims, got {}"),
        ("x", "must map argument names to dims, got 'x'"),
    ],
)
def test_unusable_dims_are_refused_when_they_are_given(dims: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        piecework.compile(scale, dynamic_arg_dims=dims)


def test_dim_that_the_tensor_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="names dim 2 of argument x of scale, which has 2 dims"):
        compiled(scale, dims={"x": 2})(rows(4))


def test_nothing_that_may_vary_is_an_error_that_shows_what_to_give() -> None:
    def plain(x: Any, n: int) -> Any:
        return x * n

    with pytest.raises(ConfigError, match=r'name one, for example dynamic_arg_dims={"x": 0}; its arguments are x, n'):
        piecework.compile(plain)

    def bare(x, n):  # type: ignore[no-untyped-def]
        return n

    with pytest.raises(ConfigError, match="no dim that may vary"):
        compiled(bare)(1, 2)


# --- forms of a call -----------------------------------------------------------------------------


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor | None


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    factor: float
    rest: list[torch.Tensor]


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@both_levels
def test_all_kinds_of_parameters(level: int) -> None:
    def call_me(x: Any, /, y: Any, *rest: Any, scale: float = 1.0, flip: bool = False, **named: Any) -> Any:
        z = torch.ops.models.scale3(x) * scale + y
        for tensor in rest:
            z = z + tensor
        for tensor in named.values():
            z = z - tensor
        return -z if flip else z

    call = compiled(call_me, level, {"x": 0, "y": 0, "rest": 0, "left": 0})
    with counters.expect(num_graphs_seen=1):
        for n in (4, 2):
            assert_same(call, call_me, rows(n), rows(n), rows(n), rows(n), scale=2.0, left=rows(n))
    x = rows(4)
    refuses(call, x, x, x, scale=2.0, left=x, match="argument rest held")
    refuses(call, x, x, x, x, scale=2.0, match="argument named held")
    refuses(call, x, x, x, x, scale=2.0, left=x, flip=True, match="argument flip was False")
    with pytest.raises(TypeError):
        call(x=x, y=x)


@both_levels
def test_arguments_may_have_names_of_builtins(level: int) -> None:
    def call_me(type: Any, tuple: Any, len: Any, dict: Any = 2, *, next: Any = None, int: Any = 1.5) -> Any:
        return torch.ops.models.scale3(type) + tuple[0] * len - dict["a"] * int

    call = compiled(call_me, level, dict.fromkeys(("type", "tuple", "len", "dict"), 0))
    for n in (4, 2):
        assert_same(call, call_me, rows(n), (rows(n), 1), rows(n), {"a": rows(n)})
    x = rows(4)
    refuses(call, x, (x, 1), x, {"a": x}, int=2.5, match="argument int was 1.5")
    refuses(call, x, (x, 2), x, {"a": x}, match=r"argument tuple\[1\] was 1")


@both_levels
def test_keyword_only_and_defaults(level: int) -> None:
    def add(x: torch.Tensor, y: torch.Tensor | None = None, *, k: float = 2.0) -> torch.Tensor:
        z = torch.ops.models.scale3(x) * k
        return z if y is None else z + y

    call = compiled(add, level)
    for n in (4, 2):
        assert_same(call, add, rows(n))
        assert_same(call, add, x=rows(n), y=None, k=2.0)
    with pytest.raises(TypeError):
        call(rows(4), None, 2.0)


@both_levels
def test_nested_containers_and_dataclasses(level: int) -> None:
    def nested(d: Any) -> Any:
        batch, pair = d["batch"], d["pair"]
        return torch.ops.models.scale3(batch.x) * batch.factor + batch.rest[1] + pair.a + d["t"][0]

    def make(n: int, factor: float = 2.0, num_rest: int = 2) -> dict[str, Any]:
        batch = Batch(rows(n), factor, [rows(n) for _ in range(num_rest)])
        return {"batch": batch, "pair": Pair(rows(n), None), "t": (rows(n), 3)}

    call = compiled(nested, level, {"d": 0})
    with counters.expect(num_graphs_seen=1):
        for n in (4, 1, 5):
            assert_same(call, nested, make(n))
    refuses(call, make(4, factor=3.0), match=r"argument d\['batch'\].factor was 2.0 \(float\) when traced")
    refuses(call, make(4, num_rest=3), match=r"argument d\['batch'\].rest held \[0, 1\] when traced, now it holds")
    refuses(call, {**make(4), "t": [rows(4), 3]}, match=r"argument d\['t'\] was a tuple when traced")
    refuses(call, {**make(4), "more": 1}, match="argument d held")
    refuses(call, {**make(4), "pair": Pair(rows(4), rows(4))}, match=r"argument d\['pair'\]\[1\] was None")


def test_ordered_dicts_and_enums_are_arguments() -> None:
    def pick(d: Any, mode: Mode) -> Any:
        return torch.ops.models.scale3(d["x"]) * (2 if mode is Mode.FAST else 3)

    call = compiled(pick, dims={"d": 0})
    assert_same(call, pick, collections.OrderedDict(x=rows(4)), Mode.FAST)
    refuses(call, collections.OrderedDict(x=rows(4)), Mode.SLOW, match="argument mode was")
    refuses(call, {"x": rows(4)}, Mode.FAST, match="argument d was a OrderedDict when traced")


class Opaque:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@both_levels
def test_opaque_object_is_refused_by_name(level: int) -> None:
    def take(x: torch.Tensor, holder: Any) -> torch.Tensor:
        return x + holder.x

    with pytest.raises(CompileError, match=r"argument holder of .*take is a test_arguments.Opaque"):
        compiled(take, level)(rows(4), Opaque(rows(4)))


class Subclass(torch.Tensor):
    pass


@both_levels
def test_tensor_subclass_is_refused_at_the_first_call_and_at_later_ones(level: int) -> None:
    odd = torch.Tensor._make_subclass(Subclass, rows(4))
    with pytest.raises(CompileError, match="argument x of attend is a Subclass"):
        compiled(models.attend, level)(odd)
    call = compiled(models.attend, level)
    call(rows(4))
    refuses(call, odd, match="argument x was a plain tensor when traced, now it is a Subclass")
    with pytest.raises(CompileError, match=r"argument x of attend is a Tensor of layout torch.sparse_coo"):
        compiled(models.attend, level)(rows(4).to_sparse())


@both_levels
def test_a_trace_of_jit_is_refused_and_works_on_the_original(level: int) -> None:
    call = compiled(models.attend, level)
    call(rows(4))
    with torch.no_grad():
        refuses(torch.jit.trace, call, (rows(4),), match=r"inside torch\.jit\.trace, which sees nothing of compiled")
        refuses(torch.jit.trace, lambda x: call(x) + 1, (rows(4),), match=r"inside torch\.jit\.trace")
    with pytest.raises(CompileError, match=r"inside torch\.jit\.trace"):
        torch.jit.trace(compiled(models.attend, level), (rows(4),))


# --- what later calls must keep to -----------------------------------------------------------------


@both_levels
def test_presence_of_arguments(level: int) -> None:
    def add(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.models.scale3(x) if y is None else x + y

    call = compiled(add, level)
    call(rows(4))
    refuses(call, rows(4), rows(4), match="argument y was None .* when traced, now it is a tensor")
    call = compiled(add, level)
    call(rows(4), rows(4))
    refuses(call, rows(4), match="argument y was a tensor when traced, now it is None")


@both_levels
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rows(4).double(), "dtype of argument x was torch.float32 when traced, now it is torch.float64"),
        (lambda: rows(4).to("meta"), "device of argument x was cpu when traced, now it is meta"),
        (lambda: torch.randn(4, 6, 1), "number of dims of argument x was 2 when traced, now it is 3"),
        (lambda: rows(4, 5), "dim 1 of argument x was 6 when traced, now it is 5; if it varies, name it"),
        (
            lambda: torch.randn(6, 4).t(),
            r"strides of argument x are \(1, 4\), the trace needs \(6, 1\).*, through .contiguous\(\)",
        ),
        (lambda: torch.randn(1, 6).expand(4, 6), r"strides of argument x are \(0, 1\)"),
        (lambda: torch.randn(4, 8)[:, 1:7], r"strides of argument x are \(8, 1\)"),
        (lambda: 3.0, "argument x was a tensor when traced, now it is 3.0"),
        (lambda: [rows(4)], "argument x was a tensor when traced"),
    ],
    ids=["dtype", "device", "rank", "static-dim", "transposed", "expanded", "gaps", "number", "list"],
)
def test_tensor_unlike_the_traced_one_is_refused(level: int, make: Any, message: str) -> None:
    call = compiled(models.attend, level)
    for n in (3, 5):  # several, so that the compiled check is in use
        call(rows(n))
    refuses(call, make(), match=message)
    with counters.expect(num_graphs_seen=0):
        assert_same(call, models.attend, rows(4))


@both_levels
@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.randn(6, n).t(),
        lambda n: torch.randn(n + 2, 8)[2:, 1:7],
        lambda n: torch.randn(1, 6).expand(n, 6),
        lambda n: rows(n + 3)[3:],
    ],
    ids=["transposed", "gaps", "expanded", "offset"],
)
def test_layout_of_the_first_call_is_the_one_that_works(level: int, make: Any) -> None:
    call = compiled(models.attend, level)
    with counters.expect(num_graphs_seen=1):
        for n in (4, 3, 5, 1):
            x = make(n)
            result, expected = call(x), models.attend(x)
            torch.testing.assert_close(result, expected)
            assert result.stride() == expected.stride() or n == 1


@both_levels
def test_strides_that_depend_on_a_size_that_varies_are_checked(level: int) -> None:
    call = compiled(models.attend, level)
    for n in (4, 3):  # outer stride 1, inner stride n
        assert_same(call, models.attend, torch.randn(6, n).t())
    refuses(
        call,
        torch.randn(6, 9)[:, :4].t(),
        match=r"x are \(1, 9\), the trace needs \(1, 4\).*first call, which was not contiguous",
    )
    call = compiled(models.attend, level, {"x": {0: "batch", 1: "seq"}})
    for size in ((4, 3), (2, 5)):
        assert_same(call, models.attend, rows(*size))
    refuses(call, rows(4, 9)[:, :3], match=r"strides of argument x are \(9, 1\), the trace needs \(3, 1\)")
    assert_same(call, models.attend, rows(5, 3))


@both_levels
def test_single_row_may_have_any_stride(level: int) -> None:
    call = compiled(models.attend, level)
    call(rows(4))
    for x in (torch.randn(4, 12)[:1, :6], torch.randn(6, 1).t(), rows(1)):
        assert_same(call, models.attend, x)
    refuses(call, torch.randn(4, 12)[:2, :6], match="strides of argument x")


@both_levels
def test_tensor_of_another_offset_is_no_departure(level: int) -> None:
    call = compiled(models.attend, level)
    call(rows(4))
    assert_same(call, models.attend, rows(9)[5:])


@both_levels
@pytest.mark.parametrize(
    ("traced", "now"),
    [(2.0, 3.0), (2, 2.0), (1, True), (True, False), (0.0, -0.0), (2.0, None), (2.0, torch.ones(()))],
)
def test_scalar_unlike_the_traced_one_is_refused(level: int, traced: Any, now: Any) -> None:
    call = compiled(scale, level)
    call(rows(4), traced)
    refuses(call, rows(4), now, match=f"argument k was {traced!r}")
    assert_same(call, scale, rows(3), traced)


def test_zero_with_the_other_sign_is_refused_inside_containers_and_complex_numbers() -> None:
    def divide(x: torch.Tensor, k: Any) -> torch.Tensor:
        return x / k[0]

    for traced, now in ((0.0, -0.0), (complex(0.0, 0.0), complex(0.0, -0.0))):
        call = compiled(divide)
        call(rows(4), (traced,))
        refuses(call, rows(4), (now,), match=r"argument k\[0\] was")


def test_nan_is_the_same_nan() -> None:
    call = compiled(scale)
    call(rows(4), float("nan"))
    assert call(rows(3), float("nan")).isnan().all()
    refuses(call, rows(4), 1.0, match="argument k was nan")


def test_dtype_string_and_slice_arguments_are_checked() -> None:
    def cast(x: torch.Tensor, dtype: Any, how: Any, part: Any) -> torch.Tensor:
        y = torch.ops.models.scale3(x)[:, part].to(dtype)
        return -y if how == "minus" else y

    call = compiled(cast)
    good = (torch.float64, "minus", slice(1, 3))
    assert_same(call, cast, rows(4), *good)
    for position, other in enumerate((torch.float32, "plus", slice(1, 4))):
        bad = [*good[:position], other, *good[position + 1 :]]
        refuses(call, rows(4), *bad, match=f"argument {('dtype', 'how', 'part')[position]} was")
