"""One model or function under Piecework, from its first call on: which level, which trace, which run."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.arguments import Arguments, DynamicDims, describe_call
from piecework.build import Builder, Compiled
from piecework.config import CompilationConfig
from piecework.config_checks import CompilationLevel, Size
from piecework.copy_inputs import CopyInputs
from piecework.counting import counters
from piecework.custom_op import CustomOp, registered_ops
from piecework.custom_op_calls import choosing
from piecework.custom_op_choice import CustomOpChoices
from piecework.custom_op_switch import report_names
from piecework.dynamo_as_is import backend_of_process, dynamo_as_is
from piecework.errors import CaptureError, CompileError, ConfigError, PieceworkWarning, TraceDepartureError
from piecework.forking import Lock
from piecework.plugins import PluginManager, plugin_manager
from piecework.process_settings import is_frozen
from piecework.settings import Settings, resolve_settings
from piecework.trace import signature_of, trace
from piecework.watch import plain_dicts, watched_modules

logger = logging.getLogger(__name__)

compile_lock = Lock()
"""Tracing and compiling happen one at a time in a process: Dynamo and Inductor keep global state."""

_forwards: weakref.WeakSet[Forward] = weakref.WeakSet()


class Forward:
    """Answers the calls of one model or function.

    Args:
        target: the module or function to trace; a module is called, so that its hooks are traced.
        original: called for what is not traced: level 0, zero rows, departures with ``on_failure="eager"``.
        owner: name for logs and errors.
        config: the argument of ``compile``.
        dims: the named dims.
        default_level: the level where nobody names one.
        publish: called with the function that shall answer from now on.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        original: Callable[..., Any],
        *,
        owner: str,
        config: CompilationConfig | None,
        dims: DynamicDims,
        default_level: CompilationLevel,
        publish: Callable[[Callable[..., Any]], None],
    ) -> None:
        self.takes_self = isinstance(target, torch.nn.Module)
        self.target = target
        self.original = original
        self.owner = owner
        self.config = config
        self.dims = dims
        self.default_level = default_level
        self.publish = publish
        self.settings: Settings | None = None
        self.custom_ops: CustomOpChoices | None = None
        """Goes by ``settings``."""
        self.compiled: Compiled | None = None
        self.answer: Callable[..., Any] | None = None
        self.lock = Lock()
        """Guards what calls find out about the trace; unlike ``compile_lock`` it is never held for long."""
        self.is_published = False
        """The trace has answered a call or captured a size, so that calls go straight to its code."""
        self.is_doubtful = False
        """A call failed before that: what was traced may be what is wrong."""
        self.num_passed_on = 0
        """Calls that the original answered."""
        self.why_eager: str | None = None
        """Why the original answers every call, where it does since the trace or a compile failed."""
        self.said: set[str] = set()
        _forwards.add(self)
        publish(self.with_self(self.start))

    def with_self(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that can stand as ``__call__`` of a module's class, if the target is a module."""
        return (lambda _, *args, **kwargs: answer(*args, **kwargs)) if self.takes_self else answer

    def start(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the first call, and every call until one has been answered."""
        if internals.is_traced():
            return self.original(*args, **kwargs)
        with compile_lock:
            if self.answer is None:
                self.answer = self.prepare(args, kwargs)
                if self.answer is None:
                    return self.run_empty(args, kwargs)
            answer, num_passed_on = self.answer, self.num_passed_on
        try:
            result = answer(self.target, *args, **kwargs) if self.takes_self else answer(*args, **kwargs)
        except BaseException:  # Raised again; an interrupt comes before an answer, too.
            with self.lock:
                self.is_doubtful |= self.answer is answer and not self.is_published
            raise
        with self.lock:
            if self.answer is answer and self.num_passed_on == num_passed_on:
                self.publish_answer()
        return result

    def publish_answer(self) -> None:
        """Have calls go straight to the code of the trace."""
        assert self.answer is not None
        self.is_published, self.is_doubtful = True, False
        self.publish(self.answer)

    @property
    def level(self) -> CompilationLevel | None:
        """Where it runs; None before the first call."""
        return None if self.settings is None else self.settings.level

    @property
    def is_request(self) -> bool:
        """Whether the user asked for this one by a call of ``compile``, and not by decorating a class."""
        return self.default_level is CompilationLevel.PIECEWISE

    def release(self) -> None:
        """Drop the trace and all that was made of it, and give its memory back; the next call starts anew."""
        compiled = self.compiled
        if compiled is not None and compiled.plans is not None:
            compiled.plans.close()  # Waits for calls that run, so not under the lock that their traces may need.
        with compile_lock:
            self.forget()

    def forget(self) -> None:
        """Drop the trace, under ``compile_lock``."""
        with self.lock:
            if self.compiled is not None:
                self.compiled.state.watch.close()
            self.settings = self.custom_ops = self.compiled = self.answer = self.why_eager = None
            self.is_published = self.is_doubtful = False
            self.said.clear()
            self.publish(self.with_self(self.start))

    def drop_doubtful(self) -> bool:
        """Drop a trace that calls have failed on and none was answered by; return whether there was one."""
        if not self.is_doubtful:
            return False  # Without waiting for what others compile.
        with compile_lock, self.lock:
            compiled = self.compiled
            if not self.is_doubtful or is_frozen() or compiled is None:
                return False
            self.forget()
        if compiled.plans is not None:
            compiled.plans.close()
        return True

    def capture(
        self, sizes: Sequence[Size], args: tuple[Any, ...], kwargs: dict[str, Any], on_size: Callable[..., None]
    ) -> None:
        """Trace and compile, if that has not been done, and capture sizes; the model itself does not run.

        Raises:
            ConfigError: the arguments don't fit the model.
            CaptureError: nothing can be captured, or a size can't.
        """
        try:
            signature_of(self.target).bind(*args, **kwargs)
        except TypeError as error:
            form = f"{self.owner}{signature_of(self.target)}"
            raise ConfigError(f"capture: example_inputs don't fit {form}: {error}; give a tuple, or a dict") from None
        with compile_lock:
            is_traced_here = self.answer is None
            if self.answer is None:
                self.answer = self.prepare(args, kwargs)
                if self.answer is None:
                    raise ConfigError(f"capture: the example inputs of {self.owner} have zero rows; give one at least")
            compiled = self.compiled
        assert self.settings is not None
        if compiled is None or self.settings.level is not CompilationLevel.PIECEWISE:
            logger.warning(
                "%s: runs at level %d, so nothing is captured; PIECEWORK_LEVEL=3 or level=3 in its config lets it",
                *(self.owner, self.settings.level),
            )
            return
        if compiled.plans is None:
            if compiled.split is not None and not compiled.split.pieces:
                raise CaptureError(
                    f"{self.owner} has no piece to capture: it runs splitting ops, or takes views, and nothing else"
                )
            raise CaptureError(
                f"nothing captures the pieces of {self.owner}: no plugin records graphs on their device, or "
                'capturer="none" is set; `python -m piecework plugins` lists what is there'
            )
        if is_frozen():
            raise CaptureError(f"capture: piecework.freeze() was called, so no size of {self.owner} can be added")
        try:
            tensors = self.tensors_of(compiled, args, kwargs)
        except TraceDepartureError:
            if not self.drop_doubtful():
                raise
            return self.capture(sizes, args, kwargs, on_size)
        given = {i: tensors[i] for i in compiled.plans.inputs.tensor_indices}
        if (problem := compiled.state.settle()) is not None:  # as before the answer to a call
            raise TraceDepartureError(f"{self.owner}: {problem}")
        with compiled.plans.pool.lock:
            compiled.plans.drop_outdated()
        try:
            compiled.plans.captures.capture_all(sizes, given, on_size)
        except CaptureError:
            if is_traced_here and not compiled.plans.plans:
                self.release()  # What was traced may be what is wrong: arguments of another dtype.
            raise
        with self.lock:
            if self.compiled is compiled:
                self.publish_answer()

    def tensors_of(self, compiled: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors among some arguments, in the order of the trace.

        Raises:
            TraceDepartureError: they differ from the traced call.
        """
        _, values = describe_call(signature_of(self.target), self.dims, args, kwargs, owner=self.owner)
        problem = compiled.entry.explain(list(values.values()))
        if problem is not None:
            raise TraceDepartureError(f"{self.owner}: {problem}")
        return compiled.trace.arguments.tensors_in(values)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """Return what answers calls from now on; None where this call has zero rows and can't be traced."""
        settings = resolve_settings(self.config, default_level=self.default_level)
        manager = plugin_manager()
        manager.check_options(settings.config)
        self.settings, self.custom_ops = settings, CustomOpChoices(self.owner, settings)
        if settings.level < CompilationLevel.DYNAMO_ONCE:
            self.report_names_of_custom_ops(settings)
        if settings.level is CompilationLevel.NO_COMPILATION:
            # With no config of its own, the process's settings are its settings.
            return self.with_self(self.original if self.config is None else self.run_original)
        try:
            if _is_dynamo_locked:
                raise CompileError(
                    f"{self.owner} can't be traced in this process: it was forked while another thread was tracing, "
                    "and torch waits for that thread for ever; fork before, or after"
                )
            if settings.level is CompilationLevel.DYNAMO_AS_IS:
                return self.with_self(dynamo_as_is(self.target, self.custom_ops))
            if is_frozen():
                raise CompileError(
                    f"{self.owner} was not traced before piecework.freeze(), which forbids it now; call it once before"
                )
            arguments, values = describe_call(signature_of(self.target), self.dims, args, kwargs, owner=self.owner)
            if not all(arguments.sizes.values()):
                return None
            # Fake tensors made under the caller's inference mode would have no version to tell of writes.
            with torch.inference_mode(False), torch.no_grad():
                self.compiled = self.compile(settings, manager, arguments, values)
        except CompileError as error:
            if settings.config.on_failure == "error":
                raise
            self.why_eager = str(error)
            warnings.warn(PieceworkWarning(f"{self.owner} runs eagerly from now on: {error}"), stacklevel=4)
            return self.with_self(self.run_original)
        return self.compiled.entry.function

    def report_names_of_custom_ops(self, settings: Settings) -> None:
        """Say which names in ``custom_ops`` switch nothing."""
        assert self.custom_ops is not None
        used = self.custom_ops.names()
        if settings.level is CompilationLevel.PIECEWISE:
            used.add(CopyInputs.op_name)  # Met when a size is captured.
        if isinstance(self.target, torch.nn.Module):
            used |= {module.op_name for module in self.target.modules() if isinstance(module, CustomOp)}
        report_names(settings, registered_ops(), used, owner=self.owner)

    def run_original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original; custom ops in it go by the settings of this compilation."""
        choices = self.custom_ops
        if choices is None or internals.is_traced():
            return self.original(*args, **kwargs)  # Released meanwhile, or a part of what is traced.
        with choosing(choices):
            return self.original(*args, **kwargs)

    # What becomes of calls that the trace does not answer.

    def run_empty(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call with zero rows by the original: a branch on zero can't be seen in a trace."""
        if "zero rows" not in self.said:
            self.said.add("zero rows")
            logger.info("%s: calls with zero rows are answered by the original forward", self.owner)
        self.count_eager("zero rows")
        return self.run_original(*args, **kwargs)

    def depart(self, problem: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse a call that departs from the trace, or answer it by the original.

        Where no call was answered yet, and one failed, this one is traced anew.
        """
        if self.drop_doubtful():
            return self.start(*args, **kwargs)
        assert self.settings is not None
        if self.settings.config.on_failure == "error":
            raise TraceDepartureError(
                f"{self.owner}: {problem}. Call piecework.release(model) to have it traced anew, or set "
                'on_failure="eager" to have such calls answered by the original forward'
            )
        if problem not in self.said:
            self.said.add(problem)
            warnings.warn(PieceworkWarning(f"{self.owner} answers a call eagerly: {problem}"), stacklevel=3)
        self.count_eager("departure from the trace")
        return self.run_original(*args, **kwargs)

    def count_eager(self, reason: str) -> None:
        self.num_passed_on += 1
        if self.compiled is not None:
            counts = self.compiled.num_eager_calls
            counts[reason] = counts.get(reason, 0) + 1

    # From a call to code.

    def compile(
        self, settings: Settings, manager: PluginManager, arguments: Arguments, values: Mapping[str, Any]
    ) -> Compiled:
        """Trace, split, deduplicate, compile, and generate the code that runs it."""
        level = settings.level
        backend = backend_of_process() if level is CompilationLevel.DYNAMO_ONCE else None
        assert self.custom_ops is not None
        with choosing(self.custom_ops), plain_dicts(watched_modules()):
            traced = trace(self.target, arguments, values, owner=self.owner, backend=backend)
        counters.num_graphs_seen += 1
        logger.info(
            "%s: traced one graph of %d nodes in %.2f s", self.owner, len(traced.graph.graph.nodes), traced.seconds
        )
        self.report_names_of_custom_ops(settings)
        builder = Builder(self, settings, manager, traced)
        return builder.dynamo_once() if backend else builder.piecewise()


def _look_at_dynamo() -> None:
    """Find out in a forked child whether Dynamo would wait for ever for a thread that was in it, and is not here."""
    global _is_dynamo_locked
    _is_dynamo_locked = internals.is_dynamo_locked()


_is_dynamo_locked = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_look_at_dynamo)


def all_forwards() -> list[Forward]:
    """Return every model and function that is under Piecework now."""
    return list(_forwards)
