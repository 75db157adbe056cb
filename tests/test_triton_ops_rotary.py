"""Rotary position embeddings as a Triton kernel, against float64 and against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from piecework_triton_ops import native
from piecework_triton_ops.launching import Launch
from piecework_triton_ops.rotary import rotary_embedding
from triton_cases import DEVICES, FLOATS, assert_rounded_once, random

OPS = torch.ops.piecework_triton_ops
LAYOUTS = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])


def table(rotary_dim: int, device: str, dtype: torch.dtype = torch.float32, num_positions: int = 50) -> torch.Tensor:
    angles = torch.arange(num_positions)[:, None] / 100 ** (torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype).to(device)


def exact(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate as complex numbers."""
    rotary_dim, result = cos_sin.shape[1], x.double().clone()
    turned = torch.complex(*cos_sin.double()[positions.long()].chunk(2, dim=-1))[:, None]
    half = rotary_dim // 2
    first, second = (
        (slice(half), slice(half, rotary_dim)) if is_neox else (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
    )
    product = torch.complex(result[..., first], result[..., second]) * turned
    result[..., first], result[..., second] = product.real, product.imag
    return result


def case(device: str, dtype: torch.dtype, head_dim: int, num_tokens: int = 5) -> tuple[torch.Tensor, ...]:
    positions = torch.randint(50, (num_tokens,), generator=torch.Generator().manual_seed(0)).to(device)
    q = random(num_tokens, 6, head_dim, dtype=dtype, device=device, seed=1)
    return positions, q, random(num_tokens, 2, head_dim, dtype=dtype, device=device, seed=2)


@LAYOUTS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (64, 32), (20, 12), (7, 2)])
def test_rotation_is_exact_but_for_one_rounding(
    device: str, dtype: torch.dtype, head_dim: int, rotary_dim: int, is_neox: bool
) -> None:
    positions, q, k = case(device, dtype, head_dim)
    cos_sin = table(rotary_dim, device)
    q_out, k_out = OPS.rotary_embedding(positions, q, k, cos_sin, is_neox)
    assert_rounded_once(q_out, exact(q, positions, cos_sin, is_neox), dtype)
    assert_rounded_once(k_out, exact(k, positions, cos_sin, is_neox), dtype)
    assert torch.equal(q_out[..., rotary_dim:], q[..., rotary_dim:])


@LAYOUTS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_tables_and_positions_of_each_dtype(
    device: str, table_dtype: torch.dtype, index_dtype: torch.dtype, is_neox: bool
) -> None:
    positions, q, k = case(device, torch.bfloat16, 32)
    cos_sin = table(16, device, table_dtype)
    q_out, _ = rotary_embedding(positions.to(index_dtype), q, k, cos_sin, is_neox)
    assert_rounded_once(q_out, exact(q, positions, cos_sin, is_neox), torch.bfloat16)


@LAYOUTS
@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_one_projection_and_other_strides(device: str, is_neox: bool) -> None:
    positions, cos_sin = torch.arange(10, device=device)[::2], table(16, device)
    q, k, _ = random(5, 6 * 16 + 2 * 16 + 2 * 16, device=device).split([96, 32, 32], dim=-1)
    q, k = q.view(5, 6, 16), k.view(5, 2, 16)
    wide = table(32, device)[:, ::2]
    for query, key, cosines in ((q, k, cos_sin), (q.transpose(1, 2).contiguous().transpose(1, 2), k, wide)):
        q_out, k_out = rotary_embedding(positions, query, key, cosines, is_neox)
        assert_rounded_once(q_out, exact(query, positions, cosines, is_neox), torch.float32)
        assert_rounded_once(k_out, exact(key, positions, cosines, is_neox), torch.float32)


@LAYOUTS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_launch_constants_do_not_change_results(device: str, heads: int, is_neox: bool) -> None:
    positions, q, k = case(device, torch.float32, 16)
    cos_sin = table(12, device)
    q_out, k_out = rotary_embedding(positions, q, k, cos_sin, is_neox, Launch(num_warps=2, block=16, rows=heads))
    assert_rounded_once(q_out, exact(q, positions, cos_sin, is_neox), torch.float32)
    assert_rounded_once(k_out, exact(k, positions, cos_sin, is_neox), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one_token(device: str, num_tokens: int) -> None:
    positions, q, k = case(device, torch.float32, 16, num_tokens)
    q_out, k_out = OPS.rotary_embedding(positions, q, k, table(16, device), True)
    assert (q_out.shape, k_out.shape) == (q.shape, k.shape)


@LAYOUTS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_plain_pytorch_says_the_same(device: str, dtype: torch.dtype, is_neox: bool) -> None:
    positions, q, k = case(device, dtype, 20)
    cos_sin = table(12, device)
    actual = OPS.rotary_embedding(positions, q, k, cos_sin, is_neox)
    expected = native.rotary_embedding(positions, q, k, cos_sin, is_neox)
    torch.testing.assert_close(actual, expected, rtol=torch.finfo(dtype).eps + 2e-6, atol=1e-6)


@LAYOUTS
@pytest.mark.parametrize("device", DEVICES)
def test_op_is_well_formed(device: str, is_neox: bool) -> None:
    positions, q, k = case(device, torch.float32, 16)
    torch.library.opcheck(OPS.rotary_embedding.default, (positions, q, k, table(12, device), is_neox))


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused(device: str) -> None:
    positions, q, k = case(device, torch.float32, 16)
    cos_sin, op = table(16, device), OPS.rotary_embedding
    with pytest.raises(ValueError, match=r"q and k must be \[tokens, heads, head_dim\], got the shapes \(5, 96\)"):
        op(positions, q.flatten(1), k, cos_sin, True)
    with pytest.raises(ValueError, match=r"positions must have the shape \(5,\) of the first dim of q, got \(4,\)"):
        op(positions[:4], q, k, cos_sin, True)
    with pytest.raises(ValueError, match=r"k must have the shape \(5, 2, 16\) .*, got \(5, 2, 8\)"):
        op(positions, q, k[..., :8], cos_sin, True)
    with pytest.raises(ValueError, match=r"rotary_dim from 2 to head_dim, 16, got the shape \(50, 32\)"):
        op(positions, q, k, table(32, device), True)
    with pytest.raises(TypeError, match=r"cos_sin must be torch.float32 .*, got torch.float16"):
        op(positions, q, k, cos_sin.half(), True)
    with pytest.raises(TypeError, match=r"positions must be torch.int32 or torch.int64, got torch.float32"):
        op(positions.float(), q, k, cos_sin, True)
