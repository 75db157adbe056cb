"""Run the fuzz by hand: ``python tests/fuzz/run.py --examples 20000 --seed 1 --minutes 30``.

Prints how many programs ran, which features they had, what was refused and why, and how much was captured. One program
of each kind of failure is shrunk and written as a file that reruns it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "core")]

from fuzz_differ import ALL_MODES, INDUCTOR  # noqa: E402 - needs the path above
from fuzz_hunt import Hunt  # noqa: E402 - as above


def main() -> int:
    """Parse the command line and hunt; return 1 where something departs from eager."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--shrink-seconds", type=float, default=60)
    parser.add_argument("--mode", action="append", choices=[mode.name for mode in ALL_MODES], help="these only")
    parser.add_argument("--inductor", action="store_true", help="captured, with pieces by Inductor, and nothing else")
    given = parser.parse_args()
    modes = tuple(mode for mode in ALL_MODES if not given.mode or mode.name in given.mode)
    start = time.monotonic()
    hunt = Hunt(((INDUCTOR,) if given.inductor else modes,), start + 60 * given.minutes, given.shrink_seconds)
    hunt.run(given.examples, given.seed)
    print(hunt.outcome.text())
    print(f"{time.monotonic() - start:.0f} s; {len(hunt.failures)} kinds of failures")
    print(hunt.text())
    hunt.outcome.check_share_of_refusals()
    return 1 if hunt.failures else 0


if __name__ == "__main__":
    sys.exit(main())
