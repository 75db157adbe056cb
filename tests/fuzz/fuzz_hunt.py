"""Runs many random programs in batches, sorts departures into kinds, and shrinks one of each into a file."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz_differ import ALL_MODES, Departure, Mode, Outcome, check_text, one_thread, write_program
from fuzz_programs import programs

BATCH = 100
FOLDER = Path(__file__).resolve().parent / "failures"


@dataclass
class Failure:
    """One kind of departure: the smallest program so far."""

    text: str
    said: str
    num_seen: int = 1
    path: Path | None = None


@dataclass
class Hunt:
    """Many programs in batches, each with a seed of its own.

    Attributes:
        modes: groups of modes; each program runs in one group.
        until: when to stop, on the clock of ``time.monotonic``.
        shrink_s: how long to look for a smaller program of one kind.
        folder: where failing programs are written.
        plugins: registered besides the capturer that emulates.
    """

    modes: Sequence[tuple[Mode, ...]] = (ALL_MODES,)
    until: float = float("inf")
    shrink_s: float = 60
    folder: Path = FOLDER
    plugins: Sequence[object] = ()
    outcome: Outcome = field(default_factory=Outcome)
    failures: dict[str, Failure] = field(default_factory=dict)

    def run(self, num_examples: int, first_seed: int, say: Callable[[str], object] = print) -> None:
        """Run batch after batch."""
        with one_thread():
            for index, start in enumerate(range(0, num_examples, BATCH)):
                if time.monotonic() > self.until:
                    break
                number, num = first_seed * 100_000 + index, min(BATCH, num_examples - start)
                known = set(self.failures)
                self.batch(number, num)
                say(f"seed {number}: {self.outcome.num_programs} agreed, {len(self.failures)} kinds of failures")
                for kind in self.failures.keys() - known:
                    self.shrink(kind, number, num)
                    failure = self.failures[kind]
                    failure.path = write_program(failure.text, self.folder, _file_name(kind), failure.said)
                    say(f"NEW: {failure.said.splitlines()[0][:300]}\n     rerun it by: python {failure.path}")

    def text(self) -> str:
        """Return what was found, most frequent first."""
        ordered = sorted(self.failures.values(), key=lambda failure: -failure.num_seen)
        return "\n".join(f"{f.num_seen} times: {f.said.splitlines()[0][:300]}\n    python {f.path}" for f in ordered)

    def batch(self, number: int, num: int) -> None:
        """Run one batch, and note its failures by kind."""

        def look(text: str, modes: tuple[Mode, ...]) -> None:
            if time.monotonic() > self.until:
                return
            try:
                self.outcome.add(check_text(text, modes, self.plugins))
            except Departure as departure:
                self.note(text, departure).num_seen += 1

        self.examples(number, num, look, Phase.generate)

    def shrink(self, kind: str, number: int, num: int) -> None:
        """Have hypothesis look for the smallest program of one kind, in the batch that it was found in."""
        until = time.monotonic() + self.shrink_s

        def look(text: str, modes: tuple[Mode, ...]) -> None:
            if time.monotonic() > until:
                raise _Enough
            try:
                check_text(text, modes, self.plugins)
            except Departure as departure:
                if kind_of(str(departure)) == kind:
                    self.note(text, departure)
                    raise

        try:
            self.examples(number, num, look, Phase.generate, Phase.shrink)
        except (Departure, _Enough):
            return

    def examples(self, number: int, num: int, look: Callable[[str, tuple[Mode, ...]], None], *phases: Phase) -> None:
        """Call ``look`` with the programs of a batch."""
        wrapped = seed(number)(
            settings(
                max_examples=num,
                database=None,
                deadline=None,
                phases=phases,
                suppress_health_check=(
                    HealthCheck.too_slow,
                    HealthCheck.data_too_large,
                    HealthCheck.large_base_example,
                ),
                report_multiple_bugs=False,
            )(given(programs(), st.sampled_from(self.modes))(look))
        )
        wrapped()

    def note(self, text: str, departure: Departure) -> Failure:
        """Keep the smallest program of each kind."""
        failure = self.failures.setdefault(kind_of(str(departure)), Failure(text, str(departure), 0))
        if len(text) <= len(failure.text):
            failure.text, failure.said = text, str(departure)
        return failure


class _Enough(BaseException):
    """Ends the search for a smaller program."""


def kind_of(said: str) -> str:
    """Return what departures have in common that are most likely one fault."""
    first = re.sub(r"call \d+", "call", said.splitlines()[0])
    first = re.sub(r"leaf \d+|\bt\d+\b|0x[0-9a-f]+|\d+(\.\d+)?(e-?\d+)?|\([^)]*\)|\[[^\]]*\]|'[^']*'", "_", first)
    return first[:110]


def _file_name(kind: str) -> str:
    return "fails_" + re.sub(r"\W+", "_", kind)[:80].strip("_").lower()
