"""From a trace to the code that answers calls: split, deduplicate, compile, generate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from piecework import torch_internals as internals
from piecework.assumptions import TARGET, readable
from piecework.compilers import CompiledUniquePiece, compile_exact, compile_pieces
from piecework.config import CompilationConfig
from piecework.config_checks import CompilationLevel
from piecework.counting import counters
from piecework.dedupe import UniquePiece, deduplicate
from piecework.effects import Effects, find_effects, tensors_in, warn_of_undeclared
from piecework.entry import Entry, make_entry
from piecework.inputs import GraphInputs, Sizes, dim_symbol, key_of_values, size_values
from piecework.pieces import EAGER, PieceRun, SplittingOp
from piecework.plans import Plans
from piecework.plugins import PluginManager
from piecework.pool import Pool, pool_of
from piecework.process_settings import attention_ops, compile_context
from piecework.program import Pieces
from piecework.run import Runs, StraightLine, straight_line, whole_graph
from piecework.settings import Settings
from piecework.split import SplitGraph, split_graph
from piecework.state import BoundState
from piecework.trace import Relation, Trace, eval_source
from piecework.watch import Watch

if TYPE_CHECKING:
    from piecework.debug import Debug
    from piecework.forward import Forward

logger = logging.getLogger(__name__)


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
    plans: Plans | None = None
    """The captured sizes; None where nothing can be captured."""
    num_eager_calls: dict[str, int] = field(default_factory=dict)
    """Calls that the original forward answered, by reason."""


class Builder:
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
        names = {node: readable(str(traced.inputs[node].source)).removeprefix("self.") for node in bound}
        self.debug = debug_of(settings, self.owner, names)
        self.num_guards = len(internals.shape_guards(traced.shape_env))

    def dynamo_once(self) -> Compiled:
        function = self.trace.backend_result
        assert function is not None
        effects = find_effects(self.trace.graph, self.trace.fake_mode)
        for node in self.trace.graph.graph.nodes:
            warn_of_undeclared(node)
        run = whole_graph(function, effects, self.inputs, name=self.owner)
        runs = Runs(run)
        if relations := self.loose_relations(effects):
            by_ops = whole_graph(self.trace.graph.forward, effects, self.inputs, name=self.owner)
            runs = Runs(run, uncompiled=by_ops, needed=relations)
        return self.finish(runs, effects, None, [])

    def piecewise(self) -> Compiled:
        split = self.timed("split", self.split)
        unique = self.timed("dedupe", lambda: self.deduplicate(split))
        compiled = self.timed("compile", lambda: self.compile_unique(unique))
        general = [one.run for one in by_place(compiled)]
        exact: dict[Any, list[PieceRun]] = {}
        if self.settings.config.compile_sizes:
            exact = self.timed("compile exact sizes", lambda: self.exact_runs(compiled))
        needed = self.needed_relations(split, compiled)
        by_ops = [PieceRun(step.graph.forward, EAGER) for step in split.pieces]
        runs = Runs(
            self.straight_line(split, general),
            {key: self.straight_line(split, pieces) for key, pieces in exact.items()},
            self.straight_line(split, by_ops) if needed else None,
            needed,
        )
        plans = self.plans(split, compiled, PieceRuns(general, exact, by_ops, needed, self.trace.sizes))
        self.log_summary(split, compiled, plans)
        return self.finish(runs, split.effects, split, compiled, plans)

    def plans(self, split: SplitGraph, compiled: Sequence[CompiledUniquePiece], runs: PieceRuns) -> Plans | None:
        """Return what captures sizes of this graph; None where nobody captures on its device."""
        pool = find_pool(split, self.settings.config, self.manager, owner=self.owner)
        if pool is None:
            return None
        keys = [one.unique.piece.key for one in by_place(compiled)]
        tensors = self.trace.arguments.tensors
        assert self.forward.custom_ops is not None
        return Plans(
            *(split, self.inputs, {i: tensors[i].path for i in self.inputs.tensor_indices}),
            *(self.settings.config, pool, self.forward.custom_ops),
            unique=[one.unique for one in compiled],
            pieces=lambda key: Pieces(runs.at(key), keys),
            departure=self.trace.departure,
            is_auto=self.forward.is_request,
            owner=self.owner,
            debug=self.debug,
        )

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

    def needed_relations(self, split: SplitGraph, compiled: Sequence[CompiledUniquePiece]) -> list[Relation]:
        """Return what compiled code relies on besides the trace: other sizes run uncompiled."""
        needed = self.loose_relations(split.effects)
        dims = {dim_symbol(dim) for dim in self.trace.sizes.dims}
        for one in compiled:
            for relation in one.added_relations:
                for symbols in one.unique.symbols_by_place:
                    moved = relation.xreplace(dict(zip(one.unique.form.symbols, symbols, strict=True)))
                    named = self.trace.sizes.named(moved)
                    known = (other.expression for other in (*needed, *self.trace.relations))
                    if not named.free_symbols <= dims:
                        continue  # of a size that follows from no input: the graph holds its own assertion
                    if named != sympy.true and named not in known:
                        needed.append(Relation(named, f"the compiled code of {one.unique.piece.name}"))
        if needed:
            conditions = " and ".join(internals.print_expression(relation.expression) for relation in needed)
            logger.info("%s: the compiled pieces hold for %s; other sizes run uncompiled", self.owner, conditions)
        return needed

    def straight_line(self, split: SplitGraph, runs: Sequence[PieceRun]) -> StraightLine:
        return straight_line(split, runs, self.inputs, name=self.owner, debug=self.debug)

    def exact_runs(self, compiled: Sequence[CompiledUniquePiece]) -> dict[Any, list[PieceRun]]:
        """Compile every unique piece for each exact size that was asked for."""
        config = self.settings.config
        exact: dict[Any, list[PieceRun]] = {}
        for size in config.compile_sizes:
            values = size_values(size, self.trace.sizes.dims, f"compile_sizes of {self.owner}")
            made: dict[tuple[str, tuple[int, ...]], PieceRun] = {}
            runs: list[PieceRun] = []
            for place, one in enumerate(by_place(compiled)):
                symbols = one.unique.symbols_by_place[one.unique.places.index(place)]
                if not all(symbol in self.trace.sizes.meaning_of_symbol for symbol in symbols):
                    runs.append(one.run)  # It takes a size that follows from data: there is no exact one.
                    continue
                meanings = [self.trace.sizes.meaning_of_symbol[symbol] for symbol in symbols]
                numbers = tuple(values[meaning] if isinstance(meaning, str) else meaning for meaning in meanings)
                key = (one.unique.piece.key, numbers)
                if key not in made:
                    at = dict(zip(one.unique.form.symbols, numbers, strict=True))
                    made[key] = compile_exact(one, size, at, config, self.manager, owner=self.owner)
                runs.append(made[key])
            exact[key_of_values(values)] = runs
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

    def log_summary(self, split: SplitGraph, compiled: Sequence[CompiledUniquePiece], plans: Plans | None) -> None:
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in self.seconds.items())
        logger.info(
            "%s: %d pieces, %d to compile, %d unique; %s",
            *(self.owner, split.num_pieces, len(split.pieces), len(compiled), stages),
        )
        if plans is None:
            self.log_uncaptured(split)

    def log_uncaptured(self, split: SplitGraph) -> None:
        """Say that sizes are not captured where nobody can: a warning, where the settings name them."""
        config = self.settings.config
        sizes = config.capture_sizes or compile_context()
        if sizes is None or config.capturer == "none":
            return
        level = logging.WARNING if isinstance(config.capture_sizes, tuple) and config.capture_sizes else logging.INFO
        why = "nothing here captures graphs" if split.pieces else "it has no piece to capture"
        logger.log(level, "%s: %s, so sizes %s run uncaptured", self.owner, why, sizes)

    def finish(
        self,
        runs: Runs,
        effects: Effects,
        split: SplitGraph | None,
        compiled: list[CompiledUniquePiece],
        plans: Plans | None = None,
    ) -> Compiled:
        traced, forward = self.trace, self.forward
        sources = {name: str(traced.inputs[node].source) for node, name in runs.general.bound_names.items()}
        sources.update(traced.outputs.returned_inputs)
        target = traced.assumptions.scope[TARGET]
        bound_names = runs.general.bound_names
        written = {key for keys in effects.written.values() for key in keys}
        written_names = {name for node, name in bound_names.items() if written.intersection(effects.storages[node])}
        check_all = self.settings.config.check_parameters == "always"
        state = BoundState(
            *(sources, runs.namespaces, traced.assumptions, Watch(), traced.frame_globals),
            root=target if isinstance(target, torch.nn.Module) else None,
            read=traced.read,
            written=frozenset(written_names),
            check_all=check_all,
        )
        entry = make_entry(
            traced,
            state,
            runs,
            plans,
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
        if self.debug is not None:
            entry.namespace |= self.debug.settling(state, lambda: forward.is_doubtful)
        state.note_addresses()
        if plans is not None:
            plans.on_captured = state.look_at_all
            names, namespace = runs.general.bound_names, runs.general.namespace
            plans.captures.bound = lambda: {node: namespace[name] for node, name in names.items()}
            state.on_rebound = plans.drop_all
        logger.debug("%s: generated\n%s\n%s", self.owner, entry.source, runs.general.source)
        return Compiled(self.settings.level, traced, entry, state, runs.general, self.seconds, split, compiled, plans)


@dataclass(frozen=True)
class PieceRuns:
    """The functions of the pieces, by place, for all sizes."""

    general: Sequence[PieceRun]
    exact: Mapping[Any, Sequence[PieceRun]]
    by_ops: Sequence[PieceRun]
    """Run where a relation that compiled code relies on does not hold."""
    needed: Sequence[Relation]
    sizes: Sizes

    def at(self, key: Any) -> Sequence[PieceRun]:
        """Return those for one size."""
        if key in self.exact:
            return self.exact[key]
        values = self.sizes.values_of(key)
        return self.general if all(relation.holds(values) for relation in self.needed) else self.by_ops


def debug_of(settings: Settings, owner: str, names: Mapping[Node, str]) -> Debug | None:
    """Return what checks a compiled model in debug mode; None where that is off, and its modules are not imported.

    Args:
        settings: of the compilation.
        owner: name of the model.
        names: how the user calls parameters and buffers, by placeholder.
    """
    if not settings.is_debug:
        return None
    from piecework.debug import Debug  # What it needs is of no use elsewhere.

    logger.warning("%s: debug mode checks every call and replay (PIECEWORK_DEBUG=1), many times slower", owner)
    return Debug(owner, settings.config, names)


def find_pool(split: SplitGraph, config: CompilationConfig, manager: PluginManager, *, owner: str) -> Pool | None:
    """Return where the pieces of a graph can be captured; None where they can't be."""
    values = (node.meta.get("example_value") for step in split.pieces for node in step.graph.graph.nodes)
    devices = {tensor.device for value in values for tensor in tensors_in(value)}
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    if not devices or len(accelerators) > 1:
        reason = f"its pieces run on {', '.join(map(str, accelerators))}" if accelerators else "it has no pieces"
        logger.info("%s: nothing is captured: %s", owner, reason)
        return None
    return pool_of(accelerators[0] if accelerators else torch.device("cpu"), config, manager)


def by_place(compiled: Sequence[CompiledUniquePiece]) -> list[CompiledUniquePiece]:
    """Return the compiled piece of each place between cuts, in order."""
    places = {place: one for one in compiled for place in one.unique.places}
    return [places[i] for i in range(len(places))]


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
