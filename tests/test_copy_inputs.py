"""``copy_inputs``: what copies the arguments of a captured call, and when it is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import piecework
from piecework import CompilationConfig, CustomOpImplementation, Limits, PluginError, hookimpl, testing
from piecework.copy_inputs import CopyInputs
from piecework.pool import Pool

copied: list[int] = []
"""How many tensors each call of the plugin's implementation copied."""


def copy_one_by_one(op: CopyInputs, *sources: torch.Tensor) -> None:
    copied.append(len(sources))
    for destination, source in zip(op.destinations, sources, strict=True):
        destination.copy_(source)


class Copies:
    name = "copies"

    def __init__(self, is_on: bool | None = True, **limits: Any) -> None:
        self.is_on, self.limits = is_on, limits
        self.num_asked = 0

    @hookimpl
    def piecework_custom_op_enabled(self, op_name: str) -> bool | None:
        return self.is_on if op_name == "copy_inputs" else None

    @hookimpl
    def piecework_custom_op_implementations(self, op_name: str, device: torch.device) -> Any:
        if op_name != "copy_inputs":
            return None
        self.num_asked += 1
        return [CustomOpImplementation(copy_one_by_one, name="one by one", limits=Limits(**self.limits))]


@pytest.fixture(autouse=True)
def nothing_copied() -> Any:
    copied.clear()
    with torch.no_grad():
        yield


