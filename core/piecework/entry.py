"""Generate the function that a call enters: checks, the size, the run, and the caller's result.

It has the signature of the forward, so that Python itself binds the arguments; what differs from
the traced call leaves through ``depart``.
"""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from piecework import torch_internals as internals
from piecework.arguments import ConstantSpec, ContainerSpec, Spec, TensorSpec
from piecework.gradients import without_gradients
from piecework.notes import note_origin
from piecework.run import Runs
from piecework.state import BoundState
from piecework.tensor_checks import TensorChecks, autocast_state, layout_condition, overlap
from piecework.trace import Relation, Trace

if TYPE_CHECKING:
    from piecework.plans import Plans


@dataclass
class Entry:
    """The generated function, and the source it was made from."""

    function: Callable[..., Any]
    source: str
    namespace: dict[str, Any]
    explain: Callable[[Sequence[Any]], str | None]
    """Returns in words how the arguments of a call, in the order of parameters, or its autocast differ; or None."""


def make_entry(
    trace: Trace,
    state: BoundState,
    runs: Runs,
    plans: Plans | None = None,
    *,
    takes_self: bool,
    original: Callable[..., Any],
    used_tensors: Sequence[int],
    written_tensors: Sequence[int],
    depart: Callable[..., Any],
    run_empty: Callable[..., Any],
    owner: str,
) -> Entry:
    """Generate the entry of a traced forward.

    Args:
        trace: form of the call, relations between sizes, form of the result.
        state: the model's state that the run is bound to.
        runs: the generated code, called as ``run(*used tensors, *sizes)``; returns the graph's outputs.
        plans: the captured sizes, which answer the calls that they can; called like ``runs``.
        takes_self: the function is the ``__call__`` of a module.
        original: called instead while another trace passes through.
        used_tensors: positions of the tensor arguments that ``run`` takes.
        written_tensors: positions of the tensor arguments that the graph writes to.
        depart: called as ``depart(problem, args, kwargs)`` when a call departs from the trace.
        run_empty: called as ``run_empty(args, kwargs)`` when a dim is zero.
        owner: name of the model, for tracebacks.
    """
    checks = TensorChecks(trace.arguments)
    namespace: dict[str, Any] = {
        "_pw_run": runs.general.function,
        "_pw_exact": {size: line.function for size, line in runs.exact.items()},
        "_pw_uncompiled": runs.uncompiled.function if runs.uncompiled is not None else None,
        "_pw_is_traced": internals.is_traced,
        "_pw_getattr": getattr,
        "_pw_original": original,
        "_pw_depart": depart,
        "_pw_empty": run_empty,
        "_pw_watch": state.watch,
        "_pw_settle": state.settle,
        "_pw_windows": state.windows,
        "_pw_pointer": torch.Tensor.data_ptr,
        "_pw_grad_enabled": torch.is_grad_enabled,
        "_pw_without_gradients": without_gradients,
        "_pw_state": state,
        "_pw_overlap": overlap,
        "_pw_explain": checks.explain,
        "_pw_autocast": autocast_state,
        "_pw_note": functools.partial(note_origin, owner=owner),
        # An argument may have the name of a builtin.
        **{f"_pw_{builtin.__name__}": builtin for builtin in (type, tuple, len, dict, next, Exception)},
        **internals.EXPRESSION_NAMESPACE,
        **trace.outputs.constants,
    }
    checks.attach(namespace)
    generator = _Generator(trace, state, namespace, takes_self, runs.needed, used_tensors, written_tensors)
    if plans is not None:
        namespace |= {"_pw_plans": plans.functions, "_pw_choose": plans.choose}
    source = generator.source()
    filename = f"<piecework entry of {owner}>"
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    if plans is not None:
        exec(generator.uncaptured_source(), namespace)
        plans.uncaptured = namespace["_pw_uncaptured"]
    return Entry(namespace["forward"], source, namespace, checks.explain)


