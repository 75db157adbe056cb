"""What captures take, in words; which sizes a budget leaves out is in test_capture_failures.py."""

from __future__ import annotations

import io
import logging

import pytest
import torch
from rich.console import Console

import piecework
from capture_models import capturing_by, compiled, emulated, rows
from piecework import CaptureMemory
from piecework.budget import Budget, format_apart, format_bytes
from piecework.tools.bench.memory import MemoryFigures
from piecework.tools.bench.output import print_memory


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (4_096, "4.1 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (1_500_000, "1.5 MB"),
        (80_000_000_000, "80.0 GB"),
        (1_500_000_000_000, "1500.0 GB"),
    ],
)
def test_bytes_are_shown_in_the_unit_that_suits_them(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_bytes_that_differ_are_not_shown_as_equal() -> None:
    assert format_apart(1_500_000, 1_000_000) == ("1.5 MB", "1.0 MB")
    assert format_apart(1_500_010, 1_500_000) == ("1,500,010 B", "1,500,000 B")


def test_size_that_is_over_the_budget_by_little_is_left_out_for_what_can_be_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    budget = Budget(69_990)
    none, some = CaptureMemory(0, 0), CaptureMemory(70_000, 0)
    assert not budget.take(4, 4, none, some, "model")
    assert budget.why_left_out(4) == (
        "left out for its memory: with it, captures take 70,000 B; max_capture_bytes is 69,990 B"
    )
    assert (
        "model: size 4 is not captured: with it, captures take 70,000 B; max_capture_bytes is 69,990 B" in caplog.text
    )


@torch.no_grad()
def test_little_memory_is_not_shown_as_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # room for the progress bar
    caplog.set_level(logging.INFO, "piecework")
    with capturing_by(emulated(limit_bytes=3_000)):
        call = compiled(lambda x: x + 1, splitting_ops=(), capture_sizes=(3,), max_capture_bytes=70_000)
        piecework.capture(call, [2], rows(2), show_progress=True)
        call(rows(3))
        report = str(piecework.report(call))
    assert "captured size 2 in 1 graphs" in caplog.text
    assert " ms, 256 B in the pool" in caplog.text
    assert "2.7 kB free" in capsys.readouterr().err
    assert "pool 256 B, driver 65.5 kB, static inputs 32 B, bridges 0 B, budget 70.0 kB" in report
    left_out = "with it, captures would take about 131.5 kB; max_capture_bytes is 70.0 kB"
    assert left_out in caplog.text
    assert left_out in report


def test_bench_shows_the_memory_of_captures_in_the_unit_that_suits_it() -> None:
    console = Console(file=io.StringIO(), width=150)
    print_memory(console, MemoryFigures([1, 2], 2, 2_048, 1_500_000, 512, 3, [1.0], [0.9], [0.8]))
    assert isinstance(console.file, io.StringIO)
    assert "pool 1.5 MB, of the largest alone 2.0 kB; driver 512 B" in console.file.getvalue()
