"""The op whose results are known by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import piecework_silly_attention
from piecework import testing


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    piecework_silly_attention.reset_calls()
    yield
    piecework_silly_attention.reset_calls()


def attend(q: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(q, 7.0)
    torch.ops.silly.attention(q, q, q, out)
    return out


def test_out_is_q_and_one_more_in_the_first_row() -> None:
    assert attend(torch.zeros(3, 1)).tolist() == [[1], [0], [0]]
    assert piecework_silly_attention.num_calls() == 1


def test_zero_rows() -> None:
    assert attend(torch.zeros(0, 4)).shape == (0, 4)


def test_tracing_is_no_call() -> None:
    attend(torch.zeros(3, 1, device="meta"))
    assert piecework_silly_attention.num_calls() == 0
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert compiled(torch.zeros(2, 1)).tolist() == [[1], [0]]
    assert piecework_silly_attention.num_calls() == 1


def test_op_is_well_formed() -> None:
    q = torch.zeros(3, 2)
    torch.library.opcheck(torch.ops.silly.attention.default, (q, q, q, torch.empty_like(q)))


def test_plugin_names_the_op_last() -> None:
    with testing.plugins(("silly_attention", piecework_silly_attention)) as manager:
        ((op, owner),) = manager.splitting_ops(None)  # type: ignore[arg-type]
    assert (op.name, owner) == ("silly::attention", "silly_attention")
    assert getattr(piecework_silly_attention.piecework_splitting_ops, "piecework_impl")["trylast"]  # noqa: B009
