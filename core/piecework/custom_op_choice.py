"""Choose what runs a custom op: candidates in order, the first whose limits hold; and note what was chosen, and why.

A choice is made once per compilation: while a model is traced, for each place, or at the first call of an op that
runs untraced. No call chooses.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from piecework import torch_internals as internals
from piecework.config_checks import CompilationLevel
from piecework.custom_op_limits import NO_LIMITS, CustomOpImplementation, TensorForm, form_of
from piecework.custom_op_switch import Verdict, decide
from piecework.errors import PieceworkError
from piecework.plugins import plugin_manager
from piecework.settings import Settings, resolve_settings, triton_is_interpreted

if TYPE_CHECKING:
    from piecework.custom_op import CustomOp
    from piecework.loading import Origin
    from piecework.registry import PluginManager

logger = logging.getLogger(__name__)

TRITON_DEVICES = ("cuda", "xpu")
NATIVE = "forward_native"


@dataclass(frozen=True)
class Candidate:
    """An implementation, and the plugin that brought it; None for the op's own methods."""

    implementation: CustomOpImplementation
    origin: Origin | None = None

    def __str__(self) -> str:
        """Return what it is and whose."""
        return named(self.implementation.title, self.origin)


@dataclass(frozen=True)
class CallForm:
    """What is known of a call: each argument's form, None for what is no tensor."""

    args: tuple[TensorForm | None, ...]
    kwargs: tuple[tuple[str, TensorForm | None], ...]

    @property
    def first(self) -> TensorForm | None:
        """Return the form of the first tensor."""
        forms = (*self.args, *(form for _, form in self.kwargs))
        return next((form for form in forms if form is not None), None)

    @property
    def device(self) -> torch.device:
        """Return where the first tensor is; the CPU where there is none."""
        return self.first.device if self.first is not None else torch.device("cpu")


@dataclass(frozen=True)
class Choice:
    """What runs an op, and why; equal where all that can be said of them is."""

    op_name: str
    op_class: type[CustomOp]
    device: torch.device
    title: str
    """What the implementation is called."""
    origin: Origin | None
    """The plugin that brought it; None for the op's own methods."""
    verdict: Verdict
    skipped: tuple[tuple[str, str], ...]
    """The candidates before it, each with the reason why it was not chosen."""
    implementation: CustomOpImplementation = field(compare=False)

    @property
    def is_native(self) -> bool:
        """Whether it is the op's own plain body."""
        return self.origin is None and self.title == NATIVE

    def __str__(self) -> str:
        """Return what it is and whose."""
        return named(self.title, self.origin)


def named(title: str, origin: Origin | None) -> str:
    """Return the name of an implementation with that of its plugin."""
    return title if origin is None else f"{title} of {origin}"


