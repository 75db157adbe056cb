"""Cases about plugins: broken, chosen and blocked, of another version, in child processes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import demo
from dists import ROOT, Dist, make_dists, run_child, run_forks
from piecework import CompiledPiece, Piece, PluginError, counters, hookimpl, testing
from ways import Way, check

WORKING = """
import sys
from piecework.hookspecs import hookimpl
from piecework.pieces import CompiledPiece
print(__name__, "imported")

@hookimpl
def piecework_compile_piece(piece):
    print(__name__, "called")
    return CompiledPiece(piece.graph.forward)
"""

PROGRAM = """
import piecework
from piecework.plugins import plugin_manager

def f(x):
    return x * 2 + 1

compiled = piecework.compile(f, dynamic_arg_dims={"x": 0})
for rows in (2, 3, 2):
    x = torch.rand(rows, 4)
    assert torch.equal(compiled(x), f(x))
print("active", *(info.name for info in plugin_manager().infos() if info.state == "active"))
"""


# --- C48 ---

BROKEN = {
    "needs_missing_pkg": "import not_there\n",
    "syntax_error": "def (\n",
    "exits": "import sys\nsys.exit(3)\n",
    # Its first hook is right; that one is taken back, too.
    "half_right": WORKING + "\n@hookimpl\ndef piecework_splitting_opps(config): ...\n",
}
CAUSES = {
    "needs_missing_pkg": "No module named 'not_there'",
    "syntax_error": "SyntaxError",
    "exits": "SystemExit: 3",
    "half_right": "did you mean piecework_splitting_ops?",
}


def test_c48_plugins_that_cannot_be_imported(tmp_path: Path) -> None:
    """Each is warned about once, wherever it stands; the good one compiles; what is asked for by name is an error."""
    dists = {name: Dist(name, source) for name, source in {"good": WORKING, **BROKEN}.items()}
    sites = {name: str(make_dists(tmp_path / name, dist)) for name, dist in dists.items()}
    orders = list(itertools.islice(itertools.permutations(sites), 0, None, 29))
    environments: list[dict[str, str]] = [{"PATHS": ":".join(sites[name] for name in order)} for order in orders]
    everywhere = environments[0]
    environments += [{**everywhere, "PIECEWORK_PLUGINS": f"good,{name}"} for name in BROKEN]
    environments += [{**everywhere, "PIECEWORK_CONFIG": f'{{"piece_compiler": "{name}"}}'} for name in BROKEN]
    children = run_forks(PROGRAM, environments, tmp_path / "said")

    for child in children[: len(orders)]:
        assert child.returncode == 0, child.stderr
        assert child.stdout.splitlines()[-2:] == ["mod_good called", "active good"]
        assert "mod_half_right called" not in child.stdout
        for name in BROKEN:
            said = [line for line in child.stderr.splitlines() if f"PluginWarning: plugin '{name}'" in line]
            assert len(said) == 1, child.stderr
            assert f"(piecework-{name} 0.3)" in said[0]
            assert CAUSES[name] in said[0]
    named, asked_for = children[len(orders) : len(orders) + len(BROKEN)], children[len(orders) + len(BROKEN) :]
    for strict in (named, asked_for):
        for name, child in zip(BROKEN, strict, strict=True):
            assert child.returncode == 1
            last = child.stderr.strip().splitlines()[-1]
            assert last.startswith("piecework.errors.PluginError: ")
            assert name in last
            assert CAUSES[name] in last


# --- C50 ---


def test_c50_plugins_chosen_and_blocked_by_name(tmp_path: Path) -> None:
    """A blocked plugin is not imported; names that nobody has are an error that says which there are."""
    site = str(make_dists(tmp_path / "site", Dist("alpha", WORKING), Dist("beta", WORKING), Dist("the_third", WORKING)))
    config = {"PIECEWORK_CONFIG": '{"piece_compiler": "gamma"}'}
    selections: list[str | None] = [None, "alpha", "beta,alpha", "-alpha", "-alpha,-the_third", ""]
    wrong = {
        "alhpa": ["'alhpa'", "did you mean 'alpha'"],
        "-alhpa": ["'alhpa'", "did you mean 'alpha'"],
        "Alpha": ["'Alpha'", "did you mean 'alpha'"],
        "the-third": ["'the-third'", "did you mean 'the_third'"],
        "-inductor": ["'inductor' is not installed", "alpha, beta, the_third"],
        "alpha,-alpha": ["ConfigError", "'alpha,-alpha'"],
        "eager": ["ConfigError", "eager"],
        "-eager": ["ConfigError", "eager"],
        "none": ["ConfigError", "none"],
        ",": ["ConfigError", "','"],
    }
    environments = [{} if text is None else {"PIECEWORK_PLUGINS": text} for text in (*selections, *wrong)]
    blocked = {"PIECEWORK_PLUGINS": "-alpha", "PIECEWORK_CONFIG": '{"piece_compiler": "alpha"}'}
    *children, unknown, of_blocked = run_forks(
        PROGRAM, [{**given, "PATHS": site} for given in (*environments, config, blocked)], tmp_path / "said"
    )
    said = dict(zip((*selections, *wrong), children, strict=True))

    for text, imported, called in (
        (None, ["alpha", "beta", "the_third"], "alpha"),
        ("alpha", ["alpha"], "alpha"),
        ("beta,alpha", ["alpha", "beta"], "beta"),
        ("-alpha", ["beta", "the_third"], "beta"),
        ("-alpha,-the_third", ["beta"], "beta"),
        ("", [], None),
    ):
        child = said[text]
        assert child.returncode == 0, child.stderr
        assert sorted(re.findall(r"mod_(\w+) imported", child.stdout)) == imported
        assert re.findall(r"mod_(\w+) called", child.stdout) == ([called] if called else [])
        assert sorted(child.stdout.splitlines()[-1].split()[1:]) == imported
    assert "no piece compiler is there" in said[""].stderr
    for text, parts in wrong.items():
        assert said[text].returncode == 1, text
        assert said[text].stdout == "", text
        last = said[text].stderr.strip().splitlines()[-1]
        assert all(part in last for part in ("PIECEWORK_PLUGINS", *parts)), last
    for child, parts in (
        (unknown, ["'gamma'", "alpha", "beta", "the_third", "eager"]),
        (of_blocked, ["'alpha'", "blocked by PIECEWORK_PLUGINS"]),
    ):
        assert child.returncode == 1
        last = child.stderr.strip().splitlines()[-1]
        assert last.startswith("piecework.errors.PluginError: piece_compiler=")
        assert all(part in last for part in parts), last


def test_c50_only_compiler_is_blocked(tmp_path: Path) -> None:
    """The one that the project brings: pieces run op by op and that is said, or an error where it is asked for."""
    site = make_dists(tmp_path / "site", Dist("inductor", "", target="piecework_inductor"))
    environments = [
        {"PIECEWORK_PLUGINS": "-inductor"},
        {"PIECEWORK_PLUGINS": "-inductor", "PIECEWORK_CONFIG": '{"piece_compiler": "inductor"}'},
    ]
    passes, fails = run_forks(PROGRAM, environments, tmp_path / "said", site, ROOT / "plugins" / "inductor")
    assert passes.returncode == 0, passes.stderr
    assert "inductor is blocked: blocked by PIECEWORK_PLUGINS" in passes.stderr
    assert (fails.returncode, fails.stdout) == (1, "")
    assert "'inductor': the plugin is installed but blocked" in fails.stderr


# --- C52 ---


def compile_by_graph(piece: Piece) -> CompiledPiece:
    return CompiledPiece(piece.graph.forward)


class Old:
    @hookimpl
    def piecework_compile_piece(self, piece: Piece, inputs_v0: object) -> CompiledPiece:
        return compile_by_graph(piece)


class Few:
    @hookimpl
    def piecework_compile_piece(self, piece: Piece) -> CompiledPiece:
        return compile_by_graph(piece)


class Nothing:
    @hookimpl
    def piecework_compile_piece(self) -> None:
        """Take no argument at all."""


class Typo:
    @hookimpl
    def piecework_splitting_ops(self) -> list[Any]:
        return [demo.SCALE3]

    @hookimpl
    def piecework_compile_peice(self, piece: Piece) -> CompiledPiece:
        return compile_by_graph(piece)


class Future:
    @hookimpl(optionalhook=True)
    def piecework_brand_new_hook(self, x: object) -> None: ...


class Later(Few):
    PIECEWORK_PLUGIN_API = 2


REFUSED = {
    Old: "piecework_compile_piece with argument 'inputs_v0', .* signature is piecework_compile_piece(piece, config)",
    Typo: "unknown hook 'piecework_compile_peice'; did you mean piecework_compile_piece?",
    Later: "version 2 of the hooks (PIECEWORK_PLUGIN_API), this piecework has version 1; upgrade piecework",
}


def scaled(x: torch.Tensor) -> torch.Tensor:
    return demo.scale3(x + 1) * 2


@pytest.mark.parametrize("plugin", [Old, Few, Nothing, Typo, Future, Later], ids=lambda plugin: plugin.__name__)
def test_c52_plugin_for_another_version_of_the_hooks(plugin: type) -> None:
    """What can't be called is refused whole, with the version of the hooks; what can be, takes part."""
    with testing.plugins() as manager:
        if plugin in REFUSED:
            words = re.escape(REFUSED[plugin]).replace(r"\.\*", ".*")
            with pytest.raises(PluginError, match=rf"^plugin '{plugin.__name__}' .*{words}") as caught:
                manager.register(plugin)
            assert "version 1" in str(caught.value)
        else:
            manager.register(plugin)
        assert [info.name for info in manager.infos()] == [
            *([] if plugin in REFUSED else [plugin.__name__]),
            "emulated",
        ]
        for is_captured in (False, True):
            call = Way(3, "eager", is_captured).compile(
                scaled,
                captures=[4],
                piece_compiler="Few" if plugin is Few else "eager",
                splitting_ops=None,
                dims={"x": 0},
            )
            # Nothing of a refused plugin is left: its splitting op is not cut at.
            with counters.expect(num_pieces_seen=1, num_piece_compilations=plugin is Few):
                for rows in (4, 3, 4):
                    check(call, scaled, torch.randn(rows, 6))


