"""The ways to run one model, each built on demand: those of Piecework, their bare loops, and the peers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.config import CompilationConfig
from piecework.pieces import SplittingOp
from piecework.plugins import plugin_manager
from piecework.pool import Pool, pool_of
from piecework.tools.bench.captured import CapturedModel, UncapturedModel
from piecework.tools.bench.model import ATTENTION, ATTENTION_TAGGED, Attention, Case, ToyLlama, attention, build
from piecework.tools.bench.plugins import Plugins
from piecework.tools.bench.stitched import Stitched
from piecework.tools.bench.timing import Timed

__all__ = ["CONTENDERS", "Bench", "Contender", "SkipContender"]


class SkipContender(Exception):
    """A contender can't run here; the message is the reason."""


@dataclass(frozen=True)
class Contender:
    """One way to run a forward.

    Args:
        call: runs a forward on what is in ``ids``, without waiting for the device.
        ids: its input.
        output: where the logits are after a call; None: the call returns them.
        num_launches: of one call; None: unknown, and many.
        is_one_graph: the device is busy for longer than the host, so that its time can be told.
        note: for the table.
    """

    call: Callable[[], Any]
    ids: torch.Tensor
    output: torch.Tensor | None = None
    num_launches: int | None = None
    is_one_graph: bool = False
    note: str = ""

    @property
    def timed(self) -> Timed:
        """Return what is measured."""
        return Timed(self.call, self.num_launches)

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits for these ids."""
        self.ids.copy_(ids)
        result = self.call()
        return (result if self.output is None else self.output).clone()


class Bench:
    """Builds the contenders of one case; what several need is made once.

    Args:
        case: the model.
        plugins: who compiles and captures.
        piece_compiler: as in ``CompilationConfig``.
        exact: compile all pieces for this number of rows, besides the general shape; otherwise those alone that are
            captured as one graph, since Inductor's own graphs are compiled for one number of rows too.
        op: the attention op.
    """

    def __init__(
        self,
        case: Case,
        plugins: Plugins,
        *,
        piece_compiler: str | None = None,
        exact: bool = False,
        op: Attention = ATTENTION,
    ) -> None:
        self.case, self.plugins, self.op = case, plugins, op
        self.exact = exact
        self.settings: dict[str, Any] = {}
        if piece_compiler is not None:
            self.settings["piece_compiler"] = piece_compiler
        self.made: dict[str, CapturedModel] = {}
        self.kept: list[UncapturedModel] = []
        """Whose kernels are in graphs that were captured by hand."""

    # What contenders are made of.

    def new_ids(self) -> torch.Tensor:
        """Return other token ids at each call, in memory of their own."""
        return torch.randint(0, self.case.vocab, (self.case.rows,), device=self.case.device)

    @functools.cached_property
    def eager_model(self) -> ToyLlama:
        """Return the model that others are compared with."""
        return build(self.case, self.op.packet)

    @functools.cached_property
    def reference(self) -> ToyLlama:
        """Return the model in double precision."""
        return build(self.case, self.op.packet).double()

    @functools.cached_property
    def piecework_model(self) -> ToyLlama:
        """Return the model that all of Piecework's contenders share."""
        return self.build(self.op.packet)

    def build(self, op: Callable[..., None]) -> ToyLlama:
        """Return another model over the same weights.

        With weights of their own, models of which one just fits into the device's cache differ by some percent.
        """
        model = build(self.case, op)
        model.load_state_dict(self.eager_model.state_dict(), assign=True)
        return model

    @functools.cached_property
    def pool(self) -> Pool:
        """Return where the stitched reference captures.

        Raises:
            SkipContender: nobody captures on this device.
        """
        pool = pool_of(self.case.device, CompilationConfig(), plugin_manager())
        if pool is None:
            raise SkipContender(f"no plugin captures on {self.case.device}; --plugin registers one that is importable")
        return pool

    @functools.cached_property
    def stitched_model(self) -> tuple[Callable[..., Any], Stitched, torch.Tensor]:
        """Return the stitched reference behind ``torch.compile``, as it is, and what it was called with."""
        ids, model = self.new_ids(), self.build(self.op.packet)
        internals.mark_dynamic(ids, 0)
        backend = Stitched(self.op.name, self.config(), self.pool)
        forward = torch.compile(model.forward, backend=backend, fullgraph=True)
        forward(ids)
        return forward, backend, ids

    def splitting_op(self, **changed: Any) -> SplittingOp:
        return SplittingOp(self.op.name, **{"implementation": self.op.function, **changed})

    def config(self, op: SplittingOp | None = None, *, is_full: bool = False, **settings: Any) -> CompilationConfig:
        if is_full or self.exact:
            settings["compile_sizes"] = (self.case.rows,)
        return CompilationConfig(level=3, splitting_ops=[op or self.splitting_op()], **{**self.settings, **settings})

    def code_for(self, *, is_full: bool) -> str:
        """Return for a note what the pieces were compiled for."""
        return f"compiled for {self.case.rows} rows" if is_full or self.exact else "compiled for any rows"

    def uncaptured(self, op: SplittingOp | None = None, *, is_full: bool = False) -> UncapturedModel:
        """Return the model under Piecework, its pieces called one by one."""
        config = self.config(op, is_full=is_full, capture_sizes=())
        return UncapturedModel(self.piecework_model, config, self.new_ids(), self.op)

    def captured(self, *, is_full: bool, is_static: bool) -> CapturedModel:
        """Return the model under Piecework, captured: in pieces or as one graph, with safe defaults or in place.

        Each has a pool of its own. In a common one, static inputs of one model may lie where another has
        intermediates, which is well as every call copies its inputs, but a bare loop does not.
        """
        assert self.pool is not None
        name = f"{is_full} {is_static}"
        if name not in self.made:
            settings: dict[str, Any] = {"capture_sizes": (self.case.rows,)}
            if is_static:
                settings |= {"static_inputs": True, "static_outputs": True}
            config = self.config(self.splitting_op(capturable=is_full), is_full=is_full, **settings)
            with self.plugins.in_use():
                self.made[name] = CapturedModel(self.piecework_model, config, self.new_ids(), self.op)
        return self.made[name]

    # Contenders.

    def eager(self) -> Contender:
        ids, model = self.new_ids(), self.eager_model
        return Contender(lambda: model(ids), ids)

    def torch_compiled(self, op: Attention | None = None, *, is_one_graph: bool = False, **options: Any) -> Contender:
        """Return the whole model under ``torch.compile``; the forward itself, without the call of a module."""
        ids, model = self.new_ids(), self.build((op or self.op).packet)
        forward = torch.compile(model.forward, **options)
        forward(ids)
        return Contender(lambda: forward(ids), ids, is_one_graph=is_one_graph, note=self.code_for(is_full=True))

    def torch_compiled_varied(self, **options: Any) -> Contender:
        """Return the whole model under ``torch.compile`` as a program has it whose sizes vary: with general code."""
        rows = self.case.rows
        if rows == 1:
            raise SkipContender("torch.compile gives a single row code of its own, whatever it was called with before")
        ids, model = self.new_ids(), self.build(self.op.packet)
        forward = torch.compile(model.forward, **options)
        for num_rows in (2 * rows, 3 * rows):  # The second of them makes the code general.
            forward(ids.repeat(num_rows // rows))
        with torch.compiler.set_stance("fail_on_recompile"):
            forward(ids)
        return Contender(lambda: forward(ids), ids, note=f"called with {2 * rows} and {3 * rows} rows before")

    def reduce_overhead(self, op: Attention, *, is_one_graph: bool = True) -> Contender:
        self.needs_cuda("CUDA graphs of Inductor")
        made = self.torch_compiled(op, mode="reduce-overhead", is_one_graph=is_one_graph)
        for _ in range(3):  # The first run warms up, the second records.
            made.call()
        return replace(made, num_launches=3 if is_one_graph else None)

    def reduce_overhead_inlined(self) -> Contender:
        self.needs_cuda("CUDA graphs of Inductor")
        ids, model = self.new_ids(), self.build(attention)
        forward = torch.compile(model.forward, mode="reduce-overhead")
        for _ in range(3):
            forward(ids)
        note = "another model: Inductor sees into its attention"
        return Contender(lambda: forward(ids), ids, num_launches=3, is_one_graph=True, note=note)

    def uncaptured_pieces(self) -> Contender:
        made = self.uncaptured()
        return Contender(made.call, made.ids, note=self.code_for(is_full=False))

    def whole_call(self, *, is_full: bool, is_static: bool) -> Contender:
        made = self.captured(is_full=is_full, is_static=is_static)
        return Contender(
            made.call,
            made.ids,
            num_launches=made.num_launches,
            is_one_graph=made.plan.recording.num_graphs == 1,
            note=f"{_graphs_and_ops(made)}; {self.code_for(is_full=is_full)}",
        )

    def bare_loop(self, *, is_full: bool, is_static: bool) -> Contender:
        made = self.captured(is_full=is_full, is_static=is_static)
        return Contender(
            made.loop(),
            made.input_in_place,
            made.output_in_place,
            num_launches=made.num_launches,
            is_one_graph=made.plan.recording.num_graphs == 1,
            note="the same replays and ops; copies nothing",
        )

    def manual_graph(self) -> Contender:
        """Return one graph that was captured by hand around the same compiled pieces."""
        self.needs_cuda("torch.cuda.CUDAGraph")
        made = self.uncaptured(is_full=True)
        self.kept.append(made)
        run, ids, rows = made.run, made.ids, made.rows
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # The pieces ran before: nothing is done for the first time here.
            (output,) = run(ids, rows)
        note = f"copies nothing; {self.code_for(is_full=True)}"
        return Contender(graph.replay, ids, output, num_launches=1, is_one_graph=True, note=note)

    def stitched(self, *, with_guards: bool) -> Contender:
        forward, backend, ids = self.stitched_model
        num_launches = 3 * self.case.num_layers + 1
        if with_guards:
            return Contender(lambda: forward(ids), ids, num_launches=num_launches, note="copies nothing")
        function, arguments = backend.function, backend.arguments
        assert function is not None
        return Contender(lambda: function(*arguments)[0], ids, num_launches=num_launches, note="copies nothing")

    def breakable(self) -> Contender:
        """Return Meta's breakable graphs around the same pieces."""
        self.needs_cuda("breakable_cuda_graphs")
        try:
            library = importlib.import_module("breakable_cuda_graphs")
        except ImportError as error:
            raise SkipContender(f"pip install breakable-cuda-graphs ({error})") from error
        made = self.uncaptured(self.splitting_op(implementation=library.no_graph(self.op.function)))
        self.kept.append(made)
        run, ids, rows = made.run, made.ids, made.rows
        graph = library.BreakableCUDAGraph()
        with library.breakable_graph(graph):
            (output,) = run(ids, rows)
        num_launches = 3 * self.case.num_layers + 1
        return Contender(graph.replay, ids, output, num_launches=num_launches, note="copies nothing")

    def needs_cuda(self, what: str) -> None:
        if self.case.device.type != "cuda":
            raise SkipContender(f"needs a CUDA device ({what})")


def _graphs_and_ops(made: CapturedModel) -> str:
    num_graphs, num_ops = made.plan.recording.num_graphs, len(made.op_steps)
    return f"{num_graphs} graph{'s' * (num_graphs != 1)}, {num_ops} ops"


def _captured(is_full: bool, is_static: bool) -> Callable[[Bench], Contender]:
    return lambda bench: bench.whole_call(is_full=is_full, is_static=is_static)


def _loop(is_full: bool, is_static: bool) -> Callable[[Bench], Contender]:
    return lambda bench: bench.bare_loop(is_full=is_full, is_static=is_static)


CONTENDERS: Mapping[str, Callable[[Bench], Contender]] = {
    "eager": Bench.eager,
    "torch-compile": Bench.torch_compiled,
    "torch-compile-varied": Bench.torch_compiled_varied,
    "uncaptured": Bench.uncaptured_pieces,
    "stitched": lambda bench: bench.stitched(with_guards=True),
    "stitched-no-guards": lambda bench: bench.stitched(with_guards=False),
    "breakable": Bench.breakable,
    "piecewise": _captured(False, False),
    "piecewise-loop": _loop(False, False),
    "piecewise-static": _captured(False, True),
    "piecewise-static-loop": _loop(False, True),
    "reduce-overhead": lambda bench: bench.reduce_overhead(ATTENTION),
    "reduce-overhead-split": lambda bench: bench.reduce_overhead(ATTENTION_TAGGED, is_one_graph=False),
    "reduce-overhead-inlined": Bench.reduce_overhead_inlined,
    "full": _captured(True, False),
    "full-loop": _loop(True, False),
    "full-static": _captured(True, True),
    "full-static-loop": _loop(True, True),
    "manual-graph": Bench.manual_graph,
}
"""In the order of the table."""
