"""Runs every case that takes ``way`` in each of the ways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from piecework import testing
from ways import CPU_WAYS, CUDA_WAYS, Way

_PARAMS = [*CPU_WAYS, *(pytest.param(way, marks=pytest.mark.cuda) for way in CUDA_WAYS)]


@pytest.fixture(params=_PARAMS, ids=str)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """Level, pieces, captured or not, and device, with the installed plugins and the capturer that emulates."""
    with testing.plugins(load_installed=True):
        yield request.param


@pytest.fixture(params=[False, True], ids=["uncaptured", "captured"])
def eager_way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """Level 3 with eager pieces on a CPU, for what has nothing to do with compiled code."""
    with testing.plugins(load_installed=True):
        yield Way(3, "eager", request.param)
