"""CompilationConfig: what it takes, what it refuses and how it says so, and its JSON form."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from piecework.config import CompilationConfig
from piecework.config_checks import CompilationLevel
from piecework.errors import ConfigError
from piecework.pieces import SplittingOp


def test_defaults_are_those_of_the_design() -> None:
    assert dict(CompilationConfig()) == {
        "level": None,
        "splitting_ops": None,
        "custom_ops": (),
        "compile_sizes": (),
        "capture_sizes": None,
        "max_padding_ratio": 2.0,
        "rows_independent": None,
        "max_capture_bytes": None,
        "static_inputs": (),
        "static_outputs": False,
        "check_parameters": "sample",
        "on_failure": "error",
        "piece_compiler": None,
        "capturer": None,
        "plugin_options": {},
    }


@pytest.mark.parametrize(
    ("field", "given", "taken"),
    [
        ("capture_sizes", "auto", "auto"),
        ("capture_sizes", [1, 2], (1, 2)),
        ("max_padding_ratio", 1, 1.0),
        ("max_capture_bytes", 2**30, 2**30),
        ("static_inputs", ["x"], ("x",)),
        ("static_inputs", True, True),
        ("rows_independent", False, False),
    ],
)
def test_capture_settings_are_taken(field: str, given: Any, taken: Any) -> None:
    assert getattr(CompilationConfig(**{field: given}), field) == taken


@pytest.mark.parametrize(
    ("field", "given", "words"),
    [
        ("capture_sizes", "all", "a list of sizes, 'auto' or None"),
        ("capture_sizes", [0], "a positive integer"),
        ("max_padding_ratio", 0.5, r"a number from 1 \(no padding\) up"),
        ("max_padding_ratio", float("inf"), "a number from 1"),
        ("max_padding_ratio", True, "a number from 1"),
        ("max_capture_bytes", 0, "a positive number of bytes"),
        ("max_capture_bytes", "1G", "a positive number of bytes"),
        ("static_inputs", "x", r"write \['x'\]"),
        ("static_inputs", False, "a list of argument names"),
        ("static_outputs", 1, "static_outputs must be"),
        ("rows_independent", "yes", "rows_independent must be"),
    ],
)
def test_other_capture_settings_are_refused_in_words(field: str, given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CompilationConfig(**{field: given})


@pytest.mark.parametrize("given", [3, CompilationLevel.PIECEWISE, "PIECEWISE", "piecewise", "PieceWise"])
def test_level_is_taken_as_number_member_or_name(given: Any) -> None:
    level = CompilationConfig(level=given).level
    assert level is CompilationLevel.PIECEWISE


@pytest.mark.parametrize(
    "given", ["3", True, False, 3.0, 4, -1, 10**20, "fast", "", "p\u0131ecewise", [3], float("nan")]
)
def test_other_levels_are_refused_with_the_choices(given: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        CompilationConfig(level=given)
    text = str(caught.value)
    assert text.startswith("CompilationConfig: level must be one of 0, 1, 2, 3 or a level's name (NO_COMPILATION, ")
    assert f"got {given!r}" in text


def test_lists_are_taken_where_a_tuple_is_meant_and_are_copied() -> None:
    ops: list[Any] = ["a::b", SplittingOp("c.d", capturable=True)]
    sizes: list[Any] = [1, {"batch": 4, "seq": 1}]
    options = {"inductor": {"flags": ["x"], "pair": (1, 2)}}
    config = CompilationConfig(splitting_ops=ops, compile_sizes=sizes, plugin_options=options)
    ops.clear()
    sizes[1]["batch"] = -5
    options["inductor"]["flags"].append("y")  # type: ignore[union-attr]
    assert config.splitting_ops == ("a::b", SplittingOp("c.d", capturable=True))
    assert config.compile_sizes == (1, {"batch": 4, "seq": 1})
    assert config.plugin_options == {"inductor": {"flags": ["x"], "pair": [1, 2]}}


@pytest.mark.parametrize(
    ("field", "given", "message"),
    [
        ("splitting_ops", "a::b", "splitting_ops must be a list of .* got 'a::b'; write \\['a::b'\\]"),
        ("splitting_ops", {"a::b"}, "splitting_ops must be a list of .* got {'a::b'}"),
        ("splitting_ops", ["a::b", 1], r"splitting_ops\[1\] must be an op's name .* got 1"),
        ("splitting_ops", [" "], r"splitting_ops\[0\] must be an op's name .* got ' '"),
        ("splitting_ops", [SplittingOp("")], r"splitting_ops\[0\].name must be a name, got ''"),
        ("splitting_ops", [{"name": "a::b", "capturabel": True}], "'capturabel'; did you mean 'capturable'"),
        ("splitting_ops", [{"name": "a::b", "capturable": 1}], r"splitting_ops\[0\].capturable must be true or false"),
        ("splitting_ops", [{"capturable": True}], r"splitting_ops\[0\] must have the key 'name'"),
        ("compile_sizes", 4, r"compile_sizes must be a list of sizes .* got 4; write \[4\]"),
        ("compile_sizes", None, "compile_sizes must be a list of sizes .* got None"),
        ("compile_sizes", [1, 0], r"compile_sizes\[1\] must be a positive integer, .* got 0"),
        ("compile_sizes", [True], r"compile_sizes\[0\] must be a positive integer, .* got True"),
        ("compile_sizes", [1.0], r"compile_sizes\[0\] must be a positive integer, .* got 1.0"),
        ("compile_sizes", [{}], r"compile_sizes\[0\] must be a positive integer, .* got {}"),
        ("compile_sizes", [{"seq": -1}], r"compile_sizes\[0\]\['seq'\] must be a positive integer, got -1"),
        ("compile_sizes", [{1: 1}], r"a dim of compile_sizes\[0\] must be a dim's name, got 1"),
        ("check_parameters", "never", "check_parameters must be 'sample' or 'always', got 'never'"),
        ("on_failure", None, "on_failure must be 'error' or 'eager', got None"),
        ("piece_compiler", 3, "piece_compiler must be a name, or None, got 3"),
        ("piece_compiler", "", "piece_compiler must be a name, or None, got ''"),
        ("plugin_options", [], "plugin_options must map plugin names to their options"),
        ("plugin_options", {"a": 1}, r"plugin_options\['a'\] must be a mapping of options"),
        ("plugin_options", {1: {}}, "a key of plugin_options must be a plugin's name, got 1"),
        (
            "plugin_options",
            {"a": {"b": [{"c": object}]}},
            r"plugin_options\['a'\]\['b'\]\[0\]\['c'\] must be what JSON",
        ),
        ("plugin_options", {"a": {"b": float("inf")}}, r"plugin_options\['a'\]\['b'\] must be what JSON .* got inf"),
        ("plugin_options", {"a": {2: 1}}, r"a key of plugin_options\['a'\] must be a string, got 2"),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_what_is_allowed(field: str, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="^CompilationConfig: .*" + message):
        CompilationConfig(**{field: given})


def test_an_unknown_field_is_refused_with_the_nearest_and_all_names() -> None:
    with pytest.raises(ConfigError, match="unknown field 'levl'; did you mean 'level'") as caught:
        CompilationConfig(levl=3)
    for name in CompilationConfig.model_fields:
        assert name in str(caught.value)


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        CompilationConfig(level=7, on_failure="ignore", colour="red")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("CompilationConfig: ") for line in lines)


def test_a_config_is_frozen() -> None:
    config = CompilationConfig(level=1)
    with pytest.raises(ValidationError, match="frozen"):
        config.level = CompilationLevel.PIECEWISE
    assert config.level == 1


def test_model_copy_checks_what_it_replaces_and_keeps_what_was_given() -> None:
    config = CompilationConfig(level=1, piece_compiler="eager")
    changed = config.model_copy(update={"level": 2})
    assert changed.given() == {"level": 2, "piece_compiler": "eager"}
    with pytest.raises(ConfigError, match="unknown field 'levl'"):
        config.model_copy(update={"levl": 2})


FULL = CompilationConfig(
    level="DYNAMO_ONCE",
    splitting_ops=["a::b", SplittingOp("c.d", capturable=True, rows_independent=True)],
    compile_sizes=[1, {"batch": 4, "seq": 1}],
    check_parameters="always",
    on_failure="eager",
    piece_compiler="eager",
    plugin_options={"p": {"deep": {"list": [1, None, "\u00e4", 0.5]}}},
)


@pytest.mark.parametrize("config", [FULL, CompilationConfig(), CompilationConfig(level=None, splitting_ops=())])
def test_json_pickle_and_deepcopy_give_the_same_config_with_the_same_given_fields(config: CompilationConfig) -> None:
    copies = [CompilationConfig.from_json(config.to_json()), pickle.loads(pickle.dumps(config)), copy.deepcopy(config)]
    for other in copies:
        assert other == config
        assert other.given() == config.given()


@pytest.mark.parametrize(
    "op",
    [SplittingOp("a::b", implementation=print), SplittingOp("a::b", capturable=lambda size: True)],
    ids=["implementation", "capturable"],
)
def test_a_splitting_op_with_a_function_has_no_json_form(op: SplittingOp) -> None:
    config = CompilationConfig(splitting_ops=[op])
    assert config.splitting_ops == (op,)
    with pytest.raises(ConfigError, match="splitting_ops: 'a::b' holds a function"):
        config.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'level': 3}", "is not JSON: .*double quotes"),
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ('{"level": 3} {}', "is not JSON: Extra data"),
        ('{"level": ' + "9" * 5000 + "}", "is not JSON: Exceeds the limit"),
        ("[1, 2]", r'must be a JSON object, got \'\[1, 2\]\'; write a JSON object such as {"level": 3}'),
        ("3", "must be a JSON object, got '3'"),
        ("null", "must be a JSON object, got 'null'"),
        ('"x"', "must be a JSON object, got '\"x\"'"),
        ('{"levl": 3}', "unknown field 'levl'; did you mean 'level'"),
        ('{"cache_dir": 5}', "unknown field 'cache_dir'"),
        ('{"self": 5}', "unknown field 'self'"),
        ('{"level": "3"}', "level must be .* got '3'; write 3 without quotes"),
        ('{"level": true}', "level must be .* got True"),
        ('{"level": 3.0}', "level must be .* got 3.0; write 3"),
        ('{"splitting_ops": "demo::attn"}', "splitting_ops must be a list"),
        ('{"splitting_ops": [1]}', r"splitting_ops\[0\] must be"),
        ('{"level": 1, "level": 3}', "gives 'level' more than once"),
        ('{"plugin_options": {"a": {"b": 1, "b": 2}}}', "gives 'b' more than once"),
        ('{"compile_sizes": [NaN]}', "holds NaN"),
        ('{"plugin_options": {"a": {"b": -Infinity}}}', "holds -Infinity"),
        ('{"plugin_options": {"a": {"b": 1e999}}}', r"plugin_options\['a'\]\['b'\] .* got inf"),
        ('{"a":' * 100_000, "is not JSON"),
    ],
    ids=lambda value: value[:30],
)
def test_bad_json_is_refused_with_its_source(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="^a.json:? " + message) as caught:
        CompilationConfig.from_json(text, source="a.json")
    assert len(str(caught.value)) < 800


def test_json_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^the JSON text must be a string, got {'level': 3}"):
        CompilationConfig.from_json({"level": 3})  # type: ignore[arg-type]


def test_null_in_json_is_the_default_where_none_is_allowed() -> None:
    assert CompilationConfig.from_json('{"splitting_ops": null}').splitting_ops is None
