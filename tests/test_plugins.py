"""Who is asked, in which order, and who is blamed; on plugins registered by hand."""

from __future__ import annotations

import itertools
import logging
import threading
import types
from collections.abc import Generator
from typing import Any, cast

import pytest

from piecework import hookspecs, testing
from piecework.errors import CompileError, ConfigError, PluginError
from piecework.hookspecs import hookimpl
from piecework.loading import Selection, nearest, parse_selection
from piecework.pieces import CompiledPiece, SplittingOp
from piecework.plugins import PluginManager, plugin_manager, reset_plugin_manager

PIECE = cast(Any, types.SimpleNamespace(name="piece_7"))


def config(piece_compiler: str | None = None) -> Any:
    return types.SimpleNamespace(piece_compiler=piece_compiler)


def make_compiler(name: str, answer: object = None, asked: list[str] | None = None, mark: str = "") -> object:
    class Compiler:
        @hookimpl(tryfirst=mark == "tryfirst", trylast=mark == "trylast")
        def piecework_compile_piece(self, piece: object) -> object:
            if asked is not None:
                asked.append(name)
            if isinstance(answer, BaseException):
                raise answer
            return answer

    plugin: Any = Compiler()
    plugin.name = name
    return plugin


def make_wrapper(name: str, seen: list[Any] | None = None, change: Any = lambda result: result) -> object:
    class Wrapper:
        @hookimpl(wrapper=True)
        def piecework_compile_piece(self) -> Generator[None, Any, Any]:
            if seen is not None:
                seen.append(f"enter {name}")
            result = yield
            if seen is not None:
                seen.append(f"leave {name}")
            return change(result)

    plugin: Any = Wrapper()
    plugin.name = name
    return plugin


def make_namer(answer: object, name: str = "namer") -> object:
    class Namer:
        @hookimpl
        def piecework_splitting_ops(self) -> Any:
            return answer

    plugin: Any = Namer()
    plugin.name = name
    return plugin


def manager_of(*plugins: object) -> PluginManager:
    manager = PluginManager()
    for plugin in plugins:
        manager.register(plugin)
    return manager


COMPILED = CompiledPiece(lambda *inputs: inputs)


# The order.


def test_order_is_by_marks_then_names_however_registered() -> None:
    marks = {"b": "trylast", "e": "trylast", "d": "tryfirst", "f": "tryfirst"}
    for registered in itertools.islice(itertools.permutations("abcdef"), 0, None, 7):
        asked: list[str] = []
        manager = PluginManager()
        for name in registered:
            manager.register(make_compiler(name, asked=asked, mark=marks.get(name, "")))
        assert manager.compile_piece(PIECE, config()) is None
        assert asked == ["d", "f", "a", "c", "b", "e"] == list(manager.order("piecework_compile_piece"))
        assert [(info.name, info.position) for info in manager.infos()] == list(zip(asked, range(6), strict=True))


def test_marks_count_per_hook() -> None:
    class Both:
        name = "a"

        @hookimpl(trylast=True)
        def piecework_compile_piece(self) -> None: ...

        @hookimpl
        def piecework_splitting_ops(self) -> list[str]:
            return ["x::a"]

    class Other(Both):
        name = "b"

        @hookimpl
        def piecework_compile_piece(self) -> None: ...

    manager = manager_of(Both(), Other())
    assert manager.order("piecework_splitting_ops") == ("a", "b")
    assert manager.order("piecework_compile_piece") == ("b", "a")


def test_first_wrapper_is_outermost() -> None:
    seen: list[Any] = []
    manager = manager_of(make_wrapper("b", seen), make_compiler("c", COMPILED, seen), make_wrapper("a", seen))
    assert manager.compile_piece(PIECE, config()) == (COMPILED, "c")
    assert seen == ["enter a", "enter b", "c", "leave b", "leave a"]


# Who answers.


def test_first_answer_stops_the_asking_and_is_named() -> None:
    asked: list[str] = []
    manager = manager_of(
        make_compiler("a", None, asked), make_compiler("b", COMPILED, asked), make_compiler("c", COMPILED, asked)
    )
    assert manager.compile_piece(PIECE, config()) == (COMPILED, "b")
    assert asked == ["a", "b"]


def test_order_of_asking_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    manager = manager_of(make_compiler("b", COMPILED), make_compiler("a", COMPILED))
    manager.compile_piece(PIECE, config())
    manager.compile_piece(PIECE, config())
    assert [r.getMessage() for r in caplog.records] == [
        "piecework_compile_piece asks a, b, in this order; piece_compiler chooses one"
    ]


