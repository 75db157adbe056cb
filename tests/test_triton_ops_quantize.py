"""Quantisation as Triton kernels, bit for bit against plain PyTorch, and against what was quantised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework_triton_ops import native
from piecework_triton_ops.launching import MAX_BLOCK, Launch
from piecework_triton_ops.quantize import CODES, quantize_dynamic, quantize_launch, quantize_static
from triton_cases import DEVICES, FLOATS, HIDDEN, random

OPS = torch.ops.piecework_triton_ops
EACH_CODE = pytest.mark.parametrize("code", CODES, ids=str)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.is_contiguous()
    assert torch.equal(actual.view(torch.int8), expected.view(torch.int8))


@EACH_CODE
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_codes_and_scales_are_those_of_plain_pytorch(
    device: str, code: torch.dtype, dtype: torch.dtype, hidden: int
) -> None:
    x = random(3, hidden, dtype=dtype, device=device) * torch.tensor(
        [[1e-3], [1.0], [50.0]], dtype=dtype, device=device
    )
    codes, scales = OPS.quantize_dynamic(x, code)
    expected, expected_scales = native.quantize_dynamic(x, code)
    assert torch.equal(scales, expected_scales)
    assert_same_bits(codes, expected)
    assert_same_bits(OPS.quantize_static(x, scales, code), codes)


@EACH_CODE
@pytest.mark.parametrize("device", DEVICES)
def test_codes_times_scales_are_near_what_was_quantised(device: str, code: torch.dtype) -> None:
    x = random(4, 1000, device=device).double()
    codes, scales = quantize_dynamic(x.float(), code)
    exact_scales = x.abs().amax(-1, keepdim=True) / native.largest(code)
    torch.testing.assert_close(scales.double(), exact_scales, rtol=1e-6, atol=0)
    # Half a step of integers; half a unit in the last place of floats, or of their subnormals.
    relative, absolute = {
        torch.int8: (0, 0.5),
        torch.float8_e4m3fn: (2**-4, 2**-10),
        torch.float8_e5m2: (2**-3, 2**-17),
    }[code]
    error = (codes.double() * scales - x).abs()
    assert bool((error <= relative * x.abs() * 1.00001 + absolute * scales * 1.00001).all())


@pytest.mark.parametrize("device", DEVICES)
def test_halves_are_rounded_to_even_and_the_ends_clamped(device: str) -> None:
    x = torch.tensor([[-200.0, -127.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 126.5, 127.5, 1e9]], device=device)
    expected = [-127, -127, -2, -2, 0, 0, 2, 2, 126, 127, 127]
    assert OPS.quantize_static(x, torch.ones(1, device=device), torch.int8).tolist() == [expected]
    x = torch.tensor([[-1e9, -449.0, 17.0, 19.0, 448.0, 1e9]], device=device)
    codes = OPS.quantize_static(x, torch.ones((), device=device), torch.float8_e4m3fn)
    assert codes.float().tolist() == [[-448, -448, 16, 20, 448, 448]]


@EACH_CODE
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_of_zeros_gives_zeros(device: str, code: torch.dtype) -> None:
    x = torch.zeros(2, 32, device=device)
    x[1, 3] = 1e-44  # Less than any scale.
    codes, scales = quantize_dynamic(x, code)
    assert codes.float().abs().max() == 0
    assert scales.flatten().tolist() == [2.0**-126] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_infinity_and_nan_show_in_the_scale(device: str) -> None:
    x = torch.ones(3, 40, device=device)
    x[0, 7], x[1, 9] = torch.inf, torch.nan
    for launch in (None, Launch(num_warps=1, block=16)):
        scales = quantize_dynamic(x, torch.float8_e4m3fn, launch)[1].flatten()
        assert scales[0].isinf()
        assert scales[1].isnan()
        assert scales[2].isfinite()


@EACH_CODE
@pytest.mark.parametrize("device", DEVICES)
def test_static_scale_of_one_element_or_one_per_row(device: str, code: torch.dtype) -> None:
    x = random(2, 3, 40, device=device)
    one, per_row = torch.tensor(0.03, device=device), random(2, 3, 1, device=device, seed=1).abs() + 0.01
    for scale in (one, one.view(1), per_row, per_row.expand(2, 3, 2)[..., :1]):
        assert_same_bits(OPS.quantize_static(x, scale, code), native.quantize_static(x, scale, code))
    assert_same_bits(
        OPS.quantize_static(x[:1, :1], per_row[:1, :1], code), native.quantize_static(x[:1, :1], per_row[:1, :1], code)
    )


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides_and_leading_dims(device: str) -> None:
    whole = random(4, 6, 24, device=device)
    for x in (whole[..., :12], whole[..., ::2], whole[::2, 1:, 3:15], whole.transpose(0, 1), whole[0, 0]):
        codes, scales = quantize_dynamic(x, torch.int8)
        expected, expected_scales = native.quantize_dynamic(x, torch.int8)
        assert_same_bits(codes, expected)
        assert torch.equal(scales, expected_scales)
        assert_same_bits(quantize_static(x, scales, torch.int8), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (3, 0, 8)])
def test_no_rows_and_one_row(device: str, shape: tuple[int, ...]) -> None:
    x = random(*shape, device=device)
    codes, scales = OPS.quantize_dynamic(x, torch.int8)
    assert (codes.shape, scales.shape) == (shape, (*shape[:-1], 1))
    assert OPS.quantize_static(x, scales, torch.int8).shape == shape


@EACH_CODE
@pytest.mark.parametrize("device", DEVICES)
def test_rows_too_long_for_registers_are_walked_over(device: str, code: torch.dtype) -> None:
    x = random(2, MAX_BLOCK + 100, device=device)
    assert quantize_launch(2, x.shape[1]).block < x.shape[1]
    codes, scales = quantize_dynamic(x, code)
    expected, expected_scales = native.quantize_dynamic(x, code)
    assert torch.equal(scales, expected_scales)
    assert_same_bits(codes, expected)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, 9),
    hidden=st.integers(1, 200),
    rows=st.sampled_from([1, 2, 8]),
    block=st.sampled_from([16, 256]),
)
@pytest.mark.parametrize("device", DEVICES)
def test_launch_constants_do_not_change_results(device: str, num_rows: int, hidden: int, rows: int, block: int) -> None:
    x, launch = random(num_rows, hidden, device=device), Launch(num_warps=2, block=block, rows=rows)
    codes, scales = quantize_dynamic(x, torch.float8_e4m3fn, launch)
    assert_same_bits(codes, native.quantize_dynamic(x, torch.float8_e4m3fn)[0])
    assert_same_bits(quantize_static(x, scales, torch.float8_e4m3fn, launch), codes)


@EACH_CODE
@pytest.mark.parametrize("device", DEVICES)
def test_ops_are_well_formed(device: str, code: torch.dtype) -> None:
    x = random(3, 5, 16, device=device)
    torch.library.opcheck(OPS.quantize_dynamic.default, (x, code))
    torch.library.opcheck(OPS.quantize_static.default, (x, torch.ones(3, 5, 1, device=device), code))
    torch.library.opcheck(OPS.quantize_static.default, (x, torch.ones(1, device=device), code))


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused(device: str) -> None:
    x, scale = random(3, 16, device=device), torch.ones(1, device=device)
    with pytest.raises(TypeError, match=r"dtype must be one of torch.int8, .*, got torch.int16"):
        OPS.quantize_dynamic(x, torch.int16)
    with pytest.raises(TypeError, match=r"quantize_dynamic: x must be torch.float32 or .*, got torch.int8"):
        OPS.quantize_dynamic(x.to(torch.int8), torch.int8)
    with pytest.raises(ValueError, match=r"rows of x must have elements, got the shape \(2, 0\)"):
        OPS.quantize_dynamic(x[:2, :0], torch.int8)
    with pytest.raises(ValueError, match=r"scale must have the shape \(3, 1\) \(one per row of x\), .*, got \(2,\)"):
        OPS.quantize_static(x, scale.expand(2), torch.int8)
    with pytest.raises(TypeError, match=r"scale must be torch.float32, got torch.float16"):
        OPS.quantize_static(x, scale.half(), torch.int8)
