"""Level 1: ``torch.compile`` as it is, with the custom ops of this compilation; levels 1 and 2 share the backend."""

from __future__ import annotations

import builtins
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.assumptions import TARGET
from piecework.custom_op_calls import choosing
from piecework.custom_op_choice import CustomOpChoices
from piecework.effects import warn_of_undeclared
from piecework.errors import ConfigError
from piecework.process_settings import torch_compile_backend
from piecework.trace import with_own_code


def backend_of_process() -> Callable[..., Any]:
    """Return the backend of torch that levels 1 and 2 compile with.

    Raises:
        ConfigError: torch knows none of that name.
    """
    backend = torch_compile_backend()
    if not isinstance(backend, str):
        return backend
    try:
        return internals.lookup_backend(backend)
    except internals.InvalidBackend as error:
        known = ", ".join(torch.compiler.list_backends())
        raise ConfigError(f"set_torch_compile_backend: torch knows no backend {backend!r}; it has {known}") from error


def dynamo_as_is(target: Callable[..., Any], choices: CustomOpChoices) -> Callable[..., Any]:
    """Return the target under ``torch.compile``, whose traces choose custom ops by the settings of one compilation.

    Raises:
        ConfigError: torch knows no backend of the name that is set.
    """
    backend = _WarningBackend(backend_of_process())
    function = torch.compile(with_own_code(_around(target)), backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        if internals.is_traced():
            return function(*args, **kwargs)
        with choosing(choices):
            return function(*args, **kwargs)

    return call


def _around(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function around the target, with a source: Dynamo limits how often one code object is compiled.

    Many instances of a class would reach that. The target is no global of the function: Dynamo does not look whether
    an argument is still the tensor that a global holds.
    """
    namespace: dict[str, Any] = {"__builtins__": builtins}
    source = (
        f"def around({TARGET}):\n    def forward(*args, **kwargs):\n        return {TARGET}(*args, **kwargs)\n"
        "    return forward\n"
    )
    filename = "<piecework level 1>"
    exec(compile(source, filename, "exec"), namespace)
    # torch 2.11 puts a function of its own, whose code all would share, around one without a source.
    lines: list[str] = [*source.splitlines(True)]
    linecache.cache[filename] = (len(source), None, lines, filename)
    return namespace["around"](target)


class _WarningBackend:
    """A backend that says which ops a compiler may leave out, and is the given one otherwise."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend = backend

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        for node in graph.graph.nodes:
            warn_of_undeclared(node)
        return self.backend(graph, example_inputs, **options)

    def __getattr__(self, name: str) -> Any:
        """Return what torch.compile asks of a backend: its name, its settings, how to reset it."""
        return getattr(self.backend, name)
