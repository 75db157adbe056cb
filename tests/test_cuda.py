"""What only a CUDA device shows: the levels on it, Triton code from Inductor, streams and autocast there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import piecework
import piecework_silly_attention as silly
from models import example
from piecework import CompilationConfig, counters

pytestmark = pytest.mark.cuda


class Silly(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 3
        for _ in range(2):
            out = torch.empty_like(x)
            torch.ops.silly.attention(x, x, x, out)
            x = out - 1.5
        return x + 1


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        return self.down(nn.functional.gelu(self.up(y)))


def compiled(model: nn.Module, level: int, *ops: str) -> nn.Module:
    return piecework.compile(model, config=CompilationConfig(level=level, splitting_ops=ops))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_silly_gives_its_result_at_each_level(level: int) -> None:
    model = compiled(Silly(), level, "silly::attention")
    silly.reset_calls()
    for rows in (100, 2, 1, 2):
        result = model(torch.zeros(rows, device="cuda"))
    assert result.tolist() == [3.0, 1.0]
    assert silly.num_calls() == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", [2, 3])
def test_one_trace_serves_all_sizes(level: int, dtype: torch.dtype) -> None:
    model = Linears().to("cuda", dtype)
    fast = compiled(model, level, "aten::scaled_dot_product_attention")
    with torch.no_grad(), counters.expect(num_graphs_seen=1):
        for rows in (5, 1, 17, 64, 2, 1000, 0):
            x = torch.randn(rows, 64, device="cuda", dtype=dtype)
            tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
            torch.testing.assert_close(fast(x), model(x), atol=tolerance, rtol=tolerance)


def test_exact_sizes_run_code_of_their_own() -> None:
    model = Linears().cuda()
    config = CompilationConfig(level=3, splitting_ops=["aten::scaled_dot_product_attention"], compile_sizes=[8])
    fast = piecework.compile(model, config=config)
    with torch.no_grad(), counters.expect(num_piece_compilations=2):
        for rows in (8, 9):
            x = torch.randn(rows, 64, device="cuda")
            torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)


def test_toy_llama_compiles_three_unique_pieces() -> None:
    model = example("toy_llama").build(12, tractable=False).cuda()
    expected = {"num_pieces_seen": 25, "num_capturable_pieces_seen": 13, "num_piece_compilations": 3}
    config = CompilationConfig(level=3, splitting_ops=["toy::attention"])
    fast = piecework.compile(model, config=config)
    with torch.no_grad(), counters.expect(num_graphs_seen=1, **expected):
        for rows in (16, 2, 1, 33):
            ids = torch.randint(0, 100, (rows,), device="cuda")
            positions = torch.arange(rows, device="cuda")
            torch.testing.assert_close(fast(ids, positions), model(ids, positions), atol=1e-3, rtol=1e-3)


def test_another_device_departs_from_the_trace() -> None:
    fast = compiled(Silly(), 3, "silly::attention")
    fast(torch.zeros(4, device="cuda"))
    with pytest.raises(piecework.TraceDepartureError, match=r"device of argument x was cuda:0 .* now it is cpu"):
        fast(torch.zeros(4))


def test_a_model_moved_to_the_device_departs_and_is_traced_anew_after_release() -> None:
    model = Linears()
    fast = compiled(model, 3, "aten::scaled_dot_product_attention")
    with torch.no_grad():
        fast(torch.randn(4, 64))
        model.cuda()
        x = torch.randn(4, 64, device="cuda")
        with pytest.raises(piecework.TraceDepartureError, match="device"):
            fast(x)
        piecework.release(fast)
        torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)


def test_autocast_on_the_device_is_part_of_the_trace() -> None:
    model = Linears().cuda()
    fast = compiled(model, 3, "aten::scaled_dot_product_attention")
    x = torch.randn(4, 64, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert fast(x).dtype is torch.bfloat16
        torch.testing.assert_close(fast(x), model(x), atol=3e-2, rtol=3e-2)
    with torch.no_grad(), pytest.raises(piecework.TraceDepartureError, match="autocast"):
        fast(x)


def test_calls_follow_the_stream_of_the_caller() -> None:
    fast = compiled(Silly(), 3, "silly::attention")
    fast(torch.zeros(4, device="cuda"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        x = torch.full((4,), 5.0, device="cuda")
        result = fast(x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(result, Silly()(torch.full((4,), 5.0, device="cuda")))
