"""Write a script that compiles one piece by itself, so that a failure can be looked at without the model."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from piecework import torch_internals as internals
from piecework.config import CompilationConfig
from piecework.pieces import Piece
from piecework.tools.origins import imports_of_ops

MAX_NUMBERS_IN_SCRIPT = 256
"""Of one tensor; larger ones lie in a file beside the script."""

_TEMPLATE = '''"""{name} alone: run by itself, then {how} as it was when this failed:

{error}
"""

import torch

import piecework
{imports}

{classes}

def inputs():
    """Return {whose}."""
    torch.manual_seed(0)
    return [
{inputs}
    ]


def run_piece({parameters}):
    return piece({arguments})


piece = Piece()
config = piecework.CompilationConfig({settings})

torch.manual_seed(1)
given = inputs()
by_itself = run_piece(*given)
print("by itself:", [tuple(getattr(value, "shape", ())) for value in by_itself])
compiled = {compiled}
torch.manual_seed(1)
values = inputs()
{captured}results = compiled(*values)
for number, (result, reference) in enumerate(zip(results, by_itself, strict=True)):
    if isinstance(result, torch.Tensor) and result.numel():
        difference = (result.double() - reference.double()).abs().max().item()
        print(f"result {{number}}: largest difference {{difference:.3g}}")
{verdict}'''

_VERDICT = """
found = first_difference([*results], [*by_itself], "result", {tolerance}) or first_difference(
    values, given, "input afterwards", {tolerance}
)
print(found or "it does not show here")
sys.exit(1 if found else 0)
"""

_CAPTURED = """for value in values:
    value.zero_()
compiled(*values)  # captured here
for value, content in zip(values, inputs(), strict=True):
    value.copy_(content)
torch.manual_seed(1)
"""

UNFINISHED, SUFFIX = ".piecework-", ".tmp"
"""Begin and end of the name of a file that is being written: others in the folder are the user's."""
LEFTOVER_S = 600
"""After so long, a file that did not get its name is nobody's: writing one takes milliseconds."""


@dataclass(frozen=True)
class Given:
    """What a script calls its piece with, in place of random tensors of the traced shapes.

    Attributes:
        args: one value for each input of the piece.
        are_random: they are what ``random_inputs`` returns, so that the script can make them.
        is_captured: the script captures that size on zeros, and replays it on the arguments.
        imports: Python that registers the ops and plugins that the script needs.
        tolerance: of ``verify``, as Python; the script exits with 1 where results differ by more.
    """

    args: Sequence[Any]
    are_random: bool = False
    is_captured: bool = False
    imports: Sequence[str] = ()
    tolerance: str = "Tolerance()"


