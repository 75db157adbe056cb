"""Sizes are captured when it is time to, and answered by replays: in emulation, on the real API."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any, cast

import pytest
import torch
from torch import nn

import models
import piecework
import piecework_silly_attention as op
from capture_models import INDEPENDENT, OPS, Noting, check_sizes, in_threads, ops, plans_of, simple
from piecework import CaptureError, CompilationConfig, SplittingOp, counters, set_compile_context, testing
from piecework.plugins import PluginManager, use_plugin_manager

pytestmark = pytest.mark.usefixtures("emulation")

NO_CAPTURER = {"capture_sizes": (1, 2), "capturer": "none"}


def config(**settings: Any) -> CompilationConfig:
    return CompilationConfig(**{"splitting_ops": OPS, "piece_compiler": "eager", **settings})


class Block(nn.Module):
    """Two cuts: an op that writes into its output, and one that returns a fresh tensor."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).relu()
        out = torch.empty_like(h)
        ops.attn(h, x, out)
        return self.b(ops.scale3(out + h)) - x


def compiled(model: Any = None, **settings: Any) -> tuple[Any, Any]:
    model = model if model is not None else Block()
    return piecework.compile(model, config=config(**settings), dynamic_arg_dims={"x": 0}), model


# --- which sizes are captured, and when ---


def test_silly_program_captures_three_pieces_at_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_LEVEL", "3")
    monkeypatch.setenv("PIECEWORK_CONFIG", '{"piece_compiler": "eager"}')
    model = models.example("silly").SillyModel()
    piecework.set_attention_ops(["silly.attention"])
    expected = {"num_graphs_seen": 1, "num_pieces_seen": 5, "num_capturable_pieces_seen": 3, "num_graph_captures": 6}
    with counters.expect(**expected, num_graph_replays=6), set_compile_context([1, 2]):
        for rows in (100, 2, 1):
            op.reset_calls()
            model(torch.randn(rows))
            assert op.num_calls() == 2
    op.reset_calls()
    with counters.expect(num_graph_captures=0, num_graph_replays=3):
        torch.testing.assert_close(model(torch.zeros(2)), torch.tensor([3.0, 1.0]))
    assert op.num_calls() == 2


def test_size_that_the_trace_does_not_hold_for_is_not_captured() -> None:
    def squeezes(x: torch.Tensor) -> torch.Tensor:
        return (ops.scale3(x + 1) * 2).squeeze(0)

    def compares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x + 1)[: y.shape[0]] if y.shape[0] < x.shape[0] else ops.scale3(x)

    call, _ = compiled(squeezes, capture_sizes=(1, 4))
    call(torch.randn(4, 3))
    with pytest.raises(CaptureError, match="size 1 of .*squeezes can't be captured: the trace holds for rows != 1"):
        piecework.capture(call, [1], torch.randn(4, 3))
    dims = {"x": {0: "n"}, "y": {0: "m"}}
    sizes = ({"n": 8, "m": 8}, {"n": 8, "m": 2})
    asserted = config(capture_sizes=sizes, rows_independent=True)
    call = piecework.compile(compares, config=asserted, dynamic_arg_dims=dims)
    with counters.expect(num_graph_captures=1, num_graph_replays=2):
        for n, m in ((8, 2), (7, 2), (7, 6)):
            if m == 6:
                with pytest.warns(piecework.PieceworkWarning, match=r"the trace holds for .*\bm\b"):
                    call(torch.randn(n, 3), torch.randn(m, 3))
                continue
            x, y = torch.randn(n, 3), torch.randn(m, 3)
            torch.testing.assert_close(call(x, y), compares(x, y))


@pytest.mark.parametrize(("is_split", "num_captures"), [(True, 26), (False, 2)])
def test_toy_llama_of_12_layers(is_split: bool, num_captures: int) -> None:
    toy = models.example("toy_llama")
    model = toy.ToyLlama(12, hidden=16, mlp=32, vocab=100)
    settings = config(splitting_ops=("toy::attention",) if is_split else (), capture_sizes=(1, 2))
    call = piecework.compile(model, config=settings)
    with counters.expect(num_graph_captures=num_captures, num_graph_replays=2 * num_captures):
        for rows in (2, 1, 2, 1):
            ids, positions = torch.randint(0, 100, (rows,)), torch.arange(rows)
            torch.testing.assert_close(call(ids, positions), model(ids, positions))


def test_sizes_of_the_context_are_captured_at_their_first_call_and_replayed_after_it() -> None:
    call, model = compiled(capture_sizes=None, max_padding_ratio=1)
    with set_compile_context([2]), counters.expect(num_graph_captures=3, num_graph_replays=3):
        check_sizes(call, model, 5, 2)
    with counters.expect(num_graph_captures=0, num_graph_replays=6):
        check_sizes(call, model, 2, 2, 3)


