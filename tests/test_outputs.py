"""What a forward returns: the caller gets what eager gives, with the same classes and the same objects."""

from __future__ import annotations

import collections
import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from models import assert_same, both_levels, compiled, rows
from piecework import CompileError, counters


class Named(NamedTuple):
    values: torch.Tensor
    number: int


@dataclasses.dataclass
class Result:
    values: torch.Tensor
    count: int
    more: list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: torch.Tensor


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Any]):
    """As in transformers: a dataclass that is an ordered dict of the fields that are given."""

    logits: Any = None
    hidden: Any = None
    missing: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def triple(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.models.scale3(x)


@both_levels
@pytest.mark.parametrize(
    "form",
    [
        lambda x: triple(x),
        lambda x: (triple(x), x + 1),
        lambda x: [triple(x), [x + 1]],
        lambda x: (triple(x),),
        lambda x: {"a": triple(x), "b": {"c": (x + 1,)}, 3: x * 2},
        lambda x: torch.ops.models.pair(x * 2),
        lambda x: torch.ops.models.pair(x)[1],
    ],
    ids=["tensor", "tuple", "list", "one", "dict", "op-results", "second-of-op"],
)
def test_builtin_containers(level: int, form: Any) -> None:
    call = compiled(form, level)
    with counters.expect(num_graphs_seen=1):
        for n in (4, 1, 7):
            x = rows(n)
            result, expected = call(x), form(x)
            assert type(result) is type(expected)
            torch.testing.assert_close(result, expected)


@both_levels
def test_named_tuples_and_dataclasses(level: int) -> None:
    def form(x: torch.Tensor) -> Any:
        y = triple(x)
        return Named(y, x.shape[0] * 2), Result(y + 1, x.shape[0], [x * 2]), Frozen(y)

    call = compiled(form, level)
    for n in (4, 1):
        x = rows(n)
        named, result, frozen = call(x)
        expected = form(x)
        assert [type(named), type(result), type(frozen)] == [Named, Result, Frozen]
        torch.testing.assert_close(named, expected[0])
        torch.testing.assert_close(dataclasses.asdict(result), dataclasses.asdict(expected[1]))
        torch.testing.assert_close(frozen.values, expected[2].values)


@both_levels
def test_outputs_like_those_of_transformers(level: int) -> None:
    def form(x: torch.Tensor) -> ModelOutput:
        return ModelOutput(logits=triple(x), hidden=(x + 1, x * 2))

    call = compiled(form, level)
    for n in (4, 1):
        x = rows(n)
        result, expected = call(x), form(x)
        assert type(result) is ModelOutput and list(result) == list(expected) == ["logits", "hidden"]
        assert result["logits"] is result.logits and result.missing is None
        torch.testing.assert_close(result.logits, expected.logits)
        torch.testing.assert_close(result.hidden, expected.hidden)
        result["logits"] = x
        assert result.logits is x


@both_levels
def test_ordered_and_default_dicts(level: int) -> None:
    def ordered(x: torch.Tensor) -> Any:
        return OrderedDict(b=triple(x), a=x + 1)

    call = compiled(ordered, level)
    result = call(rows(4))
    assert type(result) is OrderedDict and list(result) == ["b", "a"]

    def default(x: torch.Tensor) -> Any:
        found = collections.defaultdict(list)
        found["y"] = triple(x)  # pyright: ignore[reportArgumentType]
        return found

    result = compiled(default, level)(rows(4))
    assert type(result) is collections.defaultdict and result.default_factory is list


@both_levels
def test_numbers_from_sizes_are_plain_and_follow_the_call(level: int) -> None:
    def form(x: torch.Tensor) -> Any:
        n = x.shape[0]
        return triple(x), n, n * 2 + 1, n // 2, x.shape, x.numel(), n > 0

    call = compiled(form, level)
    with counters.expect(num_graphs_seen=1):
        for n in (4, 1, 7):
            x = rows(n)
            result, expected = call(x)[1:], form(x)[1:]
            assert result == expected
            assert [type(value) for value in result] == [type(value) for value in expected]


@both_levels
def test_shapes_follow_the_call_where_they_read_an_argument(level: int) -> None:
    weight = torch.ones(4, 6)

    def form(x: torch.Tensor) -> Any:
        y = triple(x)
        made = torch.Size((x.shape[0], 4))
        return y, [x.shape, Result(y, 1, [y])], weight.shape, x.size(), y.shape, x.shape[:1], made

    call = compiled(form, level, {"x": {0: "batch", 1: "seq"}})
    for size in ((4, 6), (1, 6), (6, 4), (4, 4)):
        x = rows(*size)
        result, expected = call(x), form(x)
        assert result[1][0] == x.shape and type(result[1][0]) is torch.Size
        assert result[2:] == expected[2:]


@both_levels
def test_constants_of_any_class(level: int) -> None:
    def form(x: torch.Tensor) -> Any:
        return triple(x), None, "text", 3, True, torch.float32, x.dtype, x.device, float("inf")

    result = compiled(form, level)(rows(4))
    assert result[1:] == (None, "text", 3, True, torch.float32, torch.float32, torch.device("cpu"), float("inf"))


@both_levels
def test_input_that_is_returned_is_the_very_object(level: int) -> None:
    def form(x: torch.Tensor, d: Any) -> Any:
        y = triple(x)
        d["written"].add_(1)
        return y, x, d["written"], [x]

    call = compiled(form, level, {"x": 0, "d": 0})
    for n in (4, 3):
        x, written = rows(n), rows(n)
        before = written.clone()
        result = call(x, {"written": written})
        assert result[1] is x and result[2] is written and result[3][0] is x
        torch.testing.assert_close(written, before + 1)


@both_levels
def test_out_argument_that_an_op_writes_is_returned_as_it_is(level: int) -> None:
    def form(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.ops.models.attn(x, x, out)
        return out

    call = compiled(form, level)
    x, out = rows(4), rows(4)
    assert call(x, out) is out
    torch.testing.assert_close(out, x * 3)


class Holder(nn.Module):
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> Any:
        return triple(self.linear(x)), self.linear.weight, self.table, self.unused


@both_levels
def test_parameters_and_buffers_that_are_returned_are_the_very_objects(level: int) -> None:
    model = Holder()
    call = compiled(model, level)
    for _ in range(2):
        result = call(rows(4))
        assert result[1] is model.linear.weight and result[2] is model.table and result[3] is model.unused
    model.linear.weight = nn.Parameter(torch.randn(6, 6))
    model.unused = nn.Parameter(torch.zeros(2))
    result = call(rows(4))
    assert result[1] is model.linear.weight and result[3] is model.unused


@both_levels
def test_view_of_an_input_shares_its_memory(level: int) -> None:
    def form(x: torch.Tensor) -> Any:
        return triple(x), x.view(-1), x[1:], x.t()

    call = compiled(form, level)
    for n in (4, 2):
        x = rows(n)
        result = call(x)
        torch.testing.assert_close(result, form(x))
        assert result[1].data_ptr() == x.data_ptr() and result[2].data_ptr() == x[1:].data_ptr()
        assert result[3].stride() == (1, 6)
        result[1][0] = 7.0
        assert x[0, 0] == 7.0


@both_levels
@pytest.mark.parametrize("attribute", ["T", "mT", "data"])
def test_attribute_of_an_input_is_returned_or_refused(level: int, attribute: str) -> None:
    """Up to torch 2.13 Dynamo rebuilds these from the argument, past the graph."""
    call = compiled(lambda x: (triple(x), getattr(x, attribute)), level)
    x = rows(4)
    try:
        result = call(x)[1]
    except CompileError as error:
        assert "the trace can't explain" in str(error)  # noqa: PT017 - either is right
    else:
        torch.testing.assert_close(result, getattr(x, attribute))


@both_levels
def test_fraction_of_a_size_is_refused(level: int) -> None:
    call = compiled(lambda x: (triple(x), x.shape[0] / 2), level)
    with pytest.raises(CompileError, match=r"the result\[1\] of .* the trace can't explain"):
        call(rows(4))


@both_levels
def test_results_that_share_memory_in_eager_share_it(level: int) -> None:
    def form(x: torch.Tensor) -> Any:
        y = triple(x) + 1
        return y, y, y[0], y.view(-1)

    y, same, row, flat = compiled(form, level)(rows(4))
    assert same is y and row.data_ptr() == y.data_ptr() == flat.data_ptr()


@both_levels
def test_results_are_fresh_at_each_call(level: int) -> None:
    def form(x: torch.Tensor) -> Any:
        return triple(x), [x + 1], {"a": x * 2}, {1, 2}

    call, x = compiled(form, level), rows(4)
    first, second = call(x), call(x)
    first[1].append(None)
    first[2].clear()
    first[3].add(3)
    first[0].zero_()
    for result in (second, call(x)):
        torch.testing.assert_close(result[:3], form(x)[:3])
        assert result[3] == {1, 2}


class Opaque:
    def __init__(self, held: Any) -> None:
        self.held = held


@both_levels
def test_object_that_hides_a_tensor_is_refused_by_class(level: int) -> None:
    with pytest.raises(CompileError, match=r"the result\[1\] of .* is a test_outputs.Opaque that the trace can't"):
        compiled(lambda x: (triple(x), Opaque(x + 1)), level)(rows(4))


@both_levels
def test_returning_nothing_of_torch_is_refused(level: int) -> None:
    with pytest.raises(CompileError, match=r"runs no op of torch|can't be traced"):
        compiled(lambda x: None, level)(rows(4))


@both_levels
def test_input_returned_alone_with_an_op_that_writes(level: int) -> None:
    def form(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    assert_same(compiled(form, level), form, rows(4))
