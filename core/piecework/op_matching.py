"""Names of splitting ops, and the nodes of a traced graph that they mean."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from piecework import torch_internals as internals
from piecework.effects import Effects, fresh_fake, line_of, op_name, running_again
from piecework.errors import ConfigError, SplitError
from piecework.pieces import SplittingOp

logger = logging.getLogger(__name__)


def normalized_name(name: str) -> str:
    """Return ``"ns::op"`` or ``"ns::op.overload"`` for any accepted spelling; ``.default`` is dropped.

    Raises:
        ConfigError: it is no name of an op.
    """
    namespace, separator, rest = name.partition("::") if "::" in name else name.partition(".")
    parts = rest.split(".")
    if not separator or not namespace or not 1 <= len(parts) <= 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"a splitting op is named like 'ns::op', 'ns.op' or 'ns::op.overload', got {name!r}")
    return f"{namespace}::{parts[0]}" if parts[1:] in ([], ["default"]) else f"{namespace}::{rest}"


class OpMatcher:
    """Finds the splitting op that a node of a graph calls."""

    def __init__(self, ops: Sequence[SplittingOp]) -> None:
        self.by_name: dict[str, SplittingOp] = {}
        for op in ops:
            name = normalized_name(op.name)
            _check_known(name, op.name)
            known = self.by_name.get(name)
            if known is None or known == SplittingOp(known.name):  # a bare name knows least
                self.by_name[name] = op

    def find(self, node: Node, effects: Effects) -> tuple[str, SplittingOp] | None:
        """Return the name and the op if a node is to be cut at, else None."""
        name = op_name(node)
        if name is None:
            return None
        if name in self.by_name:
            return name, self.by_name[name]
        if not any(known.startswith(f"{name}.") for known in self.by_name):
            return None
        overload = effects.overload(node)
        full = overload.name() if overload is not None else name
        return (full, self.by_name[full]) if full in self.by_name else None


def _check_known(name: str, given: str) -> None:
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if packet is not None and (not overload or overload in packet.overloads()):
        return
    known = {known.partition(".")[0] if not overload else known for known in internals.all_op_names()}
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    hint = f"; the nearest are {', '.join(near)}" if near else ""
    raise ConfigError(
        f"torch knows no op named {given!r}, which was given as a splitting op{hint}; import the module that registers "
        "it before the model's first call"
    )


def check_all_found(
    graph: GraphModule,
    fake_mode: internals.FakeTensorMode,
    matcher: OpMatcher,
    must_match: Iterable[str],
    found: set[str],
) -> None:
    """Say which splitting ops that the user named were not found.

    Args:
        graph: where they were looked for.
        fake_mode: the mode of its example values.
        matcher: knows all splitting ops.
        must_match: names that the user gave.
        found: names that were found.

    Raises:
        SplitError: one only appears when another op is decomposed.
    """
    missing = [name for name in map(normalized_name, must_match) if name in matcher.by_name and name not in found]
    if not missing:
        return
    inside = _decomposed_ops(graph, fake_mode) if any(name.startswith("aten::") for name in missing) else {}
    for name in missing:
        for node, names in inside.items():
            if name in names or name.partition(".")[0] in names:
                raise SplitError(
                    f"splitting op {name} only appears when {op_name(node) or node.target} is decomposed"
                    f"{line_of(node)}, and the graph is cut before that; name {op_name(node) or node.target} instead"
                )
    if found:
        logger.info("splitting ops that do not occur in the traced graph: %s", ", ".join(missing))
    else:
        logger.warning("nothing is cut: none of the splitting ops %s occurs in the traced graph", ", ".join(missing))


def _decomposed_ops(graph: GraphModule, fake_mode: internals.FakeTensorMode) -> dict[Node, set[str]]:
    """Return the ATen ops that each node runs underneath."""
    seen: set[str] = set()
    inside: dict[Node, set[str]] = {}

    class Recorder(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func.name().partition(".")[0])
            return func(*args, **(kwargs or {}))

    class Runner(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            seen.clear()
            result = super().run_node(n)
            inside[n] = set(seen)
            return result

    with running_again(fake_mode), torch.no_grad(), Recorder():
        examples = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        Runner(graph).run(*[fresh_fake(example) for example in examples])
    return inside
