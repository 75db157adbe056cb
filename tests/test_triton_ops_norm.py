"""Root mean square normalisation as a Triton kernel, against float64 and against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework_triton_ops import native
from piecework_triton_ops.launching import INTERPRETED, MAX_BLOCK, Launch
from piecework_triton_ops.norm import add_rms_norm, norm_launch, rms_norm
from triton_cases import DEVICES, FLOATS, HIDDEN, assert_rounded_once, random

OPS = torch.ops.piecework_triton_ops
EPS = 1e-5


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    value = x.double()
    return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_norm_is_exact_but_for_one_rounding(device: str, dtype: torch.dtype, hidden: int) -> None:
    x, weight = random(5, hidden, dtype=dtype, device=device), random(hidden, device=device, seed=1)
    assert_rounded_once(OPS.rms_norm(x, weight, EPS), exact(x, weight), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("hidden", [7, 128, 4097])
def test_residual_is_added_and_the_rounded_sum_normalised(device: str, dtype: torch.dtype, hidden: int) -> None:
    x, residual = (random(3, hidden, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = random(hidden, dtype=dtype, device=device, seed=2)
    normed, total = OPS.add_rms_norm(x, residual, weight, EPS)
    if INTERPRETED and dtype == torch.bfloat16:  # The interpreter truncates to it.
        torch.testing.assert_close(total.float(), x.float() + residual.float(), rtol=2**-7, atol=1e-6)
    else:
        assert torch.equal(total, x + residual)
    assert_rounded_once(normed, exact(total, weight), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
def test_weight_of_any_dtype_is_multiplied_in_float32(device: str, weight_dtype: torch.dtype) -> None:
    x, weight = (
        random(2, 96, dtype=torch.bfloat16, device=device),
        random(96, dtype=weight_dtype, device=device, seed=1),
    )
    assert_rounded_once(rms_norm(x, weight, EPS), exact(x, weight), torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_eps_bounds_the_scale_of_small_rows(device: str) -> None:
    x, weight = torch.full((2, 64), 1e-4, device=device), torch.ones(64, device=device)
    assert_rounded_once(rms_norm(x, weight, 1e-2), exact(x, weight, 1e-2), torch.float32)
    assert torch.equal(rms_norm(torch.zeros_like(x), weight, EPS), torch.zeros_like(x))


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides_and_leading_dims(device: str) -> None:
    weight = random(12, device=device, seed=1)
    whole = random(4, 6, 24, device=device)
    for x in (
        whole[..., :12],
        whole[..., ::2],
        whole[::2, 1:, 3:15],
        whole.transpose(0, 1)[..., :12],
        whole[0, 0, :12],
    ):
        residual = x.flip(0)
        assert_rounded_once(rms_norm(x, weight, EPS), exact(x, weight), torch.float32)
        normed, total = add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(total, x + residual)
        assert total.is_contiguous()
        assert_rounded_once(normed, exact(total, weight), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (3, 0, 8), (2, 0)])
def test_no_rows_one_row_and_empty_rows(device: str, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, device=device), torch.ones(shape[-1], device=device)
    assert OPS.rms_norm(x, weight, EPS).shape == shape
    assert [one.shape for one in OPS.add_rms_norm(x, x, weight, EPS)] == [shape, shape]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_too_long_for_registers_are_walked_over(device: str) -> None:
    hidden = MAX_BLOCK + 100
    assert norm_launch(2, hidden).block < hidden
    x, residual = (random(2, hidden, device=device, seed=seed) for seed in (0, 1))
    weight = random(hidden, device=device, seed=2)
    assert_rounded_once(rms_norm(x, weight, EPS), exact(x, weight), torch.float32)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert_rounded_once(normed, exact(total, weight), torch.float32)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, 9),
    hidden=st.integers(1, 200),
    rows=st.sampled_from([1, 2, 8]),
    block=st.sampled_from([16, 64, 256]),
    num_warps=st.sampled_from([1, 4]),
)
@pytest.mark.parametrize("device", DEVICES)
def test_launch_constants_do_not_change_results(
    device: str, num_rows: int, hidden: int, rows: int, block: int, num_warps: int
) -> None:
    x, weight = random(num_rows, hidden, device=device), random(hidden, device=device, seed=1)
    launch = Launch(num_warps=num_warps, block=block, rows=rows)
    assert_rounded_once(rms_norm(x, weight, EPS, launch), exact(x, weight), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_plain_pytorch_says_the_same(device: str, dtype: torch.dtype) -> None:
    x, weight = random(4, 100, dtype=dtype, device=device), random(100, device=device, seed=1)
    rtol = torch.finfo(dtype).eps + 2e-6  # Each rounds once, so they may differ by a unit in the last place.
    torch.testing.assert_close(native.rms_norm(x, weight, EPS), rms_norm(x, weight, EPS), rtol=rtol, atol=1e-6)
    normed, total = native.rms_norm(x, weight, EPS, residual=x)  # The sum is exact, so that rounding is no matter.
    actual = add_rms_norm(x, x, weight, EPS)
    torch.testing.assert_close((normed, total), actual, rtol=rtol, atol=1e-6)


@pytest.mark.cuda
def test_offsets_beyond_32_bits() -> None:
    x, weight = torch.zeros((1 << 18) + 1, 1 << 13, dtype=torch.bfloat16, device="cuda"), torch.ones(1 << 13).cuda()
    x[-1] = random(1 << 13).cuda()
    assert_rounded_once(rms_norm(x, weight, EPS)[-1], exact(x[-1], weight), torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_ops_are_well_formed(device: str) -> None:
    x, weight = random(3, 5, 16, device=device), random(16, device=device, seed=1)
    torch.library.opcheck(OPS.rms_norm.default, (x, weight, EPS))
    torch.library.opcheck(OPS.rms_norm.default, (x[..., ::2], weight[::2], EPS))
    torch.library.opcheck(OPS.add_rms_norm.default, (x, x.clone(), weight, EPS))


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused(device: str) -> None:
    x, weight = random(3, 16, device=device), random(16, device=device)
    with pytest.raises(
        ValueError, match=r"rms_norm: weight must have the shape \(16,\) of the last dim of x, got \(8,\)"
    ):
        OPS.rms_norm(x, weight[:8], EPS)
    with pytest.raises(TypeError, match=r"rms_norm: x must be torch.float32 or .*, got torch.int32"):
        OPS.rms_norm(x.int(), weight, EPS)
    with pytest.raises(TypeError, match=r"add_rms_norm: residual must be torch.float32, got torch.float16"):
        OPS.add_rms_norm(x, x.half(), weight, EPS)
    with pytest.raises(ValueError, match=r"residual must have the shape \(3, 16\) of x, got \(1, 16\)"):
        OPS.add_rms_norm(x, x[:1], weight, EPS)
    with pytest.raises(ValueError, match="weight must be on meta"):
        OPS.rms_norm(x.to("meta"), weight, EPS)
    with pytest.raises(ValueError, match="x must have 1 dims or more"):
        OPS.rms_norm(x[0, 0], weight, EPS)
