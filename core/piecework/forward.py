"""One model or function under Piecework, from its first call on: which level, which trace, which run."""

from __future__ import annotations

import builtins
import linecache
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from piecework import torch_internals as internals
from piecework.arguments import Arguments, DynamicDims, describe_call
from piecework.compilers import CompiledUniquePiece, compile_exact, compile_pieces
from piecework.config import CompilationConfig
from piecework.config_checks import CompilationLevel, Size
from piecework.counting import counters
from piecework.dedupe import UniquePiece, deduplicate
from piecework.effects import Effects, find_effects
from piecework.entry import Entry, make_entry
from piecework.errors import CompileError, ConfigError, PieceworkWarning, TraceDepartureError
from piecework.inputs import GraphInputs
from piecework.pieces import SplittingOp
from piecework.plugins import PluginManager, plugin_manager
from piecework.process_settings import attention_ops, compile_context, torch_compile_backend
from piecework.run import StraightLine, straight_line, whole_graph
from piecework.settings import Settings, resolve_settings
from piecework.split import SplitGraph, split_graph
from piecework.state import BoundState
from piecework.trace import TARGET, Relation, Trace, eval_source, signature_of, trace, with_own_code
from piecework.watch import Watch, use_plain_dicts

logger = logging.getLogger(__name__)

compile_lock = threading.RLock()
"""Tracing and compiling happen one at a time in a process: Dynamo and Inductor keep global state."""

_forwards: weakref.WeakSet[Forward] = weakref.WeakSet()


@dataclass
class Compiled:
    """What a trace became: everything that reports and checks look at; the calls use ``entry`` alone."""

    level: CompilationLevel
    trace: Trace
    entry: Entry
    state: BoundState
    run: StraightLine
    stage_seconds: dict[str, float]
    split: SplitGraph | None = None
    unique: list[CompiledUniquePiece] = field(default_factory=list)
    num_eager_calls: dict[str, int] = field(default_factory=dict)
    """Calls that the original forward answered, by reason."""


