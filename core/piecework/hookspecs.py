"""The hooks of Piecework: this module is their documentation.

A plugin is a module or an object with functions marked ``@piecework.hookimpl``, named by an entry
point of the group ``piecework``. In the order in which one forward meets the hooks::

    first call of a compiled model, at level 3
    |-- plugins are loaded             once per process, at the first need
    |-- trace the model                once
    |   |-- piecework_custom_op_enabled          once per name of a custom op that is met: on or off
    |   |-- piecework_custom_op_implementations  once per class and device, if it is on: what may run it
    |   `-- piecework_splitting_ops    once per traced graph: where to cut
    |-- split the graph, find the pieces that are alike
    |-- for each unique piece, and for the general shape and each exact size
    |   `-- piecework_compile_piece    once: who compiles it
    `-- piecework_capturer             once per device and process: who records graphs there
    every later call
    `-- no hook at all; a size that is captured then uses the capturer at hand

Custom ops that run untraced, as all do at level 0, ask the first two at the first call of each op.

Order. Plugins named in ``PIECEWORK_PLUGINS`` are asked first, in that order, whatever they mark.
The rest follow: ``tryfirst=True``, then unmarked, then ``trylast=True``, each by name. Wrappers
(``wrapper=True``) run around all of these, in the same order: the first in the order is entered
first and left last, so it has the last word. ``python -m piecework plugins`` shows the order. What
the core does when nobody answers is no plugin, and comes after everything, wrappers included.

An implementation may leave out arguments that it does not need. It may declare a hook that older
versions of Piecework do not have with ``optionalhook=True``. Old-style ``hookwrapper=True`` is not
accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from piecework.capturing import Capturer
    from piecework.config_checks import CompilationLevel
    from piecework.custom_op_limits import CustomOpImplementation
    from piecework.pieces import CompiledPiece, Piece, SplittingOp
    from piecework.settings import CompilationConfig

hookspec = pluggy.HookspecMarker("piecework")
hookimpl = pluggy.HookimplMarker("piecework")


@hookspec(firstresult=True)
def piecework_custom_op_enabled(op_name: str, level: CompilationLevel, config: CompilationConfig) -> bool | None:
    """Say whether a custom op runs by other than its native body.

    Called once per name of a custom op and compilation, and at the first call of each op that runs untraced. Not
    called where ``config.custom_ops`` decides it: ``all`` and ``none`` decide every op. Stops at first non-None result.

    Args:
        op_name: the name of the op, such as ``"rms_norm"``.
        level: the level of the compilation, ``CompilationLevel.NO_COMPILATION`` for an op that runs eagerly.
        config: the settings of the compilation. Frozen; the core owns it.

    Returns:
        ``True``: the op takes the first implementation whose limits hold. ``False``: it takes ``forward_native``.
        ``None``: this plugin has no opinion, and the next one is asked. When all answer ``None``, the op is on below
        level 3 and off at it, since Inductor fuses the native body there.

    A wrapper receives the answer, and returns one of its own.

    Raises:
        PieceworkError: may be raised, and reaches the caller of the model unchanged. Any other exception does so as a
            ``PluginError`` that names the plugin.

    Example::

        from piecework import hookimpl

        @hookimpl
        def piecework_custom_op_enabled(op_name, level):
            # Measured: this one beats what Inductor makes of the native body.
            return True if op_name == "foo_norm" and level == 3 else None
    """


@hookspec
def piecework_custom_op_implementations(op_name: str, device: torch.device) -> Sequence[CustomOpImplementation] | None:
    """Bring implementations of the custom ops of one name.

    Called once per class of ops, device and compilation, for an op that is on. All plugins are asked; an op takes the
    first in their order whose limits hold, before its own methods. Where the op is off, nobody is asked.

    Args:
        op_name: the name of the op. What else an op of that name has to be, its plugin says: the arguments of
            ``forward_native`` and the attributes that the implementation reads.
        device: where the first tensor of the call is, with its index.

    Returns:
        A list or tuple of ``CustomOpImplementation``, which the core keeps and does not change. ``None`` or an empty
        list: this plugin brings nothing for the op on this device.

    A wrapper receives the list of all answers, one tuple for each plugin that gave one, and returns a list of that
    form.

    Raises:
        PieceworkError: may be raised, and reaches the caller of the model unchanged. Any other exception does so as a
            ``PluginError`` that names the plugin.

    Example::

        import torch
        from piecework import CustomOpImplementation, Limits, hookimpl

        @torch.library.custom_op("foo::norm", mutates_args=())
        def norm(x: torch.Tensor, eps: float) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

        @norm.register_fake
        def _(x: torch.Tensor, eps: float) -> torch.Tensor:
            return torch.empty_like(x)

        def forward(op, x):
            return norm(x, op.eps)

        @hookimpl
        def piecework_custom_op_implementations(op_name, device):
            limits = Limits(dtypes=(torch.float32, torch.bfloat16), multiples={-1: 8})
            if op_name == "foo_norm":
                return [CustomOpImplementation(forward, name="foo::norm", limits=limits, attributes=("eps",))]
    """


@hookspec
def piecework_splitting_ops(config: CompilationConfig) -> Sequence[SplittingOp | str] | None:
    """Name the ops at which a traced graph is cut.

    Called once per traced graph, before it is split, and not at all when ``config.splitting_ops``
    says which ops to cut at. All plugins are asked and their answers united, together with the ops
    of ``set_attention_ops``. Importing the plugin must have registered every op that it names.

    Args:
        config: the settings of this compilation. Frozen; the core owns it.

    Returns:
        A list or tuple of ``SplittingOp`` or of names (``"ns::op"``), which the core keeps and does
        not change. ``None`` or an empty list: this plugin names no op.

    A wrapper receives the list of all answers, one tuple of ``SplittingOp`` for each plugin that
    gave one, and returns a list of that form.

    Raises:
        PieceworkError: may be raised, and reaches the caller of the compiled model unchanged.
            Any other exception does so as a ``PluginError`` that names the plugin.

    Example::

        import torch
        from piecework import SplittingOp, hookimpl

        @torch.library.custom_op("foo::scale", mutates_args=())
        def scale(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @scale.register_fake
        def _(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(x)

        @hookimpl
        def piecework_splitting_ops() -> list[SplittingOp]:
            return [SplittingOp("foo::scale", rows_independent=True)]
    """


@hookspec(firstresult=True)
def piecework_compile_piece(piece: Piece, config: CompilationConfig) -> CompiledPiece | None:
    """Compile one piece of a graph.

    Called once per unique piece and shape: the general shape, and each of ``config.compile_sizes``.
    Every call comes before the first real run of the graph, one after the other, with gradients
    off. Stops at first non-None result. With ``config.piece_compiler`` set, only that plugin's
    implementation is called, or none for ``"eager"``; wrappers of every plugin still run.

    Args:
        piece: what to compile. The core owns it: copy ``piece.graph`` before changing it. Its example
            inputs are fake; no memory stands behind them.
        config: the settings of this compilation. Frozen; the core owns it.

    Returns:
        A ``CompiledPiece``, which the core owns from here on. Its ``run`` must accept every size
        that ``piece`` stands for and must not keep the tensors that it gets or gives; what its
        first call takes and gives is compared with the trace, in form, dtype, device and shape. ``None``: this
        plugin does not compile the piece, and the next one is asked. When all answer ``None``, the core
        runs the piece eagerly, or raises a ``CompileError`` where ``config.piece_compiler`` names a plugin.

    A wrapper receives the ``CompiledPiece``, or ``None`` when nobody compiled the piece. It may return
    another ``CompiledPiece`` or ``None`` in place of one, but nothing other than ``None`` in place of
    ``None``: a plugin that compiles implements the hook without ``wrapper=True``, so that
    ``config.piece_compiler`` can choose it.

    Raises:
        PieceworkError: may be raised, and reaches the caller of the compiled model, the path of a script that
            compiles the piece alone added to its text. Any other exception does so as a ``PluginError`` that
            names the plugin and the piece. ``on_failure="eager"`` makes a warning of both, but not of a
            ``ConfigError``.

    Example::

        from piecework import CompiledPiece, Piece, hookimpl

        @hookimpl
        def piecework_compile_piece(piece: Piece) -> CompiledPiece | None:
            if any(node.op == "call_module" for node in piece.graph.graph.nodes):
                return None
            return CompiledPiece(piece.graph.forward)
    """


@hookspec(firstresult=True)
def piecework_capturer(device: torch.device, config: CompilationConfig) -> Capturer | None:
    """Bring what records graphs on a device.

    Called once per device, at the first compilation at level 3 whose pieces run there; all models of the process
    share the answer, and with it one pool. A forked child asks anew. Stops at first non-None result. With
    ``config.capturer`` set, only that plugin's implementation is called, or none for ``"none"``; wrappers of every
    plugin still run.

    Args:
        device: with its index, such as ``cuda:0``; ``cpu`` where the model runs on no accelerator.
        config: the settings of the compilation that needs it first. Frozen; the core owns it.

    Returns:
        A ``Capturer``, which the core owns from here on. ``None``: this plugin records nothing on such a device,
        and the next one is asked. When all answer ``None``, every size runs uncaptured; where
        ``config.capturer`` names a plugin, that is a ``CaptureError``.

    A wrapper receives the ``Capturer``, or ``None``. It may return another ``Capturer`` or ``None`` in place of
    one, but nothing other than ``None`` in place of ``None``.

    Raises:
        PieceworkError: may be raised, and reaches the caller of the compiled model unchanged. Any other exception
            does so as a ``PluginError`` that names the plugin.

    Example::

        import contextlib

        from piecework import Capture, CaptureMemory, Capturer, hookimpl

        class RunsAgain(Capturer):
            # Records nothing: a replay is another run, into the same memory.
            def session(self):
                return contextlib.nullcontext()

            def capture(self, fn):
                before = [(fn.inputs[i], fn.inputs[i].clone()) for i in fn.writes]
                outputs = fn()
                for written, value in before:
                    written.copy_(value)

                def replay():
                    for kept, fresh in zip(outputs, fn()):
                        kept.copy_(fresh)

                return Capture(replay, outputs)

            def memory(self):
                return CaptureMemory(pool_bytes=0)

            def release(self):
                pass

        @hookimpl
        def piecework_capturer(device):
            return RunsAgain(device) if device.type == "cpu" else None
    """
