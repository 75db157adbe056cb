"""Trace a model once: its graph, where each input comes from, what it returns, what was assumed."""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import itertools
import linecache
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import sympy
import torch

from piecework import torch_internals as internals
from piecework.arguments import Arguments, fake_value, trace_sizes
from piecework.assumptions import TARGET, Assumptions
from piecework.errors import CompileError
from piecework.exact import departs_at_one
from piecework.inputs import GraphInput, Key, Sizes, dim_symbol
from piecework.outputs import OutputSpec, describe_outputs, numbers_in_shapes
from piecework.pieces import InputKind
from piecework.trace_errors import trace_error


@dataclass(frozen=True)
class Relation:
    """A relation between sizes that the trace relies on."""

    expression: sympy.Basic
    """Over symbols named like the dims."""
    user_line: str

    def describe(self) -> str:
        """Return the relation and the line that needs it."""
        where = f", since the model reads it at: {self.user_line}" if self.user_line else ""
        return f"{internals.print_expression(self.expression)}{where}"

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether it holds where the dims have these values."""
        numbers: dict[sympy.Basic, sympy.Basic] = {dim_symbol(dim): sympy.Integer(v) for dim, v in values.items()}
        return bool(internals.evaluate_number(self.expression.xreplace(numbers)))


@dataclass
class Trace:
    """One traced forward."""

    graph: torch.fx.GraphModule
    inputs: dict[torch.fx.Node, GraphInput]
    """Where each placeholder comes from."""
    arguments: Arguments
    outputs: OutputSpec
    relations: tuple[Relation, ...]
    """What must hold for a call to be answered by this trace."""
    op_relations: tuple[Relation, ...]
    """What ops looked at to choose a layout: elsewhere the graph holds op by op, but not compiled."""
    sizes: Sizes
    fake_mode: internals.FakeTensorMode
    assumptions: Assumptions
    frame_globals: dict[str, Any]
    """Of the traced frame; what ``G`` stands for in sources."""
    read: tuple[str, ...]
    """Sources of the modules, constants and containers that the trace read."""
    asked_modes: tuple[Callable[[], bool], ...]
    """The modes of the caller's that the model asks for, such as ``torch.is_grad_enabled``."""
    seconds: float
    backend_result: Callable[..., Any] | None = None
    """What the backend of level 2 made of the graph."""

    @property
    def shape_env(self) -> internals.ShapeEnv:
        """Return what torch knows about the sizes."""
        return self.sizes.shape_env

    def departure(self, key: Key) -> str | None:
        """Return in words the first relation that does not hold at a size, or None."""
        values = self.sizes.values_of(key)
        broken = next((relation for relation in self.relations if not relation.holds(values)), None)
        return None if broken is None else f"the trace holds for {broken.describe()}"


@dataclass
class _Recorded:
    """What the backend sees while Dynamo is at work; most of it is gone afterwards."""

    graph: torch.fx.GraphModule | None = None
    fake_mode: internals.FakeTensorMode | None = None
    sources: list[str] = field(default_factory=list)
    tokens: tuple[Any, ...] = ()
    asked_modes: tuple[Callable[[], bool], ...] = ()
    read: tuple[str, ...] = ()
    backend_result: Callable[..., Any] | None = None

    @property
    def shape_env(self) -> internals.ShapeEnv | None:
        """Return what is known about the sizes so far."""
        return None if self.fake_mode is None else self.fake_mode.shape_env


@dataclass(frozen=True)
class _TracedCall:
    """The call that was traced, with fake arguments."""

    sizes: dict[str, int]
    """Of the named dims."""
    scope: dict[str, Any]
    """The target and the arguments, by name."""
    returned: Any
    """The result, with tokens for the outputs of the graph."""