class Forward:
    """Answers the calls of one model or function.

    Args:
        target: the module or function to trace; a module is called, so that its hooks are traced.
        original: called for what is not traced: level 0, zero rows, departures with ``on_failure="eager"``.
        owner: name for logs and errors.
        config: the argument of ``compile``.
        dims: the named dims.
        default_level: the level where nobody names one.
        publish: called with the function that shall answer from now on.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        original: Callable[..., Any],
        *,
        owner: str,
        config: CompilationConfig | None,
        dims: DynamicDims,
        default_level: CompilationLevel,
        publish: Callable[[Callable[..., Any]], None],
    ) -> None:
        self.takes_self = isinstance(target, torch.nn.Module)
        self.target = target
        self.original = original
        self.owner = owner
        self.config = config
        self.dims = dims
        self.default_level = default_level
        self.publish = publish
        self.settings: Settings | None = None
        self.compiled: Compiled | None = None
        self.answer: Callable[..., Any] | None = None
        self.said: set[str] = set()
        _forwards.add(self)
        publish(self.with_self(self.start))

    def with_self(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that can stand as ``__call__`` of a module's class, if the target is a module."""
        return (lambda _, *args, **kwargs: answer(*args, **kwargs)) if self.takes_self else answer

    def start(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the first call, or every call until something is compiled."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        with compile_lock:
            if self.answer is None:
                self.answer = self.prepare(args, kwargs)
                if self.answer is None:
                    return self.run_empty(args, kwargs)
                self.publish(self.answer)
            answer = self.answer
        return answer(self.target, *args, **kwargs) if self.takes_self else answer(*args, **kwargs)

    def release(self) -> None:
        """Drop the trace and all that was made of it; the next call starts anew."""
        with compile_lock:
            if self.compiled is not None:
                self.compiled.state.watch.close()
            self.settings = self.compiled = self.answer = None
            self.said.clear()
            self.publish(self.with_self(self.start))

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """Return what answers calls from now on; None where this call has zero rows and can't be traced."""
        settings = resolve_settings(self.config, default_level=self.default_level)
        manager = plugin_manager()
        manager.check_options(settings.config)
        self.settings = settings
        if settings.level is CompilationLevel.NO_COMPILATION:
            return self.with_self(self.original)
        if settings.level is CompilationLevel.DYNAMO_AS_IS:
            return self.with_self(_dynamo_as_is(self.target))
        try:
            arguments, values = describe_call(signature_of(self.target), self.dims, args, kwargs, owner=self.owner)
            if not all(arguments.sizes.values()):
                return None
            # Fake tensors made under the caller's inference mode would have no version to tell of writes.
            with torch.inference_mode(False), torch.no_grad():
                self.compiled = self.compile(settings, manager, arguments, values)
        except CompileError as error:
            if settings.config.on_failure == "error":
                raise
            warnings.warn(PieceworkWarning(f"{self.owner} runs eagerly from now on: {error}"), stacklevel=4)
            return self.with_self(self.original)
        return self.compiled.entry.function

    # What becomes of calls that the trace does not answer.

    def run_empty(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call with zero rows by the original: a branch on zero can't be seen in a trace."""
        if "zero rows" not in self.said:
            self.said.add("zero rows")
            logger.info("%s: calls with zero rows are answered by the original forward", self.owner)
        self.count_eager("zero rows")
        return self.original(*args, **kwargs)

    def depart(self, problem: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse a call that departs from the trace, or answer it by the original."""
        assert self.settings is not None
        if self.settings.config.on_failure == "error":
            raise TraceDepartureError(
                f"{self.owner}: {problem}. Call piecework.release(model) to have it traced anew, or set "
                'on_failure="eager" to have such calls answered by the original forward'
            )
        if problem not in self.said:
            self.said.add(problem)
            warnings.warn(PieceworkWarning(f"{self.owner} answers a call eagerly: {problem}"), stacklevel=3)
        self.count_eager("departure from the trace")
        return self.original(*args, **kwargs)

    def count_eager(self, reason: str) -> None:
        if self.compiled is not None:
            counts = self.compiled.num_eager_calls
            counts[reason] = counts.get(reason, 0) + 1

    # From a call to code.

    def compile(
        self, settings: Settings, manager: PluginManager, arguments: Arguments, values: Mapping[str, Any]
    ) -> Compiled:
        """Trace, split, deduplicate, compile, and generate the code that runs it."""
        level = settings.level
        if isinstance(self.target, torch.nn.Module):
            use_plain_dicts(self.target)
        backend = _backend() if level is CompilationLevel.DYNAMO_ONCE else None
        traced = trace(self.target, arguments, values, owner=self.owner, backend=backend)
        counters.num_graphs_seen += 1
        logger.info(
            "%s: traced one graph of %d nodes in %.2f s", self.owner, len(traced.graph.graph.nodes), traced.seconds
        )
        builder = _Builder(self, settings, manager, traced)
        return builder.dynamo_once() if backend else builder.piecewise()


class _Builder:
    """Makes a ``Compiled`` of one trace."""

    def __init__(self, forward: Forward, settings: Settings, manager: PluginManager, traced: Trace) -> None:
        self.forward = forward
        self.owner = forward.owner
        self.settings = settings
        self.manager = manager
        self.trace = traced
        self.seconds = {"trace": traced.seconds}
        scope, frame_globals = traced.assumptions.scope, traced.frame_globals
        bound: dict[Node, torch.Tensor] = {
            node: eval_source(given.source, scope, frame_globals)
            for node, given in traced.inputs.items()
            if given.source is not None
        }
        self.inputs = GraphInputs(traced.inputs, bound, traced.sizes)
        self.num_guards = len(internals.shape_guards(traced.shape_env))

    def dynamo_once(self) -> Compiled:
        function = self.trace.backend_result
        assert function is not None
        effects = find_effects(self.trace.graph, self.trace.fake_mode)
        run = whole_graph(function, effects, self.inputs, name=self.owner)
        fallback = None
        if relations := self.loose_relations(effects):
            fallback = whole_graph(self.trace.graph.forward, effects, self.inputs, name=self.owner), relations
        return self.finish(run, {}, fallback, effects, None, [])

    def piecewise(self) -> Compiled:
        split = self.timed("split", self.split)
        unique = self.timed("dedupe", lambda: self.deduplicate(split))
        compiled = self.timed("compile", lambda: self.compile_unique(unique))
        run = self.straight_line(split, [one.run for one in self.by_place(compiled)])
        exact: dict[Any, StraightLine] = {}
        if self.settings.config.compile_sizes:
            exact = self.timed("compile exact sizes", lambda: self.exact_runs(split, compiled))
        self.log_summary(split, compiled)
        return self.finish(run, exact, self.fallback(split, compiled), split.effects, split, compiled)

    def timed(self, stage: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        self.seconds[stage] = time.perf_counter() - start
        return result

    def split(self) -> SplitGraph:
        ops, asked_for = splitting_ops(self.settings, self.manager)
        split = split_graph(self.trace.graph, self.trace.fake_mode, ops, must_match=asked_for, bound=self.inputs.bound)
        assert len(internals.shape_guards(self.trace.shape_env)) == self.num_guards, "splitting narrowed the sizes"
        count_pieces(split)
        logger.debug("%s: split into\n%s", self.owner, split.text())
        return split

    def deduplicate(self, split: SplitGraph) -> list[UniquePiece]:
        unique = deduplicate(split.pieces, self.inputs.kinds_of, self.trace.shape_env)
        counters.num_unique_pieces += len(unique)
        return unique

    def compile_unique(self, unique: Sequence[UniquePiece]) -> list[CompiledUniquePiece]:
        config = self.settings.config
        return compile_pieces(unique, config, self.manager, self.trace.shape_env, owner=self.owner)

    def by_place(self, compiled: Sequence[CompiledUniquePiece]) -> list[CompiledUniquePiece]:
        places = {place: one for one in compiled for place in one.unique.places}
        return [places[i] for i in range(len(places))]

    def fallback(
        self, split: SplitGraph, compiled: Sequence[CompiledUniquePiece]
    ) -> tuple[StraightLine, list[Relation]] | None:
        """Return what runs at sizes that the compiled code is not made for though the trace is, and when."""
        needed = self.loose_relations(split.effects)
        for one in compiled:
            for relation in one.added_relations:
                for symbols in one.unique.symbols_by_place:
                    moved = relation.xreplace(dict(zip(one.unique.form.symbols, symbols, strict=True)))
                    named = self.trace.sizes.named(moved)
                    known = (other.expression for other in (*needed, *self.trace.relations))
                    if named != sympy.true and named not in known:
                        needed.append(Relation(named, f"the compiled code of {one.unique.piece.name}"))
        if not needed:
            return None
        conditions = " and ".join(internals.print_expression(relation.expression) for relation in needed)
        logger.info("%s: the compiled pieces hold for %s; other sizes run uncompiled", self.owner, conditions)
        return self.straight_line(split, [step.graph.forward for step in split.pieces]), needed

    def straight_line(self, split: SplitGraph, runs: Sequence[Callable[..., Any]]) -> StraightLine:
        return straight_line(split, runs, self.inputs, name=self.owner)

    def exact_runs(self, split: SplitGraph, compiled: Sequence[CompiledUniquePiece]) -> dict[Any, StraightLine]:
        """Compile every unique piece for each exact size that was asked for."""
        config = self.settings.config
        exact: dict[Any, StraightLine] = {}
        for size in config.compile_sizes:
            values = size_values(size, self.trace.sizes.dims, f"compile_sizes of {self.owner}")
            made: dict[tuple[str, tuple[int, ...]], Callable[..., Any]] = {}
            runs: list[Callable[..., Any]] = []
            for place, one in enumerate(self.by_place(compiled)):
                symbols = one.unique.symbols_by_place[one.unique.places.index(place)]
                meanings = [self.trace.sizes.meaning_of_symbol[symbol] for symbol in symbols]
                numbers = tuple(values[meaning] if isinstance(meaning, str) else meaning for meaning in meanings)
                key = (one.unique.piece.key, numbers)
                if key not in made:
                    at = dict(zip(one.unique.form.symbols, numbers, strict=True))
                    made[key] = compile_exact(one, size, at, config, self.manager, owner=self.owner)
                runs.append(made[key])
            key = (
                next(iter(values.values())) if len(values) == 1 else tuple(values[dim] for dim in self.trace.sizes.dims)
            )
            exact[key] = self.straight_line(split, runs)
        return exact

    def loose_relations(self, effects: Effects) -> list[Relation]:
        """Return what ops looked at to choose a layout, where the graph holds op by op without it.

        It does unless something is written through what is a view in one layout and a copy in another; then calls
        elsewhere depart from the trace.
        """
        relations = list(self.trace.op_relations)
        written = {key for keys in effects.written.values() for key in keys}
        copied = {key for node in effects.values if effects.may_copy(node) for key in effects.storages[node]}
        if written.intersection(copied):
            self.trace.relations += self.trace.op_relations
            return []
        return relations

    def log_summary(self, split: SplitGraph, compiled: Sequence[CompiledUniquePiece]) -> None:
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in self.seconds.items())
        logger.info(
            "%s: %d pieces, %d to compile, %d unique; %s",
            *(self.owner, split.num_pieces, len(split.pieces), len(compiled), stages),
        )
        if (sizes := compile_context()) is not None:
            logger.info("%s: nothing here captures graphs, so sizes %s run uncaptured", self.owner, list(sizes))

    def finish(
        self,
        run: StraightLine,
        exact: dict[Any, StraightLine],
        fallback: tuple[StraightLine, list[Relation]] | None,
        effects: Effects,
        split: SplitGraph | None,
        compiled: list[CompiledUniquePiece],
    ) -> Compiled:
        traced, forward = self.trace, self.forward
        sources = {name: str(traced.inputs[node].source) for node, name in run.bound_names.items()}
        sources.update(traced.outputs.returned_inputs)
        target = traced.assumptions.scope[TARGET]
        watch = Watch(target if isinstance(target, torch.nn.Module) else None)
        namespaces = [run.namespace, *(line.namespace for line in exact.values())]
        if fallback is not None:
            namespaces.append(fallback[0].namespace)
        check_all = self.settings.config.check_parameters == "always"
        state = BoundState(sources, namespaces, traced.assumptions, watch, traced.frame_globals, check_all=check_all)
        entry = make_entry(
            *(traced, state, run.function, {size: line.function for size, line in exact.items()}),
            (fallback[0].function, fallback[1]) if fallback is not None else None,
            takes_self=forward.takes_self,
            original=forward.original,
            used_tensors=self.inputs.tensor_indices,
            written_tensors=self.inputs.written_tensors(effects),
            depart=forward.depart,
            run_empty=forward.run_empty,
            owner=self.owner,
        )
        state.namespaces.append(entry.namespace)
        for name in traced.outputs.returned_inputs:
            entry.namespace[name] = None
        state.note_addresses()
        logger.debug("%s: generated\n%s\n%s", self.owner, entry.source, run.source)
        return Compiled(self.settings.level, traced, entry, state, run, self.seconds, split, compiled)


def count_pieces(split: SplitGraph) -> None:
    """Count the pieces of a graph."""
    counters.num_pieces_seen += split.num_pieces
    counters.num_capturable_pieces_seen += len(split.pieces)


def splitting_ops(settings: Settings, manager: PluginManager) -> tuple[list[SplittingOp], list[str]]:
    """Return the ops to cut at, and the names among them that the user gave."""
    given = settings.config.splitting_ops
    if given is None:
        by_plugins = [op for op, _ in manager.splitting_ops(settings.config)]
        given = attention_ops()
    else:
        by_plugins = []
    by_user = [op if isinstance(op, SplittingOp) else SplittingOp(op) for op in given]
    return [*by_user, *by_plugins], [op.name for op in by_user]


def size_values(size: Size, dims: Sequence[str], where: str) -> dict[str, int]:
    """Return the value of each named dim of a size.

    Raises:
        ConfigError: the size names other dims than the model has.
    """
    if isinstance(size, int):
        if len(dims) == 1:
            return {dims[0]: size}
        example = ", ".join(f'"{dim}": {size}' for dim in dims)
        raise ConfigError(f"{where}: the model has the dims {', '.join(dims)}, so give {{{example}}}, got {size}")
    if set(size) != set(dims):
        raise ConfigError(f"{where}: a size needs a value for each of {', '.join(dims)}, got {dict(size)}")
    return {dim: size[dim] for dim in dims}


def _backend() -> Callable[..., Any]:
    backend = torch_compile_backend()
    return internals.lookup_backend(backend) if isinstance(backend, str) else backend


def _dynamo_as_is(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the target under ``torch.compile`` as it is, with a code object of its own.

    Dynamo limits how often one code object is compiled, which many instances of a class would reach.
    """
    namespace: dict[str, Any] = {"__builtins__": builtins, TARGET: target}
    source: str = f"def forward(*args, **kwargs):\n    return {TARGET}(*args, **kwargs)\n"
    filename = "<piecework level 1>"
    exec(compile(source, filename, "exec"), namespace)
    # torch 2.11 puts a function of its own, whose code all would share, around one without a source.
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    return torch.compile(with_own_code(namespace["forward"]), backend=torch_compile_backend())


def all_forwards() -> list[Forward]:
    """Return every model and function that is under Piecework now."""
    return list(_forwards)
