"""``python -m piecework bench``: what it checks, what it times, and what it tells."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dists import run_child
from piecework.tools import cli
from piecework.tools.bench.bounds import Bound
from piecework.tools.bench.contenders import Bench, Contender, SkipContender
from piecework.tools.bench.measure import NUM_CHECKS, Measured, measure
from piecework.tools.bench.memory import NUM_PASSES
from piecework.tools.bench.model import Case
from piecework.tools.bench.output import write_json
from piecework.tools.bench.plugins import Plugins
from piecework.tools.bench.timing import NUM_WARM_UPS, Timed, host_times

CPU = torch.device("cpu")
TINY = "--layers 2 --rows 2 --hidden 16 --rounds 2"
CHOSEN = "eager,uncaptured,stitched,stitched-no-guards,piecewise,piecewise-loop,full,manual-graph,breakable"


@pytest.fixture(scope="module")
def toy_llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return figures_of(
        f"toy-llama {TINY} --piece-compiler eager --only {CHOSEN} --memory --sizes 1-2",
        tmp_path_factory.mktemp("toy") / "figures.json",
    )


@pytest.fixture(scope="module")
def dispatch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return figures_of(f"dispatch {TINY}", tmp_path_factory.mktemp("dispatch") / "figures.json")


@pytest.fixture
def bench() -> Iterator[Bench]:
    plugins = Plugins(CPU)
    with plugins.in_use():
        yield Bench(Case(2, 16, 2, CPU, torch.float32), plugins, piece_compiler="eager")


def figures_of(command: str, file: Path) -> dict[str, Any]:
    child = run_child(f"-m piecework bench {command} --json {file}")
    assert (child.returncode, child.stderr) == (0, "")
    figures = json.loads(file.read_text())
    for contender in figures["runs"][0]["contenders"]:
        assert contender["name"] in child.stdout
    for bound in figures["bounds"]:
        assert bound["what"] in child.stdout
    assert figures["command"] == f"python -m piecework bench {command.split()[0]}"
    assert figures["command_line"] == f"python -m piecework bench {command} --json {file}"
    return figures


def by_name(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {contender["name"]: contender for contender in figures["runs"][0]["contenders"]}


def test_json_of_toy_llama_says_what_was_measured_where_and_with_what(toy_llama: dict[str, Any]) -> None:
    assert (toy_llama["device"], toy_llama["capturer"]) == ("cpu, torch threads: 1", "emulates")
    assert toy_llama["versions"]["torch"] == torch.__version__
    assert set(toy_llama["versions"]) == {"piecework", "torch", "cuda", "python"}
    arguments = {"layers": "2", "hidden": 16, "rows": 2, "rounds": 2, "exact": False, "dtype": "torch.float32"}
    assert toy_llama["arguments"] == arguments
    (memory,) = toy_llama["memory"]
    assert (memory["sizes"], memory["num_graphs"], memory["skipped"]) == ([1, 2], 6, None)
    assert memory["pool_bytes"] >= memory["largest_pool_bytes"] > 0
    assert len(memory["capture_s"]) == len(memory["calls_s"]) == len(memory["bare_s"]) == NUM_PASSES
    assert all(0 < calls < whole for calls, whole in zip(memory["calls_s"], memory["capture_s"], strict=True))


def test_each_contender_is_timed_and_right_or_skipped_for_a_reason(toy_llama: dict[str, Any]) -> None:
    contenders = by_name(toy_llama)
    assert set(contenders) == set(CHOSEN.split(","))
    for name in ("manual-graph", "breakable"):
        assert contenders[name]["status"] == "skipped"
        assert "needs a CUDA device" in contenders.pop(name)["note"]
    for contender in contenders.values():
        assert contender["status"] == "timed"
        assert contender["distance"] <= contender["allowed_distance"]
        assert 0 < contender["host_us"]["low"] <= contender["host_us"]["median"] <= contender["host_us"]["high"]
        assert contender["device_us"] is None
    assert contenders["piecewise-loop"]["ratio"] == 1
    assert contenders["piecewise"]["note"] == "3 graphs, 2 ops; compiled for any rows"
    assert contenders["full"]["note"] == "1 graph, 0 ops; compiled for 2 rows"


def test_parts_of_a_forward_add_up_to_the_whole(toy_llama: dict[str, Any]) -> None:
    parts = toy_llama["runs"][0]["parts"]
    assert set(parts) == {"piecewise", "full"}
    for by_part in parts.values():
        whole = by_part.pop("whole")
        assert list(by_part) == ["select", "copy", "replay", "splitting ops", "finish", "rest"]
        assert sum(by_part.values()) == pytest.approx(whole)


def test_bounds_are_met_or_missed_by_their_figures_and_not_measured_without(
    toy_llama: dict[str, Any], dispatch: dict[str, Any]
) -> None:
    states = {bound["what"]: bound["state"] for bound in toy_llama["bounds"]}
    assert states["host, piecewise: 1.03 x its bare loop + 25 us"] != "not measured"
    assert states["pool of 2 sizes: ratio to the largest alone"] != "not measured"
    for what in (
        "host, uncaptured: torch-compile",
        "host, uncaptured: torch-compile-varied",
        "host, full: manual-graph + 30 us",
        "capture of 2 sizes again: ratio to torch.cuda.graph of the same pieces",
    ):
        assert states[what] == "not measured"
    for bound in toy_llama["bounds"] + dispatch["bounds"]:
        measured = None not in (bound["value"], bound["limit"])
        state = ("met" if bound["value"] <= bound["limit"] else "missed") if measured else "not measured"
        assert bound["state"] == state
    assert [Bound("a", 2, *given).state for given in ((1, 2), (2, 2), (3, 2), (None, 2), (1, None))] == [
        *("met", "met", "missed", "not measured", "not measured")
    ]


def test_dispatch_times_all_its_contenders_with_nothing_to_do(dispatch: dict[str, Any]) -> None:
    assert (dispatch["capturer"], dispatch["memory"]) == ("does nothing", [])
    contenders = by_name(dispatch)
    assert {"torch-compile-nothing", "stitched", "stitched-no-guards", "uncaptured", "straight-line"} < set(contenders)
    assert {contender["status"] for contender in contenders.values()} == {"timed"}
    assert contenders["piecewise"]["note"].startswith("3 graphs, 2 ops")
    assert contenders["piecewise-loop"]["host_us"]["median"] < contenders["piecewise"]["host_us"]["median"]
    assert set(dispatch["runs"][0]["parts"]) == {"piecewise", "piecewise-static"}
    assert {bound["state"] for bound in dispatch["bounds"]} <= {"met", "missed"}
    assert len(dispatch["bounds"]) == 4


def returning(change: Callable[[torch.Tensor], torch.Tensor], calls: list[str]) -> Callable[[Bench], Contender]:
    def build(bench: Bench) -> Contender:
        ids = bench.new_ids()

        def call() -> torch.Tensor:
            calls.append("")
            return change(bench.eager_model(ids))

        return Contender(call, ids)

    return build


@pytest.mark.parametrize("change", [lambda x: x * 1.01, lambda x: x * float("nan"), torch.zeros_like])
def test_contender_that_differs_from_eager_is_wrong_and_never_timed(
    bench: Bench, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    calls: list[str] = []
    told: list[Measured] = []
    builders = {"eager": Bench.eager, "other": returning(change, calls)}
    run = measure(bench, builders, num_rounds=2, on_built=told.append)
    eager, other = run.contenders
    assert (eager.status, other.status) == ("timed", "wrong")
    assert other.note.startswith("differs from eager")
    assert (other.host_us, run.host("other"), len(calls)) == (None, None, NUM_CHECKS)
    assert run.host("eager")
    assert told == run.contenders


def test_contender_that_repeats_its_first_answer_is_wrong(bench: Bench) -> None:
    kept: list[torch.Tensor] = []

    def first_answer(logits: torch.Tensor) -> torch.Tensor:
        kept.append(logits)
        return kept[0]

    run = measure(bench, {"other": returning(first_answer, [])}, num_rounds=2)
    assert run.contenders[0].status == "wrong"


def test_failing_and_skipped_contenders_say_why_and_keep_nobody_from_being_timed(bench: Bench) -> None:
    def fail(bench: Bench) -> Contender:
        raise RuntimeError("no such kernel\nand much more")

    def skip(bench: Bench) -> Contender:
        raise SkipContender("needs another device")

    run = measure(bench, {"failing": fail, "skipped": skip, "eager": Bench.eager}, num_rounds=2)
    assert [(one.status, one.note) for one in run.contenders] == [
        ("failed", "RuntimeError: no such kernel"),
        ("skipped", "needs another device"),
        ("timed", ""),
    ]


def test_varied_torch_compile_has_general_code_before_it_is_timed(bench: Bench) -> None:
    sizes: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        sizes.append([value for value in example_inputs if isinstance(value, torch.SymInt)])
        return graph.forward

    run = measure(bench, {"varied": lambda bench: bench.torch_compiled_varied(backend=backend)}, num_rounds=2)
    assert run.contenders[0].status == "timed"
    assert [len(symbols) for symbols in sizes] == [0, 1]
    one_row = Bench(Case(2, 16, 1, CPU, torch.float32), bench.plugins)
    with pytest.raises(SkipContender, match="single row"):
        one_row.torch_compiled_varied(backend=backend)


def test_one_graph_is_compiled_for_the_exact_size_and_the_rest_if_asked(bench: Bench) -> None:
    def sizes_of(bench: Bench, *, is_full: bool) -> set[int]:
        made = bench.captured(is_full=is_full, is_static=False)
        return set(made.compiled.entry.namespace["_pw_exact"])

    assert (sizes_of(bench, is_full=True), sizes_of(bench, is_full=False)) == ({2}, set())
    asked = Bench(bench.case, bench.plugins, piece_compiler="eager", exact=True)
    assert sizes_of(asked, is_full=False) == {2}
    assert set(asked.uncaptured().compiled.entry.namespace["_pw_exact"]) == {2}


def test_batches_are_warmed_up_and_drained_and_take_turns() -> None:
    said: list[str] = []
    timed = {name: Timed(lambda name=name: said.append(name), 200) for name in "ab"}
    times = host_times(timed, num_rounds=2, drain=lambda: said.append("drain"))
    batch = 2
    turn = {name: [*([name] * batch * NUM_WARM_UPS), "drain", *([name] * batch), "drain"] for name in "ab"}
    assert said in [[*turn[a], *turn[b], *turn[c], *turn[d]] for a, b, c, d in ("abab", "abba", "baab", "baba")]
    assert set(times) == {"a", "b"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            "toy-llama --quick --only eager --layers 1 --device tpu",
            "ConfigError: --device must be 'auto', 'cuda' or 'cpu', got 'tpu'",
        ),
        ("toy-llama --only eager,nobody", "ConfigError: --only: there is no contender 'nobody'; the contenders are"),
        (
            "dispatch --only manual-graph",
            "ConfigError: --only: there is no contender 'manual-graph'; the contenders are",
        ),
        (
            "toy-llama --device cpu --layers two",
            "ConfigError: numbers such as 1,2,4 or a range such as 8-256:8 are meant",
        ),
        ("dispatch --layers 2,0", "ConfigError: numbers such as 1,2,4 or a range such as 8-256:8 are meant, got '0'"),
        ("dispatch --rows 0", "'--rows'"),
    ],
)
def test_bad_options_are_told_in_words(
    options: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["piecework", "bench", *options.split()])
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert text in " ".join(said.split())
    assert "Traceback" not in said


def test_missing_cuda_device_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["piecework", "bench", "toy-llama", "--device", "cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith("ConfigError: --device cuda: torch finds no CUDA device")


@pytest.mark.parametrize("command", ["toy-llama", "dispatch"])
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("missing/figures.json", "there is no folder '{folder}/missing'; make it, or name"),
        ("file/figures.json", "there is no folder '{folder}/file'; make it, or name"),
        ("link", "there is no folder '{folder}/gone'; make it, or name"),
        ("open", "it is a folder; name a file in it, such as '{folder}/open/figures.json'"),
        ("file", "this file can't be written; allow it, or name another one"),
        ("closed/figures.json", "no file can be made in the folder '{folder}/closed'; allow it, or name"),
    ],
)
def test_a_json_file_that_can_not_be_written_is_refused_before_anything_is_measured(
    command: str,
    path: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("before")
    (tmp_path / "link").symlink_to("gone/figures.json")
    # Permissions would not do: the administrator, who may run this, may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK or Path(path).name not in ("file", "closed"))
    options = ["--layers", "1", "--only", "eager" if command == "toy-llama" else "straight-line", "--quick"]
    monkeypatch.setattr(sys, "argv", ["piecework", "bench", command, *options, "--json", str(tmp_path / path)])
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"ConfigError: --json '{tmp_path / path}': {text.format(folder=tmp_path)}")
    assert said.out == ""
    assert (tmp_path / "file").read_text() == "before"


def test_plugin_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["piecework", "bench", "toy-llama", "--quick", "--plugin", "no_such_plugin"])
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    assert (
        "ConfigError: --plugin no_such_plugin: No module named 'no_such_plugin'; give the name"
        in capsys.readouterr().err
    )


def test_json_is_written_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, link = tmp_path / "figures.json", tmp_path / "link"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to(file)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(Path, "write_text", half_written)
        write_json({"a": 1}, file)
    assert file.read_text() == "before"
    write_json({"a": 1}, link)
    assert json.loads(file.read_text()) == {"a": 1}
    assert (link.is_symlink(), file.stat().st_mode & 0o777) == (True, 0o640)
    assert sorted(tmp_path.iterdir()) == [file, link]


def half_written(file: Path, text: str) -> None:
    file.write_bytes(text.encode()[:3])
    raise OSError("no space left")


def test_json_goes_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    write_json({"a": 1}, pipe)
    assert json.loads(os.read(reader, 1000)) == {"a": 1}
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("arguments", ["", "bench ", "bench toy-llama ", "bench dispatch "])
def test_help_imports_no_torch(arguments: str) -> None:
    code = f"""
import sys
from piecework.tools.cli import main
sys.argv = ["piecework", *{arguments.split()!r}, "--help"]
try:
    main()
finally:
    print("imported:", sorted({{"torch", "numpy", "sympy"}} & set(sys.modules)))
"""
    child = run_child(code)
    assert (child.returncode, child.stderr) == (0, "")
    assert "imported: []" in child.stdout
    assert "Usage" in child.stdout