def test_a_size_seen_three_times_is_captured_by_default() -> None:
    call, model = compiled(max_padding_ratio=1)
    with counters.expect(num_graph_captures=0):
        check_sizes(call, model, 2, 3, 2)
    with counters.expect(num_graph_captures=3, num_graph_replays=6):
        check_sizes(call, model, 2, 3, 2)


def test_a_decorated_class_captures_nothing_unasked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PIECEWORK_LEVEL", "3")
    monkeypatch.setenv("PIECEWORK_CONFIG", '{"piece_compiler": "eager", "splitting_ops": []}')

    @piecework.support_torch_compile
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = Model()
    with counters.expect(num_graph_captures=0):
        for _ in range(5):
            model(torch.zeros(3))
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "nothing is captured on cpu, since no sizes are named; call it in" in said
    with counters.expect(num_graph_captures=1), piecework.set_compile_context([3]):
        model(torch.zeros(3))


@pytest.mark.parametrize("settings", [{"capture_sizes": ()}, {"capturer": "none", "capture_sizes": (2,)}])
def test_capture_can_be_switched_off(settings: dict[str, Any]) -> None:
    call, model = compiled(**settings)
    with counters.expect(num_graph_captures=0), set_compile_context([2]):
        check_sizes(call, model, 2, 2, 2, 2)


def test_two_named_dims() -> None:
    settings = config(capture_sizes=[{"batch": 2, "seq": 3}])
    call = piecework.compile(simple, config=settings, dynamic_arg_dims={"x": {0: "batch", 1: "seq"}})
    with counters.expect(num_graph_captures=2, num_graph_replays=4):
        for shape in ((2, 3), (3, 2), (2, 3)):
            x = torch.randn(*shape)
            torch.testing.assert_close(call(x), simple(x))


def test_a_size_for_other_dims_is_refused() -> None:
    call, _ = compiled(capture_sizes=[{"batch": 2}])
    with pytest.raises(piecework.ConfigError, match="value for each of rows"):
        call(torch.randn(2, 4))


def test_exact_sizes_are_captured_from_their_own_code() -> None:
    sizes: list[Any] = []
    with testing.plugins(Noting(lambda piece: sizes.append(piece.size))):
        call, model = compiled(piece_compiler=None, compile_sizes=(2,), capture_sizes=(2,))
        check_sizes(call, model, 2)
        assert set(sizes) == {2}
        check_sizes(call, model, 3)
        assert None in sizes


# --- full graphs, order, unpacking ---


def test_capturable_ops_join_their_neighbours_into_one_graph() -> None:
    settings = {"splitting_ops": [SplittingOp(name, capturable=True) for name in OPS], "capture_sizes": (2, 3)}
    call, model = compiled(**settings)
    with counters.expect(num_graph_captures=2, num_graph_replays=3):
        check_sizes(call, model, 2, 3, 2)


def test_an_op_may_be_capturable_at_some_sizes() -> None:
    asked: list[Any] = []

    def at_two(size: Any) -> bool:
        asked.append(size)
        return size == 2

    settings = {"splitting_ops": [SplittingOp(name, capturable=at_two) for name in OPS], "capture_sizes": (2, 3)}
    call, model = compiled(**settings)
    with counters.expect(num_graph_captures=1 + 3):
        check_sizes(call, model, 2, 3)
    assert set(asked) == {2, 3}


