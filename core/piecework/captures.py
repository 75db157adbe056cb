"""Capture sizes of one graph, one or many: within a budget, and all or nothing."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.fx import Node

from piecework.budget import Budget, format_bytes
from piecework.capturing import CaptureMemory, Capturer
from piecework.config import CompilationConfig
from piecework.config_checks import Size
from piecework.counting import counters
from piecework.errors import CaptureError, DebugFinding, PieceworkError, PieceworkWarning
from piecework.inputs import GraphInputs, Key
from piecework.notes import modules_of
from piecework.plan import Plan, cut
from piecework.pool import NESTED, RECORDED, Pool
from piecework.process_settings import is_frozen
from piecework.program import Pieces, Programs
from piecework.recorder import Recorder, Recording, recording_session
from piecework.refusals import Refusals
from piecework.schedule import Schedule
from piecework.segment import SizeRefusedError
from piecework.split import SplitGraph
from piecework.static_inputs import StaticInputs

if TYPE_CHECKING:
    from piecework.debug import Debug

logger = logging.getLogger(__name__)

RecorderT = TypeVar("RecorderT", bound=Recorder)


class Captures:
    """Makes the plans of one graph and holds its memory; which calls they answer is decided by ``Plans``.

    Args:
        split: the graph.
        inputs: what it is called with.
        config: the settings.
        pool: where to capture.
        statics: memory of the inputs.
        results: nodes that the caller's results are made from.
        pieces: returns what runs at a size, given its key.
        departure: returns in words why the trace does not hold at a size, or None.
        owner: name of the model, for messages.
        num_uncaptured: calls that ran uncaptured, by size and reason; more of them have a failed size tried again.
        on_plan: called with each plan as soon as it is there.
        debug: has replays checked.
    """

    def __init__(
        self,
        split: SplitGraph,
        inputs: GraphInputs,
        config: CompilationConfig,
        pool: Pool,
        statics: StaticInputs,
        *,
        results: Sequence[Node],
        pieces: Callable[[Key], Pieces],
        departure: Callable[[Key], str | None],
        owner: str,
        num_uncaptured: defaultdict[Key, Counter[str]],
        on_plan: Callable[[Plan], None],
        debug: Debug | None = None,
    ) -> None:
        self.inputs, self.sizes = replace(inputs, bound={}), inputs.sizes
        self.bound: Callable[[], Mapping[Node, torch.Tensor]] = dict
        """Returns the parameters and buffers that the model has now; set by whoever binds them."""
        self.config, self.pool, self.statics, self.owner = config, pool, statics, owner
        self.results, self.pieces, self.departure = results, pieces, departure
        self.num_uncaptured, self.on_plan, self.debug = num_uncaptured, on_plan, debug
        self.refusals = Refusals(pool)
        outside = (*inputs.bound, *(tensor.node for tensor in statics.tensors.values()))
        self.schedule = Schedule(split, outside, results)
        self.programs = Programs(self.schedule, self.refusals, inputs.sizes, debug=debug)
        self.budget = Budget(config.max_capture_bytes)
        self.plans: dict[Key, Plan] = {}
        self.retry_at: dict[Key, int] = {}
        self.warm: defaultdict[tuple[Key, int], set[str]] = defaultdict(set)
        """Pieces that were warmed up at a size by a thread: they need not be when it captures that again."""
        self.said: set[str] = set()
        """Reasons why a capture failed that were said."""
        self.is_recording = False
        self.last_memory: CaptureMemory | None = None
        """What the capture before this one in the same session left."""
        self.is_closed = False
        pool.users.add(self)

    # Whether to.

    def may_capture(self, key: Key) -> bool:
        """Whether a size can be captured now."""
        return not (is_frozen() or self.is_closed or self.budget.why_left_out(key)) and self.is_due(key)

    def is_due(self, key: Key) -> bool:
        """Whether a size is to be tried: one that failed is tried again after twice as many calls."""
        return sum(self.num_uncaptured[key].values()) >= self.retry_at.get(key, 0)

    def why_left_out(self, key: Key) -> str:
        return self.budget.why_left_out(key) or "capturing it failed, and is tried again later"

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

    # Many sizes.

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
        keys = dict.fromkeys(self.sizes.key_of_size(size, f"a size to capture of {self.owner}") for size in sizes)
        ordered = sorted(keys, key=self.sizes.num_rows, reverse=True)
        with self.pool.lock:
            if self.pool.is_busy or not self.pool.switch():
                raise CaptureError(f"sizes of {self.owner} can't be captured now: {NESTED}, or {RECORDED}")
            if (why_not := self.why_not_now(given)) is not None:
                raise CaptureError(f"sizes of {self.owner} can't be captured from these example inputs: {why_not}")
            self.estimate(ordered, given)
            self.pool.users.add(self)
            try:
                with self.session():
                    for key in ordered:
                        if key not in self.plans:
                            self.try_to_capture(key, self.resized(given, key))
                        on_size(key, self.plans.get(key))
            except PieceworkError:
                raise
            except Exception as error:  # of the session of a capturer that is a plugin's
                what = f"{self.blame_for(error)}{type(error).__name__}: {error}"
                raise CaptureError(f"sizes of {self.owner} can't be captured: {what}") from error
            finally:
                if not self.plans:
                    self.release()

    def estimate(self, ordered: Sequence[Key], given: Mapping[int, torch.Tensor]) -> None:
        """Find out what sizes would take, from the smallest and a middle one, where a budget is to be kept."""
        if self.budget.limit is None or self.plans or len(ordered) < 3:
            return
        start = self.pool.memory()
        with contextlib.suppress(CaptureError), self.undoing(ordered[-1]):  # It comes again when its size is captured.
            for key in (ordered[-1], ordered[len(ordered) // 2]):
                before = self.pool.memory()
                with self.session():
                    recording = self.record(key, self.resized(given, key))
                self.budget.probe(self.sizes.num_rows(key), before, self.pool.memory())
                del recording
        if not self.budget.probes:
            return
        total = self.budget.estimate(self.sizes.num_rows(ordered[0])) or 0
        drivers = [probe.driver_bytes for probe in self.budget.probes]
        total += (len(ordered) - 1) * sum(drivers) // len(drivers)
        logger.info(
            "%s: %d sizes are expected to take about %s, %s more than now",
            *(self.owner, len(ordered), format_bytes(total + start.pool_bytes), format_bytes(total)),
        )

    def resized(self, given: Mapping[int, torch.Tensor], key: Key) -> dict[int, torch.Tensor]:
        """Return arguments for a size: what is kept in place must be as large, what is copied is cut later.

        Raises:
            CaptureError: an argument that is kept in place is too small.
        """
        resized = dict(given)
        for tensor in self.statics.held:
            if tensor.varies:
                size = self.statics.layout(tensor.fake, self.sizes.numbers_of(key)).size
                if any(have < need for have, need in zip(given[tensor.index].shape, size, strict=True)):
                    raise CaptureError(
                        f"size {key} of {self.owner} needs argument {tensor.path} of shape {size}, and the one that is "
                        f"kept in place (static_inputs) has {tuple(given[tensor.index].shape)}; pass the largest"
                    )
                resized[tensor.index] = cut(given[tensor.index], size)
        return resized

    # One size.

    def try_to_capture(
        self,
        key: Key,
        given: Mapping[int, torch.Tensor],
        *,
        padded_from: Key | None = None,
        is_asked_for: bool = True,
    ) -> str | None:
        """Capture a size; return why it could not be done, where that is no error.

        It is none with ``on_failure="eager"``, and where the call would have worked without: for a size that nobody
        asked to capture, and for one that the model can't run, which a smaller call would have been padded to.
        """
        try:
            self.capture(key, given)
        except CaptureError as error:
            must_run = padded_from is None or not isinstance(error.__cause__, SizeRefusedError)
            is_error = self.config.on_failure == "error" and is_asked_for and must_run
            if isinstance(error, DebugFinding) or is_error:
                raise
            return self.note_failure(key, error, padded_from)
        return None if key in self.plans else self.why_left_out(key)

    def note_failure(self, key: Key, error: CaptureError, padded_from: Key | None = None) -> str:
        """Say that a size is answered uncaptured, and return why; it is tried again after twice as many calls."""
        calls = sum(self.num_uncaptured[key].values())
        self.retry_at[key] = max(2 * calls, 2)
        why = str(error.__cause__ or error)
        if why not in self.said:
            self.said.add(why)
            size = key if padded_from is None else padded_from
            warnings.warn(PieceworkWarning(f"{self.owner} answers size {size} uncaptured: {error}"), stacklevel=6)
        return "capturing it failed"

    def capture(self, key: Key, given: Mapping[int, torch.Tensor]) -> Plan | None:
        """Capture a size from the tensors of a call; None where the budget does not allow it.

        Raises:
            CaptureError: it can't be captured; everything is as it was before. Or it was, and what copies its inputs
                can't be prepared; that is tried again at a later call.
        """
        start = time.perf_counter()
        with self.undoing(key) as undo:
            before = self.last_memory or self.pool.memory()
            if not self.budget.allows(key, self.sizes.num_rows(key), before, self.owner):
                return None
            with self.session():
                recording = self.record(key, given)
            after = self.pool.memory()
            self.last_memory = after if self.is_recording else None
            if not self.budget.take(key, self.sizes.num_rows(key), before, after, self.owner):
                del recording
                return None
            undo.pop_all()
        if self.config.static_outputs:
            for tensor in recording.outputs.values():
                self.pool.lend(tensor)
        plan = Plan(key, recording, time.perf_counter() - start, after)
        counters.num_graph_captures += recording.num_graphs
        self.plans[key] = plan
        logger.info(
            "%s: captured size %s in %d graphs, %.0f ms, %s in the pool",
            *(self.owner, key, recording.num_graphs, plan.seconds * 1e3, format_bytes(after.pool_bytes)),
        )
        self.on_plan(plan)
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
                self.release()

        self.pool.users.add(self)
        with contextlib.ExitStack() as undo:
            undo.callback(put_back)
            try:
                yield undo
            except Exception as error:  # Whatever a plugin raises: raised again below, with its name.
                self.warm.clear()
                if isinstance(error, DebugFinding):
                    raise
                if isinstance(error, PieceworkError) and not isinstance(error, CaptureError):
                    raise  # of a hook: it says whose
                own = isinstance(error, CaptureError)
                why = str(error) if own else f"{self.blame_for(error)}{type(error).__name__}: {error}"
                raise CaptureError(f"size {key} of {self.owner} can't be captured: {why}") from error

    def blame_for(self, error: Exception) -> str:
        """Return who raised an exception, if that is the code of the capturer, and not what the core does itself."""
        modules = {cls.__module__ for cls in type(self.pool.capturer).__mro__} - {Capturer.__module__}
        return f"{self.pool.origin} raised " if modules.intersection(modules_of(error)) else ""

    def record(self, key: Key, given: Mapping[int, torch.Tensor]) -> Recording:
        if (departure := self.departure(key)) is not None:
            # Eager would do something else there, and compiled code might read beyond a buffer without a word.
            raise SizeRefusedError(departure)
        return self.recorder(key).record(given)

    def recorder(self, key: Key, kind: type[RecorderT] = Recorder) -> RecorderT:
        """Return what records a size; inside a session."""
        values = self.sizes.values_of(key)
        return kind(
            self.programs.of(self.pieces(key), key if len(values) == 1 else values),
            *(self.schedule, self.bound(), self.pool, self.statics, self.refusals),
            numbers=self.sizes.numbers_of(key),
            results=self.results,
            warm=self.warm[key, threading.get_ident()],
            debug=self.debug,
        )

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
            self.last_memory = None

    def forget_session(self) -> None:
        """Forget the session of a thread that a forked child does not have."""
        self.is_recording, self.last_memory = False, None
        self.warm.clear()

    def release(self) -> None:
        """Give up the memory of captures, whose plans are gone; waits for calls that run."""
        with self.pool.lock:
            self.budget.taken.clear()
            self.statics.buffers.clear()
            self.pool.leave(self)
