"""Random programs for the fuzz: each is the text of a module with a model, its settings and a sequence of calls.

Generation is typed. Each value has a shape in terms of the named sizes ``n`` and ``m``, a dtype, and a number that
it has in common with all values that may share its memory, so that nearly every program is one that eager runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

T = TypeVar("T")
Dim = int | str
Shape = tuple[Dim, ...]

FLOATS = ("float32", "float64", "float16", "bfloat16")
MAX_STATEMENTS = 12


@dataclass(frozen=True)
class Value:
    """A tensor that a statement may use."""

    name: str
    shape: Shape
    dtype: str = "float32"
    memory: int = 0
    """Values of one number may share memory."""
    is_writable: bool = True
    kind: str = "plain"
    origin: str = "made"
    """``"input"``, ``"buffer"``, ``"parameter"``, or ``"made"`` by the model."""

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS


@dataclass
class Draft:
    """A program that is being written."""

    draw: Callable[[st.SearchStrategy[Any]], Any]
    values: list[Value] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    init: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    """Source of what each argument is given."""
    defaults: dict[str, str] = field(default_factory=dict)
    dims: dict[str, dict[int, str]] = field(default_factory=dict)
    paths: dict[str, Value] = field(default_factory=dict)
    """Tensor arguments by path."""
    sizes: list[str] = field(default_factory=list)
    """Variables that hold a size."""
    ops: dict[str, None] = field(default_factory=dict)
    """Splitting ops of the program's own library that it calls."""
    features: set[str] = field(default_factory=set)
    num_names: int = 0
    num_memories: int = 0

    # Choices.

    def one_of(self, items: Sequence[T]) -> T:
        return items[self.draw(st.integers(0, len(items) - 1))]

    def flip(self, out_of: int = 2) -> bool:
        """Return True once in so many times."""
        return self.draw(st.integers(0, out_of - 1)) == out_of - 1

    def pick(self, fits: Callable[[Value], bool]) -> Value | None:
        """Return a value that fits, most often one of the last; None where there is none."""
        found = [value for value in reversed(self.values) if fits(value)]
        if not found:
            return None
        return found[min(self.draw(st.integers(0, 2)), len(found) - 1)] if self.flip(2) else self.one_of(found)

    # Writing.

    def name(self) -> str:
        self.num_names += 1
        return f"t{self.num_names}"

    def memory(self) -> int:
        self.num_memories += 1
        return self.num_memories

    def line(self, text: str, *features: str) -> None:
        self.body.append(text)
        self.features.update(features)

    def let(self, text: str, shape: Shape, dtype: str, *features: str, of: Value | None = None, **more: Any) -> Value:
        """Add ``name = text``; ``of`` is the value whose memory the result may share."""
        value = Value(self.name(), shape, dtype, self.memory() if of is None else of.memory)
        if of is not None:
            value = replace(value, is_writable=of.is_writable, origin=of.origin, kind=of.kind)
        value = replace(value, **more)
        self.line(f"{value.name} = {text}", *features)
        self.values.append(value)
        return value

    def wrote(self, value: Value) -> None:
        """Note that a statement wrote to a value."""
        self.features.add(f"writes to {value.origin}")

    def size(self, dim: Dim) -> str | None:
        """Return Python for a size."""
        if isinstance(dim, int):
            return str(dim)
        for value in reversed(self.values):
            if dim in value.shape:
                return f"{value.name}.shape[{value.shape.index(dim)}]"
        return None


def _is_fp(value: Value) -> bool:
    return value.is_float


def _has_rows(value: Value) -> bool:
    return len(value.shape) > 0 and isinstance(value.shape[0], str)


def _writable(value: Value) -> bool:
    return value.is_writable and value.kind == "plain" and value.dtype != "bool"


def _promoted(*dtypes: str) -> str:
    result = getattr(torch, dtypes[0])
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, getattr(torch, dtype))
    return str(result).removeprefix("torch.")


def _same_form(value: Value) -> Callable[[Value], bool]:
    return lambda other: other.shape == value.shape and other.dtype == value.dtype


# --- statements: each adds lines, or does nothing where no value fits ----------------------------------


def unary(d: Draft) -> None:
    value = d.pick(_is_fp)
    if value is None:
        return
    forms = ("{0} + 1", "{0} * 0.5", "torch.tanh({0})", "{0}.relu()", "-{0}", "torch.where({0} > 0, {0}, {0} * 0.25)")
    forms += ("{0}.clamp(-1, 1)", "{0}.sin()", "torch.nn.functional.gelu({0})", "{0}.abs().sqrt()", "1 - {0}")
    d.let(d.one_of(forms).format(value.name), value.shape, value.dtype, "elementwise")


def integers(d: Draft) -> None:
    value = d.pick(lambda v: v.dtype == "int64")
    if value is not None:
        form = d.one_of(("{0} + 1", "{0} * 2", "-{0}", "{0} // 2", "{0} % 3"))
        d.let(form.format(value.name), value.shape, "int64", "integers")


def binary(d: Draft) -> None:
    a = d.pick(lambda v: v.dtype != "bool")
    if a is None:
        return
    b = d.pick(lambda v: v.dtype != "bool" and v.shape == a.shape)
    if b is not None:
        operator = d.one_of(("+", "-", "*"))
        d.let(f"{a.name} {operator} {b.name}", a.shape, _promoted(a.dtype, b.dtype), "elementwise")


