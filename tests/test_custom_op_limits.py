"""Limits of implementations of custom ops: what they allow, and the reasons that they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecework import ConfigError, Limits
from piecework.custom_op_limits import TensorForm

CPU = torch.device("cpu")


def refusal(limits: Limits, shape: tuple[int | None, ...] = (4, 16), dtype: torch.dtype = torch.float32) -> str | None:
    return limits.refusal(TensorForm(dtype, CPU, shape))


@pytest.mark.parametrize(
    ("limits", "shape", "reason"),
    [
        ({}, (None, 7), None),
        ({"dtypes": (torch.float32,)}, (4, 16), None),
        ({"dtypes": (torch.float16, torch.bfloat16)}, (4, 16), "dtype float32, allowed: float16, bfloat16"),
        ({"sizes": {-1: (8, 32)}}, (4, 16), None),
        ({"sizes": {-1: (8, 32)}}, (4, 8), None),
        ({"sizes": {-1: (8, 32)}}, (4, 32), None),
        ({"sizes": {-1: (8, 32)}}, (4, 33), "dim -1 is 33, allowed: 8 to 32"),
        ({"sizes": {-1: (8, None)}}, (4, 7), "dim -1 is 7, allowed: 8 or more"),
        ({"sizes": {-1: (None, 6)}}, (4, 7), "dim -1 is 7, allowed: 0 to 6"),
        ({"sizes": {0: (1, 4)}}, (None, 7), "dim 0 varies, allowed: 1 to 4"),
        ({"sizes": {2: (1, 4)}}, (3, 7), "there is no dim 2 among 2, allowed: 1 to 4"),
        ({"sizes": {"rows": (1, 12)}}, (3, 4, 7), None),
        ({"sizes": {"rows": (1, 11)}}, (3, 4, 7), "rows are 12, allowed: 1 to 11"),
        ({"sizes": {"rows": (1, 11)}}, (None, 4, 7), "rows vary, allowed: 1 to 11"),
        ({"sizes": {"rows": (1, 1)}}, (7,), None),
        ({"multiples": {-1: 8}}, (4, 16), None),
        ({"multiples": {-1: 8}}, (4, 17), "dim -1 is 17, allowed: multiples of 8"),
        ({"multiples": {0: 2}}, (None, 17), "dim 0 varies, allowed: multiples of 2"),
    ],
)
def test_what_lies_outside_is_refused_with_the_reason(limits: Any, shape: tuple[int | None, ...], reason: str) -> None:
    assert refusal(Limits(**limits), shape) == reason


def test_a_limit_needs_a_tensor_to_look_at() -> None:
    assert Limits(sizes={0: (1, 2)}).refusal(None) == "no argument is a tensor"
    assert Limits().refusal(None) is None


def test_a_capability_is_one_of_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(min_capability=(9, 0))
    assert "compute capability 9.0" in str(limits.refusal_of_device(CPU))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert limits.refusal_of_device(torch.device("cuda:0")) == "compute capability 8.6, needed: 9.0 or more"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert limits.refusal_of_device(torch.device("cuda:0")) is None
    assert Limits().refusal_of_device(CPU) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtypes": torch.float32},
        {"dtypes": ("float32",)},
        {"sizes": {"hidden": (1, 2)}},
        {"sizes": {True: (1, 2)}},
        {"sizes": {-1: 8}},
        {"multiples": {-1: 0}},
        {"multiples": {-1: 2.0}},
        {"min_capability": (9,)},
    ],
)
def test_limits_of_another_form_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="^Limits: "):
        Limits(**wrong)


def test_limits_read_as_words() -> None:
    limits = Limits(dtypes=(torch.bfloat16,), sizes={"rows": (1, 512)}, multiples={-1: 8}, min_capability=(9, 0))
    assert str(limits) == "bfloat16; rows 1 to 512; dim -1 a multiple of 8; compute capability 9.0 or more"
