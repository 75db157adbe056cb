"""Every underscored API of torch that the core touches, and what differs between 2.11 and 2.14.

When a new torch breaks something, this is the only module to mend.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import FrameSummary
from types import CodeType, FrameType
from typing import Any

import sympy
import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._C._dynamo.guards import TensorGuards
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.convert_frame import compile_lock as dynamo_lock
from torch._dynamo.exc import (
    BackendCompilerFailed,
    InternalTorchDynamoError,
    InvalidBackend,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import TensorProperty, TensorPropertySource
from torch._dynamo.symbolic_convert import tls as dynamo_threads
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._guards import TracingContext, tracing
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental import _config as symbolic_shapes_config
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    ShapeEnv,
    free_unbacked_symbols,
    has_static_value,
)
from torch.fx.graph_module import _format_import_block
from torch.fx.proxy import TraceError
from torch.jit._builtins import _find_builtin
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_modules
from torch.package.importer import sys_importer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges

__all__ = [
    "BackendCompilerFailed",
    "ConstraintViolationError",
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "InternalTorchDynamoError",
    "InvalidBackend",
    "ShapeEnv",
    "StorageWeakRef",
    "TorchDispatchMode",
    "TorchRuntimeError",
    "TraceError",
    "Unsupported",
    "UserError",
    "has_static_value",
    "is_functorch_wrapped_tensor",
    "lookup_backend",
    "pytree",
]

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Without the context manager of the public one, which costs ten times as much."""


# --- tracing --------------------------------------------------------------------------------


def is_traced() -> bool:
    """Whether what calls this is being traced, by Dynamo or by a non-strict export.

    ``torch.compiler.is_compiling()`` alone is one flag for the process: it is set in every thread while one compiles.
    """
    if not torch.compiler.is_compiling():  # First: each call asks this.
        return False
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_dynamo_locked() -> bool:
    """Whether another thread is inside of Dynamo, which lets in one at a time."""
    if not dynamo_lock.acquire(blocking=False):
        return True
    dynamo_lock.release()
    return False


@contextlib.contextmanager
def one_trace_for_all_sizes() -> Iterator[None]:
    """Make a symbolic size stand for 1 as well, while tracing and while compiling.

    Without it torch assumes that a size is at least 2 and records no guard for that. To be entered
    after ``inference_mode(False)``, which switches gradients on.
    """
    with (
        symbolic_shapes_config.patch(  # pyright: ignore[reportAttributeAccessIssue] - put there at run time
            backed_size_oblivious=True
        ),
        torch.no_grad(),
    ):
        yield


def graph_being_traced() -> OutputGraph | None:
    """Return the graph that Dynamo is making in this thread, another one after it began anew; None if it is not."""
    tracer = getattr(dynamo_threads, "current_tx", None)
    return None if tracer is None else tracer.output


def backend_being_traced_for(graph: OutputGraph) -> tuple[str | None, Mapping[str, Any]]:
    """Return the name of the backend that gets a graph of Dynamo's, and the ``options`` for it."""
    options = getattr(graph.compiler_fn, "kwargs", {}).get("options") or {}
    return getattr(graph.compiler_fn, "compiler_name", None), options


@contextlib.contextmanager
def strict_dynamo() -> Iterator[None]:
    """Trace without the memory of earlier traces, refuse side effects, and record inner hooks.

    Raises:
        InternalTorchDynamoError: what is traced leaves Python state changed.
    """
    torch_guards = logging.getLogger("torch._guards")
    torch_guards.addFilter(_is_no_error)
    try:
        with (
            torch._dynamo.config.patch(
                automatic_dynamic_shapes=False,
                side_effect_replay_policy="warn",
                skip_nnmodule_hook_guards=False,
                trace_numpy=False,
            ),
            warnings.catch_warnings(),
        ):
            # Dynamo warns before anything has been run. An error by policy would refuse what ends as it began, too.
            warnings.filterwarnings("always", message=_SIDE_EFFECTS)
            warnings.showwarning = _refusing_side_effects(warnings.showwarning)
            yield
    finally:
        torch_guards.removeFilter(_is_no_error)


