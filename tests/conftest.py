"""What every test starts from: no settings of the caller's environment, and nothing left by another test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from piecework.counting import counters
from piecework.plugins import reset_plugin_manager
from piecework.process_settings import reset_process_settings

if "PYTEST_XDIST_WORKER" in os.environ:  # Tensors are small; the processes would fight for the cores.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
if not torch.cuda.is_available():
    # Triton decides when a kernel is defined whether its interpreter runs it, on a CPU. So this stands here, before any
    # test module imports Triton, or Inductor does. Where there is a device, kernels are compiled for it.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def fresh_process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("PIECEWORK_")]:
        monkeypatch.delenv(name)
    _reset()
    yield
    _reset()


def _reset() -> None:
    reset_plugin_manager()
    reset_process_settings()
    counters.reset()
    if "torch._dynamo" in sys.modules:
        import torch._dynamo

        from piecework.custom_op_calls import reset_choices

        torch._dynamo.reset()
        reset_choices()


@pytest.fixture
def emulation() -> Iterator[None]:
    """No plugins but those of the test and the capturer that emulates, and no gradients."""
    from piecework import testing

    with testing.plugins(), torch.no_grad():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # One process per file at a time, and one for the device, which some tests fill to the brim.
        item.add_marker(pytest.mark.xdist_group("cuda" if item.get_closest_marker("cuda") else item.path.name))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