def trace(
    target: Callable[..., Any],
    arguments: Arguments,
    values: Mapping[str, Any],
    *,
    owner: str,
    backend: Callable[..., Any] | None = None,
) -> Trace:
    """Trace one call with fake tensors: nothing is computed and nothing of the user's is marked.

    Args:
        target: the module or function; it is called, so that the hooks of a module are traced too.
        arguments: the form of the first call.
        values: its parameters' values, defaults filled in.
        owner: name of the model or function, for errors.
        backend: a Dynamo backend that gets the graph (level 2).

    Raises:
        CompileError: the model can't be traced as one graph; the message names the user's line.
    """
    start = time.perf_counter()
    frame = _frame(arguments)
    recorded = _Recorded()
    call = _call_once(frame, recorded, target, arguments, values, owner=owner, backend=backend)
    graph, fake_mode, scope = recorded.graph, recorded.fake_mode, call.scope
    if graph is None or fake_mode is None or fake_mode.shape_env is None:
        raise CompileError(f"{owner} runs no op of torch on its arguments, so there is nothing to compile")
    tensor_index = _fake_positions(arguments, scope)
    meanings = _meanings_of_symbols(fake_mode.shape_env, scope, tensor_index, arguments)
    sizes = Sizes(list(arguments.sizes), meanings, fake_mode.shape_env)
    inputs: dict[torch.fx.Node, GraphInput] = {}
    sources = _sources_of_state(target)
    for node, source in zip(graph.graph.find_nodes(op="placeholder"), recorded.sources, strict=True):
        if isinstance(node.meta["example_value"], torch.SymInt):
            inputs[node] = GraphInput(InputKind.SIZE)
            continue
        value = eval_source(source, scope, frame.__globals__)
        inputs[node] = _tensor_input(source, value, tensor_index, owner)
        if inputs[node].source is not None:
            sources[id(value)] = source
    # The scope outlives the trace, for checks of the model's state: it must hold no fake tensors.
    state = {name: (value if name == TARGET else None) for name, value in scope.items()}
    return Trace(
        graph=graph,
        inputs=inputs,
        arguments=arguments,
        outputs=_outputs(call, recorded.tokens, tensor_index, sources, arguments, owner),
        relations=_relations(sizes, of_ops=False) + _relations_at_one(graph, sizes),
        op_relations=_relations(sizes, of_ops=True),
        sizes=sizes,
        fake_mode=fake_mode,
        assumptions=Assumptions(internals.guards_of(frame.__code__), state),
        frame_globals=frame.__globals__,
        read=recorded.read,
        asked_modes=recorded.asked_modes,
        seconds=time.perf_counter() - start,
        backend_result=recorded.backend_result,
    )


def _call_once(
    frame: Callable[..., Any],
    recorded: _Recorded,
    target: Callable[..., Any],
    arguments: Arguments,
    values: Mapping[str, Any],
    *,
    owner: str,
    backend: Callable[..., Any] | None,
) -> _TracedCall:
    """Call the frame under Dynamo with fake arguments."""
    compiled = torch.compile(
        frame,
        fullgraph=True,
        backend=_recorder(recorded, backend),
        options={"guard_filter_fn": _guard_filter(recorded)},
    )

    def call(sizes: dict[str, int]) -> _TracedCall:
        with internals.new_fake_mode():
            fakes = {name: fake_value(spec, values[name], sizes) for name, spec in arguments.specs.items()}
        scope = {TARGET: target, **fakes}
        return _TracedCall(sizes, scope, compiled(*scope.values()))

    try:
        # This order: leaving inference mode turns gradients on.
        with torch.inference_mode(False), internals.one_trace_for_all_sizes(), internals.strict_dynamo():
            traced = call(trace_sizes(arguments.sizes))
            if numbers := numbers_in_shapes(traced.returned):
                # ``return x.shape`` reads the argument that is passed, past the graph: at sizes that are
                # no other number there, one sees which is which.
                above = 1 + max(*numbers, *traced.sizes.values())
                traced = call({name: above + i for i, name in enumerate(traced.sizes)})
            return traced
    except (
        internals.Unsupported,
        internals.UserError,
        internals.InternalTorchDynamoError,
        internals.TorchRuntimeError,
        internals.ConstraintViolationError,
        internals.BackendCompilerFailed,
    ) as error:
        raise trace_error(error, recorded.shape_env, owner, arguments) from error


