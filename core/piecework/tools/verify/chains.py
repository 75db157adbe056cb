"""Run the steps of a split graph one by one, in other ways than calls do, behind the checks of a call.

Three chains: the pieces op by op, each beside its compiled code on the same inputs; the compiled pieces, with a copy of
every value; the replays of a new capture, each value beside that copy.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Argument, Target, map_arg

from piecework import torch_internals as internals
from piecework.build import Compiled
from piecework.declarations import checked_call
from piecework.effects import aten_name, find_effects, line_of, op_name, tensors_in
from piecework.errors import CaptureError
from piecework.inputs import GraphInputs, Key
from piecework.piece_checks import FirstCall
from piecework.pieces import EAGER, PieceRun, SplittingOp
from piecework.plans import Plans
from piecework.program import Action, CaptureTask, PieceAction
from piecework.recorder import Recorder, Recording
from piecework.run import straight_line, whole_graph
from piecework.split import EagerStep, PieceStep, SplitGraph
from piecework.static_inputs import fill
from piecework.tools.verify.calls import Kept, random_numbers_put_back, random_state
from piecework.tools.verify.comparing import EXACT, Difference, Tolerance, clone, first_difference

Run = Callable[..., Sequence[Any]]


def entry_with(compiled: Compiled, run: Callable[[Run, tuple[Any, ...]], Sequence[Any]]) -> Callable[..., Any]:
    """Return the entry of a compiled model with all its checks, and something else behind them.

    Args:
        compiled: the model.
        run: called as ``run(line, given)`` with the straight-line code for the size of a call, and what that is
            called with: tensors, then sizes. It returns what the line would.
    """

    def through(line: Run | None) -> Run | None:
        return None if line is None else lambda *given: run(line, given)

    space = compiled.entry.namespace
    replaced = {
        "_pw_run": through(space["_pw_run"]),
        "_pw_exact": {key: through(line) for key, line in space["_pw_exact"].items()},
        "_pw_uncompiled": through(space["_pw_uncompiled"]),
        "_pw_plans": {},
        "_pw_choose": lambda given, uncaptured: uncaptured,
    }
    function = compiled.entry.function
    made = types.FunctionType(function.__code__, {**space, **replaced}, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def inputs_now(compiled: Compiled) -> GraphInputs:
    """Return what the graph is called with, with the parameters and buffers that the model has now."""
    namespace = compiled.run.namespace
    bound = {node: namespace[name] for node, name in compiled.run.bound_names.items()}
    return GraphInputs(compiled.trace.inputs, bound, compiled.trace.sizes)


def pieces_of(line: Run, split: SplitGraph) -> list[Run]:
    """Return the functions of the pieces that straight-line code calls."""
    space = line.__globals__  # pyright: ignore[reportFunctionMemberAccess]
    found = [space[step.name] for step in split.pieces]
    return [one.run if isinstance(one, FirstCall) else one for one in found]


@dataclass(frozen=True)
class Finding:
    """Something that is wrong at one step of a chain.

    Attributes:
        kind: which check found it: ``"declaration"``, ``"implementation"``, ``"rows"``, ``"piece"``,
            ``"capture"`` or ``"between graphs"``.
        place: the piece, op or graph.
        difference: what differs, in words and numbers.
        piece: the index of the piece among those of the graph, where it is one.
        pieces: the pieces of a captured graph.
        node: the op, where it is known.
        args: copies of what the step was called with, before it ran; None where they are not known.
        kwargs: the same by keyword.
    """

    kind: str
    place: str
    difference: Difference
    piece: int | None = None
    pieces: tuple[PieceStep, ...] = ()
    node: Node | None = None
    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def op_name(self) -> str | None:
        """Return the op in words, with the user's line; None where it is not known."""
        return None if self.node is None else f"{op_name(self.node) or self.node.target}{line_of(self.node)}"


# --- op by op, each piece beside its compiled code ----------------------------------------------