def function(ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return hidden * positions[:, None] + ids[:, None]


def arguments(rows: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(9, (rows,)), torch.randint(9, (rows,), dtype=torch.int32), torch.randn(rows, 4)


def compiled(**more: Any) -> Any:
    return piecework.compile(
        function, config=CompilationConfig(level=3, capture_sizes=[4, 8], piece_compiler="eager", **more)
    )


def test_inputs_of_all_dtypes_are_copied_at_once_by_what_a_plugin_brings() -> None:
    with testing.plugins(Copies()):
        fast = compiled()
        for rows in (4, 8, 4, 3, 5, 8):
            given = arguments(rows)
            torch.testing.assert_close(fast(*given), function(*given))
        assert copied == [3] * 10  # Once more for each of the sizes, padded ones too, when it is first met.
        (made,) = piecework.report(fast).custom_ops
    assert made.lines() == [
        "  custom op copy_inputs (CopyInputs) on cpu: one by one of plugin 'copies' (registered by this program), "
        "1 place; on: plugin 'copies' (registered by this program) says so"
    ]


def test_padding_is_refilled_and_expanded_and_strided_inputs_are_copied() -> None:
    with testing.plugins(Copies()):
        fast = compiled()
        for rows in (8, 7, 5, 8):
            wide = torch.randn(rows, 8)[:, ::2]
            given = (torch.randint(9, (rows, 2))[:, 0], torch.ones(1, dtype=torch.int32).expand(rows), wide)
            torch.testing.assert_close(fast(*given), function(*given))
        assert copied == [3] * 7


def test_what_did_not_move_is_not_copied() -> None:
    with testing.plugins(Copies()):
        fast = piecework.compile(
            function,
            config=CompilationConfig(
                level=3, capture_sizes=[4], piece_compiler="eager", static_inputs=["ids", "positions"]
            ),
        )
        given = arguments(4)
        torch.testing.assert_close(fast(*given), function(*given))
        torch.testing.assert_close(fast(given[0], given[1], given[2] + 1), function(given[0], given[1], given[2] + 1))
        assert copied == []  # One input is copied; that is one launch as it is.


@pytest.mark.parametrize(("is_on", "custom_ops"), [(None, ""), (False, ""), (True, "none"), (True, "-copy_inputs")])
def test_it_is_off_at_level_3_unless_somebody_wants_it(is_on: bool | None, custom_ops: str) -> None:
    plugin = Copies(is_on)
    with testing.plugins(plugin):
        fast = compiled(custom_ops=custom_ops)
        given = arguments(4)
        torch.testing.assert_close(fast(*given), function(*given))
        (made,) = piecework.report(fast).custom_ops
    assert copied == []
    assert plugin.num_asked == 0
    assert (made.implementation, made.is_on) == ("forward_native", False)


def test_limits_are_looked_at_for_each_captured_size() -> None:
    with testing.plugins(Copies(sizes={0: (5, None)})):
        fast = compiled()
        for rows in (4, 8):
            given = arguments(rows)
            torch.testing.assert_close(fast(*given), function(*given))
        assert copied == [3, 3]  # When size 8 is captured, and in its call.
        assert [op.implementation for op in piecework.report(fast).custom_ops] == ["forward_native", "one by one"]


def test_the_native_body_copies_by_dtype() -> None:
    destinations = [torch.empty(3), torch.empty(2, dtype=torch.int64), torch.empty(2, 2)]
    sources = [torch.randn(3), torch.randint(9, (2,)), torch.randn(2, 2).t()]
    CopyInputs(destinations)(*sources)
    for destination, source in zip(destinations, sources, strict=True):
        torch.testing.assert_close(destination, source)


class Failing(Copies):
    @hookimpl
    def piecework_custom_op_implementations(self, op_name: str, device: torch.device) -> Any:
        self.num_asked += 1
        if self.num_asked < 3:
            raise RuntimeError("no copies today")


def test_a_plugin_that_fails_at_capture_is_named_and_the_next_call_tries_again() -> None:
    with testing.plugins(Failing()):
        fast, given = compiled(), arguments(4)
        for _ in range(2):
            with pytest.raises(PluginError, match="plugin 'copies' .* no copies today"):
                fast(*given)
        torch.testing.assert_close(fast(*given), function(*given))


def test_what_an_implementation_prepares_is_made_at_capture_and_called_from_then_on() -> None:
    prepared: list[CopyInputs] = []
    calls: list[int] = []

    def prepares(op: CopyInputs, *sources: torch.Tensor) -> None:
        prepared.append(op)

        def copy(*given: torch.Tensor) -> None:
            calls.append(len(given))
            op.forward_native(*given)

        op.prepared = copy

    class Prepares(Copies):
        @hookimpl
        def piecework_custom_op_implementations(self, op_name: str, device: torch.device) -> Any:
            return [CustomOpImplementation(prepares)] if op_name == "copy_inputs" else None

    with testing.plugins(Prepares()):
        fast = compiled()
        piecework.capture(fast, [4], arguments(4))
        assert len(prepared) == 1
        piecework.freeze()
        for _ in range(2):
            given = arguments(4)
            torch.testing.assert_close(fast(*given), function(*given))
        assert (len(prepared), calls) == (1, [3, 3])


def test_a_copy_that_can_not_be_prepared_for_padded_calls_is_tried_again_after_more_and_more_of_them() -> None:
    tried: list[int] = []

    def fails_when_padded(op: CopyInputs, *sources: torch.Tensor) -> None:
        if sources[0].shape[0] == 3:
            tried.append(1)
            raise RuntimeError("planned")
        op.forward_native(*sources)

    class Fails(Copies):
        @hookimpl
        def piecework_custom_op_implementations(self, op_name: str, device: torch.device) -> Any:
            return [CustomOpImplementation(fails_when_padded)] if op_name == "copy_inputs" else None

    with testing.plugins(Fails()):
        fast = compiled(on_failure="eager")
        fast(*arguments(4))
        with pytest.warns(piecework.PieceworkWarning, match="answers size 3 uncaptured: .*planned"):
            fast(*arguments(3))
        for _ in range(15):
            given = arguments(3)
            torch.testing.assert_close(fast(*given), function(*given))
        assert len(tried) == 4  # At calls 1, 3, 5 and 9: when as many again have come.
        fast(*(given := arguments(4)))
        torch.testing.assert_close(fast(*given), function(*given))


def test_a_name_that_is_met_at_capture_is_not_said_to_switch_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "piecework")
    with testing.plugins(Copies()):
        fast = compiled(custom_ops="+copy_inputs")
        fast(*arguments(4))
    assert "switches nothing" not in caplog.text


def test_memory_is_copied_onto_itself_only_in_turn_with_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    may_launch = [True]
    switch = Pool.switch

    def noting(pool: Pool) -> bool:
        order.append("switch")
        return switch(pool) and may_launch[0]

    def copy(op: CopyInputs, *sources: torch.Tensor) -> None:
        order.append("onto itself" if sources[0] is op.destinations[0] else "copy")
        op.forward_native(*sources)

    class Notes(Copies):
        @hookimpl
        def piecework_custom_op_implementations(self, op_name: str, device: torch.device) -> Any:
            return [CustomOpImplementation(copy)] if op_name == "copy_inputs" else None

    with testing.plugins(Notes()):
        fast = compiled()
        fast(*arguments(4))
        monkeypatch.setattr(Pool, "switch", noting)
        order.clear()
        given = arguments(3)  # The first call that is padded to a size that is there.
        torch.testing.assert_close(fast(*given), function(*given))
        assert order[:2] == ["switch", "onto itself"]
        may_launch[0] = False
        order.clear()
        given = arguments(2)  # On a stream that is being recorded.
        torch.testing.assert_close(fast(*given), function(*given))
        assert "onto itself" not in order
