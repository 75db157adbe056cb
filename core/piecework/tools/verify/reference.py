"""Run a traced graph op by op, and compare the code that calls run beside it, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Argument, Target, map_arg

from piecework import torch_internals as internals
from piecework.build import Compiled
from piecework.declarations import checked_call
from piecework.effects import aten_name, find_effects, line_of, op_name, tensors_in
from piecework.inputs import GraphInputs
from piecework.pieces import EAGER, PieceRun, SplittingOp
from piecework.run import straight_line, whole_graph
from piecework.split import PieceStep, SplitGraph
from piecework.tools.verify.calls import Kept, random_numbers_put_back, random_state
from piecework.tools.verify.chains import Finding, OtherRows, Run, function_of, pieces_of, with_ops
from piecework.tools.verify.comparing import EXACT, Difference, Tolerance, clone, first_difference


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
            checker = _Declarations(step.graph, self.device)
            reference = checker.run(*args)
            expected = {"result": clone(list(reference)), **kept.changed()}
            problem = checker.problem
            if problem is not None:
                node = problem.node
                assert node is not None
                where = f"{op_name(node) or node.target} in {step.name}{line_of(node)}"
                self.findings.append(replace(problem, place=where, piece=index))
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
            called = Finding("", "", Difference("", ""), None, (), node, *before, overload)
            name = f"{op_name(node) or node.target}{line_of(node)}"
            other: dict[str, Any] | None = None
            kept = Kept({f"its argument {i}": tensor for i, tensor in enumerate(tensors_in((args, kwargs)))})
            if op.implementation is not None:
                implementation = op.implementation
                with random_numbers_put_back(self.device):
                    other = _outcome(lambda: [implementation(*args, **kwargs)], kept)
                kept.put_back()
            result, problems = _checked_twice(function, overload, args, kwargs, self.device)
            if problems:
                text = "; ".join(problems)
                self.findings.append(replace(called, kind="declaration", place=name, difference=Difference("", text)))
            elif other is not None:
                expected = {"result": clone([result]), **kept.changed()}
                difference = _difference(other, expected, self.tolerance)
                if difference is not None:
                    found = replace(called, kind="implementation", implementation=op.implementation)
                    place = f"the implementation of {name}"
                    self.findings.append(replace(found, place=place, difference=difference))
            if op.rows_independent and not self.findings:
                for dim in self.inputs.sizes.dims:
                    self.check_rows(dim, called, function, (args, kwargs, result))
            return result

        return run

    def check_rows(
        self,
        dim: str,
        called: Finding,
        function: Callable[..., Any],
        after: tuple[tuple[Any, ...], dict[str, Any], Any],
    ) -> None:
        """Run an op whose rows are declared independent with another last row, and look at all rows before it.

        Args:
            dim: the named dim that rows lie along.
            called: the op, and its arguments as they were.
            function: runs it.
            after: these after a run, and the result.
        """
        node = called.node
        assert node is not None
        number = dict(zip(self.inputs.sizes.dims, self.given[-len(self.inputs.sizes.dims) :], strict=True))[dim]
        fakes = (*map_arg((node.args, node.kwargs), lambda arg: self.split.effects.values[arg]), None)
        rows = [self.row_dims(fake, dim) for fake in tensors_in(fakes)]
        if number < 2 or not any(rows):
            return
        other = clone((called.args, dict(called.kwargs)))
        for tensor, dims in zip(tensors_in(other), rows, strict=True):
            for row_dim in dims:
                last, first = tensor.select(row_dim, number - 1), tensor.select(row_dim, 0)
                last.copy_(1 - 2 * first if tensor.is_floating_point() else first)
        given = clone(other)
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
                    again = OtherRows(given[0], given[1], index, row_dim, number)
                    found = replace(called, kind="rows", place=name, difference=difference, other_rows=again)
                    self.findings.append(found)
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

    def __init__(self, graph: GraphModule, device: torch.device) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.device = device
        self.problem: Finding | None = None
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
        before = clone(args), clone(kwargs)
        result, problems = _checked_twice(function, overload, args, kwargs, self.device)
        if problems:
            difference = Difference("", "; ".join(problems))
            self.problem = Finding("declaration", "", difference, None, (), self.node, *before, overload)
        return result


def _checked_twice(
    function: Callable[..., Any],
    overload: internals.OpOverload | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> tuple[Any, list[str]]:
    """Run an op, and once more on copies while the first result is there: memory that it keeps shows then."""
    copies = clone(args), clone(kwargs)
    result, problems = checked_call(function, overload, args, kwargs)
    if not problems and overload is not None:
        with random_numbers_put_back(device):
            _, problems = checked_call(function, overload, *copies)
    return result, problems


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
