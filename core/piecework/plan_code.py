"""Generate the function that answers calls of one captured size: copy, replay, finish.

It has the signature of the straight-line code of the same graph: tensor arguments, then sizes.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch.fx import Node

from piecework import torch_internals as internals
from piecework.effects import Effects
from piecework.inputs import GraphInputs
from piecework.run import CodeWriter
from piecework.split import SplitGraph
from piecework.static_inputs import GraphTensor


@dataclass(frozen=True)
class Results:
    """How the caller's results are made from the memory of a plan."""

    made_from: tuple[Node, ...]
    """Nodes whose values every call clones; in the code they are ``b0``, ``b1``, ..."""
    strides: Mapping[int, str]
    """Of clones that parts are taken from: what the memory has, gaps and all, at the size of the call."""
    lines: tuple[str, ...]
    texts: tuple[str, ...]
    namespace: Mapping[str, Any]
    bound_names: Mapping[Node, str]
    """What the code calls parameters and buffers that are returned; the function of a plan is given those of its
    time."""


def describe_results(split: SplitGraph, inputs: GraphInputs) -> Results:
    """Decide what is cloned for the caller, and what is a view: of a clone, of an argument or of a parameter."""
    writer = CodeWriter(split.effects, inputs)
    given = set(writer.names)
    defined = {*given, *(node for step in split.pieces for node in step.outputs)}
    returned = split.returned
    bases = [list(_bases(value, split.effects, defined)) if isinstance(value, Node) else [] for value in returned]
    own = [base for found in bases for base in found if base not in given]
    made_from: dict[Node, str] = {}
    for value, found in zip(returned, bases, strict=True):
        for base in found:
            if base in given:
                continue
            # A base that only one result looks at need not be cloned where a view of it will do.
            is_seen_once = own.count(base) == 1 and len(found) == 1
            made_from.setdefault(value if is_seen_once else base, f"o{len(made_from)}")
    writer.names.update(made_from)
    texts = tuple(writer.returned(value) for value in returned)
    have_parts = {
        base
        for node in writer.names.keys() & split.effects.parts.keys() - made_from.keys()
        for base in _bases(node, split.effects, defined)
    }
    strides = {
        i: writer.number(tuple(split.effects.values[node].stride()))
        for i, node in enumerate(made_from)
        if node in have_parts
    }
    lines = tuple(line.text for line in writer.lines)
    bound_names = writer.bound_names
    namespace = {name: value for name, value in writer.namespace.items() if name not in bound_names.values()}
    used = {base for found in bases for base in found}
    names = {node: name for node, name in bound_names.items() if node in used}
    return Results(tuple(made_from), strides, lines, texts, namespace, names)


def _bases(node: Node, effects: Effects, defined: set[Node]) -> Iterator[Node]:
    while node in effects.identical and node not in defined:
        node = effects.aliased[node]
    part = node
    while part in effects.aliased and part not in effects.parts:
        part = effects.aliased[part]
    if part in effects.parts:
        wholes = list(_bases(effects.parts[part], effects, defined))
        if defined.issuperset(wholes):
            yield from wholes
            return
    if node in defined or not (effects.is_view(node) or effects.is_scalar(node)):
        yield node
    elif not effects.is_scalar(node):
        for arg in node.all_input_nodes:
            yield from _bases(arg, effects, defined)


@dataclass(frozen=True)
class PlanCode:
    """The code of a plan's function, the same for all sizes of a model that are copied in the same way."""

    code: CodeType
    results: Results
    stages: Mapping[int, str]
    """What lines of the code do, of ``STAGES``."""

    def function(self, namespace: Mapping[str, Any]) -> Callable[..., tuple[Any, ...]]:
        """Return the function over the memory of one size."""
        space = {**self.results.namespace, **internals.EXPRESSION_NAMESPACE, **namespace}
        exec(self.code, space)
        return space.pop("run")  # Else the function and what it refers to would hold each other.


