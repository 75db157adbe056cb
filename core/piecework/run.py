"""Turn a split graph into straight-line Python: no module calls, no fetching of parameters."""

from __future__ import annotations

import keyword
import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from piecework import torch_internals as internals
from piecework.pieces import InputKind, SplittingOp
from piecework.split import PieceStep, SplitGraph
from piecework.trace import GraphInput, Trace, dim_symbol, named_expression


def size_variable(position: int) -> str:
    """Return the name of the variable that holds the size of a named dim."""
    return f"_pw_s{position}"


@dataclass
class StraightLine:
    """Generated code and the names it refers to.

    ``namespace`` holds the pieces, the parameters and buffers, and the functions that run eagerly;
    a parameter that is replaced is bound anew by assigning its name there.
    """

    source: str
    namespace: dict[str, Any]
    bound_names: dict[Node, str]
    function: Callable[..., tuple[Any, ...]]


def straight_line(
    split: SplitGraph,
    runs: Sequence[Callable[..., Any]],
    inputs: Mapping[Node, GraphInput],
    bound: Mapping[Node, torch.Tensor],
    dims: Sequence[str],
    meaning_of_symbol: Mapping[sympy.Symbol, str | int],
    shape_env: internals.ShapeEnv,
    *,
    name: str,
) -> StraightLine:
    """Generate the function that runs all steps.

    Args:
        split: the steps.
        runs: the compiled pieces, one per piece of the graph.
        inputs: where each placeholder comes from.
        bound: the tensors behind placeholders that are no arguments.
        dims: the named dims; their sizes are the last arguments of the function.
        meaning_of_symbol: the dim, or the number, that each symbol stands for.
        shape_env: what torch knows about the symbols.
        name: shown in tracebacks.

    Returns:
        ``function(*tensor_arguments, *sizes)`` returns what the traced graph returns.
    """
    writer = _Writer(split, inputs, dims, meaning_of_symbol, shape_env)
    for node, tensor in bound.items():
        writer.bind(node, tensor)
    pieces = iter(runs)
    for step in split.steps:
        if isinstance(step, PieceStep):
            writer.piece(step, next(pieces))
        else:
            for node in step.nodes:
                writer.eager(node, step.ops.get(node))
    return writer.finish(name)


def whole_graph(
    trace: Trace,
    inputs: Mapping[Node, GraphInput],
    bound: Mapping[Node, torch.Tensor],
    dims: Sequence[str],
    *,
    name: str,
) -> StraightLine:
    """Generate the function that calls what the backend of level 2 made of the whole graph."""
    namespace: dict[str, Any] = {"backend": trace.backend_result}
    bound_names = {node: f"p{i}" for i, node in enumerate(bound)}
    namespace.update((name, bound[node]) for node, name in bound_names.items())
    variables = {dim: size_variable(i) for i, dim in enumerate(dims)}
    given: list[str] = []
    for node, source in inputs.items():
        if source.kind is InputKind.SIZE:
            value = internals.size_expression(node.meta["example_value"], trace.shape_env)
            given.append(_over_variables(value, trace.meaning_of_symbol, variables))
        else:
            given.append(bound_names.get(node) or f"a{source.tensor_index}")
    positions = sorted(source.tensor_index for source in inputs.values() if source.tensor_index is not None)
    parameters = [*(f"a{position}" for position in positions), *variables.values()]
    source_text = f"def forward({', '.join(parameters)}):\n    return backend({', '.join(given)})\n"
    return _made(source_text, namespace, bound_names, name)


def _over_variables(
    expression: sympy.Basic, meaning_of_symbol: Mapping[sympy.Symbol, str | int], variables: Mapping[str, str]
) -> str:
    """Return a size expression as Python over the variables that hold the sizes."""
    named = named_expression(expression, meaning_of_symbol)
    return internals.print_expression(named.xreplace({dim_symbol(d): dim_symbol(v) for d, v in variables.items()}))


def _made(source: str, namespace: dict[str, Any], bound_names: dict[Node, str], name: str) -> StraightLine:
    filename = f"<piecework run of {name}>"
    namespace.update(internals.EXPRESSION_NAMESPACE)
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    return StraightLine(source, namespace, bound_names, namespace.pop("forward"))


@dataclass
class _Line:
    text: str
    uses: list[str] = field(default_factory=list)
    defines: list[str] = field(default_factory=list)


