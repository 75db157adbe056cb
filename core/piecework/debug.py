"""Debug mode: what stands in the places of pieces, ops and plans where ``PIECEWORK_DEBUG`` is on.

Imported only then. It finds what breaks the contract of a plugin, an op or a caller at the call that breaks it, and
waits for the device many times per call to do so. What it raises is raised whatever ``on_failure`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from piecework.config import CompilationConfig
from piecework.debug_findings import CaptureFinding, CompileFinding, DepartureFinding, PluginFinding, StaleFinding
from piecework.debug_ownership import Ownership
from piecework.debug_replays import PlanChecks
from piecework.declarations import checked_call, checked_result
from piecework.effects import Effects, line_of, tensors_in
from piecework.errors import CompileError
from piecework.fingerprints import fingerprints, has_bits
from piecework.inputs import Sizes
from piecework.piece_checks import PieceCheck
from piecework.pieces import EAGER, PieceRun
from piecework.plan import Variant
from piecework.split import PieceStep
from piecework.state import BoundState
from piecework.static_inputs import StaticInputs
from piecework.tensor_checks import overlap
from piecework.values import Values


class Debug:
    """The checks of one compiled model.

    Args:
        owner: name of the model.
        config: its settings.
        names: how the user calls parameters and buffers, by placeholder.
    """

    def __init__(self, owner: str, config: CompilationConfig, names: Mapping[Node, str]) -> None:
        self.owner, self.config, self.names = owner, config, names

    def settling(self, state: BoundState, is_doubtful: Callable[[], bool]) -> dict[str, Any]:
        """Return names for the code of an entry that have each call look at all that the trace assumed.

        Args:
            state: what the entry is bound to.
            is_doubtful: whether a call failed and none was answered by the trace yet: it is dropped at a departure.
        """

        def settle() -> str | None:
            problem = state.settle()
            if problem is not None and not is_doubtful():
                raise DepartureFinding(f"{self.owner}: {problem}. Call piecework.release(model) to have it traced anew")
            return problem

        return {"_pw_watch": _AlwaysChanged(), "_pw_settle": settle}

    def ownership(self, values: Values, bound: Mapping[Node, torch.Tensor]) -> Ownership:
        """Return what notes how one size is recorded, and has its replays checked."""
        return Ownership(values, bound, self.names)

    def answer(
        self,
        variant: Variant,
        function: Callable[..., Any],
        statics: StaticInputs,
        by_position: Callable[[Sequence[Any]], Mapping[int, torch.Tensor]],
    ) -> Callable[..., Any]:
        """Return a function that looks at the arguments and results of calls that a plan answers.

        Args:
            variant: the plan, and the size of the calls.
            function: answers them.
            statics: which arguments are held.
            by_position: returns the tensor arguments of a call by their positions.
        """
        held = variant.recording.held

        def answer(*given: Any) -> Any:
            tensors = by_position(given)
            before = {index: tensors[index].data_ptr() for index in held}
            for index, address in before.items():
                if statics.tensors[index].is_promised and address != held[index]:
                    raise StaleFinding(
                        f"argument {statics.tensors[index].path} of {self.owner} is not where it was when size "
                        f"{variant.plan_key} was captured, and static_inputs promises that it stays; copy into the "
                        "tensor of that call, or leave the argument out of static_inputs"
                    )
            results = function(*given)
            for index, address in before.items():
                if tensors[index].data_ptr() != address:
                    raise StaleFinding(
                        f"argument {statics.tensors[index].path} of {self.owner} moved while a call ran: an op in it, "
                        "or another thread, replaced its memory, which graphs read by its address; copy into it instead"
                    )
            if not self.config.static_outputs and variant.recording.checks is not None:
                self.check_results(results, [*tensors.values()], variant.recording.checks)
            return results

        return answer

    def check_results(self, results: Sequence[Any], given: Sequence[torch.Tensor], checks: PlanChecks) -> None:
        """Check that what a caller gets is not written over by the next call."""
        for index, result in enumerate(results):
            for tensor in tensors_in(result):
                if any(overlap(tensor, other) for other in (*given, *checks.bound_tensors)):
                    continue  # An argument or a parameter is handed back as it is.
                if any(overlap(tensor, place.tensor) for place in checks.pooled):
                    raise CaptureFinding(
                        f"result {index} of {self.owner} lies in memory that later calls write to, and static_outputs "
                        "is not set: a defect of Piecework; please report it with the model"
                    )

    def line(self, steps: Sequence[PieceStep], runs: Sequence[PieceRun], effects: Effects, sizes: Sizes) -> LineChecks:
        """Return what makes checked functions of the pieces and ops of one run.

        Args:
            steps: the pieces of the graph.
            runs: what runs them.
            effects: of the graph.
            sizes: what its symbols mean.
        """
        return LineChecks(steps, runs, effects, sizes)


class LineChecks:
    """Makes checked functions of the pieces and ops of one graph; the arguments are those of ``Debug.line``."""

    def __init__(self, steps: Sequence[PieceStep], runs: Sequence[PieceRun], effects: Effects, sizes: Sizes) -> None:
        self.effects, self.sizes = effects, sizes
        compiled = (step for step, run in zip(steps, runs, strict=True) if run.compiler != EAGER)
        self.relied_on = frozenset(value for step in compiled for value in step.inputs if isinstance(value, Node))
        """Nodes whose strides compiled code takes for granted."""

    def piece_check(self, step: PieceStep, piece: PieceRun) -> PieceCheck | None:
        """Return what looks at a compiled piece at every call; None for one that runs op by op."""
        return None if piece.compiler == EAGER else _StrictCheck(step, self, piece.origin)

    def piece(self, step: PieceStep, piece: PieceRun) -> Callable[..., Any]:
        """Return a piece that is looked at whenever it runs."""
        check = self.piece_check(step, piece)

        def run(*args: Any) -> Any:
            if is_recorded():
                return piece.run(*args)
            if check is not None:
                check.inputs(args)
            read = _only_read(step, args)
            before = fingerprints([args[position] for position in read])
            results = piece.run(*args)
            if check is not None:
                check.results(results, args)
            after = fingerprints([args[position] for position in read])
            for position, old, new in zip(read, before, after, strict=True):
                if old != new:
                    raise PluginFinding(
                        f"what {piece.origin} compiled for {step.name} wrote to its input {position} "
                        f"({step.inputs[position]}), which the piece only reads; Piece.mutated_inputs are those that "
                        "compiled code may write to"
                    )
            return results

        return run

    def op(self, node: Node, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a splitting op that is compared with its declaration whenever it runs."""
        overload = self.effects.overload(node)

        def run(*args: Any, **kwargs: Any) -> Any:
            if is_recorded():
                return function(*args, **kwargs)
            return _raising(node, *checked_call(function, overload, args, kwargs))

        return run

    def recorded_op(self, node: Node, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a splitting op that becomes part of a graph, where nothing can wait for what it writes."""
        overload = self.effects.overload(node)

        def run(*args: Any, **kwargs: Any) -> Any:
            return _raising(node, *checked_result(function, overload, args, kwargs))

        return run


def is_recorded() -> bool:
    """Whether somebody records the current stream, so that nothing may wait for it."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _raising(node: Node, result: Any, problems: Sequence[str]) -> Any:
    if problems:
        raise CompileFinding(f"{'; also, '.join(problems)}{line_of(node)}")
    return result


def _only_read(step: PieceStep, args: Sequence[Any]) -> list[int]:
    """Return the positions of the inputs that a piece must leave as they are."""
    written = [args[position] for position in step.written]
    return [
        position
        for position, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) and has_bits(arg) and not any(overlap(arg, other) for other in written)
    ]


