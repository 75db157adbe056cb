"""Compile a PyTorch model piece by piece.

Importing this package is quick: torch and its compiler are imported when a name that needs them is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piecework.api import (
        capture,
        compile,
        ignore_torch_compile,
        release,
        reset,
        support_torch_compile,
        verify_assumptions,
    )
    from piecework.capturing import Capture, CaptureMemory, Capturer, Recordable
    from piecework.config import CompilationConfig
    from piecework.config_checks import CompilationLevel
    from piecework.counting import counters
    from piecework.custom_op import CustomOp
    from piecework.custom_op_limits import CustomOpImplementation, Limits
    from piecework.errors import (
        CaptureError,
        CompileError,
        ConfigError,
        GradientNotSupported,
        PieceworkError,
        PieceworkWarning,
        PluginError,
        SplitError,
        StaleCaptureError,
        TraceDepartureError,
    )
    from piecework.hookspecs import hookimpl
    from piecework.pieces import CompiledPiece, InputKind, Piece, SplittingOp
    from piecework.plugin_options import read_options
    from piecework.process_settings import (
        freeze,
        set_attention_ops,
        set_compilation_config,
        set_compile_context,
        set_torch_compile_backend,
    )
    from piecework.tools.report import Report, report
    from piecework.tools.verify.report import Verification
    from piecework.tools.verify.verifying import verify

__version__ = "0.1.0"

_HOMES = {
    "piecework.api": (
        *("capture", "compile", "ignore_torch_compile", "release", "reset", "support_torch_compile"),
        *("verify_assumptions",),
    ),
    "piecework.capturing": ("Capture", "CaptureMemory", "Capturer", "Recordable"),
    "piecework.config": ("CompilationConfig",),
    "piecework.config_checks": ("CompilationLevel",),
    "piecework.counting": ("counters",),
    "piecework.custom_op": ("CustomOp",),
    "piecework.custom_op_limits": ("CustomOpImplementation", "Limits"),
    "piecework.errors": (
        *("CaptureError", "CompileError", "ConfigError", "GradientNotSupported", "PieceworkError", "PieceworkWarning"),
        *("PluginError", "SplitError", "StaleCaptureError", "TraceDepartureError"),
    ),
    "piecework.hookspecs": ("hookimpl",),
    "piecework.pieces": ("CompiledPiece", "InputKind", "Piece", "SplittingOp"),
    "piecework.plugin_options": ("read_options",),
    "piecework.process_settings": (
        *("freeze", "set_attention_ops", "set_compilation_config", "set_compile_context"),
        *("set_torch_compile_backend",),
    ),
    "piecework.tools.report": ("Report", "report"),
    "piecework.tools.verify.report": ("Verification",),
    "piecework.tools.verify.verifying": ("verify",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Capture",
    "CaptureError",
    "CaptureMemory",
    "Capturer",
    "CompilationConfig",
    "CompilationLevel",
    "CompileError",
    "CompiledPiece",
    "ConfigError",
    "CustomOp",
    "CustomOpImplementation",
    "GradientNotSupported",
    "InputKind",
    "Limits",
    "Piece",
    "PieceworkError",
    "PieceworkWarning",
    "PluginError",
    "Recordable",
    "Report",
    "SplitError",
    "SplittingOp",
    "StaleCaptureError",
    "TraceDepartureError",
    "Verification",
    "capture",
    "compile",
    "counters",
    "freeze",
    "hookimpl",
    "ignore_torch_compile",
    "read_options",
    "release",
    "report",
    "reset",
    "set_attention_ops",
    "set_compilation_config",
    "set_compile_context",
    "set_torch_compile_backend",
    "support_torch_compile",
    "verify",
    "verify_assumptions",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
