"""Run with ``pytest``; without a CUDA device by Triton's interpreter, which ``TRITON_INTERPRET=1`` switches on."""

from __future__ import annotations

import piecework_squared_relu
import pytest
import torch
from piecework_squared_relu import SquaredReLU, squared_relu

import piecework
from piecework import CompilationConfig, testing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (0, 4), (2, 3, 1025)])
def test_the_kernel_equals_the_native_body(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=DEVICE)
    torch.testing.assert_close(squared_relu(x), SquaredReLU().forward_native(x))
    torch.testing.assert_close(squared_relu(x.mT), SquaredReLU().forward_native(x.mT))


def test_it_is_a_proper_op_of_torch() -> None:
    torch.library.opcheck(squared_relu, (torch.randn(4, 8, device=DEVICE),))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_model_runs_by_the_kernel_where_it_is_on(level: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), SquaredReLU()).to(DEVICE)
    x = torch.randn(4, 8, device=DEVICE)
    with testing.plugins(piecework_squared_relu), torch.no_grad():
        config = CompilationConfig(level=level, custom_ops="+squared_relu", piece_compiler="eager")
        compiled = piecework.compile(model, config=config)
        torch.testing.assert_close(compiled(x), torch.relu(model[0](x)).square())
        (ran,) = piecework.report(compiled).custom_ops
    assert ran.implementation == "squared_relu by Triton"
