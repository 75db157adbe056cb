"""The custom ops of piecework_triton_ops: equal to plain PyTorch at every level, and the report says what ran."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import piecework
import piecework_triton_ops as ops
from models import example
from piecework import CompilationConfig, CustomOp, testing
from triton_cases import DEVICES, random

PLUGIN = "plugin 'triton_ops' (registered by this program)"
TOLERANCES = {torch.float32: (4e-5, 4e-5, 1), torch.bfloat16: (2**-5, 2**-6, 6)}
"""Relative, absolute, of codes of 8 bits: layer after layer rounds, and hands its differences on. What a
kernel alone may differ by is tested in the other modules."""


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@contextlib.contextmanager
def triton_ops(device: str) -> Iterator[None]:
    """Have this plugin alone, and on a device the one that captures."""
    with testing.plugins(named("triton_ops"), *([captures()] if device == "cuda" else [])):
        yield


def named(name: str) -> Any:
    class Plugin:
        piecework_custom_op_enabled = staticmethod(ops.piecework_custom_op_enabled)
        piecework_custom_op_implementations = staticmethod(ops.piecework_custom_op_implementations)

    made: Any = Plugin()
    made.name = name
    return made


def captures() -> Any:
    import piecework_cudagraph

    return piecework_cudagraph


def config(level: int, custom_ops: str, **more: Any) -> CompilationConfig:
    return CompilationConfig(level=level, custom_ops=custom_ops, piece_compiler="eager", **more)


class RotatedNorms(nn.Module):
    """Every layer of the plugin, in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ops.RMSNorm(32), ops.RMSNorm(32)
        self.silu, self.gelu, self.tanh = ops.SiluAndMul(), ops.GeluAndMul(), ops.GeluAndMul("tanh")
        self.neox = ops.RotaryEmbedding(16, 64)
        self.gptj = ops.RotaryEmbedding(16, 64, rotary_dim=8, is_neox=False)
        self.dynamic = ops.QuantizeDynamic(torch.int8)
        self.static = ops.QuantizeStatic(0.02, torch.int8)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed, total = self.second(self.first(x), x)
        q, k = (part.unflatten(-1, (2, 16)) for part in (normed, total))
        q, k = self.gptj(positions, *self.neox(positions, q, k))
        joined = torch.cat([q.flatten(1), k.flatten(1)], dim=-1)
        gated = self.silu(joined) + self.gelu(joined) + self.tanh(joined)
        return (q, k, gated, *self.dynamic(gated), self.static(gated))


