"""What each node of a traced graph writes to and which nodes share memory, found by running it on fakes."""

from __future__ import annotations

import contextlib
import inspect
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Interpreter, Node
from torch.fx.node import map_arg

from piecework import torch_internals as internals
from piecework.errors import CompileError, PieceworkError, PieceworkWarning

ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
SIZE_READERS = frozenset(f"aten::{name}" for name in ("size", "stride", "dim", "numel", "sym_size", "storage_offset"))
MAYBE_COPIES = frozenset(f"aten::{name}" for name in ("reshape", "contiguous", "flatten", "ravel", "to", "type_as"))
OPS_OF_TORCH = frozenset(
    (
        *("aten", "prim", "prims", "profiler", "higher_order", "export", "streams", "mempool", "inductor", "fsdp"),
        *(
            "c10d",
            "c10d_functional",
            "_c10d_functional",
            "_c10d_functional_autograd",
            "_dtensor",
            "symm_mem",
            "rngprims",
        ),
        *("inductor_prims", "debugprims", "debug_mode_ops", "flex_lib", "static_runtime", "sparse", "mkl", "mkldnn"),
        *("onednn", "onnx", "quantized", "_quantized", "quantized_decomposed", "quantization", "_native"),
    )
)
"""Namespaces of the ops that torch 2.11 to 2.14 register themselves; ops in others are somebody's own."""
_OPERATOR_NAMES = {"iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "truediv": "div"}


@dataclass
class Effects:
    """Facts about every node of one graph.

    Attributes:
        values: what the node gives, with fake tensors in place of tensors.
        storages: the storages of the tensors that it gives, in order.
        written: the storages that the node writes to.
        aliased: for a node whose result shares memory with one of its arguments: that argument.
        identical: the nodes whose result has the values and the layout of that argument: ops that
            work in place, and those that do nothing, such as dropout in evaluation.
        parts: for a node that shows a part of an argument that its op wrote to, or that memory in another
            layout: that argument. No view, as the op is not run again to take it.
        pinned: nodes that mean something in their place only, and are never repeated elsewhere.
    """

    values: dict[Node, Any] = field(default_factory=dict)
    storages: dict[Node, tuple[int | None, ...]] = field(default_factory=dict)
    written: dict[Node, frozenset[int]] = field(default_factory=dict)
    aliased: dict[Node, Node] = field(default_factory=dict)
    identical: set[Node] = field(default_factory=set)
    parts: dict[Node, Node] = field(default_factory=dict)
    pinned: set[Node] = field(default_factory=set)

    def is_scalar(self, node: Node) -> bool:
        """Whether a node gives a number that follows from sizes alone."""
        return node not in self.pinned and internals.is_known_number(self.values[node])

    def is_view(self, node: Node) -> bool:
        """Whether a node gives another look at an argument of its, and does nothing else."""
        return node in self.aliased and not self.written[node]

    def may_copy(self, node: Node) -> bool:
        """Whether a node gives a view or a copy, depending on the layout of its argument."""
        return aten_name(node) in MAYBE_COPIES

    def only_reads_sizes(self, node: Node) -> bool:
        """Whether a node looks at shapes alone, or asserts something of numbers."""
        reads = any(self.storages[arg] for arg in node.all_input_nodes)
        return not self.storages[node] and (not reads or (aten_name(node) or "") in SIZE_READERS)

    def is_allocation(self, node: Node) -> bool:
        """Whether a node gives memory that nothing has been written to."""
        return aten_name(node) in ALLOCATIONS

    def overload(self, node: Node) -> internals.OpOverload | None:
        """Return the overload that a node calls, if it calls an op."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda arg: self.values[arg])
        return overload_of(node, args, kwargs)


def find_effects(graph: torch.fx.GraphModule, fake_mode: internals.FakeTensorMode) -> Effects:
    """Run a traced graph once on fresh fake inputs, and note what each node does.

    Raises:
        CompileError: a node changes the shape of one of its arguments in place, or can't run on fakes.
    """
    finder = _Finder(graph, fake_mode)
    examples = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    with running_again(fake_mode):
        finder.run(*[fresh_fake(example) for example in examples])
    return finder.effects


@contextlib.contextmanager
def running_again(fake_mode: internals.FakeTensorMode) -> Iterator[None]:
    """Run a traced graph on fakes without narrowing the sizes that the trace holds for."""
    with (
        internals.one_trace_for_all_sizes(),
        fake_mode,
        internals.without_new_guards(fake_mode),
        internals.keeping_sizes_symbolic(),
    ):
        yield


def fresh_fake(example: Any) -> Any:
    """Return a fake tensor like another, with a storage of its own; called under a fake mode."""
    if type(example) not in (internals.FakeTensor, torch.nn.Parameter):
        return example
    made = torch.empty_strided(example.size(), example.stride(), dtype=example.dtype, device=example.device)
    return torch.nn.Parameter(made, example.requires_grad) if isinstance(example, torch.nn.Parameter) else made


class _Finder(Interpreter):
    def __init__(self, graph: torch.fx.GraphModule, fake_mode: internals.FakeTensorMode) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.effects = Effects()
        self.shape_env = fake_mode.shape_env

    def run_node(self, n: Node) -> Any:
        given = {arg: tensors_in(self.env[arg]) for arg in n.all_input_nodes}
        before = {id(t): (internals.version(t), self.look(t)) for ts in given.values() for t in ts}
        try:
            result = super().run_node(n)
        except internals.DataDependentOutputException:
            result = n.meta["example_value"]  # a number read from a tensor, which a fake one does not hold
        except PieceworkError:
            raise
        except Exception as error:  # of an op whose kernel, or whose fake implementation, can't take such tensors
            self.extra_traceback = False  # The message has the user's line.
            said = str(error).strip().partition("\n")[0]
            raise CompileError(
                f"{op_name(n) or n.target} can't run on fake tensors whose sizes vary: {type(error).__name__}: {said}; "
                f"register a fake implementation of it by torch.library.register_fake{line_of(n)}"
            ) from error
        written = set(self.declared_writes(n, given))
        for tensors in given.values():
            for tensor in tensors:
                version, look = before[id(tensor)]
                if self.look(tensor) != look:
                    self.extra_traceback = False  # The message has the user's line.
                    raise CompileError(
                        f"{op_name(n) or n.target} changes the shape of a tensor in place, which the parts of a split "
                        f"graph would not agree on; use the form that returns a new tensor{line_of(n)}"
                    )
                if internals.version(tensor) != version and (key := internals.storage_key(tensor)) is not None:
                    written.add(key)
        # The values of the trace itself, where there are any: each run makes new symbols for sizes that it can't know.
        self.effects.values[n] = n.meta.get("example_value", result)
        self.effects.written[n] = frozenset(written)
        self.effects.storages[n] = tuple(internals.storage_key(tensor) for tensor in tensors_in(result))
        self.note_alias(n, result, given)
        return result

    def declared_writes(self, node: Node, given: dict[Node, list[torch.Tensor]]) -> Iterator[int]:
        """Yield the storages that an op says it writes to; not every op raises version counters."""
        if node.op != "call_function":
            return
        if getattr(node.target, "__name__", "") == "triton_kernel_wrapper_mutation":
            yield from (key for ts in given.values() for t in ts if (key := internals.storage_key(t)) is not None)
            return
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        overload = overload_of(node, args, kwargs)
        for tensor in running_statistics(node.target, overload, args, kwargs):
            if (key := internals.storage_key(tensor)) is not None:
                yield key
        if overload is None:
            return
        if declares_nothing(overload):  # It does something, and what it can do is to write to what it is given.
            yield from (key for ts in given.values() for t in ts if (key := internals.storage_key(t)) is not None)
            return
        for position, argument in enumerate(internals.op_schema(overload).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                yield from (key for t in tensors_in(value) if (key := internals.storage_key(t)) is not None)

    def note_alias(self, node: Node, result: Any, given: dict[Node, list[torch.Tensor]]) -> None:
        keys = set(self.effects.storages[node]) - {None}
        if node.op not in ("call_function", "call_method") or not keys:
            return
        sharing = [
            (arg, tensor)
            for arg, tensors in given.items()
            for tensor in tensors
            if internals.storage_key(tensor) in keys
        ]
        if node.target is operator.getitem and not isinstance(self.env[node.args[0]], torch.Tensor):  # pyright: ignore[reportArgumentType]
            # An item of an op with several results is what the op gave, be it fresh or a view.
            parent = node.args[0]
            assert isinstance(parent, Node)
            if self.effects.is_view(parent):  # else it stays with an op that is not run again to look at one item
                self.effects.aliased[node] = parent
            elif (own := next((arg for arg in parent.all_input_nodes if self.env[arg] is result), None)) is not None:
                # An op that works in place gives back what it wrote to: no view, which would be taken again.
                self.effects.aliased[node] = own
                self.effects.identical.add(node)
                self.effects.written[node] = self.effects.written[parent] & keys
            else:
                self.note_part(node, result, {arg: tensors_in(self.env[arg]) for arg in parent.all_input_nodes})
            return
        if keys <= {internals.storage_key(tensor) for _, tensor in sharing}:
            same = [arg for arg, tensor in sharing if tensor is result]
            self.effects.aliased[node] = (same or [sharing[0][0]])[0]
            if same or (isinstance(result, torch.Tensor) and self.look(result) == self.look(sharing[0][1])):
                self.effects.identical.add(node)
            elif self.effects.written[node]:
                self.note_part(node, result, given)

    def note_part(self, node: Node, result: Any, given: Mapping[Node, list[torch.Tensor]]) -> None:
        """Note whose memory a result is a part of, where it can be taken from there by sizes and strides."""
        for arg in given if isinstance(result, torch.Tensor) else ():
            whole = self.env[arg]
            is_of = isinstance(whole, torch.Tensor) and internals.storage_key(whole) == internals.storage_key(result)
            if is_of and whole.dtype == result.dtype:
                self.effects.parts[node] = arg
                return

    def look(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return what tells two views of one storage apart.

        Sizes are compared as expressions: comparing symbolic sizes asks torch for their values.
        """
        if tensor.layout is not torch.strided or self.shape_env is None:
            return (tensor.layout, tuple(tensor.size()))
        sizes = (*tensor.size(), *tensor.stride(), tensor.storage_offset())
        expressions = tuple(internals.size_expression(size, self.shape_env) for size in sizes)
        return tensor.dtype, tensor.dim(), expressions, tensor.is_conj(), tensor.is_neg()


_NORMS_WITH_RUNNING_STATISTICS = frozenset(
    f"aten::{name}" for name in ("batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm")
)
"""Ops that write to their running statistics, which neither their schema nor a version counter tells."""


def running_statistics(
    target: Any, overload: internals.OpOverload | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the running statistics that a call of a norm updates."""
    if name_of(target) not in _NORMS_WITH_RUNNING_STATISTICS:
        return []
    if overload is not None:
        names = [argument.name for argument in internals.op_schema(overload).arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
    elif inspect.isfunction(target):
        bound = inspect.signature(target).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
    else:  # torch.batch_norm and torch.instance_norm agree on these places
        names = ("input", "weight", "bias", "running_mean", "running_var", "training")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
    is_updated = given.get("training", given.get("use_input_stats"))
    return tensors_in([given.get("running_mean"), given.get("running_var")]) if is_updated else []


def declares_nothing(overload: internals.OpOverload) -> bool:
    """Whether an op that is none of torch's returns nothing and says that it writes to nothing."""
    schema = internals.op_schema(overload)
    is_declared = schema.returns or any(argument.alias_info is not None for argument in schema.arguments)
    return overload.namespace not in OPS_OF_TORCH and not is_declared


def warn_of_undeclared(node: Node) -> None:
    """Say that a compiler may drop an op that, by its declaration, does nothing."""
    target = node.target
    overloads = [target] if isinstance(target, internals.OpOverload) else []
    if isinstance(target, internals.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    if overloads and all(map(declares_nothing, overloads)):
        text = (
            f"op {overloads[0].name()}{line_of(node)} returns nothing and declares that it writes to nothing, so a "
            "compiler may leave it out: name what it writes to in mutates_args, or make it a splitting op of level 3"
        )
        warnings.warn(PieceworkWarning(text), stacklevel=2)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a nest of tuples, lists and dicts."""
    return [leaf for leaf in internals.pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def line_of(node: Node) -> str:
    """Return in words the line of the user's that a node comes from."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    if not lines:
        return ""
    places = [(i, line) for i, line in enumerate(lines) if line.startswith("File ")]
    position, place = places[-1] if places else (0, lines[0])
    code = lines[position + 1] if position + 1 < len(lines) else ""
    return f' ({place.removeprefix("File ")}: "{code}")'


# --- names of ops -----------------------------------------------------------------------------


def overload_of(node: Node, args: Any, kwargs: Any) -> internals.OpOverload | None:
    """Return the overload that a node calls; a packet picks it by its arguments."""
    if isinstance(node.target, internals.OpOverload):
        return node.target
    if isinstance(node.target, internals.OpOverloadPacket):
        names = node.target.overloads()
        name = names[0] if len(names) == 1 else internals.called_overload(node.target, args, kwargs)
        return getattr(node.target, name or "default")
    return None


def op_name(node: Node) -> str | None:
    """Return ``"ns::op"`` for whatever form of an op a node calls, or None.

    A torch function, a method and an operator have the name of the ATen op that they stand for.
    """
    if node.op == "call_method":
        return _known_aten(str(node.target))
    return name_of(node.target) if node.op == "call_function" else None


def name_of(target: Any) -> str | None:
    """Return ``"ns::op"`` for an op, or for a function or operator that stands for one of ATen; else None."""
    if isinstance(target, internals.OpOverload):
        return target.name().partition(".")[0]
    if isinstance(target, internals.OpOverloadPacket):
        return internals.packet_name(target)
    builtin = internals.builtin_name(target)
    if builtin is not None:
        return builtin
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", "") or ""
    if module in ("_operator", "operator"):
        return _known_aten(_OPERATOR_NAMES.get(name, name))
    return _known_aten(name) if module.split(".")[0] == "torch" else None


def aten_name(node: Node) -> str | None:
    """Return the ATen name of what a node calls, or None."""
    name = op_name(node)
    return name if name is not None and name.startswith("aten::") else None


def _known_aten(name: str) -> str | None:
    return f"aten::{name}" if name.isidentifier() and hasattr(torch.ops.aten, name) else None
