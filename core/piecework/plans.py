"""Which size is answered by which captured plan: decided at the first call of a size, then one look-up."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from piecework.captures import Captures
from piecework.config import CompilationConfig
from piecework.custom_op_choice import CustomOpChoices
from piecework.dedupe import UniquePiece
from piecework.errors import CaptureError, DebugFinding, StaleCaptureError
from piecework.forking import renew_after_fork
from piecework.inputs import GraphInputs, Key
from piecework.padding import Padding
from piecework.plan import Plan, PlanFunctions, Variant
from piecework.plugins import plugin_manager
from piecework.pool import IN_USE, NESTED, RECORDED, Pool
from piecework.process_settings import compile_context, is_first_time, is_frozen
from piecework.program import Pieces
from piecework.split import SplitGraph
from piecework.static_inputs import StaticInputs

if TYPE_CHECKING:
    from piecework.debug import Debug

logger = logging.getLogger(__name__)

SEEN_BEFORE_CAPTURE = 3
"""With ``capture_sizes="auto"``, a size is captured at this call of it."""


class Plans:
    """The captured sizes of one graph, and what becomes of calls of all other sizes.

    Args:
        split: the graph.
        inputs: what it is called with.
        paths: how the user calls each tensor argument, by position.
        config: the settings.
        pool: where to capture.
        choices: what chooses custom ops.
        unique: the pieces without repetition.
        pieces: returns what runs at a size, given its key.
        departure: returns in words why the trace does not hold at a size, or None.
        is_auto: what ``capture_sizes=None`` means outside of a compile context.
        owner: name of the model, for messages.
        are_dims_named: the user named the dims; else a size is that of the first one, whatever the others are.
        debug: has captured calls checked.
    """

    def __init__(
        self,
        split: SplitGraph,
        inputs: GraphInputs,
        paths: Mapping[int, str],
        config: CompilationConfig,
        pool: Pool,
        choices: CustomOpChoices,
        *,
        unique: Sequence[UniquePiece],
        pieces: Callable[[Key], Pieces],
        departure: Callable[[Key], str | None],
        is_auto: bool,
        owner: str,
        are_dims_named: bool = True,
        debug: Debug | None = None,
    ) -> None:
        self.debug = debug
        self.are_dims_named, self.is_auto = are_dims_named, is_auto
        self.config, self.pool, self.owner = config, pool, owner
        self.inputs = replace(inputs, bound={})
        self.uncaptured: Callable[..., Any] = _not_there
        """Answers a call without captures; set when the code for it is there."""
        self.on_captured: Callable[[], None] = lambda: None
        """Called after a capture, which reads all parameters by address: to look at each before the next replay."""
        self.functions: dict[Key, Callable[..., Any]] = {}
        """What answers calls, by size: the one look-up of a call."""
        self.settled: dict[Key, str] = {}
        """Sizes that run uncaptured outside of a compile context, and why; until something is captured or dropped."""
        self.num_seen: Counter[Key] = Counter()
        self.num_uncaptured: defaultdict[Key, Counter[str]] = defaultdict(Counter)
        """Calls that ran uncaptured, by size and reason."""
        self.num_earlier_calls: Counter[tuple[Key, Key]] = Counter()
        """Calls that plans answered which were captured again since, by the plan's size and the call's."""
        self.unasked: set[Key] = set()
        """Sizes that were captured since they came often."""
        self.stale: dict[Key, str] = {}
        """Sizes whose captures were dropped, to be captured again, and why."""
        self.outdated_by: tuple[str, ...] = ()
        """Parameters and buffers that were replaced or moved: no plan is up to date then, and the next call that looks
        for one drops them."""
        self.is_inherited = False
        """This process was forked from the one that captured the plans: the next call that looks for one drops them."""
        self.num_recaptures = 0
        renew_after_fork(self)
        self.statics = StaticInputs(inputs, paths, config, pool)
        self.make = PlanFunctions(
            *(split, inputs, self.statics, pool, choices, self.elsewhere, self.while_busy),
            static_outputs=config.static_outputs,
            name=owner,
        )
        made_from = self.make.results.made_from
        self.padding = Padding(split, self.inputs, self.statics, config, made_from, unique)
        self.captures = Captures(
            *(split, inputs, config, pool, self.statics),
            results=made_from,
            pieces=pieces,
            departure=departure,
            owner=owner,
            num_uncaptured=self.num_uncaptured,
            on_plan=self.serve,
            debug=debug,
        )
        self.plans = self.captures.plans

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
            try:
                self.drop_outdated()
            except CaptureError as error:
                return self.after_failure(key, error, uncaptured, is_asked_for=key in self.wanted(key))
            target, why_not, is_asked_for = self.target_of(key)
            if target is None:
                return self.note_uncaptured(key, why_not, uncaptured)
            try:
                if target not in self.plans:
                    padded_from = key if key != target else None
                    why_not = self.capture(
                        target, self.by_position(given), padded_from=padded_from, is_asked_for=is_asked_for
                    )
                    if why_not is not None:
                        return self.note_uncaptured(key, why_not, uncaptured)
                if (function := self.functions.get(key)) is not None:
                    return function
                if not self.captures.is_due(key):
                    return self.note_uncaptured(key, self.captures.why_left_out(key), uncaptured)
                return self.function_of(key, self.plans[target])
            except CaptureError as error:
                return self.after_failure(key, error, uncaptured, is_asked_for=is_asked_for)
        finally:
            self.pool.lock.release()

    def after_failure(
        self, key: Key, error: CaptureError, uncaptured: Callable[..., Any], *, is_asked_for: bool
    ) -> Callable[..., Any]:
        """Return what answers a call whose capture failed, where that is no error."""
        if isinstance(error, DebugFinding) or (self.config.on_failure == "error" and is_asked_for):
            raise error
        return self.note_uncaptured(key, self.captures.note_failure(key, error), uncaptured)

    def capture(
        self, target: Key, given: Mapping[int, torch.Tensor], *, padded_from: Key | None, is_asked_for: bool
    ) -> str | None:
        """Capture a size now; return why that can't be done, where it is no error."""
        if not self.pool.switch():
            return RECORDED
        if (why_not := self.captures.why_not_now(given)) is not None:
            return why_not
        why_not = self.captures.try_to_capture(target, given, padded_from=padded_from, is_asked_for=is_asked_for)
        if why_not is not None:
            return why_not
        if not is_asked_for:
            self.unasked.add(target)
        return None

    def key_of(self, given: Sequence[Any]) -> Key:
        """Return the size of a call: its last arguments."""
        num_dims = len(self.inputs.sizes.dims)
        return given[-1] if num_dims == 1 else tuple(given[len(given) - num_dims :])

    def target_of(self, key: Key) -> tuple[Key | None, str, bool]:
        """Return the size to capture or to pad to, or None and the reason; and whether somebody asked for that."""
        if is_frozen() and key in self.stale:
            self.refuse_stale(key, self.stale[key])
            return None, "stale after freeze()", True
        wanted = [*self.wanted(key), *self.stale]
        if key in wanted and self.captures.may_capture(key):
            return key, "", key not in self.unasked
        possible = {*self.plans, *(size for size in wanted if self.captures.may_capture(size))}
        padded, why_not = self.padding.target(key, possible)
        if padded is not None:
            return padded, "", True
        if key in wanted:
            return None, "freeze() was called" if is_frozen() else self.captures.why_left_out(key), True
        if is_frozen():
            return None, why_not or "freeze() was called", False
        if self.is_automatic():
            self.num_seen[key] += 1
            if self.num_seen[key] >= SEEN_BEFORE_CAPTURE:
                if self.captures.may_capture(key):
                    return key, "", False
                return None, self.captures.why_left_out(key), False
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

    def wanted(self, key: Key) -> list[Key]:
        """Return the sizes to capture: those of the settings, else of the compile context around this call."""
        sizes = self.config.capture_sizes
        if sizes is None:
            sizes = compile_context()
        if not isinstance(sizes, tuple):
            return []
        if self.are_dims_named:
            return [self.inputs.sizes.key_of_size(size, f"a size to capture of {self.owner}") for size in sizes]
        first = key[:1] if isinstance(key, tuple) else (key,)
        return [key] if not first or first[0] in sizes else []

    def is_automatic(self) -> bool:
        """Whether a size that comes often is captured unasked."""
        if self.config.capture_sizes is None:
            return self.is_auto and compile_context() is None
        return self.config.capture_sizes == "auto"

    def note_uncaptured(self, key: Key, why: str, uncaptured: Callable[..., Any]) -> Callable[..., Any]:
        self.num_uncaptured[key][why] += 1
        return uncaptured

    def by_position(self, given: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Return the tensor arguments of a call by their positions."""
        return dict(zip(self.inputs.tensor_indices, given, strict=False))

    def serve(self, plan: Plan) -> None:
        """Answer calls by a plan from now on."""
        self.settled.clear()
        self.num_recaptures += plan.key in self.stale
        self.stale.pop(plan.key, None)
        self.on_captured()
        self.function_of(plan.key, plan)

    def function_of(self, key: Key, plan: Plan) -> Callable[..., Any]:
        """Return what answers calls of a size by a plan of that many rows, or more."""
        variant = plan.variants.setdefault(key, Variant(key, plan.key, plan.recording))
        numbers = self.inputs.sizes.numbers_of(key)
        function = self.make.function(variant, numbers, self.captures.bound)
        if self.debug is not None:
            function = self.debug.answer(variant, function, self.statics, self.by_position)
        self.functions[key] = function
        if self.outdated_by or self.is_inherited:  # by another thread or a fork, since the plan was looked up
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
        try:
            if not self.pool.switch():
                return self.note_uncaptured(variant.key, RECORDED, self.uncaptured)
        except CaptureError as error:
            return self.after_failure(variant.key, error, self.uncaptured, is_asked_for=True)
        return self.after_move(variant, given)

    def after_move(self, variant: Variant, given: Sequence[Any]) -> Callable[..., Any]:
        """Return what answers a call whose held inputs are at other addresses than at the capture."""
        held, now = variant.recording.held, self.by_position(given)
        moved = [i for i, address in held.items() if now[i].data_ptr() != address]
        if moved:
            paths = ", ".join(self.statics.tensors[index].path for index in moved)
            why = f"argument {paths} is at another address than at its capture"
            if is_frozen():
                self.refuse_stale(variant.key, why)
                return self.note_uncaptured(variant.key, "stale after freeze()", self.uncaptured)
            for index in moved:
                self.statics.note_move(self.statics.tensors[index], self.owner)
            self.drop(self.plans[variant.plan_key], why)
        return self.choose(given, self.uncaptured)

    def refuse_stale(self, key: Key, why: str) -> None:
        """Raise that a capture is stale, where that is an error."""
        if self.config.on_failure == "error":
            raise StaleCaptureError(
                f"size {key} of {self.owner} has to be captured again, since {why}, and piecework.freeze() forbids it; "
                'keep it in place, or set on_failure="eager" to have such calls run uncaptured; piecework.reset() '
                "undoes the freeze"
            )

    def drop(self, plan: Plan, why: str) -> None:
        """Forget a plan; it is captured again when its size comes next."""
        self.plans.pop(plan.key, None)
        self.settled.clear()
        self.captures.budget.taken.pop(plan.key, None)
        self.stale[plan.key] = why
        for key, variant in plan.variants.items():
            self.functions.pop(key, None)
            self.num_earlier_calls[plan.key, key] += variant.num_calls

    def drop_all(self, names: Sequence[str]) -> None:
        """Forget every plan, since parameters or buffers were replaced or moved; does not wait for those that run.

        The thread that is noticing this may be one that such a run waits for.
        """
        self.outdated_by = tuple(dict.fromkeys((*self.outdated_by, *names)))
        self.functions.clear()

    def after_fork(self) -> None:
        """Answer no call of a forked child by what its parent captured."""
        self.is_inherited = True
        self.functions.clear()

    def drop_outdated(self) -> None:
        if self.is_inherited:
            self.pool.renew_capturer(plugin_manager(), self.config)
            self.is_inherited = False
            self.captures.forget_session()
            self.give_back("it was captured by the process that this one was forked from")
        if self.outdated_by:
            why = _why_outdated(self.outdated_by)
            self.outdated_by = ()  # First: plans of before what another thread adds from here on are dropped, too.
            for plan in list(self.plans.values()):
                self.drop(plan, why)

    def give_back(self, why: str = "its memory was given back") -> None:
        """Give up all memory; waits for calls that run."""
        with self.pool.lock:
            while self.plans:
                # Held by no name here: the graphs are to be gone before their pool is given back.
                self.drop(next(iter(self.plans.values())), why)
            self.captures.release()

    def close(self) -> None:
        """Give up all memory for good: a call that another thread had begun before runs uncaptured."""
        with self.pool.lock:
            self.captures.is_closed = True
            self.give_back()


def _why_outdated(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {'was' if len(names) == 1 else 'were'} replaced or moved"


def _not_there(*_: Any) -> Any:
    raise AssertionError("no code for uncaptured calls was set")