class Reference:
    """Runs the traced graph op by op; at each piece and op, what calls run is compared with it on the same inputs.

    Args:
        split: the graph.
        inputs: what it is called with.
        tolerance: for the results of compiled code.
        device: draws the random numbers.
    """

    def __init__(self, split: SplitGraph, inputs: GraphInputs, tolerance: Tolerance, device: torch.device) -> None:
        self.split, self.inputs, self.tolerance, self.device = split, inputs, tolerance, device
        self.findings: list[Finding] = []
        self.random_pieces: list[str] = []
        """Those whose compiled code draws other random numbers, so that it can't be compared."""
        self.num_pieces = self.num_ops = 0
        self.compiled: list[Run] = []
        self.given: tuple[Any, ...] = ()

    def __call__(self, line: Run, given: tuple[Any, ...]) -> Sequence[Any]:
        """Run the graph in the place of ``line``."""
        self.given, self.compiled = given, pieces_of(line, self.split)
        runs = [PieceRun(self.piece(index, step), EAGER) for index, step in enumerate(self.split.pieces)]
        split = with_ops(self.split, self.op)
        return straight_line(split, runs, self.inputs, name="verify").function(*given)

    def piece(self, index: int, step: PieceStep) -> Run:
        """Return what runs a piece op by op, and compares its compiled code with that."""

        def run(*args: Any) -> Sequence[Any]:
            if self.findings:  # The rest of the call runs op by op alone.
                return step.graph.forward(*args)
            self.num_pieces += 1
            before = clone(args)
            kept = Kept({f"its input {_input_name(step, i)}": a for i, a in enumerate(args) if _is_tensor(a)})
            with random_numbers_put_back(self.device):
                compiled = _outcome(lambda: self.compiled[index](*args), kept)
            kept.put_back()
            state = random_state(self.device)
            checker = _Declarations(step.graph)
            reference = checker.run(*args)
            expected = {"result": clone(list(reference)), **kept.changed()}
            problem = checker.problem
            if problem is not None:
                node, text = problem
                where = f"{op_name(node) or node.target} in {step.name}{line_of(node)}"
                self.findings.append(Finding("declaration", where, Difference("", text), index, (), node, before))
            elif (difference := _difference(compiled, expected, self.tolerance)) is not None:
                if first_difference(random_state(self.device), state, "", EXACT) is not None:
                    self.random_pieces.append(step.name)
                    return reference
                self.findings.append(Finding("piece", step.name, difference, index, (step,), None, before))
            return reference

        return run

    def op(self, node: Node, op: SplittingOp) -> Callable[..., Any]:
        """Return what runs a splitting op, and compares what it does with what it declares."""
        overload, function = self.split.effects.overload(node), function_of(node, self.split)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.findings:  # The rest of the call runs op by op alone.
                return function(*args, **kwargs)
            self.num_ops += 1
            before = clone(args), clone(kwargs)
            name = f"{op_name(node) or node.target}{line_of(node)}"
            other: dict[str, Any] | None = None
            kept = Kept({f"its argument {i}": tensor for i, tensor in enumerate(tensors_in((args, kwargs)))})
            if op.implementation is not None:
                implementation = op.implementation
                with random_numbers_put_back(self.device):
                    other = _outcome(lambda: [implementation(*args, **kwargs)], kept)
                kept.put_back()
            result, problems = checked_call(function, overload, args, kwargs)
            if problems:
                text = "; ".join(problems)
                self.findings.append(Finding("declaration", name, Difference("", text), None, (), node, *before))
            elif other is not None:
                expected = {"result": clone([result]), **kept.changed()}
                difference = _difference(other, expected, self.tolerance)
                if difference is not None:
                    finding = Finding(
                        "implementation", f"the implementation of {name}", difference, None, (), node, *before
                    )
                    self.findings.append(finding)
            if op.rows_independent and not self.findings:
                for dim in self.inputs.sizes.dims:
                    self.check_rows(dim, node, function, before, (args, kwargs, result))
            return result

        return run

    def check_rows(
        self,
        dim: str,
        node: Node,
        function: Callable[..., Any],
        before: tuple[tuple[Any, ...], dict[str, Any]],
        after: tuple[tuple[Any, ...], dict[str, Any], Any],
    ) -> None:
        """Run an op whose rows are declared independent with another last row, and look at all rows before it.

        Args:
            dim: the named dim that rows lie along.
            node: the op.
            function: runs it.
            before: its arguments, as they were.
            after: these after a run, and the result.
        """
        number = dict(zip(self.inputs.sizes.dims, self.given[-len(self.inputs.sizes.dims) :], strict=True))[dim]
        fakes = (*map_arg((node.args, node.kwargs), lambda arg: self.split.effects.values[arg]), None)
        rows = [self.row_dims(fake, dim) for fake in tensors_in(fakes)]
        if number < 2 or not any(rows):
            return
        other = clone(before)
        for tensor, dims in zip(tensors_in(other), rows, strict=True):
            for row_dim in dims:
                last, first = tensor.select(row_dim, number - 1), tensor.select(row_dim, 0)
                last.copy_(1 - 2 * first if tensor.is_floating_point() else first)
        state = random_state(self.device)
        result = function(*other[0], **other[1])
        if first_difference(random_state(self.device), state, "", EXACT) is not None:
            return  # Other random numbers: nothing can be said.
        rows += [self.row_dims(fake, dim) for fake in tensors_in(self.split.effects.values[node])]
        pairs = zip(tensors_in((*other, result)), tensors_in(after), rows, strict=True)
        for index, (tensor, expected, dims) in enumerate(pairs):
            for row_dim in dims:
                head, wanted = (one.narrow(row_dim, 0, number - 1) for one in (tensor, expected))
                what = f"what precedes the last row of its tensor {index}"
                difference = first_difference(head, wanted, what, self.tolerance)
                if difference is not None:
                    name = f"{op_name(node) or node.target}{line_of(node)}"
                    self.findings.append(Finding("rows", name, difference, None, (), node, *before))
                    return

    def row_dims(self, fake: torch.Tensor, name: str) -> list[int]:
        """Return the dims of a traced value that a named dim is the length of."""
        sizes = self.inputs.sizes
        symbols = {symbol for symbol, meaning in sizes.meaning_of_symbol.items() if meaning == name}
        return [i for i, size in enumerate(fake.shape) if internals.size_expression(size, sizes.shape_env) in symbols]


