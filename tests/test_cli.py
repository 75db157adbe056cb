"""``python -m piecework``, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

from dists import COMPILER, Dist, make_dists, run_child

SITE = (
    Dist("zeta", COMPILER.replace('print("imported", __name__)', "")),
    Dist("alpha", COMPILER.replace('print("imported", __name__)', "").replace("@hookimpl", "@hookimpl(trylast=True)")),
    Dist("broken", "import not_there_at_all\n"),
    Dist("off"),
)


def test_json_shows_what_is_known_of_each_plugin(tmp_path: Path) -> None:
    site = make_dists(tmp_path / "site", *SITE)
    child = run_child("-m piecework plugins --json", site, PIECEWORK_PLUGINS="-off")
    assert (child.returncode, child.stderr) == (0, "")
    report = json.loads(child.stdout)
    assert report["order"] == {
        "piecework_custom_op_enabled": [],
        "piecework_custom_op_implementations": [],
        "piecework_splitting_ops": [],
        "piecework_compile_piece": ["zeta", "alpha"],
        "piecework_capturer": [],
    }
    plugins = report["plugins"]
    assert [(p["name"], p["position"], p["state"]) for p in plugins] == [
        ("zeta", 0, "active"),
        ("alpha", 1, "active"),
        ("broken", None, "failed"),
        ("off", None, "blocked"),
    ]
    assert plugins[0]["hooks"] == ["piecework_compile_piece"]
    assert {(p["distribution"], p["version"]) for p in plugins} == {(f"piecework-{d.plugin}", "0.3") for d in SITE}
    assert all(p["load_s"] > 0 for p in plugins[:3])
    assert "No module named 'not_there_at_all'" in plugins[2]["cause"]
    assert plugins[3]["cause"] == "blocked by PIECEWORK_PLUGINS"


def test_table_shows_the_same_even_if_a_named_plugin_fails(tmp_path: Path) -> None:
    site = make_dists(tmp_path / "site", *SITE)
    child = run_child("-m piecework plugins", site, PIECEWORK_PLUGINS="broken,alpha")
    assert (child.returncode, child.stderr) == (0, "")
    for text in ("failed: can't be imported", "not named in PIECEWORK_PLUGINS", "piecework-off", "0.3", " ms"):
        assert text in child.stdout
    assert "piecework_compile_piece: alpha\n" in child.stdout


def test_user_errors_are_told_without_a_traceback(tmp_path: Path) -> None:
    site = make_dists(tmp_path / "site", Dist("alpha"))
    for selection, text in (("alhpa", "PluginError: PIECEWORK_PLUGINS: plugin 'alhpa'"), ("a,-a", "ConfigError: PIE")):
        child = run_child("-m piecework plugins", site, PIECEWORK_PLUGINS=selection)
        assert child.returncode == 2
        assert child.stderr.startswith(text)
        assert len(child.stderr.splitlines()) == 1
        assert child.stdout == ""


def test_unknown_command_is_refused_and_help_lists_the_commands() -> None:
    assert run_child("-m piecework plugin").returncode == 2
    said = run_child("-m piecework --help").stdout
    assert "plugins" in said
    assert "env" in said
