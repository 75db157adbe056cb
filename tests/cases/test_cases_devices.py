"""Cases about several devices and processes: a device that is not the current one, collectives."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import demo
from demo import Scaled
from dists import ROOT, run_child
from piecework import counters, testing
from ways import CUDA_WAYS, Way, check

CUDA_CAPTURED = [way for way in CUDA_WAYS if way.is_captured]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the case is about two CUDA devices")


# --- C59 ---


@pytest.mark.cuda
@two_devices
@pytest.mark.parametrize("way", CUDA_CAPTURED, ids=str)
def test_c59_device_that_is_not_the_current_one(way: Way) -> None:
    with testing.plugins(load_installed=True), torch.no_grad():
        models = [Scaled().to(f"cuda:{index}") for index in (0, 1)]
        calls = [way.compile(model, captures=[4]) for model in models]
        torch.cuda.set_device(0)
        before = torch.cuda.memory_allocated(0)
        for _ in range(3):
            check(calls[1], models[1], torch.randn(3, 6).to("cuda:1"))
        assert torch.cuda.memory_allocated(0) == before
        assert torch.cuda.current_device() == 0
        with counters.expect(num_graph_replays=12):
            for _ in range(3):
                for index in (0, 1):
                    check(calls[index], models[index], torch.randn(4, 6).to(f"cuda:{index}"))


@pytest.mark.cuda
@two_devices
def test_c59_thread_whose_current_device_differs() -> None:
    results: list[Any] = []
    with testing.plugins(load_installed=True):
        model = Scaled().to("cuda:1")
        call = CUDA_CAPTURED[0].compile(model, captures=[4])

        def work() -> None:
            torch.cuda.set_device(0)
            with torch.no_grad():
                x = torch.randn(4, 6).to("cuda:1")
                results.extend([call(x), model(x), torch.cuda.current_device()])

        torch.cuda.set_device(1)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        torch.cuda.set_device(0)
    torch.testing.assert_close(results[0], results[1])
    assert results[2] == 0


@pytest.mark.cuda
@two_devices
def test_c59_captured_first_where_another_device_is_current() -> None:
    with testing.plugins(load_installed=True), torch.no_grad():
        model = Scaled().to("cuda:1")
        call = CUDA_CAPTURED[0].compile(model, captures=[4])
        check(call, model, torch.randn(4, 6).to("cuda:1"))
        with torch.cuda.device(1):
            check(call, model, torch.randn(4, 6).to("cuda:1"))


# --- C61 ---

RANKS = """
import datetime, sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp
import piecework
from demo import Scaled
from piecework import SplittingOp, hookimpl, testing
from ways import Way

library = torch.library.Library("ranks", "DEF")
library.define("all_reduce_(Tensor(a!) x) -> ()")
library.define("all_reduce(Tensor x) -> Tensor")

def reduce_(x):
    dist.all_reduce(x)

def reduce(x):
    y = x.clone()
    dist.all_reduce(y)
    return y

for name, real, fake in (("all_reduce_", reduce_, lambda x: None), ("all_reduce", reduce, torch.empty_like)):
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ranks::{{name}}", fake, lib=library)

def f(x):
    y = x * 2
    torch.ops.ranks.all_reduce_(y)
    return torch.ops.ranks.all_reduce(y + 1)

class Fails:
    name = "fails"
    @hookimpl(wrapper=True)
    def piecework_capturer(self):
        capturer = yield
        def capture(fn):
            raise RuntimeError("planned")
        capturer.capture = capture
        return capturer

def work(rank, path, fails, results):
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{{path}}", rank=rank, world_size=2, timeout=timeout)
    ops = [SplittingOp(f"ranks::{{name}}", rows_independent=True) for name in ("all_reduce_", "all_reduce")]
    with testing.plugins(*([Fails()] if fails and rank == 0 else [])):
        for captures in ((4,), (2, 4)):
            call = Way(3, "eager", True).compile(f, captures=captures, splitting_ops=ops)
            for n in (4, 2, 3, 4):
                try:
                    y = call(torch.full((n, 6), rank + 1.0))
                except Exception as error:  # Whichever it is, the parent looks at it.
                    results.put((rank, type(error).__name__))
                    return
                results.put((rank, y.shape == (n, 6) and bool((y == 14).all())))
    dist.destroy_process_group()

if __name__ == "__main__":
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=work, args=(rank, {path!r}, {fails}, results)) for rank in (0, 1)]
    for rank in ranks: rank.start()
    for rank in ranks: rank.join(60)
    said = []
    while not results.empty(): said.append(results.get())
    print(sorted(said, key=str), [rank.exitcode for rank in ranks])
"""


def run_ranks(tmp_path: Path, *, fails: bool) -> str:
    (tmp_path / "ranks.py").write_text(RANKS.format(path=str(tmp_path / "rendezvous"), fails=fails))
    child = run_child("-m ranks", tmp_path, Path(__file__).parent, ROOT / "tests")
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


def test_c61_collectives_as_splitting_ops(tmp_path: Path) -> None:
    """Two ranks over gloo, in and out of place, padded or not; eager pieces, since the ops are no part of them."""
    said = sorted([(rank, True) for rank in (0, 1) for _ in range(8)], key=str)
    assert run_ranks(tmp_path, fails=False) == f"{said} [0, 0]"


def test_c61_failed_capture_on_one_rank_is_an_error_on_both(tmp_path: Path) -> None:
    """The other rank waits in its collective until that fails; nobody hangs."""
    said = run_ranks(tmp_path, fails=True)
    assert said.startswith("[(0, 'CaptureError'), (1, '") and said.endswith("[0, 0]"), said


@pytest.mark.parametrize("name", ["all_reduce_", "all_reduce"])
def test_c61_op_in_and_out_of_place_without_ranks(eager_way: Way, name: str) -> None:
    """What the split makes of the two forms: in place, the memory stays; out of place, the result is bridged."""
    model = {"all_reduce_": in_place, "all_reduce": out_of_place}[name]
    call = eager_way.compile(model, captures=[4], splitting_ops=["demo::attn", "demo::scale3"])
    for n in (4, 3, 4):
        check(call, model, torch.randn(n, 6))


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    demo.attn(y.clone(), y.clone(), y)
    return y + 1


def out_of_place(x: torch.Tensor) -> torch.Tensor:
    return demo.scale3(demo.scale3(x * 2) + 1)
