"""Reports: what became of a model, and why pieces that look alike are not the same."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import piecework
from piecework import CompilationConfig, ConfigError
from piecework.testing import plugins
from split_models import compiled_by, ops, rows


class Named(nn.Module):
    """Layers that hand their own name to an op which is no splitting op."""

    def __init__(self, num_layers: int, *, by_keyword: bool = False) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.by_keyword = by_keyword
        self.weight = nn.Parameter(torch.full((6,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(self.num_layers):
            name = f"layers.{i}"
            if self.by_keyword:
                x = ops.named(x, self.weight, scale=1.5, layer=name)
            else:
                x = ops.named(x, self.weight, 1.5, name)
            x = ops.scale3(x.relu())
        return x


def test_names_of_layers_that_keep_pieces_apart() -> None:
    compiled = compiled_by(Named(4))
    compiled(rows(4))
    report = piecework.report(compiled)
    assert (report.num_pieces, report.num_capturable_pieces, report.num_unique_pieces) == (8, 4, 4)
    assert report.why_so_many is not None
    assert report.why_so_many.startswith("4 pieces, 4 unique: they differ at argument 3 of cut::named: 'layers.")
    assert "they differ at argument 3 of cut::named: 'layers.0' / 'layers.1'" in str(report)


def test_summary_quotes_the_first_pair() -> None:
    compiled = compiled_by(Named(5))
    compiled(rows(4))
    assert piecework.report(compiled).why_so_many == (
        "5 pieces, 5 unique: they differ at argument 3 of cut::named: 'layers.0' / 'layers.1'"
    )


def test_difference_stands_at_the_piece_where_two_are_no_pattern() -> None:
    compiled = compiled_by(Named(2))
    compiled(rows(4))
    report = piecework.report(compiled)
    assert report.why_so_many is None
    assert report.pieces[1].differs == "they differ at argument 3 of cut::named: 'layers.0' / 'layers.1'"
    assert report.pieces[1].differs in str(report)


def test_names_given_by_keyword() -> None:
    compiled = compiled_by(Named(3, by_keyword=True))
    compiled(rows(4))
    assert re.search(
        r"differ at argument '?(3|layer)'? of cut::named: 'layers.0' / 'layers.1'", str(piecework.report(compiled))
    )


def test_pieces_that_are_alike_need_no_words() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = ops.scale3(x.relu())
        return x

    compiled = compiled_by(model)
    compiled(rows(4))
    report = piecework.report(compiled)
    assert report.why_so_many is None
    (piece,) = report.pieces
    assert (piece.name, piece.places, piece.num_nodes, piece.compiler) == ("piece_0", (0, 1, 2, 3), 1, "eager")
    assert "piece_0: 1 node, stands in 4 places, eager" in str(report)
    assert len(piece.key) == 64


def test_pieces_of_other_shapes_need_no_words() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(ops.scale3(x.relu()).sin().cos()).exp().log().sqrt()

    compiled = compiled_by(model)
    compiled(rows(4))
    report = piecework.report(compiled)
    assert report.num_unique_pieces == 3
    assert report.why_so_many is None


def test_stages_source_and_relations() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            x = x + 1
        return ops.scale3(x)

    compiled = compiled_by(model)
    assert str(piecework.report(compiled)).endswith("not called yet")
    compiled(rows(4))
    report = piecework.report(compiled)
    assert list(report.stage_seconds)[:4] == ["trace", "split", "dedupe", "compile"]
    assert all(seconds >= 0 for seconds in report.stage_seconds.values())
    assert "def forward(" in report.source
    assert "piece_0(" in report.source
    assert any("rows" in relation and "test_report.py" in relation for relation in report.relations)
    text = str(report)
    assert "level 3 (PIECEWISE)" in text
    assert "start-up: trace" in text
    assert "1 piece, 1 unique, and 1 splitting step" in text


@pytest.mark.parametrize("capturer", ["none", None])
def test_that_nothing_is_captured_is_said(capturer: str | None) -> None:
    with plugins():
        compiled = compiled_by(lambda x: ops.scale3(x + 1), capturer=capturer)
        compiled(rows(4))
        assert ("  nothing is captured: " in str(piecework.report(compiled))) is (capturer == "none")


def test_calls_answered_eagerly_are_counted_by_reason() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x + 1)

    compiled = compiled_by(model, on_failure="eager")
    compiled(rows(4))
    compiled(rows(4)[:0])
    with pytest.warns(piecework.PieceworkWarning, match="answers a call eagerly"):
        compiled(rows(4).double())
    report = piecework.report(compiled)
    assert dict(report.num_eager_calls) == {"zero rows": 1, "departure from the trace": 1}
    assert "1 call answered by the original forward: zero rows" in str(report)


def test_level_2_is_one_piece() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.scale3(x + 1)

    compiled = piecework.compile(model, config=CompilationConfig(level=2))
    compiled(rows(4))
    report = piecework.report(compiled)
    assert (report.num_pieces, report.pieces) == (1, ())
    assert "level 2 (DYNAMO_ONCE)" in str(report)


def test_rebindings_are_counted() -> None:
    model = Named(2)
    compiled = compiled_by(model)
    compiled(rows(4))
    model.weight = nn.Parameter(torch.full((6,), 3.0))
    torch.testing.assert_close(compiled(rows(4)).detach(), model(rows(4)).detach())
    assert piecework.report(compiled).num_rebindings == 1


def test_report_takes_compiled_things_only() -> None:
    with pytest.raises(ConfigError, match=r"report takes what piecework\.compile returned"):
        piecework.report(Named(2))
