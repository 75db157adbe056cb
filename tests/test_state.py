"""Parameters, buffers and attributes that change after the trace: bound anew, or refused by name."""

from __future__ import annotations

import enum
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piecework
from models import Linear, Stack, assert_same, both_levels, compiled, refuses, rows
from piecework import PieceworkWarning, TraceDepartureError, counters, verify_assumptions

OFFSET = 2.0


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Two(nn.Module):
    """Two layers, and a buffer derived from a weight."""

    derived: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.register_buffer("derived", self.first.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(self.first(x)) + self.second(x) + self.derived.sum()


class Tied(Two):
    """The same with one weight for both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight


def random_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(value) for name, value in model.state_dict().items()}


def random_parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 6))


def replace_in_dict(model: Any) -> None:
    model.first._parameters["weight"] = random_parameter()


def update_dict(model: Any) -> None:
    model.first._parameters.update(weight=random_parameter())


def replace_buffer(model: Any) -> None:
    model.derived = torch.randn(6, 6)


def replace_buffer_in_dict(model: Any) -> None:
    model._buffers["derived"] = torch.randn(6, 6)


def replace_parameter(model: Any) -> None:
    model.first.weight = random_parameter()


def replace_submodule(model: Any) -> None:
    model.first = nn.Linear(6, 6)


def load(model: nn.Module) -> None:
    model.load_state_dict(random_state(model))


def load_by_assignment(model: nn.Module) -> None:
    model.load_state_dict(random_state(model), assign=True)


def copy_in_place(model: Any) -> None:
    model.first.weight.detach().copy_(torch.randn(6, 6))


def register_again(model: Any) -> None:
    model.register_buffer("derived", torch.randn(6, 6))


@both_levels
@pytest.mark.parametrize(
    "change",
    [
        copy_in_place,
        load,
        load_by_assignment,
        replace_parameter,
        replace_in_dict,
        update_dict,
        replace_buffer,
        replace_buffer_in_dict,
        register_again,
        replace_submodule,
    ],
)
def test_new_values_of_the_same_form_are_used_at_the_next_call(level: int, change: Callable[[Any], None]) -> None:
    model = Two()
    call = compiled(model, level)
    assert_same(call, model, rows(4))
    with counters.expect(num_graphs_seen=0):
        for _ in range(2):
            change(model)
            assert_same(call, model, rows(4))
            assert_same(call, model, rows(3))
    in_place = change in (copy_in_place, load)
    assert (piecework.report(call).num_rebindings == 0) is in_place


@both_levels
def test_buffers_that_the_model_changes_itself_are_no_rebinding(level: int) -> None:
    class Running(nn.Module):
        n: torch.Tensor
        cache: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(()))
            self.register_buffer("cache", torch.zeros(32, 6))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            self.n.add_(1)
            self.cache.index_copy_(0, at, x * 2)
            return torch.ops.models.scale3(x) + self.n + self.cache.sum()

    model, reference = Running(), Running()
    call = compiled(model, level)
    for n in (4, 2, 4, 3, 1, 4):
        assert_same(call, reference, rows(n), torch.randperm(32)[:n])
        torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))
    assert piecework.report(call).num_rebindings == 0


# --- other forms ------------------------------------------------------------------------------------------


def to_double(model: nn.Module) -> None:
    model.double()


def other_dtype_assigned(model: Any) -> None:
    model.first.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))


def other_layout(model: Any) -> None:
    model.first.weight = nn.Parameter(torch.randn(6, 6).t())


def other_shape(model: Any) -> None:
    model.derived = torch.randn(3)


def buffer_to_none(model: Any) -> None:
    model.derived = None


def no_bias(model: Any) -> None:
    model.first = nn.Linear(6, 6, bias=False)


@both_levels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (to_double, "dtype of self.first.weight was torch.float32 when traced, now it is torch.float64"),
        (other_dtype_assigned, "dtype of self.first.weight was torch.float32 when traced, now it is torch.float64"),
        (other_layout, r"strides of self.first.weight was \(6, 1\) when traced, now it is \(1, 6\)"),
        (other_shape, r"shape of self.derived was \(6, 6\) when traced, now it is \(3,\)"),
        (buffer_to_none, "self.derived was a tensor when traced, now it is None"),
        (no_bias, "self.first.bias was a tensor when traced, now it is None"),
    ],
)
def test_state_of_another_form_is_refused_by_name(level: int, change: Callable[[Any], None], message: str) -> None:
    model = Two()
    call = compiled(model, level)
    call(rows(4))
    change(model)
    for _ in range(2):  # as long as it lasts
        refuses(call, rows(4), match=message)
    piecework.release(call)
    if change in (to_double, other_layout, other_shape):  # what eager takes as well
        assert_same(call, model, rows(4).to(model.first.weight.dtype))


@both_levels
def test_moving_the_model_to_another_device_is_refused(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    call(rows(4))
    model.to("meta")
    refuses(call, rows(4), match="device of self.linear.weight was cpu when traced, now it is meta")


@both_levels
def test_state_that_comes_back_works_again(level: int) -> None:
    model = Two()
    call = compiled(model, level)
    call(rows(4))
    model.double()
    refuses(call, rows(4), match="dtype of")
    model.float()
    with counters.expect(num_graphs_seen=0):
        assert_same(call, model, rows(4))


@both_levels
def test_weights_that_are_tied_must_stay_tied(level: int) -> None:
    model = Tied()
    call = compiled(model, level)
    assert_same(call, model, rows(4))
    for change in (copy_in_place, load):
        change(model)
        assert_same(call, model, rows(4))
    model.second.weight = random_parameter()
    refuses(call, rows(4), match="self.first.weight is self.second.weight")
    model.first.weight = model.second.weight
    assert_same(call, model, rows(4))


# --- attributes ---------------------------------------------------------------------------------------------


class Switches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = 2.0
        self.negative = False
        self.extra: nn.Module | None = None
        self.factors = [1.0, 2.0]
        self.unread = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.models.scale3(x) * self.k * self.factors[1]
        if self.extra is not None:
            y = y + self.extra(x)
        return -y if self.negative else y


@both_levels
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("k", 3.0, "self.k == 2.0, now it is 3.0"),
        ("negative", True, "self.negative.*now it is True"),
        ("extra", nn.Linear(6, 6), "extra"),
        ("factors", [1.0, 3.0], "self.factors"),
    ],
)
def test_attribute_that_the_model_reads_is_refused_by_name(level: int, name: str, value: Any, message: str) -> None:
    model = Switches()
    call = compiled(model, level)
    assert_same(call, model, rows(4))
    old = getattr(model, name)
    setattr(model, name, value)
    for _ in range(2):
        refuses(call, rows(4), match=message)
    delattr(model, name)  # a module goes into another dict than None
    setattr(model, name, old)
    assert_same(call, model, rows(4))


@both_levels
def test_attribute_that_the_model_does_not_read_is_no_departure(level: int) -> None:
    model = Switches()
    call = compiled(model, level)
    call(rows(4))
    model.unread = 2
    setattr(model, "another", 3)  # noqa: B010 - for type checkers it has none
    assert_same(call, model, rows(4))


@both_levels
def test_deleted_attribute_is_refused(level: int) -> None:
    model = Switches()
    call = compiled(model, level)
    call(rows(4))
    del model.k
    refuses(call, rows(4), match="self.k.*now it is gone")
    model.k = 2.0
    assert_same(call, model, rows(4))


@both_levels
def test_departure_of_an_attribute_may_be_answered_eagerly(level: int) -> None:
    model = Switches()
    call = compiled(model, level, on_failure="eager")
    assert_same(call, model, rows(4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in (3.0, 3.0, 4.0):
            model.k = k
            assert_same(call, model, rows(4))
    assert [w.category for w in caught] == [PieceworkWarning] * 2
    model.k = 2.0
    assert_same(call, model, rows(4))
    assert piecework.report(call).num_eager_calls == {"departure from the trace": 3}


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(self.dropout(self.linear(x)))


@both_levels
def test_train_and_eval_are_departures_where_the_model_reads_training(level: int) -> None:
    model = Dropping().eval()
    call = compiled(model, level)
    assert_same(call, model, rows(4))
    model.train()
    refuses(call, rows(4), match="self.dropout.training.*now it is True")
    model.eval()
    assert_same(call, model, rows(4))
    call.dropout.train()
    refuses(call, rows(4), match="training")


@both_levels
def test_train_and_eval_are_none_where_it_does_not(level: int) -> None:
    model = Linear()
    call = compiled(model, level)
    call(rows(4))
    for switch in (model.eval, model.train, call.eval):
        switch()
        with counters.expect(num_graphs_seen=0):
            assert_same(call, model, rows(4))


# --- raw changes of storage -----------------------------------------------------------------------------------


def change_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.randn(6, 6)


def set_storage(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.set_(torch.randn(6, 6))  # pyright: ignore[reportCallIssue, reportArgumentType]


@both_levels
@pytest.mark.parametrize("change", [change_data, set_storage])
@pytest.mark.parametrize("which", [0, 5, 11])
def test_raw_change_of_storage_is_noticed_within_the_stated_calls(
    level: int, change: Callable[[torch.Tensor], None], which: int
) -> None:
    model = Stack()
    call = compiled(model, level)
    call(rows(4))
    stated = piecework.report(call).num_calls_for_all_addresses
    assert 1 < stated <= 6  # 24 tensors
    change(model.layers[which].weight)  # pyright: ignore[reportArgumentType]
    x = rows(4)
    results = [call(x) for _ in range(stated)]
    torch.testing.assert_close(results[-1], model(x))
    for _ in range(3 * stated):
        assert_same(call, model, rows(3))


@both_levels
@pytest.mark.parametrize("change", [change_data, set_storage])
def test_raw_change_of_storage_is_noticed_at_once_when_all_are_checked(
    level: int, change: Callable[[torch.Tensor], None]
) -> None:
    model = Stack()
    call = compiled(model, level, check_parameters="always")
    call(rows(4))
    assert piecework.report(call).num_calls_for_all_addresses == 1
    for layer in model.layers:
        change(layer.weight)  # pyright: ignore[reportArgumentType]
        assert_same(call, model, rows(4))


@both_levels
def test_swapped_parameter_is_noticed_or_refused_by_torch(level: int) -> None:
    model = Linear()
    call = compiled(model, level, check_parameters="always")
    call(rows(4))
    try:
        torch.utils.swap_tensors(model.linear.weight, random_parameter())
    except RuntimeError as error:
        assert "weakref" in str(error)  # noqa: PT017 - Dynamo holds one
    assert_same(call, model, rows(4))


@both_levels
def test_raw_change_to_another_dtype_is_refused(level: int) -> None:
    model = Linear()
    call = compiled(model, level, check_parameters="always")
    call(rows(4))
    model.linear.weight.data = torch.randn(6, 6, dtype=torch.float64)
    refuses(call, rows(4), match="dtype of self.linear.weight was torch.float32 when traced")


def test_replaced_parameter_is_not_kept_alive() -> None:
    model = Linear()
    call = compiled(model)
    call(rows(4))
    old = weakref.ref(model.linear.weight)
    model.linear.weight = random_parameter()
    with torch.no_grad():
        call(rows(4))
    gc.collect()
    assert old() is None


# --- what only verify_assumptions looks at ---------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.k = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(helper(self.linear(x))) * self.k + OFFSET


@contextmanager
def rebound_global(model: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_state.OFFSET", 3.0)
        yield


@contextmanager
def patched_function(model: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_state.helper", lambda x: x * 9)
        yield


@contextmanager
def patched_torch(model: Any) -> Iterator[None]:
    original = F.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", lambda *args: original(*args) * 2)
        yield


@contextmanager
def inner_hook(model: Any) -> Iterator[None]:
    hook = model.linear.register_forward_hook(lambda module, args, result: result + 1)
    yield
    hook.remove()


@contextmanager
def hook_of_all(model: Any) -> Iterator[None]:
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, result: result + 1)
    yield
    hook.remove()


@contextmanager
def pre_hook_of_all(model: Any) -> Iterator[None]:
    hook = nn.modules.module.register_module_forward_pre_hook(lambda module, args: args)
    yield
    hook.remove()


@contextmanager
def written_past_setattr(model: Any) -> Iterator[None]:
    model.__dict__["k"] = 7.0
    yield
    model.__dict__["k"] = 1.0


@contextmanager
def patched_forward(model: Any) -> Iterator[None]:
    model.linear.__dict__["forward"] = lambda x: x
    yield
    del model.linear.__dict__["forward"]


@contextmanager
def default_dtype(model: Any) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@both_levels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rebound_global, r"the trace relies on test_state\.OFFSET == "),
        (patched_function, r"test_state\.helper\.__code__ is no longer the one that was traced"),
        (patched_torch, "linear"),
        (inner_hook, "hook"),
        (hook_of_all, r"the hooks of all modules .* were \[\] when traced, now they are \[<function hook_of_all"),
        (pre_hook_of_all, r"the hooks of all modules .* were \[\] when traced"),
        (written_past_setattr, "self.k == 1.0, now it is 7.0"),
        (patched_forward, "forward"),
        (default_dtype, "the default dtype was torch.float32 when traced, now it is torch.float64"),
    ],
)
def test_verify_assumptions_finds_what_calls_do_not_look_at(level: int, change: Any, message: str) -> None:
    model = Wide()
    call = compiled(model, level)
    call(rows(4))
    verify_assumptions(call)
    with change(model), pytest.raises(TraceDepartureError, match=message):
        verify_assumptions(call)
    verify_assumptions(call)
    assert_same(call, model, rows(4))


@both_levels
@pytest.mark.parametrize("is_pre", [False, True])
def test_hooks_of_all_modules_run_once_per_module(level: int, is_pre: bool) -> None:
    """A graph of torch's is a module, too; what it returns, or is given, is a tuple."""

    def double(values: Any) -> Any:
        return tuple(2 * one for one in values) if isinstance(values, tuple) else 2 * values

    module = nn.modules.module
    if is_pre:
        hook = module.register_module_forward_pre_hook(lambda _, args: double(args))
    else:
        hook = module.register_module_forward_hook(lambda _, args, result: double(result))
    try:
        model = Linear()
        call = compiled(model, level)
        for n in (4, 3):
            assert_same(call, model, rows(n))
    finally:
        hook.remove()
    with pytest.raises(TraceDepartureError, match="the hooks of all modules"):
        verify_assumptions(call)


@both_levels
def test_a_reset_of_dynamo_is_named(level: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout())
    call = compiled(model, level, dims={"input": 0})
    call(rows(4))
    torch._dynamo.reset()
    with pytest.raises(TraceDepartureError, match=r"torch\._dynamo\.reset\(\) dropped what was recorded"):
        verify_assumptions(call)
    piecework.release(call)
    assert_same(call, model.eval(), rows(4))


class Held(nn.Module):
    """Tensors and numbers in plain containers."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = [torch.ones(6)]
        self.numbers = {"k": 2.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.models.scale3(x) * self.numbers["k"] + self.tensors[0]


@both_levels
def test_items_of_plain_containers_are_found_by_verify_assumptions(level: int) -> None:
    model = Held()
    call = compiled(model, level)
    call(rows(4))
    model.tensors[0] = torch.full((6,), 5.0)  # of the same form: bound anew
    verify_assumptions(call)
    assert_same(call, model, rows(4))
    model.numbers["k"] = 3.0
    with pytest.raises(TraceDepartureError, match=r"numbers.*k"):
        verify_assumptions(call)
    refuses(call, rows(4), match="numbers")


@both_levels
def test_tensor_replaced_in_a_plain_list_is_noticed_within_the_stated_calls(level: int) -> None:
    model = Held()
    call = compiled(model, level)
    call(rows(4))
    model.tensors[0] = torch.full((6,), 5.0)
    for _ in range(piecework.report(call).num_calls_for_all_addresses):
        call(rows(4))
    assert_same(call, model, rows(4))


class Form(enum.Enum):
    """How ``Configured`` goes on."""

    PLAIN = 1
    NEGATIVE = 2


class Settings:
    """What a model reads from a plain object."""

    def __init__(self) -> None:
        self.form = Form.PLAIN
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.layout = torch.contiguous_format


class Configured(nn.Module):
    """Looks at constants of torch, and at a member of an enumeration."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.models.scale3(x)
        y = -y if self.settings.form is Form.NEGATIVE else y
        y = y[:, :, None, None].contiguous(memory_format=self.settings.layout)
        return y.to(self.settings.device, self.settings.dtype)


@both_levels
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("form", Form.NEGATIVE),
        ("dtype", torch.float64),
        ("device", torch.device("meta")),
        ("layout", torch.channels_last),
    ],
)
def test_constants_of_a_plain_object_are_noticed_within_the_stated_calls(level: int, name: str, value: Any) -> None:
    model = Configured()
    call = compiled(model, level)
    assert_same(call, model, rows(4))
    setattr(model.settings, name, value)
    stated = piecework.report(call).num_calls_for_all_addresses
    with pytest.raises(TraceDepartureError, match=rf"self\.settings\.{name}"):
        for _ in range(stated):
            call(rows(4))