def compare(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    rtol, atol, codes = TOLERANCES[dtype]
    for result, wanted in zip(results, expected, strict=True):
        if wanted.dtype == torch.int8:
            assert (result.int() - wanted.int()).abs().max() <= codes
        else:
            torch.testing.assert_close(result, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("custom_ops", ["all", "none"])
@pytest.mark.parametrize("level", range(4))
def test_layers_equal_plain_pytorch_at_every_level(
    level: int, custom_ops: str, device: str, dtype: torch.dtype
) -> None:
    model = RotatedNorms().to(device, dtype).eval()
    plain = piecework.compile(model, config=config(0, "none"))
    with triton_ops(device):
        compiled = piecework.compile(model, config=config(level, custom_ops), dynamic_arg_dims={"positions": 0, "x": 0})
        for rows in (5, 1, 2):
            positions = torch.arange(rows, device=device) * 7
            x = random(rows, 32, dtype=dtype, device=device, seed=rows)
            compare(compiled(positions, x), plain(positions, x), dtype)
        made = piecework.report(compiled).custom_ops
    assert {op.op_name for op in made} == set(ops.OP_NAMES) - {"copy_inputs"}
    assert {op.plugin for op in made} == {PLUGIN if custom_ops == "all" else None}
    assert {op.is_on for op in made} == {custom_ops == "all"}
    assert all(custom_ops in op.why for op in made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("custom_ops", ["all", "none", ""])
@pytest.mark.parametrize("level", range(4))
def test_toy_llama_equals_eager_at_every_level_and_the_report_shows_what_ran(
    level: int, custom_ops: str, device: str
) -> None:
    toy_llama = example("toy_llama")
    model = toy_llama.build(2, hidden=32, mlp=48, vocab=40, tractable=False).to(device)
    exact = toy_llama.build(2, hidden=32, mlp=48, vocab=40, tractable=False).double().to(device)
    with triton_ops(device):
        settings = config(level, custom_ops, splitting_ops=["toy::attention"], capture_sizes=[3])
        compiled = piecework.compile(model, config=settings, dynamic_arg_dims={"input_ids": 0, "positions": 0})
        for rows in (4, 3, 1, 3):
            ids = torch.arange(rows, device=device) * 5
            positions = torch.arange(rows, device=device)
            torch.testing.assert_close(compiled(ids, positions).double(), exact(ids, positions), rtol=1e-4, atol=1e-4)
        report = piecework.report(compiled)
    is_on = custom_ops == "all" or custom_ops == "" and level < 3
    made = {op.op_name: op for op in report.custom_ops}
    for name, num_places in (("rms_norm", 5), ("silu_and_mul", 2)):
        assert made[name].num_places == num_places
        assert made[name].implementation == (name if is_on else "forward_native")
        assert f"custom op {name}" in str(report)
    assert ("copy_inputs" in made) == (level == 3)


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_of_captured_calls_are_copied_by_one_launch_at_level_3(device: str) -> None:
    def function(ids: torch.Tensor, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x * ids[:, None] + mask[:, None]

    with triton_ops(device):
        compiled = piecework.compile(function, config=config(3, "", capture_sizes=[4, 8]))
        for rows in (8, 4, 7, 3, 8, 4):
            ids = torch.arange(rows, device=device)
            given = (ids, ids > 1, random(rows, 24, dtype=torch.bfloat16, device=device, seed=rows))
            torch.testing.assert_close(compiled(*given), function(*given))
        (made,) = piecework.report(compiled).custom_ops
        strided = piecework.compile(function, config=config(3, "", capture_sizes=[4]))
        given = (torch.arange(8, device=device)[::2], torch.ones(4, device=device) > 0, torch.ones(4, 2, device=device))
        for _ in range(2):
            torch.testing.assert_close(strided(*given), function(*given))
    assert (made.op_name, made.implementation, made.plugin) == ("copy_inputs", "copy_inputs", PLUGIN)
    assert made.why == f"{PLUGIN} says so"


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_kernels_do_not_take_runs_by_the_native_body(device: str) -> None:
    class Bare(CustomOp, op_name="rms_norm"):
        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    x = random(2, 8, dtype=torch.float64, device=device)
    positions = torch.arange(2, device=device)
    norm = ops.RMSNorm(8).to(device, torch.float64)
    rotary = ops.RotaryEmbedding(4, 8).to(device)
    with triton_ops(device):
        torch.testing.assert_close(norm(x), x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
        torch.testing.assert_close(Bare()(x.float()), x.float() + 1)
        q = x.view(2, 2, 4)
        assert rotary(positions, q, q)[0].dtype == torch.float64
        compiled = piecework.compile(nn.Sequential(Bare()), config=config(2, "all"))
        compiled(x.float())
        (made,) = piecework.report(compiled).custom_ops
    assert made.skipped == {f"rms_norm of {PLUGIN}": "the op has no attribute 'weight', 'eps'"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", [0, 1])
def test_training_has_gradients(level: int, device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), ops.RMSNorm(8), ops.SiluAndMul()).to(device)
    with triton_ops(device), torch.enable_grad():
        compiled = piecework.compile(model, config=config(level, "all"))
        compiled(random(3, 8, device=device)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_tables_come_anew_from_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(ops.RotaryEmbedding(8, 16), ops.QuantizeStatic(0.5, torch.int8))
    model = model.to_empty(device="cpu").bfloat16()
    torch.testing.assert_close(model[0].cos_sin, ops.RotaryEmbedding(8, 16).cos_sin)
    torch.testing.assert_close(model[1].scale, torch.tensor([0.5]))


def test_every_way_to_switch_the_interpreter_on_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, is_on in (("1", True), ("true", True), ("ON", True), ("0", False), ("", False)):
        monkeypatch.setenv("TRITON_INTERPRET", word)
        brought = ops.piecework_custom_op_implementations("rms_norm", torch.device("cpu"))
        assert (brought is not None) == is_on


def test_on_a_cpu_without_the_interpreter_nothing_is_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ops.OP_NAMES:
        assert ops.piecework_custom_op_implementations(name, torch.device("cpu")) is None
    assert ops.piecework_custom_op_implementations("other", torch.device("cuda", 0)) is None


def test_the_plugin_turns_on_nothing_but_the_copies() -> None:
    assert ops.piecework_custom_op_enabled("copy_inputs") is True
    assert {ops.piecework_custom_op_enabled(name) for name in ops.OP_NAMES[:-1]} == {None}


def test_arguments_of_layers_are_checked() -> None:
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh', got 'fast'"):
        ops.GeluAndMul("fast")
    rotary = ops.RotaryEmbedding(8, 4).bfloat16()
    assert rotary.cos_sin.dtype == torch.float32
    assert rotary.to("meta").cos_sin.device.type == "meta"
    assert set(ops.RotaryEmbedding(8, 4).state_dict()) == set()
    assert set(ops.QuantizeStatic(0.5, torch.int8).state_dict()) == {"scale"}
