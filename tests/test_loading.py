"""Installed plugins: found, selected, isolated and loaded once, in fresh processes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from dists import COMPILER, Dist, make_dists, run_child

SHOW = """
import json, sys
from piecework.plugins import plugin_manager
manager = plugin_manager()
print("INFOS" + json.dumps([[i.name, i.state, i.cause, i.position] for i in manager.infos()]))
print("ORDER" + json.dumps(manager.order("piecework_compile_piece")))
"""

BAD = [
    Dist("needs_missing", "import not_there_at_all\n"),
    Dist("syntax_error", "def (\n"),
    Dist("exits", "import sys\nsys.exit('bye')\n"),
    Dist("raises_when_read", "raise RuntimeError('own words')\n"),
    Dist("no_attribute", "", target="mod_no_attribute:plugin"),
    Dist("misspelt", COMPILER.replace("compile_piece", "compile_peice")),
    Dist("wrong_argument", COMPILER.replace("(piece)", "(piece, graph)")),
    Dist("later", "PIECEWORK_PLUGIN_API = 2\n" + COMPILER),
    Dist("eager", COMPILER),
    Dist("asks", "from piecework.plugins import plugin_manager\nplugin_manager()\n"),
]
CAUSES = {
    "needs_missing": "ModuleNotFoundError: No module named 'not_there_at_all'",
    "syntax_error": "SyntaxError",
    "exits": "SystemExit: bye",
    "raises_when_read": "RuntimeError: own words",
    "no_attribute": "AttributeError",
    "misspelt": "did you mean piecework_compile_piece?",
    "wrong_argument": "piecework_compile_piece(piece, config)",
    "later": "version 2 of the hooks",
    "eager": "can't have the name 'eager'",
    "asks": "asks for the plugins while it is being loaded",
}


def infos(stdout: str) -> dict[str, tuple[str, str | None, int | None]]:
    line = next(line for line in stdout.splitlines() if line.startswith("INFOS"))
    return {name: (state, cause, position) for name, state, cause, position in json.loads(line[5:])}


def order(stdout: str) -> list[str]:
    return json.loads(next(line for line in stdout.splitlines() if line.startswith("ORDER"))[5:])


def test_broken_plugins_are_warned_about_once_and_the_others_work(tmp_path: Path) -> None:
    site = make_dists(tmp_path / "site", *BAD, Dist("good"))
    child = run_child(SHOW + "plugin_manager()", site)
    assert child.returncode == 0, child.stderr
    assert order(child.stdout) == ["good"]
    for dist in BAD:
        subject = f"PluginWarning: plugin '{dist.plugin}' (piecework-{dist.plugin} 0.3) "
        lines = [line for line in child.stderr.splitlines() if subject in line]
        assert len(lines) == 1, child.stderr
        assert CAUSES[dist.plugin] in lines[0]
        state, cause, position = infos(child.stdout)[dist.plugin]
        assert (state, position) == ("failed", None)
        assert CAUSES[dist.plugin] in (cause or "")


@pytest.mark.parametrize("dist", [d for d in BAD if d.plugin != "eager"], ids=lambda dist: dist.plugin)
def test_broken_plugin_named_explicitly_raises_from_the_cause(tmp_path: Path, dist: Dist) -> None:
    site = make_dists(tmp_path / "site", dist, Dist("good"))
    child = run_child(SHOW, site, PIECEWORK_PLUGINS=f"good,{dist.plugin}")
    assert child.returncode == 1
    last = child.stderr.strip().splitlines()[-1]
    assert last.startswith(f"piecework.errors.PluginError: plugin '{dist.plugin}' (piecework-{dist.plugin} 0.3) ")
    assert CAUSES[dist.plugin] in last
    if dist.plugin == "needs_missing":
        assert "direct cause" in child.stderr


def test_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    site = make_dists(tmp_path / "site", Dist("slow", "raise KeyboardInterrupt\n"), Dist("good"))
    child = run_child(SHOW, site)
    assert "KeyboardInterrupt" in child.stderr
    assert "INFOS" not in child.stdout


def test_failed_or_blocked_piece_compiler_says_why(tmp_path: Path) -> None:
    site = make_dists(tmp_path / "site", BAD[0], Dist("good"), Dist("blocked"))
    code = """
from types import SimpleNamespace
from piecework.errors import PluginError
from piecework.plugins import plugin_manager
for name in ("needs_missing", "blocked"):
    try:
        plugin_manager().compile_piece(SimpleNamespace(name="p"), SimpleNamespace(piece_compiler=name))
    except PluginError as error:
        print(error)
