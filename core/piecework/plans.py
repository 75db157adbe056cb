"""Which size is answered by which captured plan: decided at the first call of a size, then one look-up."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from piecework.budget import Budget, megabytes
from piecework.config import CompilationConfig
from piecework.config_checks import Size
from piecework.counting import counters
from piecework.dedupe import UniquePiece
from piecework.errors import CaptureError, PieceworkWarning, StaleCaptureError
from piecework.inputs import GraphInputs, key_of_values, size_values
from piecework.padding import Padding
from piecework.plan import Key, Plan, PlanFunctions, Variant, cut, numbers_of
from piecework.pool import Pool
from piecework.process_settings import compile_context, is_first_time, is_frozen
from piecework.recorder import Recorder, Recording, recording_session
from piecework.refusals import Refusals
from piecework.schedule import Schedule
from piecework.segment import Run
from piecework.split import SplitGraph
from piecework.static_inputs import StaticInputs

logger = logging.getLogger(__name__)

SEEN_BEFORE_CAPTURE = 3
"""With ``capture_sizes="auto"``, a size is captured at this call of it."""
NESTED = "called from inside another captured call, or while something is captured"
IN_USE = "another thread was using the memory of all captures"
RECORDED = "its stream is being recorded"


@dataclass(frozen=True)
class Pieces:
    """What runs at one size: a function per piece, and which of them are the same code."""

    runs: Sequence[Run]
    keys: Sequence[str]


class Plans:
    """The captured sizes of one graph, and what becomes of calls of all other sizes.

    Args:
        split: the graph.
        inputs: what it is called with.
        paths: how the user calls each tensor argument, by position.
        config: the settings.
        pool: where to capture.
        unique: the pieces without repetition.
        pieces: returns what runs at a size, given its key.
        is_auto: what ``capture_sizes=None`` means outside of a compile context.
        owner: name of the model, for messages.
        are_dims_named: the user named the dims; else a size is that of the first one, whatever the others are.
    """

    def __init__(
        self,
        split: SplitGraph,
        inputs: GraphInputs,
        paths: Mapping[int, str],
        config: CompilationConfig,
        pool: Pool,
        *,
        unique: Sequence[UniquePiece],
        pieces: Callable[[Key], Pieces],
        is_auto: bool,
        owner: str,
        are_dims_named: bool = True,
    ) -> None:
        self.are_dims_named = are_dims_named
        self.split, self.config, self.pool, self.owner = split, config, pool, owner
        self.inputs = replace(inputs, bound={})
        self.bound: Callable[[], Mapping[Node, torch.Tensor]] = dict
        """Returns the parameters and buffers that the model has now; set by whoever binds them."""
        self.pieces = pieces
        self.uncaptured: Callable[..., Any] = _not_there
        """Answers a call without captures; set when the code for it is there."""
        self.is_auto = is_auto
        self.statics = StaticInputs(inputs, paths, config, pool)
        self.refusals = Refusals(pool.capturer, pool.device)
        self.make = PlanFunctions(
            *(split, inputs, self.statics, pool, self.elsewhere, self.while_busy),
            static_outputs=config.static_outputs,
            name=owner,
        )
        outside = (*inputs.bound, *(tensor.node for tensor in self.statics.tensors.values()))
        self.schedule = Schedule(split, outside, self.make.results.made_from)
        self.padding = Padding(split, self.inputs, self.statics, config, self.make.results.made_from, unique)
        self.budget = Budget(config.max_capture_bytes)
        self.functions: dict[Key, Callable[..., Any]] = {}
        """What answers calls, by size: the one look-up of a call."""
        self.plans: dict[Key, Plan] = {}
        self.settled: dict[Key, str] = {}
        """Sizes that run uncaptured outside of a compile context, and why; until something is captured or dropped."""
        self.num_seen: Counter[Key] = Counter()
        self.num_uncaptured: defaultdict[Key, Counter[str]] = defaultdict(Counter)
        """Calls that ran uncaptured, by size and reason."""
        self.num_earlier_calls: Counter[tuple[Key, Key]] = Counter()
        """Calls that plans answered which were captured again since, by the plan's size and the call's."""
        self.retry_at: dict[Key, int] = {}
        self.said: set[str] = set()
        """Reasons why a capture failed that were said."""
        self.unasked: set[Key] = set()
        """Sizes that were captured since they came often."""
        self.stale: set[Key] = set()
        """Sizes whose captures were dropped after ``freeze``."""
        self.is_recording = False
        self.is_closed = False
        self.is_outdated = False
        """No plan is up to date; they are dropped at the next call that looks for one."""
        self.num_recaptures = 0
        self.on_captured: Callable[[], None] = lambda: None
        """Called after a capture, which reads all parameters by address: to look at each before the next replay."""
        pool.users.add(self)

    # A call whose size has no function yet.

    def choose(self, given: Sequence[Any], uncaptured: Callable[..., Any]) -> Callable[..., Any]:
        """Return what answers a call: its plan, captured now if it is time to, or ``uncaptured``.

        Raises:
            CaptureError: capturing failed, and ``on_failure`` is ``"error"``.
            StaleCaptureError: what was captured is stale, and ``freeze`` forbids to capture again.
        """
        key = self.key_of(given)
        if (why_not := self.settled.get(key)) is not None and compile_context() is None:
            return self.note_uncaptured(key, why_not, uncaptured)
        if not self.pool.wait():
            return self.note_uncaptured(key, IN_USE, uncaptured)
        try:
            if (function := self.functions.get(key)) is not None:
                return function
            if self.pool.is_busy:
                return self.note_uncaptured(key, NESTED, uncaptured)
            self.drop_outdated()
            target, why_not, is_asked_for = self.target_of(key)
            if target is None:
                return self.note_uncaptured(key, why_not, uncaptured)
            if target not in self.plans:
                if not self.pool.switch():
                    return self.note_uncaptured(key, RECORDED, uncaptured)
                if (why_not := self.why_not_now(self.by_position(given))) is not None:
                    return self.note_uncaptured(key, why_not, uncaptured)
                why_not = self.try_to_capture(target, self.by_position(given), is_asked_for=is_asked_for)
                if why_not is not None:
                    return self.note_uncaptured(key, why_not, uncaptured)
            return self.functions.get(key) or self.function_of(key, self.plans[target])
        finally:
            self.pool.lock.release()

    def key_of(self, given: Sequence[Any]) -> Key:
        """Return the size of a call: its last arguments."""
        num_dims = len(self.inputs.sizes.dims)
        return given[-1] if num_dims == 1 else tuple(given[len(given) - num_dims :])

    def target_of(self, key: Key) -> tuple[Key | None, str, bool]:
        """Return the size to capture or to pad to, or None and the reason; and whether somebody asked for that."""
        if is_frozen() and key in self.stale:
            self.refuse_stale(key, "what it reads was replaced or moved")
            return None, "stale after freeze()", True
        wanted = [*self.wanted(key), *self.stale]
        if key in wanted and self.may_capture(key):
            return key, "", key not in self.unasked
        possible = {*self.plans, *(size for size in wanted if self.may_capture(size))}
        padded, why_not = self.padding.target(key, possible)
        if padded is not None:
            return padded, "", True
        if key in wanted:
            return None, "freeze() was called" if is_frozen() else self.why_left_out(key), True
        if self.is_automatic():
            self.num_seen[key] += 1
            if self.num_seen[key] >= SEEN_BEFORE_CAPTURE:
                return (key, "", False) if self.may_capture(key) else (None, self.why_left_out(key), False)
            return None, why_not or f"captured when seen {SEEN_BEFORE_CAPTURE} times", False
        why_not = why_not or "not among the sizes to capture"
        if compile_context() is None:
            self.settled[key] = why_not
            self.say_that_nothing_is_captured()
        return None, why_not, False

    def say_that_nothing_is_captured(self) -> None:
        """Say once how to name sizes, where nobody did: a decorated class captures nothing unasked."""
        if self.config.capture_sizes is None and not self.plans and is_first_time("nothing is captured"):
            logger.warning(
                "%s: nothing is captured on %s, since no sizes are named; call it in "
                '`with piecework.set_compile_context([...]):`, or set capture_sizes, "auto" too',
                *(self.owner, self.pool.device),
            )

    def why_not_now(self, given: Mapping[int, torch.Tensor]) -> str | None:
        """Return why nothing can be captured at this call: what it reads would be written over.

        That is so for results in the memory of the pool, of this model or another (``static_outputs``). Where such a
        result is given for an input that is held, that input is copied from now on.
        """
        lent = [tensor for tensor in self.statics.tensors.values() if self.pool.lends(given[tensor.index])]
        for tensor in lent:
            tensor.is_copied = True
        if not lent:
            return None
        paths = ", ".join(tensor.path for tensor in lent)
        return f"argument {paths} is a result in memory that captures re-use (static_outputs); clone it"

    def wanted(self, key: Key) -> list[Key]:
        """Return the sizes to capture: those of the settings, else of the compile context around this call."""
        sizes = self.config.capture_sizes
        if sizes is None:
            sizes = compile_context()
        if not isinstance(sizes, tuple):
            return []
        if self.are_dims_named:
            return [self.key_of_size(size) for size in sizes]
        first = key[:1] if isinstance(key, tuple) else (key,)
        return [key] if not first or first[0] in sizes else []

    def is_automatic(self) -> bool:
        """Whether a size that comes often is captured unasked."""
        if self.config.capture_sizes is None:
            return self.is_auto and compile_context() is None
        return self.config.capture_sizes == "auto"

    def may_capture(self, key: Key) -> bool:
        """Whether a size can be captured now; one that failed is tried again after twice as many calls."""
        if is_frozen() or self.is_closed or self.budget.why_left_out(key):
            return False
        return sum(self.num_uncaptured[key].values()) >= self.retry_at.get(key, 0)

    def why_left_out(self, key: Key) -> str:
        return self.budget.why_left_out(key) or "capturing it failed, and is tried again later"

    def key_of_size(self, size: Size) -> Key:
        """Return what a size that the user wrote is looked up by."""
        return key_of_values(size_values(size, self.inputs.sizes.dims, f"a size to capture of {self.owner}"))

    def values_of(self, key: Key) -> dict[str, int]:
        """Return the value of each named dim."""
        dims = self.inputs.sizes.dims
        return dict(zip(dims, (key,) if len(dims) == 1 else key, strict=True))

    def note_uncaptured(self, key: Key, why: str, uncaptured: Callable[..., Any]) -> Callable[..., Any]:
        self.num_uncaptured[key][why] += 1
        return uncaptured

    # Capturing.

    def try_to_capture(self, key: Key, given: Mapping[int, torch.Tensor], *, is_asked_for: bool = True) -> str | None:
        """Capture a size; return why it could not be done, where that is no error.

        It is none with ``on_failure="eager"``, and for a size that nobody asked to capture: such a call would
        have worked without.
        """
        try:
            self.capture(key, given)
        except CaptureError as error:
            if self.config.on_failure == "error" and is_asked_for:
                raise
            calls = sum(self.num_uncaptured[key].values())
            self.retry_at[key] = max(2 * calls, 2)
            why = str(error.__cause__ or error)
            if why not in self.said:
                self.said.add(why)
                warnings.warn(PieceworkWarning(f"{self.owner} answers size {key} uncaptured: {error}"), stacklevel=5)
            return "capturing it failed"
        if not is_asked_for:
            self.unasked.add(key)
        return None if key in self.plans else self.why_left_out(key)

    def by_position(self, given: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Return the tensor arguments of a call by their positions."""
        return dict(zip(self.inputs.tensor_indices, given, strict=False))

    def capture(self, key: Key, given: Mapping[int, torch.Tensor]) -> Plan | None:
        """Capture a size from the tensors of a call; None where the budget does not allow it.

        Raises:
            CaptureError: it can't be captured; everything is as it was before.
        """
        start = time.perf_counter()
        with self.undoing(key) as undo:
            before = self.pool.capturer.memory()
            if not self.budget.allows(key, self.num_rows(key), before, self.owner):
                return None
            with self.session():
                recording = self.record(key, given)
            after = self.pool.capturer.memory()
            if not self.budget.take(key, self.num_rows(key), before, after, recording.num_graphs, self.owner):
                del recording
                return None
            undo.pop_all()
        if self.config.static_outputs:
            for tensor in recording.outputs.values():
                self.pool.lend(tensor)
        plan = Plan(key, self.numbers_of(key), recording, time.perf_counter() - start, before, after)
        counters.num_graph_captures += recording.num_graphs
        self.plans[key] = plan
        self.settled.clear()
        self.num_recaptures += key in self.stale
        self.stale.discard(key)
        self.function_of(key, plan)
        self.on_captured()
        logger.info(
            "%s: captured size %s in %d graphs, %.0f ms, %.1f MB in the pool",
            *(self.owner, key, recording.num_graphs, plan.seconds * 1e3, after.pool_bytes / 1e6),
        )
        return plan

    @contextlib.contextmanager
    def undoing(self, key: Key) -> Iterator[contextlib.ExitStack]:
        """Put static memory back as it was before an attempt at a size, unless the stack is emptied.

        Raises:
            CaptureError: whatever fails in the block; a capturer that is a plugin's may raise anything.
        """
        buffers = dict(self.statics.buffers)

        def put_back() -> None:
            self.statics.buffers = buffers
            if not self.plans and not self.is_recording:
                self.give_back()

        self.pool.users.add(self)
        with contextlib.ExitStack() as undo:
            undo.callback(put_back)
            try:
                yield undo
            except Exception as error:
                own = isinstance(error, CaptureError)
                why = str(error) if own else f"plugin {self.pool.plugin!r} raised {type(error).__name__}: {error}"
                raise CaptureError(f"size {key} of {self.owner} can't be captured: {why}") from error

    def capture_all(
        self,
        sizes: Sequence[Size],
        given: Mapping[int, torch.Tensor],
        on_size: Callable[[Key, Plan | None], None] = lambda key, plan: None,
    ) -> None:
        """Capture sizes, the largest first, so that the others find room in its memory; no splitting op runs.

        Args:
            sizes: as the user writes them; those that are there already are passed over.
            given: the tensor arguments of one call, which are cut or filled up to each size.
            on_size: called after each size; without a plan where it was left out.

        Raises:
            CaptureError: a size can't be captured and ``on_failure`` is ``"error"``; those before it stay.
        """
        keys = dict.fromkeys(self.key_of_size(size) for size in sizes)
        ordered = sorted(keys, key=self.num_rows, reverse=True)
        with self.pool.lock:
            if self.pool.is_busy or not self.pool.switch():
                raise CaptureError(f"sizes of {self.owner} can't be captured now: {NESTED}, or {RECORDED}")
            if (why_not := self.why_not_now(given)) is not None:
                raise CaptureError(
                    f"sizes of {self.owner} can't be captured from these example inputs: {why_not}; clone it"
                )
            self.estimate(ordered, given)
            self.pool.users.add(self)
            try:
                with self.session():
                    for key in ordered:
                        if key not in self.plans:
                            self.try_to_capture(key, self.resized(given, key))
                        on_size(key, self.plans.get(key))
            finally:
                if not self.plans:
                    self.give_back()

    def estimate(self, ordered: Sequence[Key], given: Mapping[int, torch.Tensor]) -> None:
        """Find out what sizes would take, from the smallest and a middle one, where a budget is to be kept."""
        if self.budget.limit is None or self.plans or len(ordered) < 3:
            return
        start = self.pool.capturer.memory()
        with contextlib.suppress(CaptureError), self.undoing(ordered[-1]):  # It comes again when its size is captured.
            for key in (ordered[-1], ordered[len(ordered) // 2]):
                before = self.pool.capturer.memory()
                with self.session():
                    recording = self.record(key, self.resized(given, key))
                self.budget.probe(self.num_rows(key), before, self.pool.capturer.memory())
                del recording
        if not self.budget.probes:
            return
        total = self.budget.estimate(self.num_rows(ordered[0])) or 0
        drivers = [probe.driver_bytes for probe in self.budget.probes]
        total += (len(ordered) - 1) * sum(drivers) // len(drivers)
        logger.info(
            "%s: %d sizes are expected to take about %s, %s more than now",
            *(self.owner, len(ordered), megabytes(total + start.pool_bytes), megabytes(total)),
        )

    def resized(self, given: Mapping[int, torch.Tensor], key: Key) -> dict[int, torch.Tensor]:
        """Return arguments for a size: what is kept in place must be as large, what is copied is cut later.

        Raises:
            CaptureError: an argument that is kept in place is too small.
        """
        resized = dict(given)
        for tensor in self.statics.held:
            if tensor.varies:
                size = self.statics.layout(tensor.fake, self.numbers_of(key)).size
                if any(have < need for have, need in zip(given[tensor.index].shape, size, strict=True)):
                    raise CaptureError(
                        f"size {key} of {self.owner} needs argument {tensor.path} of shape {size}, and the one that is "
                        f"kept in place (static_inputs) has {tuple(given[tensor.index].shape)}; pass the largest"
                    )
                resized[tensor.index] = cut(given[tensor.index], size)
        return resized

    def record(self, key: Key, given: Mapping[int, torch.Tensor]) -> Recording:
        pieces = self.pieces(key)
        values = self.values_of(key)
        recorder = Recorder(
            *(
                self.schedule,
                replace(self.inputs, bound=self.bound()),
                pieces.runs,
                pieces.keys,
                self.pool,
                self.statics,
                self.refusals,
            ),
            numbers=self.numbers_of(key),
            size=key if len(values) == 1 else values,
            results=self.make.results.made_from,
        )
        return recorder.record(given)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Return a context around recordings, or do nothing inside of one."""
        if self.is_recording:
            yield
            return
        try:
            with self.pool.being_busy(), recording_session(self.pool):
                self.is_recording = True
                yield
        finally:
            self.is_recording = False

    def numbers_of(self, key: Key) -> Any:
        return numbers_of(self.values_of(key), self.inputs)

    def num_rows(self, key: Key) -> int:
        """Return how many rows a size has in all."""
        product = 1
        for length in self.values_of(key).values():
            product *= length
        return product

    def function_of(self, key: Key, plan: Plan) -> Callable[..., Any]:
        """Return what answers calls of a size by a plan of that many rows, or more."""
        variant = plan.variants.setdefault(key, Variant(key, plan.key, plan.recording))
        self.functions[key] = function = self.make.function(variant, self.numbers_of(key), self.bound())
        if self.is_outdated:  # by another thread, since the plan was looked up
            self.functions.clear()
        return function

    # Calls that a plan can't answer.

    def while_busy(self, variant: Variant, *given: Any) -> Any:
        """Answer a call that can't have the pool."""
        return self.note_uncaptured(variant.key, IN_USE, self.uncaptured)(*given)

    def elsewhere(self, variant: Variant, *given: Any) -> Callable[..., Any]:
        """Return what answers a call from inside another one, on a stream that is recorded, or whose inputs moved."""
        if self.pool.is_busy:
            return self.note_uncaptured(variant.key, NESTED, self.uncaptured)
        if not self.pool.switch():
            return self.note_uncaptured(variant.key, RECORDED, self.uncaptured)
        return self.after_move(variant, given)

    def after_move(self, variant: Variant, given: Sequence[Any]) -> Callable[..., Any]:
        """Return what answers a call whose held inputs are at other addresses than at the capture."""
        held, now = variant.recording.held, self.by_position(given)
        moved = [i for i, address in held.items() if now[i].data_ptr() != address]
        if moved and is_frozen():
            paths = ", ".join(self.statics.tensors[index].path for index in moved)
            self.refuse_stale(variant.key, f"argument {paths} is at another address than at its capture")
            return self.note_uncaptured(variant.key, "stale after freeze()", self.uncaptured)
        for index in moved:
            self.statics.note_move(self.statics.tensors[index], self.owner)
        if moved:
            self.drop(self.plans[variant.plan_key])
        return self.choose(given, self.uncaptured)

    def refuse_stale(self, key: Key, why: str) -> None:
        """Raise that a capture is stale, where that is an error."""
        if self.config.on_failure == "error":
            raise StaleCaptureError(
                f"size {key} of {self.owner} has to be captured again, since {why}, and piecework.freeze() forbids it; "
                'keep it in place, or set on_failure="eager" to have such calls run uncaptured'
            )

    def drop(self, plan: Plan) -> None:
        """Forget a plan; it is captured again when its size comes next."""
        self.plans.pop(plan.key, None)
        self.settled.clear()
        self.budget.taken.pop(plan.key, None)
        self.stale.add(plan.key)
        for key, variant in plan.variants.items():
            self.functions.pop(key, None)
            self.num_earlier_calls[plan.key, key] += variant.num_calls
        plan.variants.clear()  # They hold the plan, so that it would stay until garbage is collected.

    def drop_all(self) -> None:
        """Forget every plan, since what they read was replaced or moved; does not wait for those that run.

        The thread that is noticing this may be one that such a run waits for.
        """
        self.is_outdated = True
        self.functions.clear()

    def drop_outdated(self) -> None:
        if self.is_outdated:
            self.is_outdated = False
            for plan in list(self.plans.values()):
                self.drop(plan)

    def give_back(self) -> None:
        """Give up all memory; waits for calls that run."""
        with self.pool.lock:
            for plan in list(self.plans.values()):
                self.drop(plan)
            self.budget.taken.clear()
            self.statics.buffers.clear()
            self.pool.leave(self)

    def close(self) -> None:
        """Give up all memory for good: a call that another thread had begun before runs uncaptured."""
        with self.pool.lock:
            self.is_closed = True
            self.give_back()


def _not_there(*_: Any) -> Any:
    raise AssertionError("no code for uncaptured calls was set")
