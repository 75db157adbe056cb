"""The distributions as users get them: wheels, editable installs, and a third party's plugin."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from dists import ROOT, other_packages, run_child

FOLDERS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
FOO = ROOT / "examples" / "piecework-foo"
NAMES = ("attention", "cudagraph", "inductor", "silly_attention", "triton_ops")
OURS = [(name, "active", order) for order, name in enumerate(NAMES)]


class Environment:
    """A fresh virtual environment in which torch and the other dependencies are there, and nothing of ours."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site = Path(self.run("import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        (self.site / "others.pth").write_text(f"{other_packages()[0]}\n")

    def run(self, *arguments: str, **environment: str) -> str:
        command = [str(self.python), *(("-c", *arguments) if len(arguments) == 1 else arguments)]
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("PIECEWORK_", "PYTHONPATH"))}
        done = subprocess.run(
            command, env={**clean, **environment}, capture_output=True, text=True, check=False, cwd=self.python.parent
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def pip_install(self, *what: str) -> None:
        self.run("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", *what)

    def plugins(self, **environment: str) -> list[tuple[str, str, int | None]]:
        report = json.loads(self.run("-m", "piecework", "plugins", "--json", **environment))
        return [(plugin["name"], plugin["state"], plugin["position"]) for plugin in report["plugins"]]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution, by name, built from a copy so that no build folder is left behind."""
    found = {}
    for folder in FOLDERS:
        copy = tmp_path_factory.mktemp("source") / "copy"
        ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
        shutil.copytree(folder, copy, ignore=ignored)
        out = tmp_path_factory.mktemp("wheel")
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (wheel,) = out.iterdir()
        found[wheel.name.split("-")[0]] = wheel
    return found


def metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [path for path in archive.namelist() if path.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


def test_each_wheel_holds_its_own_package_and_nothing_else(wheels: dict[str, Path]) -> None:
    assert set(wheels) == {
        "piecework",
        "piecework_attention",
        "piecework_cudagraph",
        "piecework_inductor",
        "piecework_silly_attention",
        "piecework_triton_ops",
    }
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            paths = [path for path in archive.namelist() if ".dist-info/" not in path]
        assert {path.split("/")[0] for path in paths} == {name}
        assert f"{name}/py.typed" in paths
    with zipfile.ZipFile(wheels["piecework"]) as archive:
        packed = {path for path in archive.namelist() if path.endswith(".py")}
    assert packed == {path.relative_to(ROOT / "core").as_posix() for path in (ROOT / "core").rglob("*.py")}


def test_versions_are_in_step(wheels: dict[str, Path]) -> None:
    assert len({re.findall(r"^Version: (.+)$", metadata(wheel, "METADATA"), re.M)[0] for wheel in wheels.values()}) == 1


def test_entry_points_and_declared_versions(wheels: dict[str, Path]) -> None:
    assert "[torch_dynamo_backends]\npiecework = piecework.dynamo_backend:piecework_backend" in metadata(
        wheels["piecework"], "entry_points.txt"
    )
    for name, wheel in wheels.items():
        assert set(re.findall(r"^Requires-Python: (.+)$", metadata(wheel, "METADATA"), re.M)[0].split(",")) == {
            ">=3.10",
            "<3.14",
        }
        if name != "piecework":
            plugin = name.removeprefix("piecework_")
            assert metadata(wheel, "entry_points.txt").strip() == f"[piecework]\n{plugin} = {name}"


def test_editable_installs_are_plain_pth_files(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    sources = []
    for index, folder in enumerate(FOLDERS):
        copy = tmp_path / f"source{index}"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
        sources += ["-e", str(copy)]
    environment.pip_install(*sources)
    links = {path.name: path.read_text().split() for path in environment.site.glob("__editable__*")}
    assert len(links) == len(FOLDERS)
    for name, lines in links.items():
        assert name.endswith(".pth")
        assert len(lines) == 1
        assert Path(lines[0]).is_dir(), f"{name} is an import hook"
    assert environment.plugins() == OURS


@pytest.mark.slow
def test_third_party_template_is_found_ordered_blocked_and_gone(tmp_path: Path, wheels: dict[str, Path]) -> None:
    environment = Environment(tmp_path / "venv")
    environment.pip_install(*(str(wheel) for wheel in wheels.values()))
    assert environment.plugins() == OURS
    copy = tmp_path / "piecework-foo"
    shutil.copytree(FOO, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    assert sorted(path.name for path in copy.iterdir()) == ["piecework_foo.py", "pyproject.toml"]

    environment.pip_install(str(copy))
    assert ("foo", "active", 0) in environment.plugins()
    order = json.loads(environment.run("-m", "piecework", "plugins", "--json"))["order"]
    assert order["piecework_splitting_ops"] == ["foo", "attention", "silly_attention"]
    assert order["piecework_compile_piece"][0] == "foo"
    order = environment.run("-m", "piecework", "plugins", PIECEWORK_PLUGINS="silly_attention,foo")
    assert "piecework_splitting_ops: silly_attention, foo\n" in order
    assert environment.plugins(PIECEWORK_PLUGINS="-foo") == [*OURS, ("foo", "blocked", None)]
    imported = "import sys, piecework.plugins as p; p.plugin_manager(); print('piecework_foo' in sys.modules)"
    assert environment.run(imported) == "True\n"
    assert environment.run(imported, PIECEWORK_PLUGINS="-foo").strip() == "False"

    environment.run("-m", "pip", "uninstall", "--quiet", "--yes", "piecework-foo")
    assert environment.plugins() == OURS


@pytest.mark.parametrize(
    "module",
    ["piecework", "piecework_attention", "piecework_cudagraph", "piecework_inductor", "piecework_triton_ops"],
)
def test_importing_is_light(module: str) -> None:
    code = (
        f"import sys, {module}; print([m for m in sys.modules if m.startswith(('torch._inductor', 'triton', 'tran'))])"
    )
    child = run_child(code, *FOLDERS[1:])
    assert child.stdout == "[]\n", child.stderr


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=lambda folder: folder.name)
def test_plugins_import_only_the_public_api(folder: Path) -> None:
    import piecework

    for path in folder.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"(import|from) piecework\.(?!testing)", text), path
        names = {
            n.strip() for line in re.findall(r"^\s*from piecework import (.+)$", text, re.M) for n in line.split(",")
        }
        assert names <= set(piecework.__all__), path


def test_core_names_no_plugin() -> None:
    for path in (ROOT / "core").rglob("*.py"):
        assert not re.search(r"piecework[_-](attention|cudagraph|inductor|silly|triton)", path.read_text()), path
