"""Run an op and compare what it does with what it declares: mutations, aliases, and its fake implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.effects import MAYBE_COPIES, running_statistics, tensors_in
from piecework.fingerprints import fingerprints, has_bits
from piecework.forking import Lock
from piecework.tensor_checks import overlap


def checked_call(
    function: Callable[..., Any],
    overload: internals.OpOverload | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Any, list[str]]:
    """Run an op once, and return its result and what it did against its declaration.

    Memory that a view of an argument does not reach is not looked at. It waits for the device, so that nothing may
    be recorded on the current stream.

    Args:
        function: what to call: the op, or a Python function that stands for it.
        overload: the op whose schema and fake implementation are the declaration; None for a built-in function of
            torch, which is compared with what it does to fake tensors, and where only mutations are looked at.
        args: as the op is called.
        kwargs: as the op is called.

    Returns:
        The result, and one sentence per departure that says what was declared, what was done, and what to do.
    """
    declaration = Declaration(function, overload, args, kwargs)
    kept = [one for one in declaration.arguments if not one.may_change and has_bits(one.tensor)]
    before = fingerprints([one.tensor for one in kept])
    storages = {internals.storage_key(one.tensor) for one in declaration.arguments}
    result = function(*args, **kwargs)
    problems: list[str] = []
    after = fingerprints([one.tensor for one in kept])
    for one, old, new in zip(kept, before, after, strict=True):
        if old != new:
            problems.append(
                f"{declaration.name} wrote to argument {one.name}, which it declares that it only reads; declare it "
                f"as mutated (mutates_args, or Tensor(a!) in the schema), or write to a copy of it"
            )
    if overload is not None:
        problems += declaration.departures_of(result, storages)
    return result, problems


def checked_result(
    function: Callable[..., Any],
    overload: internals.OpOverload | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Any, list[str]]:
    """Do what ``checked_call`` does but for mutations: it waits for nothing, and may be called while recording."""
    if overload is None:
        return function(*args, **kwargs), []
    declaration = Declaration(function, overload, args, kwargs)
    storages = {internals.storage_key(one.tensor) for one in declaration.arguments}
    result = function(*args, **kwargs)
    return result, declaration.departures_of(result, storages)


@dataclass(frozen=True)
class _Argument:
    name: str
    tensor: torch.Tensor
    alias_set: frozenset[str]
    """What the schema calls its memory; empty where it says nothing of it."""
    may_change: bool
    """It is declared as mutated, or lies in memory that is."""


class Declaration:
    """What an op says of one call, found before it runs.

    Args:
        function: what will be called.
        overload: the op; None for a built-in function.
        args: of the call.
        kwargs: of the call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        overload: internals.OpOverload | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.overload = overload
        self.name = overload.name() if overload is not None else getattr(function, "__name__", repr(function))
        self.fake_error: Exception | None = None
        self.fake_results: list[_Form] = []
        written = self.run_on_fakes(overload or function, args, kwargs)
        if overload is None:
            named = [(f"{i}", value, frozenset[str](), False) for i, value in enumerate(args)]
            named += [(repr(name), value, frozenset[str](), False) for name, value in kwargs.items()]
        else:
            written = []
            named = list(_by_schema(overload, args, kwargs))
        written += [tensor for _, value, _, is_written in named if is_written for tensor in tensors_in(value)]
        written += running_statistics(overload or function, overload, args, kwargs)
        self.arguments = [
            _Argument(name, tensor, aliases, any(overlap(tensor, other) for other in written))
            for name, value, aliases, _ in named
            for tensor in tensors_in(value)
        ]

    def run_on_fakes(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Run the fake implementation on fakes of the arguments; return the arguments that it writes to."""
        mode = internals.new_fake_mode(internals.ShapeEnv())
        # Fakes made under inference mode have no version that tells of writes.
        with internals.without_dispatch_modes(), torch.inference_mode(False), torch.no_grad(), mode:
            copies = _Fakes(mode)
            fake_args, fake_kwargs = internals.pytree.tree_map_only(
                torch.Tensor, copies.of, (tuple(args), dict(kwargs))
            )
            before = {id(fake): internals.version(fake) for fake, _ in copies.pairs}
            try:
                result = target(*fake_args, **fake_kwargs)
                self.fake_results = [_Form.of(fake) for fake in tensors_in(result)]
            except Exception as error:  # of any fake implementation: told if the op itself takes these arguments
                self.fake_error = error
            return [real for fake, real in copies.pairs if internals.version(fake) != before[id(fake)]]

    # After the call.

    def departures_of(self, result: Any, storages: set[int | None]) -> list[str]:
        """Return how a result departs from the schema and the fake implementation.

        Args:
            result: of the call.
            storages: those of the arguments.
        """
        assert self.overload is not None
        problems = self.differences_from_fake(result)
        if self.overload.namespace not in ("aten", "prims"):  # Many of torch's own return an argument undeclared.
            problems += self.wrong_aliases(result)
            fresh = [(i, t) for i, t in enumerate(tensors_in(result)) if internals.storage_key(t) not in storages]
            seen = _returned_before(self.name, [tensor for _, tensor in fresh])
            problems += [self.kept_memory(i, result) for i, t in fresh if internals.storage_key(t) in seen]
        return problems

    def kept_memory(self, index: int, result: Any) -> str:
        return (
            f"{self.name} returned {_which(index, result)} in memory that an earlier call of it returned, too, so that "
            "the one wrote over the other; an op that declares a fresh result must make a new tensor at each call: "
            "return a clone, or take the memory as an argument declared as mutated"
        )

    def differences_from_fake(self, result: Any) -> list[str]:
        if isinstance(self.fake_error, internals.DataDependentOutputException):
            return []  # The number that it gives follows from data.
        if self.fake_error is not None:
            error = self.fake_error
            return [
                f"{self.name} ran, and its fake implementation raised {type(error).__name__} for the same arguments: "
                f"{str(error).splitlines()[0] if str(error) else 'no message'}; mend the fake implementation"
            ]
        made, fakes = tensors_in(result), self.fake_results
        if len(made) != len(fakes):
            return [
                f"{self.name} gave {len(made)} tensors, where its fake implementation gives {len(fakes)}; mend the "
                "fake implementation"
            ]
        return [
            f"{self.name} gave {_which(index, result)} with {what} {given}, where its fake implementation gives "
            f"{fake}; mend the fake implementation, or the op"
            for index, (real, declared) in enumerate(zip(made, fakes, strict=True))
            for what, given, fake in declared.differences(real)
        ]

    def wrong_aliases(self, result: Any) -> list[str]:
        """Return where results share memory, or don't, otherwise than the schema says."""
        problems: list[str] = []
        results = list(self.declared_results(result))
        for index, (tensor, aliases) in enumerate(results):
            if not tensor.numel():
                continue
            key = internals.storage_key(tensor)
            sharing = [one for one in self.arguments if internals.storage_key(one.tensor) == key]
            wanted = [one for one in self.arguments if aliases is not None and (not aliases or aliases & one.alias_set)]
            if aliases is None and sharing:
                problems.append(
                    f"{self.name} returned {_which(index, result)} in the memory of argument {sharing[0].name}, and "
                    "declares it fresh; return a copy, or have it write to an argument that is declared as mutated"
                )
            elif aliases is not None and wanted and not any(one in wanted for one in sharing):
                names = " or ".join(one.name for one in wanted)
                problems.append(
                    f"{self.name} returned {_which(index, result)} in other memory than that of argument {names}, "
                    "which its schema declares it shares; return that argument or a view of it, or declare it fresh"
                )
            for earlier, (other, other_aliases) in enumerate(results[:index]):
                if aliases is None and other_aliases is None and not sharing and overlap(tensor, other):
                    problems.append(
                        f"{self.name} returned {_which(index, result)} in the memory of result {earlier}, and declares "
                        "both fresh; return a copy of one"
                    )
        return problems

    def declared_results(self, result: Any) -> Iterator[tuple[torch.Tensor, frozenset[str] | None]]:
        """Yield each tensor of a result with what the schema calls its memory: None for fresh memory."""
        assert self.overload is not None
        returns = internals.op_schema(self.overload).returns
        if self.overload.name().partition(".")[0] in MAYBE_COPIES:
            return
        values = [result] if len(returns) == 1 else list(result or ())
        for declared, value in zip(returns, values, strict=False):
            info = declared.alias_info
            # A list has an annotation without names: its items may share the memory of any argument that has one.
            aliases = None if info is None else frozenset({*info.before_set, *info.after_set})
            for tensor in tensors_in(value):
                yield tensor, aliases


@dataclass(frozen=True)
class _Form:
    """What a tensor looks like; sizes and strides that follow from data are no integers."""

    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    shape: tuple[int | torch.SymInt, ...]
    strides: tuple[int | torch.SymInt, ...] | None

    @classmethod
    def of(cls, fake: torch.Tensor) -> _Form:
        strides = tuple(fake.stride()) if fake.layout is torch.strided else None
        return cls(fake.dtype, fake.device, fake.layout, tuple(fake.shape), strides)

    def differences(self, real: torch.Tensor) -> Iterator[tuple[str, Any, Any]]:
        """Yield in what a tensor differs: what, there, and here."""
        for what in ("dtype", "device", "layout"):
            if getattr(real, what) != getattr(self, what):
                yield what, getattr(real, what), getattr(self, what)
        if real.dim() != len(self.shape) or any(_differ(a, b) for a, b in zip(real.shape, self.shape, strict=True)):
            yield "shape", tuple(real.shape), self.shape
        elif real.numel() and real.layout is torch.strided and self.strides is not None:
            pairs = zip(real.shape, real.stride(), self.strides, strict=True)
            if any(length > 1 and _differ(a, b) for length, a, b in pairs):
                yield "strides", real.stride(), self.strides


def _differ(real: int, traced: int | torch.SymInt) -> bool:
    return isinstance(traced, int) and real != traced


def _by_schema(
    overload: internals.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any, frozenset[str], bool]]:
    """Yield of each argument its name, its value, what the schema calls its memory, and whether it is written to."""
    for position, declared in enumerate(internals.op_schema(overload).arguments):
        if position < len(args) or declared.name in kwargs:
            value = args[position] if position < len(args) else kwargs[declared.name]
            info = declared.alias_info
            aliases = frozenset[str]() if info is None else frozenset({*info.before_set, *info.after_set})
            yield repr(declared.name), value, aliases, info is not None and info.is_write