class _StrictCheck(PieceCheck):
    """Looks also at strides that other compiled code relies on, and at whose memory results are."""

    def __init__(self, step: PieceStep, line: LineChecks, compiler: str) -> None:
        super().__init__(step, line.effects, line.sizes, compiler)
        self.relied_on = line.relied_on

    def inputs(self, args: Sequence[Any]) -> None:
        try:
            super().inputs(args)
        except CompileError as error:
            raise CompileFinding(str(error)) from error

    def results(self, results: object, args: Sequence[Any]) -> None:
        super().results(results, args)
        assert isinstance(results, (tuple, list))
        numbers = self.numbers(args)
        for index, (result, node) in enumerate(zip(results, self.step.outputs, strict=True)):
            if not isinstance(result, torch.Tensor) or not result.numel():
                continue
            if node in self.relied_on and result.layout is torch.strided:
                traced = self.traced[node]
                assert traced is not None
                wanted = [self.number(step, numbers) for step in traced.strides]
                pairs = zip(result.shape, result.stride(), wanted, strict=True)
                if any(size > 1 and known not in (None, step) for size, step, known in pairs):
                    raise self.error(
                        f"returned result {index} with strides {result.stride()}, and a piece that reads it was "
                        f"compiled for {tuple(wanted)}, as it was traced"
                    )
            if self.step.outputs_are_fresh:
                self.check_is_fresh(index, results, args)

    def check_is_fresh(self, index: int, results: Sequence[Any], args: Sequence[Any]) -> None:
        result = results[index]
        for position, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and overlap(result, arg):
                raise self.error(
                    f"returned result {index} in the memory of its input {position} ({self.step.inputs[position]}), "
                    "and Piece.outputs_are_fresh says that it is a tensor of its own"
                )
        for other in range(index):
            if isinstance(results[other], torch.Tensor) and overlap(result, results[other]):
                raise self.error(
                    f"returned results {other} and {index} in the same memory, and Piece.outputs_are_fresh says that "
                    "each is a tensor of its own"
                )

    def error(self, what: str) -> PluginFinding:
        return PluginFinding(str(super().error(what)))


class _AlwaysChanged:
    """Stands for a watch in the code of an entry."""

    changed = True