@pytest.mark.parametrize("capturable", [False, True])
def test_ops_with_several_results(capturable: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            up, down = ops.pair(x * 2)
            out = torch.empty_like(up)
            ops.attn(up, down, out)
            return out + down, up, up[:1]

    call, model = compiled(
        Model(), capture_sizes=(3,), splitting_ops=[SplittingOp(name, capturable=capturable) for name in OPS]
    )
    x = torch.randn(3, 4)
    for _ in range(2):
        results = call(x)
        torch.testing.assert_close(results, model(x))
        results[1].zero_()
        assert results[2].eq(0).all()  # a view of its base, as in eager


# --- capture() ---


def test_capture_takes_all_sizes_at_once_the_largest_first_and_runs_no_op() -> None:
    call, model = compiled(capture_sizes=())
    with counters.expect(num_graph_captures=9, num_graph_replays=0):
        piecework.capture(call, [1, 4, 2], torch.randn(3, 4))
    assert [size.size for size in piecework.report(call).sizes] == [4, 2, 1]
    with counters.expect(num_graph_captures=0, num_graph_replays=9):
        check_sizes(call, model, 1, 2, 4)


def test_capture_takes_arguments_by_name_and_a_decorated_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_LEVEL", "3")
    monkeypatch.setenv("PIECEWORK_CONFIG", '{"piece_compiler": "eager", "splitting_ops": []}')

    @piecework.support_torch_compile
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
            return x * factor

    model = Model()
    with counters.expect(num_graph_captures=2):
        piecework.capture(model, [1, 2], {"x": torch.randn(5), "factor": 3.0})
    with counters.expect(num_graph_replays=1):
        torch.testing.assert_close(model(torch.ones(2), 3.0), torch.full((2,), 3.0))


def test_capture_sees_parameters_that_were_replaced_since_the_last_call() -> None:
    call, model = compiled(capture_sizes=())
    piecework.capture(call, [2, 3], torch.randn(2, 4))
    check_sizes(call, model, 2)
    model.a.weight = nn.Parameter(torch.randn(4, 4))
    with counters.expect(num_graph_captures=6):
        piecework.capture(call, [2, 3], torch.randn(2, 4))
    with counters.expect(num_graph_captures=0, num_graph_replays=6):
        check_sizes(call, model, 2, 3)
    model.a = nn.Linear(4, 4).double()
    with pytest.raises(piecework.TraceDepartureError, match="dtype"):
        piecework.capture(call, [4], torch.randn(2, 4))


def test_capture_says_what_it_can_not_do() -> None:
    call, _ = compiled()
    with pytest.raises(piecework.ConfigError, match="list of sizes"):
        piecework.capture(call, cast(Any, 4), torch.randn(3, 4))
    with pytest.raises(piecework.ConfigError, match="a tuple of arguments or a dict"):
        piecework.capture(call, [4], cast(Any, "x"))
    with pytest.raises(piecework.ConfigError, match=r"example_inputs don't fit Block\(x.*missing a required argument"):
        piecework.capture(call, [4], ())
    with pytest.raises(CaptureError, match="warm-up.*dtype"):
        piecework.capture(call, [4], torch.randn(2, 4).double())
    with pytest.raises(piecework.ConfigError, match=r"write list\(range\(1, 4\)\)"):
        piecework.capture(call, range(1, 4), torch.randn(3, 4))
    with pytest.raises(piecework.ConfigError, match="zero rows"):
        piecework.capture(call, [4], torch.randn(0, 4))
    piecework.capture(call, [4], torch.randn(2, 4))
    with pytest.raises(piecework.TraceDepartureError, match="dtype of argument x"):
        piecework.capture(call, [5], torch.randn(2, 4).double())
    with pytest.raises(CaptureError, match="nothing captures"):
        piecework.capture(compiled(capturer="none")[0], [4], torch.randn(2, 4))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_capture_at_a_lower_level_says_that_it_does_nothing(level: int, caplog: pytest.LogCaptureFixture) -> None:
    piecework.capture(compiled(level=level)[0], [4], torch.randn(2, 4))
    assert f"runs at level {level}, so nothing is captured" in caplog.text


@pytest.mark.parametrize(
    ("settings", "level"),
    [({"capture_sizes": (1, 2)}, "WARNING"), ({"capture_sizes": "auto"}, "INFO"), ({}, "INFO"), (NO_CAPTURER, None)],
)
def test_sizes_that_nobody_can_capture_are_said(
    settings: dict[str, Any], level: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "piecework")
    with use_plugin_manager(PluginManager()), set_compile_context([3]), torch.no_grad():
        call, block = compiled(**settings)
        torch.testing.assert_close(call(x := torch.randn(2, 4)), block(x))
    said = [record.levelname for record in caplog.records if "nothing here captures graphs" in record.message]
    assert said == [level] * (level is not None)


# --- padding ---


def independent(**settings: Any) -> tuple[Any, Any]:
    return compiled(**{"splitting_ops": INDEPENDENT, "capture_sizes": (4, 8), **settings})


def test_a_call_is_padded_to_the_next_captured_size() -> None:
    call, model = independent()
    with counters.expect(num_graph_captures=3, num_graph_replays=9):
        check_sizes(call, model, 3, 4, 3)
    with counters.expect(num_graph_captures=3, num_graph_replays=6):
        check_sizes(call, model, 5, 6)
    sizes = {size.size: size for size in piecework.report(call).sizes}
    assert (sizes[4].num_calls, sizes[4].num_padded_calls, sizes[4].num_padding_rows) == (1, 2, 2)
    assert (sizes[8].num_calls, sizes[8].num_padded_calls, sizes[8].num_padding_rows) == (0, 2, 5)


def test_padding_is_refilled_and_never_left_over() -> None:
    seen: list[torch.Tensor] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return x * 3

    op = SplittingOp("models::scale3", rows_independent=True, implementation=look)

    def function(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x + 1)

    call = piecework.compile(function, config=config(splitting_ops=[op], capture_sizes=(4,)), dynamic_arg_dims={"x": 0})
    call(torch.full((4, 4), 7.0))
    seen.clear()
    torch.testing.assert_close(call(torch.full((3, 4), 5.0)), torch.full((3, 4), 18.0))
    (rows,) = seen
    torch.testing.assert_close(rows[3], torch.ones(4))  # zero plus one, and not the seven of before


@pytest.mark.parametrize("ratio", [1, 1.2])
def test_padding_stops_at_the_ratio(ratio: float) -> None:
    call, model = independent(max_padding_ratio=ratio)
    with counters.expect(num_graph_captures=0):
        check_sizes(call, model, 3)
    if ratio > 1:
        (why,) = piecework.report(call).num_uncaptured_calls[3]
        assert "more than 1.2 times" in why


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"splitting_ops": OPS}, "models::attn"),
        ({"rows_independent": False}, "rows_independent=False"),
        ({"static_inputs": ["x"]}, "argument x is kept in place"),
    ],
)
def test_nothing_is_padded_where_rows_may_depend_on_each_other(settings: dict[str, Any], words: str) -> None:
    call, model = independent(**settings)
    with counters.expect(num_graph_captures=0):
        check_sizes(call, model, 3)
    (why,) = piecework.report(call).num_uncaptured_calls[3]
    assert words in why
    assert words in str(piecework.report(call))