ENTRY_POINT = """
from piecework.hookspecs import hookimpl
from piecework.pieces import CompiledPiece
{more}
@hookimpl{mark}
def {hook}({arguments}):
    return CompiledPiece(piece.graph.forward)
"""


def test_c52_entry_points_for_another_version_are_left_out(tmp_path: Path) -> None:
    """The same as entry points: a warning for each that is left out, and the others compile."""

    def dist(name: str, hook: str, arguments: str, more: str = "", mark: str = "") -> Dist:
        return Dist(name, ENTRY_POINT.format(more=more, mark=mark, hook=hook, arguments=arguments))

    site = make_dists(
        tmp_path / "site",
        dist("old", "piecework_compile_piece", "piece, inputs_v0"),
        dist("typo", "piecework_compile_peice", "piece"),
        dist("later", "piecework_compile_piece", "piece", "PIECEWORK_PLUGIN_API = 2"),
        dist("few", "piecework_compile_piece", "piece"),
        dist("future", "piecework_brand_new_hook", "x", mark="(optionalhook=True)"),
    )
    child = run_child("import torch\n" + PROGRAM, site, PIECEWORK_CONFIG='{"piece_compiler": "few"}')
    assert child.returncode == 0, child.stderr
    assert child.stdout == "active few future\n"
    for plugin, name in ((Old, "old"), (Typo, "typo"), (Later, "later")):
        said = [line for line in child.stderr.splitlines() if f"PluginWarning: plugin '{name}'" in line]
        assert len(said) == 1, child.stderr
        assert re.search(re.escape(REFUSED[plugin]).replace(r"\.\*", ".*"), said[0])
        assert "version 1" in said[0]


