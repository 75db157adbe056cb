"""``torch.compile(model, backend="piecework")``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecework
from piecework import ConfigError, GradientNotSupported, SplitError, counters
from piecework import torch_internals as internals
from piecework.testing import plugins
from split_models import CUTS, FailsAt, Recorder, ops, rows

OPTIONS = {"splitting_ops": CUTS, "piece_compiler": "eager"}


class Model(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        y = ops.scale3(self.inner(x))
        out = torch.empty_like(y)
        ops.attn(y, y[:, 1:2], out)
        return out * x.shape[0] + self.count


def by_torch(model: Any, *, dynamic: bool | None = True, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="piecework", options={**OPTIONS, **options}, fullgraph=True, dynamic=dynamic)


def caused_by(error: BaseException) -> BaseException:
    """Return what torch put its own words around."""
    return getattr(error, "inner_exception", None) or error.__cause__ or error


def test_results_and_counters() -> None:
    model, reference = Model(), Model()
    expected = {
        "num_graphs_seen": 1,
        "num_pieces_seen": 3,
        "num_capturable_pieces_seen": 2,
        "num_unique_pieces": 2,
        "num_piece_compilations": 2,
    }
    with plugins(Recorder()), torch.no_grad(), counters.expect(**expected):
        compiled = by_torch(model, piece_compiler="recorder")
        for n in (4, 7, 3):
            torch.testing.assert_close(compiled(rows(n)), reference(rows(n)))
    assert model.count == 3


def test_guards_of_torch_stay() -> None:
    model = Model()
    with torch.no_grad(), counters.expect(num_graphs_seen=2):
        compiled = by_torch(model, dynamic=False)
        for n in (4, 4, 3):
            model.count.zero_()
            result = compiled(rows(n))
            model.count.zero_()
            torch.testing.assert_close(result, model(rows(n)))


def test_name_is_found_without_an_import() -> None:
    program = """
import sys, torch
assert not any(name.partition(".")[0] == "piecework" for name in sys.modules)
assert "piecework" in torch._dynamo.list_backends()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU(), torch.nn.Linear(4, 4))
options = {"splitting_ops": ["aten::silu"], "piece_compiler": "eager"}
with torch.no_grad():
    compiled = torch.compile(model, backend="piecework", options=options)
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), model(x))
from piecework import counters
print(counters.num_pieces_seen, counters.num_capturable_pieces_seen)
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["3", "2"]


def test_misspelt_name_is_refused_by_torch() -> None:
    with pytest.raises(Exception, match="pieceworks"):
        torch.compile(Model(), backend="pieceworks")(rows(4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"splitting_op": ("cut::scale3",)}, "splitting_ops"),
        ({"level": "fast"}, "level"),
        ({"splitting_ops": "cut::scale3"}, "splitting_ops"),
        ({"splitting_ops": ("cut::scal3",)}, "cut::scale3"),
    ],
)
def test_options_are_fields_of_the_config(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words) as caught:
        torch.compile(Model(), backend="piecework", options={"piece_compiler": "eager", **options})(rows(4))
    assert isinstance(caused_by(caught.value), ConfigError)


def test_mode_is_refused() -> None:
    with pytest.raises(Exception, match="takes no mode, got 'reduce-overhead'") as caught:
        torch.compile(Model(), backend="piecework", mode="reduce-overhead")(rows(4))
    assert isinstance(caused_by(caught.value), ConfigError)


def test_level_0_leaves_the_graph_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_LEVEL", "0")
    with counters.expect(num_graphs_seen=0, num_pieces_seen=0), torch.no_grad():
        torch.testing.assert_close(by_torch(Model())(rows(4)), Model()(rows(4)))


def test_gradients_are_refused() -> None:
    model = Model()
    result = by_torch(model)(rows(4))
    assert result.requires_grad
    with pytest.raises(GradientNotSupported, match="Piecework compiled for inference"):
        result.sum().backward()
    with torch.no_grad():
        assert not by_torch(model)(rows(4)).requires_grad


