"""Copies of many tensors in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework_triton_ops.copy import MAX_TENSORS, copy_tensors_, prepare_copy
from piecework_triton_ops.launching import Launch
from triton_cases import DEVICES

OPS = torch.ops.piecework_triton_ops
DTYPES = [torch.int64, torch.bfloat16, torch.bool, torch.float32, torch.uint8, torch.complex64, torch.float8_e4m3fn]


def tensors(sizes: Sequence[int], device: str) -> list[torch.Tensor]:
    """Tensors of several dtypes, with so many elements."""
    generator, made = torch.Generator().manual_seed(0), []
    for index, size in enumerate(sizes):
        dtype = DTYPES[index % len(DTYPES)]
        num_bytes = size * dtype.itemsize
        bits = torch.randint(2 if dtype == torch.bool else 100, (num_bytes,), generator=generator, dtype=torch.uint8)
        made.append(bits.to(device).view(dtype))
    return made


def assert_copied(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        assert destination.dtype == source.dtype
        as_bytes = [one.contiguous().reshape(-1).view(torch.uint8) for one in (destination, source)]
        assert torch.equal(*as_bytes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tensors", [1, 3, MAX_TENSORS, 2 * MAX_TENSORS + 1])
def test_tensors_of_all_dtypes_and_sizes(device: str, num_tensors: int) -> None:
    sources = tensors([(7, 1, 5000, 33, 0, 16, 2049)[index % 7] for index in range(num_tensors)], device)
    destinations = [torch.zeros_like(source) for source in sources]
    OPS.copy_tensors_(destinations, sources)
    assert_copied(destinations, sources)
    again = [torch.zeros_like(source) for source in sources]
    prepare_copy(again)(*sources)
    assert_copied(again, sources)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [1, 2, 4, 8, 16])
def test_any_alignment_and_nothing_beyond_the_ends(device: str, offset: int) -> None:
    source = torch.arange(1000, device=device).to(torch.uint8)[offset : offset + 777]
    memory = torch.full((1000,), 255, dtype=torch.uint8, device=device)
    copy_tensors_([memory[offset : offset + 777]], [source])
    assert torch.equal(memory[offset : offset + 777], source)
    assert bool((memory[:offset] == 255).all())
    assert bool((memory[offset + 777 :] == 255).all())


@pytest.mark.parametrize("device", DEVICES)
def test_sources_less_aligned_than_prepared(device: str) -> None:
    destination = torch.zeros(64, dtype=torch.int64, device=device)
    source = torch.arange(65, device=device)[1:]
    prepare_copy([destination])(source)
    assert torch.equal(destination, source)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 600), min_size=1, max_size=4), block=st.sampled_from([16, 64]))
@pytest.mark.parametrize("device", DEVICES)
def test_launch_constants_do_not_change_results(device: str, sizes: list[int], block: int) -> None:
    sources = tensors(sizes, device)
    destinations = [torch.zeros_like(source) for source in sources]
    copy_tensors_(destinations, sources, Launch(num_warps=1, block=block))
    assert_copied(destinations, sources)


@pytest.mark.parametrize("device", DEVICES)
def test_pairs_that_are_not_contiguous(device: str) -> None:
    whole = torch.arange(24.0, device=device).view(4, 6)
    destinations = [
        torch.zeros(6, 4, device=device),
        torch.zeros(4, 6, device=device)[:, ::2],
        torch.zeros(5, device=device),
    ]
    sources = [whole.t(), whole[:, ::2], torch.ones(5, device=device)]
    OPS.copy_tensors_(destinations, sources)
    assert_copied(destinations, sources)
    destination = torch.zeros(6, 4, device=device)
    prepare_copy([destination])(whole.t())
    assert torch.equal(destination, whole.t())


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_copy(device: str) -> None:
    empty = torch.zeros(0, 4, device=device)
    OPS.copy_tensors_([empty], [empty.clone()])
    prepare_copy([empty])(empty.clone())
    prepare_copy([])()


@pytest.mark.parametrize("device", DEVICES)
def test_scalars_and_slices_of_static_memory(device: str) -> None:
    static = [
        torch.zeros(8, dtype=torch.int64, device=device),
        torch.zeros(8, 4, device=device),
        torch.zeros((), device=device),
    ]
    copy = prepare_copy([static[0][:3], static[1][:3], static[2]])
    copy(torch.arange(3, device=device), torch.ones(3, 4, device=device), torch.tensor(5.0, device=device))
    assert static[0].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert static[1].sum() == 12
    assert static[2] == 5


@pytest.mark.parametrize("is_checked", [True, False])
def test_prepared_copies_launch_with_what_was_found_beforehand(
    monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    launches: list[int] = []

    def launcher(device: torch.device, num_tensors: int, word: int, launch: Launch) -> Callable[..., None]:
        def start(num_programs: int, arguments: Sequence[Any]) -> None:
            destinations, sources, sizes, *constants = arguments
            assert constants == [word, launch.block]
            assert num_programs == sum(-(-size // (word * launch.block)) for size in sizes)
            assert len(destinations) == num_tensors
            launches.append(word)
            for destination, source, size in zip(destinations, sources, sizes, strict=True):
                ctypes.memmove(destination, source, size)

        return start

    monkeypatch.setattr("piecework_triton_ops.copy.INTERPRETED", False)
    monkeypatch.setattr("piecework_triton_ops.copy._launcher", launcher)
    sources = tensors([5, 3000, 1, 40, 12, 17, 64, 8, 9], "cpu")
    destinations = [torch.zeros_like(source) for source in sources]
    copy = prepare_copy(destinations, is_checked=is_checked)
    assert launches == []
    copy(*sources)
    assert_copied(destinations, sources)
    assert launches == [16, 16]
    shifted = [torch.cat([source[:1], source])[1:] for source in sources]
    copy(*shifted)
    assert_copied(destinations, shifted)
    assert launches[2] == 1  # A bool tensor is among the first eight.


@pytest.mark.cuda
def test_prepared_copies_are_captured_and_replayed() -> None:
    sources = tensors([1, 4096, 7], "cuda")
    destinations = [torch.zeros_like(source) for source in sources]
    copy = prepare_copy(destinations, is_checked=False)
    copy(*sources)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy(*sources)
    for destination in destinations:
        destination.view(torch.uint8).zero_()
    graph.replay()
    assert_copied(destinations, sources)


@pytest.mark.parametrize("device", DEVICES)
def test_op_is_well_formed(device: str) -> None:
    sources = tensors([5, 8], device)
    torch.library.opcheck(OPS.copy_tensors_.default, ([torch.zeros_like(source) for source in sources], sources))


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused(device: str) -> None:
    x = torch.zeros(3, 4, device=device)
    copy = prepare_copy([x])
    for wrong, error, match in (
        ((), ValueError, "as many sources as destinations, 1, are needed, got 0"),
        ((x, x), ValueError, "as many sources as destinations, 1, are needed, got 2"),
        ((x[:2],), ValueError, r"source 0 must have the shape of its destination, \(3, 4\), got \(2, 4\)"),
        ((x.half(),), TypeError, r"source 0 must have the dtype of its destination, torch.float32, got torch.float16"),
        ((x.to("meta"),), ValueError, r"pair 0 is on .* and meta"),
    ):
        with pytest.raises(error, match=match):
            copy(*wrong)
        with pytest.raises(error, match=match):
            copy_tensors_([x], wrong)
    with pytest.raises(ValueError, match=r"destination 0 must be contiguous, got the strides \(1, 4\)"):
        prepare_copy([x.t()])


@pytest.mark.cuda
def test_copies_are_launched_on_the_device_of_their_memory() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    sources = [torch.randn(5, 3, device="cuda:1"), torch.arange(7, device="cuda:1")]
    destinations = [torch.zeros_like(source) for source in sources]
    copy = prepare_copy(destinations, is_checked=False)
    with torch.cuda.device(0):
        copy(*sources)
    assert_copied(destinations, sources)