def random_inputs(args: Sequence[Any]) -> list[Any]:
    """Return random tensors as a script makes them, like the tensors among some arguments."""
    devices = {arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(0)
        return [_random_like(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]


def _random_like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.normal_() if made.is_floating_point() or made.is_complex() else made.random_(0, 2)


def write_repro(
    piece: Piece,
    error: BaseException | str,
    folder: Path,
    *,
    config: CompilationConfig | None = None,
    given: Given | None = None,
) -> Path:
    """Write a script that runs a piece eagerly and compiled, on random inputs or given ones; return its path.

    The file is whole or not there: it gets its name when all of it is written. A piece that failed
    before overwrites its own script.

    Args:
        piece: what failed to compile; sizes that vary have the values that they were traced with.
        error: shown at the top of the script.
        folder: made if it is missing.
        config: says by which plugin and with which of its options the script compiles.
        given: what to call the piece with; tensors that are large lie in a file beside the script, of the same name.

    Raises:
        OSError: the folder can't be written to.
    """
    arguments = _Arguments(piece, given)
    text = _script(piece, error, config or CompilationConfig(), arguments, given)
    path = folder / f"{re.sub('[^0-9A-Za-z]+', '_', piece.name)}_{piece.key[:12]}.py"
    if arguments.stored:
        write_whole(path.with_suffix(".pt"), lambda file: torch.save(arguments.stored, file))
    write_whole(path, lambda file: file.write(text.encode()))
    return path


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file, which is whole or not there: it gets its name when all of it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=UNFINISHED, suffix=SUFFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except BaseException:  # Raised again: an interrupt leaves no half of a file behind either.
        os.unlink(temporary)
        raise
    _remove_leftovers(path.parent)


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed while they wrote left behind."""
    for left in folder.glob(f"{UNFINISHED}*{SUFFIX}"):
        with contextlib.suppress(OSError):  # Another process may be at it, too.
            if time.time() - left.stat().st_mtime > LEFTOVER_S:
                left.unlink()


def _script(
    piece: Piece,
    error: BaseException | str,
    config: CompilationConfig,
    arguments: _Arguments,
    given: Given | None,
) -> str:
    is_captured = given is not None and given.is_captured
    code = _GraphCode()
    code.add("Piece", piece.graph)
    settings = _settings(config)
    if is_captured:
        settings |= {"capture_sizes": f"({arguments.size!r},)", "capturer": repr(config.capturer)}
    imports = [*sorted(code.imports), *(imports_of_ops(piece.graph).lines if given is None else given.imports)]
    if given is not None:
        imports = ["import sys", "from piecework.tools.verify.comparing import Tolerance, first_difference", *imports]
    if arguments.stored:
        imports = ["from pathlib import Path", *imports]
    return _TEMPLATE.format(
        how="captured" if is_captured else "compiled",
        whose=arguments.whose,
        captured=_CAPTURED if is_captured else "",
        verdict="" if given is None else _VERDICT.format(tolerance=given.tolerance),
        name=piece.name,
        error=str(error).replace("\\", "\\\\").replace('"""', "'''"),
        imports="\n".join(dict.fromkeys(imports)),
        classes="\n\n".join(code.classes),
        inputs="\n".join(f"        {text}," for text in arguments.tensors.values()),
        parameters=", ".join(arguments.tensors),
        arguments=", ".join(arguments.given),
        settings=", ".join(f"{name}={value}" for name, value in settings.items()),
        compiled=(
            f"piecework.compile(run_piece, config=config, dynamic_arg_dims={arguments.dims!r})"
            if arguments.dims
            else 'torch.compile(run_piece, backend="piecework", options=config.given(), fullgraph=True, dynamic=False)'
        ),
    )


def _settings(config: CompilationConfig) -> dict[str, str]:
    settings = {"level": "3", "splitting_ops": "()", "piece_compiler": repr(config.piece_compiler)}
    options = repr(config.plugin_options)
    try:
        ast.literal_eval(options)
    except (ValueError, SyntaxError):  # an option that is an object
        return settings
    return settings | {"plugin_options": options}


class _GraphCode:
    """The classes that a graph and the graphs inside it become."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.classes: list[str] = []

    def add(self, name: str, graph: torch.fx.GraphModule) -> None:
        attributes = [f"        self.{key} = {self.attribute(name, key, value)}" for key, value in _attributes(graph)]
        imports, forward = internals.graph_source(graph)
        self.imports.update(imports)
        body = ["    def __init__(self):", "        super().__init__()", *attributes, ""]
        body += [f"    {line}".rstrip() for line in forward.strip().splitlines()]
        self.classes.append("\n".join([f"class {name}(torch.nn.Module):", *body]) + "\n")

    def attribute(self, name: str, key: str, value: Any) -> str:
        if isinstance(value, torch.fx.GraphModule):
            self.add(f"{name}_{key}", value)
            return f"{name}_{key}()"
        if isinstance(value, torch.Tensor):
            return _random_tensor(value)
        return repr(value)


def _attributes(graph: torch.fx.GraphModule) -> list[tuple[str, Any]]:
    targets = dict.fromkeys(str(node.target) for node in graph.graph.find_nodes(op="get_attr"))
    return [(target, getattr(graph, target)) for target in targets]


class _Arguments:
    """The tensors to give, and how the sizes among a piece's inputs follow from them."""

    def __init__(self, piece: Piece, given: Given | None = None) -> None:
        self.tensors: dict[str, str] = {}
        self.dims: dict[str, dict[int, str]] = {}
        self.given: list[str] = []
        self.stored: dict[str, torch.Tensor] = {}
        """Tensors that are too large to be written into a script."""
        self.whose = "the tensors that it departed with"
        if given is None or given.are_random:
            self.whose = "random tensors of the shapes that the piece was traced with"
        values: dict[str, int] = {}
        readers: dict[str, str] = {}
        names = [node.name for node in piece.graph.graph.find_nodes(op="placeholder")]
        args = piece.example_inputs if given is None else given.args
        for name, example, arg in zip(names, piece.example_inputs, args, strict=True):
            if not isinstance(example, torch.Tensor):
                continue
            self.tensors[name] = _random_tensor(arg) if given is None or given.are_random else self.text_of(name, arg)
            for dim, size in enumerate(example.shape):
                if isinstance(size, torch.SymInt) and str(size).isidentifier():
                    self.dims.setdefault(name, {})[dim] = str(size)
                    readers.setdefault(str(size), f"{name}.shape[{dim}]")
                    values[str(size)] = _number(arg.shape[dim])
        for name, example, arg in zip(names, piece.example_inputs, args, strict=True):
            known = readers.get(str(example), str(_number(arg))) if not isinstance(example, torch.Tensor) else name
            self.given.append(known)
        self.size: int | dict[str, int] = values if len(values) != 1 else next(iter(values.values()))
        """What the script captures."""

    def text_of(self, name: str, tensor: torch.Tensor) -> str:
        """Return Python for a tensor: its numbers, or where they are stored."""
        if tensor.numel() > MAX_NUMBERS_IN_SCRIPT:
            self.stored[name] = tensor
            return f"torch.load(Path(__file__).with_suffix('.pt'))[{name!r}]"
        numbers = "" if not tensor.numel() else f".copy_(torch.tensor({tensor.tolist()}))"
        return f"{_empty_like(tensor)}{numbers}"


def _random_tensor(example: torch.Tensor) -> str:
    made = _empty_like(example)
    return f"{made}.normal_()" if example.is_floating_point() or example.is_complex() else f"{made}.random_(0, 2)"


def _empty_like(example: torch.Tensor) -> str:
    shape, strides = tuple(map(_number, example.shape)), tuple(map(_number, example.stride()))
    return f"torch.empty_strided({shape}, {strides}, dtype={example.dtype}, device={str(example.device)!r})"


def _number(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else internals.size_hint(size)