class CustomOpChoices:
    """Chooses under the settings of one compilation, and keeps what was chosen.

    Args:
        owner: name of the model, for the log.
        settings: of the compilation.
    """

    def __init__(self, owner: str, settings: Settings) -> None:
        self.owner = owner
        self.settings = settings
        self.traced: Counter[Choice] = Counter()
        """For how many places of one graph each choice was made while tracing."""
        self.by_op: UntracedOps = weakref.WeakKeyDictionary()
        """What answers untraced calls of an op."""
        self._verdicts: dict[str, Verdict] = {}
        self._candidates: dict[tuple[type, torch.device], tuple[Candidate, ...]] = {}
        self._graph: Callable[[], object] = lambda: None
        self._in_graph: Counter[Choice] = Counter()
        _all_choices.add(self)

    def names(self) -> set[str]:
        """Return the names of the ops that were met."""
        return {choice.op_name for choice in (*self.traced, *(one.choice for one in self.by_op.values()))}

    def verdict_on(self, op_class: type[CustomOp]) -> Verdict:
        """Return whether the op is on; asked once per compilation."""
        if op_class.op_name not in self._verdicts:
            self._verdicts[op_class.op_name] = decide(op_class.op_name, self.settings, plugin_manager())
        return self._verdicts[op_class.op_name]

    def candidates(self, op_class: type[CustomOp], device: torch.device) -> tuple[Candidate, ...]:
        """Return what may run an op that is on, in the order of asking; plugins are asked once per compilation."""
        key = (op_class, device)
        if key not in self._candidates:
            self._candidates[key] = find_candidates(op_class, device, plugin_manager())
        return self._candidates[key]

    def attributes_asked(self, op_class: type[CustomOp], device: torch.device) -> tuple[str, ...]:
        """Return the names of the attributes that the candidates want an op to have."""
        if not self.verdict_on(op_class).is_on:
            return ()
        wanted = (c.implementation.attributes for c in self.candidates(op_class, device))
        return tuple(dict.fromkeys(name for names in wanted for name in names))

    def choose(self, op_class: type[CustomOp], call: CallForm, present: tuple[str, ...]) -> Choice:
        """Choose what runs calls of this form.

        Args:
            op_class: the op's class.
            call: the form of the call.
            present: which of ``attributes_asked`` the op has.
        """
        verdict, device = self.verdict_on(op_class), call.device
        chosen = Candidate(CustomOpImplementation(op_class.forward_native, name=NATIVE))
        skipped: list[tuple[str, str]] = []
        for candidate in self.candidates(op_class, device) if verdict.is_on else ():
            reason = why_not(candidate.implementation, call, present)
            if reason is None:
                chosen = candidate
                break
            skipped.append((str(candidate), reason))
        return Choice(
            *(op_class.op_name, op_class, device, chosen.implementation.title, chosen.origin),
            *(verdict, tuple(skipped)),
            implementation=chosen.implementation,
        )

    def choose_in_trace(self, op_class: type[CustomOp], call: CallForm, present: tuple[str, ...]) -> Choice:
        """Choose for one place of a graph that Dynamo traces, and count it."""
        choice = self.choose(op_class, call, present)
        graph = internals.graph_being_traced()
        if self._graph() is not graph:  # Dynamo may begin a graph anew.
            self._graph, self._in_graph = weakref.ref(graph), Counter()
        self._in_graph[choice] += 1
        self.note(choice, self._in_graph[choice])
        return choice

    def note(self, choice: Choice, num_places: int = 1) -> None:
        """Keep a choice for the report: made for at least so many places."""
        if choice not in self.traced:
            log_choice(self.owner, choice)
        self.traced[choice] = max(self.traced[choice], num_places)


def find_candidates(op_class: type[CustomOp], device: torch.device, manager: PluginManager) -> tuple[Candidate, ...]:
    """Return what may run an op on a device: plugins' implementations, ``forward_triton``, ``forward_<device>``."""
    brought = manager.custom_op_implementations(op_class.op_name, device)
    candidates = [Candidate(implementation, origin) for implementation, origin in brought]
    for name in ("forward_triton", f"forward_{device.type}"):
        if (method := getattr(op_class, name, None)) is not None:
            limits = getattr(method, "__piecework_limits__", NO_LIMITS)
            candidates.append(Candidate(CustomOpImplementation(method, name=name, limits=limits)))
    return tuple(candidates)


def why_not(implementation: CustomOpImplementation, call: CallForm, present: tuple[str, ...]) -> str | None:
    """Return why an implementation can't run calls of this form, or None."""
    if implementation.name == "forward_triton" and (reason := why_no_triton(call.device)) is not None:
        return reason
    missing = [name for name in implementation.attributes if name not in present]
    if missing:
        return f"the op has no attribute {', '.join(map(repr, missing))}"
    limits, form = implementation.limits, call.first
    try:
        bound = inspect.signature(implementation.function).bind(None, *call.args, **dict(call.kwargs))
    except (TypeError, ValueError) as error:  # The latter where a function has no signature.
        return f"it can't be called as the op is: {error}"
    if limits.argument is not None:
        if limits.argument not in bound.signature.parameters:
            return f"its limits are about {limits.argument!r}, which is none of its parameters"
        form = bound.arguments.get(limits.argument)
    return limits.refusal_of_device(call.device) or limits.refusal(form)