RESET_OF_DYNAMO = "torch._dynamo.reset()"
"""What a user calls, in words; it drops what guards refer to."""

_SIDE_EFFECTS = "While compiling, we found certain side effects"


def _refusing_side_effects(show: Callable[..., Any]) -> Callable[..., None]:
    def refuse(message: Warning | str, *details: Any, **more: Any) -> None:
        if _SIDE_EFFECTS not in str(message):
            show(message, *details, **more)
            return
        graphs = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None))
        changed = [source for graph in graphs if isinstance(graph, OutputGraph) for source in _changes(graph)]
        if changed:
            raise RuntimeError(f"{_SIDE_EFFECTS}: {', '.join(dict.fromkeys(changed))}")

    return refuse


def changed_state(error: BaseException) -> str | None:
    """Return what a traced forward leaves changed, as sources, from the error that refused it."""
    found = re.search(f"{_SIDE_EFFECTS}: (.*)", str(error))
    return found.group(1) if found else None


def _changes(graph: Any) -> list[str]:
    """Return the sources of what a traced forward leaves changed: attributes with another value, containers."""
    found: list[str] = []
    for variable in graph.side_effects._get_modified_vars():
        if not isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting)):
            continue
        attributes = graph.side_effects.store_attr_mutations.get(variable)
        source = _source_name(variable.source)
        if attributes is None or not hasattr(variable, "value"):
            found.append(source)
            continue
        for name, value in attributes.items():
            before = getattr(variable.value, name, value)
            if not value.is_python_constant() or value.as_python_constant() is not before:
                found.append(f"{source}.{name}")
    return found


def _source_name(source: Any) -> str:
    try:
        return source.name
    except NotImplementedError:  # a temporary of Dynamo's own
        return "a temporary"


def _is_no_error(record: logging.LogRecord) -> bool:
    """Keep out what torch logs of a guard it can't make: it raises the same, and we say it better."""
    return record.levelno < logging.ERROR


def outside_of_tracing() -> contextlib.AbstractContextManager[Any]:
    """Compile pieces inside a Dynamo backend as if outside: the context of the trace is none of theirs."""
    return tracing(None)


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Ask Dynamo to keep one dim symbolic; called on fake tensors of ours only."""
    torch._dynamo.mark_dynamic(tensor, dim)


def new_fake_mode(shape_env: ShapeEnv | None = None) -> FakeTensorMode:
    """Return a mode under which tensors have no memory; real ones may be mixed in."""
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Leave the modes that are around: they would see what is done with fake tensors, attributes of these included."""
    return _disable_current_modes()


def current_fake_mode() -> FakeTensorMode:
    """Return the fake mode of the trace that is under way (inside a Dynamo backend)."""
    mode = TracingContext.get().fake_mode
    assert mode is not None and mode.shape_env is not None
    return mode


def write_code(graph: torch.fx.GraphModule) -> None:
    """Have Dynamo's graph written as Python now.

    Its ``forward`` is else one that does so and then calls the module, and with it the hooks of all modules.
    """
    _LazyGraphModule.force_recompile(graph)


def input_source(node: torch.fx.Node) -> str:
    """Return where a placeholder of a Dynamo graph comes from, as an expression over ``L`` and ``G``.

    It must be read inside the backend: Dynamo erases it when compilation ends.
    """
    return node.meta["grapharg"].source.name


def guard_source(entry: Any) -> str:
    """Return what a guard is about, as an expression over ``L`` and ``G``; its own name leaves ``L`` out."""
    return entry.orig_guard.originating_source.name


def guards_of(code: CodeType) -> Any:
    """Return the guards that Dynamo compiled for the one trace of ``code``."""
    entries = _debug_get_cache_entry_list(code)
    assert len(entries) == 1, f"expected one trace, found {len(entries)}"
    return entries[0].guard_manager


