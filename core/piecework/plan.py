"""One captured size as something to call, as it is or padded up from fewer rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch.fx import Node

from piecework import torch_internals as internals
from piecework.capturing import CaptureMemory
from piecework.copy_inputs import ChosenCopy, CopyInputs, choose_copy
from piecework.counting import counters
from piecework.custom_op_choice import CustomOpChoices
from piecework.inputs import GraphInputs, Key, Numbers
from piecework.notes import WHERE
from piecework.plan_code import PlanCode, describe_results, plan_code
from piecework.pool import Pool
from piecework.recorder import Recording
from piecework.split import SplitGraph
from piecework.static_inputs import StaticInputs, base_of


@dataclass
class Variant:
    """Answers the calls of one size: those of the plan itself, or those that are padded up to it.

    It does not refer to the plan, so that graphs are gone as soon as a plan and its functions are dropped.
    """

    key: Key
    plan_key: Key
    recording: Recording
    num_calls: int = 0

    @property
    def is_padded(self) -> bool:
        """Whether calls have fewer rows than the plan."""
        return self.key != self.plan_key


@dataclass
class Plan:
    """A captured size."""

    key: Key
    recording: Recording
    seconds: float
    after: CaptureMemory
    """What all captures held when this one was there."""
    variants: dict[Key, Variant] = field(default_factory=dict)


@dataclass(frozen=True)
class Whereabouts:
    """Says what a line of a plan's function does, for notes on exceptions.

    Args:
        stages: by line.
        recording: has the names of its steps.
        capturer: the plugin.
        copy: what copies the inputs together, if anything does.
    """

    stages: Mapping[int, str]
    recording: Recording
    capturer: str
    copy: str

    def __call__(self, frame: FrameType, line: int) -> str | None:
        """Return it in words."""
        stage = self.stages.get(line)
        if stage == "step":
            step = frame.f_locals.get("step")
            named = zip(self.recording.names, self.recording.steps, strict=True)
            return next((name for name, one in named if one is step), None)
        if stage == "copy":
            return f"the copy of the inputs{self.copy and f' by {self.copy}'}"
        return {"result": "the copy of the results", "stream": f"the capturer, {self.capturer},"}.get(stage or "")


class PlanFunctions:
    """Makes the functions that answer calls from the captured sizes of one graph.

    Args:
        split: the graph.
        inputs: what it is called with.
        statics: which of these are copied.
        pool: where it is captured.
        choices: what chooses how inputs are copied.
        elsewhere: called as ``elsewhere(variant, *given)`` for calls that a plan can't answer; returns what does.
        while_busy: called in the same way where the pool can't be had; returns the results.
        static_outputs: results are not cloned.
        name: shown in tracebacks.
    """

    def __init__(
        self,
        split: SplitGraph,
        inputs: GraphInputs,
        statics: StaticInputs,
        pool: Pool,
        choices: CustomOpChoices,
        elsewhere: Callable[..., Callable[..., Any]],
        while_busy: Callable[..., Any],
        *,
        static_outputs: bool,
        name: str,
    ) -> None:
        self.effects, self.statics, self.pool, self.choices = split.effects, statics, pool, choices
        self.inputs = replace(inputs, bound={})
        self.elsewhere, self.while_busy = elsewhere, while_busy
        self.static_outputs = static_outputs
        self.name = name
        self.results = describe_results(split, inputs)
        self.codes: dict[tuple[bool, bool, tuple[int, ...]], PlanCode] = {}

    def function(
        self, variant: Variant, numbers: Numbers, bound: Callable[[], Mapping[Node, torch.Tensor]]
    ) -> Callable[..., Any]:
        """Return what answers calls of one size.

        Args:
            variant: counts the calls.
            numbers: the value of each symbol at the size of the calls.
            bound: returns the parameters and buffers.
        """
        memory = variant.recording
        namespace: dict[str, Any] = {
            "take": self.pool.lock.acquire,
            "let_go": self.pool.lock.release,
            "pool": self.pool,
            "current_stream": self.pool.capturer.current_stream,
            "elsewhere": functools.partial(self.elsewhere, variant),
            "while_busy": functools.partial(self.while_busy, variant),
            "copy_all": internals.foreach_copy_,
            "base_of": base_of,
            "steps": memory.steps,
            "variant": variant,
            "counters": counters,
            "num_graphs": memory.num_graphs,
        }
        padding: list[torch.Tensor] = []
        for index, tensor in memory.inputs.items():
            size = self.statics.layout(self.statics.tensors[index].fake, numbers).size
            padding += padded_parts(tensor, size)
            namespace |= {f"i{index}": base_of(cut(tensor, size)), f"at{index}": tensor.data_ptr()}
        namespace |= {f"h{index}": address for index, address in memory.held.items()}
        for i, node in enumerate(self.results.made_from):
            output = memory.outputs[node]
            if variant.is_padded:
                output = cut(output, self.statics.layout(self.effects.values[node], numbers).size)
            namespace[f"b{i}"] = output
        if self.results.bound_names:
            tensors = bound()
            namespace |= {name: tensors[node] for node, name in self.results.bound_names.items()}
        namespace |= {"padding": padding, "zero_padding": internals.foreach_zero_ if padding else _leave}
        copied = tuple(sorted(memory.inputs))
        copy = self.copy_at_once([namespace[f"i{index}"] for index in copied])
        namespace["copy_inputs"] = None if copy is None else copy.function
        code = self.code(variant.is_padded, copy is not None, copied)
        namespace[WHERE] = Whereabouts(code.stages, memory, self.pool.origin, "" if copy is None else copy.name)
        return code.function(namespace)

    def copy_at_once(self, destinations: Sequence[torch.Tensor]) -> ChosenCopy | None:
        """Return what copies all inputs together; None where the native copies are written out in the code.

        Choosing it copies the memory of all sizes onto itself, which must not fall between the copy and the replay of
        a call on another stream; and nothing may be launched on one that is being recorded.
        """
        if len(destinations) < 2 or not self.pool.switch():
            return None
        return choose_copy(CopyInputs(destinations), self.choices)

    def code(self, is_padded: bool, is_copied_at_once: bool, copied: tuple[int, ...]) -> PlanCode:
        """Return the code for plans that copy these inputs, which were others when earlier plans were recorded."""
        key = (is_padded, is_copied_at_once, copied)
        if key not in self.codes:
            tensors = self.statics.tensors
            self.codes[key] = plan_code(
                self.results,
                self.inputs,
                [tensors[index] for index in copied],
                [tensors[index] for index in sorted(tensors) if index not in copied],
                self.inputs.written_tensors(self.effects),
                is_padded=is_padded,
                is_copied_at_once=is_copied_at_once,
                static_outputs=self.static_outputs,
                name=self.name,
            )
        return self.codes[key]


def cut(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Return the head of a tensor along each dim."""
    for dim, length in enumerate(size):
        if length != tensor.size(dim):
            tensor = tensor.narrow(dim, 0, length)
    return tensor


def _leave(padding: Sequence[torch.Tensor]) -> None:
    """Zero nothing, where no input that is copied has rows to pad."""


def padded_parts(tensor: torch.Tensor, size: Sequence[int]) -> list[torch.Tensor]:
    """Return what of a tensor lies beyond a size."""
    pairs = enumerate(zip(tensor.shape, size, strict=True))
    return [tensor.narrow(dim, length, whole - length) for dim, (whole, length) in pairs if whole != length]
