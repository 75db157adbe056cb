"""Runs a program of the fuzz eagerly and at levels 1 to 3, call by call in lockstep, and says where they depart.

What is compared after each call: the tree of the result, values, dtypes, shapes, strides, which leaves are one tensor
and which share memory; arguments, parameters and buffers; and all results that were kept of earlier calls.
"""

from __future__ import annotations

import itertools
import linecache
import logging
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

import fuzz_ops
import piecework.testing
from piecework import CompilationConfig, PieceworkError
from piecework import torch_internals as internals

# --- what a program is made of ---------------------------------------------------------------------


class Arg:
    """A tensor argument: sizes by name or in numbers."""

    def __init__(self, *shape: int | str, dtype: str = "float32", kind: str = "plain") -> None:
        self.shape, self.dtype, self.kind = shape, getattr(torch, dtype), kind


@dataclass(frozen=True)
class Call:
    """One call of a program."""

    sizes: Mapping[str, int]
    seed: int = 0
    layouts: Mapping[str, str] = field(default_factory=dict)
    """Other than contiguous, by path."""
    same: Mapping[str, str] = field(default_factory=dict)
    """Arguments that are the same tensor as another one."""
    held: Sequence[str] = ()
    """Arguments that are the tensor of the last call, where that fits."""
    fed: Mapping[str, int] = field(default_factory=dict)
    """Arguments that are a result of an earlier call, where one fits: the last but so many."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Python values other than those of the first call."""
    large: bool = False
    """Values are above what ``fuzz::checked`` takes."""


