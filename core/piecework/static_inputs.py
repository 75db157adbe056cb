"""The inputs of captured graphs: static memory that calls are copied into, and what is held where it is.

An input with a dim that varies is copied, unless the caller promised to keep it in place; any other, such
as a key-value cache, is held by its address, and captured again when that changes.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from piecework import torch_internals as internals
from piecework.config import CompilationConfig
from piecework.errors import ConfigError
from piecework.inputs import GraphInputs, Numbers
from piecework.pool import Pool

logger = logging.getLogger(__name__)

MAX_MOVES = 3
"""An input that is held but moved so often is copied from then on."""


@dataclass
class GraphTensor:
    """One tensor argument of a graph."""

    index: int
    """Its position among the tensor arguments."""
    path: str
    """How the user calls it."""
    node: Node
    varies: bool
    is_copied: bool
    is_promised: bool
    """The caller keeps it in place (``static_inputs``)."""
    num_moves: int = 0

    @property
    def fake(self) -> torch.Tensor:
        """Return the traced value: symbolic sizes and strides."""
        return self.node.meta["example_value"]

    @property
    def is_expanded(self) -> bool:
        """Whether one element of it may stand for many."""
        return any(isinstance(step, int) and step == 0 for step in self.fake.stride())


@dataclass(frozen=True)
class Layout:
    """Sizes and strides in numbers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span(self) -> int:
        """Return how many elements lie between the first and the last one, both counted."""
        if 0 in self.size:
            return 0
        return 1 + sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True))

    @property
    def repeats(self) -> tuple[int, ...]:
        """Return the dims along which one element stands for many."""
        pairs = enumerate(zip(self.size, self.stride, strict=True))
        return tuple(dim for dim, (length, step) in pairs if step == 0 and length > 1)


class StaticInputs:
    """Memory for the inputs of all sizes of one model: the smaller sizes lie at the head of the largest.

    Calls of one pool run one after the other, and each copies what it reads. It is ordinary memory and none of
    the pool's, where the result of another captured call, which may be what is copied, could overlap it.
    """

    def __init__(self, inputs: GraphInputs, paths: Mapping[int, str], config: CompilationConfig, pool: Pool) -> None:
        self.sizes = inputs.sizes
        promised = _promised(config, paths)
        self.tensors: dict[int, GraphTensor] = {}
        for node, given in inputs.by_placeholder.items():
            if given.tensor_index is None:
                continue
            fake = node.meta["example_value"]
            varies = any(isinstance(size, torch.SymInt) for size in (*fake.shape, *fake.stride()))
            index = given.tensor_index
            is_copied = fake.device != pool.device or (varies and index not in promised)
            self.tensors[index] = GraphTensor(
                *(index, paths.get(index, node.name), node, varies, is_copied), is_promised=index in promised
            )
        self.buffers: dict[int, torch.Tensor] = {}

    @property
    def copied(self) -> list[GraphTensor]:
        """Return the inputs that are copied, in the order of arguments."""
        return [self.tensors[i] for i in sorted(self.tensors) if self.tensors[i].is_copied]

    @property
    def held(self) -> list[GraphTensor]:
        """Return the inputs that are held by address."""
        return [self.tensors[i] for i in sorted(self.tensors) if not self.tensors[i].is_copied]

    def memory(self, tensor: GraphTensor, numbers: Numbers) -> torch.Tensor:
        """Return the static memory of a copied input at one size; inside a session."""
        layout = self.layout(tensor.fake, numbers)
        buffer = self.buffers.get(tensor.index)
        if buffer is None or buffer.numel() < layout.span:
            buffer = torch.zeros(layout.span, dtype=tensor.fake.dtype, device=tensor.fake.device)
            self.buffers[tensor.index] = buffer
        return buffer.as_strided(layout.size, layout.stride)

    def layout(self, fake: torch.Tensor, numbers: Numbers) -> Layout:
        """Return the sizes and strides of a traced value at one size."""
        return Layout(
            tuple(self.number(size, numbers) for size in fake.size()),
            tuple(self.number(step, numbers) for step in fake.stride()),
        )

    def number(self, size: int | torch.SymInt, numbers: Numbers) -> int:
        """Return a size as a number.

        Raises:
            UnknownSizeError: it follows from data.
        """
        if isinstance(size, int):
            return size
        return int(evaluate(internals.size_expression(size, self.sizes.shape_env), numbers))

    def note_move(self, tensor: GraphTensor, owner: str) -> None:
        """Count that a held input came at another address; copy it from now on if that goes on."""
        tensor.num_moves += 1
        if tensor.num_moves >= MAX_MOVES and not tensor.is_copied:
            tensor.is_copied = True
            logger.warning(
                "%s: argument %s moved %d times, and each time its sizes were captured again; it is copied from now on",
                *(owner, tensor.path, tensor.num_moves),
            )


def fill(memory: torch.Tensor, given: torch.Tensor) -> None:
    """Fill static memory with what a call passes, as far as that reaches; zeros elsewhere."""
    common = [min(a, b) for a, b in zip(memory.shape, given.shape, strict=True)]
    target, source = base_of(memory), given
    target.zero_()
    for dim, length in enumerate(common):
        target = target.narrow(dim, 0, min(length, target.size(dim)))
        source = source.narrow(dim, 0, min(length, target.size(dim)))
    target.copy_(source)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with every repeated element once."""
    for dim in Layout(tuple(tensor.shape), tuple(tensor.stride())).repeats:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


class UnknownSizeError(Exception):
    """A size follows from data, so that no static memory can be set aside for it."""


def evaluate(expression: sympy.Basic, numbers: Numbers) -> int | float | bool:
    """Return an expression over symbols as a number.

    Raises:
        UnknownSizeError: a symbol stands for something that follows from data.
    """
    if isinstance(expression, sympy.Symbol) and expression in numbers:
        return int(numbers[expression])
    if isinstance(expression, sympy.Integer):
        return int(expression)
    given = expression.xreplace(dict(numbers))
    if given.free_symbols:
        raise UnknownSizeError(f"the size {', '.join(map(str, given.free_symbols))} follows from data")
    return internals.evaluate_number(given)


def _promised(config: CompilationConfig, paths: Mapping[int, str]) -> set[int]:
    """Return the positions of the arguments that the caller keeps in place."""
    if config.static_inputs is True:
        return set(paths)
    promised: set[int] = set()
    for name in config.static_inputs:
        found = {i for i, path in paths.items() if path == name or path.startswith((f"{name}[", f"{name}."))}
        if not found:
            near = difflib.get_close_matches(name, paths.values(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"static_inputs names {name!r}, which is no tensor argument{hint}; "
                f"the tensor arguments are {', '.join(paths.values())}"
            )
        promised |= found
    return promised
