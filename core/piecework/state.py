"""The parameters, buffers and attributes that a traced forward is bound to, and how changes are noticed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.assumptions import TARGET, Assumptions, readable
from piecework.config_checks import show
from piecework.forking import Lock
from piecework.tensor_checks import overlap
from piecework.trace import eval_source
from piecework.watch import Watch, plain_dicts

_LAST_STEP = re.compile(
    r"(?P<owner>.*)(\._(parameters|buffers|modules)\['[^']*'\]|\.(?!_(parameters|buffers|modules)$)\w+)$"
)
"""The last step of a source, where that may be an attribute of a module."""
SAMPLE_SIZE = 4
"""Addresses compared at every call with ``check_parameters="sample"``; N tensors take N / 4 calls.

Each is looked at rarely, so that it is in no cache: beside the launches of a device that costs more than its code.
"""


@dataclass
class _Binding:
    """A tensor of the model's that the generated code holds under a name."""

    name: str
    source: str
    tensor: torch.Tensor
    facts: tuple[Any, ...]
    address: int | None = None
    """Where its memory was when the generated code was last bound; None for a kind without an address."""

    @property
    def address_now(self) -> int | None:
        """Return where its memory is now."""
        return self.tensor.data_ptr() if type(self.tensor) in (torch.Tensor, torch.nn.Parameter) else None


class _Unwatched:
    """A constant, container, module or tensor whose change raises no event, as it was."""

    def __init__(self, source: str, value: Any, namespace: dict[str, Any]) -> None:
        self.code = compile(source, f"<{source}>", "eval")  # compiled once: a call looks at it
        self.namespace = namespace
        self.value = value
        self.shape = _shape_of(value)

    def differs(self) -> bool:
        """Whether something else is there now."""
        try:
            now = eval(self.code, self.namespace)  # noqa: S307 - Dynamo's own source text
        except (AttributeError, KeyError, IndexError):
            return True
        if now is self.value:
            return _shape_of(now) != self.shape
        is_constant = isinstance(now, (int, float, complex, str, bytes))
        return not (is_constant and type(now) is type(self.value) and now == self.value)


def _shape_of(value: Any) -> Any:
    """Return what of a container the trace may have read besides its items."""
    if isinstance(value, (dict, set)):
        return list(value)
    return len(value) if isinstance(value, (list, tuple)) else None


def _is_constant(value: Any) -> bool:
    """Whether a value can only be replaced, such as the shape that a norm keeps."""
    if isinstance(value, tuple):
        return all(_is_constant(item) for item in value)
    return value is None or isinstance(value, (int, float, complex, str, bytes, torch.dtype, torch.device))


def _has_events(source: str, value: Any) -> bool:
    """Whether a source is one of the dicts that a module keeps itself in; hooks that are there go without an event."""
    if re.search(r"\._\w*hooks\w*$", source) is not None:
        return not value
    return re.search(r"\._(parameters|buffers|modules)$|__dict__", source) is not None


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tuple(tensor.stride()) if tensor.layout is torch.strided else None
    return type(tensor), tensor.dtype, tensor.device, tuple(tensor.shape), strides


_FACT_NAMES = ("class", "dtype", "device", "shape", "strides")