# --- C54 ---

CHILDREN = """
import multiprocessing, sys, threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import torch
import demo
import piecework
from piecework import counters, testing
from piecework.plugins import plugin_manager
from ways import Way, check

def model(x):
    return demo.scale3(x + 1) * 2

def load(_):
    return plugin_manager()

def own_model(results, method):
    call = Way(3, "alpha").compile(model, dims={"x": 0})
    for rows in (4, 3):
        check(call, model, torch.randn(rows, 6))
    results.put((method, plugin_manager().order("piecework_compile_piece"), counters.num_graphs_seen))

if __name__ == "__main__":
    for _ in range(2):
        load(None)
    with ThreadPoolExecutor(8) as threads:
        assert len(set(map(id, threads.map(load, range(8))))) == 1
    piecework.set_compilation_config(piecework.CompilationConfig(piece_compiler="alpha"))
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        results = context.Queue()
        process = context.Process(target=own_model, args=(results, method))
        process.start()
        print(*results.get(timeout=100), flush=True)
        process.join(100)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        assert pool.submit(piecework.CompilationConfig).result(100) == piecework.CompilationConfig()
        print("pool", pool.submit(own_config).result(100), flush=True)
"""
CHILDREN = CHILDREN.replace(
    "if __name__",
    """def own_config():
    from piecework.settings import compilation_config
    return plugin_manager().order("piecework_compile_piece"), compilation_config().piece_compiler

if __name__""",
)