def test_a_scale_of_the_whole_tensor_is_not_padded() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().max()

    call = piecework.compile(model, config=config(splitting_ops=(), capture_sizes=(4,)), dynamic_arg_dims={"x": 0})
    check_sizes(call, model, 3)
    (why,) = piecework.report(call).num_uncaptured_calls[3]
    assert "max" in why and "test_plans.py" in why


def test_the_user_may_assert_that_rows_are_independent() -> None:
    call, model = compiled(capture_sizes=(4,), rows_independent=True)
    with counters.expect(num_graph_captures=3, num_graph_replays=3):
        check_sizes(call, model, 3)


# --- freeze, release ---


def test_after_freeze_nothing_is_captured() -> None:
    call, model = compiled(capture_sizes=(2, 3), max_padding_ratio=1)
    check_sizes(call, model, 2)
    piecework.freeze()
    with counters.expect(num_graph_captures=0, num_graph_replays=3):
        check_sizes(call, model, 2, 3)
    assert "freeze() was called" in piecework.report(call).num_uncaptured_calls[3]
    with pytest.raises(piecework.CompileError, match=r"before piecework.freeze\(\)"):
        compiled()[0](torch.randn(2, 4))
    with pytest.raises(CaptureError, match=r"freeze\(\) was called"):
        piecework.capture(call, [7], torch.randn(2, 4))


def test_release_gives_the_memory_back_and_starts_anew() -> None:
    call, model = compiled(capture_sizes=(2,))
    check_sizes(call, model, 2)
    memory = piecework.report(call).memory
    assert memory is not None and memory.pool_bytes > 0
    plans = plans_of(call)
    piecework.release(call)
    assert plans.pool.capturer.memory().pool_bytes == 0
    with counters.expect(num_graphs_seen=1, num_graph_captures=3):
        check_sizes(call, model, 2)


def test_graphs_are_gone_as_soon_as_they_are_released() -> None:
    call, model = independent()
    check_sizes(call, model, 3, 4, 3)
    plans = plans_of(call)
    recording = weakref.ref(plans.plans[4].recording)
    del plans
    gc.disable()
    try:
        piecework.release(call)
        assert recording() is None
    finally:
        gc.enable()


def test_graphs_are_gone_before_their_pool_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    call, model = compiled(capture_sizes=(2, 3), max_padding_ratio=1)
    check_sizes(call, model, 2, 3)
    capturer = plans_of(call).pool.capturer
    held: list[int] = []
    give_back = capturer.release
    monkeypatch.setattr(capturer, "release", lambda: (held.append(capturer.memory().driver_bytes), give_back()))
    piecework.release(call)
    assert held == [0]


# --- threads ---


def test_calls_of_many_threads_are_each_their_own() -> None:
    call, model = compiled(capture_sizes=(2, 3, 5))
    call(torch.randn(2, 4))

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(int(torch.randint(1, 7, (1,), generator=generator)), 4, generator=generator)
            torch.testing.assert_close(call(x), model(x))

    in_threads(8, work)
