"""What ``python -m piecework env`` says of custom ops: on or off at which level, and what would run them here."""

from __future__ import annotations

from typing import Any

import torch

from piecework.config_checks import CompilationLevel
from piecework.copy_inputs import CopyInputs as CopyInputs  # Registers it.
from piecework.custom_op import CustomOp, registered_ops
from piecework.custom_op_choice import NATIVE, Candidate, find_candidates
from piecework.custom_op_switch import decide
from piecework.registry import PluginManager
from piecework.settings import Settings


def describe_custom_ops(settings: Settings, manager: PluginManager) -> dict[str, dict[str, Any]]:
    """Return for each registered op what decides it at each level, and the candidates on each device of this machine.

    Args:
        settings: of the process; each level is looked at in turn.
        manager: the plugins to ask; those that register ops have been imported.
    """
    ops = registered_ops()
    return {name: _describe(name, classes, settings, manager) for name, classes in ops.items()}


def _describe(
    op_name: str, classes: tuple[type[CustomOp], ...], settings: Settings, manager: PluginManager
) -> dict[str, Any]:
    levels: dict[str, dict[str, Any]] = {}
    for level in CompilationLevel:
        at_level = Settings(settings.config.model_copy(update={"level": level}), settings.origins)
        verdict = decide(op_name, at_level, manager)
        levels[str(level.value)] = {"is_on": verdict.is_on, "why": verdict.why}
    devices = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
    candidates = {
        device.type: [_candidate(one, device) for cls in classes for one in find_candidates(cls, device, manager)]
        for device in devices
    }
    return {"classes": [cls.__qualname__ for cls in classes], "levels": levels, "candidates": candidates}


def _candidate(candidate: Candidate, device: torch.device) -> dict[str, Any]:
    implementation = candidate.implementation
    return {
        "implementation": implementation.title,
        "plugin": None if candidate.origin is None else str(candidate.origin),
        "limits": str(implementation.limits),
        "why_not": candidate.why_not_on(device),
    }


def custom_op_as_text(described: dict[str, Any]) -> str:
    """Return what ``describe_custom_ops`` says of one op in a few lines."""
    by_state: dict[tuple[bool, str], list[str]] = {}
    for level, verdict in described["levels"].items():
        why = verdict["why"].removesuffix(f" at level {level}")
        by_state.setdefault((verdict["is_on"], why), []).append(level)
    states = [f"{'on' if on else 'off'} at {', '.join(levels)} ({why})" for (on, why), levels in by_state.items()]
    lines = ["; ".join(states)]
    for device, candidates in described["candidates"].items():
        lines.append(f"{device}: {', then '.join([*map(_candidate_as_text, candidates), NATIVE])}")
    return "\n".join(lines)


def _candidate_as_text(candidate: dict[str, Any]) -> str:
    by = f" of {candidate['plugin']}" if candidate["plugin"] else ""
    limits = f" [{candidate['limits']}]" if candidate["limits"] else ""
    reason = f" (not here: {candidate['why_not']})" if candidate["why_not"] else ""
    return f"{candidate['implementation']}{by}{limits}{reason}"
