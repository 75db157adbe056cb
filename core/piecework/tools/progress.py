"""A progress bar for ``piecework.capture``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from piecework.budget import format_bytes


@contextmanager
def capture_progress(owner: str, num_sizes: int, *, show: bool | None) -> Iterator[Callable[[Any, Any], None]]:
    """Show one step per captured size: the size, the seconds it took, the memory that is left.

    Args:
        owner: the model.
        num_sizes: the steps there are.
        show: whether to; None on a terminal only.

    Returns:
        A function of the size and its plan, or None in place of one that was left out.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_shown = console.is_terminal if show is None else show
    with Progress(*columns, console=console, disable=not is_shown) as progress:
        task = progress.add_task(f"capturing {owner}", total=num_sizes)
        start = time.perf_counter()

        def on_size(key: Any, plan: Any) -> None:
            nonlocal start
            seconds, start = time.perf_counter() - start, time.perf_counter()
            free = plan.after.free_bytes if plan is not None else None
            left = f", {format_bytes(free)} free" if free is not None else ""
            what = f"size {key} in {seconds:.2f} s{left}" if plan is not None else f"size {key} left out"
            progress.update(task, advance=1, description=f"capturing {owner}: {what}")

        yield on_size