@dataclass
class _Generator:
    trace: Trace
    state: BoundState
    namespace: dict[str, Any]
    takes_self: bool
    needed_by_code: Sequence[Relation]
    used_tensors: Sequence[int]
    written_tensors: Sequence[int]
    lines: list[str] = field(default_factory=list)

    def source(self) -> str:
        arguments = self.trace.arguments
        self.leave = f"({self.positional()}), _pw_dict({self.by_keyword()})"
        call = f"{self.positional()} {self.by_keyword()}"
        self.lines += ["if _pw_is_traced():", f"    return _pw_original({call})"]
        self.check_form()
        self.read_sizes()
        self.check_relations()
        self.check_overlap()
        self.check_modes()
        self.check_state()
        self.run()
        parameters = "_pw_self, " * self.takes_self + _parameters_text(arguments.signature, self.namespace)
        body = "\n".join(f"    {line}" for line in self.lines)
        return f"def forward({parameters}):\n{body}\n"

    def positional(self) -> str:
        """Return source for the arguments to hand on by position, as at the first call."""
        names = []
        for i, p in enumerate(self.trace.arguments.signature.parameters.values()):
            if p.kind is p.VAR_POSITIONAL:
                names.append(f"*{p.name},")
            elif p.kind is p.POSITIONAL_ONLY or p.kind is p.POSITIONAL_OR_KEYWORD and self.by_position(i):
                names.append(f"{p.name},")
        return " ".join(names)

    def by_position(self, index: int) -> bool:
        parameters = list(self.trace.arguments.signature.parameters.values())
        has_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        return has_more or index < self.trace.arguments.num_positional

    def by_keyword(self) -> str:
        """Return source for the rest; an argument at its default is left out, as the caller may have done."""
        items = []
        for i, p in enumerate(self.trace.arguments.signature.parameters.values()):
            if p.kind is p.VAR_KEYWORD:
                items.append(f"**{p.name}")
            elif p.kind is p.KEYWORD_ONLY or p.kind is p.POSITIONAL_OR_KEYWORD and not self.by_position(i):
                if p.default is p.empty:
                    items.append(f"{p.name}={p.name}")
                else:
                    default = f"_pw_default_{p.name}"
                    items.append(f"**({{}} if {p.name} is {default} else {{'{p.name}': {p.name}}})")
        return ", ".join(items)

    def check_form(self) -> None:
        conditions = [text for spec in self.trace.arguments.specs.values() for text in self.conditions(spec)]
        tensors = ", ".join(spec.path for spec in self.trace.arguments.tensors)
        # torch's check ends the process on a nested tensor, which is of the plain class.
        conditions += [f"not _pw_getattr({spec.path}, 'is_nested', False)" for spec in self.trace.arguments.tensors]
        conditions.append(f"_pw_check({tensors})")
        if checked := autocast_state():
            self.namespace["_pw_traced_autocast"] = checked
            conditions.append("_pw_autocast() == _pw_traced_autocast")
        values = "".join(f"{name}, " for name in self.trace.arguments.specs)
        self.lines += [
            f"if not ({' and '.join(conditions)}):",
            f"    _pw_problem = _pw_explain(({values}))",
            "    if _pw_problem is not None:",
            f"        return _pw_depart(_pw_problem, {self.leave})",
        ]

    def conditions(self, spec: Spec) -> list[str]:
        if isinstance(spec, TensorSpec):
            return []
        if isinstance(spec, ConstantSpec):
            return [self.constant_condition(spec)]
        kind = self.constant(spec.kind)
        if isinstance(spec, ContainerSpec) and issubclass(spec.kind, dict):
            own = [f"_pw_type({spec.path}) is {kind}", f"_pw_tuple({spec.path}) == {self.constant(spec.keys)}"]
        elif issubclass(spec.kind, (tuple, list)):
            own = [f"_pw_type({spec.path}) is {kind}", f"_pw_len({spec.path}) == {len(spec.keys)}"]
        else:
            own = [f"_pw_type({spec.path}) is {kind}"]
        return own + [text for child in spec.children for text in self.conditions(child)]

    def constant_condition(self, spec: ConstantSpec) -> str:
        value = spec.value
        if value is None or isinstance(value, bool):
            return f"{spec.path} is {value!r}"
        if type(value) in (int, str) or type(value) is float and value:  # 0.0 == -0.0
            return f"_pw_type({spec.path}) is {self.constant(type(value))} and {spec.path} == {self.constant(value)}"
        return f"{self.constant(spec.mismatch)}({spec.path}) is None"

    def constant(self, value: Any) -> str:
        name = f"_pw_k{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def read_sizes(self) -> None:
        self.sizes = self.trace.sizes.variables
        seen: dict[str, str] = {}
        self.equalities: list[tuple[str, str]] = []
        for spec in self.trace.arguments.tensors:
            for position, dim in enumerate(spec.dims):
                if not isinstance(dim, str):
                    continue
                read = f"{spec.path}.size({position})"
                if dim in seen:
                    names = (_escaped(repr(dim)), _escaped(seen[dim]), _escaped(spec.path))
                    text = "dim {} is {{}} in argument {} but {{}} in argument {}".format(*names)
                    self.equalities.append(
                        (f"{read} == {self.sizes[dim]}", f"{text!r}.format({self.sizes[dim]}, {read})")
                    )
                else:
                    seen[dim] = spec.path
                    self.lines.append(f"{self.sizes[dim]} = {read}")
        self.lines += [f"if not ({' and '.join(self.sizes.values())}):", f"    return _pw_empty({self.leave})"]

    def check_relations(self) -> None:
        for condition, problem in self.equalities:
            self.lines += [f"if not {condition}:", f"    return _pw_depart({problem}, {self.leave})"]
        for spec in self.trace.arguments.tensors:
            if (condition := layout_condition(spec, self.sizes)) is not None:
                values = "".join(f"{name}, " for name in self.trace.arguments.specs)
                self.lines += [
                    f"if not {condition} and (_pw_problem := _pw_explain(({values}))) is not None:",
                    f"    return _pw_depart(_pw_problem, {self.leave})",
                ]
        for relation in self.trace.relations:
            self.check_relation(relation)

    def check_relation(self, relation: Relation) -> None:
        condition = self.trace.sizes.code(relation.expression)
        sizes = ", ".join(f"{_escaped(dim)} = {{}}" for dim in self.sizes)
        text = f"the trace holds for {_escaped(relation.describe())}; this call has {sizes}"
        self.lines += [
            f"if not ({condition}):",
            f"    return _pw_depart({text!r}.format({', '.join(self.sizes.values())}), {self.leave})",
        ]

    def check_overlap(self) -> None:
        paths = [spec.path for spec in self.trace.arguments.tensors]
        for written in self.written_tensors:
            for other, path in enumerate(paths):
                if other != written and (other not in self.written_tensors or other > written):
                    text = (
                        f"arguments {paths[written]} and {path} share memory, and the model writes to "
                        f"{paths[written]}; they were traced as separate"
                    )
                    self.lines += [
                        f"if _pw_overlap({paths[written]}, {path}):",
                        f"    return _pw_depart({text!r}, {self.leave})",
                    ]

        if self.state.bindings and paths and (self.written_tensors or self.state.written):
            arguments = "".join(f"{path}, " for path in paths)
            written_paths = "".join(f"{paths[i]}, " for i in self.written_tensors)
            text = "an argument shares memory with a parameter or buffer, and the model writes to it"
            self.lines += [
                f"if _pw_state.shares_memory(({arguments}), ({written_paths})):",
                f"    return _pw_depart({text!r}, {self.leave})",
            ]

    def check_modes(self) -> None:
        for mode in self.trace.asked_modes:
            text = (
                f"the model asks torch.{mode.__name__}(), which was False when traced, now it is True; "
                "call it under torch.no_grad()"
            )
            self.lines += [f"if {self.constant(mode)}():", f"    return _pw_depart({text!r}, {self.leave})"]

    def check_state(self) -> None:
        changed = "_pw_watch.changed"
        if self.state.unwatched:
            changed += " or _pw_state.unwatched_moved()"
        if self.state.bindings:
            self.lines.append("_pw_tensors, _pw_addresses = _pw_next(_pw_windows)")
            changed += " or [*map(_pw_pointer, _pw_tensors)] != _pw_addresses"
        self.lines += [
            f"if {changed}:",
            "    _pw_problem = _pw_settle()",
            "    if _pw_problem is not None:",
            f"        return _pw_depart(_pw_problem, {self.leave})",
        ]

    def run(self) -> None:
        tensors = self.trace.arguments.tensors
        given = ", ".join([*(tensors[i].path for i in self.used_tensors), *self.sizes.values()])
        run = self.uncaptured_choice()
        if "_pw_plans" in self.namespace:
            run = f"(_pw_plans.get({self.key}) or _pw_choose(({given},), {run}))"
        self.lines += [
            "try:",  # Which costs nothing.
            "    if _pw_grad_enabled():",
            f"        _pw_o = _pw_without_gradients({run}, _pw_state.tensors, ({given},))",
            "    else:",
            f"        _pw_o = {run}({given})",
            "except _pw_Exception as _pw_error:",
            "    _pw_note(_pw_error)",
            "    raise",
            f"return {self.trace.outputs.text}",
        ]

    @property
    def key(self) -> str:
        """Return source for what a size is looked up by."""
        sizes = list(self.sizes.values())
        return sizes[0] if len(sizes) == 1 else f"({', '.join(sizes)})"

    def uncaptured_choice(self) -> str:
        """Return source for the function that runs the pieces of this size uncaptured."""
        run = "_pw_run"
        if self.needed_by_code:
            code = self.trace.sizes.code
            holds = " and ".join(f"({code(relation.expression)})" for relation in self.needed_by_code)
            run = f"(_pw_run if {holds} else _pw_uncompiled)"
        if self.namespace["_pw_exact"]:
            run = f"(_pw_exact.get({self.key}) or {run})"
        return run

    def uncaptured_source(self) -> str:
        """Return source for that choice and call as one function, for calls that leave a plan."""
        given = ", ".join([*(f"a{i}" for i in self.used_tensors), *self.sizes.values()])
        return f"def _pw_uncaptured({given}):\n    return {self.uncaptured_choice()}({given})\n"


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _parameters_text(signature: inspect.Signature, namespace: dict[str, Any]) -> str:
    """Return the parameters as source; defaults are the very objects of the original."""
    texts: list[str] = []
    previous = None
    for p in signature.parameters.values():
        if previous is p.POSITIONAL_ONLY and p.kind is not p.POSITIONAL_ONLY:
            texts.append("/")
        if p.kind is p.KEYWORD_ONLY and previous not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL):
            texts.append("*")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        text = f"{star}{p.name}"
        if p.default is not p.empty:
            namespace[f"_pw_default_{p.name}"] = p.default
            text += f"=_pw_default_{p.name}"
        texts.append(text)
        previous = p.kind
    if previous is inspect.Parameter.POSITIONAL_ONLY:
        texts.append("/")
    return ", ".join(texts)