def test_piece_compiler_asks_that_plugin_only_and_wrappers_of_all() -> None:
    asked: list[str] = []
    seen: list[Any] = []
    manager = manager_of(
        make_compiler("a", COMPILED, asked), make_compiler("b", COMPILED, asked), make_wrapper("w", seen)
    )
    assert manager.compile_piece(PIECE, config("b")) == (COMPILED, "b")
    assert manager.compile_piece(PIECE, config("eager")) is None
    assert asked == ["b"]
    assert seen == ["enter w", "leave w"] * 2


def test_piece_compiler_that_answers_none_is_none() -> None:
    manager = manager_of(make_compiler("a"), make_compiler("b", COMPILED))
    assert manager.compile_piece(PIECE, config("a")) is None


def test_unknown_piece_compiler_lists_the_nearest_first() -> None:
    manager = manager_of(make_compiler("alpha"), make_compiler("inductor"))
    with pytest.raises(PluginError, match=r"'inductr'.*did you mean 'inductor'.*: inductor, alpha, eager$"):
        manager.compile_piece(PIECE, config("inductr"))
    with pytest.raises(PluginError, match=r"'eagre'.*installed plugins: eager, alpha, inductor$"):
        manager.compile_piece(PIECE, config("eagre"))


def test_piece_compiler_must_implement_the_hook() -> None:
    manager = manager_of(make_wrapper("w"), make_namer(["x::y"]), make_compiler("c"))
    for name in ("w", "namer"):
        with pytest.raises(PluginError, match=rf"'{name}'.*does not implement piecework_compile_piece.*: c, eager$"):
            manager.compile_piece(PIECE, config(name))


def test_wrapper_may_replace_a_piece_and_may_drop_it() -> None:
    other = CompiledPiece(len)
    manager = manager_of(make_compiler("c", COMPILED), make_wrapper("w", change=lambda _: other))
    assert manager.compile_piece(PIECE, config()) == (other, "c")
    manager = manager_of(make_compiler("c", COMPILED), make_wrapper("w", change=lambda _: None))
    assert manager.compile_piece(PIECE, config()) is None


def test_wrapper_must_not_compile_what_nobody_compiled() -> None:
    manager = manager_of(make_compiler("c"), make_wrapper("w", change=lambda _: COMPILED))
    with pytest.raises(PluginError, match=r"'w'.*None where nobody compiled the piece"):
        manager.compile_piece(PIECE, config())


def test_a_hook_may_ask_the_hooks_again() -> None:
    class Outer:
        @hookimpl(tryfirst=True)
        def piecework_compile_piece(self, piece: Any) -> CompiledPiece | None:
            found = manager.compile_piece(piece, config("inner"))
            assert found is not None
            return found[0]

    manager = manager_of(Outer(), make_compiler("inner", COMPILED))
    assert manager.compile_piece(PIECE, config()) == (COMPILED, "Outer")


# Splitting ops.


def test_splitting_ops_are_united_with_their_plugins() -> None:
    first = SplittingOp("x::a", capturable=True)
    manager = manager_of(
        make_namer(["x::b", first], "one"), make_namer((SplittingOp("x::b"),), "two"), make_namer(None, "three")
    )
    assert manager.splitting_ops(config()) == ((SplittingOp("x::b"), "one"), (first, "one"))


def test_wrapper_of_splitting_ops_sees_all_answers() -> None:
    class Wrapper:
        name = "w"

        @hookimpl(wrapper=True)
        def piecework_splitting_ops(self) -> Generator[None, Any, Any]:
            answers = yield
            assert answers == [(SplittingOp("x::a"),), (SplittingOp("x::b"),)]
            return [answers[1], ["x::c"]]

    manager = manager_of(make_namer(["x::a"], "one"), make_namer(["x::b"], "two"), Wrapper())
    assert manager.splitting_ops(config()) == ((SplittingOp("x::b"), "two"), (SplittingOp("x::c"), "w"))


@pytest.mark.parametrize(
    "answer", ["x::y", {"x::y"}, [3], [None], [""], 3, SplittingOp("x::y")], ids=lambda value: type(value).__name__
)
def test_splitting_ops_must_be_a_list_of_ops(answer: object) -> None:
    with pytest.raises(PluginError) as raised:
        manager_of(make_namer(answer)).splitting_ops(config())
    for part in ("plugin 'namer' (registered by this program)", "piecework_splitting_ops", repr(answer), "list"):
        assert part in str(raised.value)


# Who is blamed.