def why_no_triton(device: torch.device) -> str | None:
    """Return why Triton can't run on a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type in TRITON_DEVICES or triton_is_interpreted():
        return None
    return f"Triton runs on {' and '.join(TRITON_DEVICES)}, not on {device.type}"


def log_choice(owner: str, choice: Choice) -> None:
    """Say what runs an op, and why."""
    skipped = "".join(f"; not {name}: {reason}" for name, reason in choice.skipped)
    state = "on" if choice.verdict.is_on else "off"
    logger.info(
        "%s: custom op %s of %s runs by %s on %s (%s: %s%s)",
        *(owner, choice.op_name, choice.op_class.__name__, choice, choice.device),
        *(state, choice.verdict.why, skipped),
    )


# --- untraced calls -----------------------------------------------------------------------------


class UntracedOp:
    """What answers the untraced calls of one op: what was chosen at the first, and the native body outside of that.

    A choice holds for a device, and within its limits; they are looked at in every call, since a kernel that is given
    what it was not made for may answer with wrong numbers.
    """

    def __init__(self, choice: Choice, native: Callable[..., Any]) -> None:
        self.choice = choice
        self.native = native
        """Called with the op first: its native body, or that compiled by itself."""
        self.num_outside = 0
        """Calls that the native body answered, since they were outside of the limits."""
        self.argument = choice.implementation.limits.argument
        self.position = -1
        """Where the tensor that the limits are about stands among the positional arguments, if it is named."""
        if self.argument is not None:
            parameters = inspect.signature(choice.implementation.function).parameters
            self.position = list(parameters).index(self.argument) - 1
        self.run = native if choice.is_native else self.run_within_limits

    def run_within_limits(self, op: CustomOp, *args: Any, **kwargs: Any) -> Any:
        """Answer a call by what was chosen, if it was made for such a call."""
        given = (*args, *kwargs.values())
        if self.argument is not None:
            given = (args[self.position] if self.position < len(args) else kwargs.get(self.argument),)
        form = next((form_of(value) for value in given if isinstance(value, torch.Tensor)), None)
        is_there = form is None or form.device == self.choice.device
        if is_there and self.choice.implementation.limits.refusal(form) is None:
            return self.choice.implementation.function(op, *args, **kwargs)
        self.num_outside += 1
        return self.native(op, *args, **kwargs)


UntracedOps = weakref.WeakKeyDictionary["CustomOp", UntracedOp]


# --- whose settings count -----------------------------------------------------------------------


@dataclass
class Scope:
    """A block whose custom ops go by the settings of one compilation."""

    choices: CustomOpChoices
    failure: PieceworkError | None = None
    """What went wrong in a choice while Dynamo was tracing, which wraps every error in one of its own."""


_all_choices: weakref.WeakSet[CustomOpChoices] = weakref.WeakSet()
_by_op_of_process: UntracedOps = weakref.WeakKeyDictionary()
_scope: ContextVar[Scope | None] = ContextVar("piecework_custom_op_scope", default=None)


def by_op_of_process() -> UntracedOps:
    """Return what answers the calls of ops outside of any compiled model."""
    return _by_op_of_process


def choices_of_process() -> CustomOpChoices:
    """Return what chooses for an op outside of any compiled model: by the settings of the process as they are now."""
    return CustomOpChoices("this process", resolve_settings(None, default_level=CompilationLevel.NO_COMPILATION))


def current_scope() -> Scope | None:
    """Return the scope of the compiled model that is traced or called, None outside of any."""
    return _scope.get()


@contextlib.contextmanager
def choosing(choices: CustomOpChoices) -> Iterator[None]:
    """Let custom ops inside a block go by the settings of one compilation.

    Raises:
        PieceworkError: what went wrong in a choice while tracing, in place of what Dynamo made of it.
    """
    scope = Scope(choices)
    token = _scope.set(scope)
    try:
        yield
    except Exception:  # Raised again: as it is, or as it was before Dynamo wrapped it.
        if scope.failure is not None:
            raise scope.failure from scope.failure.__cause__
        raise
    finally:
        _scope.reset(token)


def forget_op(op: CustomOp) -> None:
    """Have an op choose anew at its next untraced call, since it was moved to another device or dtype."""
    for by_op in (_by_op_of_process, *(choices.by_op for choices in list(_all_choices))):
        by_op.pop(op, None)


def reset_choices() -> None:
    """Forget the choices of the process."""
    _by_op_of_process.clear()