class _Fakes:
    """Makes fake tensors of the form of real ones, at the same places of fake storages."""

    def __init__(self, mode: internals.FakeTensorMode) -> None:
        self.mode = mode
        self.bases: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, real: torch.Tensor) -> torch.Tensor:
        """Return the fake of a tensor."""
        fake = self.plain(real) if has_bits(real) else self.mode.from_tensor(real, static_shapes=True)
        self.pairs.append((fake, real))
        return fake

    def plain(self, real: torch.Tensor) -> torch.Tensor:
        key = (internals.storage_key(real), real.dtype)
        if key not in self.bases:
            num_elements = real.untyped_storage().nbytes() // real.element_size()
            self.bases[key] = torch.empty(num_elements, dtype=real.dtype, device=real.device)
        return self.bases[key].as_strided(real.size(), real.stride(), real.storage_offset())


def _which(index: int, result: Any) -> str:
    return "its result" if isinstance(result, torch.Tensor) else f"result {index}"


# --- memory that an op keeps ------------------------------------------------------------------

_returned: dict[str, dict[int, internals.StorageWeakRef]] = {}
"""The storages that each op returned as fresh ones, as long as anybody holds them."""
_returned_lock = Lock()


def _returned_before(name: str, tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the storages among those of fresh results that the op gave as fresh at an earlier call.

    The storage itself is compared, and a weak reference keeps its identity from being used again: one that is
    returned twice was kept, or fetched from somewhere, by the op.
    """
    now = {
        key: internals.StorageWeakRef(tensor.untyped_storage())
        for tensor in tensors
        if (key := internals.storage_key(tensor)) is not None and tensor.untyped_storage().nbytes()
    }
    with _returned_lock:
        alive = {key: there for key, there in _returned.get(name, {}).items() if not there.expired()}
        _returned[name] = alive | now
    return alive.keys() & now.keys()