def plan_code(
    results: Results,
    inputs: GraphInputs,
    copied: Sequence[GraphTensor],
    held: Sequence[GraphTensor],
    written: Sequence[int],
    *,
    is_padded: bool,
    is_copied_at_once: bool,
    static_outputs: bool,
    name: str,
) -> PlanCode:
    """Write the function of a plan.

    Its names: ``i3`` and ``at3`` are the memory of argument 3 and its address, ``h4`` the address of
    argument 4, which is held, ``b0`` memory that a result is made from. ``elsewhere`` returns another function to
    call, after the lock has been let go: what runs uncaptured may wait for other threads.

    Args:
        results: how the caller's results are made.
        inputs: what the graph is called with.
        copied: the inputs that are copied into static memory.
        held: the inputs that are read and written where the caller has them.
        written: positions of the tensor arguments that the graph writes to.
        is_padded: fewer rows come than the plan has; the others are zeroed at every call.
        is_copied_at_once: ``copy_inputs`` copies all inputs, rather than one launch per dtype.
        static_outputs: results are the memory itself.
        name: shown in tracebacks.
    """
    parameters = ", ".join([*(f"a{i}" for i in inputs.tensor_indices), *inputs.sizes.variables.values()])
    stale = ["pool.is_busy", "current_stream() != pool.stream and not pool.switch()"]
    stale += [f"a{tensor.index}.data_ptr() != h{tensor.index}" for tensor in held]
    copies = _copies(copied, is_padded, is_copied_at_once)
    back = [f"{_source(t)}.copy_(i{t.index})" for t in copied if t.index in written]
    made = [*_clones(results, static_outputs), *back, *results.lines]
    body = [*copies, "for step in steps:", "    step()", *made]
    streams, start = f"        if {' or '.join(stale)}:", "            try:"
    lines = [
        f"def run({parameters}):",
        "    if not (take(False) or pool.wait()):",
        f"        return while_busy({parameters})",
        "    try:",
        streams,
        f"            other = elsewhere({parameters})",
        "        else:",
        "            other = None",
        "            pool.is_busy = True",
        start,
        *(f"                {line}" for line in body),
        "            finally:",
        "                pool.is_busy = False",
        "            variant.num_calls += 1",
        "            counters.num_graph_replays += num_graphs",
        "    finally:",
        "        let_go()",
        "    if other is not None:",
        f"        return other({parameters})",
        f"    return ({', '.join(results.texts)}{',' if len(results.texts) == 1 else ''})",
    ]
    source = "\n".join(lines) + "\n"
    filename = f"<piecework plan of {name}{' with padding' if is_padded else ''}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    stages = {1 + lines.index(streams): "stream"}
    first = 1 + lines.index(start) + 1
    each = ["copy"] * len(copies) + ["step", "step"] + ["result"] * len(made)
    stages |= {first + i: stage for i, stage in enumerate(each)}
    return PlanCode(compile(source, filename, "exec"), results, stages)


def _copies(copied: Sequence[GraphTensor], is_padded: bool, is_copied_at_once: bool) -> list[str]:
    """Return one launch per dtype, or one for all; none if all are in place already."""
    lines = ["zero_padding(padding)"] if is_padded and copied else []
    by_kind: dict[Any, list[GraphTensor]] = {}
    for tensor in copied:
        kind = None if is_copied_at_once else (tensor.fake.dtype, tensor.fake.device)
        by_kind.setdefault(kind, []).append(tensor)
    for tensors in by_kind.values():
        moved = " or ".join(f"a{t.index}.data_ptr() != at{t.index}" for t in tensors)
        if len(tensors) == 1:
            (only,) = tensors
            launch = f"i{only.index}.copy_({_source(only)})"
        else:
            kept = ", ".join(f"i{t.index}" for t in tensors)
            given = ", ".join(map(_source, tensors))
            launch = f"copy_inputs({given})" if is_copied_at_once else f"copy_all(({kept},), ({given},))"
        lines += [launch] if is_padded else [f"if {moved}:", f"    {launch}"]
    return lines


def _source(tensor: GraphTensor) -> str:
    return f"base_of(a{tensor.index})" if tensor.is_expanded else f"a{tensor.index}"


def _clones(results: Results, static_outputs: bool) -> list[str]:
    made = "b{0}" if static_outputs else "b{0}.clone()"
    # Cloned in any case: a padded call has other strides than the memory of its plan.
    laid_out = "b{0}.new_empty_strided(b{0}.size(), {1}).copy_(b{0})"
    forms = {i: laid_out.format(i, strides) for i, strides in results.strides.items()}
    return [f"o{i} = {forms.get(i) or made.format(i)}" for i in range(len(results.made_from))]
