"""The commands ``bench dispatch`` and ``bench toy-llama``; nothing heavy is imported before one of them runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from piecework.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from piecework.tools.bench.bounds import Bound
    from piecework.tools.bench.contenders import Bench, Contender
    from piecework.tools.bench.measure import Measured, Run
    from piecework.tools.bench.memory import MemoryFigures

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Measure what a forward costs on the host, beside other ways to run the same model.", no_args_is_help=True
)

DEFAULT_SIZES = "1,2,4,8-256:8"

Device = Annotated[str, typer.Option(help="'cuda', 'cpu', or 'auto': CUDA where there is a device.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]
Only = Annotated[str | None, typer.Option(help="Names of contenders, separated by commas.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few rounds: to see that everything runs.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Batches of each contender.")]
Layers = Annotated[str, typer.Option(help="Numbers of layers, separated by commas.")]
Hidden = Annotated[int, typer.Option(min=1, help="Width of a row.")]
Rows = Annotated[int, typer.Option(min=1, help="Rows of a call.")]
Memory = Annotated[
    bool, typer.Option("--memory", help="Measure memory and captures of many sizes besides the contenders.")
]
Sizes = Annotated[str, typer.Option(help="For --memory: numbers, and ranges START-STOP:STEP.")]
PieceCompiler = Annotated[str | None, typer.Option(help="As in CompilationConfig.")]
Exact = Annotated[bool, typer.Option("--exact", help="Compile the pieces of all contenders for this number of rows.")]
Modules = Annotated[
    list[str] | None,
    typer.Option(
        help="A module to register as a plugin, such as piecework_foo. Only where the packages are on the "
        "path without being installed: installed plugins are found. Repeatable."
    ),
]


@bench_app.command("toy-llama")
def toy_llama_command(
    layers: Layers = "32",
    hidden: Hidden = 256,
    rows: Rows = 8,
    device: Device = "auto",
    rounds: Rounds = None,
    only: Only = None,
    quick: Quick = False,
    memory: Memory = False,
    sizes: Sizes = DEFAULT_SIZES,
    piece_compiler: PieceCompiler = None,
    exact: Exact = False,
    plugin: Modules = None,
    json: Json = None,
) -> None:
    """Run a toy Llama in every way that there is, each checked against eager before it is timed.

    Host time is that of submitting a forward: contenders take turns in another order each round, and the device is
    drained between batches, so that its queue never blocks. Device time is measured by events around 20 calls back to
    back, for what is one graph. All figures are medians of 100 rounds, on a CPU of 20. A batch that counts follows
    three that do not: what another contender left in the caches is nobody's doing.

    Pieces that are captured as one graph, by Piecework or by hand, are compiled for this number of rows, as Inductor
    compiles for its own graphs; the others have code for any number of rows, unless --exact asks for more.
    torch-compile has code for this number alone, torch-compile-varied what torch.compile makes once sizes vary.

    The parts of one forward come from variants of the same captured call that leave something out. select: the
    checked entry and the look-up, with a plan that returns at once. finish: the plan's function without its
    replays and ops, called with the static input itself: its lock, clones and counts. copy: how much more that takes
    with an input to copy. replay: the replays alone, in a loop. splitting ops: the ops alone. rest: what the whole
    call takes besides these.

    On a CPU, captures are emulated and torch has one thread: everything runs, but only the ways to call it mean
    something.
    """
    import torch

    from piecework.tools.bench.bounds import bounds_of_memory, bounds_of_run
    from piecework.tools.bench.contenders import CONTENDERS, Bench
    from piecework.tools.bench.memory import measure_memory
    from piecework.tools.bench.model import Case
    from piecework.tools.bench.output import as_json, check_json_file, print_memory, write_json
    from piecework.tools.bench.plugins import Plugins

    if json is not None:
        check_json_file(json)
    several = numbers(sizes)
    console = _console()
    on = _device(device)
    dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
    builders = _chosen(CONTENDERS, only)
    num_rounds = rounds or (3 if quick else 100 if on.type == "cuda" else 20)
    plugins = Plugins(on, tuple(plugin or ()))
    runs: list[Run] = []
    memories: list[MemoryFigures] = []
    for num_layers in numbers(layers):
        case = Case(num_layers, hidden, rows, on, dtype)
        console.print(f"{num_layers} layers, {hidden} wide, {rows} rows, {dtype} on {on}", markup=False)
        with plugins.in_use():
            bench = Bench(case, plugins, piece_compiler=piece_compiler, exact=exact)
            runs.append(_measure(console, bench, builders, num_rounds, bounds_of_run))
            del bench  # Its graphs and kernels take memory of the device.
            if memory:
                largest = Case(num_layers, hidden, max(several), on, dtype)
                memories.append(measure_memory(Bench(largest, plugins, piece_compiler=piece_compiler), several))
                print_memory(console, memories[-1])
                torch.compiler.reset()
    if json is not None:
        bounds = [bound for run in runs for bound in bounds_of_run(run)]
        bounds += [bound for one in memories for bound in bounds_of_memory(one)]
        arguments = {"layers": layers, "hidden": hidden, "rows": rows, "rounds": num_rounds, "exact": exact}
        figures = as_json(runs, bounds, memories, command="toy-llama", device=on, dtype=str(dtype), **arguments)
        write_json(figures, json)


@bench_app.command("dispatch")
def dispatch_command(
    layers: Layers = "32",
    hidden: Hidden = 64,
    rows: Rows = 8,
    device: Device = "cpu",
    rounds: Rounds = None,
    only: Only = None,
    quick: Quick = False,
    json: Json = None,
) -> None:
    """Run a toy Llama whose pieces, graphs and splitting ops do nothing: what is left is the way to them.

    Runs anywhere; 50 rounds by default. The only work of a call is a copy of its token ids and a clone of its logits,
    and with static inputs and outputs not even these. Nothing is compared with eager, as nothing is computed. The
    parts of a forward are those of toy-llama.
    """
    import torch

    from piecework.tools.bench.bounds import bounds_of_dispatch
    from piecework.tools.bench.contenders import Bench
    from piecework.tools.bench.dispatch import DISPATCH, NoOps
    from piecework.tools.bench.model import NOTHING, Case
    from piecework.tools.bench.output import as_json, check_json_file, write_json
    from piecework.tools.bench.plugins import Plugins

    if json is not None:
        check_json_file(json)
    console = _console()
    on = _device(device)
    builders = _chosen(DISPATCH, only)
    num_rounds = rounds or (3 if quick else 50)
    plugins = Plugins(on, registered=(NoOps(rows),))
    runs: list[Run] = []
    for num_layers in numbers(layers):
        case = Case(num_layers, hidden, rows, on, torch.float32, vocab=hidden)
        console.print(f"{num_layers} layers that do nothing, {rows} rows on {on}", markup=False)
        with plugins.in_use():
            bench = Bench(case, plugins, op=NOTHING)
            runs.append(_measure(console, bench, builders, num_rounds, bounds_of_dispatch, is_checked=False))
    if json is not None:
        bounds = [bound for run in runs for bound in bounds_of_dispatch(run)]
        arguments = {"layers": layers, "hidden": hidden, "rows": rows, "rounds": num_rounds}
        write_json(as_json(runs, bounds, command="dispatch", device=on, **arguments), json)


def _measure(
    console: Console,
    bench: Bench,
    builders: Mapping[str, Callable[[Bench], Contender]],
    num_rounds: int,
    bounds_of: Callable[[Run], Iterable[Bound]],
    *,
    is_checked: bool = True,
) -> Run:
    """Measure contenders and print their figures; tell of each, before it is timed, what became of it."""
    import torch

    from piecework.tools.bench.measure import measure
    from piecework.tools.bench.output import print_run

    def tell(measured: Measured) -> None:
        word = "right" if is_checked else "made"
        console.print(f"  {measured.name}: {word if measured.status == 'timed' else measured.status}", markup=False)

    run = measure(bench, builders, num_rounds=num_rounds, is_checked=is_checked, on_built=tell)
    print_run(console, run, list(bounds_of(run)))
    torch.compiler.reset()
    return run


def _console() -> Console:
    """Return where tables are printed; a file or a pipe has room for their notes."""
    console = Console()
    return console if console.is_terminal else Console(width=150)


def numbers(text: str) -> list[int]:
    """Read numbers and ranges: ``1,2,4,8-256:8``.

    Raises:
        ConfigError: something else is written.
    """
    found: list[int] = []
    for part in text.split(","):
        try:
            span, _, step = part.partition(":")
            start, dash, stop = span.partition("-")
            found += range(int(start), int(stop) + 1, int(step or 1)) if dash else [int(part)]
        except ValueError:
            found.append(0)
        if not found or min(found) < 1:
            raise ConfigError(f"numbers such as 1,2,4 or a range such as 8-256:8 are meant, got {part!r} in {text!r}")
    return found


def _device(name: str) -> torch.device:
    """Return the device that is meant; one thread of torch is enough for a CPU, where several get in each other's way.

    Raises:
        ConfigError: there is no such device.
    """
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be 'auto', 'cuda' or 'cpu', got {name!r}")
    has_cuda = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch finds no CUDA device; leave it out to run on the CPU")
    if has_cuda:
        return torch.device("cuda", 0)
    torch.set_num_threads(1)
    return torch.device("cpu")


def _chosen(builders: Any, only: str | None) -> dict[str, Any]:
    names = list(builders) if only is None else only.split(",")
    unknown = [name for name in names if name not in builders]
    if unknown:
        raise ConfigError(f"--only: there is no contender {unknown[0]!r}; the contenders are {', '.join(builders)}")
    return {name: builder for name, builder in builders.items() if name in names}