def test_c54_plugins_in_child_processes(tmp_path: Path) -> None:
    """Loaded once in each process, and once in all where it is forked; counts begin at zero in each."""
    site = make_dists(tmp_path / "site", Dist("alpha", WORKING))
    (site / "children.py").write_text(CHILDREN)
    child = run_child("-m children", site, Path(__file__).parent, ROOT / "tests")
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    # The two processes that start anew, and this one.
    assert lines.count("mod_alpha imported") == 3, child.stdout
    for method in ("fork", "spawn", "forkserver"):
        assert f"{method} ('alpha',) 1" in lines
    assert lines.count("mod_alpha called") == 3 * 2  # Pieces.
    assert "pool (('alpha',), 'alpha')" in lines


FORK = """
import os, signal, threading
import torch
import demo
import piecework
from piecework import CompiledPiece, counters, hookimpl, testing
from ways import Way, check, close

is_held, is_over = threading.Event(), threading.Event()
result = torch.zeros(4, 6)

def hold():
    "Stay where another thread is, until the main thread has forked."
    if threading.current_thread() is not threading.main_thread():
        is_held.set()
        is_over.wait()

class Graphs:
    @hookimpl
    def piecework_compile_piece(self, piece):
        hold()
        return CompiledPiece(piece.graph.forward)

asked = []

class Capturing:
    is_there = True

    @hookimpl(wrapper=True)
    def piecework_capturer(self):
        asked.append(os.getpid())
        answer = yield
        return answer if self.is_there else None

@torch.compiler.assume_constant_result
def traced_number():
    hold()
    return 1

def scale(x):
    hold()
    return x * 3

def model(x):
    return demo.scale3(x + 1) * 2

def other(x):
    return demo.scale3(x + 2) * 2

def tracing(x):
    return demo.scale3(x + traced_number()) * 2

def in_thread(call):
    thread = threading.Thread(target=call, args=(torch.randn(4, 6),))
    thread.start()
    assert is_held.wait(60)
    return thread

def compiled(target, **config):
    return Way(3, "Graphs", True).compile(target, captures=[4], dims={{"x": 0}}, **config)

def check_all(call, target):
    for rows in (4, 3, 4):
        check(call, target, torch.randn(rows, 6))

with testing.plugins(Graphs(), Capturing()), torch.no_grad():
    call = compiled(model)
    check_all(call, model)
    assert (counters.num_graph_captures, counters.num_graph_replays, asked) == (2, 6, [os.getpid()])
    {before}
    num_asked = len(asked)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # Where it hangs.
        assert not any(counters.snapshot().values())
        {child}
        print("done", flush=True)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    is_over.set()
    {parent}
    assert status == 0
    check_all(call, model)
    assert asked.count(os.getpid()) == num_asked
"""


