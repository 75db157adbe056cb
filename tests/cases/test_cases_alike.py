"""Cases about what looks alike, in one process: code may be shared, weights and constants never."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import demo
from piecework import counters
from ways import Way, check


class Model(nn.Module):
    """Two splitting ops, weights, a constant."""

    def __init__(self, k: float = 2.0, *, bias: bool = True) -> None:
        super().__init__()
        self.k, self.l, self.last = k, nn.Linear(6, 6, bias=bias), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = demo.scale3(torch.relu(self.l(x)) * self.k)
        out = torch.empty_like(y)
        demo.attn(y * 2, y, out)
        return self.last(out)


@pytest.mark.parametrize("order", ["AB", "BA", "AA", "A"])
def test_c43_models_whose_pieces_look_alike(way: Way, order: str) -> None:
    models = [Model(bias=letter == "B").to(way.device) for letter in order]
    calls = [way.compile(model, captures=[4]) for model in models]
    for n in (4, 3):
        pairs = list(zip(calls, models, strict=True))
        for call, model in (*pairs, *reversed(pairs)):
            check(call, model, way.rand(n, 6))


def test_c43_instances_that_differ_by_a_constant_only(way: Way) -> None:
    models = [Model(k=k).to(way.device) for k in (2.0, 3.0)]
    models[1].load_state_dict(models[0].state_dict())
    calls = [way.compile(model, captures=[4]) for model in models]
    x = way.rand(4, 6)
    results = [check(call, model, x) for call, model in zip(calls, models, strict=True)]
    assert not torch.allclose(results[0], results[1])


class Twins(nn.Module):
    """Layers that are alike but for their weights; what ``differs`` names is a constant of the second."""

    def __init__(self, differs: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.k = [2.0, 3.0 if differs == "number" else 2.0, 2.0]
        self.dim = [0, 0, 0] if differs != "dim" else [0, 1, 0]
        self.kind = [torch.float64] * 3 if differs != "dtype" else [torch.float64, torch.float16, torch.float64]
        self.zero = [0.0, -0.0 if differs == "sign of zero" else 0.0, 0.0]
        self.is_transposed = [False, differs == "layout", False]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            y = torch.relu(layer(x)) * self.k[i]
            y = y + torch.copysign(torch.ones_like(y), y.new_full((), self.zero[i]))
            y = y - y.to(self.kind[i]).sum(self.dim[i], keepdim=True).to(y.dtype)
            x = demo.scale3(y.t().contiguous().t() if self.is_transposed[i] else y)
        return x


def test_c43_pieces_of_one_model_that_look_alike_keep_their_weights(way: Way) -> None:
    model = Twins().to(way.device)
    call = way.compile(model, captures=[4])
    with counters.expect(num_unique_pieces=1 * (way.level == 3), num_graphs_seen=1):
        check(call, model, way.rand(4, 6))
    with torch.no_grad():
        model.layers[1].get_parameter("weight").mul_(-1)
    for n in (4, 3):
        check(call, model, way.rand(n, 6))


@pytest.mark.parametrize("differs", ["number", "dim", "dtype", "sign of zero", "layout"])
def test_c43_pieces_of_one_model_that_differ_in_one_thing(eager_way: Way, differs: str) -> None:
    """What decides is the form that a compiler is given; eager pieces are shared by the same form."""
    model = Twins(differs)
    call = eager_way.compile(model, captures=[4])
    # What comes after another layout is given that layout, so that it is one more.
    with counters.expect(num_unique_pieces=3 if differs == "layout" else 2, num_graphs_seen=1):
        check(call, model, torch.randn(4, 6))
    for n in (4, 3):
        check(call, model, torch.randn(n, 6))
