"""Every underscored API of torch that this plugin touches, and what differs between 2.11 and 2.14."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass, standalone_compile
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.exc import InductorError
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import ALIGNMENT, is_pointwise_use
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import _config as symbolic_shapes_config

__all__ = [
    "ALIGNMENT",
    "LAST_PASS",
    "TAKES_SEVERAL_PASSES",
    "CustomGraphPass",
    "FakeTensor",
    "InnerFunction",
    "compile_graph",
    "inner_function",
    "is_any_autocast_enabled",
    "is_pointwise_use",
    "is_written_as",
    "process_wide",
    "setting_names",
    "setting_type",
]

LAST_PASS = "post_grad_custom_post_pass"
TAKES_SEVERAL_PASSES = hasattr(custom_graph_pass, "get_custom_graph_passes")
"""From torch 2.13 on, a setting for passes may be a tuple of them."""

is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


def process_wide(name: str) -> Any:
    """Return a value of ``torch._inductor.config`` as it is for the whole process."""
    return getattr(inductor_config, name)


def is_written_as(node: torch.fx.Node, op: Any) -> bool:
    """Whether the program itself calls this op there, and no rewriting of Inductor's.

    What is rewritten has the op that stood there before (2.13, 2.14), or no origin in the traced graph (2.11).
    """
    # By name: the op of a copied graph is a copy.
    return str(node.meta.get("original_aten")) == str(op) and "from_node" in node.meta


def setting_names() -> list[str]:
    """Return what there is in ``torch._inductor.config``."""
    module: Any = inductor_config  # A ConfigModule since it was imported.
    return list(module._config)


def setting_type(name: str) -> Any:
    """Return the type that a setting is declared with."""
    module: Any = inductor_config
    return module.get_type(name)


def compile_graph(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], config: dict[str, Any]) -> Any:
    """Compile a graph for its own example inputs, which may be symbolic.

    Graphs of the device are the core's business, so Inductor makes none of its own. Inputs that
    require gradients would have it compile a backward, with gradients off too where Dynamo calls.
    """
    inputs = [
        example.detach() if isinstance(example, torch.Tensor) and example.requires_grad else example
        for example in example_inputs
    ]
    # The harness is a main program in each generated file; torch 2.11 can't write it for inputs that are written to.
    options = {"config_patches": {"benchmark_harness": False, **config, "triton.cudagraphs": False}}
    try:
        return standalone_compile(graph, inputs, dynamic_shapes="from_graph", options=options)
    except InductorError as error:
        if "unbacked_bindings" not in str(error):
            raise
        # torch 2.11 can't lower a slice up to a symbolic size that may be 1; from 2.12 on it can. The core sees what
        # torch assumes then, and runs the piece uncompiled for other sizes. It does not take an unused size either.
        kept = _drop_unused_sizes(graph)
        with symbolic_shapes_config.patch(backed_size_oblivious=False):  # pyright: ignore[reportAttributeAccessIssue]
            artifact = standalone_compile(
                graph, [inputs[i] for i in kept], dynamic_shapes="from_graph", options=options
            )
        return _TakingSome(artifact, kept)


def _drop_unused_sizes(graph: torch.fx.GraphModule) -> list[int]:
    """Remove the sizes among the inputs of a graph that no node uses; return the positions of the others."""
    kept: list[int] = []
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if isinstance(node.meta["example_value"], torch.SymInt) and not node.users:
            graph.graph.erase_node(node)
        else:
            kept.append(position)
    graph.recompile()
    return kept


@dataclass(frozen=True)
class _TakingSome:
    """Calls an artifact with some of the inputs."""

    artifact: Any
    kept: list[int]

    def __call__(self, *inputs: Any) -> Any:
        return self.artifact(*(inputs[i] for i in self.kept))


@dataclass(frozen=True)
class InnerFunction:
    """The function that Inductor generated; it takes a list, empties it, and returns a sequence."""

    call: Callable[[list[Any]], Any]
    num_outputs: int
    aligned_call: Callable[[list[Any]], Any]
    """The same, without a look at the addresses of inputs; ``call`` itself where there is none."""
    checked_inputs: Sequence[int]
    """Positions of the inputs whose addresses ``call`` looks at: it copies those that are no multiple of
    ``ALIGNMENT``, as the code relies on it."""


def inner_function(artifact: Any) -> InnerFunction | None:
    """Return the generated function inside an artifact, or None where it is not to be found.

    There is no API for it, and its place among the closures differs with the version and with
    whether a cache was hit, so it is searched for by type.
    """
    if isinstance(artifact, _TakingSome):
        return None
    found = [item for item in _reachable(artifact) if isinstance(item, CompiledFxGraph)]
    if len(found) != 1 or found[0].current_callable is None or found[0].output_strides is None:
        return None
    call = found[0].current_callable
    aligned_call, checked_inputs = _without_check_of_alignment(call)
    return InnerFunction(call, len(found[0].output_strides), aligned_call, checked_inputs)


def _without_check_of_alignment(call: Callable[[list[Any]], Any]) -> tuple[Callable[[list[Any]], Any], Sequence[int]]:
    """Return what Inductor wraps in its check of addresses, and the positions of the inputs that it looks at."""
    if getattr(call, "__qualname__", "") != "align_inputs_from_check_idxs.<locals>.run":
        return call, ()
    held = inspect.getclosurevars(call).nonlocals
    if "model" not in held or "inputs_to_check" not in held:
        return call, ()
    return held["model"], tuple(held["inputs_to_check"])


_MAX_DEPTH = 12


def _reachable(start: Any) -> Iterator[Any]:
    """Yield everything that a callable holds on to, nearest first."""
    seen: set[int] = set()
    level = [getattr(start, "_compiled_fn", start)]
    for _ in range(_MAX_DEPTH):
        following: list[Any] = []
        for item in level:
            if id(item) in seen:
                continue
            seen.add(id(item))
            yield item
            if not isinstance(item, CompiledFxGraph):
                following += [held for held in _held(item) if callable(held)]
        level = following


def _held(item: Any) -> Iterator[Any]:
    if isinstance(item, types.FunctionType):
        for cell in item.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a cell that is still empty
                continue
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, functools.partial):
        yield from (item.func, *item.args, *item.keywords.values())
    if hasattr(item, "__dict__") and not isinstance(item, (type, types.ModuleType, torch.nn.Module)):
        yield from vars(item).values()
