"""Events on the traced modules: who is told, and what stays as the user's code left it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from models import Linear, assert_same, compiled, refuses, rows
from piecework.watch import Watch, plain_dicts, watched_modules

STATE_DICTS = ("_parameters", "_buffers", "_modules")


class Plain(nn.Module):
    b: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("b", torch.ones(2))
        self.k = 1


def watching(model: nn.Module) -> Watch:
    watch = Watch()
    watch.cover(model.modules())
    return watch


def settled(watch: Watch) -> Watch:
    watch.changed = False
    return watch


@pytest.mark.parametrize(
    "event",
    [
        lambda m: setattr(m, "k", 2),
        lambda m: delattr(m, "k"),
        lambda m: setattr(m.inner, "weight", nn.Parameter(torch.ones(2, 2))),
        lambda m: setattr(m, "b", torch.zeros(2)),
        lambda m: setattr(m, "inner", nn.Linear(2, 2)),
        lambda m: delattr(m, "inner"),
        lambda m: m.double(),
        lambda m: m.inner.half(),
        lambda m: m.load_state_dict(m.state_dict(), assign=True),
        lambda m: m.train(),
        lambda m: m._parameters.update(p=None),
        lambda m: m.inner._parameters.__setitem__("weight", None),
        lambda m: m.inner._parameters.__delitem__("bias"),
        lambda m: m.inner._parameters.pop("bias"),
        lambda m: m.inner._parameters.popitem(),
        lambda m: m.inner._parameters.setdefault("other", None),
        lambda m: m._buffers.clear(),
        lambda m: m._modules.__ior__({"inner": nn.ReLU()}),
        lambda m: m.register_buffer("c", torch.ones(1)),
        lambda m: m.add_module("d", nn.ReLU()),
        lambda m: m.inner.register_parameter("e", None),
    ],
)
def test_every_event_is_told(event: object) -> None:
    model = Plain()
    watch = settled(watching(model))
    other = settled(watching(Plain()))
    assert callable(event)
    event(model)
    assert watch.changed
    assert not other.changed


def test_reading_is_no_event() -> None:
    model = Plain()
    watch = settled(watching(model))
    read = [dict(model.named_parameters()), model.state_dict(), model.k, model.inner(torch.ones(1, 2)), repr(model)]
    assert read
    assert not watch.changed


def test_two_watches_of_one_model_are_both_told_until_closed() -> None:
    model = Plain()
    first, second = settled(watching(model)), settled(watching(model))
    model.k = 3
    assert first.changed and second.changed
    first.close()
    settled(first)
    settled(second)
    model.k = 4
    assert second.changed and not first.changed


def test_plain_dicts_are_in_place_for_a_block_and_counting_goes_on_after_it() -> None:
    model = Plain()
    watch = watching(model)
    with plain_dicts(watch.modules):
        assert all(type(getattr(model, name)) is dict for name in STATE_DICTS)
        model._buffers["b"] = torch.full((2,), 5.0)
    assert model.b.tolist() == [5, 5]
    settled(watch)
    model._buffers["b"] = torch.ones(2)
    assert watch.changed and type(model._buffers) is not dict
    with pytest.raises(KeyError), plain_dicts(watch.modules):
        raise KeyError
    assert type(model._buffers) is not dict


def test_copies_and_pickles_of_a_watched_module_are_as_if_unwatched() -> None:
    model = Linear()
    compiled(model)(rows(4))
    assert type(model.linear._parameters) is not dict
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin.linear._parameters) is dict and type(twin) is Linear
        torch.testing.assert_close(twin(rows(1)[:, :6] * 0), model(rows(1) * 0))


def test_change_of_a_copy_is_no_event_of_the_original() -> None:
    model = Plain()
    watch = settled(watching(model))
    shallow, deep = copy.copy(model), copy.deepcopy(model)
    shallow.k = 5
    deep.inner.weight = nn.Parameter(torch.ones(2, 2))
    assert not watch.changed


def test_watching_keeps_no_module_alive() -> None:
    model = Plain()
    watch = watching(model)
    reference = weakref.ref(model.inner)
    del model
    gc.collect()
    assert reference() is None
    assert not list(watch.modules)


def test_class_with_a_setattr_of_its_own_keeps_it() -> None:
    class Doubling(Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            doubled: Any = value * 2 if name == "scale" and isinstance(value, float) else value
            super().__setattr__(name, doubled)

    model = Doubling()
    call = compiled(model)
    assert_same(call, model, rows(4))
    model.scale = 5.0
    assert model.scale == 10.0
    refuses(call, rows(4), match="self.scale == 4.0, now it is 10.0")


def test_subclass_made_after_its_base_is_watched_tells_too() -> None:
    compiled(Linear())(rows(4))

    class Late(Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            nn.Module.__setattr__(self, name, value)

    model = Late()
    call = compiled(model)
    call(rows(4))
    model.scale = 3.0
    refuses(call, rows(4), match="self.scale")


def test_a_watch_that_was_collected_leaves_no_counting_dict_to_a_trace() -> None:
    model = nn.Linear(2, 2)
    Watch().cover([model])
    gc.collect()
    assert type(model._parameters) is not dict
    with plain_dicts(watched_modules()):
        assert type(model._parameters) is dict


def test_closing_the_last_watch_puts_ordinary_dicts_back() -> None:
    model = nn.Linear(2, 2)
    first, second = Watch(), Watch()
    first.cover([model])
    second.cover([model])
    first.close()
    assert type(model._parameters) is not dict
    second.close()
    assert type(model._parameters) is dict
    assert list(model._parameters) == ["weight", "bias"]