def broadcast(d: Draft) -> None:
    a = d.pick(lambda v: _is_fp(v) and len(v.shape) > 1)
    if a is None:
        return
    b = d.pick(lambda v: _is_fp(v) and 0 < len(v.shape) < len(a.shape) and a.shape[-len(v.shape) :] == v.shape)
    if b is not None:
        d.let(f"{a.name} + {b.name} * 0.5", a.shape, _promoted(a.dtype, b.dtype), "broadcast")


def compare(d: Draft) -> None:
    value = d.pick(_is_fp)
    if value is not None:
        d.let(f"{value.name} > 0.25", value.shape, "bool", "bools")


def scalar_argument(d: Draft) -> None:
    value = d.pick(_is_fp)
    if value is None:
        return
    name, given, form = d.one_of(
        (
            ("scale", "0.5", "{0} * scale"),
            ("k", "3", "{0} + k"),
            ("flag", "True", "{0} if flag else -{0}"),
            ("mode", "'up'", "{0} + (1 if mode == 'up' else 2)"),
        )
    )
    d.inputs[name] = given
    d.defaults[name] = given
    of = value if name == "flag" else None
    d.let(form.format(value.name), value.shape, value.dtype, "scalar argument", of=of)


def attribute(d: Draft) -> None:
    value = d.pick(_is_fp)
    if value is not None:
        d.init.append(f"self.factor{d.num_names} = {d.one_of((0.5, 2, -1.0))}")
        d.let(f"{value.name} * self.factor{d.num_names}", value.shape, value.dtype, "attribute")


def linear(d: Draft) -> None:
    value = d.pick(lambda v: v.dtype == "float32" and len(v.shape) >= 1 and v.shape[-1] == 4)
    if value is None:
        return
    name = f"linear{d.num_names}"
    out, bias = d.one_of((4, 2, 8)), d.flip()
    d.init.append(f"self.{name} = nn.Linear(4, {out}, bias={bias})")
    d.let(f"self.{name}({value.name})", (*value.shape[:-1], out), "float32", "linear")


def matmul(d: Draft) -> None:
    value = d.pick(lambda v: _is_fp(v) and len(v.shape) == 2)
    if value is None:
        return
    form = d.one_of(("weight", "gram", "rows"))
    if form == "weight" and value.dtype == "float32" and isinstance(value.shape[1], int):
        name = f"weight{d.num_names}"
        d.init.append(f"self.{name} = nn.Parameter(torch.zeros({value.shape[1]}, 4))")
        d.let(f"{value.name} @ self.{name}", (value.shape[0], 4), value.dtype, "matmul")
    elif form == "gram":
        d.let(f"{value.name}.t() @ {value.name} * 0.125", (value.shape[1], value.shape[1]), value.dtype, "matmul")
    elif form == "rows":
        d.let(f"{value.name} @ {value.name}.t() * 0.125", (value.shape[0], value.shape[0]), value.dtype, "matmul")


def norm(d: Draft) -> None:
    value = d.pick(lambda v: v.dtype == "float32" and len(v.shape) >= 1 and v.shape[-1] == 4)
    if value is not None:
        forms = ("torch.softmax({0}, -1)", "torch.nn.functional.layer_norm({0}, (4,))", "{0}.cumsum(-1)")
        d.let(d.one_of(forms).format(value.name), value.shape, "float32", "normal")


def reduce(d: Draft) -> None:
    value = d.pick(lambda v: v.dtype in ("float32", "float64") and len(v.shape) >= 2 and isinstance(v.shape[-1], int))
    if value is None:
        return
    form, shape = d.one_of(
        (
            ("{0}.sum(-1)", value.shape[:-1]),
            ("{0}.mean(-1, keepdim=True)", (*value.shape[:-1], 1)),
            ("{0}.amax(-1)", value.shape[:-1]),
            ("{0}.sum(0)", value.shape[1:]),
            ("{0}.cumsum(0)", value.shape),
            ("{0}.max(-1)[0]", value.shape[:-1]),
            ("{0}.sum()", ()),
        )
    )
    d.let(form.format(value.name), shape, value.dtype, "reduction")


def several(d: Draft) -> None:
    value = d.pick(lambda v: v.dtype == "float32" and len(v.shape) >= 2 and isinstance(v.shape[-1], int))
    if value is not None:
        a, b = d.name(), d.name()
        d.line(f"{a}, {b} = {value.name}.{d.one_of(('max(-1)', 'sort(-1)'))}", "several results")
        shape = value.shape if "sort" in d.body[-1] else value.shape[:-1]
        d.values += [Value(a, shape, "float32", d.memory()), Value(b, shape, "int64", d.memory())]


