"""The pictures in ``docs`` are what their scripts draw."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "make_dispatch_svg.py"))


def test_picture_of_dispatch_shows_the_figures_in_the_tree(script: dict[str, Any]) -> None:
    figures = json.loads(script["FIGURES"].read_text())
    picture = (DOCS / "dispatch.svg").read_text()
    assert picture == script["drawing"](figures), "run python docs/make_dispatch_svg.py"
    times = {one["name"]: one["host_us"] for one in figures["runs"][0]["contenders"]}
    for name in ("eager", "piecewise-static", "full-static", "manual-graph"):
        assert f">{script['number'](times[name]['median'])}</text>" in picture
    for text in (figures["device"], figures["versions"]["torch"], "32 layers", "prefers-color-scheme:dark"):
        assert text in picture


def test_picture_of_dispatch_leaves_out_what_was_not_measured(script: dict[str, Any]) -> None:
    figures = json.loads(script["FIGURES"].read_text())
    for one in figures["runs"][0]["contenders"]:
        if one["name"] in ("eager", "full-static"):
            one["host_us"] = None
    assert 'class="name">eager<' not in script["drawing"](figures)
    figures["runs"][0]["num_layers"] = 80
    with pytest.raises(SystemExit, match="no run with 32 layers"):
        script["drawing"](figures)


def test_picture_of_the_forward_is_what_its_script_draws() -> None:
    drawing = runpy.run_path(str(DOCS / "make_forward_svg.py"))["drawing"]
    assert drawing() in (DOCS / "forward.svg").read_text()
