"""The hook specifications are documentation: their form, and the examples in them, are held here."""

from __future__ import annotations

import inspect
import textwrap
import types
from typing import Any, cast

import pytest

from piecework import capturing, custom_op_limits, hookspecs, pieces
from piecework.implementations import hook_arguments, read_implementations
from piecework.loading import Origin

HOOKS = list(hook_arguments())


def test_surface() -> None:
    assert hook_arguments() == {
        "piecework_custom_op_enabled": ("op_name", "level", "config"),
        "piecework_custom_op_implementations": ("op_name", "device"),
        "piecework_splitting_ops": ("config",),
        "piecework_compile_piece": ("piece", "config"),
        "piecework_capturer": ("device", "config"),
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_docstring_has_every_part_of_the_contract(hook: str) -> None:
    text = inspect.getdoc(getattr(hookspecs, hook)) or ""
    for part in ("Called once per", "Args:", "Returns:", "``None``", "A wrapper receives", "Raises:", "Example::"):
        assert part in text, f"{hook}: {part!r} is missing"
    first_result = getattr(hookspecs, hook).piecework_spec["firstresult"]
    assert ("Stops at first non-None result." in text) == first_result


@pytest.mark.parametrize("hook", HOOKS)
def test_tree_at_the_top_names_the_hook(hook: str) -> None:
    assert f"-- {hook} " in (hookspecs.__doc__ or "")


@pytest.mark.parametrize("hook", HOOKS)
def test_example_is_a_plugin_as_it_stands(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = inspect.getdoc(getattr(hookspecs, hook)) or ""
    public = cast(Any, types.ModuleType("piecework"))
    public.hookimpl = hookspecs.hookimpl
    for name in ("CompiledPiece", "Piece", "SplittingOp"):
        setattr(public, name, getattr(pieces, name))
    for name in ("Capture", "CaptureMemory", "Capturer"):
        setattr(public, name, getattr(capturing, name))
    for name in ("CustomOpImplementation", "Limits"):
        setattr(public, name, getattr(custom_op_limits, name))
    monkeypatch.setitem(__import__("sys").modules, "piecework", public)
    plugin = types.ModuleType("example")
    exec(textwrap.dedent(text.partition("Example::")[2]), plugin.__dict__)
    assert [i.hook for i in read_implementations(plugin, Origin("example"))] == [hook]
