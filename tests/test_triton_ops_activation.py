"""The gate of a feed-forward layer as a Triton kernel, against float64 and against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework_triton_ops import activation, native
from piecework_triton_ops.launching import Launch
from triton_cases import DEVICES, FLOATS, HIDDEN, assert_rounded_once, random

OPS = torch.ops.piecework_triton_ops
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu_and_mul": F.silu,
    "gelu_and_mul": F.gelu,
    "gelu_tanh_and_mul": lambda gate: F.gelu(gate, approximate="tanh"),
}


def exact(op: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return ACTIVATIONS[op](gate) * up


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ACTIVATIONS)
@pytest.mark.parametrize("width", HIDDEN)
def test_gate_is_exact_but_for_one_rounding(device: str, dtype: torch.dtype, op: str, width: int) -> None:
    x = 3 * random(3, 2 * width, dtype=dtype, device=device)
    assert_rounded_once(getattr(OPS, op)(x), exact(op, x), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ACTIVATIONS)
def test_large_gates_neither_overflow_nor_turn_to_nan(device: str, op: str) -> None:
    x = torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4] + [1.0] * 7], device=device)
    assert_rounded_once(getattr(OPS, op)(x), exact(op, x), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ACTIVATIONS)
def test_any_strides_and_leading_dims(device: str, op: str) -> None:
    whole = random(4, 6, 24, device=device)
    for x in (whole[..., :12], whole[..., ::2], whole[::2, 1:, 3:15], whole.transpose(0, 1), whole[0, 0]):
        assert_rounded_once(getattr(OPS, op)(x), exact(op, x), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (3, 0, 8), (2, 0)])
def test_no_rows_one_row_and_empty_rows(device: str, shape: tuple[int, ...]) -> None:
    assert OPS.silu_and_mul(random(*shape, device=device)).shape == (*shape[:-1], shape[-1] // 2)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, 9),
    width=st.integers(1, 100),
    rows=st.sampled_from([1, 2, 8]),
    block=st.sampled_from([16, 64]),
)
@pytest.mark.parametrize("device", DEVICES)
def test_launch_constants_do_not_change_results(device: str, num_rows: int, width: int, rows: int, block: int) -> None:
    x = random(num_rows, 2 * width, device=device)
    actual = activation.silu_and_mul(x, Launch(num_warps=2, block=block, rows=rows))
    assert_rounded_once(actual, exact("silu_and_mul", x), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ACTIVATIONS)
def test_plain_pytorch_says_the_same(device: str, dtype: torch.dtype, op: str) -> None:
    x = random(4, 96, dtype=dtype, device=device)
    actual, expected = getattr(OPS, op)(x), getattr(native, op)(x)
    torch.testing.assert_close(actual, expected, rtol=torch.finfo(dtype).eps + 2e-6, atol=1e-6)


@pytest.mark.cuda
def test_offsets_beyond_32_bits() -> None:
    x = torch.zeros((1 << 18) + 1, 1 << 13, dtype=torch.bfloat16, device="cuda")
    x[-1] = random(1 << 13).cuda()
    assert_rounded_once(OPS.silu_and_mul(x)[-1], exact("silu_and_mul", x[-1]), torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ACTIVATIONS)
def test_ops_are_well_formed(device: str, op: str) -> None:
    packet = getattr(OPS, op)
    torch.library.opcheck(packet.default, (random(3, 5, 16, device=device),))


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"silu_and_mul: the last dim of x must be even, .* got the shape \(2, 7\)"):
        OPS.silu_and_mul(random(2, 7, device=device))
    with pytest.raises(TypeError, match=r"gelu_tanh_and_mul: x must be torch.float32 or .*, got torch.float64"):
        OPS.gelu_tanh_and_mul(random(2, 8, device=device).double())
    with pytest.raises(ValueError, match="gelu_and_mul: x must have 1 dims or more"):
        OPS.gelu_and_mul(random(device=device))
