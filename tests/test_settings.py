"""The environment, the precedence of its sources, and what a program sets for its process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.errors import ConfigError
from piecework.pieces import SplittingOp
from piecework.settings import (
    ENVIRONMENT,
    CompilationConfig,
    CompilationLevel,
    apply_logging_level,
    attention_ops,
    cache_dir,
    compilation_config,
    compile_context,
    plugin_selection,
    read_environment,
    reset_process_settings,
    resolve_settings,
    set_attention_ops,
    set_compilation_config,
    set_compile_context,
    set_torch_compile_backend,
    torch_compile_backend,
)

NO_COMPILATION = CompilationLevel.NO_COMPILATION


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    reset_process_settings()
    level = logging.getLogger("piecework").level
    yield
    logging.getLogger("piecework").setLevel(level)
    reset_process_settings()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    return subprocess.run(
        [sys.executable, "-c", code], env={**inherited, **environment}, capture_output=True, text=True, timeout=60
    )


# --- the environment ---


@pytest.mark.parametrize(
    ("text", "level"),
    [("0", 0), ("1", 1), ("2", 2), ("3", 3), ("PIECEWISE", 3), ("dynamo_once", 2), ("No_Compilation", 0)],
)
def test_level_is_read_as_number_or_name(monkeypatch: pytest.MonkeyPatch, text: str, level: int) -> None:
    monkeypatch.setenv("PIECEWORK_LEVEL", text)
    settings = resolve_settings(None, default_level=NO_COMPILATION)
    assert settings.level is CompilationLevel(level)
    assert settings.origins["level"] == "PIECEWORK_LEVEL"


@pytest.mark.parametrize("name", ["PIECEWORK_LEVEL", "PIECEWORK_CONFIG", "PIECEWORK_LOGGING_LEVEL", "PIECEWORK_DEBUG"])
def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "")
    settings = resolve_settings(None, default_level=CompilationLevel.DYNAMO_ONCE)
    assert settings.level == 2
    assert set(settings.origins.values()) == {"default"}


def test_debug_mode_is_off_unless_it_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, is_debug in ((None, False), ("", False), ("0", False), ("1", True)):
        if text is not None:
            monkeypatch.setenv("PIECEWORK_DEBUG", text)
        settings = resolve_settings(CompilationConfig(check_parameters="sample"), default_level=NO_COMPILATION)
        assert settings.is_debug is is_debug
        assert settings.config.check_parameters == ("always" if is_debug else "sample")
        assert settings.origins["check_parameters"] == ("PIECEWORK_DEBUG" if is_debug else "argument")


@pytest.mark.parametrize("text", ["2", "true", "on", " 1", "01", "yes"])
def test_a_junk_debug_switch_is_refused_with_variable_value_and_choices(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PIECEWORK_DEBUG", text)
    with pytest.raises(ConfigError, match=rf"^PIECEWORK_DEBUG must be 0 \(off, .*\) or 1 \(on\), got '{text}'$"):
        resolve_settings(None, default_level=NO_COMPILATION)


@pytest.mark.parametrize(
    "text",
    [
        "4",
        "-1",
        "2.0",
        "two",
        "fast",
        "True",
        "3;",
        "0_3",
        "03",
        "\u0663",
        " 2 2 ",
        " 2",
        "+2",
        "p\u0131ecewise",
        "9" * 5000,
    ],
    ids=lambda text: text[:10],
)
def test_a_junk_level_is_refused_with_variable_value_and_choices(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PIECEWORK_LEVEL", text)
    with pytest.raises(ConfigError) as caught:
        resolve_settings(CompilationConfig(level=1), default_level=NO_COMPILATION)
    choices = "0, 1, 2, 3 or a level's name (NO_COMPILATION, DYNAMO_AS_IS, DYNAMO_ONCE, PIECEWISE)"
    assert str(caught.value).startswith(f"PIECEWORK_LEVEL must be one of {choices}, got '{text[:190]}")


def test_level_zero_in_the_environment_beats_every_other_source(monkeypatch: pytest.MonkeyPatch) -> None:
    set_compilation_config(CompilationConfig(level=3))
    monkeypatch.setenv("PIECEWORK_CONFIG", '{"level": 3, "on_failure": "eager"}')
    monkeypatch.setenv("PIECEWORK_LEVEL", "0")
    settings = resolve_settings(CompilationConfig(level=3), default_level=CompilationLevel.PIECEWISE)
    assert settings.level is NO_COMPILATION
    assert settings.origins["on_failure"] == "PIECEWORK_CONFIG"


def test_config_is_read_as_json_or_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = ' {"level": "piecewise", "compile_sizes": [1, 2]}'
    file = tmp_path / "config.json"
    file.write_text(text)
    for value in (text, str(file)):
        monkeypatch.setenv("PIECEWORK_CONFIG", value)
        settings = resolve_settings(None, default_level=NO_COMPILATION)
        assert settings.config == CompilationConfig(level=3, compile_sizes=(1, 2))
        assert settings.origins["compile_sizes"] == "PIECEWORK_CONFIG"


@pytest.mark.parametrize("value", ["3", "null", "[1, 2]", '"x"', "not/there.json", " ", "x" * 5000])
def test_a_config_that_is_neither_json_nor_a_file_is_refused_with_both_forms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIECEWORK_CONFIG", value)
    with pytest.raises(ConfigError) as caught:
        resolve_settings(None, default_level=NO_COMPILATION)
    text = str(caught.value)
    assert text.startswith('PIECEWORK_CONFIG must be a JSON object such as {"level": 3}, or the path of a file')
    assert value[:190] in text
    assert text.endswith(("No such file or directory", "File name too long"))


def test_a_config_file_that_cannot_be_read_is_refused_with_path_and_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"piece_compiler": "\xe4"}')
    for path, cause in [(tmp_path, "Is a directory"), (latin, "can't decode byte")]:
        monkeypatch.setenv("PIECEWORK_CONFIG", str(path))
        with pytest.raises(ConfigError, match=cause) as caught:
            resolve_settings(None, default_level=NO_COMPILATION)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ['{"levl": 3}', "{'level': 3}", '{"level": 1, "level": 3}', '{"level": "3"}', "{"])
def test_bad_content_is_refused_with_the_variable_and_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    for value, start in [(text, "PIECEWORK_CONFIG"), (str(file), f"PIECEWORK_CONFIG (file '{file}')")]:
        monkeypatch.setenv("PIECEWORK_CONFIG", value)
        with pytest.raises(ConfigError) as caught:
            resolve_settings(None, default_level=NO_COMPILATION)
        assert str(caught.value).startswith(start)


def test_plugin_selection_tells_unset_from_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin_selection() is None
    for text in ("", "a,-b"):
        monkeypatch.setenv("PIECEWORK_PLUGINS", text)
        assert plugin_selection() == text


def test_cache_dir_is_that_of_the_platform_unless_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", "")
    assert cache_dir().is_absolute()
    assert "piecework" in cache_dir().parts


def test_read_environment_lists_every_variable_and_the_unknown_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_LEVLE", "3")
    monkeypatch.setenv("PIECEWORK_PLUGINS", "a")
    expected = dict.fromkeys(ENVIRONMENT) | {"PIECEWORK_PLUGINS": "a", "PIECEWORK_LEVLE": "3"}
    assert {name: read_environment()[name] for name in expected} == expected


def test_the_environment_is_read_anew_by_each_compilation_and_not_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("1", "2", "1"):
        monkeypatch.setenv("PIECEWORK_LEVEL", text)
        assert resolve_settings(None, default_level=NO_COMPILATION).level == int(text)
    junk = dict.fromkeys(ENVIRONMENT, "{junk")
    result = run_python("import piecework.settings; print('imported')", **junk)
    assert (result.returncode, result.stdout) == (0, "imported\n"), result.stderr


def test_importing_the_settings_does_not_import_torch() -> None:
    code = "import sys, piecework.config, piecework.settings; print([m for m in sys.modules if m == 'torch'])"
    assert run_python(code).stdout == "[]\n"


# --- logging ---


@pytest.mark.parametrize(("text", "level"), [("debug", 10), ("WARNING", 30), ("15", 15), ("notset", 0)])
def test_logging_level_is_applied_when_settings_are_resolved(
    monkeypatch: pytest.MonkeyPatch, text: str, level: int
) -> None:
    logger = logging.getLogger("piecework")
    logger.setLevel(35)
    resolve_settings(None, default_level=NO_COMPILATION)
    assert logger.level == 35
    monkeypatch.setenv("PIECEWORK_LOGGING_LEVEL", text)
    resolve_settings(None, default_level=NO_COMPILATION)
    assert logger.level == level


@pytest.mark.parametrize("text", ["loud", "-1", "1.5", "\u0661", "9" * 5000], ids=lambda text: text[:10])
def test_a_junk_logging_level_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PIECEWORK_LOGGING_LEVEL", text)
    with pytest.raises(ConfigError, match=r"^PIECEWORK_LOGGING_LEVEL must be .*DEBUG, INFO.* got '" + text[:190]):
        apply_logging_level()


@pytest.mark.parametrize(
    ("before", "between", "expected"),
    [
        ("", "", "INFO piecework.x: hello\n"),
        ("logging.basicConfig(format='root %(message)s')", "", "root hello\n"),
        ("", "logging.basicConfig(format='root %(message)s')", "root hello\n"),
        ("logging.getLogger('piecework').addHandler(logging.NullHandler())", "", ""),
    ],
    ids=["no logging set up", "root has a handler", "root gets a handler later", "piecework has a handler"],
)
def test_records_go_to_stderr_once_and_only_where_no_logging_is_set_up(
    before: str, between: str, expected: str
) -> None:
    code = f"""
