"""Which custom ops are on: every combination of level, plugin and tokens, from the environment and from configs."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import piecework
from piecework import CompilationConfig, CompilationLevel, ConfigError, CustomOp, PieceworkWarning, hookimpl, testing
from piecework.custom_op_switch import decide
from piecework.plugins import plugin_manager
from piecework.settings import resolve_settings

NAMES = "abc"
OK = {
    "": "default",
    "all": "abc",
    "none": "",
    "none,+a": "a",
    "all,-b": "ac",
    "-b,all": "ac",
    "+b,-c": "default+b-c",
    " all , -a ": "bc",
    "+a,+a": "default+a",
    "all,all": "abc",
    "none,+a,+b,+c": "abc",
    "all,-a,-b,-c": "",
    "-a": "default-a",
}
BAD = [
    *(
        "all,none",
        "none,all",
        "+a,-a",
        "-a,all,+a",
        "a",
        "+",
        "-",
        "++a",
        "--a",
        "+-a",
        "+all",
        "-none",
        "+none",
        "-all",
    ),
    *(",", "all,", ",all", "all,,+a", "+A B", "+a b", "all none", "ALL", "+a;+b", "+a.b", "+ä", "+1", "*"),
]


class Votes:
    """A plugin that is for a, against b, and without an opinion on c."""

    name = "votes"

    @hookimpl
    def piecework_custom_op_enabled(self, op_name: str) -> bool | None:
        return {"a": True, "b": False}.get(op_name)


def default(level: int) -> set[str]:
    return {"a", *("c" if level < 3 else "")}


def expand(want: str, level: int) -> str:
    """Return the ops that a text of the table says are on."""
    if not want.startswith("default"):
        return want
    on = default(level)
    for sign, name in zip(want[7::2], want[8::2], strict=True):
        on = on | {name} if sign == "+" else on - {name}
    return "".join(sorted(on))


def enabled(config: CompilationConfig | None = None) -> str:
    resolved = resolve_settings(config, default_level=CompilationLevel.NO_COMPILATION)
    return "".join(name for name in NAMES if decide(name, resolved, plugin_manager()).is_on)


@pytest.fixture(autouse=True)
def votes() -> object:
    with testing.plugins(Votes()):
        yield


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("text", OK)
def test_tokens_mean_the_same_from_every_source(text: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    want = expand(OK[text], level)
    assert enabled(CompilationConfig(level=level, custom_ops=text)) == want
    tokens = text.split(",") if text else []
    assert enabled(CompilationConfig(level=level, custom_ops=tokens)) == want
    assert enabled(CompilationConfig.from_json(json.dumps({"level": level, "custom_ops": text}))) == want
    monkeypatch.setenv("PIECEWORK_LEVEL", str(level))
    if text:
        monkeypatch.setenv("PIECEWORK_CUSTOM_OPS", text)
    assert enabled() == want


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_token_or_contradicts_itself_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="^CompilationConfig: custom_ops ") as from_config:
        CompilationConfig(custom_ops=text)
    assert repr(text) in str(from_config.value)
    with pytest.raises(ConfigError, match="custom_ops "):
        CompilationConfig(custom_ops=tuple(text.split(",")))
    monkeypatch.setenv("PIECEWORK_CUSTOM_OPS", text)
    with pytest.raises(ConfigError, match="^PIECEWORK_CUSTOM_OPS ") as from_environment:
        enabled()
    assert repr(text) in str(from_environment.value)


@pytest.mark.parametrize("value", [3, ["+a", 3], {"a": True}, [["+a"]], True, [None], None])
def test_values_of_another_type_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="custom_ops"):
        CompilationConfig(custom_ops=value)


def test_a_bare_name_is_told_how_to_be_written() -> None:
    with pytest.raises(ConfigError, match=r"write '\+rms_norm' to switch it on, '-rms_norm' to switch it off"):
        CompilationConfig(custom_ops="rms_norm")


names = st.sampled_from(NAMES)
tokens = st.one_of(st.sampled_from(["all", "none"]), names.map("+{}".format), names.map("-{}".format))


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(tokens, max_size=6), level=st.integers(0, 3), blank=st.sampled_from(["", " ", "\t"]))
def test_the_grammar_has_no_order_and_each_rule_beats_those_before_it(
    tokens: list[str], level: int, blank: str
) -> None:
    contradicts = {"all", "none"} <= set(tokens) or any({f"+{n}", f"-{n}"} <= set(tokens) for n in NAMES)
    text = ",".join(f"{blank}{token}{blank}" for token in tokens)
    if contradicts:
        with pytest.raises(ConfigError, match="contradicts itself"):
            CompilationConfig(custom_ops=text)
        return
    on = default(level)
    on = set(NAMES) if "all" in tokens else set() if "none" in tokens else on
    on = (on | {t[1] for t in tokens if t[0] == "+"}) - {t[1] for t in tokens if t[0] == "-"}
    for given_tokens in (text, tokens, sorted(tokens), tokens[::-1]):
        config = CompilationConfig(level=level, custom_ops=given_tokens)
        assert set(enabled(config)) == on
        assert CompilationConfig.from_json(config.to_json()) == config


def test_who_decided_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(name: str, config: CompilationConfig | None = None) -> str:
        resolved = resolve_settings(config, default_level=CompilationLevel.NO_COMPILATION)
        return decide(name, resolved, plugin_manager()).why

    assert why("c") == "the default at level 0"
    assert why("b") == "plugin 'votes' (registered by this program) says so"
    assert why("b", CompilationConfig(custom_ops="all")) == "'all' by the config of this model"
    monkeypatch.setenv("PIECEWORK_CUSTOM_OPS", "none,+b")
    assert why("a", CompilationConfig(custom_ops="all")) == "'none' by PIECEWORK_CUSTOM_OPS"
    assert why("b") == "'+b' by PIECEWORK_CUSTOM_OPS"
    monkeypatch.setenv("PIECEWORK_CUSTOM_OPS", "")
    piecework.set_compilation_config(CompilationConfig(custom_ops=["-a"]))
    assert why("a") == "'-a' by set_compilation_config"


def test_the_environment_replaces_weaker_sources_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    piecework.set_compilation_config(CompilationConfig(custom_ops="none"))
    assert enabled() == ""
    assert enabled(CompilationConfig(custom_ops="all")) == "abc"
    monkeypatch.setenv("PIECEWORK_CONFIG", '{"custom_ops": "none,+c"}')
    assert enabled(CompilationConfig(custom_ops="all")) == "c"
    monkeypatch.setenv("PIECEWORK_CUSTOM_OPS", "none,+b")
    assert enabled(CompilationConfig(custom_ops="all")) == "b"


class Wrong:
    name = "wrong"

    @hookimpl
    def piecework_custom_op_enabled(self) -> object:
        return 1


def test_an_answer_that_is_no_bool_names_the_plugin() -> None:
    with testing.plugins(Wrong()), pytest.raises(piecework.PluginError, match="'wrong'.*with 1, allowed: True, False"):
        enabled()
    with testing.plugins(Wrong()):
        assert enabled(CompilationConfig(custom_ops="all")) == "abc"  # Where tokens decide, nobody is asked.


class Turned:
    name = "turned"

    @hookimpl(wrapper=True)
    def piecework_custom_op_enabled(self) -> object:
        answer = yield
        return None if answer is None else not answer


def test_a_wrapper_has_the_last_word_and_is_named() -> None:
    with testing.plugins(Votes(), Turned()):
        assert enabled() == "bc"
        resolved = resolve_settings(None, default_level=CompilationLevel.NO_COMPILATION)
        assert decide("b", resolved, plugin_manager()).why == "plugin 'turned' (registered by this program) says so"


# --- names that switch nothing --------------------------------------------------------------------


class Twice(CustomOp, op_name="test_twice"):
    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Thrice(CustomOp, op_name="test_thrice"):
    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


@pytest.mark.parametrize("level", range(4))
def test_a_name_that_nobody_registered_is_reported_once_with_the_nearest(level: int) -> None:
    config = CompilationConfig(level=level, custom_ops="+test_twise,-test_twice", piece_compiler="eager")
    with pytest.warns(PieceworkWarning, match=r"'\+test_twise' by the config of this model switches nothing") as caught:
        piecework.compile(nn.Sequential(Twice()), config=config)(torch.ones(2))
    assert "did you mean 'test_twice'" in str(caught[0].message)
    assert len(caught) == 1
    piecework.compile(nn.Sequential(Twice()), config=config)(torch.ones(2))  # Said before.


@pytest.mark.parametrize("level", [0, 2])
def test_a_name_that_is_registered_but_not_in_the_model_is_logged(level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "piecework")
    config = CompilationConfig(level=level, custom_ops="+test_thrice")
    piecework.compile(nn.Sequential(Twice()), config=config)(torch.ones(2))
    assert "'+test_thrice' by the config of this model switches nothing: the op is registered" in caplog.text


def test_an_eager_program_hears_of_a_misspelt_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CUSTOM_OPS", "-test_twise")
    with pytest.warns(PieceworkWarning, match="did you mean 'test_twice'"):
        Twice()(torch.ones(2))
