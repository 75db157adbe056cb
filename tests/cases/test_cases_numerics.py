"""Cases about numerics: how far results may be from those in float64, and what may not change them at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import demo
from piecework import CustomOp
from ways import Way

# --- C68 ---


class Gate(CustomOp, op_name="c68_gate"):
    """Normalise, scale and gate; the kernel rounds once, at its end."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        # Not float(), which would take digits from the reference.
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y.to(x.dtype) * self.weight) * x.sigmoid()

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        normed = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normed * self.weight.float() * y.sigmoid()).to(x.dtype)

    forward_cuda = forward_cpu


class Gated(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.gate = Gate(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return demo.scale3(self.gate(x))


def error_of(result: torch.Tensor, reference: torch.Tensor) -> float:
    return (result.double() - reference).abs().max().item()


@pytest.mark.parametrize("switch", ["none", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_c68_kernel_or_native_body_in_each_dtype(way: Way, dtype: torch.dtype, switch: str) -> None:
    """No worse than 1.5 times eager against float64; the same bits captured, padded and repeated; eager's at level 0.

    In float32 Inductor's own kernel may be further off, by some of the last bits: no worse than ``torch.compile`` then.
    """
    torch.manual_seed(0)
    x, weight = way.rand(64, 512, dtype=torch.float64).to(dtype), way.rand(512, dtype=torch.float64).to(dtype)
    model = Gated(weight).requires_grad_(False)
    reference = Gated(weight.double()).requires_grad_(False)(x.double())

    def at_level_0(custom_ops: str) -> torch.Tensor:
        return Way(0, "eager").compile(Gated(weight), custom_ops=custom_ops)(x)

    with torch.no_grad():
        base = error_of(at_level_0("none"), reference)
        if way.pieces == "inductor" and dtype == torch.float32:
            base = max(base, error_of(torch.compile(Gated.forward)(model, x), reference))
        call = way.compile(model, captures=[64], custom_ops=switch)
        results = [call(x).clone() for _ in range(3)]
        # Without a graph, and padded up to one of another size.
        for captures in ([], [128]):
            results.append(way.compile(model, captures=captures, custom_ops=switch)(x).clone())
        for result in results:
            assert result.dtype == dtype
            assert error_of(result, reference) <= 1.5 * base + 1e-6
            assert torch.equal(result, results[0])
        if way.pieces == "eager":
            assert torch.equal(results[0], at_level_0(switch))
