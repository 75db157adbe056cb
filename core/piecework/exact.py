"""A traced graph at one exact size: for compilers, and to see whether the trace holds at size 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from piecework import torch_internals as internals
from piecework.effects import fresh_fake, line_of, tensors_in

Values = Mapping[sympy.Symbol, int]


def exact_graph(graph: GraphModule, values: Values, shape_env: internals.ShapeEnv | None) -> GraphModule:
    """Return a copy of a graph whose example inputs have one size; sizes among its inputs become constants.

    Args:
        graph: symbolic ``example_value`` in the meta of its placeholders.
        values: a number for each symbol.
        shape_env: what torch knows about the symbols; None where nothing is symbolic.
    """
    exact = copied_graph(graph)
    copied = exact.graph
    # Nothing is symbolic, but Inductor keeps nothing in its cache where there is nobody to ask for guards.
    with internals.new_fake_mode(internals.ShapeEnv()):
        for node in copied.find_nodes(op="placeholder"):
            example = _exact_example(node.meta["example_value"], values, shape_env)
            node.meta["example_value"] = example
            if isinstance(example, int):
                for user in list(node.users):
                    user.args, user.kwargs = map_arg(
                        (user.args, user.kwargs), lambda arg, node=node, number=example: number if arg is node else arg
                    )
    exact.recompile()
    return exact


def copied_graph(graph: GraphModule) -> GraphModule:
    """Return a graph of its own with the same nodes and submodules."""
    copied = Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    return GraphModule(graph, copied)


def _exact_example(example: Any, values: Values, shape_env: internals.ShapeEnv | None) -> Any:
    def number(size: int | torch.SymInt) -> int:
        if isinstance(size, int):
            return size
        assert shape_env is not None
        return int(internals.size_expression(size, shape_env).xreplace(values))  # pyright: ignore[reportArgumentType]

    if isinstance(example, (int, torch.SymInt)):
        return number(example)
    if type(example) not in (internals.FakeTensor, torch.nn.Parameter):
        return example
    shape, stride = [number(size) for size in example.size()], [number(step) for step in example.stride()]
    made = torch.empty_strided(shape, stride, dtype=example.dtype, device=example.device)
    return torch.nn.Parameter(made, example.requires_grad) if isinstance(example, torch.nn.Parameter) else made


def run_on_fakes(graph: GraphModule, note: Callable[[Node, Any], Any]) -> None:
    """Run an exact graph on fresh fake inputs, and note what each node gives."""

    class Runner(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            if n.op not in ("placeholder", "output"):
                note(n, result)
            return result

    examples = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    mode = next((example.fake_mode for example in examples if isinstance(example, internals.FakeTensor)), None)
    mode = mode or internals.new_fake_mode(internals.ShapeEnv())
    with mode, internals.without_new_guards(mode), torch.no_grad():
        Runner(graph).run(*[fresh_fake(example) for example in examples])


def departs_at_one(
    graph: GraphModule, symbols: Sequence[sympy.Symbol], sizes: Values, shape_env: internals.ShapeEnv
) -> str | None:
    """Return in words the first op that does something else where some sizes are 1; None where none does.

    A symbol stands for 1 as well, but some ops look at that without leaving a guard: ``squeeze``
    keeps a symbolic dim. So the graph is run on fakes of that size, and shapes are compared.

    Args:
        graph: what was traced; its values are in the meta of its nodes.
        symbols: the sizes to set to 1.
        sizes: the values of all symbols at the trace.
        shape_env: what torch knows about the symbols.
    """
    values = {**sizes, **dict.fromkeys(symbols, 1)}
    exact = exact_graph(graph, values, shape_env)
    originals = {node.name: node for node in graph.graph.nodes}

    def note(node: Node, result: Any) -> None:
        traced = tensors_in(originals[node.name].meta.get("example_value"))
        for symbolic, concrete in zip(traced, tensors_in(result), strict=False):
            sizes = (internals.size_expression(size, shape_env).xreplace(values) for size in symbolic.shape)
            expected = [sympy.sympify(size) for size in sizes]
            if all(size.is_number for size in expected) and expected != list(concrete.shape):
                raise _Departs(f"{node.target} gives {list(concrete.shape)}{line_of(node)}")

    try:
        run_on_fakes(exact, note)
    except _Departs as departure:
        return departure.text
    except (RuntimeError, ValueError, IndexError) as error:  # An op refuses that size.
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


class _Departs(Exception):
    """Ends a run at the first difference."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text  # the interpreter writes into the arguments of an error