class WholeReference:
    """Runs the traced graph op by op, and beside it what the backend of level 2 made of it.

    Args:
        compiled: a model at level 2.
        inputs: what the graph is called with.
        tolerance: for the results.
        device: draws the random numbers.
    """

    def __init__(self, compiled: Compiled, inputs: GraphInputs, tolerance: Tolerance, device: torch.device) -> None:
        self.graph, self.inputs, self.tolerance, self.device = compiled.trace.graph, inputs, tolerance, device
        self.effects = find_effects(compiled.trace.graph, compiled.trace.fake_mode)
        self.difference: Difference | None = None

    def __call__(self, line: Run, given: tuple[Any, ...]) -> Sequence[Any]:
        """Run the graph in the place of ``line``."""
        backend = line.__globals__["backend"]  # pyright: ignore[reportFunctionMemberAccess]

        def run(*args: Any) -> Sequence[Any]:
            kept = Kept(
                {str(node): arg for node, arg in zip(self.inputs.by_placeholder, args, strict=True) if _is_tensor(arg)}
            )
            compiled = _outcome(lambda: backend(*args), kept)
            kept.put_back()
            reference = self.graph.forward(*args)
            expected = {"result": clone(list(reference)), **kept.changed()}
            self.difference = _difference(compiled, expected, self.tolerance)
            return reference

        return whole_graph(run, self.effects, self.inputs, name="verify").function(*given)


def op_by_op(compiled: Compiled, inputs: GraphInputs) -> Callable[[Run, tuple[Any, ...]], Sequence[Any]]:
    """Return what runs a traced graph op by op, and nothing else."""
    split = compiled.split
    if split is None:
        effects = find_effects(compiled.trace.graph, compiled.trace.fake_mode)
        made = whole_graph(compiled.trace.graph.forward, effects, inputs, name="verify")
    else:
        runs = [PieceRun(step.graph.forward, EAGER) for step in split.pieces]
        plain = with_ops(split, lambda node, op: function_of(node, split))
        made = straight_line(plain, runs, inputs, name="verify")
    return lambda line, given: made.function(*given)


