"""The values of nodes while a size is recorded: memory as it is, and by aliases that hold none of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from piecework.inputs import Numbers
from piecework.pool import Pool
from piecework.schedule import Schedule
from piecework.static_inputs import Layout, StaticInputs, evaluate


class Values:
    """What the nodes of a split graph give at one size.

    Args:
        schedule: says which nodes have values of their own.
        statics: knows sizes and strides.
        pool: where memory is set aside; its lock is held.
        numbers: the value of each symbol.
    """

    def __init__(self, schedule: Schedule, statics: StaticInputs, pool: Pool, numbers: Numbers) -> None:
        self.schedule, self.effects = schedule, schedule.effects
        self.statics, self.pool, self.numbers = statics, pool, numbers
        self.env: dict[Any, Any] = {}
        self.aliases: dict[Any, Any] = {}
        """The same values without a hold on memory of the pool, as far as they were asked for."""

    def value(self, node: Node | sympy.Symbol, env: Mapping[Any, Any]) -> Any:
        """Return the value of a node: kept, computed from sizes, or a view taken again from its base."""
        if node in env:
            return env[node]
        if isinstance(node, sympy.Symbol):
            return int(evaluate(node, self.numbers))
        node = self.schedule.resolve(node)
        if node in env:
            return env[node]
        if self.effects.is_scalar(node):
            return self.number(self.effects.values[node])
        args, kwargs = map_arg((node.args, node.kwargs), lambda arg: self.value(arg, env))
        if node.op == "call_method":
            made = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            target: Any = node.target
            made = target(*args, **kwargs)
        if env is self.aliases:  # These hold no memory, so that a view of one may be kept for other uses.
            self.aliases[node] = made
        return made

    def bound(self, node: Node | sympy.Symbol) -> Any:
        """Return a value for a call that outlives the recording: memory of the pool by an alias."""
        aliases, outside = self.aliases, self.schedule.outside
        if node in aliases:
            return aliases[node]
        if isinstance(node, Node):
            for base in self.schedule.bases(node):
                if base not in aliases:
                    value = self.env[base]
                    is_pooled = base not in outside and isinstance(value, torch.Tensor)
                    aliases[base] = self.pool.capturer.alias(value) if is_pooled else value
        return self.value(node, aliases)

    def number(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(self.number(item) for item in value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return evaluate(self.statics.sizes.shape_env.replace(value.node.expr), self.numbers)
        return value

    def layout(self, fake: torch.Tensor) -> Layout:
        """Return the sizes and strides of a traced value."""
        return self.statics.layout(fake, self.numbers)

    def memory_for(self, fake: torch.Tensor) -> torch.Tensor:
        """Return static memory for a traced value."""
        layout = self.layout(fake)
        return self.pool.empty(fake, layout.size, layout.stride)

    def drop(self, nodes: Iterable[Node]) -> None:
        """Let go of values that nobody needs any longer, so that their memory can be used again."""
        env, aliases = self.env, self.aliases
        for node in nodes:
            env.pop(node, None)
            aliases.pop(node, None)

    def clear(self) -> None:
        """Let go of everything."""
        self.env.clear()
        self.aliases.clear()
