"""Cases about settings: the level's variable, the JSON configuration, the switch of custom ops."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

import demo
import piecework
from dists import run_forks
from piecework import CompilationConfig, ConfigError, CustomOp, PluginError, hookimpl, read_options, testing
from ways import Way, check, close

PROGRAM = """
import piecework
print("imported", flush=True)
compiled = piecework.compile(lambda x: x + 1, dynamic_arg_dims={"x": 0})
compiled(torch.ones(2))
print(piecework.report(compiled).level)
"""


def last_line(child: subprocess.CompletedProcess[str]) -> str:
    return child.stderr.strip().splitlines()[-1]


# --- C44 ---

LEVELS = {"0": 0, "1": 1, "2": 2, "3": 3, "": 3, "DYNAMO_ONCE": 2}
NO_LEVELS = ["4", "-1", "2.0", "two", "True", "3;", "0_3", "\u0663", " 2 2 ", "99999999999999999999"]


def test_c44_level_variable_that_makes_no_sense(tmp_path: Path) -> None:
    """Importing never fails; the first call names variable, value and choices; empty is as good as unset."""
    given: list[str | None] = [*LEVELS, None, *NO_LEVELS]
    environments = [{} if text is None else {"PIECEWORK_LEVEL": text} for text in given]
    children = dict(zip(given, run_forks(PROGRAM, environments, tmp_path / "said"), strict=True))
    for text, level in {**LEVELS, None: 3}.items():
        assert (children[text].returncode, children[text].stdout) == (0, f"imported\n{level}\n"), children[text].stderr
    for text in NO_LEVELS:
        assert (children[text].returncode, children[text].stdout) == (1, "imported\n"), text
        assert last_line(children[text]).startswith(
            "piecework.errors.ConfigError: PIECEWORK_LEVEL must be one of 0, 1, 2, 3"
        )
        assert last_line(children[text]).endswith(f"got {text!r}")


def test_c44_when_the_level_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, by the first call of each compiled thing, whatever its config says."""

    def compiled() -> Any:
        made = piecework.compile(nn.Linear(6, 6), config=CompilationConfig(level=1, piece_compiler="eager"))
        made(torch.ones(2, 6))
        return made

    made = []
    for text in ("0", "3", "2"):
        monkeypatch.setenv("PIECEWORK_LEVEL", text)
        made.append(compiled())
    monkeypatch.setenv("PIECEWORK_LEVEL", "junk")
    for model, level in zip(made, (0, 3, 2), strict=True):
        model(torch.ones(3, 6))
        assert piecework.report(model).level == level
    with pytest.raises(ConfigError, match="PIECEWORK_LEVEL"):
        compiled()
    monkeypatch.delenv("PIECEWORK_LEVEL")
    assert piecework.report(compiled()).level == 1
    piecework.release(made[0])
    made[0](torch.ones(2, 6))
    assert piecework.report(made[0]).level == 1  # Read anew.


# --- C45 ---

BAD_TEXTS = {
    "{'level': 3}": ["double quotes"],
    "{": ["JSON"],
    "[1, 2]": ["[1, 2]", "JSON object"],
    "3": ["3", "JSON object"],
    "null": ["null", "JSON object"],
    '"x"': ["x", "JSON object"],
    '{"levl": 3}': ["'levl'", "did you mean 'level'?"],
    '{"level": "3"}': ["level", "'3'", "without quotes"],
    '{"level": true}': ["level", "True", "0, 1, 2, 3"],
    '{"level": 3.0}': ["level", "3.0", "write 3"],
    '{"splitting_ops": "demo::attn"}': ["splitting_ops", "'demo::attn'", "list"],
    '{"splitting_ops": [1]}': ["splitting_ops[0]", "got 1", "op's name"],
    '{"capture_sizes": {"a": 1}}': ["capture_sizes", "{'a': 1}", "list"],
    '{"custom_ops": ["+a", 3]}': ["custom_ops", "3", "'+name'"],
    '{"level": 1, "level": 3}': ["'level'", "more than once"],
    '{"cache_dir": 5}': ["'cache_dir'"],
    '{"capture_sizes": [NaN]}': ["NaN", "finite"],
    '{"on_failure": "eager", "level": 7}': ["level", "7", "0, 1, 2, 3"],
}


def test_c45_bad_json_as_an_argument() -> None:
    for text, parts in BAD_TEXTS.items():
        with pytest.raises(ConfigError) as caught:
            CompilationConfig.from_json(text)
        missing = [part for part in parts if part.lower() not in str(caught.value).lower()]
        assert not missing, str(caught.value)
    default = CompilationConfig()
    assert CompilationConfig.from_json("{}") == default == CompilationConfig.from_json(default.to_json())
    assert CompilationConfig.from_json('{"splitting_ops": null}').splitting_ops == default.splitting_ops
    given = CompilationConfig(level=2, splitting_ops=[demo.ATTN], capture_sizes=[4], plugin_options={"foo": {"a": [1]}})
    assert CompilationConfig.from_json(given.to_json()) == given


