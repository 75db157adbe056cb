"""Verify one model at some sizes: find the first step of a call that departs from eager, and the first op in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from piecework import torch_internals as internals
from piecework.api import GivenDims, compile, is_compiled, started_forward_of
from piecework.build import Compiled, by_place
from piecework.capturing import Recordable
from piecework.compilers import specialised
from piecework.config import CompilationConfig
from piecework.config_checks import CompilationLevel, Size, check_sizes
from piecework.errors import CaptureError, ConfigError, TraceDepartureError
from piecework.forward import Forward
from piecework.inputs import key_of_values
from piecework.pieces import Piece
from piecework.plans import Plans
from piecework.plugins import plugin_manager
from piecework.settings import cache_dir
from piecework.tools.verify.blame import (
    Compile,
    DeclarationCheck,
    OpComparison,
    OpLog,
    WrongOp,
    departs,
    first_wrong_op,
)
from piecework.tools.verify.calls import Call, Inputs, Kept, calls_of_sizes, same_random_numbers
from piecework.tools.verify.chains import Finding, entry_with, inputs_now
from piecework.tools.verify.comparing import EXACT, Difference, Tolerance, clone, first_difference
from piecework.tools.verify.reference import Reference, WholeReference, op_by_op
from piecework.tools.verify.replays import Replays
from piecework.tools.verify.report import Departure, SizeVerification, Verification
from piecework.tools.verify.scripts import Script, key_of_graph, script_of_op, script_of_piece
from piecework.tools.verify.uncaptured import Uncaptured


def verify(
    model: Any,
    inputs: Inputs | Callable[[Any], Inputs],
    sizes: Sequence[Size] = (),
    *,
    config: CompilationConfig | None = None,
    dynamic_arg_dims: GivenDims | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    folder: Path | str | None = None,
) -> Verification:
    """Compare a model with eager step by step, and name the first piece, then the first op, that departs.

    At each size: the original; the call as it is; the trace op by op, and beside it each piece as it was compiled and
    each splitting op, on the same inputs; then a new capture, replayed graph by graph. So the answer says who is wrong:
    the trace, the code of a piece, what an op declares, a graph, or the plan that answers calls.

    Every step runs several times, splitting ops too; parameters, buffers and arguments have their contents again
    afterwards. It needs the memory of the model, and that of all intermediates of a call, once more.

    Args:
        model: what ``compile`` returned, or an instance of a decorated class: what its calls do is verified, with the
            captures that it has. Anything else is compiled for the purpose.
        inputs: the arguments of a call, as for ``capture``; or a function that returns them for a size.
        sizes: numbers of rows, or a value per named dim; arguments that are not made by a function are cut, or their
            rows come again. Without sizes, the inputs as they are.
        config: settings, where the model is not compiled yet.
        dynamic_arg_dims: as for ``compile``, where the model is not compiled yet.
        rtol: relative tolerance; None: by dtype (``tools/verify/comparing.py``).
        atol: absolute tolerance; None: a share of the largest number of each tensor, by dtype.
        folder: where scripts that show a departure by itself are written; None: below ``PIECEWORK_CACHE_DIR``.

    Returns:
        What was compared, and the departures; ``str()`` gives it as text, ``is_right`` says whether there are none.

    Raises:
        ConfigError: the model, the inputs or the sizes are not usable, or the model can't run at all.
    """
    checked = list(check_sizes(sizes, "verify: sizes")) if sizes else []
    is_own = not is_compiled(model)
    if not is_own and (config is not None or dynamic_arg_dims is not None):
        raise ConfigError("verify: the model is compiled already; its own config and dims are what is verified")
    compiled = compile(model, config=config, dynamic_arg_dims=dynamic_arg_dims) if is_own else model
    forward = started_forward_of(compiled, "verify")
    scripts = Path(folder) if folder is not None else cache_dir() / "verify"
    verifier = _Verifier(compiled, forward, Tolerance(rtol, atol), scripts)
    try:
        results = [verifier.verify(call) for call in calls_of_sizes(forward, inputs, checked)]
    finally:
        if is_own:
            forward.release()
    return Verification(forward.owner, verifier.level, tuple(results))


@dataclass
class _Outcome:
    """What one run gave, and what it changed."""

    result: Any
    changed: dict[str, torch.Tensor]
    error: Exception | None = None

    def difference(self, expected: _Outcome, tolerance: Tolerance) -> Difference | None:
        """Return the first thing in which it departs from another run."""
        if self.error is not None:
            return Difference("it", f"raised {type(self.error).__name__}: {self.error}")
        found = first_difference(self.result, expected.result, "the result", tolerance)
        names = dict.fromkeys([*expected.changed, *self.changed])
        return found or next(filter(None, (self._of_change(name, expected, tolerance) for name in names)), None)

    def _of_change(self, name: str, expected: _Outcome, tolerance: Tolerance) -> Difference | None:
        mine, other = self.changed.get(name), expected.changed.get(name)
        if mine is None or other is None:
            return Difference(
                name, f"was{' not' * (mine is None)} written to, expected{' not' * (other is None)} to be"
            )
        return first_difference(mine, other, f"{name} afterwards", tolerance)


class _Verifier:
    """Verifies the calls of one model.

    Args:
        model: called like a user would.
        forward: what stands behind it.
        tolerance: for all that is compared.
        folder: of the scripts.
    """

    def __init__(self, model: Any, forward: Forward, tolerance: Tolerance, folder: Path) -> None:
        self.model, self.forward, self.tolerance, self.folder = model, forward, tolerance, folder
        self.level = forward.level

    def verify(self, call: Call) -> SizeVerification:
        """Compare one call with eager, and look for who is wrong."""
        with contextlib.ExitStack() as stack:
            kept = Kept({**call.tensors(), **self.state()})
            stack.callback(kept.put_back)
            self.device = next((t.device for t in kept.tensors.values() if t.device.type != "cpu"), torch.device("cpu"))
            eager = self.outcome(kept, self.original(call))
            before, moved = self.answered(), self.moved()
            answer = self.answer(call, kept)
            self.level = self.forward.level
            error = answer.error
            by = self.who_answered(before) if error is None else f"an error: {type(error).__name__}: {error}"
            if error is not None and (self.forward.compiled is None or isinstance(error, TraceDepartureError)):
                departure, counts = self.refused(call, kept, error), SizeVerification(call.size, "")
            else:
                departure, counts = self.departure(call, kept, eager, answer)
            is_comparable = not counts.random_pieces or answer.error is not None
            if (
                departure is None
                and is_comparable
                and (difference := answer.difference(eager, self.tolerance)) is not None
            ):
                kind = "sum" if counts.num_pieces and answer.error is None else "call"
                departure = Departure(kind, "the answer to the call", difference)
            largest = None if error is not None else first_difference(answer.result, eager.result, "the result", EXACT)
            if departure is not None and departure.kind == "call":
                departure = replace(departure, moved=moved)
            if departure is not None:
                departure = self.departed_original(call, kept, eager) or departure
            found = () if departure is None else (departure,)
            is_error = error is not None
            return replace(counts, size=call.size, answered_by=by, departures=found, largest=largest, is_error=is_error)

    # Runs.

    def state(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers, and other tensors that the trace holds."""
        target = self.forward.target
        state: dict[str, torch.Tensor] = {}
        if isinstance(target, nn.Module):
            state = {**dict(target.named_parameters()), **dict(target.named_buffers())}
        if self.forward.compiled is not None:
            state |= {binding.source: binding.tensor for binding in self.forward.compiled.state.bindings}
        return state

    def moved(self) -> tuple[str, ...]:
        """Return the parameters and buffers whose memory is elsewhere than captures read it."""
        return () if self.forward.compiled is None else tuple(self.forward.compiled.state.moved())

    def outcome(self, kept: Kept, run: Callable[[], Any]) -> _Outcome:
        """Run something once; all memory is as before afterwards."""
        with same_random_numbers(self.device):
            try:
                result = clone(run())
                return _Outcome(result, kept.changed())
            finally:
                kept.put_back()

    def answer(self, call: Call, kept: Kept) -> _Outcome:
        """Return what a call of the model gives; an error is an outcome, as the original gave a result."""
        try:
            return self.outcome(kept, lambda: self.model(*call.args, **call.kwargs))
        except ConfigError:
            raise  # Of the settings, which is nothing to look for.
        except Exception as error:  # Whatever the model, an op or a plugin raises: it is told with the place.
            return _Outcome(None, {}, error)

    def original(self, call: Call) -> Callable[[], Any]:
        """Return the call by the original."""
        return lambda: self.forward.original(*call.args, **call.kwargs)

    def through(self, run: Callable[..., Sequence[Any]], call: Call) -> Callable[[], Any]:
        """Return a call that goes through the checks of the compiled model, and then elsewhere."""
        assert self.forward.compiled is not None
        entry = entry_with(self.forward.compiled, run)
        own = (self.forward.target,) if self.forward.takes_self else ()
        return lambda: entry(*own, *call.args, **call.kwargs)

    def answered(self) -> dict[str, int]:
        """Return how many calls each way to answer one has answered so far."""
        compiled = self.forward.compiled
        if compiled is None:
            return {}
        counts = {f"the original ({why})": number for why, number in compiled.num_eager_calls.items()}
        if compiled.plans is not None:
            for plan in compiled.plans.plans.values():
                for key, variant in plan.variants.items():
                    padded = f", padded up from {key}" if variant.is_padded else ""
                    counts[f"the captures of size {plan.key}{padded}"] = variant.num_calls
            for reasons in compiled.plans.num_uncaptured.values():
                for why, number in reasons.items():
                    counts[f"the pieces uncaptured ({why})"] = counts.get(f"the pieces uncaptured ({why})", 0) + number
        return counts

    def who_answered(self, before: Mapping[str, int]) -> str:
        """Return in words what answered the call since ``before``."""
        risen = [who for who, number in self.answered().items() if number > before.get(who, 0)]
        if risen:
            return risen[0]
        compiled = self.forward.compiled
        if compiled is None:
            return "torch.compile" if self.level is CompilationLevel.DYNAMO_AS_IS else "the original"
        return "the pieces uncaptured" if compiled.split is not None else "the backend of level 2"

    # Who is wrong.

    def departure(
        self, call: Call, kept: Kept, eager: _Outcome, answer: _Outcome
    ) -> tuple[Departure | None, SizeVerification]:
        """Return the first step that departs, and what was compared."""
        nothing = SizeVerification(call.size, "")
        compiled = self.forward.compiled
        if compiled is None:
            return None, nothing
        if compiled.split is None:
            return self.whole(compiled, call, kept, eager), nothing
        reference = Reference(compiled.split, inputs_now(compiled), self.tolerance, self.device)
        traced = self.outcome(kept, self.through(reference, call))
        counts = replace(nothing, num_pieces=reference.num_pieces, num_ops=reference.num_ops)
        if reference.findings:
            return self.explained(reference.findings[0], call, reference.given), counts
        if (difference := traced.difference(eager, self.tolerance)) is not None:
            return self.departed_trace(call, kept, compiled, difference), counts
        if reference.random_pieces:
            return None, replace(counts, random_pieces=tuple(reference.random_pieces))
        uncaptured = Uncaptured(compiled.split, inputs_now(compiled))
        chain = self.outcome(kept, self.through(uncaptured, call))
        if self.captures(compiled.plans):
            assert compiled.plans is not None

            def rewind() -> None:
                kept.put_back()
                torch.manual_seed(0)

            replays = Replays(compiled.plans, uncaptured, self.tolerance, rewind)
            try:
                self.outcome(kept, replays.run)
            except CaptureError as error:
                difference = Difference("it", f"can't be captured: {error}")
                return Departure("capture", f"size {call.size}", difference), counts
            counts = replace(counts, num_graphs=replays.num_graphs)
            if replays.findings:
                return self.departed_capture(call, kept, replays.findings[0], uncaptured), counts
        if (difference := answer.difference(chain, self.tolerance)) is not None:
            return Departure("call", "the answer to the call", difference), counts
        return None, counts

    def refused(self, call: Call, kept: Kept, error: Exception) -> Departure:
        """Return that a call gives an error before any step; or the op whose declaration may have led to it."""
        check = DeclarationCheck()

        def run() -> Any:
            with check:
                return self.original(call)()

        self.outcome(kept, run)
        if check.wrong is not None:
            return Departure("declaration", check.wrong.name, check.wrong.difference, op=check.wrong.name)
        return Departure("refused", "the call", Difference("it", f"raised {type(error).__name__}: {error}"))

    def departed_capture(self, call: Call, kept: Kept, finding: Finding, uncaptured: Uncaptured) -> Departure:
        """Find the first op that departs in a captured graph of one piece."""
        assert self.forward.compiled is not None
        split = self.forward.compiled.split
        assert split is not None
        if len(finding.pieces) == 1:
            index = split.pieces.index(finding.pieces[0])
            again = Uncaptured(split, uncaptured.inputs, args_of=index)
            self.outcome(kept, self.through(again, call))
            finding = replace(finding, piece=index, args=again.args)
        return self.explained(finding, call, uncaptured.given)

    def captures(self, plans: Plans | None) -> bool:
        """Whether calls of the model may be answered by captures."""
        return plans is not None and (plans.config.capture_sizes != () or bool(plans.plans))

    def whole(self, compiled: Compiled, call: Call, kept: Kept, eager: _Outcome) -> Departure | None:
        """Compare what the backend of level 2 made of the whole graph with the graph op by op."""
        inputs = inputs_now(compiled)
        reference = WholeReference(compiled, inputs, self.tolerance, self.device)
        traced = self.outcome(kept, self.through(reference, call))
        if reference.difference is not None:
            return Departure("piece", "the whole graph", reference.difference)
        if (difference := traced.difference(eager, self.tolerance)) is not None:
            return self.departed_trace(call, kept, compiled, difference)
        return None

    def departed_trace(self, call: Call, kept: Kept, compiled: Compiled, difference: Difference) -> Departure:
        """Find the first op that the original runs otherwise than its trace."""
        traced = self.through(op_by_op(compiled, inputs_now(compiled)), call)
        wrong = self.first_op_apart(call, kept, traced, "the trace")
        assumption = compiled.state.departure()
        departure = Departure("trace", "the trace, run op by op", difference, assumption=assumption)
        return departure if wrong is None else replace(departure, op=wrong.name, op_difference=wrong.difference)

    def departed_original(self, call: Call, kept: Kept, eager: _Outcome) -> Departure | None:
        """Return how the original departs from its own first run; None where it does not."""
        again = self.outcome(kept, self.original(call))
        if (difference := again.difference(eager, self.tolerance)) is None:
            return None
        wrong = self.first_op_apart(call, kept, self.original(call), "the run before")
        departure = Departure("original", "the original, run again", difference)
        return departure if wrong is None else replace(departure, op=wrong.name, op_difference=wrong.difference)

    def first_op_apart(self, call: Call, kept: Kept, run: Callable[[], Any], what: str) -> WrongOp | None:
        """Return the first op of the original whose result is another one than in a run, which ``what`` names."""
        log = OpLog()
        comparison = OpComparison(log, what, self.tolerance)
        for mode, one in ((log, run), (comparison, self.original(call))):

            def run_under_mode(mode: OpLog = mode, one: Callable[[], Any] = one) -> Any:
                with mode:
                    return one()

            self.outcome(kept, run_under_mode)
        return comparison.wrong

    def explained(self, finding: Finding, call: Call, given: tuple[Any, ...]) -> Departure:
        """Return a departure with the first op that departs in a piece, and a script that shows it.

        Args:
            finding: what departs.
            call: in this call.
            given: what the graph was called with.
        """
        departure = Departure(finding.kind, finding.place, finding.difference)
        if finding.kind in ("declaration", "implementation", "rows"):
            departure = replace(departure, op=finding.op_name)
            write_script = partial(script_of_op, finding, self.tolerance, self.folder, program=self.program)
            return _with_script(departure, write_script)
        if len(finding.pieces) != 1 or finding.args is None:
            return departure
        make = self.recompiled(finding, given) if finding.kind == "piece" else self.recaptured()
        (step,) = finding.pieces
        wrong = first_wrong_op(step.graph, finding.args, make, self.tolerance)
        graph = step.graph if wrong is None or wrong.graph is None else wrong.graph

        def shows(args: Sequence[Any]) -> bool:
            return departs(graph, args, make, self.tolerance) is not None

        assert self.forward.settings is not None
        compiler, config = self.compiler(finding), self.forward.settings.config
        write_script = partial(
            script_of_piece,
            replace(self.piece(finding), graph=graph),
            finding,
            wrong,
            config if finding.kind == "capture" else config.model_copy(update={"piece_compiler": compiler}),
            self.folder,
            shows=shows,
            tolerance=self.tolerance,
            plugins=self.plugins(finding),
            program=self.program,
        )
        departure = _with_script(replace(departure, compiler=compiler), write_script)
        return departure if wrong is None else replace(departure, op=wrong.name, op_difference=wrong.difference)

    @property
    def program(self) -> str | None:
        """Return the module that the user's model is written in."""
        return getattr(self.forward.target, "__module__", None)

    def compiler(self, finding: Finding) -> str:
        """Return the name of the plugin that compiled the piece of a finding."""
        assert self.forward.compiled is not None
        assert finding.piece is not None
        return by_place(self.forward.compiled.unique)[finding.piece].run.compiler

    def plugins(self, finding: Finding) -> list[str]:
        """Return the names of the plugins that a script about a piece needs."""
        assert self.forward.compiled is not None
        plans = self.forward.compiled.plans
        capturer = [plans.pool.plugin] if finding.kind == "capture" and plans is not None else []
        return [self.compiler(finding), *capturer]

    def piece(self, finding: Finding) -> Piece:
        """Return the piece of a finding, over the sizes of the place where it stands."""
        assert self.forward.compiled is not None
        assert finding.piece is not None
        (step,) = finding.pieces
        examples = tuple(node.meta["example_value"] for node in step.graph.graph.find_nodes(op="placeholder"))
        piece = by_place(self.forward.compiled.unique)[finding.piece].unique.piece
        return replace(piece, name=step.name, graph=step.graph, example_inputs=examples)

    def recompiled(self, finding: Finding, given: tuple[Any, ...]) -> Compile:
        """Return what compiles other graphs as the piece of a finding was compiled, for one exact size."""
        compiled, settings = self.forward.compiled, self.forward.settings
        assert compiled is not None
        assert settings is not None
        sizes = compiled.trace.sizes
        numbers = dict(zip(sizes.dims, given[len(given) - len(sizes.dims) :], strict=True))
        key = key_of_values(numbers)
        values = {symbol: int(number) for symbol, number in sizes.numbers_of(key).items()}
        piece = self.piece(finding)

        def compile_graph(graph: GraphModule) -> Callable[..., Sequence[Any]]:
            other = replace(piece, graph=graph, outputs_are_fresh=True, key=key_of_graph(graph))
            size = key if len(numbers) == 1 else numbers
            with torch.inference_mode(False), internals.one_trace_for_all_sizes():
                answer = plugin_manager().compile_piece(specialised(other, size, values), settings.config)
            return answer[0].run if answer is not None else graph.forward

        return compile_graph

    def recaptured(self) -> Compile:
        """Return what captures other graphs op by op, on memory that holds something else than at the replay."""
        compiled = self.forward.compiled
        assert compiled is not None
        plans = compiled.plans
        assert plans is not None
        return lambda graph: _captured(graph, plans)


def _with_script(departure: Departure, write: Callable[[], Script | None]) -> Departure:
    try:
        script = write()
    except Exception as error:  # Whatever is wrong with the script must not hide what departs.
        return replace(departure, script_error=f"{type(error).__name__}: {error}")
    return departure if script is None else replace(departure, script=script.path, missing=script.missing)


def _captured(graph: GraphModule, plans: Plans) -> Callable[..., Sequence[Any]]:

    def run(*args: Any) -> Sequence[Any]:
        static = [torch.zeros_like(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        positions = [i for i, memory in enumerate(static) if isinstance(memory, torch.Tensor)]

        def record(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = dict(zip(positions, inputs, strict=True))
            return tuple(graph.forward(*(given.get(i, arg) for i, arg in enumerate(static))))

        memory = tuple([static[i] for i in positions])
        with torch.no_grad(), plans.pool.lock, plans.captures.session():
            work = Recordable("verify", record, memory, tuple(range(len(memory))))
            capture = plans.pool.capturer.capture(work)
            for i in positions:
                static[i].copy_(args[i])
            capture.replay()
            return clone(list(capture.outputs))

    return run
