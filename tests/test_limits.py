"""Every row of ``docs/limits.md`` is true: the error has its words, and what it says to do works."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import capture_models
import piecework
from capture_models import reasons
from models import Linear, Stack, compiled
from piecework import (
    CompiledPiece,
    Limits,
    Piece,
    PieceworkError,
    PieceworkWarning,
    SplittingOp,
    hookimpl,
    testing,
)
from piecework.testing.emulated import stream

PAGE = Path(__file__).parent.parent / "docs" / "limits.md"
ops = torch.ops.models
more = torch.ops.limits


@dataclass(frozen=True)
class Row:
    """One limit, as the page has it."""

    id: str
    shown_by: str
    """A class of errors or warnings, or what tells of it."""
    words: tuple[str, ...]


def rows_of_page() -> list[Row]:
    """Return the rows of all tables, headers aside."""
    found: list[Row] = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            assert len(cells) == 4 and all(cells), line
            names, words = re.findall(r"`([^`]+)`", cells[2]), re.findall(r'"([^"]+)"', cells[2])
            assert names and words, line
            found.append(Row(cells[0].strip("`"), names[0], tuple(words)))
    return found


ROWS = rows_of_page()
Seen = tuple[str, str]
"""What told of a limit, and its text."""
PROGRAMS: dict[str, Callable[[], Seen]] = {}


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_limit_is_shown_as_the_page_says(row: Row, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    shown_by, text = PROGRAMS[row.id]()
    assert shown_by == row.shown_by
    pattern = ".*".join(re.escape(words) for words in row.words)
    assert re.search(pattern, text, re.DOTALL), text


def test_each_row_has_a_program_and_each_program_a_row() -> None:
    assert [row.id for row in ROWS] == list(PROGRAMS)


# --- what programs are made of --------------------------------------------------------------------


def shows(row_id: str) -> Callable[[Callable[[], Seen]], Callable[[], Seen]]:
    """Enter a program that shows a limit, and then what to do about it."""

    def enter(program: Callable[[], Seen]) -> Callable[[], Seen]:
        assert row_id not in PROGRAMS
        PROGRAMS[row_id] = program
        return program

    return enter


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Seen:
    with pytest.raises(PieceworkError) as caught:
        call(*args, **kwargs)
    return type(caught.value).__name__, str(caught.value)


def warning_of(call: Callable[..., Any], *args: Any) -> Seen:
    with pytest.warns(PieceworkWarning) as caught:
        call(*args)
    return "PieceworkWarning", "\n".join(str(one.message) for one in caught)


def log_of(call: Callable[..., Any], *args: Any) -> Seen:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # pyright: ignore[reportAttributeAccessIssue]
    logger = logging.getLogger("piecework")
    logger.addHandler(handler)
    try:
        call(*args)
    finally:
        logger.removeHandler(handler)
    return "piecework", "\n".join(records)


def report_of(call: Any) -> Seen:
    return "piecework.report", str(piecework.report(call))


def verified(call: Any, inputs: Any, size: int = 3) -> Seen:
    found = piecework.verify(call, inputs, [size])
    assert not found.is_right
    return "piecework.verify", str(found)


def departs_unseen(call: Any, original: Callable[..., Any], *args: Any) -> None:
    """Check that a call answers otherwise than eager, and that nothing is said."""
    found, expected = call(*args), original(*args)
    assert found.dtype != expected.dtype or not torch.equal(found, expected)


def same(call: Callable[..., Any], original: Callable[..., Any], *args: Any) -> None:
    torch.testing.assert_close(call(*args), original(*args))


def cap(target: Any, dims: Any = None, **settings: Any) -> Any:
    """Compile with eager pieces that are captured at three rows, and never padded unless said otherwise."""
    return capture_models.compiled(target, dims, **{"capture_sizes": (3,), **settings})


def rows(num: int, width: int = 6) -> torch.Tensor:
    return torch.randn(num, width)


def plus(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def first(call: Any, *args: Any) -> Any:
    """Return a compiled model after its first call."""
    call(*args)
    return call


@contextmanager
def frozen() -> Iterator[None]:
    piecework.freeze()
    try:
        yield
    finally:
        piecework.reset()


library = torch.library.Library("limits", "DEF")
_kept = torch.zeros(3, 6)


def _define(name: str, real: Callable[..., Any], form: str = "(Tensor x) -> Tensor") -> None:
    library.define(f"{name}{form}")
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"limits::{name}", lambda x: None if "()" in form else torch.empty_like(x), lib=library)


def _writes(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1) * 3


_define("keeps", lambda x: _kept.copy_(x * 3))
_define("writes", _writes)
_define("strided", lambda x: (x * 3).t().contiguous().t())
_define("longer", lambda x: torch.cat([x, x]))
_define("silent", lambda x: None, "(Tensor x) -> ()")
_define("unsafe", lambda x: x * 2)
library.define("no_fake(Tensor x) -> Tensor")
library.impl("no_fake", lambda x: x + 1, "CPU")
library.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
library.impl("tagged", lambda x: x * 2, "CompositeExplicitAutograd")
torch.library.register_fake("limits::tagged", torch.empty_like, lib=library)
OFFSET = 1.0


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# --- tracing --------------------------------------------------------------------------------------


@shows("data-branch")
def data_branch() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1

    same(compiled(lambda x: torch.where(x.sum() > 0, x + 1, x - 1), dims={"x": 0}), f, rows(3))
    return error_of(compiled(f), rows(3))


@shows("graph-break")
def graph_break() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        print(x.shape)
        return x + 1

    same(compiled(f, level=1), f, rows(3))
    return error_of(compiled(f), rows(3))


@shows("numpy")
def numpy() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() + 1)

    same(compiled(plus), f, rows(3))
    return error_of(compiled(f), rows(3))


class Counting(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x + 1


class CountingInBuffer(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + 1


@shows("strided-out")
def strided_out() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(x.shape[0], 8)
        torch.add(x, 1, out=y[:, :6])
        return y

    def copies(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(x.shape[0], 8)
        y[:, :6].copy_(x + 1)
        return y

    same(compiled(copies), f, rows(3))
    return error_of(compiled(f), rows(3))


@shows("rebound-buffer")
def rebound_buffer() -> Seen:
    class Assigning(CountingInBuffer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x + 1

    return error_of(compiled(Assigning()), rows(3))


@shows("python-state")
def python_state() -> Seen:
    model = CountingInBuffer()
    compiled(model)(rows(3))
    assert model.count == 1
    return error_of(compiled(Counting()), rows(3))


@shows("appended-cache")
def appended_cache() -> Seen:
    def f(x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        cache.append(x + 1)
        return cache[-1] * 2

    def written(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[0].copy_((x + 1).sum(0))
        return x + cache[0]

    same(compiled(written, dims={"x": 0}), written, rows(3), rows(2))
    return error_of(compiled(f, dims={"x": 0}), rows(3), [])


@shows("nothing-of-torch")
def nothing_of_torch() -> Seen:
    return error_of(compiled(lambda x: 3, dims={"x": 0}), rows(3))


@shows("hidden-result")
def hidden_result() -> Seen:
    class Holder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    same(compiled(lambda x: {"tensor": x + 1}, dims={"x": 0}), lambda x: {"tensor": x + 1}, rows(3))
    return error_of(compiled(lambda x: Holder(x + 1), dims={"x": 0}), rows(3))


@shows("size-fraction")
def size_fraction() -> Seen:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x + 1, x.shape[0] // 2

    same(compiled(f), f, rows(4))
    return error_of(compiled(lambda x: (x + 1, x.shape[0] / 2), dims={"x": 0}), rows(4))


@shows("own-generator")
def own_generator() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=torch.Generator())

    compiled(lambda x: x + torch.randn_like(x), dims={"x": 0})(rows(3))
    return error_of(compiled(f), rows(3))


@shows("later-result")
def later_result() -> Seen:
    def f(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x + 1

    return error_of(compiled, f)


@shows("scripted")
def scripted() -> Seen:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.script(nn.ReLU())
    same(compiled(nn.ReLU(), dims={"input": 0}), module, rows(3))
    return error_of(compiled, module)


@shows("jit-trace")
def jit_trace() -> Seen:
    call = first(compiled(plus), rows(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        same(torch.jit.trace(plus, (rows(3),)), plus, rows(3))  # pyright: ignore[reportArgumentType]
        return error_of(torch.jit.trace, call, (rows(3),))


@shows("no-fake")
def no_fake() -> Seen:
    same(compiled(lambda x: ops.scale3(x) * 2, dims={"x": 0}), lambda x: x * 6, rows(3))
    text = error_of(compiled(lambda x: by_decorator(x) * 2, dims={"x": 0}), rows(3))[1]
    assert "an op has no fake implementation, at " in text and "test_limits.py" in text
    return error_of(compiled(lambda x: more.no_fake(x) * 2, dims={"x": 0}), rows(3))


@torch.library.custom_op("limits::by_decorator", mutates_args=())
def by_decorator(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@shows("frozen-trace")
def frozen_trace() -> Seen:
    before = first(compiled(plus), rows(3))
    with frozen():
        same(before, plus, rows(3))
        return error_of(compiled(plus), rows(3))


# --- arguments and sizes --------------------------------------------------------------------------


@shows("object-argument")
def object_argument() -> Seen:
    class Cache:
        keys = torch.ones(6)

    same(compiled(lambda x, keys: x + keys, dims={"x": 0}), torch.add, rows(3), Cache.keys)
    return error_of(compiled(lambda x, cache: x + cache.keys, dims={"x": 0}), rows(3), Cache())


@shows("odd-key")
def odd_key() -> Seen:
    call = compiled(lambda x, d: x + 1, dims={"x": 0})
    seen = error_of(call, rows(3), {(0, 1): 1})
    call(rows(3), {"0,1": 1})
    return seen


@shows("other-scalar")
def other_scalar() -> Seen:
    def f(x: torch.Tensor, k: Any) -> torch.Tensor:
        return x * k

    tensor = compiled(f, dims={"x": 0})
    for k in (2.0, 3.0):
        same(tensor, f, rows(3), torch.tensor(k))
    return error_of(first(compiled(f, dims={"x": 0}), rows(3), 2), rows(3), 3)


@shows("other-tree")
def other_tree() -> Seen:
    def f(x: torch.Tensor, d: dict[str, Any]) -> torch.Tensor:
        return x + sum(d.values())

    call = first(compiled(f, dims={"x": 0}), rows(3), {"a": rows(1)})
    seen = error_of(call, rows(3), {"a": rows(1), "b": rows(1)})
    same(compiled(f, dims={"x": 0}), f, rows(3), {"a": rows(1), "b": rows(1)})
    return seen


@shows("static-dim")
def static_dim() -> Seen:
    call = first(compiled(plus), rows(3))
    named = first(compiled(plus, dims={"x": {0: "rows", 1: "width"}}), rows(3, 6))
    same(named, plus, rows(3, 7))
    return error_of(call, rows(3, 7))


@shows("pinned-dim")
def pinned_dim() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.view(4, 6).sum(0)

    def mended(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 6).sum(0)

    same(compiled(mended), mended, rows(5))
    return error_of(compiled(f), rows(4))


@shows("size-branch")
def size_branch() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 4 else x - 1

    call = first(compiled(f), rows(6))
    seen = error_of(call, rows(2))
    piecework.release(call)
    same(call, f, rows(2))
    return seen


@shows("size-one")
def size_one() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.squeeze() + 1

    def mended(x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(-1) + 1

    call = compiled(mended)
    for num in (3, 1):
        same(call, mended, rows(num, 1))
    return error_of(first(compiled(f), rows(3, 1)), rows(1, 1))


@shows("equal-names")
def equal_names() -> Seen:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum(0) + y.sum(0)

    same(compiled(f, dims={"x": {0: "a"}, "y": {0: "b"}}), f, rows(3), rows(4))
    return error_of(compiled(f), rows(3), rows(4))


@shows("linked-dims")
def linked_dims() -> Seen:
    def f(x: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x + ((starts[1:] - starts[:-1]) * weights).sum()

    dims = {"x": {0: "rows"}, "starts": {0: "starts"}, "weights": {0: "sequences"}}
    call = compiled(f, dims=dims)
    for num in (3, 1):
        same(call, f, rows(5), torch.rand(num + 1), torch.rand(num))
    return error_of(compiled(f, dims=dims), rows(3), torch.rand(4), torch.rand(3))


@shows("zero-rows")
def zero_rows() -> Seen:
    call = first(compiled(plus), rows(3))
    same(call, plus, rows(0))
    return report_of(call)


# --- layouts, dtypes and kinds of tensors ----------------------------------------------------------


@shows("other-dtype")
def other_dtype() -> Seen:
    call = first(compiled(plus), rows(3))
    same(call, plus, rows(3).double().float())
    return error_of(call, rows(3).double())


@shows("other-layout")
def other_layout() -> Seen:
    call = first(compiled(plus), rows(3))
    same(call, plus, rows(6, 3).t().contiguous())
    return error_of(call, rows(6, 3).t())


@shows("other-device")
def other_device() -> Seen:
    return error_of(first(compiled(plus), rows(3)), rows(3).to("meta"))


@shows("subclass")
def subclass() -> Seen:
    class Named(torch.Tensor):
        pass

    same(compiled(plus), plus, rows(3).as_subclass(Named).as_subclass(torch.Tensor))
    return error_of(compiled(plus), rows(3).as_subclass(Named))


@shows("sparse")
def sparse() -> Seen:
    same(compiled(plus), plus, rows(3).to_sparse().to_dense())
    return error_of(compiled(plus), rows(3).to_sparse())


@shows("nested")
def nested() -> Seen:
    def f(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x + lengths.sum()

    same(compiled(f, dims={"x": 0}), f, rows(5), torch.tensor([2, 3]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        given = torch.nested.nested_tensor([rows(2), rows(3)])
    return error_of(first(compiled(plus), rows(3)), given)


@shows("lazy-bits")
def lazy_bits() -> Seen:
    x = torch.randn(3, 4, dtype=torch.complex64)
    same(compiled(plus), plus, x.conj().resolve_conj())
    return error_of(compiled(plus), x.conj())


@shows("sparse-weight")
def sparse_weight() -> Seen:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(6).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight.to_dense()[0]

    return error_of(compiled(Model()), rows(3))


@shows("shared-arguments")
def shared_arguments() -> Seen:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + y

    call, x = first(compiled(f), rows(3), rows(3)), rows(3)
    seen = error_of(call, x, x)
    same(lambda: call(x.clone(), x), lambda: f(x.clone(), x))
    return seen


# --- the state of the model ------------------------------------------------------------------------


@shows("changed-attribute")
def changed_attribute() -> Seen:
    model = Linear()
    call = first(compiled(model), rows(3))
    model.scale = 3.0
    seen = error_of(call, rows(3))
    piecework.release(call)
    same(call, model, rows(3))
    return seen


@shows("train-eval")
def train_eval() -> Seen:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout()).eval()
    call = first(compiled(model, dims={"input": 0}), rows(3))
    model.train()
    seen = error_of(call, rows(3))
    same(call, model.eval(), rows(3))
    return seen


@shows("added-hook")
def added_hook() -> Seen:
    model = Linear()
    call = first(compiled(model), rows(3))
    hook = model.linear.register_forward_hook(lambda *given: given[2] * 2)
    seen = error_of(call, rows(3))
    hook.remove()
    same(call, model, rows(3))
    return seen


@shows("removed-hook")
def removed_hook() -> Seen:
    model = Linear()
    hook = model.linear.register_forward_hook(lambda *given: given[2] * 2)
    call = first(compiled(model), rows(3))
    same(call, model, rows(3))
    hook.remove()
    num_calls = piecework.report(call).num_calls_for_all_addresses

    def calls() -> None:
        for _ in range(num_calls):
            call(rows(3))

    return error_of(calls)


@shows("other-weights")
def other_weights() -> Seen:
    model = Linear()
    call = first(compiled(model), rows(3))
    model.double()
    seen = error_of(call, rows(3))
    piecework.release(call)
    same(call, model, rows(3).double())
    return seen


@shows("tied-later")
def tied_later() -> Seen:
    class Model(nn.Module):
        a: torch.Tensor
        b: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(6))
            self.register_buffer("b", torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.a.add_(1)
            return x + self.b

    model = Model()
    call = first(compiled(model), rows(3))
    model.b = model.a
    seen = error_of(call, rows(3))
    piecework.release(call)
    torch.testing.assert_close(call(torch.zeros(1, 6)), model.a.expand(1, 6))
    return seen


@shows("functional-call")
def functional_call() -> Seen:
    model = Linear()
    call = first(compiled(model), rows(3))
    weight, x = torch.zeros(6, 6), rows(3)
    functional = torch.func.functional_call
    same(
        lambda: functional(call, {"linear.weight": nn.Parameter(weight)}, (x,)),
        lambda: functional(model, {"linear.weight": weight}, (x,)),
    )
    return error_of(functional, call, {"linear.weight": weight}, (x,))


@shows("dynamo-reset")
def dynamo_reset() -> Seen:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout())
    call = first(compiled(model, dims={"input": 0}), rows(3))
    torch._dynamo.reset()
    model.eval()
    seen = error_of(call, rows(3))
    piecework.release(call)
    same(call, model, rows(3))
    return seen


@shows("inner-methods")
def inner_methods() -> Seen:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

        def generate(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward(x)

    call = compiled(Model())
    call.generate(rows(3))
    seen = error_of(piecework.verify_assumptions, call)
    steps = first(compiled(Model().generate), rows(3))
    piecework.verify_assumptions(steps)
    return seen


# --- splitting --------------------------------------------------------------------------------------


@shows("cut-autocast")
def cut_autocast() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ops.scale3(x @ x.t()) @ x

    def around(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x @ x.t()) @ x

    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(compiled(around), around, rows(3))
    return error_of(compiled(f), rows(3))


@shows("cut-checkpoint")
def cut_checkpoint() -> Seen:
    def f(x: torch.Tensor) -> Any:
        return checkpoint(lambda y: ops.scale3(y + 1), x, use_reentrant=False)

    with torch.enable_grad():
        return error_of(compiled(f), rows(3))


@shows("cut-branch")
def cut_branch() -> Seen:
    def f(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: ops.scale3(x), lambda x: x - 1, (x,))

    def mended(x: torch.Tensor) -> Any:
        return torch.where(x.sum() > 0, ops.scale3(x), x - 1)

    same(compiled(mended), mended, rows(3))
    return error_of(compiled(f), rows(3))


@shows("cut-vmap")
def cut_vmap() -> Seen:
    def f(x: torch.Tensor) -> Any:
        return torch.vmap(lambda y: torch.relu(y) + 1)(x)

    same(compiled(f), f, rows(3))
    return error_of(compiled(f, splitting_ops=("aten::relu",)), rows(3))


@shows("cut-derivative")
def cut_derivative() -> Seen:
    vjp: Any = torch.func.vjp

    def f(x: torch.Tensor) -> Any:
        y, pull_back = vjp(torch.sin, x)
        return pull_back(ops.scale3(y))[0]

    def mended(x: torch.Tensor) -> Any:
        y, pull_back = vjp(torch.sin, x)
        return pull_back(torch.ones_like(y))[0] * ops.scale3(y)

    same(compiled(mended), mended, rows(3))
    return error_of(compiled(f), rows(3))


@shows("view-op")
def view_op() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return capture_models.more.tail_view(x) + 1

    capture = torch.library.Library("capture", "FRAGMENT")
    capture.define("tail_view(Tensor(a) x) -> Tensor(a)")
    capture.impl("tail_view", lambda x: x[:, 1:], "CompositeExplicitAutograd")
    torch.library.register_fake("capture::tail_view", lambda x: x[:, 1:], lib=capture)
    return error_of(compiled(f, splitting_ops=("capture::tail_view",)), rows(3))


@shows("shape-in-place")
def shape_in_place() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.unsqueeze_(0)
        return ops.scale3(y)

    def mended(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3((x + 1).unsqueeze(0))

    same(compiled(mended), mended, rows(3))
    return error_of(compiled(f), rows(3))


@shows("decomposed-op")
def decomposed_op() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, x.new_ones(6, 6))

    same(compiled(f, splitting_ops=("aten::linear",)), f, rows(3))
    return error_of(compiled(f, splitting_ops=("aten::mm",)), rows(3))


# --- capture and memory -----------------------------------------------------------------------------


@shows("host-sync")
def host_sync() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    def mended(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum()

    same(cap(mended), mended, rows(3))
    return error_of(cap(f), rows(3))


@shows("host-sync-unasked")
def host_sync_unasked() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    call = cap(f, capture_sizes="auto")
    for _ in range(2):
        same(call, f, rows(3))
    return warning_of(same, call, f, rows(3))


@shows("data-size")
def data_size() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.nonzero() + 1

    same(cap(f, capture_sizes=()), f, rows(3))
    return error_of(cap(f), rows(3))


@shows("op-data-size")
def op_data_size() -> Seen:
    def f(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return capture_models.more.log(x + 1, count) * 2

    settings: dict[str, Any] = {"splitting_ops": ("capture::log",)}
    same(cap(f, capture_sizes=(), **settings), f, rows(3), torch.zeros(1))
    return error_of(cap(f, **settings), rows(3), torch.zeros(1))


@shows("unsafe-op")
def unsafe_op() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(more.tagged(x + 1)) * 2

    call = cap(f)
    same(call, f, rows(3))
    seen = report_of(call)
    better = cap(f, splitting_ops=("limits::tagged", "models::scale3"))
    same(better, f, rows(3))
    assert "tagged" not in report_of(better)[1]
    return seen


@shows("other-devices")
def other_devices() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x + torch.ones(1, device="meta").shape[0]) + 1

    call = cap(f)
    same(call, f, rows(3))
    return report_of(call)


@shows("no-capturer")
def no_capturer() -> Seen:
    return error_of(piecework.capture, compiled(plus, capturer="none"), [3], (rows(3),))


@shows("no-pieces")
def no_pieces() -> Seen:
    call = cap(lambda x: ops.scale3(x))
    return log_of(call, rows(3))


@shows("nested-call")
def nested_call() -> Seen:
    inner = first(cap(plus), rows(3))

    def implementation(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    op = SplittingOp("models::scale3", implementation=implementation)
    outer = cap(lambda x: ops.scale3(x + 1) * 2, splitting_ops=(op,))
    same(outer, lambda x: (x + 2) * 2, rows(3))
    return report_of(inner)


@shows("capture-inside")
def capture_inside() -> Seen:
    inner = cap(plus)

    def implementation(x: torch.Tensor) -> torch.Tensor:
        piecework.capture(inner, [3], (x,))
        return x * 3

    op = SplittingOp("models::scale3", implementation=implementation)
    seen = error_of(cap(lambda x: ops.scale3(x + 1) * 2, splitting_ops=(op,)), rows(3))
    piecework.capture(inner, [3], (rows(3),))
    return seen


@shows("recorded-stream")
def recorded_stream() -> Seen:
    call = first(cap(plus), rows(3))
    with stream("side", is_recorded=True):
        same(call, plus, rows(3))
    return report_of(call)


@shows("busy-pool")
def busy_pool() -> Seen:
    is_inside, may_go = threading.Event(), threading.Event()

    def implementation(x: torch.Tensor) -> torch.Tensor:
        is_inside.set()
        may_go.wait(10)
        return x * 3

    op = SplittingOp("models::scale3", implementation=implementation)
    waits, other, x = cap(lambda x: ops.scale3(x + 1) * 2, splitting_ops=(op,)), first(cap(plus), rows(3)), rows(3)

    def call() -> torch.Tensor:
        with torch.no_grad():
            return waits(x)

    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(call)
        assert is_inside.wait(10)
        same(other, plus, x)
        may_go.set()
        torch.testing.assert_close(result.result(), (x + 1) * 6)
    return report_of(other)


@shows("stale-input")
def stale_input() -> Seen:
    def f(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return x + cache.sum()

    call, cache = cap(f, {"x": 0}), rows(2)
    same(call, f, rows(3), cache)
    with frozen():
        same(call, f, rows(3), cache)
        return error_of(call, rows(3), rows(2))


@shows("stale-weight")
def stale_weight() -> Seen:
    model = Linear()
    call = first(cap(model), rows(3))
    with frozen():
        model.linear.weight.copy_(torch.ones(6, 6))
        same(call, model, rows(3))
        model.linear.weight = nn.Parameter(torch.zeros(6, 6))
        return error_of(call, rows(3))


@shows("frozen-size")
def frozen_size() -> Seen:
    call = first(cap(plus), rows(5))
    with frozen():
        same(call, plus, rows(3))
        return report_of(call)


@shows("not-padded")
def not_padded() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)

    call = first(cap(f, max_padding_ratio=2), rows(3))
    same(call, f, rows(2))
    return report_of(call)


@shows("not-padded-op")
def not_padded_op() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x + 1) * 2

    declared = SplittingOp("models::scale3", rows_independent=True)
    call = first(cap(f, max_padding_ratio=2, splitting_ops=(declared,)), rows(3))
    same(call, f, rows(2))
    assert not reasons(call, 2)
    call = first(cap(f, max_padding_ratio=2), rows(3))
    same(call, f, rows(2))
    return report_of(call)


@shows("not-padded-write")
def not_padded_write() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2

    call = first(cap(f, max_padding_ratio=2), rows(3))
    same(lambda x: call(x.clone()), lambda x: f(x.clone()), rows(2))
    return report_of(call)


@shows("padding-ratio")
def padding_ratio() -> Seen:
    call = first(cap(plus, max_padding_ratio=2, capture_sizes=(9,)), rows(9))
    same(call, plus, rows(3))
    wide = first(cap(plus, max_padding_ratio=3, capture_sizes=(9,)), rows(9))
    same(wide, plus, rows(3))
    assert not reasons(wide, 3)
    return report_of(call)


@shows("budget")
def budget() -> Seen:
    call = cap(lambda x: x @ x.t(), capture_sizes=(3, 64), max_capture_bytes=70_000)
    call(rows(3))
    call(rows(64))
    return report_of(call)


@shows("moving-input")
def moving_input() -> Seen:
    def f(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return x + cache.sum()

    call = cap(f, {"x": 0})
    return log_of(lambda: [same(call, f, rows(3), rows(2)) for _ in range(5)])


@shows("small-static-input")
def small_static_input() -> Seen:
    call = cap(plus, capture_sizes=(), static_inputs=("x",))
    piecework.capture(call, [3], (rows(8),))
    return error_of(piecework.capture, call, [16], (rows(8),))


@shows("lent-result")
def lent_result() -> Seen:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    lender, borrower = cap(plus, static_outputs=True), cap(double)
    result = lender(rows(3))
    same(borrower, double, result)
    seen = report_of(borrower)
    same(borrower, double, result.clone())
    return seen


# --- ops and plugins --------------------------------------------------------------------------------


@shows("undeclared-op")
def undeclared_op() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        more.silent(x)
        return x + 1

    same(compiled(f, splitting_ops=("limits::silent",)), f, rows(3))
    return warning_of(compiled(f), rows(3))


@shows("wrong-fake")
def wrong_fake() -> Seen:
    return error_of(cap(lambda x: more.longer(x + 1) * 2, splitting_ops=("limits::longer",)), rows(3))


class Doubling:
    """A piece compiler whose code gives another dtype, or wrong numbers."""

    name = "doubling"

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.change = change

    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        return CompiledPiece(lambda *inputs: tuple(self.change(one) for one in piece.graph.forward(*inputs)))


@shows("wrong-piece")
def wrong_piece() -> Seen:
    with testing.plugins(Doubling(torch.Tensor.double)):
        same(compiled(plus), plus, rows(3))
        return error_of(compiled(plus, piece_compiler=None), rows(3))


@shows("limit-on-dim")
def limit_on_dim() -> Seen:
    class Shifted(piecework.CustomOp, op_name="limits_shifted"):
        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

        @Limits(sizes={0: (1, 8)})
        def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    call = first(compiled(Shifted(), custom_ops=("+limits_shifted",)), rows(3))
    wide = first(compiled(Shifted(), dims={"x": {1: "width"}}, custom_ops=("+limits_shifted",)), rows(3))
    assert "forward_cpu, 1 place" in report_of(wide)[1]
    return report_of(call)


# --- gradients, modes and threads -------------------------------------------------------------------


@shows("backward")
def backward() -> Seen:
    model = Linear()
    with torch.enable_grad():
        model(rows(3)).sum().backward()
        return error_of(compiled(model)(rows(3)).sum().backward)


@shows("forward-mode")
def forward_mode() -> Seen:
    with torch.enable_grad(), forward_ad.dual_level():
        x = forward_ad.make_dual(rows(3), rows(3))
        assert forward_ad.unpack_dual(plus(x)).tangent is not None
        return error_of(first(compiled(plus), rows(3)), x)


@shows("func-transforms")
def func_transforms() -> Seen:
    call, x = first(compiled(plus), rows(3)), torch.randn(2, 3, 6)
    inside = compiled(lambda x: torch.vmap(plus)(x), dims={"x": {1: "rows"}})
    same(inside, torch.vmap(plus), x)
    return error_of(torch.vmap(call), x)


@shows("other-autocast")
def other_autocast() -> Seen:
    call = first(compiled(plus), rows(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(compiled(plus), plus, rows(3))
        return error_of(call, rows(3))


@shows("grad-mode")
def grad_mode() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x - 1 if torch.is_grad_enabled() else x + 1

    call = first(compiled(f), rows(3))
    same(call, f, rows(3))
    with torch.enable_grad():
        return error_of(call, rows(3))


@shows("inference-mode")
def inference_mode() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x - 1 if torch.is_inference_mode_enabled() else x + 1

    return error_of(compiled(f), rows(3))


# --- noticed only when asked ------------------------------------------------------------------------


def assumed(model: Any, change: Callable[[Any], Any]) -> Seen:
    """Show that calls pass by a change, that verify_assumptions finds it, and that a release takes it in."""
    call, x = first(compiled(model, dims={"x": 0}), rows(3)), rows(3)
    piecework.verify_assumptions(call)
    undo = change(model)
    try:
        departs_unseen(call, model, x)
        seen = error_of(piecework.verify_assumptions, call)
        piecework.release(call)
        same(call, model, x)
    finally:
        if undo is not None:
            undo()
    return seen


class Helped(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.linear(x)) + OFFSET * self.scale


def _patching(name: str, value: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        before = globals()[name]
        globals()[name] = value
        return lambda: globals().update({name: before})

    return change


@shows("rebound-global")
def rebound_global() -> Seen:
    return assumed(Helped(), _patching("OFFSET", 5.0))


@shows("patched-function")
def patched_function() -> Seen:
    return assumed(Helped(), _patching("helper", lambda x: x * 9))


@shows("hook-of-all")
def hook_of_all() -> Seen:
    register = nn.modules.module.register_module_forward_hook
    return assumed(Linear(), lambda model: register(lambda *given: given[2] * 2).remove)


@shows("dict-write")
def dict_write() -> Seen:
    return assumed(Linear(), lambda model: vars(model).update(scale=7.0))


@shows("class-attribute")
def class_attribute() -> Seen:
    class Model(nn.Module):
        scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    def change(model: Any) -> None:
        Model.scale = 3.0

    return assumed(Model(), change)


@shows("default-dtype")
def default_dtype() -> Seen:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.get_default_dtype())

    def change(model: Any) -> Callable[[], None]:
        torch.set_default_dtype(torch.float64)
        return lambda: torch.set_default_dtype(torch.float32)

    return assumed(Model(), change)


@shows("function-mode")
def function_mode() -> Seen:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double() if torch.ones(1).device.type == "meta" else x + 1

    def change(model: Any) -> Callable[[], None]:
        torch.set_default_device("meta")
        return lambda: torch.set_default_device(None)

    return assumed(Model(), change)


@shows("moved-storage")
def moved_storage() -> Seen:
    model = Stack(3)  # Six addresses, of which a call compares four.
    call, x = first(cap(model), rows(3)), rows(3)
    call(x)  # After a capture, one call looks at all addresses.
    model.layers[2].weight.data = torch.zeros(6, 6)
    departs_unseen(call, model, x)
    seen = "piecework.report", repr(piecework.report(call))
    for _ in range(piecework.report(call).num_calls_for_all_addresses):
        call(x)
    same(call, model, x)
    always = first(cap(model, check_parameters="always"), x)
    model.layers[2].weight.data = torch.ones(6, 6)
    same(always, model, x)
    return seen


@shows("asks-of-tensor")
def asks_of_tensor() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if x.requires_grad else 0)

    call, x = compiled(f), rows(3).requires_grad_()
    departs_unseen(call, f, x)
    return verified(call, (x,))


@shows("same-object")
def same_object() -> Seen:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + (1 if y is x else 0)

    call, x = compiled(f), rows(3)
    departs_unseen(call, f, x, x)
    return verified(call, lambda size: (x, x))


@shows("op-writes")
def op_writes() -> Seen:
    call = first(compiled(lambda x: more.writes(x + 1) * 2, dims={"x": 0}, splitting_ops=("limits::writes",)), rows(3))
    return verified(call, (rows(3),))


@shows("op-strides")
def op_strides() -> Seen:
    call = first(
        compiled(lambda x: more.strided(x + 1) * 2, dims={"x": 0}, splitting_ops=("limits::strided",)), rows(3)
    )
    return verified(call, (rows(3),))


@shows("op-keeps")
def op_keeps() -> Seen:
    def f(x: torch.Tensor) -> torch.Tensor:
        return more.keeps(more.keeps(x + 1) * 2) - 1

    call = first(compiled(f, splitting_ops=("limits::keeps",)), rows(3))
    return verified(call, (rows(3),))


@shows("op-implementation")
def op_implementation() -> Seen:
    op = SplittingOp("models::scale3", implementation=lambda x: x * 4)
    call = first(compiled(lambda x: ops.scale3(x + 1) * 2, dims={"x": 0}, splitting_ops=(op,)), rows(3))
    return verified(call, (rows(3),))


@shows("wrong-numbers")
def wrong_numbers() -> Seen:
    with testing.plugins(Doubling(lambda one: one * 2)):
        call = first(compiled(plus, piece_compiler=None), rows(3))
        return verified(call, (rows(3),))
