"""What only a card shows of captured forwards: real graphs, streams, memory, and what a device refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import piecework
import piecework_silly_attention as silly
from capture_models import in_threads
from models import example
from piecework import CaptureError, CompilationConfig, SplittingOp, counters, set_compile_context

pytestmark = pytest.mark.cuda

ATTENTION = "aten::scaled_dot_product_attention"
ops = torch.ops.models


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    piecework.reset()


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q, self.up, self.down = (
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, 2 * hidden),
            nn.Linear(2 * hidden, hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        out = torch.empty_like(q)
        ops.attn(q, x, out)
        return x + self.down(nn.functional.gelu(self.up(out)))


class Stack(nn.Module):
    def __init__(self, num_layers: int = 4, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(hidden) for _ in range(num_layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def compiled(model: Any, capturable: bool = False, **settings: Any) -> Any:
    made = [SplittingOp("models::attn", capturable=capturable, rows_independent=True)]
    config = CompilationConfig(**{"splitting_ops": made, **settings})
    return piecework.compile(model, config=config, dynamic_arg_dims={"x": 0})


def rows(size: int, hidden: int = 64) -> torch.Tensor:
    return torch.randn(size, hidden, device="cuda")


def close(result: Any, expected: Any) -> None:
    torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-3)


def test_silly_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_LEVEL", "3")
    program = example("silly")
    piecework.set_attention_ops(["silly.attention"])
    model = program.SillyModel()
    with counters.expect(num_graphs_seen=1, num_pieces_seen=5, num_piece_compilations=3, num_graph_captures=6):
        with set_compile_context([1, 2]):
            for size in (100, 2, 1):
                silly.reset_calls()
                model(torch.randn(size, device="cuda"))
                assert silly.num_calls() == 2
        assert model(torch.zeros(2, device="cuda")).tolist() == [3.0, 1.0]


def test_toy_llama_of_12_layers_is_captured_26_times() -> None:
    model = example("toy_llama").build(12, tractable=False).cuda()
    config = CompilationConfig(splitting_ops=["toy::attention"], capture_sizes=[1, 2])
    call = piecework.compile(model, config=config)
    with counters.expect(num_graph_captures=26, num_piece_compilations=3):
        for size in (2, 1, 2, 1):
            ids = torch.randint(0, 100, (size,), device="cuda")
            positions = torch.arange(size, device="cuda")
            close(call(ids, positions), model(ids, positions))


@pytest.mark.parametrize("capturable", [False, True])
def test_a_thousand_replays_with_random_sizes_are_equal_to_eager(capturable: bool) -> None:
    model = Stack().cuda()
    call = compiled(model, capturable, capture_sizes=[1, 2, 4, 8, 16, 32])
    piecework.capture(call, [1, 2, 4, 8, 16, 32], rows(3))
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        x = rows(int(torch.randint(1, 34, (1,), generator=generator)))
        close(call(x), model(x))
    report = piecework.report(call)
    assert sum(size.num_calls + size.num_padded_calls for size in report.sizes) > 900


def test_eight_threads_with_streams_of_their_own() -> None:
    # Inputs are made on the CPU: while torch captures, it refuses random numbers on the device to all threads.
    model = Stack().cuda()
    call = compiled(model, capture_sizes=[1, 2, 4, 8])
    close(call(x := rows(8)), model(x))

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(125):
                x = torch.randn(int(torch.randint(1, 9, (1,), generator=generator)), 64, generator=generator).cuda()
                close(call(x), model(x))

    in_threads(8, work)


def test_buffers_and_inputs_are_written_once_per_call() -> None:
    class Model(nn.Module):
        total: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(64))

        def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            self.total.add_(1)
            cache.add_(x.sum(0))
            x.mul_(2)
            return ops.scale3(x) + cache + self.total

    model, reference = Model().cuda(), Model().cuda()
    config = CompilationConfig(splitting_ops=["models::scale3"], capture_sizes=[4])
    call = piecework.compile(model, config=config, dynamic_arg_dims={"x": 0})
    caches = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    for _ in range(5):
        x = rows(4)
        x2 = x.clone()
        close(call(x, caches[0]), reference(x2, caches[1]))
        close(x, x2)
        close(caches[0], caches[1])
        close(model.total, reference.total)


def test_random_numbers_go_on_from_replay_to_replay() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    call = piecework.compile(model, config=CompilationConfig(splitting_ops=(), capture_sizes=[4]))
    results = [call(torch.zeros(4, device="cuda")) for _ in range(4)]
    assert len({tuple(result.tolist()) for result in results}) == 4
    torch.cuda.manual_seed(1)
    first = call(torch.zeros(4, device="cuda"))
    torch.cuda.manual_seed(1)
    assert torch.equal(call(torch.zeros(4, device="cuda")), first)


@pytest.mark.parametrize("kind", ["item", "nonzero", "copy", "sync"])
def test_what_a_device_refuses_is_named_and_harms_nothing(kind: str) -> None:
    @torch.library.custom_op(f"refused::{kind}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        if kind == "item":
            return x * x.sum().item()
        if kind == "nonzero":
            return x * len(x.nonzero())
        if kind == "copy":
            return x.cpu().cuda()
        torch.cuda.synchronize()
        return x.clone()

    op.register_fake(torch.empty_like)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = ops.scale3(x + 1)
        return op(y.relu()) + 1  # the line of the user's

    config = CompilationConfig(splitting_ops=["models::scale3"], capture_sizes=[4], on_failure="error")
    call = piecework.compile(model, config=config)
    close(call(x := rows(3)), model(x))
    for _ in range(2):
        with pytest.raises(CaptureError, match=rf"refused::{kind} in piece_1.*test_plans_cuda.py") as caught:
            call(rows(4))
        assert "splitting op" in str(caught.value)
    close(call(x := rows(3)), model(x))
    torch.rand(3, device="cuda")
    other = Stack().cuda()
    captured = compiled(other, capture_sizes=[4])
    with counters.expect(num_graph_captures=5):
        for _ in range(3):
            close(captured(x := rows(4)), other(x))


def test_memory_of_35_sizes_is_little_more_than_that_of_the_largest() -> None:
    sizes = [1, 2, 4, *range(8, 257, 8)]
    model = Stack(num_layers=8, hidden=1024).cuda().bfloat16()
    x = torch.randn(2, 1024, device="cuda", dtype=torch.bfloat16)
    alone = compiled(model)
    piecework.capture(alone, [256], x)
    largest = piecework.report(alone).memory
    piecework.release(alone)
    call = compiled(model)
    piecework.capture(call, sizes, x)
    together = piecework.report(call).memory
    assert largest is not None and together is not None
    print(f"pool: {largest.pool_bytes} for 256 rows, {together.pool_bytes} for {len(sizes)} sizes")
    assert together.pool_bytes <= 1.12 * largest.pool_bytes
    for size in (1, 24, 256):
        x = torch.randn(size, 1024, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(call(x), model(x), atol=0.1, rtol=0.1)


def test_release_gives_the_memory_back() -> None:
    model = Stack(num_layers=2, hidden=2048).cuda()
    x = rows(256, 2048)
    call = compiled(model, capture_sizes=())
    close(call(x), model(x))
    torch.cuda.empty_cache()

    def capture_and_release() -> int:
        piecework.capture(call, [256], x)
        call(x)
        piecework.release(call)
        call(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    first = capture_and_release()  # cuBLAS keeps a workspace for each stream
    assert capture_and_release() <= first
    assert capture_and_release() <= first


def test_a_capture_of_the_users_own_holds_the_pieces() -> None:
    model = Stack().cuda()
    call = compiled(model, capture_sizes=[4])
    x = rows(4)
    call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(x)
    x.copy_(rows(4))
    graph.replay()
    close(result, model(x))
    close(call(x), model(x))


def test_parameters_may_be_replaced_and_moved() -> None:
    model = Stack().cuda()
    call = compiled(model, capture_sizes=[4])
    close(call(x := rows(4)), model(x))
    first, second = (layer.get_submodule("q") for layer in (model.layers[0], model.layers[1]))
    first.weight = nn.Parameter(torch.randn(64, 64, device="cuda"))
    close(call(x := rows(4)), model(x))
    second.get_parameter("weight").data = torch.randn(64, 64, device="cuda")
    for _ in range(20):
        call(rows(4))
    close(call(x := rows(4)), model(x))
    model.load_state_dict({name: torch.randn_like(value) * 0.1 for name, value in model.state_dict().items()})
    close(call(x := rows(4)), model(x))


def test_static_inputs_and_outputs() -> None:
    model = Stack().cuda()
    call = compiled(model, capture_sizes=[4, 8], static_inputs=["x"], static_outputs=True)
    kept = rows(8)
    for _ in range(3):
        for size in (8, 4):
            kept.copy_(rows(8))
            close(call(kept[:size]), model(kept[:size]))
    assert piecework.report(call).num_recaptures == 0
    result = call(kept)
    assert result.data_ptr() == call(kept).data_ptr()
    assert result.untyped_storage().nbytes() == result.nbytes  # Nobody who saves it saves the pool.


@pytest.mark.parametrize("capturable", [False, True])
def test_views_by_absolute_offsets_are_taken_from_the_right_memory(capturable: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                qkv = self.qkv(x)
                q, k = (qkv.as_strided((x.size(0), 64), (192, 1), offset) for offset in (0, 64))
                out = torch.empty_like(x)
                ops.attn(q, k, out)
                x = x + self.out(out + qkv[:, 128:])
            return x

    model = Model().cuda()
    call = compiled(model, capturable, capture_sizes=[2, 4], max_padding_ratio=1)
    for size in (4, 2, 4, 2):
        close(call(x := rows(size)), model(x))


@pytest.mark.parametrize("capturable", [False, True])
def test_models_on_two_devices_are_captured_in_pools_of_their_own(capturable: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    torch.cuda.set_device(0)
    models_by_device = {index: Stack().to(f"cuda:{index}") for index in (0, 1)}
    calls = {index: compiled(model, capturable, capture_sizes=[2, 4]) for index, model in models_by_device.items()}
    with counters.expect(num_graph_captures=2 * 2 * (1 if capturable else 5)):
        for size in (4, 2, 3, 7, 4):  # Captured, replayed, padded, too large.
            for index, call in calls.items():
                x = torch.randn(size, 64, device=f"cuda:{index}")
                result = call(x)
                assert (result.device, torch.cuda.current_device()) == (x.device, 0)
                close(result, models_by_device[index](x))
    second = calls[1]
    with torch.cuda.device(1), torch.cuda.stream(torch.cuda.Stream(1)):
        x = torch.randn(4, 64, device="cuda:1")
        close(second(x), models_by_device[1](x))
    with pytest.raises(piecework.TraceDepartureError, match="device of argument x"):
        second(torch.randn(4, 64, device="cuda:0"))
    models_by_device[1].to("cuda:0")
    with pytest.raises(piecework.TraceDepartureError, match="device of"):
        second(x)
