"""What debug mode raises: the public errors, marked so that ``on_failure`` does not turn them into warnings."""

from __future__ import annotations

from piecework.errors import (
    CaptureError,
    CompileError,
    DebugFinding,
    PluginError,
    StaleCaptureError,
    TraceDepartureError,
)


class CompileFinding(DebugFinding, CompileError):
    """An op does something else than it declares."""


class PluginFinding(DebugFinding, PluginError):
    """What a plugin compiled breaks its contract."""


class CaptureFinding(DebugFinding, CaptureError):
    """A captured size reads or writes memory that it must not."""


class StaleFinding(DebugFinding, StaleCaptureError):
    """What a captured size reads is at another address."""


class DepartureFinding(DebugFinding, TraceDepartureError):
    """The model departs from what the trace assumed."""