"""
    child = run_child(code, site, PIECEWORK_PLUGINS="-blocked")
    failed, blocked = [line for line in child.stdout.splitlines() if line.startswith("piece_compiler")]
    assert "failed: can't be imported" in failed
    assert "No module named 'not_there_at_all'" in failed
    assert "blocked: blocked by PIECEWORK_PLUGINS" in blocked


@pytest.mark.parametrize(
    ("selection", "imported"),
    [
        (None, ["alpha", "beta", "zeta"]),
        ("", []),
        ("zeta,alpha", ["zeta", "alpha"]),
        (" -alpha ", ["beta", "zeta"]),
        ("-alpha,-beta", ["zeta"]),
    ],
)
def test_selection_is_applied_before_import(tmp_path: Path, selection: str | None, imported: list[str]) -> None:
    site = make_dists(tmp_path / "site", Dist("zeta"), Dist("alpha"), Dist("beta"))
    child = run_child(SHOW, site, **({} if selection is None else {"PIECEWORK_PLUGINS": selection}))
    assert order(child.stdout) == imported, child.stderr
    assert sorted(line[13:] for line in child.stdout.splitlines() if "imported" in line) == sorted(imported)
    assert child.stderr == ""
    states = {name: state for name, (state, _, _) in infos(child.stdout).items()}
    assert states == {name: "active" if name in imported else "blocked" for name in ("alpha", "beta", "zeta")}


@pytest.mark.parametrize(
    ("selection", "texts"),
    [
        ("alhpa", ["'alhpa'", "did you mean 'alpha'?", "installed plugins: alpha, silly_attention"]),
        ("-alhpa", ["'alhpa'", "did you mean 'alpha'?"]),
        ("Silly-Attention", ["did you mean 'silly_attention'?", "installed plugins: silly_attention, alpha"]),
        ("piecework-alpha", ["the plugin of distribution piecework-alpha is called 'alpha'"]),
        ("gamma", ["'gamma' is not installed; installed plugins: alpha, silly_attention"]),
        ("alpha,-silly_attention", ["ConfigError", "got both"]),
    ],
)
def test_wrong_selection_is_an_error_with_the_names(tmp_path: Path, selection: str, texts: list[str]) -> None:
    site = make_dists(tmp_path / "site", Dist("alpha"), Dist("silly_attention"))
    child = run_child(SHOW, site, PIECEWORK_PLUGINS=selection)
    assert child.returncode == 1
    assert "imported" not in child.stdout
    for text in texts:
        assert text in child.stderr


def test_order_does_not_depend_on_the_order_of_installation(tmp_path: Path) -> None:
    last = COMPILER.replace("@hookimpl", "@hookimpl(trylast=True)")
    first = COMPILER.replace("@hookimpl", "@hookimpl(tryfirst=True)")
    dists = [Dist("a", last), Dist("b"), Dist("c", last), Dist("d", first), Dist("e", first)]
    for index, arranged in enumerate(itertools.islice(itertools.permutations(dists), 0, None, 29)):
        sites = [make_dists(tmp_path / f"{index}-{number}", dist) for number, dist in enumerate(arranged)]
        child = run_child(SHOW, *sites)
        assert order(child.stdout) == ["d", "e", "b", "a", "c"]
    child = run_child(SHOW, make_dists(tmp_path / "all", *dists), PIECEWORK_PLUGINS="c,b,e,a")
    assert order(child.stdout) == ["c", "b", "e", "a"]


def test_same_name_in_two_distributions_is_reported_and_neither_loaded(tmp_path: Path) -> None:
    dists = [Dist("twin", name="piecework-one"), Dist("twin", name="piecework-two"), Dist("good")]
    site = make_dists(tmp_path / "site", *dists)
    child = run_child(SHOW, site)
    assert order(child.stdout) == ["good"]
    assert child.stderr.count("(piecework-one, piecework-two)") == 2
    child = run_child(SHOW, site, PIECEWORK_PLUGINS="twin")
    assert "PluginError: plugin 'twin' (piecework-one 0.3) shares its name" in child.stderr
    child = run_child(SHOW, site, PIECEWORK_PLUGINS="-twin")
    assert child.stderr == ""


def test_entry_point_may_name_an_object_or_a_class(tmp_path: Path) -> None:
    source = """
from piecework.hookspecs import hookimpl
PIECEWORK_PLUGIN_API = {api}
class Plugin:
    @hookimpl
    def piecework_compile_piece(self): ...
plugin = Plugin()
"""
    site = make_dists(
        tmp_path / "site",
        Dist("an_object", source.format(api=1), target="mod_an_object:plugin"),
        Dist("a_class", source.format(api=1), target="mod_a_class:Plugin"),
        Dist("later_object", source.format(api=3), target="mod_later_object:plugin"),
    )
    child = run_child(SHOW, site)
    assert order(child.stdout) == ["a_class", "an_object"]
    assert "version 3 of the hooks" in (infos(child.stdout)["later_object"][1] or "")


def test_forked_child_keeps_plugins_and_spawned_child_loads_them(tmp_path: Path) -> None:
    site = make_dists(tmp_path / "site", Dist("alpha"))
    (site / "children.py").write_text("""
import multiprocessing, os, sys, threading
from piecework.plugins import plugin_manager

def child():
    print(os.getpid() != int(sys.argv[1]), "child", plugin_manager().order("piecework_compile_piece"), flush=True)

if __name__ == "__main__":
    sys.argv.append(str(os.getpid()))
    plugin_manager()
    for method in ("fork", "spawn"):
        print(method, flush=True)
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join(60)
        assert process.exitcode == 0
""")
    child = run_child("-m children", site)
    said = "True child ('alpha',)"
    assert child.stdout.splitlines() == ["imported mod_alpha", "fork", said, "spawn", "imported mod_alpha", said]


def test_child_forked_while_another_thread_loads_loads_by_itself(tmp_path: Path) -> None:
    code = """
import os, signal, threading
from piecework import plugins, registry

def find():
    if threading.current_thread() is not threading.main_thread():
        is_loading.set()
        is_over.wait()
    return original()

is_loading, is_over = threading.Event(), threading.Event()
original, registry.find_installed_plugins = registry.find_installed_plugins, find
thread = threading.Thread(target=plugins.plugin_manager)
thread.start()
is_loading.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    print("child", plugins.plugin_manager().order("piecework_compile_piece"), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
is_over.set()
thread.join()
"""
    child = run_child(code, make_dists(tmp_path / "site", Dist("alpha")))
    assert "child ('alpha',)" in child.stdout, child.stderr
