"""Turn a split graph into straight-line Python: no module calls, no fetching of parameters."""

from __future__ import annotations

import keyword
import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from piecework import torch_internals as internals
from piecework.effects import Effects, line_of, op_name
from piecework.inputs import GraphInputs
from piecework.notes import WHERE
from piecework.piece_checks import FirstCall, piece_check
from piecework.pieces import PieceRun, SplittingOp
from piecework.split import PieceStep, SplitGraph
from piecework.trace import Relation

if TYPE_CHECKING:
    from piecework.debug import Debug, LineChecks


@dataclass
class StraightLine:
    """Generated code and the names it refers to.

    ``namespace`` holds the pieces (a ``FirstCall`` until it has run), the parameters and buffers, and the
    functions that run eagerly; a parameter that is replaced is bound anew by assigning its name there.
    """

    source: str
    namespace: dict[str, Any]
    bound_names: dict[Node, str]
    function: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Runs:
    """What runs at which size."""

    general: StraightLine
    exact: Mapping[Any, StraightLine] = field(default_factory=dict)
    """Keyed by the size, a tuple where there are several dims."""
    uncompiled: StraightLine | None = None
    """Runs where one of the relations in ``needed``, which compiled code relies on, does not hold."""
    needed: Sequence[Relation] = ()

    @property
    def namespaces(self) -> list[dict[str, Any]]:
        """Return what the generated code refers to."""
        return [line.namespace for line in (self.general, *self.exact.values(), self.uncompiled) if line is not None]


def straight_line(
    split: SplitGraph, runs: Sequence[PieceRun], inputs: GraphInputs, *, name: str, debug: Debug | None = None
) -> StraightLine:
    """Generate the function that runs all steps.

    Args:
        split: the steps.
        runs: the compiled pieces, one per piece of the graph; each is looked at once.
        inputs: what the graph is called with; the sizes are the last arguments of the function.
        name: shown in tracebacks.
        debug: has every piece and splitting op looked at whenever it runs.

    Returns:
        ``function(*tensor_arguments, *sizes)`` returns what the traced graph returns.
    """
    checks = debug.line(split.pieces, runs, split.effects, inputs.sizes) if debug is not None else None
    writer = CodeWriter(split.effects, inputs, checks)
    pieces = iter(runs)
    for step in split.steps:
        if isinstance(step, PieceStep):
            writer.piece(step, next(pieces))
        else:
            for node in step.nodes:
                writer.eager(node, step.ops.get(node))
    returned = [writer.returned(value) for value in split.returned]
    writer.add(f"return ({', '.join(returned)}{',' if len(returned) == 1 else ''})")
    return writer.finish(name)


def whole_graph(function: Callable[..., Any], effects: Effects, inputs: GraphInputs, *, name: str) -> StraightLine:
    """Generate the function that calls what the backend of level 2 made of the whole graph."""
    writer = CodeWriter(effects, inputs)
    writer.namespace["backend"] = function
    call = f"backend({', '.join(writer.value(node) for node in inputs.by_placeholder)})"
    writer.add(f"return {call}", about="the graph")
    return writer.finish(name)


@dataclass
class _Line:
    text: str
    uses: list[str] = field(default_factory=list)
    defines: list[str] = field(default_factory=list)
    about: str = ""
    """What runs there, for notes on exceptions."""