class _Declarations(Interpreter):
    """Runs a piece op by op, and looks at what ops that are no built-in ones do to their arguments."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.problem: tuple[Node, str] | None = None
        self.node: Node | None = None

    def run_node(self, n: Node) -> Any:
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> Any:
        assert self.node is not None
        is_own = isinstance(target, (internals.OpOverload, internals.OpOverloadPacket)) and not aten_name(self.node)
        if self.problem is not None or not is_own:
            return super().call_function(target, args, kwargs)
        function: Any = target
        overload: Any = target
        if isinstance(target, internals.OpOverloadPacket):
            overload = getattr(target, internals.called_overload(target, args, kwargs) or "default")
        result, problems = checked_call(function, overload, args, kwargs)
        if problems:
            self.problem = self.node, "; ".join(problems)
        return result


def _outcome(run: Callable[[], Any], kept: Kept) -> dict[str, Any]:
    """Return what something gives and changes, by name; or that it raised."""
    try:
        results = run()
    except Exception as error:  # Of a plugin's code: it is reported with the name of the piece.
        return {"raised": error}
    return {"result": clone(list(results)), **kept.changed()}


def _difference(outcome: Mapping[str, Any], expected: Mapping[str, Any], tolerance: Tolerance) -> Difference | None:
    """Return the first thing in which one run of a step differs from another."""
    if "raised" in outcome:
        error = outcome["raised"]
        return Difference("it", f"raised {type(error).__name__}: {error}, which op by op it does not")
    for name, value in outcome.items():
        if name not in expected:
            return Difference(name, "was written to, which op by op it is not")
        if (difference := first_difference(value, expected[name], name, tolerance)) is not None:
            return difference
    for name in expected:
        if name not in outcome:
            return Difference(name, "was not written to, which op by op it is")
    return None


def _input_name(step: PieceStep, index: int) -> str:
    return str(step.inputs[index])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def function_of(node: Node, split: SplitGraph) -> Callable[..., Any]:
    """Return what runs a splitting op, whatever its implementation is."""
    target: Any = node.target
    return split.effects.overload(node) or (getattr(torch.Tensor, target) if node.op == "call_method" else target)


def with_ops(split: SplitGraph, made: Callable[[Node, SplittingOp], Callable[..., Any]]) -> SplitGraph:
    """Return a split graph that calls other functions for its splitting ops."""
    steps = tuple(
        replace(step, ops={node: replace(op, implementation=made(node, op)) for node, op in step.ops.items()})
        if isinstance(step, EagerStep)
        else step
        for step in split.steps
    )
    return replace(split, steps=steps)


# --- compiled, with a copy of each value ----------------------------------------------------------


class Uncaptured:
    """Runs the compiled pieces and the ops as an uncaptured call does, and keeps a copy of each value.

    Args:
        split: the graph.
        inputs: what it is called with.
        args_of: index of a piece; what that one is called with is kept in ``args``, too.
    """

    def __init__(self, split: SplitGraph, inputs: GraphInputs, *, args_of: int | None = None) -> None:
        self.split, self.inputs, self.args_of = split, inputs, args_of
        self.values: dict[Node, Any] = {}
        self.given: tuple[Any, ...] = ()
        self.args: tuple[Any, ...] = ()

    def __call__(self, line: Run, given: tuple[Any, ...]) -> Sequence[Any]:
        """Run the graph in the place of ``line``."""
        self.given = given
        pairs = enumerate(zip(pieces_of(line, self.split), self.split.pieces, strict=True))
        runs = [PieceRun(self.noting(run, step.outputs, index), EAGER) for index, (run, step) in pairs]
        split = self.split
        noting = with_ops(split, lambda node, op: self.noting_op(op.implementation or function_of(node, split), node))
        return straight_line(noting, runs, self.inputs, name="verify").function(*given)

    def noting(self, run: Run, nodes: Sequence[Node], index: int) -> Run:
        def call(*args: Any) -> Sequence[Any]:
            if index == self.args_of:
                self.args = clone(args)
            results = run(*args)
            self.values.update(zip(nodes, clone(list(results)), strict=True))
            return results

        return call

    def noting_op(self, function: Callable[..., Any], node: Node) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.values[node] = clone(result)
            return result

        return call


# --- replays, one by one --------------------------------------------------------------------------


class NotingRecorder(Recorder):
    """Records a size, and notes for each step what it is called and where its values lie."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes: list[Note] = []

    def capture(self, graph: CaptureTask) -> None:
        """Record some actions as one graph, and note what comes out of it."""
        super().capture(graph)
        later = [self.writes(action) for action in graph.actions[1:]]
        written = set[int | None]().union(*later) if len(graph.actions) > 1 else set()
        nodes = [n for n in graph.outline.exports if written.isdisjoint(self.effects.storages[n])]
        places = [action.step for action in graph.pieces]
        self.notes.append(Note(graph.name, places, {node: self.values.bound(node) for node in nodes}))

    def bind(self, action: Action) -> None:
        """Have something run between the graphs, and note what it gives."""
        super().bind(action)
        if isinstance(action, PieceAction):
            name, nodes = action.step.name, action.step.outputs
        else:
            node = action.node
            name = f"{op_name(node) or node.target}{line_of(node)}"
            nodes = () if node in self.effects.identical or not node.users else (node,)
        self.notes.append(Note(name, [], {node: self.values.bound(node) for node in nodes}))

    def writes(self, action: Action) -> set[int | None]:
        """Return the storages that an action writes to."""
        if not isinstance(action, PieceAction):
            return set(self.effects.written[action.node])
        inputs = [action.step.inputs[position] for position in action.step.written]
        return {key for node in inputs if isinstance(node, Node) for key in self.effects.storages[node]}