def _frame(arguments: Arguments) -> Callable[..., Any]:
    """Return a function of its own code whose locals are the target and the parameters by name.

    Dynamo names inputs after the locals of the traced frame, and keeps what it traced by code
    object: with one of its own, two instances of a class can't take each other's trace.
    """
    parameters = ", ".join([TARGET, *arguments.specs])
    source = f"def forward({parameters}):\n    return {arguments.call_text(TARGET)}\n"
    filename = "<piecework trace>"
    namespace: dict[str, Any] = {"__builtins__": builtins}
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    return with_own_code(namespace["forward"])


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function code that no other equals: torch 2.11 counts recompiles of equal code together."""
    function.__code__ = function.__code__.replace(co_name=f"{function.__name__}_{next(_code_numbers)}")  # pyright: ignore[reportFunctionMemberAccess]
    return function


_code_numbers = itertools.count()
AMBIENT_MODES = (torch.is_grad_enabled, torch.is_inference_mode_enabled)
"""Modes of the caller's that are off in every trace; a model that asks for one holds for it being off."""


def _guard_filter(recorded: _Recorded) -> Callable[[Sequence[Any]], list[bool]]:
    """Keep the guards that the checks of each call do not cover: state of modules, globals and code."""

    def keep(entries: Sequence[Any]) -> list[bool]:
        recorded.asked_modes = tuple(mode for mode in AMBIENT_MODES if any(e.value is mode for e in entries))
        recorded.read = tuple(dict.fromkeys(source for entry in entries if (source := _read_source(entry))))
        return [_is_kept(entry) for entry in entries]

    return keep


def _read_source(entry: Any) -> str | None:
    """Return the source of a module, a constant or a container that the trace read from its target."""
    if not entry.has_value or entry.is_global or not entry.name.startswith(TARGET):
        return None
    return internals.guard_source(entry) if isinstance(entry.value, _READ_KINDS) else None


_READ_KINDS = (
    *(torch.nn.Module, list, tuple, dict, set),
    *(int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.memory_format),
)


def _is_kept(entry: Any) -> bool:
    if entry.guard_type in ("TENSOR_MATCH", "SHAPE_ENV", "GLOBAL_STATE", "GRAD_MODE", "AUTOGRAD_SAVED_TENSORS_HOOKS"):
        return False
    # Not only at the start: what a module has from its class is read as ``type(target)``.
    return entry.is_global or not entry.name or TARGET in entry.name


