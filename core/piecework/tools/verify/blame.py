"""Find the first op whose result departs: in compiled or captured code, and in the original beside another run."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

import piecework
from piecework import torch_internals as internals
from piecework.declarations import checked_call
from piecework.effects import ALLOCATIONS, line_of, op_name, tensors_in
from piecework.exact import copied_graph
from piecework.tools.verify.calls import Kept, random_numbers_put_back
from piecework.tools.verify.comparing import Difference, Tolerance, clone, first_difference

Compile = Callable[[GraphModule], Callable[..., Sequence[Any]]]


@dataclass(frozen=True)
class WrongOp:
    """The first op that departs.

    Attributes:
        name: the op, with the user's line.
        difference: how its result departs.
        graph: the ops up to this one, the result of which it returns; None outside of a piece.
    """

    name: str
    difference: Difference
    graph: GraphModule | None = None


def first_wrong_op(
    graph: GraphModule, args: Sequence[Any], compile_graph: Compile, tolerance: Tolerance
) -> WrongOp | None:
    """Return the first op of a piece that departs when it is compiled; None where no single op can be blamed.

    The piece is compiled once more so that it returns the result of every op. What is fused is another then; where
    that shows nothing, the ops up to one are compiled by themselves, found by halving.

    Args:
        graph: the piece.
        args: what to call it with; what it writes to is put back.
        compile_graph: compiles a graph of other results.
        tolerance: for the results.
    """
    nodes = [node for node in graph.graph.nodes if node.op.startswith("call") and _gives_tensor(node)]

    def among(chosen: Sequence[Node]) -> tuple[Node, Difference] | None:
        found = departs(graph_of(graph, chosen), args, compile_graph, tolerance)
        if found is None or (found[0] is None and len(chosen) > 1):
            return None
        return chosen[found[0] or 0], found[1]

    found = among(nodes) if nodes else None
    if found is None:
        low, high = 0, len(nodes)  # The first that departs by itself is among nodes[low:high], if one does.
        while low < high:
            middle = (low + high) // 2
            alone = among(nodes[middle : middle + 1])
            found, low, high = (alone, low, middle) if alone is not None else (found, middle + 1, high)
    if found is None:
        return None
    node, difference = found
    return WrongOp(f"{op_name(node) or node.target}{line_of(node)}", difference, graph_of(graph, [node]))


def departs(
    graph: GraphModule, args: Sequence[Any], compile_graph: Compile, tolerance: Tolerance
) -> tuple[int | None, Difference] | None:
    """Return which result of a graph departs when it is compiled, and how; what it writes to and draws is put back.

    None for the result: it raised, whichever that is.
    """
    kept = Kept({str(i): arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)})
    device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))
    with random_numbers_put_back(device):
        expected = clone(list(graph.forward(*args)))
    kept.put_back()
    try:
        with random_numbers_put_back(device):
            results = clone(list(compile_graph(graph)(*args)))
    except Exception as error:  # Of a plugin's code: it is what is looked for.
        return None, Difference("it", f"raised {type(error).__name__}: {error}")
    finally:
        kept.put_back()
    found = (first_difference(*pair, "its result", tolerance) for pair in zip(results, expected, strict=True))
    return next(((i, difference) for i, difference in enumerate(found) if difference is not None), None)


def graph_of(graph: GraphModule, chosen: Sequence[Node]) -> GraphModule:
    """Return a graph of the same inputs that returns copies of some results, taken when they are there."""
    made = copied_graph(graph)
    by_name = {node.name: node for node in made.graph.nodes}
    results: list[Node] = []
    for node in chosen:
        place = by_name[node.name]
        with made.graph.inserting_after(place):
            results.append(made.graph.call_method("clone", (place,)))
        results[-1].meta.update({k: v for k, v in place.meta.items() if k in ("example_value", "stack_trace")})
    (output,) = made.graph.find_nodes(op="output")
    output.args = (tuple(results),)
    node = output.prev
    while node is not results[-1]:  # What comes after the last of them can't be seen in any of them.
        node = node.prev
        made.graph.erase_node(node.next)
    made.graph.eliminate_dead_code(lambda node: _has_effects(node))
    made.recompile()
    return made


def _has_effects(node: Node) -> bool:
    """Whether an op has to run though nobody uses its result: it may write to something."""
    if node.op in ("placeholder", "output"):
        return True
    name = op_name(node) or str(node.target)
    is_in_place = name.endswith("_") or getattr(node.target, "__name__", "") in _IN_PLACE or "out" in node.kwargs
    is_other_op = node.op == "call_function" and not name.startswith("aten::") and node.target is not operator.getitem
    return is_in_place or is_other_op


_IN_PLACE = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "iand", "ior", "ixor"})


def _gives_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


# --- between the original and another run -----------------------------------------------------------


_UNTOLD = ALLOCATIONS | {"aten::detach", "aten::alias"}
"""Ops whose results mean nothing yet, and those that gradients add."""
_BUILT_IN = ("aten", "prim", "prims")


class OpLog(internals.TorchDispatchMode):
    """Keeps the results of all ops that run under it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = tensors_in(result)
        if tensors and getattr(func, "namespace", None) is not None and func.name().partition(".")[0] not in _UNTOLD:
            self.note(func.name(), tensors)
        return result

    def note(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Keep copies of the results of one op."""
        self.entries.append((name, [clone(tensor) for tensor in tensors]))


class DeclarationCheck(internals.TorchDispatchMode):
    """Compares ops that are no built-in ones with what they declare, whenever they run under it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.wrong: WrongOp | None = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        is_own = isinstance(func, internals.OpOverload) and func.namespace not in _BUILT_IN
        if self.wrong is not None or not is_own:
            return func(*args, **(kwargs or {}))
        result, problems = checked_call(func, func, args, kwargs or {})
        if problems:
            self.wrong = WrongOp(func.name(), Difference("", "; ".join(problems)))
        return result


class OpComparison(OpLog):
    """Compares the results of all ops of the original that run under it with those in a log, in order.

    Args:
        log: of another run.
        other_run: what that was, in words.
        tolerance: for the results.
    """

    def __init__(self, log: OpLog, other_run: str, tolerance: Tolerance) -> None:
        super().__init__()
        self.expected, self.other_run, self.tolerance = log.entries, other_run, tolerance
        self.position = 0
        self.wrong: WrongOp | None = None

    def note(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Compare the results of one op with those of the other run."""
        if self.wrong is not None:
            return
        if self.position >= len(self.expected):
            difference = Difference("", f"the original runs it, and {self.other_run} has ended before")
        else:
            other, values = self.expected[self.position]
            difference = None
            if other != name:
                difference = Difference("", f"the original runs it where {self.other_run} runs {other}")
            elif found := first_difference(
                values, clone(list(tensors)), f"its result in {self.other_run}", self.tolerance
            ):
                difference = found
        self.position += 1
        if difference is not None:
            self.wrong = WrongOp(f"{name}{_line_here()}", difference)


def _line_here() -> str:
    """Return in words the innermost line of the user's on the stack."""
    own = (str(Path(torch.__file__).parent), str(Path(piecework.__file__).parent))
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((*own, "<")):
            return f' ("{frame.filename}", line {frame.lineno}, in {frame.name}: "{frame.line}")'
    return ""
