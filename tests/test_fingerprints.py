"""Fingerprints see every change of bits, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from piecework import fingerprints
from piecework.fingerprints import fingerprint, has_bits

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)


def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(*shape) * 4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("look", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:2]])
def test_any_change_is_seen_and_a_copy_is_not(dtype: torch.dtype, look: Callable[..., torch.Tensor]) -> None:
    memory = made(dtype, 6, 8)
    memory.view(torch.uint8)[1, 0] = 1
    before = fingerprint(look(memory)).item()
    assert fingerprint(look(memory.clone())).item() == before
    changed = memory.clone()
    changed.view(torch.uint8)[1, 0] ^= 0x80 if dtype is not torch.bool else 1
    assert fingerprint(look(changed)).item() != before


def test_signs_of_many_elements_and_elements_that_change_places_are_seen() -> None:
    x = torch.randn(64, 4)
    before = fingerprint(x)
    for num in (1, 2, 3, 63, 64):
        other = x.clone()
        other[:num].neg_()
        assert not torch.equal(fingerprint(other), before)
    assert not torch.equal(fingerprint(x.flip(0)), before)
    assert not torch.equal(fingerprint(torch.zeros(3)), fingerprint(torch.tensor([0.0, -0.0, 0.0])))


def test_nan_are_compared_by_their_bits() -> None:
    x = torch.tensor([float("nan"), 1.0])
    assert torch.equal(fingerprint(x), fingerprint(x.clone()))


def test_large_tensors_are_looked_at_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(37, 5)
    whole = fingerprint(x)
    monkeypatch.setattr(fingerprints, "BLOCK", 16)
    assert torch.equal(fingerprint(x), whole)
    assert not torch.equal(fingerprint(x.flip(0)), whole)
    assert torch.equal(fingerprint(x.t()), whole)  # in the order of memory


def test_what_is_no_plain_memory_is_left_out() -> None:
    x = torch.randn(3, 4)
    assert has_bits(x)
    assert has_bits(torch.nn.Parameter(x))
    assert not has_bits(x.to_sparse())
    assert not has_bits(torch.nested.nested_tensor([x, x]))
    assert fingerprint(x[:0]).item() == 0