def _recorder(recorded: _Recorded, backend: Callable[..., Any] | None) -> Callable[..., Any]:
    def record(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if recorded.graph is not None:
            raise CompileError("Dynamo traced a second graph where one was asked for")
        placeholders = graph.graph.find_nodes(op="placeholder")
        recorded.sources = [internals.input_source(node) for node in placeholders]
        recorded.fake_mode = fake_mode = internals.current_fake_mode()
        assert fake_mode.shape_env is not None
        internals.bound_sizes(fake_mode.shape_env)
        recorded.graph = graph
        outputs: Any = graph.graph.output_node().args[0]
        recorded.tokens = tuple(o.meta["example_value"] if isinstance(o, torch.fx.Node) else o for o in outputs)
        if backend is not None:
            internals.write_code(graph)
            recorded.backend_result = backend(graph, example_inputs)
        return lambda *_: recorded.tokens

    return record


def _sources_of_state(target: Callable[..., Any]) -> dict[int, str]:
    """Map the identity of each parameter and buffer of a module to its source."""
    if not isinstance(target, torch.nn.Module):
        return {}
    parameters = {id(p): f"L['{TARGET}'].get_parameter({name!r})" for name, p in target.named_parameters()}
    buffers = {id(b): f"L['{TARGET}'].get_buffer({name!r})" for name, b in target.named_buffers()}
    return {**parameters, **buffers}


def _outputs(
    call: _TracedCall,
    tokens: Sequence[Any],
    tensor_index: Mapping[int, int],
    sources: Mapping[int, str],
    arguments: Arguments,
    owner: str,
) -> OutputSpec:
    tensors = arguments.tensors
    texts = {identity: tensors[position].path for identity, position in tensor_index.items()}
    texts |= {id(token): f"_pw_o[{i}]" for i, token in enumerate(tokens)}
    sizes = {
        call.sizes[dim]: f"{spec.path}.size({position})"
        for spec in tensors
        for position, dim in enumerate(spec.dims)
        if isinstance(dim, str)
    }
    return describe_outputs(call.returned, texts, sources, sizes, owner=owner)


def eval_source(source: str, scope: Mapping[str, Any], frame_globals: Mapping[str, Any]) -> Any:
    """Return what a source expression of Dynamo stands for now; None where it is gone."""
    try:
        return eval(_compiled(source), {"L": scope, "G": frame_globals})  # noqa: S307 - text that Dynamo wrote, no user's
    except (AttributeError, KeyError, IndexError):
        return None


@functools.lru_cache(maxsize=10_000)
def _compiled(source: str) -> CodeType:
    """Return the code of a source expression; compiling takes ten times as long as running it."""
    return compile(source, "<source of Dynamo>", "eval")


def _fake_positions(arguments: Arguments, scope: Mapping[str, Any]) -> dict[int, int]:
    """Map the identity of each fake argument to its position among the tensors."""
    return {id(eval(spec.path, dict(scope))): i for i, spec in enumerate(arguments.tensors)}  # noqa: S307 - our paths


def _meanings_of_symbols(
    shape_env: internals.ShapeEnv, scope: Mapping[str, Any], tensor_index: Mapping[int, int], arguments: Arguments
) -> dict[sympy.Symbol, str | int]:
    tensors = arguments.tensors
    meanings: dict[sympy.Symbol, str | int] = {}
    for symbol, source in internals.symbol_sources(shape_env).items():
        position = tensor_index.get(id(eval_source(source.tensor, scope, {})))
        if position is not None:
            spec = tensors[position]
            meanings[symbol] = spec.strides[source.dim] if source.is_stride else spec.dims[source.dim]
    return meanings


def _tensor_input(source: str, value: Any, tensor_index: Mapping[int, int], owner: str) -> GraphInput:
    if id(value) in tensor_index:
        return GraphInput(InputKind.ACTIVATION, tensor_index=tensor_index[id(value)])
    if not isinstance(value, torch.Tensor):
        raise CompileError(
            f"{owner} reads {source!r}, a {type(value).__name__}, as an input of its graph; only tensors that are "
            "arguments, parameters, buffers, attributes or globals can be inputs"
        )
    kind = InputKind.PARAMETER if isinstance(value, torch.nn.Parameter) else InputKind.BUFFER
    return GraphInput(kind, source=source)


def _relations(sizes: Sizes, *, of_ops: bool) -> tuple[Relation, ...]:
    relations: dict[sympy.Basic, Relation] = {}
    for guard in internals.shape_guards(sizes.shape_env):
        # An op that asks for equal sizes fails with others, whatever their layout.
        if of_ops is not (guard.is_of_an_op and not isinstance(guard.relation, sympy.Eq)):
            continue
        relation = guard.relation
        if not relation.free_symbols <= sizes.meaning_of_symbol.keys():
            # torch 2.11 takes the length of a slice up to a size for one that follows from data, and may find out
            # later that it is that size. Compiled code holds no assertion of what is known by then.
            relation = internals.size_relation(relation, sizes.shape_env)
        if not relation.free_symbols <= sizes.meaning_of_symbol.keys():
            continue  # of a size that follows from no input: the graph holds its own assertion
        expression = sizes.named(relation)
        if expression not in (sympy.true, True):
            relations.setdefault(expression, Relation(expression, guard.user_line))
    return tuple(relations.values())


def _relations_at_one(graph: torch.fx.GraphModule, sizes: Sizes) -> tuple[Relation, ...]:
    """Return the named dims that may not be 1, one by one and all at once, with the op that sees it."""
    meanings = sizes.meaning_of_symbol
    dims = sorted({meaning for meaning in meanings.values() if isinstance(meaning, str)})
    traced = internals.traced_values(sizes.shape_env)
    relations: list[Relation] = []
    for chosen in [*([dim] for dim in dims), dims][: None if len(dims) > 1 else 1]:
        symbols = [symbol for symbol, meaning in meanings.items() if meaning in chosen]
        problem = departs_at_one(graph, symbols, traced, sizes.shape_env)
        if problem is not None:
            none_is_one: list[Any] = [sympy.Ne(dim_symbol(dim), 1) for dim in chosen]
            relations.append(Relation(sympy.Or(*none_is_one), problem))
    return tuple(relations)


def signature_of(target: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, or of a module's forward without ``self``."""
    return inspect.signature(target.forward if isinstance(target, torch.nn.Module) else target)