@dataclass(frozen=True)
class Note:
    """One step of a recording."""

    name: str
    pieces: Sequence[PieceStep]
    """Those that a graph consists of; none for what runs between graphs."""
    values: Mapping[Node, Any]
    """What it gives, by aliases that hold no memory."""


@dataclass
class Replays:
    """Replays a new capture of one size step by step, and compares each value with that of an uncaptured call.

    Args:
        plans: of the model; what is captured here is no plan of it, and is gone afterwards.
        uncaptured: one uncaptured call.
        tolerance: for the values.
        rewind: puts all memory back, and the random numbers.
    """

    plans: Plans
    uncaptured: Uncaptured
    tolerance: Tolerance
    rewind: Callable[[], None]
    findings: list[Finding] = field(default_factory=list)
    num_graphs: int = 0

    def run(self) -> None:
        """Capture the size of the uncaptured call, and replay it with the same arguments.

        Raises:
            CaptureError: it can't be captured.
        """
        captures, pool, given = self.plans.captures, self.plans.pool, self.uncaptured.given
        key, tensors = self.plans.key_of(given), self.plans.by_position(given)
        with torch.no_grad(), pool.lock:
            if pool.is_busy or not pool.switch():
                raise CaptureError("verify can't capture now: another call is using the memory of captures")
            with captures.undoing(key), pool.being_busy():  # What is not kept is undone.
                other = self.other_rows(tensors)
                # What this leaves in the pool is not what is looked for: a graph that reads too early shows.
                with contextlib.suppress(Exception):  # An op may refuse rows in another order.
                    for step in self.record(key, other)[0].steps:
                        step()
                self.rewind()
                recording, notes = self.record(key, other)
                self.num_graphs = recording.num_graphs
                for index, memory in recording.inputs.items():
                    fill(memory, tensors[index])
                for step, note in zip(recording.steps, notes, strict=True):
                    step()
                    self.compare(note)
                    if self.findings:
                        break
                del recording, notes

    def record(self, key: Key, tensors: Mapping[int, torch.Tensor]) -> tuple[Recording, list[Note]]:
        """Capture a size, and note what each step gives."""
        captures = self.plans.captures
        with captures.session():
            recorder = captures.recorder(key, NotingRecorder)
            return recorder.record(tensors), recorder.notes

    def other_rows(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the arguments of a call with those that are copied in another order of rows: they are legal, too."""
        copied = {tensor.index for tensor in self.plans.statics.copied}
        return {i: tensor.flip(0) if i in copied and tensor.dim() else tensor for i, tensor in tensors.items()}

    def compare(self, note: Note) -> None:
        """Compare what a step gave, right after it, with what the same step gave uncaptured."""
        for node, value in note.values.items():
            expected = self.uncaptured.values.get(node)
            if expected is None:
                continue
            difference = first_difference(clone(value), expected, f"result {node.name}", self.tolerance)
            if difference is not None:
                kind = "capture" if note.pieces else "between graphs"
                self.findings.append(Finding(kind, note.name, difference, pieces=tuple(note.pieces)))
                return