@pytest.mark.parametrize(
    "answer", [3.5, lambda x: x, CompiledPiece(cast(Any, None)), ()], ids=lambda value: type(value).__name__
)
def test_compiled_piece_must_be_one(answer: object) -> None:
    with pytest.raises(PluginError) as raised:
        manager_of(make_compiler("bad", answer)).compile_piece(PIECE, config())
    for part in ("plugin 'bad'", "piecework_compile_piece", repr(answer), "CompiledPiece"):
        assert part in str(raised.value)


def test_plugin_that_is_installed_and_not_used_here_is_no_misspelling() -> None:
    with pytest.raises(
        PluginError, match=r"'silly_attention' is installed, but not among .*: eager, fine; .*load_install"
    ):
        manager_of(make_compiler("fine", COMPILED)).compile_piece(PIECE, config(piece_compiler="silly_attention"))


def test_error_in_a_hook_names_plugin_hook_and_piece() -> None:
    error = ValueError("no\nsuch op")
    manager = manager_of(make_compiler("bad", error), make_wrapper("w"))
    with pytest.raises(
        PluginError, match=r"'bad'.* failed in piecework_compile_piece for 'piece_7': ValueError: no such op"
    ) as e:
        manager.compile_piece(PIECE, config())
    assert e.value.__cause__ is error


@pytest.mark.parametrize("error", [CompileError("mine"), KeyboardInterrupt()], ids=lambda value: type(value).__name__)
def test_our_own_errors_and_interrupts_pass_unchanged(error: BaseException) -> None:
    manager = manager_of(make_compiler("c", error), make_wrapper("w"))
    with pytest.raises(type(error)) as raised:
        manager.compile_piece(PIECE, config())
    assert raised.value is error


def test_wrapper_is_blamed_for_its_own_failures() -> None:
    class Twice:
        @hookimpl(wrapper=True)
        def piecework_compile_piece(self) -> Generator[None, Any, Any]:
            yield
            yield

    class Never:
        @hookimpl(wrapper=True)
        def piecework_compile_piece(self) -> Generator[None, Any, Any]:
            if self is None:
                yield

    class Early:
        @hookimpl(wrapper=True)
        def piecework_compile_piece(self) -> Generator[None, Any, Any]:
            raise OSError("early")
            yield

    def fail(_: object) -> None:
        raise OSError("late")

    for wrapper, text in (
        (Twice(), "'Twice'.*yielded twice"),
        (Never(), "'Never'.*did not yield"),
        (Early(), "'Early'.*OSError: early"),
        (make_wrapper("w", change=fail), "'w'.*OSError: late"),
        (make_wrapper("w", change=lambda _: 3), "'w'.*answered wrapper of piecework_compile_piece with 3"),
    ):
        with pytest.raises(PluginError, match=text):
            manager_of(make_compiler("c", COMPILED), wrapper).compile_piece(PIECE, config())


def test_wrapper_may_catch_what_a_plugin_raises() -> None:
    class Catcher:
        @hookimpl(wrapper=True)
        def piecework_compile_piece(self) -> Generator[None, Any, Any]:
            try:
                return (yield)
            except PluginError:
                return None

    assert manager_of(make_compiler("bad", OSError("x")), Catcher()).compile_piece(PIECE, config()) is None


# What is refused when a plugin is read.


class Misspelt:
    @hookimpl
    def piecework_compile_peice(self, piece: object) -> None: ...


class Unheard:
    @hookimpl
    def piecework_zzz(self) -> None: ...


class WrongArgument:
    @hookimpl
    def piecework_compile_piece(self, piece: object, inputs_v0: object) -> None: ...


class PositionalOnly:
    @hookimpl
    def piecework_compile_piece(self, piece: object, /) -> None: ...


class OldWrapper:
    @hookimpl(hookwrapper=True)
    def piecework_compile_piece(self) -> Generator[None, Any, None]:
        yield


class NoGenerator:
    @hookimpl(wrapper=True)
    def piecework_compile_piece(self) -> None: ...


class Unmarked:
    def piecework_compile_piece(self, piece: object) -> None: ...


class Later:
    PIECEWORK_PLUGIN_API = 2


class OddVersion:
    PIECEWORK_PLUGIN_API = "1"