def view(d: Draft) -> None:
    value = d.pick(lambda v: len(v.shape) >= 1)
    if value is None:
        return
    shape, first, last = value.shape, value.shape[0], value.shape[-1]
    forms: list[tuple[str, Shape]] = [
        ("{0}[None]", (1, *shape)),
        ("{0}.unsqueeze(-1)", (*shape, 1)),
        ("{0}[:]", shape),
        ("{0}.view_as({0})", shape),
        ("{0}.detach()", shape),
        ("{0}[..., None].expand(*{0}.shape, 3)", (*shape, 3)),
        ("{0}.expand(2, *{0}.shape)", (2, *shape)),
    ]
    if isinstance(last, int) and last >= 2:
        forms += [("{0}[..., 1:]", (*shape[:-1], last - 1)), ("{0}[..., ::2]", (*shape[:-1], (last + 1) // 2))]
        forms += [("{0}.narrow(-1, 0, 2)", (*shape[:-1], 2)), ("{0}[..., 0]", shape[:-1])]
        forms += [("{0}.select(-1, 1)", shape[:-1]), ("{0}[..., -1:]", (*shape[:-1], 1))]
        forms += [("{0}.chunk(2, -1)[1]", (*shape[:-1], last // 2))] if last % 2 == 0 else []
        forms += [("{0}.split([1, " + str(last - 1) + "], -1)[1]", (*shape[:-1], last - 1))]
        forms += [("{0}.unbind(-1)[0]", shape[:-1])]
    if last == 4:
        forms += [
            ("{0}.reshape(*{0}.shape[:-1], 2, 2)", (*shape[:-1], 2, 2)),
            ("{0}.unflatten(-1, (2, 2))", (*shape[:-1], 2, 2)),
        ]
    if last == 1:
        forms += [("{0}.squeeze(-1)", shape[:-1]), ("{0}.expand(*{0}.shape[:-1], 4)", (*shape[:-1], 4))]
    if len(shape) >= 2:
        swapped = (*shape[:-2], shape[-1], shape[-2])
        forms += [("{0}.transpose(-1, -2)", swapped), ("{0}.mT", swapped)]
        forms += [("{0}.movedim(0, -1)", (*shape[1:], shape[0]))]
    if len(shape) == 2:
        forms += [("{0}.t()", (shape[1], shape[0])), ("{0}.permute(1, 0)", (shape[1], shape[0]))]
    if len(shape) >= 2 and shape[-2:] == (2, 2):
        forms += [("{0}.flatten(-2)", (*shape[:-2], 4)), ("{0}.reshape(*{0}.shape[:-2], 4)", (*shape[:-2], 4))]
    if isinstance(first, str):
        forms += [("{0}[1:]", (f"{first}-1", *shape[1:])), ("{0}[:-1]", (f"{first}-1", *shape[1:]))]
        forms += [("{0}[0]", shape[1:]), ("{0}[-1]", shape[1:]), ("{0}[::2]", (f"half {first}", *shape[1:]))]
        forms += [("{0}[: {0}.shape[0]]", shape), ("{0}.narrow(0, 0, {0}.size(0))", shape)]
        if not first.isalpha():
            forms = [form for form in forms if "[0]" not in form[0] and "[-1]" not in form[0]]
    if len(shape) == 2 and isinstance(first, str) and isinstance(last, int):
        forms += [("{0}.reshape(-1)", (f"{last}*{first}",)), ("{0}.flatten()", (f"{last}*{first}",))]
        forms += [("{0}.view(-1, " + str(last) + ")", shape)]
    if isinstance(first, int) and first == 12 and (rows := d.size("n")) is not None:
        forms += [("{0}[: " + rows + "]", ("n", *shape[1:])), ("{0}.narrow(0, 0, " + rows + ")", ("n", *shape[1:]))]
    text, new = d.one_of(forms)
    made = d.let(text.format(value.name), new, value.dtype, "view", of=value, kind=value.kind)
    if "expand" in text:
        d.values[-1] = replace(made, is_writable=False)


def chunks(d: Draft) -> None:
    value = d.pick(lambda v: len(v.shape) >= 1 and v.shape[-1] in (2, 4, 8))
    if value is None:
        return
    a, b, half = d.name(), d.name(), int(value.shape[-1]) // 2
    d.line(f"{a}, {b} = {value.name}.{d.one_of(('chunk(2, -1)', f'split({half}, -1)'))}", "chunk")
    shape = (*value.shape[:-1], half)
    d.values += [replace(value, name=a, shape=shape), replace(value, name=b, shape=shape)]


def copied(d: Draft) -> None:
    value = d.pick(lambda v: len(v.shape) >= 1)
    if value is None:
        return
    form, of = d.one_of(
        (("{0}.clone()", None), ("{0}.contiguous()", value), ("{0}.to({0}.dtype)", value), ("{0}.float()", value))
    )
    dtype = "float32" if "float" in form else value.dtype
    d.let(
        form.format(value.name), value.shape, dtype, "copy", of=of, kind=value.kind if dtype == value.dtype else "plain"
    )


def cast(d: Draft) -> None:
    value = d.pick(lambda v: v.dtype != "bool")
    if value is not None:
        dtype = d.one_of(("float64", "bfloat16", "float32", "float16"))
        of = value if dtype == value.dtype else None
        d.let(f"{value.name}.to(torch.{dtype})", value.shape, dtype, "cast", of=of)


def join(d: Draft) -> None:
    a = d.pick(lambda v: len(v.shape) >= 1)
    if a is None:
        return
    b = d.pick(_same_form(a)) or a
    last = a.shape[-1]
    forms: list[tuple[str, Shape]] = [("torch.stack([{0}, {1}])", (2, *a.shape))]
    if isinstance(last, int):
        forms.append(("torch.cat([{0}, {1}], -1)", (*a.shape[:-1], 2 * last)))
    if isinstance(a.shape[0], str) and a.shape[0].isalpha():
        forms.append(("torch.cat([{0}, {1}], 0)", (f"2*{a.shape[0]}", *a.shape[1:])))
    text, shape = d.one_of(forms)
    d.let(text.format(a.name, b.name), shape, a.dtype, "cat")


def made(d: Draft) -> None:
    value = d.pick(lambda v: _has_rows(v) and _is_fp(v))
    if value is None:
        return
    rows = f"{value.name}.shape[0]"
    text, shape, dtype = d.one_of(
        (
            (f"torch.zeros_like({value.name})", value.shape, value.dtype),
            (f"torch.zeros({rows}, 4)", (value.shape[0], 4), "float32"),
            (f"{value.name}.new_full(({rows}, 4), 0.5)", (value.shape[0], 4), value.dtype),
            (f"torch.arange({rows})", (value.shape[0],), "int64"),
            ("torch.ones(4)", (4,), "float32"),
            (f"torch.empty_like({value.name}).fill_(2)", value.shape, value.dtype),
        )
    )
    d.let(text, shape, dtype, "made")


def size_read(d: Draft) -> None:
    value = d.pick(_has_rows)
    if value is not None:
        name = d.name()
        d.line(f"{name} = {value.name}.{d.one_of(('shape[0]', 'size(0)', 'shape[0] * 2', 'size(0) + 1'))}", "size read")
        d.sizes.append(name)


def size_used(d: Draft) -> None:
    value = d.pick(_is_fp)
    if value is not None and d.sizes:
        size = d.one_of(d.sizes)
        form = d.one_of(("{0} * {1}", "{0} + {1} / 4", "{0} - {1}"))
        d.let(form.format(value.name, size), value.shape, value.dtype, "size used")


def branch(d: Draft) -> None:
    value = d.pick(_is_fp)
    if value is not None and d.sizes:
        size = d.one_of(d.sizes)
        d.let(f"{value.name} + 1 if {size} > 2 else {value.name} - 1", value.shape, value.dtype, "branch on a size")


def gather(d: Draft) -> None:
    index = d.pick(lambda v: v.kind == "index" and len(v.shape) == 1)
    if index is None:
        return
    table = d.pick(lambda v: _is_fp(v) and len(v.shape) == 2 and v.shape[0] in (4, 12))
    if table is None:
        table = parameter(d, (12, 4))
    form = d.one_of(("{0}[{1}]", "torch.nn.functional.embedding({1}, {0})", "{0}.index_select(0, {1})"))
    d.let(form.format(table.name, index.name), (index.shape[0], table.shape[1]), table.dtype, "gather")


def in_place(d: Draft) -> None:
    value = d.pick(lambda v: _writable(v) and _is_fp(v))
    if value is None:
        return
    forms = ["{0}.add_(1)", "{0}.mul_(0.5)", "{0} += 2", "{0}.clamp_(-1, 1)", "{0}.zero_()", "{0}.fill_(0.25)"]
    if len(value.shape) >= 1 and isinstance(value.shape[-1], int) and value.shape[-1] >= 1:
        forms += ["{0}[..., 0] = 3.0", "{0}[..., :1].add_(1)", "{0}[..., -1] *= 0.5"]
    if _has_rows(value):
        forms += ["{0}[1:].mul_(2)", "{0}[:1] = 1.5", "{0}[: {0}.shape[0]].sub_(1)"]
    if len(value.shape) == 2:
        forms += ["{0}.t().mul_(0.5)"]
    forms += ["{0}.masked_fill_({0} > 1, 0.75)"]
    if not value.name.isidentifier():  # An item or attribute, which `+=` assigns as well: limits.md, rebound-buffer.
        forms.remove("{0} += 2")
    text = d.one_of(forms).format(value.name)
    d.line(text, "in-place", *(["in-place on a part"] if "[" in text else []))
    d.wrote(value)


def in_place_binary(d: Draft) -> None:
    value = d.pick(lambda v: _writable(v) and _is_fp(v))
    if value is None:
        return
    other = d.pick(lambda v: v.shape == value.shape and v.dtype == value.dtype and v.memory != value.memory)
    if other is None:
        return
    form = d.one_of(("{0}.add_({1})", "{0}.copy_({1})", "{0} += {1}", "torch.add({1}, 1, out={0})", "{0}[:] = {1}"))
    if "+=" in form and not value.name.isidentifier():
        form = "{0}.add_({1})"
    if "out=" in form and value.memory in {v.memory for v in d.values if v.origin != "made"}:
        form = "{0}.copy_({1})"  # Torch can't trace an out= argument that is an input in every version.
    d.line(form.format(value.name, other.name), "in-place")
    d.wrote(value)


# --- state -------------------------------------------------------------------------------------------


def parameter(d: Draft, shape: tuple[int, ...] = (4,)) -> Value:
    name = f"parameter{d.num_names}"
    d.num_names += 1
    d.init.append(f"self.{name} = nn.Parameter(torch.zeros{shape})")
    value = Value(f"self.{name}", shape, "float32", d.memory(), is_writable=False, origin="parameter")
    d.values.append(value)
    d.features.add("parameter")
    return value


def a_parameter(d: Draft) -> None:
    parameter(d, d.one_of(((4,), (12, 4), (4, 4))))


def buffer(d: Draft) -> None:
    name = f"buffer{d.num_names}"
    d.num_names += 1
    shape, dtype = d.one_of((((12, 4), "float32"), ((4,), "float32"), ((), "float32"), ((4,), "int64")))
    d.init.append(
        f"self.register_buffer({name!r}, ops.values(*{shape}, dtype=torch.{dtype}, seed={d.num_names})"
        f", persistent={d.flip()})"
    )
    d.values.append(Value(f"self.{name}", shape, dtype, d.memory(), origin="buffer"))
    d.features.add("buffer")


def stored(d: Draft) -> None:
    slots = d.pick(lambda v: v.kind == "slots")
    cache = d.pick(lambda v: v.shape == (12, 4) and v.dtype == "float32" and _writable(v))
    rows = d.pick(
        lambda v: v.shape == ("n", 4) and v.dtype == "float32" and (cache is None or v.memory != cache.memory)
    )
    if slots is None or cache is None or rows is None:
        return
    forms = ("{0}.index_copy_(0, {1}, {2})", "{0}[{1}] = {2}", "{0}.index_add_(0, {1}, {2})", "op")
    form = d.one_of(forms)
    if form == "op":
        d.ops["fuzz::store"] = None
        form = "torch.ops.fuzz.store({2}, {0}, {1})"
    d.line(form.format(cache.name, slots.name, rows.name), "index_copy_ into a cache")
    d.wrote(cache)


def submodule(d: Draft) -> None:
    value = d.pick(lambda v: v.dtype == "float32" and len(v.shape) >= 1 and v.shape[-1] == 4)
    if value is None:
        return
    kind = d.one_of(("Mlp", "Attend", "Counted"))
    known = [line.split()[0].removeprefix("self.") for line in d.init if f"ops.{kind}()" in line]
    if known and d.flip():
        name = known[0]
    else:
        name = f"{kind.lower()}{d.num_names}"
        d.init.append(f"self.{name} = ops.{kind}()")
    if kind == "Attend":
        d.ops["fuzz::attn"] = None
    if kind == "Counted":
        d.features.add("writes to buffer")
    d.let(f"self.{name}({value.name})", value.shape, "float32", "submodule")


# --- splitting ops ------------------------------------------------------------------------------------


def _call(d: Draft, name: str) -> str:
    d.ops[f"fuzz::{name}"] = None
    d.features.add(f"op {name}")
    return f"torch.ops.fuzz.{name}"


def op_fresh(d: Draft) -> None:
    value = d.pick(_is_fp)
    if value is None:
        return
    name = d.one_of(("fresh", "fresh", "checked"))
    if d.flip(6):
        d.line(f"{_call(d, name)}({value.name})", "op with an unused result")
    else:
        d.let(f"{_call(d, name)}({value.name})", value.shape, value.dtype)


def op_attn(d: Draft) -> None:
    q = d.pick(_is_fp)
    if q is None:
        return
    k, v = d.pick(_same_form(q)) or q, d.pick(_same_form(q)) or q
    out = d.pick(lambda o: _writable(o) and _same_form(q)(o)) if d.flip(3) else None
    if out is None:
        forms = ["torch.empty_like({0})", "torch.zeros_like({0})", "torch.empty({0}.shape, dtype={0}.dtype)"]
        out = d.let(d.one_of(forms).format(q.name), q.shape, q.dtype)
    else:
        d.features.add("op writes to what was there")
    args = f"{q.name}, {k.name}, {v.name}, {'out=' if d.flip(4) else ''}{out.name}"
    d.line(f"{_call(d, 'attn')}({args})", "op writes out")
    d.wrote(out)


def op_in_place(d: Draft) -> None:
    value = d.pick(lambda v: _writable(v) and _is_fp(v) and len(v.shape) >= 1)
    if value is None:
        return
    name = d.one_of(("double_", "bump_", "tail_"))
    if name == "tail_" and not (isinstance(value.shape[-1], int) and value.shape[-1] > 1):
        name = "double_"
    call = f"{_call(d, name)}({value.name}{_number(d) if name == 'bump_' else ''})"
    shape = (*value.shape[:-1], int(value.shape[-1]) - 1) if name == "tail_" else value.shape
    if d.flip(3):
        d.line(call, "op in place")
    else:
        d.let(call, shape, value.dtype, "op in place", of=value, kind=value.kind)
    d.wrote(value)


def _number(d: Draft) -> str:
    size = d.one_of([*d.sizes, "2"])
    if size != "2":
        d.features.add("op with a symbolic int")
    return f", {size}"


def op_pair(d: Draft) -> None:
    value = d.pick(_is_fp)
    if value is None:
        return
    form = d.one_of(("both", "both", "first", "second", "parts"))
    if form in ("first", "second"):
        d.let(f"{_call(d, 'pair')}({value.name})[{int(form == 'second')}]", value.shape, value.dtype, "unused result")
        return
    a, b = d.name(), d.name()
    d.line(
        f"{a}, {b} = {_call(d, 'pair')}({value.name})"
        if form == "both"
        else f"{a}, {b}, _ = {_call(d, 'parts')}({value.name}, 3)"
    )
    d.features.add("op with several results")
    d.values += [Value(a, value.shape, value.dtype, d.memory()), Value(b, value.shape, value.dtype, d.memory())]


def op_rotate(d: Draft) -> None:
    q = d.pick(lambda v: _writable(v) and _is_fp(v))
    if q is None:
        return
    k = d.pick(lambda v: _writable(v) and _is_fp(v) and v.memory != q.memory)
    if k is None:
        return
    call = f"{_call(d, 'rotate_')}({q.name}, {k.name})"
    d.wrote(q)
    d.wrote(k)
    if d.flip(3):
        d.line(call)
        return
    a, b = d.name(), d.name()
    d.line(f"{a}, {b} = {call}", "op in place")
    d.values += [replace(q, name=a), replace(k, name=b)]


def op_joined(d: Draft) -> None:
    value = d.pick(lambda v: _is_fp(v) and len(v.shape) >= 1)
    if value is None:
        return
    items = [value, *(d.pick(_same_form(value)) or value for _ in range(d.draw(st.integers(0, 2))))]
    bias = d.pick(lambda v: _is_fp(v) and len(v.shape) == 1 and v.shape[0] == value.shape[-1]) if d.flip() else None
    text = f"[{', '.join(item.name for item in items)}]"
    if bias is not None:
        text += f", {d.one_of(('', 'bias='))}{bias.name}"
    elif d.flip(3):
        text += ", None"
    if d.flip():
        text += ", scale=0.5"
    d.let(f"{_call(d, 'joined')}({text})", value.shape, value.dtype, "op with a list")


def op_shift(d: Draft) -> None:
    value = d.pick(_is_fp)
    if value is not None:
        keyword = ', name="down"' if d.flip() else ""
        d.let(f"{_call(d, 'shift')}({value.name}{_number(d)}{keyword})", value.shape, value.dtype)


def op_log(d: Draft) -> None:
    value = d.pick(_is_fp)
    count = d.pick(lambda v: _writable(v) and (value is None or v.memory != value.memory))
    if value is not None and count is not None:
        d.wrote(count)
        d.let(f"{_call(d, 'log')}({value.name}, {count.name})", value.shape, value.dtype, "op writes and returns")


def op_bump_all(d: Draft) -> None:
    a = d.pick(_writable)
    if a is None:
        return
    b = d.pick(lambda v: _writable(v) and v.memory != a.memory)
    d.wrote(a)
    d.line(f"{_call(d, 'bump_all')}([{', '.join(v.name for v in (a, b) if v is not None)}])", "op writes a list")
    if b is not None:
        d.wrote(b)


def op_fill(d: Draft) -> None:
    value = d.pick(_is_fp)
    if value is None:
        return
    out = d.let(f"torch.empty_like({value.name})", value.shape, value.dtype)
    text = f"{value.name}, {out.name}"
    if d.flip():
        extra = d.pick(lambda v: _writable(v) and _same_form(value)(v) and v.memory not in (value.memory, out.memory))
        if extra is not None:
            text += f", {d.one_of(('', 'extra='))}{extra.name}"
            d.wrote(extra)
    if d.flip(3):
        text += ", times=2"
    d.line(f"{_call(d, 'fill')}({text})", "op writes out")


def op_other(d: Draft) -> None:
    value = d.pick(lambda v: _is_fp(v) and len(v.shape) == 2)
    if value is None:
        return
    name = d.one_of(("narrow", "turned", "mix"))
    if name == "narrow" and not (isinstance(value.shape[1], int) and value.shape[1] >= 2):
        name = "mix"
    shape = (value.shape[0], 2) if name == "narrow" else value.shape
    d.let(f"{_call(d, name)}({value.name})", shape, value.dtype)


PLAIN = (unary, binary, view, in_place, linear, broadcast, matmul, reduce, norm, join, cast, copied, made, chunks)
PLAIN += (several, in_place_binary, compare, integers, gather, attribute, scalar_argument, size_read, size_used, branch)
PLAIN += (view, in_place, in_place_binary, size_read, size_used)
STATE = (a_parameter, buffer, buffer, stored, stored, submodule)
OPS = (op_fresh, op_attn, op_in_place, op_pair, op_rotate, op_joined, op_shift, op_log, op_bump_all, op_fill, op_other)
STATEMENTS = (None, *PLAIN, *STATE, *OPS, *OPS)
"""None: nothing is added, which is what a failing program shrinks to."""
ROW_BY_ROW = (None, unary, binary, broadcast, attribute, linear, norm, a_parameter, copied, cast, *[op_fresh] * 3)
"""Makes of rows what does not depend on other rows, most of the time, so that calls are padded."""

# --- inputs --------------------------------------------------------------------------------------------


def add_input(d: Draft, path: str, shape: Shape, dtype: str = "float32", kind: str = "plain") -> str:
    """Add a tensor argument, or a part of one; return the source of what it is given."""
    value = Value(path, shape, dtype, d.memory(), kind=kind, origin="input", is_writable=kind == "plain")
    d.values.append(value)
    d.paths[path] = value
    argument = path.partition("[")[0]
    named = {dim: size for dim, size in enumerate(shape) if isinstance(size, str)}
    if named:
        d.dims[argument] = named
    more = "".join([f", dtype={dtype!r}" if dtype != "float32" else "", f", kind={kind!r}" if kind != "plain" else ""])
    return f"Arg({', '.join(map(repr, shape))}{more})"


def add_inputs(d: Draft) -> None:
    shapes: tuple[Shape, ...] = (("n", 4), ("n", 4), ("n",), ("n", 2, 4), ("n", "m"), ("n", "m", 4), (4, "n"))
    shape = d.one_of(shapes)
    dtype = d.one_of(("float32", "float32", "float32", "float64", "bfloat16", "float16"))
    if "m" in shape:
        d.features.add("two named dims")
    if d.flip(3):  # First, so that ``x`` is what is picked most often.
        d.inputs["bias"] = add_input(d, "bias", (4,))
        d.features.add("input without rows")
    if d.flip(4):
        d.inputs["cache"] = add_input(d, "cache", (12, 4))
        d.features.add("cache")
    if d.flip(3):
        d.inputs["index"] = add_input(d, "index", ("n",), "int64", "index")
    if d.flip(3):
        d.inputs["slots"] = add_input(d, "slots", ("n",), "int64", "slots")
    if d.flip(3):
        kind = d.one_of(("dict", "list", "tuple", "deep"))
        forms = {
            "dict": ("{{'k': {}, 'v': {}}}", ("['k']", "['v']")),
            "list": ("[{}, {}]", ("[0]", "[1]")),
            "tuple": ("({}, {})", ("[0]", "[1]")),
            "deep": ("{{'a': [{}, None], 'b': ({}, 3)}}", ("['a'][0]", "['b'][0]")),
        }
        text, keys = forms[kind]
        rows = d.one_of((("n", 4), ("n",)))
        d.inputs["state"] = text.format(*(add_input(d, f"state{key}", rows) for key in keys))
        d.features.add("nested inputs")
    if d.flip(2):
        d.inputs["y"] = add_input(d, "y", shape, dtype)
        d.features.add("two alike inputs")
    if d.flip(6):
        d.inputs["maybe"] = "None"
        d.defaults["maybe"] = "None"
        d.features.add("None for an optional argument")
    d.inputs["x"] = add_input(d, "x", shape, dtype)


# --- results -------------------------------------------------------------------------------------------


def result(d: Draft) -> str:
    """Return the source of what the model returns."""
    kind = d.one_of(("one", "tuple", "dict", "list", "nested", "twice"))
    leaves = [leaf(d) for _ in range(1 if kind == "one" else d.draw(st.integers(1, 4)))]
    d.features.add(f"returns {kind}")
    if kind == "one":
        return leaves[0]
    if kind == "twice":
        leaves.append(leaves[0])
        d.features.add("a result twice")
    if kind in ("tuple", "twice"):
        return f"({', '.join(leaves)},)"
    if kind == "dict":
        return "{" + ", ".join(f"'r{i}': {leaf}" for i, leaf in enumerate(leaves)) + "}"
    if kind == "list":
        return f"[{', '.join(leaves)}]"
    rest = [leaf(d) if d.flip() else d.one_of(("None", "3", "'text'")) for _ in range(2)]
    return f"({leaves[0]}, {{'a': [{', '.join(leaves[1:])}], 'b': ({rest[0]}, {rest[1]})}})"


def leaf(d: Draft) -> str:
    if d.sizes and d.flip(6):
        d.features.add("returns a size")
        return d.one_of(d.sizes)
    value = d.pick(lambda _: True)
    assert value is not None
    if value.origin != "made":
        d.features.add(f"returns {value.origin} or a view of it")
    views = ["{0}"] * 4 + ["{0}.view_as({0})"]
    if len(value.shape) >= 1 and isinstance(value.shape[-1], int) and value.shape[-1] >= 1:
        views += ["{0}[..., :1]", "{0}[..., 0]"]
    if len(value.shape) >= 2:
        views += ["{0}.transpose(-1, -2)"]
    text = d.one_of(views)
    if text != "{0}":
        d.features.add("returns a view")
    return text.format(value.name)


# --- calls ---------------------------------------------------------------------------------------------

LAYOUTS = ("transposed", "sliced", "offset", "strided", "expanded")
SIZES = (1, 2, 3, 4, 5, 7, 9)


def calls(d: Draft) -> tuple[list[str], list[dict[str, int]]]:
    """Return the source of each call, and their sizes."""
    names = sorted({size for named in d.dims.values() for size in named.values()})
    pool = [d.one_of(SIZES) for _ in range(3)]
    basic: dict[str, str] = {}
    if d.flip(4):
        basic = {path: d.one_of(LAYOUTS) for path in d.paths if d.flip(2)}
    texts: list[str] = []
    sizes: list[dict[str, int]] = []
    for position in range(d.draw(st.integers(2, 7))):
        size = {name: 0 if d.flip(20) else d.one_of(pool) for name in names}
        given: list[str] = [f"sizes={size}", f"seed={position}"]
        layouts = dict(basic)
        if d.flip(8):
            layouts[d.one_of(list(d.paths))] = d.one_of(LAYOUTS)
            d.features.add("a layout that changes")
        if d.flip(8):
            layouts[d.one_of(list(d.paths))] = "offset"
        if layouts:
            given.append(f"layouts={layouts}")
            d.features.add("layouts")
        alike = [
            (a, b)
            for a in d.paths
            for b in d.paths
            if a < b
            and d.paths[a].shape == d.paths[b].shape
            and d.paths[a].dtype == d.paths[b].dtype
            and d.paths[a].kind == d.paths[b].kind
        ]
        if alike and d.flip(8):
            given.append(f"same={dict([d.one_of(alike)])}")
            d.features.add("one tensor for two arguments")
        if position:
            kept = tuple(path for path in d.paths if d.flip(5))
            if kept:
                given.append(f"held={kept}")
                d.features.add("a tensor kept between calls")
            fed = {path: d.draw(st.integers(0, 3)) for path in d.paths if d.flip(6) and d.paths[path].kind == "plain"}
            if fed:
                given.append(f"fed={fed}")
                d.features.add("a result fed back")
            changed = {"scale": 0.25, "k": 4, "flag": False, "mode": "down"}
            changed = {name: value for name, value in changed.items() if name in d.inputs and d.flip(12)}
            if changed:
                given.append(f"changed={changed}")
                d.features.add("a scalar that changes")
        if "op checked" in d.features and d.flip(8):
            given.append("large=True")
            d.features.add("an op that raises")
        texts.append(f"Call({', '.join(given)})")
        sizes.append(size)
    return texts, sizes


ATEN = (
    "aten::relu",
    "aten::tanh",
    "aten::linear",
    "aten::cat",
    "aten::add_",
    "aten::mul_",
    "aten::softmax",
    "aten::matmul",
)


def settings(d: Draft, sizes: list[dict[str, int]]) -> list[str]:
    """Return the lines of the settings."""
    named: list[str] = []
    for op in d.ops:
        if d.flip(6):
            d.features.add("an op of the program that is no cut")
            continue
        more = ""
        if d.flip(5):
            more += f", capturable={d.one_of((True, 3))}"
            d.features.add("a capturable op")
        if d.flip(4):
            more += ", direct=True"
        named.append(f"ops.splitting_op({op!r}{more})")
    if d.flip(5):
        aten = d.one_of(ATEN)
        named.append(repr(aten))
        d.features.add("an op of torch is a cut")
    given = [f"splitting_ops=({''.join(f'{name}, ' for name in named)})"]
    captured: list[Any] = []
    for size in sizes:
        key = size if len(size) > 1 else next(iter(size.values()), 1)
        if all(size.values()) and key not in captured and not d.flip(4):
            captured.append(key)
    ratio = d.one_of((2, 1, 4))
    numbers = [next(iter(size.values())) for size in sizes if len(size) == 1]
    if any(numbers) and ("row by row" in d.features or d.flip(4)):
        captured, ratio = [max(numbers)], 9
        d.features.add("one size, which others are padded to")
    given.append(f"capture_sizes={tuple(captured)}" if captured or d.flip() else "capture_sizes='auto'")
    if ratio != 2:
        given.append(f"max_padding_ratio={ratio}")
    if d.flip(3):
        given.append("on_failure='eager'")
        d.features.add("on_failure eager")
    if d.flip(8):
        given.append("check_parameters='always'")
    return [f"SETTINGS = dict({', '.join(given)})", f"AHEAD = {d.flip(4)}", f"INFERENCE_MODE = {d.flip(10)}"]


# --- the whole -----------------------------------------------------------------------------------------


@st.composite
def programs(draw: Callable[[st.SearchStrategy[Any]], Any], max_statements: int = MAX_STATEMENTS) -> str:
    """Draw the text of a program."""
    d = Draft(draw)
    add_inputs(d)
    statements = ROW_BY_ROW if d.flip(3) else STATEMENTS
    if statements is ROW_BY_ROW:
        d.features.add("row by row")
    for _ in range(draw(st.integers(1, max_statements))):
        statement = d.one_of(statements)
        if statement is not None:
            statement(d)
    returned = result(d)
    call_texts, sizes = calls(d)
    lines = settings(d, sizes)
    takes_self = any("self." in line for line in (*d.body, *d.init, returned))
    d.features.add("module" if takes_self else "function")
    order = [name for name in d.inputs if name not in d.defaults] + [name for name in d.inputs if name in d.defaults]
    parameters = [name if name not in d.defaults else f"{name}={d.defaults[name]}" for name in order]
    body = [*d.body, f"return {returned}"]
    return "\n".join(
        [
            "import torch",
            "from torch import nn",
            "",
            "import fuzz_ops as ops",
            "from fuzz_differ import Arg, Call",
            "",
            "",
            *(_module(d.init, parameters, body) if takes_self else _function(parameters, body)),
            "",
            "",
            f"INPUTS = {{{', '.join(f'{name!r}: {d.inputs[name]}' for name in order)}}}",
            f"DIMS = {d.dims}",
            *lines,
            "CALLS = [",
            *(f"    {text}," for text in call_texts),
            "]",
            f"FEATURES = {sorted(d.features)}",
            "",
        ]
    )


def _indented(lines: Iterable[str], by: int) -> list[str]:
    return [" " * by + line for line in lines]


def _module(init: Sequence[str], parameters: Sequence[str], body: Sequence[str]) -> list[str]:
    return [
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *_indented(init, 8),
        "",
        f"    def forward(self, {', '.join(parameters)}):",
        *_indented(body, 8),
        "",
        "",
        "def make():",
        "    return ops.settle(Model())",
    ]


def _function(parameters: Sequence[str], body: Sequence[str]) -> list[str]:
    return [
        f"def model({', '.join(parameters)}):",
        *_indented(body, 4),
        "",
        "",
        "def make():",
        "    return model",
    ]