class _Writer:
    def __init__(
        self,
        split: SplitGraph,
        inputs: Mapping[Node, GraphInput],
        dims: Sequence[str],
        meaning_of_symbol: Mapping[sympy.Symbol, str | int],
        shape_env: internals.ShapeEnv,
    ) -> None:
        self.split = split
        self.effects = split.effects
        self.dims = dims
        self.shape_env = shape_env
        self.meaning_of_symbol = meaning_of_symbol
        self.lines: list[_Line] = []
        self.namespace: dict[str, Any] = {}
        self.names: dict[Node, str] = {}
        self.bound_names: dict[Node, str] = {}
        self.uses: list[str] = []
        self.functions: dict[int, str] = {}
        self.arguments: list[str] = []
        self.known_sizes: set[sympy.Basic] = set(meaning_of_symbol)
        activations = [(g.tensor_index, node) for node, g in inputs.items() if g.kind is InputKind.ACTIVATION]
        for position, node in sorted(activations, key=lambda pair: pair[0] or 0):
            self.names[node] = f"a{position}"
            self.arguments.append(f"a{position}")

    def bind(self, node: Node, tensor: torch.Tensor) -> None:
        name = f"p{len(self.bound_names)}"
        self.names[node] = self.bound_names[node] = name
        self.namespace[name] = tensor

    # Steps.

    def piece(self, step: PieceStep, run: Callable[..., Any]) -> None:
        given = [self.size_text(i) if isinstance(i, sympy.Symbol) else self.value(i) for i in step.inputs]
        self.namespace[step.name] = run
        call = f"{step.name}({', '.join(given)})"
        if step.outputs:
            results = [self.new_name(node) for node in step.outputs]
            self.add(f"{', '.join(results)}{',' if len(results) == 1 else ''} = {call}", results, step.outputs)
        else:
            self.add(call)

    def eager(self, node: Node, op: SplittingOp | None) -> None:
        args = [self.argument(arg) for arg in node.args]
        args += [f"{key}={self.argument(value)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            text = f"{args[0]}.{node.target}({', '.join(args[1:])})"
        elif node.target is operator.getitem:
            text = f"{args[0]}[{args[1]}]"
        else:
            text = f"{self.function(node, op)}({', '.join(args)})"
        if node.users:
            name = self.new_name(node)
            self.add(f"{name} = {text}", [name], [node])
        else:
            self.add(text)

    def add(self, text: str, defines: Sequence[str] = (), nodes: Sequence[Node] = ()) -> None:
        self.lines.append(_Line(text, self.uses, list(defines)))
        self.uses = []
        for node in nodes:
            self.read_sizes(node)

    def read_sizes(self, node: Node) -> None:
        """Give sizes that follow from no input a variable where a value first has them.

        They come from ops whose results depend on data, and on torch 2.11 from slices up to a size.
        """
        for tensor in (value for value in [self.effects.values[node]] if isinstance(value, torch.Tensor)):
            for dim, size in enumerate(tensor.shape):
                symbol = internals.size_expression(size, self.shape_env)
                if isinstance(symbol, sympy.Symbol) and symbol not in self.known_sizes:
                    self.known_sizes.add(symbol)
                    self.lines.append(_Line(f"{symbol} = {self.names[node]}.size({dim})", [self.names[node]]))

    def new_name(self, node: Node) -> str:
        name = f"v{len(self.names)}_{node.name}"
        self.names[node] = name
        return name

    # Values.

    def value(self, node: Node) -> str:
        while node in self.effects.identical and node not in self.names:
            node = self.effects.aliased[node]
        if node not in self.names:
            if self.effects.is_scalar(node):
                return self.number(self.effects.values[node])
            self.view(node)
        self.uses.append(self.names[node])
        return self.names[node]

    def view(self, node: Node) -> None:
        """Take a view from its base again: views never cross a cut."""
        outer, self.uses = self.uses, []
        self.eager(node, None)
        self.uses = outer

    def number(self, value: Any) -> str:
        if isinstance(value, tuple):
            return f"({''.join(f'{self.number(item)}, ' for item in value)})"
        if isinstance(value, (int, float, bool)):
            return repr(value)
        expression = self.shape_env.replace(value.node.expr)
        return f"({self.expression_text(expression)})"

    def size_text(self, symbol: sympy.Symbol) -> str:
        return self.expression_text(symbol)

    def expression_text(self, expression: sympy.Basic) -> str:
        variables = {dim: size_variable(i) for i, dim in enumerate(self.dims)}
        return _over_variables(expression, self.meaning_of_symbol, variables)

    def argument(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.value(value)
        if type(value) is tuple:
            return f"({', '.join(map(self.argument, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.argument, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.constant(k)}: {self.argument(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self.argument(value.start)}, {self.argument(value.stop)}, {self.argument(value.step)})"
        return self.constant(value)

    def constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        name = f"c{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def function(self, node: Node, op: SplittingOp | None) -> str:
        target: Any = node.target
        if op is not None and op.implementation is not None:
            target = op.implementation
        else:
            target = self.effects.overload(node) or target
        name = self.functions.get(id(target))
        if name is None:
            own = getattr(target, "__name__", "call").replace(".", "_")
            own = own if own.isidentifier() and not keyword.iskeyword(own) else "call"
            name = self.functions[id(target)] = f"f{len(self.functions)}_{own}"
            self.namespace[name] = target
        return name

    # The whole.

    def finish(self, name: str) -> StraightLine:
        returned = [self.returned(value) for value in self.split.returned]
        self.add(f"return ({', '.join(returned)}{',' if len(returned) == 1 else ''})")
        parameters = [*self.arguments, *(size_variable(i) for i in range(len(self.dims)))]
        body = "\n".join(f"    {line}" for line in self.with_deletions())
        source = f"def forward({', '.join(parameters)}):\n{body}\n"
        return _made(source, self.namespace, self.bound_names, name)

    def returned(self, value: Any) -> str:
        if isinstance(value, Node) and value not in self.names and self.effects.is_view(value):
            self.view(value)  # also one that looks like its base: the caller gets a tensor of its own
        return self.argument(value)

    def with_deletions(self) -> list[str]:
        """Return the lines, with each intermediate dropped after its last use."""
        last = {name: i for i, line in enumerate(self.lines) for name in (*line.defines, *line.uses)}
        lines: list[str] = []
        for i, line in enumerate(self.lines):
            lines.append(line.text)
            touched = dict.fromkeys((*line.uses, *line.defines))
            dead = [name for name in touched if name.startswith("v") and last[name] == i]
            if dead and i < len(self.lines) - 1:
                lines.append(f"del {', '.join(dead)}")
        return lines