def run_fork(tmp_path: Path, child: str, *, before: str = "", parent: str = "") -> None:
    code = FORK.format(before=before, child=child.strip().replace("\n", "\n        "), parent=parent)
    (tmp_path / "fork.py").write_text(code)
    ended = run_child("-m fork", tmp_path, Path(__file__).parent, ROOT / "tests")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_c54_captured_model_in_a_forked_child(tmp_path: Path) -> None:
    """Captured again by a capturer of the child's own, without tracing; frozen, refused; a new model shares it."""
    run_fork(
        tmp_path,
        """
check_all(call, model)
assert counters.snapshot() == dict.fromkeys(counters.snapshot(), 0) | dict(num_graph_captures=2, num_graph_replays=6)
assert asked[1:] == [os.getpid()]
assert piecework.report(call).num_recaptures == 1
fresh = compiled(other)
check_all(fresh, other)
check_all(call, model)
assert (counters.num_graphs_seen, counters.num_graph_captures, len(asked)) == (1, 4, 2)
grandchild = os.fork()
if grandchild == 0:
    signal.alarm(60)
    piecework.freeze()
    try:
        call(torch.randn(4, 6))
    except piecework.StaleCaptureError as error:
        assert not any(counters.snapshot().values())
        os._exit("captured by the process that this one was forked from" in str(error))
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 1
""",
    )


def test_c54_forked_child_where_nobody_captures(tmp_path: Path) -> None:
    """An error where captures were asked for, a warning and uncaptured calls where failures run eagerly."""
    run_fork(
        tmp_path,
        """
Capturing.is_there = False
try:
    call(torch.randn(4, 6))
except piecework.CaptureError as error:
    assert "no plugin records graphs on cpu in this process, which was forked" in str(error)
else:
    raise AssertionError
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    check_all(relaxed, model)
assert "answers size 4 uncaptured" in str(said[0].message)
assert counters.num_graph_replays == 0
""",
        before='relaxed = compiled(model, on_failure="eager"); check_all(relaxed, model); import warnings',
    )


def test_c54_fork_while_another_thread_compiles(tmp_path: Path) -> None:
    """The child compiles by itself, and does not wait for a thread that it does not have."""
    run_fork(
        tmp_path,
        "check_all(call, model)\ncheck_all(late, other)\ncheck_all(compiled(model), model)",
        before="late = compiled(other); thread = in_thread(late)",
        parent="thread.join(); check_all(late, other)",
    )


def test_c54_fork_while_another_thread_runs_a_captured_call(tmp_path: Path) -> None:
    """The memory of all captures is in use by a thread that the child does not have: its calls are captured anew."""
    run_fork(
        tmp_path,
        """
check_all(busy, model)
check_all(call, model)
assert (counters.num_graph_captures, counters.num_graph_replays) == (4, 12)
""",
        before="""op = piecework.SplittingOp("demo::scale3", rows_independent=True, implementation=scale)
    busy = compiled(model, splitting_ops=[op])
    check_all(busy, model); thread = in_thread(busy)""",
        parent="thread.join(); check_all(busy, model)",
    )


def test_c54_fork_while_another_thread_traces(tmp_path: Path) -> None:
    """What was traced goes on, and notices what it should; torch itself can't trace there, and that is said."""
    run_fork(
        tmp_path,
        """
check_all(call, model)
late(torch.ones(4, 6))
layer.weight = torch.nn.Parameter(torch.zeros(6, 6))
close(late(torch.ones(4, 6)), layer(torch.ones(4, 6)))
layer._parameters["weight"] = torch.nn.Parameter(torch.ones(6, 6))
close(late(torch.ones(4, 6)), layer(torch.ones(4, 6)))
try:
    compiled(other)(torch.randn(4, 6))
except piecework.CompileError as error:
    assert "forked while another thread was tracing" in str(error)
else:
    raise AssertionError
""",
        before="""layer = torch.nn.Linear(6, 6); late = Way(3, "Graphs").compile(layer); late(torch.ones(4, 6))
    thread = in_thread(compiled(tracing))""",
        parent="thread.join()",
    )


@pytest.mark.parametrize("level", [1, 3])
def test_c54_fork_while_another_thread_traces_without_piecework(tmp_path: Path, level: int) -> None:
    run_fork(
        tmp_path,
        f"""
check_all(call, model)
try:
    Way({level}, "Graphs").compile(torch.nn.Linear(6, 6))(torch.randn(4, 6))
except piecework.CompileError as error:
    assert "forked while another thread was tracing" in str(error)
else:
    raise AssertionError
""",
        before='thread = in_thread(torch.compile(tracing, backend="eager"))',
        parent="thread.join()",
    )
