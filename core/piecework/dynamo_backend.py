"""``torch.compile(model, backend="piecework")``: level 3 behind torch's own guards.

Torch keeps its guards and recompiles, so the one trace for all calls does not apply; splitting,
dedupe, compiling and capture do. Each graph that Dynamo hands over is treated alone; its sizes are
called as torch calls its symbols, and a graph without any has one size, ``()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from piecework import torch_internals as internals
from piecework.build import by_place, count_pieces, debug_of, find_pool, splitting_ops
from piecework.compilers import compile_pieces
from piecework.config import CompilationConfig
from piecework.config_checks import CompilationLevel
from piecework.counting import counters
from piecework.custom_op_choice import CustomOpChoices
from piecework.dedupe import deduplicate
from piecework.errors import CompileError, ConfigError
from piecework.forward import compile_lock
from piecework.gradients import without_gradients
from piecework.inputs import GraphInput, GraphInputs, Sizes
from piecework.notes import note_origin
from piecework.pieces import InputKind
from piecework.plans import Plans
from piecework.plugins import plugin_manager
from piecework.process_settings import is_frozen
from piecework.program import Pieces
from piecework.run import straight_line
from piecework.settings import resolve_settings
from piecework.split import split_graph


def piecework_backend(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Split, deduplicate and compile a graph of Dynamo's.

    Args:
        graph: what Dynamo traced.
        example_inputs: its inputs, fake or real.
        options: fields of ``CompilationConfig``, as ``torch.compile(options={...})`` hands them over.
        mode: not used; ``torch.compile`` hands it over when it is given.

    Raises:
        ConfigError: an option is no field of ``CompilationConfig``, or a mode is given.
        SplitError: the graph can't be cut.
        CompileError: a piece can't be compiled.
    """
    if mode not in (None, "default"):
        raise ConfigError(f'torch.compile(backend="piecework") takes no mode, got {mode!r}; settings go into options')
    argument = CompilationConfig(**dict(options)) if options else None
    settings = resolve_settings(argument, default_level=CompilationLevel.PIECEWISE)
    manager = plugin_manager()
    manager.check_options(settings.config)
    if settings.level is not CompilationLevel.PIECEWISE:
        return graph.forward
    with compile_lock:
        counters.num_graphs_seen += 1
        fake_mode = internals.current_fake_mode()
        assert fake_mode.shape_env is not None
        readers = _size_readers(graph, fake_mode.shape_env)
        names = {symbol: str(symbol) for symbol in readers}
        inputs = GraphInputs(_inputs(graph), {}, Sizes(list(names.values()), names, fake_mode.shape_env))
        ops, asked_for = splitting_ops(settings, manager)
        split = split_graph(graph, fake_mode, ops, must_match=asked_for)
        count_pieces(split)
        unique = deduplicate(split.pieces, inputs.kinds_of, fake_mode.shape_env)
        counters.num_unique_pieces += len(unique)
        if is_frozen():
            raise CompileError("a graph came to be compiled after piecework.freeze(), which forbids it")
        with internals.outside_of_tracing():
            compiled = compile_pieces(unique, settings.config, manager, fake_mode.shape_env, owner="graph")
            pool = find_pool(split, settings.config, manager, owner="graph")
        runs = [one.run for one in by_place(compiled)]
        debug = debug_of(settings, "graph", {})
        line = straight_line(split, runs, inputs, name="graph", debug=debug)
        if pool is None:
            return _called_by_dynamo(line.function, inputs.tensor_indices, list(readers.values()), None)
        pieces = Pieces(runs, [one.unique.piece.key for one in by_place(compiled)])
        plans = Plans(
            *(split, inputs, _paths(graph), settings.config, pool, CustomOpChoices("graph", settings)),
            unique=[one.unique for one in compiled],
            pieces=lambda key: pieces,
            departure=lambda key: None,  # A size is captured where it is called, and torch's guards let it through.
            is_auto=True,
            owner="graph",
            are_dims_named=False,
            debug=debug,
        )
        plans.uncaptured = line.function
    call = _called_by_dynamo(line.function, inputs.tensor_indices, list(readers.values()), plans)
    weakref.finalize(call, plans.close).atexit = False
    return call


def _paths(graph: torch.fx.GraphModule) -> dict[int, str]:
    """Return what to call each tensor argument in messages."""
    nodes = graph.graph.find_nodes(op="placeholder")
    return {i: node.name for i, node in enumerate(nodes) if not isinstance(node.meta["example_value"], torch.SymInt)}


def _inputs(graph: torch.fx.GraphModule) -> dict[torch.fx.Node, GraphInput]:
    """Take every tensor that Dynamo passes, parameters too, as an argument of the generated code."""
    inputs: dict[torch.fx.Node, GraphInput] = {}
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        is_size = isinstance(node.meta["example_value"], torch.SymInt)
        inputs[node] = GraphInput(InputKind.SIZE) if is_size else GraphInput(InputKind.ACTIVATION, position)
    return inputs


SizeReader = tuple[int, int | None]
"""Position of an argument, and the dim to read; None where the argument is the size itself."""


def _size_readers(graph: torch.fx.GraphModule, shape_env: internals.ShapeEnv) -> dict[sympy.Symbol, SizeReader]:
    """Return for each symbol where its value is found among the arguments."""
    readers: dict[sympy.Symbol, SizeReader] = {}
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        example = node.meta["example_value"]
        sizes = (
            [(None, example)] if isinstance(example, torch.SymInt) else list(enumerate(getattr(example, "shape", ())))
        )
        for dim, size in sizes:
            if isinstance(size, torch.SymInt):
                expression = internals.size_expression(size, shape_env)
                if isinstance(expression, sympy.Symbol):
                    readers.setdefault(expression, (position, dim))
    return readers


def _called_by_dynamo(
    uncaptured: Callable[..., Any], positions: Sequence[int], readers: Sequence[SizeReader], plans: Plans | None
) -> Callable[..., Any]:
    """Return a function that takes Dynamo's arguments; torch guards the grad mode, so it is fixed here.

    Parameters are arguments, too, and held where they are: a plan compares all their addresses at every call.
    """
    with_gradients = torch.is_grad_enabled()

    def call(*args: Any) -> Any:
        sizes = [args[position] if dim is None else args[position].size(dim) for position, dim in readers]
        given = (*(args[position] for position in positions), *sizes)
        run = uncaptured
        if plans is not None:
            run = plans.functions.get(plans.key_of(given)) or plans.choose(given, uncaptured)
        try:
            return without_gradients(run, (), given) if with_gradients else run(*given)
        except Exception as error:  # of a piece or an op: raised again, with a note
            note_origin(error, "graph")
            raise

    return call
