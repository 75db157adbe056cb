"""Cut a traced graph at its splitting ops, so that no piece depends on how another one looks inside.

A value that crosses a cut is a tensor with memory of its own: what follows from sizes is derived
again in each piece, and a view is taken again from its base by whoever uses it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from piecework import torch_internals as internals
from piecework.effects import OPS_OF_TORCH, Effects, find_effects, line_of, op_name, tensors_in, warn_of_undeclared
from piecework.errors import SplitError
from piecework.op_matching import OpMatcher, check_all_found
from piecework.pieces import SplittingOp

PieceInput = Node | sympy.Symbol
"""A node of the traced graph, or a size."""


@dataclass(frozen=True)
class PieceStep:
    """A part of the graph that is compiled; it stands between two cuts."""

    name: str
    graph: GraphModule
    inputs: tuple[PieceInput, ...]
    outputs: tuple[Node, ...]
    written: tuple[int, ...]
    """Indices of the inputs that it writes to."""
    aliased: tuple[tuple[int, ...], ...]
    """Groups of inputs that share memory."""
    outputs_are_fresh: bool


@dataclass(frozen=True)
class EagerStep:
    """Nodes that run one by one: splitting ops, and what costs no kernel between and around them."""

    nodes: tuple[Node, ...]
    ops: dict[Node, SplittingOp]

    @property
    def num_splitting_ops(self) -> int:
        """Return how many of the nodes are splitting ops."""
        return len(self.ops)


Step = PieceStep | EagerStep


@dataclass
class SplitGraph:
    """A traced graph as a list of steps, in the order in which they run."""

    steps: tuple[Step, ...]
    graph: GraphModule
    effects: Effects
    returned: tuple[Any, ...]
    """The outputs of the traced graph: nodes and constants."""

    @property
    def pieces(self) -> list[PieceStep]:
        """Return the steps that are compiled."""
        return [step for step in self.steps if isinstance(step, PieceStep)]

    @property
    def num_pieces(self) -> int:
        """Return the number of pieces and of steps with splitting ops."""
        return sum(isinstance(step, PieceStep) or step.num_splitting_ops > 0 for step in self.steps)

    def text(self) -> str:
        """Return the steps, one per line, for logs and tests."""
        lines: list[str] = []
        for step in self.steps:
            if isinstance(step, PieceStep):
                names = [node.name for node in step.graph.graph.nodes if node.op not in ("placeholder", "output")]
                lines.append(f"{step.name}: {', '.join(names)}")
            else:
                lines.append(f"eager: {', '.join(node.name for node in step.nodes)}")
        return "\n".join(lines)


def split_graph(
    graph: GraphModule,
    fake_mode: internals.FakeTensorMode,
    ops: Sequence[SplittingOp],
    *,
    must_match: Iterable[str] = (),
    bound: Mapping[Node, torch.Tensor] | None = None,
) -> SplitGraph:
    """Cut a Dynamo graph at the given ops.

    Args:
        graph: flat inputs with ``example_value`` in their meta; it loses assertions that always hold, and is not
            changed otherwise.
        fake_mode: the mode of those example values.
        ops: where to cut; a name may be a packet, an overload or an ATen name.
        must_match: names among ``ops`` that the user gave; one that is not in the graph is
            reported, and is an error where it only appears when another op is decomposed.
        bound: the real parameters and buffers by placeholder, to see which share memory.

    Raises:
        ConfigError: torch knows no op of a given name.
        SplitError: the graph can't be cut there; the message names the user's line.
    """
    matcher = OpMatcher(ops)
    _drop_vain_assertions(graph)
    effects = find_effects(graph, fake_mode)
    splitter = _Splitter(graph, effects, matcher, fake_mode, bound or {})
    result = splitter.split()
    check_all_found(graph, fake_mode, matcher, must_match, splitter.matched_names)
    return result


def _drop_vain_assertions(graph: GraphModule) -> None:
    """Drop what asserts that a size of a tensor is not negative: Dynamo does for each size that follows from data.

    Else the result of an op that nobody uses would count as used.
    """
    for assertion in [node for node in graph.graph.nodes if op_name(node) == "aten::_assert_scalar"]:
        condition = assertion.args[0]
        if not isinstance(condition, Node) or condition.target is not operator.ge or condition.args[1] != 0:
            continue
        size = condition.args[0]
        if isinstance(size, Node) and op_name(size) == "aten::sym_size":
            item = [node for node in size.all_input_nodes if node.target is operator.getitem]
            for node in (assertion, condition, size, *item):
                if not node.users:
                    graph.graph.erase_node(node)
            graph.recompile()


@dataclass
class _Region:
    """Consecutive nodes without a splitting op, or splitting ops without a kernel between them."""

    is_eager: bool
    nodes: list[Node] = field(default_factory=list)
    ops: dict[Node, SplittingOp] = field(default_factory=dict)


_FUNCTORCH_OPENS = tuple(f"_{what}_increment_nesting" for what in ("vmap", "grad", "jvp"))
_FUNCTORCH_CLOSES = tuple(f"_{what}_decrement_nesting" for what in ("vmap", "grad", "jvp"))
_OPENS = ("_enter_autocast", "_enter_inference_mode", *_FUNCTORCH_OPENS)
_CLOSES = ("_exit_autocast", "_exit_inference_mode", *_FUNCTORCH_CLOSES)


class _Splitter:
    def __init__(
        self,
        graph: GraphModule,
        effects: Effects,
        matcher: OpMatcher,
        fake_mode: internals.FakeTensorMode,
        bound: Mapping[Node, torch.Tensor],
    ) -> None:
        self.graph = graph
        self.effects = effects
        self.matcher = matcher
        assert fake_mode.shape_env is not None
        self.shape_env = fake_mode.shape_env
        self.transforms = _keep_functorch_together(graph, effects)
        self.bound = bound
        self.matched_names: set[str] = set()
        self.exported: set[Node] = set()
        self.returned: tuple[Any, ...] = tuple(graph.graph.output_node().args[0])  # pyright: ignore[reportArgumentType]

    def split(self) -> SplitGraph:
        regions = self.regions()
        home = {node: region for region in regions for node in region.nodes}
        exports = self.choose_exports(regions, home)
        steps: list[Step] = []
        num_pieces = 0
        for region in regions:
            if region.is_eager:
                steps.append(EagerStep(tuple(region.nodes), region.ops))
            else:
                outputs = [exports[node] for node in region.nodes if node in exports]
                steps.append(self.piece(f"piece_{num_pieces}", region, outputs))
                num_pieces += 1
        return SplitGraph(tuple(steps), self.graph, self.effects, self.returned)

    # Which node stands where.

    def regions(self) -> list[_Region]:
        """Group the nodes that do something; views and numbers are repeated where they are used."""
        parts: list[_Region] = [_Region(is_eager=False)]
        home: dict[Node, _Region] = {}
        depth: list[Node] = []
        for node in self.graph.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                continue
            if _sets_grad(node) and node not in self.transforms.switches:
                continue
            if self.is_repeated(node):
                self.refuse_repeated(node)
                continue
            parent = self.unpacked_parent(node)
            if parent is not None:
                home[node] = home[parent]
                home[parent].nodes.append(node)
                continue
            self.refuse_nested(node)
            found = self.matcher.find(node, self.effects)
            if found is not None:
                self.matched_names.add(found[0])
                if depth:
                    self.refuse_cut_context(node, depth[-1])
                parts += [_Region(is_eager=True), _Region(is_eager=False)]
                parts[-2].ops[node] = found[1]
                parts[-2].nodes.append(node)
                home[node] = parts[-2]
                continue
            warn_of_undeclared(node)
            _track_contexts(node, depth)
            home[node] = parts[-1]
            parts[-1].nodes.append(node)
        return self.merged(parts)

    def merged(self, parts: list[_Region]) -> list[_Region]:
        """Let regions without a kernel run eagerly, and join eager neighbours into one step."""
        merged: list[_Region] = []
        for part in parts:
            part.is_eager = part.is_eager or not any(self.has_kernel(node) for node in part.nodes)
            if not part.nodes:
                continue
            if merged and merged[-1].is_eager and part.is_eager:
                merged[-1].nodes += part.nodes
                merged[-1].ops.update(part.ops)
            else:
                merged.append(part)
        return merged

    def is_repeated(self, node: Node) -> bool:
        return self.effects.is_view(node) or self.effects.is_scalar(node)

    def has_kernel(self, node: Node) -> bool:
        return not self.effects.is_allocation(node) and not self.effects.only_reads_sizes(node)

    def unpacked_parent(self, node: Node) -> Node | None:
        """Return the op with several results that a node unpacks: it stays with that op."""
        if node.target is not operator.getitem or not isinstance(node.args[0], Node):
            return None
        return None if isinstance(self.effects.values[node.args[0]], torch.Tensor) else node.args[0]

    def refuse_repeated(self, node: Node) -> None:
        """Refuse a splitting op that would run wherever its result is used, and not once per call.

        Torch's own views do nothing that could be done twice: they are no place to cut at, and that is all.
        """
        found = self.matcher.find(node, self.effects)
        if found is None:
            return
        self.matched_names.add(found[0])
        if found[0].partition("::")[0] not in OPS_OF_TORCH:
            raise SplitError(
                f"splitting op {found[0]}, or its fake implementation, returns a view of its input, or a size"
                f"{line_of(node)}; these are taken again wherever they are used, so that it would not run once per "
                "call; have it return memory of its own, or write into an argument"
            )

    def refuse_nested(self, node: Node) -> None:
        for arg in node.all_input_nodes:
            inner = getattr(self.graph, str(arg.target), None) if arg.op == "get_attr" else None
            if not isinstance(inner, GraphModule):
                continue
            for inside in inner.graph.nodes:
                name = op_name(inside)
                if name is not None and name in self.matcher.by_name:
                    raise SplitError(
                        f"splitting op {name} stands inside the body of {node.target}{line_of(inside)}, where the "
                        "graph can't be cut; call the layer directly, without checkpointing or control-flow operators"
                    )

    def refuse_cut_context(self, node: Node, opened: Node) -> None:
        name = getattr(opened.target, "__name__", "")
        context = f"torch.{name.removeprefix('_enter_')}" if name.startswith("_enter_") else "torch.func or vmap"
        raise SplitError(
            f"splitting op {op_name(node)}{line_of(node)} stands inside a context of {context}{line_of(opened)}, which "
            "can't be cut in two; close it before the op, or put it around the whole call of the model"
        )

    # Which values cross a cut.

    def resolve(self, node: Node) -> Node:
        """Return the node whose value is the same tensor, past ops that work in place or do nothing."""
        while node in self.effects.identical:
            node = self.effects.aliased[node]
        return node

    def bases(self, node: Node) -> Iterator[Node]:
        """Yield the nodes whose values a user of ``node`` needs from elsewhere."""
        node = self.resolve(node)
        if self.effects.is_view(node) and node not in self.exported:
            for arg in node.all_input_nodes:
                yield from self.bases(arg)
        elif not self.effects.is_scalar(node):
            yield node

    def choose_exports(self, regions: list[_Region], home: dict[Node, _Region]) -> dict[Node, Node]:
        """Return what each node whose memory is needed outside of its region is exported as.

        It is the node itself, from which users take their views again; or, where all of them look
        at it in one way only, that view, so that nothing is left to do between the pieces.
        """
        looks: dict[Node, dict[Node, None]] = {}
        for used, region in self.uses(regions):
            for base in self.bases(used):
                if base in home and home[base] is not region:
                    looks.setdefault(base, {})[self.look_at(used, base)] = None
        exports = {base: next(iter(nodes)) if len(nodes) == 1 else base for base, nodes in looks.items()}
        for base, node in exports.items():
            if home[base].is_eager:
                exports[base] = base
            elif internals.is_functorch_wrapped(self.effects.values[base]):
                raise SplitError(
                    f"what torch.func follows for a derivative crosses a cut{line_of(base)}: the derivative is taken "
                    "after a splitting op that stands behind its function; take it before"
                )
            elif isinstance(self.effects.values[base], (tuple, list)):
                raise SplitError(
                    f"{base.format_node()} gives several tensors, which cross a cut as one tuple{line_of(base)}; "
                    "unpack it before it is used"
                )
            else:
                self.exported.add(node)
        return exports

    def uses(self, regions: list[_Region]) -> Iterator[tuple[Node, _Region | None]]:
        """Yield every use of a value, with the region that uses it; None for the result of the graph."""
        for region in regions:
            for node in region.nodes:
                for arg in node.all_input_nodes:
                    yield arg, region
        for value in self.returned:
            if isinstance(value, Node):
                yield value, None

    def look_at(self, node: Node, base: Node) -> Node:
        """Return the view of ``base`` that a use of ``node`` sees; ``base`` where it can't be taken from it alone."""
        node = seen = self.resolve(node)
        while node is not base:
            tensors = [arg for arg in node.all_input_nodes if not self.effects.is_scalar(arg)]
            if len(tensors) != 1:
                return base
            node = self.resolve(tensors[0])
        return seen

    # One piece.

    def piece(self, name: str, region: _Region, outputs: list[Node]) -> PieceStep:
        inputs = self.inputs_of(region, outputs)
        builder = _PieceBuilder(self, inputs)
        for node in region.nodes:
            builder.copy(node)
        graph = builder.finish(outputs)
        storages = [self.effects.storages.get(node, ()) if isinstance(node, Node) else () for node in inputs]
        touched = {key for node in region.nodes for key in self.effects.written[node]}
        written = tuple(i for i, keys in enumerate(storages) if touched.intersection(keys))
        output_keys = [key for node in outputs for key in self.effects.storages[node]]
        input_keys = {key for keys in storages for key in keys}
        fresh = len(set(output_keys)) == len(output_keys) and not input_keys.intersection(output_keys)
        return PieceStep(name, graph, inputs, tuple(outputs), written, self.aliases(inputs), fresh)

    def inputs_of(self, region: _Region, outputs: list[Node]) -> tuple[PieceInput, ...]:
        """Return what a region needs from outside: tensors in order of use, then sizes."""
        inside = set(region.nodes)
        found: dict[PieceInput, None] = {}
        sizes: dict[sympy.Symbol, None] = {}
        for value in (*(arg for node in region.nodes for arg in node.all_input_nodes), *outputs):
            for leaf in self.leaves(value, inside):
                if self.effects.is_scalar(leaf):
                    sizes.update(dict.fromkeys(self.symbols_of(leaf)))
                else:
                    found[leaf] = None
        for node in found:  # Inductor asks for a size as an input of its own, also where a dim shows it
            assert isinstance(node, Node)
            for tensor in tensors_in(self.effects.values[node]):
                sizes.update(dict.fromkeys(internals.size_symbols((*tensor.shape, *tensor.stride()), self.shape_env)))
        return (*found, *sorted(sizes, key=str))

    def leaves(self, node: Node, inside: set[Node]) -> Iterator[Node]:
        """Yield what a use of ``node`` needs from outside: tensors with memory of their own, and numbers."""
        if node in inside or (node := self.resolve(node)) in inside or node.op == "get_attr":
            return
        if self.effects.is_view(node) and (node not in self.exported or self.is_own(node, inside)):
            for arg in node.all_input_nodes:
                yield from self.leaves(arg, inside)
        else:
            yield node

    def is_own(self, node: Node, inside: set[Node]) -> bool:
        """Whether a view is of something that the region itself makes."""
        while node not in inside and self.effects.is_view(node):
            node = self.resolve(self.effects.aliased[node])
        return node in inside

    def symbols_of(self, node: Node) -> list[sympy.Symbol]:
        return internals.size_symbols(self.effects.values[node], self.shape_env)

    def aliases(self, inputs: tuple[PieceInput, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of inputs that share memory: of real parameters, and of op results."""
        groups: dict[Any, list[int]] = {}
        for i, node in enumerate(inputs):
            if isinstance(node, sympy.Symbol):
                continue
            real = self.bound.get(node)
            keys = {internals.storage_key(real)} if real is not None else set(self.effects.storages[node])
            for key in keys - {None}:
                groups.setdefault(key, []).append(i)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)


class _PieceBuilder:
    """Copies nodes of a region, and what they need again from elsewhere, into a graph of its own."""

    def __init__(self, splitter: _Splitter, inputs: tuple[PieceInput, ...]) -> None:
        self.splitter = splitter
        self.graph = Graph()
        self.env: dict[Node, Any] = {}
        self.sizes: dict[sympy.Symbol, Node] = {}
        for value in inputs:
            if isinstance(value, sympy.Symbol):
                node = self.graph.placeholder(str(value))
                node.meta["example_value"] = internals.make_symint(splitter.shape_env, value)
                self.sizes[value] = node
            else:
                node = self.graph.placeholder(value.name)
                node.meta["example_value"] = self.example(value)
                self.env[value] = node

    def example(self, node: Node) -> Any:
        value = node.meta.get("example_value")
        return value if value is not None else self.splitter.effects.values[node]

    def copy(self, node: Node) -> Node:
        transforms = self.splitter.transforms
        if node in transforms.off_before:
            self.switch_gradients(False)
        copied = self.graph.node_copy(node, self.value)
        copied.meta.setdefault("example_value", self.splitter.effects.values[node])
        self.env[node] = copied
        if node in transforms.on_after:
            self.switch_gradients(True)
        return copied

    def switch_gradients(self, on: bool) -> None:
        self.graph.call_function(internals.set_grad_enabled, (on,)).meta["example_value"] = None

    def value(self, node: Node) -> Any:
        if node in self.env:
            return self.env[node]
        resolved = self.splitter.resolve(node)
        if resolved in self.env:
            return self.env[resolved]
        if self.splitter.effects.is_scalar(resolved):
            value = self.splitter.effects.values[resolved]
            try:
                self.env[resolved] = internals.compute_size(value, self.splitter.shape_env, self.sizes)
            # Of a function that has no form for nodes, such as rounding, or that torch has no form of, such as sines.
            except (internals.TraceError, TypeError, AttributeError):
                return self.copy(resolved)
            return self.env[resolved]
        return self.copy(resolved)

    def finish(self, outputs: Sequence[Node]) -> GraphModule:
        self.graph.output(tuple(self.value(node) for node in outputs))
        targets = {str(node.target) for node in self.graph.find_nodes(op="get_attr")}
        attributes = {target: _attribute(self.splitter.graph, target) for target in targets}
        return GraphModule(attributes, self.graph)


def _attribute(module: torch.nn.Module, target: str) -> Any:
    return functools.reduce(getattr, target.split("."), module)


def _sets_grad(node: Node) -> bool:
    """Whether a node only switches gradients, which are off in every piece but inside of ``torch.func``."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "_set_grad_enabled"


@dataclass
class _Transforms:
    """Switches of gradients between a push and a pop of ``torch.func``; without them all there would be constants."""

    switches: set[Node] = field(default_factory=set)
    on_after: set[Node] = field(default_factory=set)
    """Outermost pushes inside of a block of the model that has gradients on, which the pieces know nothing of."""
    off_before: set[Node] = field(default_factory=set)
    """Outermost pops that leave gradients on."""


def _keep_functorch_together(graph: GraphModule, effects: Effects) -> _Transforms:
    """Let no node between a push and a pop of ``torch.func`` be repeated elsewhere: it means nothing outside."""
    found = _Transforms()
    depth = 0
    is_on = False  # As it was traced.
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name in _FUNCTORCH_OPENS and not depth and is_on:
            found.on_after.add(node)
        depth += name in _FUNCTORCH_OPENS
        if _sets_grad(node):
            is_on = bool(node.args[0])
        if depth:
            effects.pinned.add(node)
            effects.aliased.pop(node, None)
            effects.identical.discard(node)
            if _sets_grad(node):
                found.switches.add(node)
        depth -= name in _FUNCTORCH_CLOSES
        if name in _FUNCTORCH_CLOSES and not depth and is_on:
            found.off_before.add(node)
    return found


def _track_contexts(node: Node, depth: list[Node]) -> None:
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    if name in _OPENS:
        depth.append(node)
    elif name in _CLOSES and depth:
        depth.pop()
