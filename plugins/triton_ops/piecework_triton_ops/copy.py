"""Copies of many tensors, of any dtypes and sizes, in one launch.

What it is for: a captured forward copies the inputs of a call into static memory. They are few, small and of several
dtypes, so that launches cost more than bytes; ``torch._foreach_copy_`` takes one call and one launch per dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import triton.language as tl

from piecework_triton_ops.launching import Launch, bound_launcher, ceil_div, on_device
from piecework_triton_ops.library import INTERPRETED, jit, register

__all__ = ["COPY_LAUNCH", "MAX_TENSORS", "copy_tensors_", "prepare_copy"]

MAX_TENSORS = 8
"""Pairs in one launch; each number of them is a kernel of its own."""


def copy_tensors_(
    destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], launch: Launch | None = None
) -> None:
    """Copy each source into its destination: in one launch for each eight pairs that are contiguous.

    A pair that isn't is copied by ``Tensor.copy_``. No source may share memory with the destination of another pair.

    Args:
        destinations: all on one device.
        sources: as many, each with the shape, dtype and device of its destination.
        launch: in place of ``COPY_LAUNCH``.

    Raises:
        TypeError: dtypes differ.
        ValueError: numbers, shapes or devices differ.
    """
    _check(destinations, sources)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for destination, source in zip(destinations, sources, strict=True):
        if not (destination.is_contiguous() and source.is_contiguous()):
            destination.copy_(source)
        elif destination.numel() > 0:
            pairs.append((destination, source))
    for start in range(0, len(pairs), MAX_TENSORS):
        _copy_bytes(pairs[start : start + MAX_TENSORS], launch)


def prepare_copy(
    destinations: Sequence[torch.Tensor], *, is_checked: bool = True, launch: Launch | None = None
) -> Callable[..., None]:
    """Return a function ``copy(*sources)`` that copies into these destinations, with all done beforehand that can be.

    Destinations are written by address, and kept alive. The copy is launched on the current stream of their device.

    Args:
        destinations: contiguous, all on one device.
        is_checked: whether each call looks at its sources, and leaves unusual ones to ``copy_tensors_``, which copies
            or refuses them. Without it the caller promises the number, shapes, dtypes and device of the destinations
            and contiguous memory: what is given then is copied by address.
        launch: in place of ``COPY_LAUNCH``.

    Raises:
        ValueError: a destination isn't contiguous, or devices differ.
    """
    destinations = tuple(destinations)
    _check(destinations, destinations)
    for index, destination in enumerate(destinations):
        if not destination.is_contiguous():
            raise ValueError(
                f"prepare_copy: destination {index} must be contiguous, got the strides {destination.stride()} for the "
                f"shape {tuple(destination.shape)}; copy_tensors_ takes it"
            )
    if INTERPRETED or any(destination.numel() == 0 for destination in destinations):
        return lambda *sources: copy_tensors_(destinations, sources, launch)
    starts = range(0, len(destinations), MAX_TENSORS)
    groups = [_prepare_group(destinations[start : start + MAX_TENSORS], is_checked, launch) for start in starts]
    return groups[0] if len(groups) == 1 else _in_turn(destinations, groups)


COPY_LAUNCH = Launch(num_warps=4, block=128)
"""The constants; ``block`` counts words, of 16 bytes where alignment permits."""


def _prepare_group(
    destinations: tuple[torch.Tensor, ...], is_checked: bool, launch: Launch | None
) -> Callable[..., None]:
    sizes = tuple(destination.nbytes for destination in destinations)
    addresses = tuple(destination.data_ptr() for destination in destinations)
    constants = launch or COPY_LAUNCH
    word = _word(addresses)
    start = _launcher(destinations[0].device, len(destinations), word, constants)
    num_programs = _num_programs(sizes, word, constants)
    beyond_word, block = word - 1, constants.block

    def copy_unchecked(*sources: torch.Tensor) -> None:
        given = tuple([source.data_ptr() for source in sources])
        bits = 0
        for address in given:
            bits |= address
        if bits & beyond_word:
            copy_tensors_(destinations, sources, launch)
        else:
            start(num_programs, (addresses, given, sizes, word, block))

    if not is_checked:
        return copy_unchecked
    device = destinations[0].device
    shapes = [(destination.shape, destination.dtype) for destination in destinations]

    def copy(*sources: torch.Tensor) -> None:
        is_usual = len(sources) == len(shapes)
        for source, (shape, dtype) in zip(sources, shapes, strict=False):
            if (
                source.dtype is not dtype
                or source.shape != shape
                or not source.is_contiguous()
                or source.device != device
            ):
                is_usual = False
        if is_usual:
            copy_unchecked(*sources)
        else:
            copy_tensors_(destinations, sources, launch)

    return copy


def _in_turn(destinations: Sequence[torch.Tensor], groups: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def copy(*sources: torch.Tensor) -> None:
        if len(sources) != len(destinations):
            copy_tensors_(destinations, sources)  # Refuses them.
        for index, group in enumerate(groups):
            group(*sources[index * MAX_TENSORS : (index + 1) * MAX_TENSORS])

    return copy


def _copy_bytes(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], launch: Launch | None) -> None:
    """Copy up to ``MAX_TENSORS`` contiguous pairs that hold something."""
    sizes = tuple(destination.nbytes for destination, _ in pairs)
    to, given = (tuple(pair[side].data_ptr() for pair in pairs) for side in (0, 1))
    constants = launch or COPY_LAUNCH
    word = _word((*to, *given))
    num_programs = _num_programs(sizes, word, constants)
    if INTERPRETED:  # Addresses mean nothing to it.
        to, given = (tuple(pair[side].detach().reshape(-1).view(torch.uint8) for pair in pairs) for side in (0, 1))
        _copy_kernel[(num_programs,)](to, given, sizes, word, constants.block)
        return
    device = pairs[0][0].device
    with on_device(device):
        start = _launcher(device, len(pairs), word, constants)
        start(num_programs, (to, given, sizes, word, constants.block))


def _word(addresses: Sequence[int]) -> int:
    """Return the bytes of the widest word that all addresses are multiples of."""
    bits = functools.reduce(int.__or__, addresses, 16)
    return bits & -bits


def _num_programs(sizes: Sequence[int], word: int, launch: Launch) -> int:
    return sum(ceil_div(size, word * launch.block) for size in sizes)


@functools.cache
def _launcher(
    device: torch.device, num_tensors: int, word: int, launch: Launch
) -> Callable[[int, Sequence[object]], None]:
    """Return what launches the kernel for so many pairs, whose addresses are multiples of ``word`` bytes."""
    memory = torch.empty(64, dtype=torch.uint8, device=device)[word % 16 :]  # Aligned to a word, and to no wider one.
    size = (1 << 40) + 1  # As sizes may be: more than 32 bits, and odd.
    example = ((memory,) * num_tensors, (memory,) * num_tensors, (size,) * num_tensors, word, launch.block)
    return bound_launcher(_copy_kernel, device, example, launch.num_warps)


@jit
def _copy_kernel(
    destinations,
    sources,
    sizes,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give each tensor as many programs as its bytes fill, one tensor after the other."""
    program = tl.program_id(0).to(tl.int64)
    first = program * 0
    for index in tl.static_range(len(destinations)):  # pyright: ignore[reportGeneralTypeIssues]
        last = first + (sizes[index] + (WORD * BLOCK - 1)) // (WORD * BLOCK)
        if (program >= first) & (program < last):
            _copy_block(destinations[index], sources[index], sizes[index], program - first, WORD, BLOCK)
        first = last


