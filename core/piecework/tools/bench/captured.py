"""A model under Piecework as the benchmark looks at it: its calls, its plan, and the parts of one call."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

import piecework
from piecework.api import forward_of
from piecework.build import Compiled
from piecework.config import CompilationConfig
from piecework.plan import Plan
from piecework.tools.bench.model import Attention, ToyLlama
from piecework.tools.bench.timing import Timed

__all__ = ["PARTS", "CapturedModel", "UncapturedModel", "split_into_parts"]

PARTS = ("select", "copy", "replay", "splitting ops", "finish", "rest")


class UncapturedModel:
    """A compiled model that captures nothing, and the tensor that it is called with."""

    def __init__(self, model: ToyLlama, config: CompilationConfig, ids: torch.Tensor, op: Attention) -> None:
        self.ids, self.op = ids, op
        self.model: Any = piecework.compile(model, config=config, dynamic_arg_dims={"ids": 0})
        self.model(ids)

    def call(self) -> torch.Tensor:
        return self.model(self.ids)

    @property
    def compiled(self) -> Compiled:
        """Return what the trace became."""
        made = forward_of(self.model, "bench").compiled
        assert made is not None
        return made

    @property
    def run(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return the straight-line code for this number of rows: ``run(ids, rows)``."""
        exact = self.compiled.entry.namespace["_pw_exact"]
        return exact.get(self.rows) or self.compiled.run.function

    @property
    def rows(self) -> int:
        """Return the number of rows of a call."""
        return self.ids.size(0)


class CapturedModel(UncapturedModel):
    """A compiled model that has captured the number of rows that it is called with."""

    @property
    def plan(self) -> Plan:
        """Return the captured size."""
        plans = self.compiled.plans
        assert plans is not None
        return plans.plans[self.rows]

    @property
    def steps(self) -> list[Callable[[], Any]]:
        """Return the replays and the bound ops."""
        return self.plan.recording.steps

    @property
    def op_steps(self) -> list[Callable[[], Any]]:
        """Return the bound ops alone."""
        return [step for step in self.steps if getattr(step, "func", None) is self.op.function]

    @property
    def replays(self) -> list[Callable[[], Any]]:
        """Return the replays alone."""
        ops = set(map(id, self.op_steps))
        return [step for step in self.steps if id(step) not in ops]

    @property
    def num_launches(self) -> int:
        """Return how many launches a call makes: a copy, a clone, one per graph and two per op."""
        return 2 + self.plan.recording.num_graphs + 2 * len(self.op_steps)

    @property
    def input_in_place(self) -> torch.Tensor:
        """Return the tensor that the graphs read: a call with it copies nothing."""
        return next(iter(self.plan.recording.inputs.values()), self.ids)

    @property
    def output_in_place(self) -> torch.Tensor:
        """Return the memory that the results are made from."""
        (output,) = self.plan.recording.outputs.values()
        return output

    def loop(self) -> Callable[[], None]:
        """Return the bare loop over the steps of the plan."""
        steps = self.steps

        def bare_loop() -> None:
            for step in steps:
                step()

        return bare_loop

    def parts(self) -> dict[str, Timed]:
        """Return variants of a call that leave something out; ``split_into_parts`` makes parts of their times."""
        plans = self.compiled.plans
        assert plans is not None
        run, entry, rows = plans.functions[self.rows], self.compiled.entry.function, self.rows
        result = (self.output_in_place,)
        without_steps = _with_globals(run, steps=[])
        without_plan = _with_globals(entry, _pw_plans={rows: lambda *given: result})
        return {
            "whole": Timed(functools.partial(self.model, self.ids), self.num_launches),
            "select": Timed(functools.partial(without_plan, self.model, self.ids), 0),
            "copy and finish": Timed(functools.partial(without_steps, self.ids, rows), 2),
            "finish": Timed(functools.partial(without_steps, self.input_in_place, rows), 1),
            "replay": Timed(_loop_over(self.replays), len(self.replays)),
            "splitting ops": Timed(_loop_over(self.op_steps), 2 * len(self.op_steps)),
        }


def split_into_parts(times: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of one call from the times of its variants; they and ``rest`` add up to the whole."""
    parts = {
        "select": times["select"],
        "copy": times["copy and finish"] - times["finish"],
        "replay": times["replay"],
        "splitting ops": times["splitting ops"],
        "finish": times["finish"],
    }
    return {**parts, "rest": times["whole"] - sum(parts.values()), "whole": times["whole"]}


def _loop_over(steps: list[Callable[[], Any]]) -> Callable[[], None]:
    def loop() -> None:
        for step in steps:
            step()

    return loop


def _with_globals(function: Callable[..., Any], **replaced: Any) -> Callable[..., Any]:
    """Return the same generated code with some of its names bound to something else."""
    plain: Any = function
    made = types.FunctionType(plain.__code__, {**plain.__globals__, **replaced}, plain.__name__, plain.__defaults__)
    made.__kwdefaults__ = plain.__kwdefaults__
    return made