class Program:
    """The text of a program, and what it defines."""

    _numbers = itertools.count()

    def __init__(self, text: str) -> None:
        self.text = text
        self.module = ModuleType(f"fuzz_program_{next(self._numbers)}")
        self.filename = f"<{self.module.__name__}>"
        # Dynamo reads the source of what it traces, and imports the module of a class.
        linecache.cache[self.filename] = (len(text), None, text.splitlines(True), self.filename)
        sys.modules[self.module.__name__] = self.module
        exec(compile(text, self.filename, "exec"), self.module.__dict__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def close(self) -> None:
        """Forget it."""
        sys.modules.pop(self.module.__name__, None)
        linecache.cache.pop(self.filename, None)


# --- refusals that the docs promise --------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A refusal that is an accepted outcome of a call."""

    name: str
    error: type[PieceworkError]
    pattern: str
    promised: str
    """Where, in the docs."""
    may: Callable[[Program, int], bool]
    """Whether this call of the program can meet it."""


def _first_call(program: Program, index: int) -> Call:
    """Return the call that was traced: the first without an empty dim."""
    traced = (call for call in program.CALLS if all(call.sizes.values()))
    return next(traced, program.CALLS[index])


def _has_other_layout(program: Program, index: int) -> bool:
    calls = [program.CALLS[index], _first_call(program, index)]
    if "op checked" in program.FEATURES:  # Where a first call fails, one of the later ones is traced.
        calls += program.CALLS[:index]
    return any(call.layouts or call.fed or call.same or call.held for call in calls)


def _shares_memory(program: Program, index: int) -> bool:
    call, first = program.CALLS[index], _first_call(program, index)
    writes = any(feature.startswith("writes to") for feature in program.FEATURES)
    return writes and bool(call.same or call.fed or call.held or first.same or first.fed or first.held)


REFUSALS = (
    Refusal(
        *("layout", piecework.TraceDepartureError, r"strides of argument"),
        promised="assumptions.md: layout of every tensor",
        may=_has_other_layout,
    ),
    Refusal(
        *("shared memory", piecework.TraceDepartureError, r"share memory, and the model writes"),
        promised="assumptions.md: arguments that share memory with each other, or with a parameter or buffer",
        may=_shares_memory,
    ),
    Refusal(
        *("scalar", piecework.TraceDepartureError, r"argument (scale|k|flag|mode) was .* when traced"),
        promised="assumptions.md: Python scalars and strings",
        may=lambda program, index: program.CALLS[index].changed != _first_call(program, index).changed,
    ),
    Refusal(
        *("branch on a size", piecework.TraceDepartureError, r"> 2 else"),
        promised="assumptions.md: relations between sizes that the model used; the error quotes the line",
        may=lambda program, index: "branch on a size" in program.FEATURES,
    ),
    Refusal(
        *("branch on a size, captured", piecework.CaptureError, r"can't be captured: the trace holds for .*> 2 else"),
        promised="assumptions.md: as above; a size that the trace does not hold for is not captured",
        may=lambda program, index: "branch on a size" in program.FEATURES,
    ),
    Refusal(
        *("size of one", piecework.TraceDepartureError, r"1"),
        promised="assumptions.md, Sizes: if a shape comes out differently at size 1, that size departs",
        may=lambda program, index: 1 in program.CALLS[index].sizes.values(),
    ),
    Refusal(
        *("nothing to compile", piecework.CompileError, r"runs no op of torch on its arguments"),
        promised="assumptions.md, Refused at the trace",
        may=lambda program, index: True,
    ),
    Refusal(
        *("nothing to capture ahead", piecework.CaptureError, r"has no piece to capture"),
        promised="capture.md: piecework.capture captures pieces",
        may=lambda program, index: program.AHEAD and index == 0,
    ),
    Refusal(
        *("an op that reads on the host, captured", piecework.CaptureError, r"in fuzz::checked, it reads a number"),
        promised="limits.md, host-sync",
        may=lambda program, index: "op checked" in program.FEATURES,
    ),
    Refusal(
        *("out= with gaps", piecework.CompileError, r"Attempted to call op with non-contiguous"),
        promised="limits.md, strided-out",
        may=lambda program, index: "out=" in program.text,
    ),
    Refusal(
        *("an op inside another", piecework.SplitError, r"aten::\w+ only appears when .* is decomposed"),
        promised="settings.md: names of splitting ops",
        may=lambda program, index: "an op of torch is a cut" in program.FEATURES,
    ),
)
"""In order: the first that fits is counted. Any other error of Piecework is a failure."""

MAX_REFUSED = 0.2
"""Of all calls: more, and the differ would look at too little."""


class Departure(AssertionError):
    """What is compiled does something else than eager."""


# --- modes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """A way to run a program."""

    name: str
    level: int
    is_captured: bool = False
    piece_compiler: str = "eager"


LEVEL_1, LEVEL_2 = Mode("level 1", 1), Mode("level 2", 2)
UNCAPTURED, CAPTURED = Mode("level 3", 3), Mode("level 3 captured", 3, is_captured=True)
INDUCTOR = Mode("level 3 captured, by Inductor", 3, is_captured=True, piece_compiler="inductor")
ALL_MODES = (LEVEL_1, LEVEL_2, UNCAPTURED, CAPTURED)


@dataclass
class Outcome:
    """What was seen of a program, or of many."""

    num_programs: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    """By mode."""
    refusals: Counter[str] = field(default_factory=Counter)
    both_raised: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: Outcome) -> None:
        """Add what was seen of others."""
        self.num_programs += other.num_programs
        for mine, others in zip(self._counters(), other._counters(), strict=True):
            mine.update(others)

    def _counters(self) -> tuple[Counter[str], ...]:
        return self.calls, self.refusals, self.both_raised, self.features, self.counts

    def check_share_of_refusals(self) -> None:
        """Fail where too many calls were refused."""
        num_calls, num_refused = sum(self.calls.values()), sum(self.refusals.values())
        assert num_refused <= MAX_REFUSED * num_calls, (
            f"{num_refused} of {num_calls} calls were refused: {self.refusals}"
        )

    def text(self) -> str:
        """Return a table."""
        lines = [f"{self.num_programs} programs"]
        titles = ("calls by mode", "refused calls", "calls that raise in eager too", "programs with", "counts")
        for title, counter in zip(titles, self._counters(), strict=True):
            lines.append(f"{title}:")
            lines += [f"    {count:8} {name}" for name, count in sorted(counter.items(), key=lambda item: -item[1])]
        return "\n".join(lines)


def check_text(text: str, modes: Sequence[Mode] = ALL_MODES, plugins: Sequence[object] = ()) -> Outcome:
    """Run a program in some modes.

    Args:
        text: of the program.
        modes: at which levels, and how.
        plugins: registered besides the capturer that emulates.

    Raises:
        Departure: something differs from eager.
    """
    program = Program(text)
    total = Outcome(num_programs=1, features=Counter(program.FEATURES))
    try:
        for mode in modes:
            total.add(Comparison(program, mode, plugins).run())
    finally:
        program.close()
    return total


