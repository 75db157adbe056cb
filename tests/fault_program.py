"""A child program that says which stage it is in, to be killed there: ``python fault_program.py COMPILER STAGE HOW``.

It writes one line per stage to standard output as it enters it. At the stage that is named it sends itself a signal, or
waits to be killed. Run without one, it checks its results and says so.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

import piecework
from piecework import CompilationConfig, Piece, SplittingOp, hookimpl, testing
from piecework.testing import EmulatedCapturer

STAGES = ("trace", "split", "compile", "compile failed", "compile exact", "capturer", "session", "capture", "replay")


class Killed:
    """Marks stages as they come, and stops for good at one of them."""

    def __init__(self, stage: str, how: str) -> None:
        self.stage, self.how = stage, how

    def enter(self, stage: str) -> None:
        print(stage, flush=True)
        if stage == self.stage and self.how == "wait":
            time.sleep(600)
        elif stage == self.stage:
            os.kill(os.getpid(), signal.Signals[self.how])
            time.sleep(5)  # until the signal is here
            raise AssertionError("the signal did not come")


class Staged:
    name = "staged"

    def __init__(self, at: Killed) -> None:
        self.at = at
        self.has_failed = False

    @hookimpl
    def piecework_splitting_ops(self) -> list[SplittingOp]:
        self.at.enter("split")
        return [SplittingOp("fault::triple")]

    @hookimpl(wrapper=True)
    def piecework_compile_piece(self, piece: Piece) -> Any:
        self.at.enter("compile" if piece.size is None else "compile exact")
        compiled = yield
        if not self.has_failed:
            self.has_failed = True
            self.at.enter("compile failed")
            raise RuntimeError("planned, so that a script that shows it is written")
        return compiled

    @hookimpl
    def piecework_capturer(self, device: torch.device) -> EmulatedCapturer:
        self.at.enter("capturer")
        at = self.at

        class Marking(EmulatedCapturer):
            def session(self) -> Any:
                at.enter("session")
                return super().session()

            def capture(self, fn: Any) -> Any:
                at.enter("capture")
                return super().capture(fn)

        return Marking(device)


@torch.library.custom_op("fault::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    current.enter("replay")
    return x * 3


@triple.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    current.enter("trace")
    return torch.empty_like(x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.fault.triple(self.linear(x).relu()) + 1


def main(compiler: str, stage: str, how: str) -> None:
    global current
    current = Killed(stage, how)
    config = CompilationConfig(
        level=3, compile_sizes=(2,), capture_sizes=(2,), max_padding_ratio=1, piece_compiler=compiler
    )
    plugins = [Staged(current)]
    with testing.plugins(*plugins, load_installed=compiler != "eager"), torch.no_grad():
        model = Model()
        call = piecework.compile(model, config=config, dynamic_arg_dims={"x": 0})
        expected = Killed("", "")
        num_interrupts = num_failures = 0
        for size in (2, 3, 2, 3):
            x = torch.randn(size, 4)
            while True:
                try:
                    result = call(x)
                    break
                except KeyboardInterrupt:
                    num_interrupts += 1
                    current.stage = ""
                except piecework.PluginError as error:
                    if "planned" not in str(error):
                        raise
                    num_failures += 1
            was, current = current, expected
            torch.testing.assert_close(result, model(x))
            current = was
        plans = piecework.report(call).sizes
        assert [one.size for one in plans] == [2], plans
    print(f"right after {num_failures} failures and {num_interrupts} interrupts", flush=True)


current = Killed("", "")
if __name__ == "__main__":
    main(*sys.argv[1:])
