"""What a program sets for its whole process, or for one block of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from piecework.config import CompilationConfig
from piecework.config_checks import Size, check_name, check_sizes, check_splitting_op, show
from piecework.errors import ConfigError
from piecework.pieces import SplittingOp


@dataclass
class ProcessSettings:
    """What the setters below have set; each compilation reads it anew."""

    config: CompilationConfig | None = None
    attention_ops: tuple[str | SplittingOp, ...] = ()
    torch_compile_backend: str | Callable[..., Any] = "eager"
    said: set[str] = field(default_factory=set)
    """What is said once in a process, and was."""
    is_frozen: bool = False


_process = ProcessSettings()
_compile_context: ContextVar[tuple[Size, ...] | None] = ContextVar("piecework_compile_context", default=None)


def set_compilation_config(config: CompilationConfig | None) -> None:
    """Set what every later compilation uses where neither it nor the environment says otherwise; None unsets it.

    Raises:
        ConfigError: not a ``CompilationConfig``; the one set before stays.
    """
    _process.config = check_config(config, "set_compilation_config: config")


def compilation_config() -> CompilationConfig | None:
    """Return what ``set_compilation_config`` set last."""
    return _process.config


def set_attention_ops(ops: Iterable[str | SplittingOp]) -> None:
    """Set the process's splitting ops, in place of those set before; plugins add theirs.

    Whether torch knows a name is checked when a model is first compiled: the op may be registered later.

    Args:
        ops: ``"silly.attention"``, ``"silly::attention"`` and ``"silly::attention.default"`` mean the same.

    Raises:
        ConfigError: not an iterable of names and ``SplittingOp`` objects; those set before stay.
    """
    what = "set_attention_ops: ops"
    if isinstance(ops, str | bytes | Mapping) or not isinstance(ops, Iterable):
        hint = f"; write [{ops!r}]" if isinstance(ops, str) else ""
        raise ConfigError(f"{what} must be a list of op names and SplittingOp objects, got {show(ops)}{hint}")
    _process.attention_ops = tuple(check_splitting_op(op, f"{what}[{index}]") for index, op in enumerate(ops))


def attention_ops() -> tuple[str | SplittingOp, ...]:
    """Return the ops that ``set_attention_ops`` set last, as they were given."""
    return _process.attention_ops


def set_torch_compile_backend(backend: str | Callable[..., Any] | None) -> None:
    """Set the backend that Dynamo gets at levels 1 and 2; level 3 never looks at it.

    Args:
        backend: a name or a function as for ``torch.compile(backend=...)``; None for the default, ``"eager"``.

    Raises:
        ConfigError: neither of these; the backend set before stays.
    """
    if backend is None:
        backend = ProcessSettings.torch_compile_backend
    if not callable(backend):
        check_name(backend, "set_torch_compile_backend: backend", allowed="a backend's name, a callable or None")
    _process.torch_compile_backend = backend


def torch_compile_backend() -> str | Callable[..., Any]:
    """Return the backend for levels 1 and 2."""
    return _process.torch_compile_backend


@contextmanager
def set_compile_context(sizes: Sequence[Size]) -> Iterator[None]:
    """Name the sizes to capture inside a block; the sizes of an outer block come back after it.

    Holds for the thread or task that opens the block.

    Args:
        sizes: positive ints, or a value per named dim such as ``{"batch": 4, "seq": 1}``.

    Raises:
        ConfigError: not a list or tuple of sizes.
    """
    token = _compile_context.set(check_sizes(sizes, "set_compile_context: sizes"))
    try:
        yield
    finally:
        _compile_context.reset(token)


def compile_context() -> tuple[Size, ...] | None:
    """Return the sizes of the innermost ``set_compile_context``; None outside of any."""
    return _compile_context.get()


def freeze() -> None:
    """Let nothing be traced, compiled or captured from here on in this process.

    What is there goes on. A model that has not been traced raises ``CompileError``, or runs eagerly with
    ``on_failure="eager"``; a size that has not been captured runs uncaptured; one whose capture is stale raises
    ``StaleCaptureError``, or runs uncaptured. ``piecework.reset()`` undoes it.
    """
    _process.is_frozen = True


def is_frozen() -> bool:
    """Whether ``freeze`` was called."""
    return _process.is_frozen


def is_first_time(what: str) -> bool:
    """Whether this is the first time in this process, since the last reset, that something is to be said."""
    is_first = what not in _process.said
    _process.said.add(what)
    return is_first


def reset_process_settings() -> None:
    """Forget all that the setters set in the process, and the compile context of this thread or task."""
    global _process
    _process = ProcessSettings()
    _compile_context.set(None)


def check_config(config: Any, what: str) -> CompilationConfig | None:
    if config is None or isinstance(config, CompilationConfig):
        return config
    hint = "; write CompilationConfig(**...) around it" if isinstance(config, dict) else ""
    raise ConfigError(f"{what} must be a CompilationConfig or None, got {show(config)}{hint}")