# --- one program in one mode ----------------------------------------------------------------------------


@dataclass
class Side:
    """Eager or compiled: its model, and what it has kept."""

    model: Any
    call: Callable[..., Any]
    kept: list[Any] = field(default_factory=list)
    """Results of all calls so far."""
    last: dict[str, torch.Tensor] = field(default_factory=dict)
    """Arguments of the last call by path."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers."""
        if not isinstance(self.model, torch.nn.Module):
            return {}
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}


class Comparison:
    """Runs all calls of a program in one mode."""

    def __init__(self, program: Program, mode: Mode, plugins: Sequence[object]) -> None:
        self.program, self.mode, self.plugins = program, mode, plugins
        self.outcome = Outcome()
        self.where = self.where_now = mode.name

    def run(self) -> Outcome:
        """Compare every call.

        Raises:
            Departure: something differs.
        """
        is_installed = self.mode.piece_compiler != "eager"
        with ExitStack() as stack:
            stack.enter_context(piecework.testing.plugins(*self.plugins, load_installed=is_installed))
            stack.enter_context(torch.inference_mode() if self.program.INFERENCE_MODE else torch.no_grad())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(_quiet())
            stack.callback(_forget)
            self.run_calls()
        return self.outcome

    def run_calls(self) -> None:
        piecework.counters.reset()
        model = self.program.make()
        reference = self.program.make()
        settings = dict(self.program.SETTINGS)
        if not self.mode.is_captured:
            settings["capturer"] = "none"
        if not self.plugins:
            settings["piece_compiler"] = self.mode.piece_compiler
        config = CompilationConfig(level=self.mode.level, **settings)
        compiled = piecework.compile(model, config=config, dynamic_arg_dims=self.program.DIMS)
        eager, other = Side(reference, reference), Side(model, compiled)
        try:
            for index in range(len(self.program.CALLS)):
                self.where = self.where_now = f"{self.mode.name}, call {index}"
                if not self.run_call(index, eager, other):
                    break
            self.count(compiled)
        finally:
            piecework.release(compiled)

    def count(self, compiled: Any) -> None:
        if self.mode.is_captured:
            report = piecework.report(compiled)
            counts = self.outcome.counts
            counts["captures"] += piecework.counters.num_graph_captures
            counts["replays"] += piecework.counters.num_graph_replays
            counts["calls answered by a plan"] += sum(size.num_calls for size in report.sizes)
            counts["calls that were padded"] += sum(size.num_padded_calls for size in report.sizes)
            counts["programs with a capture"] += bool(report.sizes)
            for reasons in dict(report.num_uncaptured_calls).values():
                counts["calls uncaptured"] += sum(reasons.values())

    def run_call(self, index: int, eager: Side, other: Side) -> bool:
        """Compare one call; return whether the next one makes sense."""
        call = self.program.CALLS[index]
        try:
            eager_args = Arguments(self.program, call, eager)
            other_args = Arguments(self.program, call, other)
        except UnfitError:
            return True
        self.outcome.calls[self.mode.name] += 1
        try:
            if index == 0 and self.mode.is_captured and self.program.AHEAD and all(call.sizes.values()):
                sizes = self.program.SETTINGS["capture_sizes"]
                if isinstance(sizes, tuple):
                    piecework.capture(other.call, sizes, other_args.values)
                    self.same(eager_args, other_args, eager, other, "after capture()")
            result = other.call(**other_args.values)
        except Exception as error:  # Whatever it is: it is compared with what eager does, or raised again.
            return self.after_error(error, index, eager, other, eager_args, other_args)
        try:
            expected = eager.call(**eager_args.values)
        except Exception as error:  # Eager fails, and what is compiled did not.
            raise self.departure(f"eager raises {_said(error)}, the compiled model returns {result!r}") from error
        eager.kept.append(expected)
        other.kept.append(result)
        self.same(eager_args, other_args, eager, other, "")
        eager.last, other.last = eager_args.tensors, other_args.tensors
        return True

    def after_error(
        self, error: Exception, index: int, eager: Side, other: Side, eager_args: Arguments, other_args: Arguments
    ) -> bool:
        for refusal in REFUSALS:
            is_it = isinstance(error, refusal.error) and re.search(refusal.pattern, str(error))
            if is_it and refusal.may(self.program, index):
                self.outcome.refusals[refusal.name] += 1
                self.same(eager_args, other_args, eager, other, f"after a refusal ({refusal.name})")
                return True
        try:
            eager.call(**eager_args.values)
        except Exception as expected:  # Both raise: by what, is noted.
            self.outcome.both_raised[type(expected).__name__] += 1
            is_op = "fuzz::checked" in str(expected)
            if is_op and "fuzz::checked" not in str(error):
                self.depart(f"eager raises {_said(expected)}, the compiled model {_said(error)}")
            # What was done before it stays done, in eager as well.
            return is_op and not any(feature.startswith("writes to") for feature in self.program.FEATURES)
        trace = "".join(traceback.format_exception(error))
        raise Departure(f"{self.where}: raises {_said(error)}\n{trace}") from error

    # What is compared.

    def same(self, eager_args: Arguments, other_args: Arguments, eager: Side, other: Side, when: str) -> None:
        """Compare everything that can be seen after a call."""
        self.where_now = f"{self.where}{', ' if when else ''}{when}"
        self.same_values(eager_args.tensors, other_args.tensors, "argument")
        self.same_values(eager.state(), other.state(), "state")
        expected_all: dict[str, Any] = {}
        found_all: dict[str, Any] = {}
        for number, (expected, found) in enumerate(zip(eager.kept, other.kept, strict=True)):
            is_new = number == len(eager.kept) - 1
            what = "the result" if is_new else f"the result of call {number}, kept"
            a, spec_a = internals.pytree.tree_flatten(expected)
            b, spec_b = internals.pytree.tree_flatten(found)
            if spec_a != spec_b:
                self.depart(f"{what} is {spec_b}, in eager {spec_a}")
            expected_all |= {f"{what}, leaf {i}": leaf for i, leaf in enumerate(a)}
            found_all |= {f"{what}, leaf {i}": leaf for i, leaf in enumerate(b)}
        self.same_values(expected_all, found_all, "")
        self.same_sharing(
            {**eager_args.tensors, **eager.state(), **expected_all},
            {**other_args.tensors, **other.state(), **found_all},
        )

    def same_values(self, expected: Mapping[str, Any], found: Mapping[str, Any], kind: str) -> None:
        if expected.keys() != found.keys():
            self.depart(f"{kind}: {sorted(found)}, in eager {sorted(expected)}")
        for name, a in expected.items():
            b, what = found[name], f"{kind} {name}".strip()
            if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
                if type(a) is not type(b) or a != b:
                    self.depart(f"{what} is {b!r}, in eager {a!r}")
                continue
            if type(a) is not type(b):
                self.depart(f"{what} is a {type(b).__name__}, in eager a {type(a).__name__}")
            for fact in ("dtype", "shape"):
                if getattr(a, fact) != getattr(b, fact):
                    self.depart(f"{what} has the {fact} {getattr(b, fact)}, in eager {getattr(a, fact)}")
            # Captured, results are clones or views of them, which are as dense as eager's only where these are dense.
            is_free = self.mode.is_captured and _strides(a.clone()) != _strides(a)
            if _strides(a) != _strides(b) and not is_free:
                self.depart(f"{what} has the strides {b.stride()} for {tuple(b.shape)}, in eager {a.stride()}")
            try:
                torch.testing.assert_close(b, a, equal_nan=True)
            except AssertionError as error:
                self.depart(f"{what} has other values: {' '.join(str(error).split())}\n{b}\nin eager\n{a}")

    def same_sharing(self, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Compare which tensors are one, and which share memory."""
        tensors = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
        for first, second in itertools.combinations(tensors, 2):
            a, b = expected[first] is expected[second], found[first] is found[second]
            if a != b:
                self.depart(
                    f"{first} and {second} are {'' if b else 'not '}one tensor, in eager they are{'' if a else ' not'}"
                )
            a, b = _overlap(expected[first], expected[second]), _overlap(found[first], found[second])
            if a != b:
                self.depart(
                    f"{first} and {second} {'' if b else 'do not '}share memory, in eager they do{'' if a else ' not'}"
                )

    def depart(self, text: str) -> NoReturn:
        raise self.departure(text)

    def departure(self, text: str) -> Departure:
        return Departure(f"{self.where_now}: {text}")


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides that can be told from the outside."""
    if not tensor.numel():
        return []
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    (start_a, stop_a), (start_b, stop_b) = _range(a), _range(b)
    return start_a < stop_b and start_b < stop_a


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings about sizes that can't be captured out of the way: programs provoke them."""
    logger = logging.getLogger("piecework")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _forget() -> None:
    piecework.reset()
    torch._dynamo.reset()


# --- arguments --------------------------------------------------------------------------------------------


class UnfitError(Exception):
    """A call can't be made as it was meant, such as with more slots than there are."""


class Arguments:
    """What one call passes, made for one side."""

    def __init__(self, program: Program, call: Call, side: Side) -> None:
        self.call, self.side = call, side
        self.tensors: dict[str, torch.Tensor] = {}
        self.number = 0
        self.values = {name: self.make(spec, name) for name, spec in program.INPUTS.items()}
        self.values.update(call.changed)

    def make(self, spec: Any, path: str) -> Any:
        if isinstance(spec, Arg):
            self.tensors[path] = tensor = self.tensor(spec, path)
            return tensor
        if isinstance(spec, dict):
            return {key: self.make(item, f"{path}[{key!r}]") for key, item in spec.items()}
        if isinstance(spec, (list, tuple)):
            return type(spec)(self.make(item, f"{path}[{i}]") for i, item in enumerate(spec))
        return spec

    def tensor(self, spec: Arg, path: str) -> torch.Tensor:
        self.number += 1
        shape = [self.call.sizes[size] if isinstance(size, str) else size for size in spec.shape]
        for other, one in self.call.same.items():
            if path == one and other in self.tensors:
                return self.tensors[other]
            if path == other and one in self.tensors:
                return self.tensors[one]
        last = self.side.last.get(path)
        if path in self.call.held and last is not None and list(last.shape) == shape:
            return last
        if path in self.call.fed:
            leaves = [leaf for kept in self.side.kept for leaf in internals.pytree.tree_leaves(kept)]
            fits = [
                leaf
                for leaf in leaves
                if type(leaf) is torch.Tensor and list(leaf.shape) == shape and leaf.dtype == spec.dtype
            ]
            if fits:
                return fits[-1 - self.call.fed[path] % len(fits)]
        seed = 100 * self.call.seed + self.number
        values = fuzz_ops.values(*shape, dtype=spec.dtype, seed=seed, kind=spec.kind)
        if self.call.large and spec.kind == "plain":
            values = values + 2000
        return laid_out(values, self.call.layouts.get(path, "plain"))


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values with another layout in memory."""
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced" and values.dim() >= 1:  # The last dim has a gap behind it.
        return torch.cat([values, values], -1)[..., : values.shape[-1]]
    if layout == "strided" and values.dim() >= 1:
        return torch.stack([values, values], -1)[..., 0]
    if layout == "offset":
        return torch.cat([values.new_zeros(3), values.reshape(-1)])[3:].view(values.shape)
    if layout == "expanded" and values.dim() >= 2 and values.shape[0]:
        return values[:1].expand(values.shape)
    return values


# --- a program as a file ------------------------------------------------------------------------------------


def write_program(text: str, folder: Path, name: str, reason: str) -> Path:
    """Write a program as a file that reruns it: it exits with 1 and prints the departure."""
    folder.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).resolve().parent
    path = folder / f"{name}.py"
    head = [f"# {line}" for line in reason.splitlines()[:6]]
    head += ["import sys", "", f"sys.path[:0] = [{str(here)!r}, {str(here.parents[1] / 'core')!r}]", ""]
    tail = [
        "",
        'if __name__ == "__main__":',
        "    from fuzz_differ import main",
        "",
        "    sys.exit(main(__file__))",
        "",
    ]
    path.write_text("\n".join([*head, text, *tail]))
    return path


def main(filename: str) -> int:
    """Run the program of a file in all modes; return 1 and print what departs."""
    try:
        outcome = check_text(Path(filename).read_text())
    except Departure as departure:
        print(departure)
        return 1
    print(outcome.text())
    return 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: the tensors are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