class BoundState:
    """Binds generated code to the state of a model, and binds it anew when tensors are replaced.

    Args:
        sources: name in the generated code -> source expression of the tensor.
        namespaces: the namespaces that hold the tensors under those names.
        assumptions: what else the trace assumed; its scope is what ``L`` stands for in sources.
        watch: tells of events on the traced modules.
        frame_globals: what ``G`` stands for in sources.
        root: the model, where a module was traced.
        read: sources of the modules, constants and containers that the trace read.
        written: names of the tensors that the graph writes to.
        check_all: compare all addresses at every call, not a sample.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        namespaces: list[dict[str, Any]],
        assumptions: Assumptions,
        watch: Watch,
        frame_globals: Mapping[str, Any],
        *,
        root: torch.nn.Module | None,
        read: Sequence[str],
        written: frozenset[str],
        check_all: bool,
    ) -> None:
        self.assumptions = assumptions
        self.watch = watch
        self.frame_globals = frame_globals
        self.namespaces = namespaces
        self.check_all = check_all
        self.lock = Lock(when_lost=self.look_at_all)
        self.num_rebindings = 0
        self.on_rebound: Callable[[Sequence[str]], None] = lambda names: None
        """Called when tensors were replaced or their memory moved, with their names as a user would write them."""
        self.bindings: list[_Binding] = []
        for name, source in sources.items():
            tensor = self.current(source)
            assert isinstance(tensor, torch.Tensor)
            self.bindings.append(_Binding(name, source, tensor, _facts(tensor)))
        self.root, self.read = root, [source for source in read if not _has_events(source, self.current(source))]
        self.written = written
        self.aliases = self.alias_pattern()
        self.windows: Iterator[tuple[tuple[torch.Tensor, ...], list[int]]]
        self.cover()
        self.note_addresses()

    def current(self, source: str) -> Any:
        """Return what a source stands for now."""
        return eval_source(source, self.assumptions.scope, self.frame_globals)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the bound tensors."""
        return [binding.tensor for binding in self.bindings]

    @property
    def num_calls_for_all_addresses(self) -> int:
        """Return within how many calls a change is noticed that no event tells of."""
        return 1 if self.check_all else max(-(-len(self.bindings) // SAMPLE_SIZE), len(self.unwatched))

    def cover(self) -> None:
        """Watch the modules that are there now, and list what no event tells of: it is looked at in turns."""
        found = [self.current(source) for source in self.read]
        modules = [value for value in found if isinstance(value, torch.nn.Module)]
        self.watch.cover([*(self.root.modules() if self.root is not None else ()), *modules])
        sources = [*self.read, *(b.source for b in self.bindings if b.source.startswith("L["))]
        namespace = {"L": self.assumptions.scope, "G": self.frame_globals}
        unwatched = [source for source in dict.fromkeys(sources) if not self.is_watched(source)]
        self.unwatched = [_Unwatched(source, self.current(source), namespace) for source in unwatched]
        self.next_unwatched = itertools.cycle(self.unwatched)

    def is_watched(self, source: str) -> bool:
        """Whether events tell of a change there: it is the target itself, or an attribute of a module."""
        step = _LAST_STEP.fullmatch(source)
        value = self.current(source)
        if step is None or (isinstance(value, (list, tuple, dict, set)) and not _is_constant(value)):
            return source == f"L['{TARGET}']"
        return isinstance(self.current(step["owner"]), torch.nn.Module)

    def unwatched_moved(self) -> bool:
        """Whether the next thing that no event tells of, or any with ``check_parameters="always"``, is another one."""
        chosen = self.unwatched if self.check_all else [next(self.next_unwatched)]
        return any(one.differs() for one in chosen)

    def alias_pattern(self) -> tuple[int, ...] | None:
        """Return which bound tensors share memory, where the graph writes to one of them."""
        if not self.written:
            return None
        keys = [internals.storage_key(binding.tensor) for binding in self.bindings]
        return tuple(keys.index(key) for key in keys)

    def shares_memory(self, arguments: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> bool:
        """Whether an argument shares memory with a bound tensor, and one of the two is written to."""
        return any(
            (binding.name in self.written or any(argument is other for other in written))
            and overlap(argument, binding.tensor)
            for argument in arguments
            for binding in self.bindings
        )

    def note_addresses(self) -> None:
        """Assign the tensors in the generated code and remember where their memory is."""
        for binding in self.bindings:
            binding.address = binding.address_now
        plain = [b.tensor for b in self.bindings if b.address is not None]
        step = max(len(plain), 1) if self.check_all else SAMPLE_SIZE
        groups = [tuple(plain[i : i + step]) for i in range(0, len(plain), step)]
        self.windows = itertools.cycle([(group, [t.data_ptr() for t in group]) for group in groups] or [((), [])])
        for namespace in self.namespaces:
            namespace.update((b.name, b.tensor) for b in self.bindings if b.name in namespace)
            if "_pw_windows" in namespace:
                namespace["_pw_windows"] = self.windows

    def settle(self) -> str | None:
        """Look at everything after an event: bind replaced tensors anew, or return the departure.

        As long as the departure lasts, every later call looks again.
        """
        with self.lock:
            self.watch.changed = False
            problem = self.rebind() or self.departure()
            if problem is not None:
                self.watch.changed = True
            return problem

    def moved(self) -> list[str]:
        """Return the tensors whose memory is elsewhere than when code was bound to them."""
        return [readable(b.source).removeprefix("self.") for b in self.bindings if b.address_now != b.address]

    def rebind(self) -> str | None:
        """Bind to the tensors that the model has now; return what differs from the traced ones."""
        replaced = False
        changed: dict[str, None] = {}
        for binding in self.bindings:
            now = self.current(binding.source)
            if not isinstance(now, torch.Tensor):
                return f"{readable(binding.source)} was a tensor when traced, now it is {show(now)}"
            facts = _facts(now)
            for what, traced, found in zip(_FACT_NAMES, binding.facts, facts, strict=True):
                if traced != found:
                    return f"{what} of {readable(binding.source)} was {traced} when traced, now it is {found}"
            is_other = now is not binding.tensor
            replaced |= is_other
            binding.tensor = now
            if is_other or binding.address_now != binding.address:
                changed[readable(binding.source).removeprefix("self.")] = None
        if self.alias_pattern() != self.aliases:
            return "parameters or buffers that were separate when traced share memory now, or the other way round"
        self.num_rebindings += replaced
        self.cover()
        self.note_addresses()
        if changed:
            self.on_rebound(list(changed))
        return None

    def look_at_all(self) -> None:
        """Have the next call compare everything, and not a sample of addresses."""
        self.watch.changed = True

    def departure(self) -> str | None:
        """Return the first attribute, global or code that no longer is as it was traced."""
        with plain_dicts(list(self.watch.modules)):
            return self.assumptions.departure()
