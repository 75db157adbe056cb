"""The parameters, buffers and attributes that a traced forward is bound to, and how changes are noticed."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from piecework.trace import Assumptions, eval_source, readable
from piecework.watch import Watch

_WATCHED = re.compile(r"(\._(parameters|buffers)\['[^']*'\]|\.\w+)$|\.get_(parameter|buffer)\(")
"""Sources whose last step is an attribute of a module, which events tell of."""
SAMPLE_SIZE = 8
"""Addresses compared at every call with ``check_parameters="sample"``; N tensors take N / 8 calls."""


@dataclass
class _Binding:
    """A tensor of the model's that the generated code holds under a name."""

    name: str
    source: str
    tensor: torch.Tensor
    facts: tuple[Any, ...]


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
        check_all: bool,
    ) -> None:
        self.assumptions = assumptions
        self.watch = watch
        self.frame_globals = frame_globals
        self.namespaces = namespaces
        self.check_all = check_all
        self.lock = threading.RLock()
        self.num_rebindings = 0
        self.bindings: list[_Binding] = []
        for name, source in sources.items():
            tensor = self.current(source)
            assert isinstance(tensor, torch.Tensor)
            self.bindings.append(_Binding(name, source, tensor, _facts(tensor)))
        # A tensor in a plain list or dict of a module: no event tells when another one takes its place.
        self.unwatched = [b for b in self.bindings if b.source.startswith("L[") and not _WATCHED.search(b.source)]
        self.next_unwatched = itertools.cycle(self.unwatched)
        self.windows: Iterator[tuple[tuple[torch.Tensor, ...], list[int]]]
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
        """Return within how many calls a raw change of a parameter's storage is noticed."""
        return 1 if self.check_all else max(-(-len(self.bindings) // SAMPLE_SIZE), len(self.unwatched))

    def unwatched_moved(self) -> bool:
        """Whether the next tensor that no event tells of, or any with ``check_parameters="always"``, is another one."""
        chosen = self.unwatched if self.check_all else [next(self.next_unwatched)]
        return any(self.current(binding.source) is not binding.tensor for binding in chosen)

    def note_addresses(self) -> None:
        """Assign the tensors in the generated code and remember where their memory is."""
        plain = [b.tensor for b in self.bindings if type(b.tensor) in (torch.Tensor, torch.nn.Parameter)]
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

    def rebind(self) -> str | None:
        """Bind to the tensors that the model has now; return what differs from the traced ones."""
        replaced = False
        for binding in self.bindings:
            now = self.current(binding.source)
            if not isinstance(now, torch.Tensor):
                return f"{readable(binding.source)} was a tensor when traced, now it is {now!r}"
            facts = _facts(now)
            for what, traced, found in zip(_FACT_NAMES, binding.facts, facts, strict=True):
                if traced != found:
                    return f"{what} of {readable(binding.source)} was {traced} when traced, now it is {found}"
            replaced |= now is not binding.tensor
            binding.tensor = now
        self.num_rebindings += replaced
        self.note_addresses()
        return None

    def departure(self) -> str | None:
        """Return the first attribute, global or code that no longer is as it was traced."""
        with self.watch.plain_dicts():
            return self.assumptions.departure()