class CodeWriter:
    """Writes lines of Python for the steps and values of one graph."""

    def __init__(self, effects: Effects, inputs: GraphInputs, checks: LineChecks | None = None) -> None:
        self.effects, self.checks = effects, checks
        self.sizes = inputs.sizes
        self.lines: list[_Line] = []
        self.uses: list[str] = []
        self.functions: dict[int, str] = {}
        self.known_sizes: set[sympy.Basic] = set(self.sizes.meaning_of_symbol)
        self.arguments = [f"a{index}" for index in inputs.tensor_indices]
        self.bound_names = {node: f"p{i}" for i, node in enumerate(inputs.bound)}
        self.namespace: dict[str, Any] = {self.bound_names[node]: tensor for node, tensor in inputs.bound.items()}
        self.names = {
            **{n: f"a{g.tensor_index}" for n, g in inputs.by_placeholder.items() if g.tensor_index is not None},
            **self.bound_names,
        }

    # Steps.

    def piece(self, step: PieceStep, piece: PieceRun) -> None:
        given = [self.size_text(i) if isinstance(i, sympy.Symbol) else self.value(i) for i in step.inputs]
        if self.checks is not None:
            self.namespace[step.name] = self.checks.piece(step, piece)
        else:
            check = piece_check(step, piece, self.effects, self.sizes)
            self.namespace[step.name] = FirstCall(piece.run, check, self.namespace) if check else piece.run
        call = f"{step.name}({', '.join(given)})"
        about = piece_words(step, piece)
        if step.outputs:
            results = [self.new_name(node) for node in step.outputs]
            self.add(f"{', '.join(results)}{',' if len(results) == 1 else ''} = {call}", results, step.outputs, about)
        else:
            self.add(call, about=about)

    def eager(self, node: Node, op: SplittingOp | None) -> None:
        args = [self.argument(arg) for arg in node.args]
        args += [f"{key}={self.argument(value)}" for key, value in node.kwargs.items()]
        if node.op == "call_method" and (op is None or self.checks is None):
            text = f"{args[0]}.{node.target}({', '.join(args[1:])})"
        elif node.target is operator.getitem:
            text = f"{args[0]}[{args[1]}]"
        else:
            text = f"{self.function(node, op)}({', '.join(args)})"
        about = op_words(node, op)
        if node.users:
            name = self.new_name(node)
            self.add(f"{name} = {text}", [name], [node], about)
        else:
            self.add(text, about=about)

    def add(self, text: str, defines: Sequence[str] = (), nodes: Sequence[Node] = (), about: str = "") -> None:
        self.lines.append(_Line(text, self.uses, list(defines), about))
        self.uses = []
        for node in nodes:
            self.read_sizes(node)

    def read_sizes(self, node: Node) -> None:
        """Give sizes that follow from no input a variable where a value first has them.

        They come from ops whose results depend on data, and on torch 2.11 from slices up to a size.
        """
        for tensor in (value for value in [self.effects.values[node]] if isinstance(value, torch.Tensor)):
            for dim, size in enumerate(tensor.shape):
                symbol = internals.size_expression(size, self.sizes.shape_env)
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
        if node in self.effects.parts:
            self.part(node)
        else:
            self.eager(node, None)
        self.uses = outer

    def part(self, node: Node) -> None:
        """Take what an op gave of an argument that it wrote to, without running the op again."""
        whole = self.effects.parts[node]
        base, fake, of = self.value(whole), self.effects.values[node], self.effects.values[whole]
        offset = self.number(fake.storage_offset() - of.storage_offset())
        layout = f"{self.number(tuple(fake.size()))}, {self.number(tuple(fake.stride()))}"
        name = self.new_name(node)
        self.add(f"{name} = {base}.as_strided({layout}, {base}.storage_offset() + {offset})", [name], [node])

    def number(self, value: Any) -> str:
        if isinstance(value, tuple):
            return f"({''.join(f'{self.number(item)}, ' for item in value)})"
        if isinstance(value, (int, float, bool)):
            return repr(value)
        return f"({self.size_text(self.sizes.shape_env.replace(value.node.expr))})"

    def size_text(self, expression: sympy.Basic) -> str:
        return self.sizes.code(self.sizes.named(expression))

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
        if op is not None and self.checks is not None:
            target = self.checks.op(node, getattr(torch.Tensor, target) if node.op == "call_method" else target)
        name = self.functions.get(id(target))
        if name is None:
            own = getattr(target, "__name__", "call").replace(".", "_")
            own = own if own.isidentifier() and not keyword.iskeyword(own) else "call"
            name = self.functions[id(target)] = f"f{len(self.functions)}_{own}"
            self.namespace[name] = target
        return name

    # The whole.

    def finish(self, name: str) -> StraightLine:
        parameters = [*self.arguments, *self.sizes.variables.values()]
        lines = self.with_deletions()
        body = "\n".join(f"    {line.text}" for line in lines)
        source = f"def forward({', '.join(parameters)}):\n{body}\n"
        filename = f"<piecework run of {name}>"
        self.namespace.update(internals.EXPRESSION_NAMESPACE)
        about = {number: line.about for number, line in enumerate(lines, 2) if line.about}
        self.namespace[WHERE] = lambda _, line: about.get(line)
        exec(compile(source, filename, "exec"), self.namespace)
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        return StraightLine(source, self.namespace, self.bound_names, self.namespace.pop("forward"))

    def returned(self, value: Any) -> str:
        if isinstance(value, Node) and value not in self.names and self.effects.is_view(value):
            self.view(value)  # also one that looks like its base: the caller gets a tensor of its own
        return self.argument(value)

    def with_deletions(self) -> list[_Line]:
        """Return the lines, with each intermediate dropped after its last use."""
        last = {name: i for i, line in enumerate(self.lines) for name in (*line.defines, *line.uses)}
        lines: list[_Line] = []
        for i, line in enumerate(self.lines):
            lines.append(line)
            touched = dict.fromkeys((*line.uses, *line.defines))
            dead = [name for name in touched if name.startswith("v") and last[name] == i]
            if dead and i < len(self.lines) - 1:
                lines.append(_Line(f"del {', '.join(dead)}"))
        return lines


def piece_words(step: PieceStep, piece: PieceRun) -> str:
    """Return in words what a piece is, and whose code runs it."""
    return f"{step.name}, {piece.how},"


def op_words(node: Node, op: SplittingOp | None) -> str:
    """Return in words what a node that stands between pieces does, and where the user wrote it."""
    return f"{'' if op is None else 'splitting op '}{op_name(node) or node.target}{line_of(node)}"
