"""What an op does against what it declares: each departure is told in one sentence, and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import capture_models
from piecework.declarations import checked_call

library = torch.library.Library("declared", "DEF")


def define(signature: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = signature.partition("(")[0]
    library.define(signature)
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"declared::{name}", fake, lib=library)


def problems_of(name: str, *args: Any, **kwargs: Any) -> list[str]:
    overload = getattr(torch.ops.declared, name).default
    return checked_call(overload, overload, args, kwargs)[1]


def tells(problems: list[str], *patterns: str) -> None:
    assert len(problems) == len(patterns), problems
    for problem, pattern in zip(problems, patterns, strict=True):
        assert re.search(pattern, problem), problem


x = torch.randn(4, 6)


# --- mutations ---


def _scribble(x: torch.Tensor, *_: Any) -> torch.Tensor:
    x[1].add_(1)
    return x * 2


define("scribble(Tensor x, Tensor(a!) out) -> Tensor", _scribble, lambda x, out: torch.empty_like(x))
define("scribble_list(Tensor[] xs, Tensor? y=None) -> Tensor", lambda xs, y=None: _scribble(xs[-1]),
       lambda xs, y=None: torch.empty_like(xs[-1]))  # fmt: skip
define("scribble_optional(Tensor x, Tensor? y=None) -> Tensor", lambda x, y=None: _scribble(x if y is None else y),
       lambda x, y=None: torch.empty_like(x if y is None else y))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_an_undeclared_write_is_told(dtype: torch.dtype) -> None:
    given = (x * 3).to(dtype)
    tells(
        problems_of("scribble", given, torch.zeros(1)),
        "declared::scribble wrote to argument 'x', which it declares that it only reads; declare it as mutated",
    )


def test_writes_to_lists_optional_and_keyword_arguments_are_told() -> None:
    tells(problems_of("scribble_list", [x.clone(), x.clone()]), "wrote to argument 'xs'")
    tells(problems_of("scribble_optional", x.clone(), y=x.clone()), "wrote to argument 'y'")
    tells(problems_of("scribble_optional", x.clone()), "wrote to argument 'x'")


def test_nan_that_stay_are_no_write_and_writing_over_them_is_one() -> None:
    given = torch.full((2, 3), float("nan"))
    assert not checked_call(torch.add, torch.ops.aten.add.Tensor, (given, 1), {})[1]
    tells(problems_of("scribble_optional", given[:, :0], y=torch.zeros(2, 3)), "wrote to argument 'y'")


def test_memory_that_is_declared_as_mutated_may_be_read_by_another_argument() -> None:
    out = x.clone()
    attn = torch.ops.models.attn.default
    assert not checked_call(attn, attn, (out, out, out), {})[1]
    assert not checked_call(attn, attn, (out[1:], out[:-1], out[1:]), {})[1]


def test_an_op_that_fails_is_as_it_was() -> None:
    overload = torch.ops.models.checked.default
    with pytest.raises(ValueError, match="too big"):
        checked_call(overload, overload, (torch.full((2, 2), 1e7), x.clone()), {})


# --- aliases ---


define("itself(Tensor x) -> Tensor", lambda x: x, torch.empty_like)
define("tail(Tensor x) -> Tensor", lambda x: x[1:], lambda x: x.new_empty(x.shape[0] - 1, x.shape[1]))
define("promised(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1).clone(), lambda x: x)
define("one_of(Tensor(a!) x, Tensor(b!) y) -> (Tensor(a!), Tensor(b!))", lambda x, y: (y, x), lambda x, y: (x, y))
define("twice(Tensor x) -> (Tensor, Tensor)", lambda x: (y := x + 1, y[:]), lambda x: (x + 1, x + 1))
define("halves(Tensor x) -> (Tensor, Tensor)", lambda x: tuple((x + 1).split(2)), lambda x: (x[:2] + 1, x[:2] + 1))


def test_a_view_of_an_argument_that_is_declared_fresh_is_told() -> None:
    tells(problems_of("itself", x), "declared::itself returned its result in the memory of argument 'x', and declares")
    tells(problems_of("tail", x), "declared::tail returned its result in the memory of argument 'x', and declares")


def test_a_fresh_result_that_is_declared_as_an_argument_is_told() -> None:
    tells(problems_of("promised", x.clone()), "returned its result in other memory than that of argument 'x', which")
    tells(problems_of("one_of", x.clone(), x.clone()), "result 0 in other memory.*'x'", "result 1 in other.*'y'")


def test_results_that_are_one_tensor_are_told_and_parts_of_one_are_not() -> None:
    tells(problems_of("twice", x), "returned result 1 in the memory of result 0, and declares both fresh")
    assert not problems_of("halves", x)


# --- fake implementations ---


define("dtype(Tensor x) -> Tensor", lambda x: x.double(), torch.empty_like)
define("shape(Tensor x) -> Tensor", lambda x: x.new_ones(x.shape[0] + 1, 6), torch.empty_like)
define("rank(Tensor x) -> Tensor", lambda x: x.sum(0), torch.empty_like)
define("strides(Tensor x) -> Tensor", lambda x: (x + 1).t().contiguous().t(), torch.empty_like)
define("number(Tensor x) -> Tensor[]", lambda x: [x + 1, x + 2], lambda x: [x + 1])
define("raises(Tensor x) -> Tensor", lambda x: x + 1, lambda x: x.view(7, -1))
define("rows(Tensor x) -> Tensor", lambda x: x[x[:, 0] > 0],
       lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[1]))  # fmt: skip
define("rows_width(Tensor x) -> Tensor", lambda x: x[x[:, 0] > 0][:, :2],
       lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[1]))  # fmt: skip


@pytest.mark.parametrize(("name", "pattern"), [
    ("dtype", r"gave its result with dtype torch.float64, where its fake implementation gives torch.float32; mend the"),
    ("shape", r"gave its result with shape \(5, 6\), where its fake implementation gives \(4, 6\)"),
    ("rank", r"gave its result with shape \(6,\), where its fake implementation gives \(4, 6\)"),
    ("strides", r"gave its result with strides \(1, 4\), where its fake implementation gives \(6, 1\)"),
    ("number", "gave 2 tensors, where its fake implementation gives 1"),
    ("raises", "ran, and its fake implementation raised RuntimeError for the same arguments: shape"),
    ("rows_width", r"gave its result with shape \(\d, 2\), where its fake implementation gives \(u0, 6\)"),
])  # fmt: skip
def test_a_wrong_fake_implementation_is_told(name: str, pattern: str) -> None:
    tells(problems_of(name, x), f"declared::{name} {pattern}")


def test_a_wrong_device_is_told() -> None:
    define("device(Tensor x) -> Tensor", lambda x: x + 1, lambda x: x.new_empty(x.shape, device="meta"))
    tells(problems_of("device", x), "with device cpu, where its fake implementation gives meta")


def test_sizes_that_follow_from_data_may_be_any() -> None:
    assert not problems_of("rows", x)


def test_strides_of_one_row_or_none_do_not_matter() -> None:
    for num in (0, 1):
        assert not problems_of("strides", x[:num])


# --- memory that an op keeps ---


_kept = torch.zeros(4, 6)
define("keeps(Tensor x) -> Tensor", lambda x: _kept.copy_(x * 2), torch.empty_like)
define("keeps_head(Tensor x) -> Tensor", lambda x: _kept[: len(x)].copy_(x), torch.empty_like)


@pytest.mark.parametrize("name", ["keeps", "keeps_head"])
@pytest.mark.parametrize("is_held", [False, True])
def test_memory_that_an_op_returns_again_is_told(name: str, is_held: bool) -> None:
    overload = getattr(torch.ops.declared, name).default
    first, _ = checked_call(overload, overload, (x,), {})
    if not is_held:
        del first
    tells(problems_of(name, x), f"declared::{name} returned its result in memory that an earlier call of it returned")


def test_results_that_callers_keep_or_drop_are_no_memory_that_an_op_keeps() -> None:
    overload = torch.ops.models.scale3.default
    kept = []
    for i in range(40):
        result, problems = checked_call(overload, overload, (x,), {})
        assert not problems
        if i % 3 == 0:
            kept.append(result)
        assert not checked_call(overload, overload, (result,), {})[1]


# --- right ones ---


@pytest.mark.parametrize("is_inference", [False, True])
def test_ops_that_keep_what_they_declare(is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        y = torch.randn(4, 6)
        for packet, args in (
            (capture_models.ops.attn, (y, y, y.clone())),
            (capture_models.ops.scale3, (y.t(),)),
            (capture_models.ops.pair, (y[:, ::2],)),
            (capture_models.more.rotate, (y.clone(), y.clone())),
            (capture_models.more.double, (y.clone(),)),
            (capture_models.more.tail, (y.clone(),)),
            (capture_models.more.tail_and_sum, (y.clone(),)),
            (capture_models.more.log_parts, (y, torch.zeros(()))),
        ):
            assert checked_call(packet.default, packet.default, args, {})[1] == []


@pytest.mark.parametrize(("function", "args", "kwargs"), [
    (torch.relu_, (), {}),
    (torch.Tensor.add_, (1,), {}),
    (torch.nn.functional.relu, (), {"inplace": True}),
    (torch.add, (1,), {"out": torch.zeros(4, 6)}),
    (torch.nn.functional.batch_norm, (torch.zeros(6), torch.ones(6)), {"training": True}),
    (torch.batch_norm, (None, None, torch.zeros(6), torch.ones(6), True, 0.1, 1e-5, False), {}),
    (torch.nn.functional.dropout, (), {"training": False}),
    (torch.nonzero, (), {}),
])  # fmt: skip
@pytest.mark.parametrize("is_inference", [False, True])
def test_functions_of_torch_write_to_what_they_write_on_fakes(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_inference: bool
) -> None:
    with torch.inference_mode(is_inference):
        given = torch.randn(4, 6)
        expected = function(given.clone(), *args, **kwargs)
        result, problems = checked_call(function, None, (given, *args), kwargs)
    assert not problems
    torch.testing.assert_close(result, expected)


def test_a_function_that_writes_behind_torch_is_told() -> None:
    def behind(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor):
            x.numpy()[0] = 7
        return x * 2

    tells(checked_call(behind, None, (x.clone(),), {})[1], "behind wrote to argument 0, which")


def test_an_implementation_stands_for_its_op() -> None:
    overload = torch.ops.models.scale3.default
    tells(checked_call(_scribble, overload, (x.clone(),), {})[1], "models::scale3 wrote to argument 'x'")


@pytest.mark.parametrize("shape", [(2, 3, 8, 4), (1, 1, 1, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q = torch.randn(*shape).to(dtype)
    overload = torch.ops.aten.scaled_dot_product_attention.default
    for given in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        assert not checked_call(overload, overload, (given, given, given), {})[1]
    norm = nn.LayerNorm(4)
    assert not checked_call(nn.functional.layer_norm, None, (torch.randn(3, 4), (4,), norm.weight, norm.bias), {})[1]