def test_c45_bad_json_in_the_environment(tmp_path: Path) -> None:
    """The call that compiles raises, the variable's name first; text in a file, too, which is named."""
    (tmp_path / "bad.json").write_text('{"levl": 3}')
    (tmp_path / "good.json").write_text('{"level": 2}')
    texts = [*BAD_TEXTS, str(tmp_path / "bad.json"), str(tmp_path / "good.json"), str(tmp_path / "none.json")]
    environments = [{"PIECEWORK_CONFIG": text} for text in texts]
    children = dict(zip(texts, run_forks(PROGRAM, environments, tmp_path / "said"), strict=True))
    good = children.pop(str(tmp_path / "good.json"))
    assert good.stdout == "imported\n2\n", good.stderr
    for text, child in children.items():
        assert (child.returncode, child.stdout) == (1, "imported\n"), text
        # Every line of the error is our own: no dump of a validator's.
        assert last_line(child).startswith("piecework.errors.ConfigError: PIECEWORK_CONFIG"), child.stderr
    assert f"(file '{tmp_path / 'bad.json'}')" in last_line(children[str(tmp_path / "bad.json")])


class FooOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    width: int = 8


class Foo:
    name = "foo"

    @hookimpl
    def piecework_splitting_ops(self, config: CompilationConfig) -> list[Any]:
        return [demo.ATTN] * (read_options(FooOptions, config, "foo").width > 8)


def test_c45_options_of_plugins_are_in_a_section_that_the_plugin_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is half applied: the call after one that is refused is as if that had not been."""

    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        demo.attn(x, x, out)
        return out + 1

    refused = {
        '{"plugin_options": {"foo": {"widht": 9}}, "on_failure": "eager"}': r"plugin_options\['foo'\].widht: .*'width'",
        '{"plugin_options": {"foo": {"width": "9"}}}': r"plugin_options\['foo'\].width: .* got '9'",
        '{"plugin_options": {"fooo": {"width": 9}}}': "did you mean 'foo'",
        '{"plugin_options": {"foo": 3}}': r"plugin_options.* got 3",
    }
    with testing.plugins(Foo()):
        call = piecework.compile(model, config=CompilationConfig(piece_compiler="eager"), dynamic_arg_dims={"x": 0})
        for text, words in refused.items():
            monkeypatch.setenv("PIECEWORK_CONFIG", text)
            with pytest.raises((ConfigError, PluginError), match=words):
                call(torch.ones(2, 6))
        monkeypatch.setenv("PIECEWORK_CONFIG", '{"plugin_options": {"foo": {"width": 9}}}')
        check(call, model, torch.ones(2, 6))
        report = piecework.report(call)
        assert (report.level, report.num_pieces) == (3, 2)
        with pytest.raises(piecework.TraceDepartureError):
            call(torch.ones(2, 6, dtype=torch.float64))


# --- C46 ---


class Part(CustomOp, op_name="c46_a"):
    scale: float = 2.0

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + x

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        return x + x * self.scale


class SecondPart(Part, op_name="c46_b"):
    """Its plugin is against it."""


class ThirdPart(Part, op_name="c46_c"):
    """Its plugin has no opinion."""


class Votes:
    name = "votes"

    @hookimpl
    def piecework_custom_op_enabled(self, op_name: str) -> bool | None:
        return {"c46_a": True, "c46_b": False}.get(op_name)


class UsesOps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Part(), SecondPart(), ThirdPart())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(demo.scale3(x))


SWITCHES = {
    "": "a*",
    "all": "abc",
    "none": "",
    "none,+a": "a",
    "all,-b": "ac",
    "+b,-c": "ab",
    " all , -a ": "bc",
    "+a,+a": "a*",
}
"""Text to the ops that are on; ``*`` is c, which is on below level 3."""
BAD_SWITCHES = ["all,none", "+a,-a", "a", "+", "-", "++a", "+all", "-none", ",", "all,,+a", "+A B"]


def full(text: str) -> str:
    """Return a text with the names of the ops here."""
    return re.sub(r"([+-])([abc])\b", r"\1c46_\2", text)


@pytest.mark.parametrize("level", range(4))
def test_c46_switch_of_custom_ops(level: int) -> None:
    """Which body ran is in the report; either gives the same result."""
    x = torch.rand(4, 6)
    with testing.plugins(Votes()), torch.no_grad():
        expected = UsesOps()(x)
        for text, on in SWITCHES.items():
            model = Way(level, "eager").compile(UsesOps(), custom_ops=full(text))
            close(model(x), expected)
            bodies = {op.op_name: op.implementation for op in piecework.report(model).custom_ops}
            wanted = on.replace("*", "c" if level < 3 else "")
            assert bodies == {
                f"c46_{letter}": "forward_cpu" if letter in wanted else "forward_native" for letter in "abc"
            }, text
        for text in BAD_SWITCHES:
            with pytest.raises(ConfigError, match="custom_ops") as caught:
                CompilationConfig(level=level, custom_ops=full(text))
            assert repr(full(text)) in str(caught.value)


def test_c46_ops_made_while_they_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings at the first call count, not those at construction."""
    x = torch.rand(4, 6)
    monkeypatch.setenv("PIECEWORK_CUSTOM_OPS", "none")
    made, called = UsesOps(), UsesOps()
    expected = called(x)
    monkeypatch.setenv("PIECEWORK_CUSTOM_OPS", "all")
    compiled = Way(3, "eager").compile(made)
    close(compiled(x), expected)
    assert {op.implementation for op in piecework.report(compiled).custom_ops} == {"forward_cpu"}
    close(called(x), expected)
