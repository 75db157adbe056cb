"""Choose what runs a custom op: candidates in order, the first whose limits hold; and note what was chosen, and why.

A choice is made once per compilation: while a model is traced, for each place, or at the first call of an op that
runs untraced (``custom_op_calls``). No call chooses.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from piecework import torch_internals as internals
from piecework.custom_op_limits import NO_LIMITS, CustomOpImplementation, TensorForm
from piecework.custom_op_switch import Verdict, decide
from piecework.plugins import plugin_manager
from piecework.settings import Settings, triton_is_interpreted

if TYPE_CHECKING:
    from piecework.custom_op import CustomOp
    from piecework.custom_op_calls import UntracedOp
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
    needs_triton: bool = False

    def why_not_on(self, device: torch.device) -> str | None:
        """Return why it can't run on a device, or None."""
        reason = why_no_triton(device) if self.needs_triton else None
        return reason or self.implementation.limits.refusal_of_device(device)

    def __str__(self) -> str:
        """Return what it is and whose."""
        return named(self.implementation.title, self.origin)


@dataclass(frozen=True)
class CallForm:
    """What is known of a call: each argument's form, None for what is no tensor."""

    args: tuple[TensorForm | None, ...]
    kwargs: tuple[tuple[str, TensorForm | None], ...]
    has_gradient: bool = False
    """Whether the result may be asked for gradients."""

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
        self.by_op: weakref.WeakKeyDictionary[CustomOp, UntracedOp] = weakref.WeakKeyDictionary()
        """What answers untraced calls of an op."""
        self._verdicts: dict[str, Verdict] = {}
        self._candidates: dict[tuple[type, torch.device], tuple[Candidate, ...]] = {}
        self._graph: Callable[[], object] = lambda: None
        self._in_graph: Counter[Choice] = Counter()

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
            reason = candidate.why_not_on(device) or why_not(candidate.implementation, call, present)
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
            implementation = CustomOpImplementation(method, name=name, limits=limits)
            candidates.append(Candidate(implementation, needs_triton=name == "forward_triton"))
    return tuple(candidates)


def why_not(implementation: CustomOpImplementation, call: CallForm, present: tuple[str, ...]) -> str | None:
    """Return why an implementation can't run calls of this form, or None."""
    missing = [name for name in implementation.attributes if name not in present]
    if missing:
        return f"the op has no attribute {', '.join(map(repr, missing))}"
    limits, form = implementation.limits, call.first
    try:
        bound = inspect.signature(implementation.function).bind(None, *call.args, **dict(call.kwargs))
    except (TypeError, ValueError) as error:  # The latter where a function has no signature.
        return f"it can't be called as the op is: {error}"
    if limits.argument is not None:
        parameter = bound.signature.parameters.get(limits.argument)
        if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return f"its limits are about {limits.argument!r}, which is no parameter of its own"
        form = bound.arguments.get(limits.argument)
    if call.has_gradient and not limits.has_gradient:
        return "gradients are recorded, and it has none; call the model under torch.no_grad()"
    return limits.refusal(form)


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