def test_input_that_requires_gradients_is_refused_too() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x + 1) * 2

    compiled = by_torch(model)
    x = rows(4).requires_grad_()
    with pytest.raises(GradientNotSupported):
        compiled(x).sum().backward()
    torch.testing.assert_close(compiled(rows(4)), model(rows(4)))


def test_split_error_comes_through() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ops.scale3(x @ x.t()) @ x

    with pytest.raises(
        Exception, match="stands inside a context of torch.autocast, which can't be cut in two"
    ) as caught:
        by_torch(model)(rows(4))
    assert isinstance(caused_by(caught.value), SplitError)


def test_failed_piece_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    with plugins(FailsAt(2, RuntimeError("not my day"))), pytest.raises(Exception, match=r"piece_1.*not my day"):
        by_torch(Model(), piece_compiler="fails_at")(rows(4))


def test_graph_breaks_give_one_split_graph_each() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = ops.scale3(x + 1)
        torch._dynamo.graph_break()
        return ops.scale3(y) - 1

    with counters.expect(num_graphs_seen=2, num_pieces_seen=4), torch.no_grad():
        compiled = torch.compile(model, backend="piecework", options=dict(OPTIONS))
        torch.testing.assert_close(compiled(rows(4)), model(rows(4)))


def test_int_arguments_and_sizes() -> None:
    def model(x: torch.Tensor, n: int) -> torch.Tensor:
        return ops.scale3(x * n)[: x.shape[0] // 2] + n

    with torch.no_grad():
        compiled = by_torch(model)
        for num_rows, n in ((4, 3), (7, 5), (6, 2)):
            torch.testing.assert_close(compiled(rows(num_rows), n), model(rows(num_rows), n))


def test_a_float_that_changes_is_an_input() -> None:
    """Dynamo passes it as a tensor and reads a number from that, which no size tells."""

    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor + 1

    fast = torch.compile(scaled, backend="piecework", options={"piece_compiler": "eager"})
    x = torch.randn(4, 6)
    with torch.no_grad():
        for factor in (1.0, 2.5, 3.5):
            torch.testing.assert_close(fast(x, factor), scaled(x, factor))


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_graphs_are_captured_behind_the_guards_of_torch(dynamic: bool | None) -> None:
    model, reference = nn.Linear(4, 4), nn.Linear(4, 4)
    reference.load_state_dict(model.state_dict())
    with plugins(), torch.no_grad():
        call = torch.compile(model, backend="piecework", dynamic=dynamic, options={"piece_compiler": "eager"})
        before = counters.snapshot()
        for size in (3, 5, 3, 5, 3, 5, 3, 5, 3, 5, 7):
            x = torch.randn(size, 4)
            torch.testing.assert_close(call(x), reference(x))
        after = counters.snapshot()
        assert after["num_graph_captures"] > before["num_graph_captures"]
        assert after["num_graph_replays"] >= before["num_graph_replays"] + 4
        for change in ("weight", "data"):  # both are arguments whose addresses are compared
            weight = torch.randn(4, 4)
            if change == "weight":
                model.weight = nn.Parameter(weight)
            else:
                model.weight.data = weight
            reference.weight = nn.Parameter(weight.clone())
            for size in (3, 5, 3, 5):
                x = torch.randn(size, 4)
                torch.testing.assert_close(call(x), reference(x))


def test_sizes_of_the_context_are_captured_behind_the_guards_of_torch() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with plugins(), torch.no_grad():
        options = {"piece_compiler": "eager", "max_padding_ratio": 1}
        call = torch.compile(model, backend="piecework", dynamic=True, options=options)
        with piecework.set_compile_context([3]), counters.expect(num_graph_captures=1, num_graph_replays=2):
            for size in (3, 5, 3):
                torch.testing.assert_close(call(torch.ones(size, 4)), torch.full((size, 4), 2.0))
        piecework.freeze()
        with pytest.raises(internals.BackendCompilerFailed, match=r"after piecework.freeze\(\)"):
            torch.compile(lambda x: x + 1, backend="piecework")(torch.ones(3))