def failed_guard(manager: Any, scope: dict[str, Any]) -> str | None:
    """Return the text of the first recorded guard that does not hold, or None."""
    if manager.check(scope):
        return None
    parts = [str(part) for part in manager.check_verbose(scope).verbose_code_parts]
    if not parts:
        return "a guard without a description"
    # Where two names no longer stand for one thing, torch lists all such pairs, also those that still do.
    return next((part for part in parts if _is_parted(part, scope)), parts[0])


def _is_parted(condition: str, scope: dict[str, Any]) -> bool:
    """Whether a condition says of two names of the model's that they stand for one thing, and they don't."""
    names = re.fullmatch(r"(L\[\S+) is (L\[\S+)(  # .*)?", condition)
    if names is None:
        return False
    first, second = (eval(name, {"L": scope}) for name in names.groups()[:2])  # noqa: S307 - Dynamo's own source text
    return first is not second


@contextlib.contextmanager
def without_new_guards(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Look at a trace again without narrowing what it holds for.

    Sizes and numbers that follow from data get new symbols each time. Inductor would wait for these to be bound by
    the piece that it compiles next, and fail.
    """
    assert fake_mode.shape_env is not None
    with fake_mode.shape_env.suppress_guards(), fake_mode.shape_env.ignore_fresh_unbacked_symbols():
        yield


def keeping_sizes_symbolic() -> contextlib.AbstractContextManager[Any]:
    """Decompose ops on fakes without putting numbers in place of symbolic sizes.

    Before torch 2.13 the C++ form of ``matmul`` does so; those in Python don't, as while tracing. Later ones are
    left in C++: in Python, ``one_hot`` asserts something of all rows.
    """
    return enable_python_dispatcher() if torch.__version__ < "2.13" else contextlib.nullcontext()


def tensor_check(
    tensors: Sequence[torch.Tensor], sizes: list[list[int | None]], strides: list[list[int | None]]
) -> Callable[..., bool]:
    """Return torch's compiled check that tensors are like these; None leaves a size or stride open."""
    guards: Any = TensorGuards
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


# --- sizes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShapeGuard:
    """A relation between sizes that the trace used, and the user's line that needed it."""

    relation: sympy.Basic
    user_line: str
    is_of_an_op: bool
    """An op looked at it to choose among layouts, and not the model to choose what to do."""


def shape_guards(shape_env: ShapeEnv) -> list[ShapeGuard]:
    """Return every relation that must hold for the trace to be valid."""
    guards: list[ShapeGuard] = []
    for guard in shape_env.guards:
        line = getattr(guard.sloc, "maybe_user_loc", None) or ""
        frame = getattr(guard.sloc, "framework_loc", None)
        is_of_an_op = isinstance(frame, FrameSummary) and ("_dynamo" not in frame.filename or frame.name == "run_node")
        guards.append(ShapeGuard(guard.expr, line, is_of_an_op))
    for asserts in shape_env.deferred_runtime_asserts.values():
        guards += [ShapeGuard(item.expr, item.msg if isinstance(item.msg, str) else "", False) for item in asserts]
    return guards


def traced_values(shape_env: ShapeEnv) -> dict[sympy.Symbol, int]:
    """Return the value that each symbol had at the trace, where it has one."""
    values = getattr(shape_env, "backed_var_to_val", None) or shape_env.var_to_val  # renamed after 2.11
    return {symbol: int(value) for symbol, value in values.items()}


def size_expression(size: int | torch.SymInt, shape_env: ShapeEnv) -> sympy.Expr:
    """Return a size over the symbols that remain after torch unified equal ones."""
    return shape_env.replace(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)


def size_relation(relation: sympy.Basic, shape_env: ShapeEnv) -> sympy.Basic:
    """Return a relation over the symbols that remain after torch unified equal ones."""
    return shape_env.replace(relation)  # pyright: ignore[reportArgumentType]


def is_known_number(value: Any) -> bool:
    """Whether a value is a number, or a ``torch.Size``, that follows from the sizes of inputs, not their contents."""
    if isinstance(value, tuple):
        return len(value) > 0 and all(is_known_number(item) for item in value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        is_float = any(symbol_is_type(s, SymT.FLOAT) for s in value.node.expr.free_symbols)  # read from a tensor
        return not is_float and not free_unbacked_symbols(value)
    return isinstance(value, (int, float, bool))


@dataclass(frozen=True)
class SymbolSource:
    """The tensor (an expression over ``L``), the property and the dim that a symbol was made for."""

    tensor: str
    is_stride: bool
    dim: int


def symbol_sources(shape_env: ShapeEnv) -> dict[sympy.Symbol, SymbolSource]:
    """Return what each symbol was made for."""
    sources: dict[sympy.Symbol, SymbolSource] = {}
    for symbol, found in shape_env.var_to_sources.items():
        for source in found:
            if isinstance(source, TensorPropertySource) and source.idx is not None:
                is_stride = source.prop is TensorProperty.STRIDE
                sources.setdefault(symbol, SymbolSource(source.base.name, is_stride, source.idx))
    return sources


def symbol_range(shape_env: ShapeEnv, symbol: sympy.Symbol) -> ValueRanges[sympy.Expr]:
    """Return the range that torch assumes for a symbol."""
    return shape_env.var_to_range[symbol]


def bound_sizes(shape_env: ShapeEnv) -> None:
    """Tell torch that no size is beyond what memory can be addressed.

    Inductor has to know which is smaller where an op writes to a slice without an end, ``y[1:].add_(1)``, whose end is
    the largest number of 64 bits; while a size may be 1 it asks for a proof and can't lower the op without.
    """
    for symbol in traced_values(shape_env):
        known = shape_env.var_to_range.get(symbol)
        if known is not None and symbol_is_type(symbol, SymT.SIZE) and known.upper > MAX_SIZE:
            shape_env.constrain_symbol_range(symbol, known.lower, MAX_SIZE)  # pyright: ignore[reportArgumentType]


MAX_SIZE = 2**48
"""Larger than any dim of a tensor that lies in memory."""
EXPRESSION_NAMESPACE = {"math": math, "torch": torch}
"""What printed expressions may refer to."""


def print_expression(expression: sympy.Basic) -> str:
    """Return a size expression as Python."""
    return PythonPrinter().doprint(expression)


def evaluate_number(expression: sympy.Basic) -> int | float | bool:
    """Return the value of an expression without symbols, computed as the generated code computes it."""
    return eval(print_expression(expression), dict(EXPRESSION_NAMESPACE))  # noqa: S307 - printed from numbers


def size_symbols(value: Any, shape_env: ShapeEnv) -> list[sympy.Symbol]:
    """Return the symbols that a number, or a tuple of numbers, is made of."""
    if isinstance(value, tuple):
        return [symbol for item in value for symbol in size_symbols(item, shape_env)]
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return []
    free = shape_env.replace(value.node.expr).free_symbols
    return sorted((symbol for symbol in free if isinstance(symbol, sympy.Symbol)), key=str)


def compute_size(value: Any, shape_env: ShapeEnv, inputs: Mapping[sympy.Symbol, torch.fx.Node]) -> Any:
    """Return nodes, after the inputs of their graph, that compute a number from the sizes it is made of."""
    if isinstance(value, tuple):
        return tuple(compute_size(item, shape_env, inputs) for item in value)
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    proxies = {symbol: torch.fx.Proxy(node) for symbol, node in inputs.items()}
    computed = sympy_interp(PythonReferenceAnalysis, proxies, shape_env.replace(value.node.expr))
    return computed.node if isinstance(computed, torch.fx.Proxy) else computed


def make_symint(shape_env: ShapeEnv, symbol: sympy.Symbol) -> torch.SymInt:
    """Return a SymInt for a symbol that the graph has no input for."""
    # No hint for a size that follows from no input.
    made = shape_env.create_symintnode(symbol, hint=traced_values(shape_env).get(symbol))
    assert isinstance(made, torch.SymInt)
    return made


def size_hint(size: torch.SymInt) -> int:
    """Return the value that a symbolic size had when it was traced."""
    hint = size.node.hint
    assert hint is not None
    return int(hint)


# --- operators ------------------------------------------------------------------------------


OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator


def packet_name(packet: OpOverloadPacket) -> str:
    """Return ``"ns::op"``."""
    return packet._qualified_op_name


def op_called_in(frame: FrameType) -> str | None:
    """Return ``"ns::op"`` for a frame in which torch calls an op, None for any other."""
    called = frame.f_locals.get("self") if frame.f_code in _CALLS_OF_OPS else None
    if isinstance(called, OpOverloadPacket):
        return packet_name(called)
    return called.name().partition(".")[0] if isinstance(called, OpOverload) else None


_CALLS_OF_OPS = {torch._ops.OpOverload.__call__.__code__, torch._ops.OpOverloadPacket.__call__.__code__}


def module_of_op(name: str) -> str | None:
    """Return the module whose Python code registered ``"ns::op"``; None where that can't be told, as for one of C++."""
    defined = OPDEFS.get(name)
    if defined is not None:
        return defined._init_fn.__module__
    told = re.search(r"^debug: registered at (.*):\d+$", torch._C._dispatch_dump(name), re.MULTILINE)
    if told is None:
        return None
    modules = list(sys.modules.items())
    return next((known for known, module in modules if getattr(module, "__file__", None) == told[1]), None)


def overload_name(overload: OpOverload) -> str:
    """Return ``"ns::op.overload"``; the default one has the name ``default``."""
    return f"{overload.namespace}::{overload._opname}.{overload._overloadname}"


def direct_call(overload: OpOverload) -> Callable[..., Any]:
    """Return what an overload calls, without the Python frame around it (0.2 microseconds less)."""
    return getattr(overload, "_op", overload)


def call_on_cpu(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the kernel of an op for the CPU; a mode that sees torch functions sees those of its body, and not the op."""
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(overload.name(), "CPU"):
        return overload(*args, **kwargs)
    return overload.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


foreach_copy_: Callable[..., Any] = direct_call(torch.ops.aten._foreach_copy_.default)
"""Copies several tensors of one dtype by one launch."""
foreach_zero_: Callable[..., Any] = direct_call(torch.ops.aten._foreach_zero_.default)


def op_schema(overload: OpOverload) -> torch.FunctionSchema:
    """Return the schema of an op, which says what it writes to."""
    return overload._schema


def version(tensor: torch.Tensor) -> int:
    """Return a count that rises with every write to the memory of a tensor; 0 where there is none."""
    return 0 if tensor.is_inference() else tensor._version


def is_functorch_wrapped(value: Any) -> bool:
    """Whether a value is a tensor that stands for a batch or a gradient level of ``torch.func``."""
    return isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value)


def hooks_of_all_modules() -> tuple[Callable[..., Any], ...]:
    """Return the forward hooks that torch calls for every module."""
    return (*torch_modules._global_forward_pre_hooks.values(), *torch_modules._global_forward_hooks.values())


def any_has_tangent(values: Iterable[Any]) -> bool:
    """Whether a tensor among some values carries a forward-mode derivative."""
    if forward_ad._current_level < 0:  # First: each call with gradients on asks this.
        return False
    return any(forward_ad.unpack_dual(v).tangent is not None for v in values if isinstance(v, torch.Tensor))


def is_jit_tracing() -> bool:
    """Whether ``torch.jit.trace`` records what this thread runs."""
    return torch._C._get_tracing_state() is not None


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return what two tensors that share memory have in common; None where there is no storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        return None


def builtin_name(function: Callable[..., Any]) -> str | None:
    """Return the ATen name of a builtin function of torch, if it has one."""
    return _find_builtin(function)


def all_op_names() -> list[str]:
    """Return the names of all registered ops, with their overloads (``ns::op.overload``)."""
    return torch._C._dispatch_get_all_op_names()


def called_overload(packet: OpOverloadPacket, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return the name of the overload that a packet would pick for these arguments."""
    return torch._C._jit_resolve_packet(packet_name(packet), *args, **kwargs)


def graph_source(graph: torch.fx.GraphModule) -> tuple[list[str], str]:
    """Return the imports that the code of a graph needs, and its ``forward`` as source."""
    code = graph.graph.python_code("self")
    return _format_import_block(code.globals, sys_importer).splitlines(), code.src