@both_levels
def test_an_equal_constant_in_another_object_is_no_departure(level: int) -> None:
    model = Configured()
    call = compiled(model, level)
    call(rows(4))
    model.settings.device = torch.device("cpu")
    for _ in range(2 * piecework.report(call).num_calls_for_all_addresses):
        assert_same(call, model, rows(4))


class TiedEmbedding(nn.Module):
    """An embedding and the layer that goes back share a weight; the two modules read ``F`` of their own files."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.ops.models.scale3(self.embedding(ids)))


@both_levels
@pytest.mark.parametrize("which", ["embedding", "head"])
def test_weights_that_are_no_longer_tied_are_named(level: int, which: str) -> None:
    model = TiedEmbedding()
    call = compiled(model, level, dims={"ids": 0})
    ids = torch.arange(4)
    call(ids)
    weight = nn.Parameter(torch.randn(10, 6))
    model.embedding.weight = model.head.weight = weight  # still tied
    assert_same(call, model, ids)
    getattr(model, which).weight = nn.Parameter(torch.randn(10, 6))
    refuses(call, ids, match=r"relies on self\.(embedding|head)\.weight is self\.(embedding|head)\.weight")


@both_levels
def test_modules_that_are_no_longer_one_are_named(level: int) -> None:
    layer = nn.Linear(6, 6)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    call = compiled(model, level, dims={"input": 0})
    call(rows(4))
    model[2] = nn.Linear(6, 6)
    refuses(call, rows(4), match=r"relies on self\.")


@both_levels
def test_module_lists_and_parameter_lists_are_watched(level: int) -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(6)) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, scale in zip(self.layers, self.scales, strict=True):
                x = torch.ops.models.scale3(layer(x)) * scale
            return x

    model = Lists()
    call = compiled(model, level)
    call(rows(4))
    model.layers[0] = nn.Linear(6, 6)
    model.scales[1] = nn.Parameter(torch.full((6,), 3.0))
    assert_same(call, model, rows(4))
    model.layers.append(nn.Linear(6, 6))
    refuses(call, rows(4), match="layers")
    del model.layers._modules["2"]
    assert_same(call, model, rows(4))
    model.layers[0] = nn.ReLU()
    refuses(call, rows(4), match=r"self.layers.0.weight was a tensor when traced, now it is None")


@both_levels
def test_verify_assumptions_holds_after_all_that_is_no_departure(level: int) -> None:
    model = Two()
    call = compiled(model, level)
    call(rows(4))
    load_by_assignment(model)
    replace_buffer(model)
    model.eval()
    model.first.weight.data = torch.randn(6, 6)
    verify_assumptions(call)
    assert_same(call, model, rows(4))


@both_levels
def test_hooks_are_traced_with_the_model(level: int) -> None:
    model = Linear()
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, result: torch.mul(result, 2))  # pyright: ignore[reportArgumentType]
    model.linear.register_forward_hook(lambda module, args, result: -result)
    call = compiled(model, level)
    for n in (4, 3):
        assert_same(call, model, rows(n))


def _doubles_args(module: Any, args: Any, named: Any) -> Any:
    return (args[0] * 2,), named


ADDED: list[Callable[[Any, Any], Any]] = [
    lambda model, call: model.linear.register_forward_hook(lambda module, args, result: result * 2),
    lambda model, call: model.linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    lambda model, call: model.register_forward_hook(lambda module, args, result: result * 2, always_call=True),
    lambda model, call: call.register_forward_pre_hook(_doubles_args, with_kwargs=True),
]


@both_levels
@pytest.mark.parametrize("add", ADDED)
@pytest.mark.parametrize("on_failure", ["error", "eager"])
def test_hook_that_is_added_after_the_trace_is_noticed_by_the_next_call(
    level: int, add: Callable[[Any, Any], Any], on_failure: Any
) -> None:
    model = Linear()
    call = compiled(model, level, on_failure=on_failure)
    assert_same(call, model, x := rows(4))
    hook = add(model, call)
    if on_failure == "error":
        refuses(call, x, match="hooks")
    else:
        with pytest.warns(PieceworkWarning, match="hooks"):
            assert_same(call, model, x)
    hook.remove()
    with counters.expect(num_graphs_seen=0):
        assert_same(call, model, x)
    assert sum(piecework.report(call).num_eager_calls.values()) == (on_failure == "eager")


@both_levels
def test_hooks_that_were_traced_are_missed_when_they_are_gone(level: int) -> None:
    model = Wide()
    hooks = [model.linear.register_forward_hook(lambda module, args, result: -result) for _ in range(2)]
    call = compiled(model, level)
    assert_same(call, model, rows(4))
    hooks[0].remove()
    num_calls = piecework.report(call).num_calls_for_all_addresses
    with pytest.raises(TraceDepartureError, match=r"self.linear._forward_hooks.* == 2, now it is 1"):
        for _ in range(num_calls):
            call(rows(4))
    refuses(call, rows(4), match="now it is 1")