@jit
def _copy_block(
    destination,
    source,
    num_bytes,
    block,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy words by word, and bytes beyond the last whole word one by one.

    A word of 16 bytes is two of 8, with one element of the mask for both: that keeps the access 16 bytes wide.
    """
    word = block * BLOCK + tl.arange(0, BLOCK)[:, None]
    mask = word < num_bytes // WORD
    if WORD == 16:
        _copy_elements(destination, source, word * 2 + tl.arange(0, 2)[None, :], mask, tl.int64)
    elif WORD == 8:
        _copy_elements(destination, source, word, mask, tl.int64)
    elif WORD == 4:
        _copy_elements(destination, source, word, mask, tl.int32)
    elif WORD == 2:
        _copy_elements(destination, source, word, mask, tl.int16)
    else:
        _copy_elements(destination, source, word, mask, tl.int8)
    if (block + 1) * BLOCK * WORD >= num_bytes:
        byte = num_bytes // WORD * WORD + tl.arange(0, 16)
        _copy_elements(destination, source, byte, byte < num_bytes, tl.int8)


@jit
def _copy_elements(destination, source, index, mask, ELEMENT):
    """Copy what memory holds at an index where it is seen as so many elements."""
    destination = destination.to(tl.pointer_type(ELEMENT), bitcast=True)
    source = source.to(tl.pointer_type(ELEMENT), bitcast=True)
    tl.store(destination + index, tl.load(source + index, mask=mask), mask=mask)


def _check(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    op = "copy_tensors_"
    if len(destinations) != len(sources):
        raise ValueError(f"{op}: as many sources as destinations, {len(destinations)}, are needed, got {len(sources)}")
    for index, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
        where = f"{op}: source {index} must have the"
        if source.dtype != destination.dtype:
            raise TypeError(f"{where} dtype of its destination, {destination.dtype}, got {source.dtype}")
        if source.shape != destination.shape:
            raise ValueError(f"{where} shape of its destination, {tuple(destination.shape)}, got {tuple(source.shape)}")
        if not source.device == destination.device == destinations[0].device:
            raise ValueError(
                f"{op}: all tensors must be on the device of destination 0, {destinations[0].device}; pair {index} is "
                f"on {destination.device} and {source.device}"
            )


register("copy_tensors_(Tensor(a!)[] destinations, Tensor[] sources) -> ()", copy_tensors_, _check)
