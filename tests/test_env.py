"""The ``env`` command, through a small application that registers it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import piecework
from piecework.pieces import SplittingOp
from piecework.settings import (
    ENVIRONMENT,
    CompilationConfig,
    reset_process_settings,
    set_attention_ops,
    set_compilation_config,
    set_torch_compile_backend,
)
from piecework.tools.custom_ops import custom_op_as_text
from piecework.tools.env import env_command, env_rows

app = typer.Typer()
app.command("env")(env_command)
runner = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    reset_process_settings()
    yield
    reset_process_settings()


def test_json_gives_every_setting_with_its_origin_and_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_LEVEL", "piecewise")
    monkeypatch.setenv("PIECEWORK_CONFIG", '{"level": 1, "compile_sizes": [1, {"batch": 2}]}')
    set_compilation_config(CompilationConfig(on_failure="eager"))
    set_attention_ops(["a::b", SplittingOp("c::d")])
    set_torch_compile_backend("inductor")
    result = runner.invoke(app, ["--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["settings"].keys() == CompilationConfig.model_fields.keys()
    assert report["settings"]["level"] == {"value": 3, "origin": "PIECEWORK_LEVEL"}
    assert report["settings"]["compile_sizes"] == {"value": [1, {"batch": 2}], "origin": "PIECEWORK_CONFIG"}
    assert report["settings"]["on_failure"] == {"value": "eager", "origin": "set_compilation_config"}
    assert report["settings"]["piece_compiler"] == {"value": None, "origin": "default"}
    assert report["environment"].keys() >= set(ENVIRONMENT)
    assert report["environment"]["PIECEWORK_LEVEL"] == "piecewise"
    assert report["environment"]["PIECEWORK_PLUGINS"] is None
    assert report["process"]["attention_ops"] == ["a::b", repr(SplittingOp("c::d"))]
    assert report["process"]["torch_compile_backend"] == "inductor"
    assert report["versions"]["python"] == platform.python_version()
    assert report["versions"]["piecework"] == piecework.__version__


def test_the_table_has_a_line_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CONFIG", '{"level": 3, "piece_compiler": "[red]x[/red]"}')
    result = runner.invoke(app, [])
    lines = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in result.stdout.splitlines()]
    assert [line[:2] for line in lines if line and line[0]] == [[row.section, row.name] for row in env_rows()]
    assert ["settings", "level", "3 (PIECEWISE)", "PIECEWORK_CONFIG"] in lines
    assert ["settings", "piece_compiler", "'[red]x[/red]'", "PIECEWORK_CONFIG"] in lines
    assert ["environment", "PIECEWORK_LEVEL", "unset", ""] in lines


def test_the_table_says_what_an_open_level_means(monkeypatch: pytest.MonkeyPatch) -> None:
    note = "3 in a call of piecework.compile"
    assert note in runner.invoke(app, []).stdout
    monkeypatch.setenv("PIECEWORK_LEVEL", "0")
    assert note not in runner.invoke(app, []).stdout


def test_a_misspelt_variable_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_LEVLE", "3")
    remarks = {row.name: row.origin for row in env_rows() if row.section == "environment"}
    assert remarks["PIECEWORK_LEVLE"] == "not read; did you mean PIECEWORK_LEVEL?"
    assert remarks["PIECEWORK_LEVEL"] == ""


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PIECEWORK_LEVEL", "fast"),
        ("PIECEWORK_CONFIG", "{'level': 3}"),
        ("PIECEWORK_LOGGING_LEVEL", "loud"),
        ("PIECEWORK_DEBUG", "on"),
    ],
)
def test_a_bad_environment_is_said_on_stderr_with_status_2(
    monkeypatch: pytest.MonkeyPatch, options: list[str], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    result = runner.invoke(app, options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(name)
    assert value in result.stderr
    assert "Traceback" not in result.stderr


class Shown(piecework.CustomOp, op_name="env_shown"):
    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @piecework.Limits(dtypes=(torch.bfloat16,))
    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward_triton(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_custom_ops_are_shown_with_who_decides_and_what_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_PLUGINS", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    shown = json.loads(runner.invoke(app, ["--json"]).stdout)["custom ops"]["env_shown"]
    assert {level: verdict["is_on"] for level, verdict in shown["levels"].items()} == {
        **dict.fromkeys("012", True),
        "3": False,
    }
    assert shown["levels"]["3"]["why"] == "the default at level 3"
    assert shown["candidates"]["cpu"] == [
        {"implementation": "forward_triton", "plugin": None, "limits": "", "why_not": "Triton is not installed"},
        {"implementation": "forward_cpu", "plugin": None, "limits": "bfloat16", "why_not": None},
    ]
    text = custom_op_as_text(shown)
    assert text.splitlines()[:2] == [
        "on at 0, 1, 2 (the default); off at 3 (the default)",
        "cpu: forward_triton (not here: Triton is not installed), then forward_cpu [bfloat16], then forward_native",
    ]
    monkeypatch.setenv("PIECEWORK_CUSTOM_OPS", "none,+env_shown")
    shown = json.loads(runner.invoke(app, ["--json"]).stdout)["custom ops"]["env_shown"]
    assert custom_op_as_text(shown).startswith("on at 0, 1, 2, 3 ('+env_shown' by PIECEWORK_CUSTOM_OPS)\n")


def test_a_custom_op_that_nobody_registered_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CUSTOM_OPS", "none,+env_shwn,+env_shown")
    result = runner.invoke(app, ["--json"])
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("custom_ops: '+env_shwn' by PIECEWORK_CUSTOM_OPS switches nothing: unknown custom op")
    assert "did you mean 'env_shown'?" in line
    json.loads(result.stdout)


def test_a_plugin_that_is_not_there_is_named_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_PLUGINS", "nosuch")
    result = runner.invoke(app, [])
    assert result.exit_code == 2
    assert "plugin 'nosuch' is not installed" in result.output


def test_a_module_is_imported_to_show_its_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "def forward_native(self, x): return x"
    (tmp_path / "ops_of_mine.py").write_text(
        f"import piecework\nclass Mine(piecework.CustomOp, op_name='test_mine'):\n    {body}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "test_mine" not in runner.invoke(app, ["--json"]).stdout
    assert "test_mine" in json.loads(runner.invoke(app, ["--json", "--import", "ops_of_mine"]).stdout)["custom ops"]
    result = runner.invoke(app, ["--import", "no_such_module"])
    assert (result.exit_code, "No module named 'no_such_module'" in result.output) == (2, True)
