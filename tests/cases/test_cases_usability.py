"""Cases about compiled modules as objects: copies, pickles, many instances, subclasses."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import demo
import piecework
from demo import Scaled
from piecework import CompilationConfig, ConfigError, counters, ignore_torch_compile, support_torch_compile
from piecework.api import forward_of
from ways import EAGER_WAY, Way, check, close


@support_torch_compile
class Decorated(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return demo.scale3(self.l(x)) * 2


def eager(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return type(model).forward(model, x)


def call_in_child(model: Any, x: torch.Tensor) -> list[Any]:
    with torch.no_grad():
        return model(x).tolist()


# --- C70 ---


@pytest.mark.parametrize("is_called_before", [False, True])
def test_c70_copy_pickle_and_save_a_compiled_module(way: Way, tmp_path: Path, is_called_before: bool) -> None:
    model, x = Scaled().to(way.device), way.rand(4, 6)
    keys = list(model.state_dict())
    call = way.compile(model, captures=[4])
    if is_called_before:
        call(x)
    deep, pickled, shallow = copy.deepcopy(call), pickle.loads(pickle.dumps(call)), copy.copy(call)
    assert list(call.state_dict()) == keys and isinstance(call, nn.Module) and isinstance(deep, Scaled)
    with torch.no_grad():
        deep.get_parameter(keys[0]).zero_()
    zeroed = copy.deepcopy(model)
    with torch.no_grad():
        zeroed.get_parameter(keys[0]).zero_()
    with counters.expect(num_graphs_seen=3 + (not is_called_before)):
        for one, reference in ((deep, zeroed), (call, model), (pickled, model), (shallow, model)):
            check(one, reference, x)
    forwards = [forward_of(one, "test") for one in (deep, call, pickled, shallow)]
    assert len({id(forward.compiled) for forward in forwards}) == 4
    assert all((forward.config, forward.dims) == (forwards[1].config, forwards[1].dims) for forward in forwards)
    assert forwards[1].config is not None
    torch.save(call.state_dict(), tmp_path / "state.pt")
    fresh = Scaled().to(way.device)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
    check(fresh, model, x)


def test_c70_compiled_module_in_a_process_pool() -> None:
    """With eager pieces: what crosses is the module and its settings."""
    model, x = Scaled(), torch.randn(4, 6)
    call = EAGER_WAY.compile(model)
    call(x)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        result = torch.tensor(pool.submit(call_in_child, call, x).result(timeout=120))
    close(result, model(x).detach())


def test_c70_copies_of_a_decorated_instance(eager_way: Way) -> None:
    """Eager pieces: what differs from ``compile`` is where the compiled state is kept."""
    set_process_config(eager_way)
    model, x = Decorated(), torch.randn(4, 6)
    check(model, lambda x: eager(model, x), x)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.copy(model)):
        with counters.expect(num_graphs_seen=1):
            check(twin, lambda x: eager(model, x), x)
    assert list(model.state_dict()) == ["l.weight", "l.bias"]


def test_c70_copy_outlives_the_graphs_of_the_original(eager_way: Way) -> None:
    model = Scaled()
    call = eager_way.compile(model, captures=[4])
    check(call, model, torch.randn(4, 6))
    twin = copy.deepcopy(call)
    piecework.release(call)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        model.l.weight.zero_()
    check(twin, reference, torch.randn(4, 6))
    check(call, model, torch.randn(4, 6))


# --- C71 ---


@support_torch_compile
class A(nn.Module):
    def __init__(self, k: float) -> None:
        super().__init__()
        self.k, self.l = k, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return demo.scale3(self.l(x)) * self.k


class B(A):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class C(A):
    pass


@support_torch_compile
class D(A):
    """Decorated besides its base."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) - 1


def set_process_config(way: Way) -> None:
    piecework.set_torch_compile_backend(way.pieces)
    piecework.set_compilation_config(
        CompilationConfig(
            level=way.level,
            splitting_ops=demo.OPS,
            piece_compiler=way.pieces,
            capture_sizes=(4,) if way.is_captured else (),
        )
    )


def test_c71_many_instances_and_subclasses(way: Way) -> None:
    set_process_config(way)
    # Constants of their own where that costs no compile; the limit that instances could reach is 8 in either case.
    constants = [float(i) for i in range(20)] if way.pieces == "eager" else [float(i % 2) for i in range(9)]
    models = [*(A(k) for k in constants), B(0.0), C(1.0), D(1.0)]
    models = [model.to(way.device) for model in models]
    x = way.rand(4, 6)
    with counters.expect(num_graphs_seen=len(models)):
        for _ in range(2):
            for model in models:
                check(model, lambda x, model=model: eager(model, x), x)
    if way.is_captured:
        with counters.expect(num_graph_replays=2 * len(models), num_graph_captures=0):
            for model in models:
                model(x)


def test_c71_instances_inside_one_another(way: Way) -> None:
    """They become a part of the one that is called."""
    nested = nn.Sequential(A(1.0), B(2.0), A(3.0)).to(way.device)
    call = way.compile(nested, captures=[4], dims={"input": 0})

    def reference(x: torch.Tensor) -> torch.Tensor:
        for model in nested:
            x = eager(model, x)
        return x

    with counters.expect(num_graphs_seen=1):
        for n in (4, 3, 4):
            check(call, reference, way.rand(n, 6))


def test_c71_what_can_not_be_decorated_and_a_second_decoration() -> None:
    for odd in (int, lambda x: x, nn.Module, A(1.0)):
        with pytest.raises(ConfigError, match="support_torch_compile decorates a subclass of torch.nn.Module"):
            support_torch_compile(odd)  # pyright: ignore[reportArgumentType, reportCallIssue] - what a user may try


def test_c71_class_decorated_twice_is_traced_once_per_instance(eager_way: Way) -> None:
    """Eager pieces: the class is what is looked at."""

    class Twice(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return demo.scale3(self.l(x)) + 2

    decorated = support_torch_compile(support_torch_compile(Twice))
    set_process_config(eager_way)
    model = decorated()
    with counters.expect(num_graphs_seen=1):
        for _ in range(2):
            check(model, lambda x: eager(model, x), torch.randn(4, 6))


def test_c71_undecorated_subclass_of_a_decorated_class(eager_way: Way) -> None:
    @ignore_torch_compile
    class Plain(A):
        pass

    set_process_config(eager_way)
    model = Plain(2.0)
    with counters.expect(num_graphs_seen=0):
        check(model, lambda x: eager(model, x), torch.randn(4, 6))
    with counters.expect(num_graphs_seen=1):
        A(2.0)(torch.randn(4, 6))
