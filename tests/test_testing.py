"""The test kit itself."""

from __future__ import annotations

import types
from typing import Any, cast

import pytest
import torch

from piecework import testing
from piecework.config import CompilationConfig
from piecework.errors import PluginError
from piecework.hookspecs import hookimpl
from piecework.plugins import PluginManager, plugin_manager


class Namer:
    @hookimpl
    def piecework_splitting_ops(self) -> list[str]:
        return ["x::y"]


def ops_of(manager: PluginManager) -> list[tuple[str, str]]:
    return [(op.name, owner) for op, owner in manager.splitting_ops(cast(Any, None))]


def test_plugins_are_there_for_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_PLUGINS", "")
    outside = plugin_manager()
    with testing.plugins(Namer) as manager:
        assert plugin_manager() is manager
        assert ops_of(manager) == [("x::y", "Namer")]
        with testing.plugins():
            assert ops_of(plugin_manager()) == []
        assert plugin_manager() is manager
    assert plugin_manager() is outside


def test_names_come_from_the_pair_the_attribute_the_module_or_the_class() -> None:
    module = types.ModuleType("some_module")
    named = Namer()
    cast(Any, named).name = "named"
    with testing.plugins(("pair", Namer()), module, named, Namer) as manager:
        assert {info.name for info in manager.infos()} == {"pair", "some_module", "named", "Namer", "emulated"}
        assert {info.distribution for info in manager.infos()} == {None}


def test_bad_plugin_raises_at_once_and_leaves_nothing() -> None:
    class Bad:
        @hookimpl
        def piecework_splitting_opps(self) -> None: ...

    with testing.plugins() as outer:
        with pytest.raises(PluginError, match="piecework_splitting_opps"), testing.plugins(Namer, Bad):
            pytest.fail("the block must not be entered")
        assert plugin_manager() is outer


def test_block_ends_when_it_raises() -> None:
    with testing.plugins() as outer:
        with pytest.raises(OSError, match="x"), testing.plugins(Namer):
            raise OSError("x")
        assert plugin_manager() is outer


def test_installed_plugins_are_loaded_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(PluginManager, "load", lambda self, *, selection: loaded.append(selection))
    monkeypatch.setenv("PIECEWORK_PLUGINS", "a")
    with testing.plugins(Namer):
        assert loaded == []
    with testing.plugins(Namer, load_installed=True):
        assert loaded == ["a"]


def test_a_capturer_of_the_user_is_asked_before_the_emulated_one() -> None:
    class Capturing:
        @hookimpl
        def piecework_capturer(self) -> None: ...

    with testing.plugins(("zzz", Capturing())) as manager:
        assert manager.order("piecework_capturer") == ("zzz", "emulated")
        found = manager.capturer(torch.device("cpu"), CompilationConfig())
        assert found is not None
        assert isinstance(found[0], testing.EmulatedCapturer)
        assert found[1] == "emulated"
        assert manager.capturer(torch.device("meta"), CompilationConfig()) is None