import logging
from piecework.settings import apply_logging_level
{before}
apply_logging_level()
apply_logging_level()
{between}
logging.getLogger("piecework.x").info("hello")
"""
    assert run_python(code, PIECEWORK_LOGGING_LEVEL="INFO").stderr == expected


# --- precedence ---

FIELD_VALUES: dict[str, list[Any]] = {
    "level": [None, 0, 1, 2, 3],
    "splitting_ops": [None, (), ("a::b",), ("c::d",)],
    "compile_sizes": [(), (1,), (2, 3)],
    "check_parameters": ["sample", "always"],
    "on_failure": ["error", "eager"],
    "piece_compiler": [None, "eager", "inductor"],
    "plugin_options": [{}, {"p": {"x": 1}}],
    "capture_sizes": [None, "auto", (), (1, 2)],
    "max_padding_ratio": [1.0, 2.0, 4.0],
    "rows_independent": [None, True, False],
    "max_capture_bytes": [None, 1, 2**40],
    "static_inputs": [(), True, ("x",)],
    "static_outputs": [True, False],
    "capturer": [None, "none", "emulated"],
    "custom_ops": [(), ("all",), ("none", "+a", "-b")],
}
given_fields = st.fixed_dictionaries({}, optional={name: st.sampled_from(v) for name, v in FIELD_VALUES.items()})


def test_the_precedence_test_covers_every_field() -> None:
    assert FIELD_VALUES.keys() == CompilationConfig.model_fields.keys()


@given(
    process=st.none() | given_fields,
    argument=st.none() | given_fields,
    environment=st.none() | given_fields,
    level=st.none() | st.sampled_from(CompilationLevel),
    default_level=st.sampled_from(CompilationLevel),
)
def test_each_field_comes_from_the_strongest_source_that_gives_it(
    process: dict[str, Any] | None,
    argument: dict[str, Any] | None,
    environment: dict[str, Any] | None,
    level: CompilationLevel | None,
    default_level: CompilationLevel,
) -> None:
    expected = {name: (field, "default") for name, field in dict(CompilationConfig()).items()}
    layers = [(process, "set_compilation_config"), (argument, "argument"), (environment, "PIECEWORK_CONFIG")]
    for fields, source in layers:
        expected |= {name: (value, source) for name, value in (fields or {}).items()}
    if level is not None:
        expected["level"] = (level, "PIECEWORK_LEVEL")
    if expected["level"][0] is None:
        expected["level"] = (default_level, expected["level"][1])

    with pytest.MonkeyPatch.context() as patch:
        set_compilation_config(None if process is None else CompilationConfig(**process))
        if environment is not None:
            patch.setenv("PIECEWORK_CONFIG", CompilationConfig(**environment).to_json())
        if level is not None:
            patch.setenv("PIECEWORK_LEVEL", str(int(level)))
        call = None if argument is None else CompilationConfig(**argument)
        settings = resolve_settings(call, default_level=default_level)

    assert {name: (value, settings.origins[name]) for name, value in settings.config} == expected
    assert settings.level is settings.config.level


def test_resolving_changes_no_source() -> None:
    argument = CompilationConfig(plugin_options={"p": {"x": 1}})
    settings = resolve_settings(argument, default_level=CompilationLevel.PIECEWISE)
    settings.config.plugin_options["p"]["x"] = 2
    assert argument == CompilationConfig(plugin_options={"p": {"x": 1}})


@pytest.mark.parametrize("argument", [{"level": 3}, 3, '{"level": 3}', CompilationConfig])
def test_an_argument_that_is_no_config_is_refused(argument: Any) -> None:
    with pytest.raises(ConfigError, match=r"^config must be a CompilationConfig or None, got "):
        resolve_settings(argument, default_level=NO_COMPILATION)


# --- what a program sets for its process ---


def test_set_compilation_config_replaces_and_none_unsets() -> None:
    set_compilation_config(CompilationConfig(level=1, on_failure="eager"))
    set_compilation_config(CompilationConfig(level=2))
    settings = resolve_settings(None, default_level=NO_COMPILATION)
    assert (settings.level, settings.config.on_failure) == (2, "error")
    set_compilation_config(None)
    assert resolve_settings(None, default_level=NO_COMPILATION).level == 0


def test_set_attention_ops_replaces_those_set_before() -> None:
    op = SplittingOp("c::d", capturable=lambda size: True)
    assert attention_ops() == ()
    set_attention_ops(["a.b"])
    set_attention_ops(name for name in ("x::y", op))
    assert attention_ops() == ("x::y", op)


def test_set_torch_compile_backend_takes_a_name_a_callable_or_none() -> None:
    assert torch_compile_backend() == "eager"
    for backend in ("inductor", print):
        set_torch_compile_backend(backend)
        assert torch_compile_backend() is backend
    set_torch_compile_backend(None)
    assert torch_compile_backend() == "eager"


@pytest.mark.parametrize(
    ("setter", "bad", "message"),
    [
        (set_compilation_config, {"level": 3}, "^set_compilation_config: config must be .* write CompilationConfig"),
        (set_attention_ops, "a::b", r"^set_attention_ops: ops must be a list .* got 'a::b'; write \['a::b'\]"),
        (set_attention_ops, None, "^set_attention_ops: ops must be a list .* got None"),
        (set_attention_ops, {"name": "a::b"}, "^set_attention_ops: ops must be a list"),
        (set_attention_ops, ["a::b", 3], r"^set_attention_ops: ops\[1\] must be an op's name .* got 3"),
        (set_torch_compile_backend, 3, "^set_torch_compile_backend: backend must be a backend's name, .* got 3"),
        (set_torch_compile_backend, "", "^set_torch_compile_backend: backend must be a backend's name, .* got ''"),
    ],
)
def test_a_setter_refuses_what_it_cannot_use_and_changes_nothing(setter: Any, bad: Any, message: str) -> None:
    config = CompilationConfig(level=1)
    set_compilation_config(config)
    set_attention_ops(["kept::op"])
    set_torch_compile_backend("kept")
    with pytest.raises(ConfigError, match=message):
        setter(bad)
    assert (compilation_config(), attention_ops(), torch_compile_backend()) == (config, ("kept::op",), "kept")


def test_compile_contexts_nest_and_restore_after_an_error() -> None:
    assert compile_context() is None
    with set_compile_context([1, {"batch": 4, "seq": 1}]):
        assert compile_context() == (1, {"batch": 4, "seq": 1})
        with set_compile_context([]):
            assert compile_context() == ()
        with pytest.raises(ZeroDivisionError), set_compile_context([2]):
            _ = 1 / 0
        assert compile_context() == (1, {"batch": 4, "seq": 1})
    assert compile_context() is None


def test_a_compile_context_holds_for_its_own_thread_only() -> None:
    seen: list[Any] = []
    with set_compile_context([1]):
        thread = threading.Thread(target=lambda: seen.append(compile_context()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize("sizes", [4, "12", None, [0], [True], [{"seq": 0}], [[1]]])
def test_a_compile_context_refuses_what_is_no_size(sizes: Any) -> None:
    with pytest.raises(ConfigError, match="set_compile_context: sizes"), set_compile_context(sizes):
        pass
    assert compile_context() is None


def test_reset_forgets_all_that_was_set() -> None:
    set_compilation_config(CompilationConfig(level=3))
    set_attention_ops(["a::b"])
    set_torch_compile_backend("inductor")
    reset_process_settings()
    assert (compilation_config(), attention_ops(), torch_compile_backend()) == (None, (), "eager")