class NeedsArgument:
    def __init__(self, needed: int) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (Misspelt, "unknown hook 'piecework_compile_peice'; did you mean piecework_compile_piece?"),
        (WrongArgument, "'inputs_v0', which the hook does not pass; the signature is piecework_compile_piece(piece, "),
        (PositionalOnly, "the signature is piecework_compile_piece(piece, config) in version 1 of the hooks"),
        (Unheard, "(This piecework has version 1 of the hooks; a hook of a later version is marked"),
        (OldWrapper, "hookwrapper=True, allowed: wrapper=True"),
        (NoGenerator, "the function does not yield"),
        (Unmarked, "defines piecework_compile_piece without @piecework.hookimpl"),
        (Later, "version 2 of the hooks (PIECEWORK_PLUGIN_API), this piecework has version 1; upgrade piecework"),
        (OddVersion, "must state PIECEWORK_PLUGIN_API as an integer"),
        (NeedsArgument, "can't be made from class NeedsArgument: TypeError"),
    ],
)  # fmt: skip
def test_bad_plugin_is_refused_whole(plugin: type, text: str) -> None:
    class Bad(plugin):
        name = "bad"

        @hookimpl
        def piecework_splitting_ops(self) -> list[str]:
            return ["x::y"]

    if plugin is NeedsArgument:
        Bad.__name__ = "NeedsArgument"
    manager = PluginManager()
    with pytest.raises(PluginError) as raised:
        manager.register(Bad)
    assert str(raised.value).startswith("plugin 'bad' (registered by this program) ")
    assert text in str(raised.value)
    assert manager.infos() == ()
    assert manager.splitting_ops(config()) == ()


def test_optional_hook_of_a_later_version_is_no_error() -> None:
    class Future:
        @hookimpl(optionalhook=True)
        def piecework_brand_new(self, x: object) -> None: ...

    assert manager_of(Future()).infos()[0].hooks == ()


def test_arguments_may_be_left_out_or_have_defaults() -> None:
    class Plugin:
        name = "p"

        @hookimpl
        def piecework_compile_piece(self, config: Any = None, *, piece: Any, own: int = 1) -> CompiledPiece:
            assert config is not None
            assert piece is PIECE
            return COMPILED

    assert manager_of(Plugin()).compile_piece(PIECE, config()) == (COMPILED, "p")


def test_name_must_be_free_and_not_reserved() -> None:
    manager = manager_of(make_compiler("a"))
    with pytest.raises(PluginError, match="'a' is the name of another plugin"):
        manager.register(make_compiler("a"))
    for name in ("eager", "none"):
        with pytest.raises(PluginError, match=f"can't have the name '{name}'"):
            manager.register(make_compiler(name))


# The selection.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, Selection()),
        ("", Selection(named=())),
        ("  ", Selection(named=())),
        ("a", Selection(named=("a",))),
        (" b , a-1 ", Selection(named=("b", "a-1"))),
        ("-a", Selection(blocked=frozenset({"a"}))),
        ("-a, -b", Selection(blocked=frozenset({"a", "b"}))),
    ],
)
def test_selection_is_read(text: str | None, expected: Selection) -> None:
    assert parse_selection(text) == expected


@pytest.mark.parametrize(
    "text", ["a,-a", "a,-b", "a,", ",", "-", "--a", "+a", "a b", "a,a", "-a,-a", "a;b", "eager", "-none", "a/b"]
)
def test_selection_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="PIECEWORK_PLUGINS") as raised:
        parse_selection(text)
    assert repr(text) in str(raised.value)


def test_nearest_ignores_case_and_dashes() -> None:
    assert nearest("Silly-Attention", ["inductor", "silly_attention"]) == "silly_attention"
    assert nearest("zzz", ["inductor"]) is None


# One manager per process.


def test_process_plugins_are_loaded_once_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[object] = []
    original = PluginManager.load

    def load(self: PluginManager, **arguments: Any) -> None:
        loads.append(self)
        barrier_passed.wait(0.05)
        original(self, **arguments)

    barrier_passed = threading.Event()
    monkeypatch.setattr(PluginManager, "load", load)
    monkeypatch.setenv("PIECEWORK_PLUGINS", "")
    found: list[PluginManager] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        found.append(plugin_manager())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert len(found) == 8
    assert set(map(id, found)) == {id(loads[0])}
    reset_plugin_manager()
    assert plugin_manager() is not loads[0]


def test_failed_load_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_PLUGINS", "not-there")
    with pytest.raises(PluginError, match="'not-there' is not installed"):
        plugin_manager()
    monkeypatch.setenv("PIECEWORK_PLUGINS", "")
    assert {info.state for info in plugin_manager().infos()} <= {"blocked"}


def test_spec_functions_are_all_checked() -> None:
    from piecework.answers import CHECKS
    from piecework.implementations import hook_arguments

    assert set(CHECKS) == set(hook_arguments())
    assert {"piecework_splitting_ops", "piecework_compile_piece"} <= set(vars(hookspecs))


def test_block_of_the_test_kit_wins_in_every_thread() -> None:
    with testing.plugins(make_compiler("a")) as manager:
        found: list[PluginManager] = []
        thread = threading.Thread(target=lambda: found.append(plugin_manager()))
        thread.start()
        thread.join()
        assert found == [manager]
