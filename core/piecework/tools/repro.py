"""Write a script that compiles one piece by itself, so that a failure can be looked at without the model."""

from __future__ import annotations

import ast
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.config import CompilationConfig
from piecework.pieces import Piece

_TEMPLATE = '''"""{name} alone: run by itself, then compiled as it was when this failed:

{error}
"""

import torch

import piecework
{imports}

{classes}

def inputs():
    """Return random tensors of the shapes that the piece was traced with."""
    torch.manual_seed(0)
    return [
{inputs}
    ]


def run_piece({parameters}):
    return piece({arguments})


piece = Piece()
config = piecework.CompilationConfig({settings})

torch.manual_seed(1)
by_itself = run_piece(*inputs())
print("by itself:", [tuple(getattr(value, "shape", ())) for value in by_itself])
compiled = {compiled}
torch.manual_seed(1)
results = compiled(*inputs())
for number, (result, reference) in enumerate(zip(results, by_itself, strict=True)):
    if isinstance(result, torch.Tensor) and result.numel():
        difference = (result.double() - reference.double()).abs().max().item()
        print(f"result {{number}}: largest difference {{difference:.3g}}")
'''


def write_repro(piece: Piece, error: BaseException, folder: Path, *, config: CompilationConfig | None = None) -> Path:
    """Write a script that runs a piece eagerly and compiled, on random inputs; return its path.

    The file is whole or not there: it gets its name when all of it is written. A piece that failed
    before overwrites its own script.

    Args:
        piece: what failed to compile; sizes that vary have the values that they were traced with.
        error: shown at the top of the script.
        folder: made if it is missing.
        config: says by which plugin and with which of its options the script compiles.

    Raises:
        OSError: the folder can't be written to.
    """
    text = _script(piece, error, config or CompilationConfig())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub('[^0-9A-Za-z]+', '_', piece.name)}_{piece.key[:12]}.py"
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    return path


def _script(piece: Piece, error: BaseException, config: CompilationConfig) -> str:
    code = _GraphCode()
    code.add("Piece", piece.graph)
    arguments = _Arguments(piece)
    return _TEMPLATE.format(
        name=piece.name,
        error=str(error).replace("\\", "\\\\").replace('"""', "'''"),
        imports="\n".join([*sorted(code.imports), *_notes_on_ops(piece.graph)]),
        classes="\n\n".join(code.classes),
        inputs="\n".join(f"        {text}," for text in arguments.tensors.values()),
        parameters=", ".join(arguments.tensors),
        arguments=", ".join(arguments.given),
        settings=", ".join(f"{name}={value}" for name, value in _settings(config).items()),
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


def _notes_on_ops(graph: torch.fx.GraphModule) -> list[str]:
    modules = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = [str(node.target) for module in modules for node in module.graph.nodes if _is_op(node.target)]
    namespaces = sorted({target.partition(".")[0] for target in targets} - {"aten", "prims", "higher_order"})
    return [f"# Import here what registers the ops of torch.ops.{namespace}." for namespace in namespaces]


def _is_op(target: Any) -> bool:
    return isinstance(target, (internals.OpOverload, internals.OpOverloadPacket))


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

    def __init__(self, piece: Piece) -> None:
        self.tensors: dict[str, str] = {}
        self.dims: dict[str, dict[int, str]] = {}
        self.given: list[str] = []
        readers: dict[str, str] = {}
        names = [node.name for node in piece.graph.graph.find_nodes(op="placeholder")]
        for name, example in zip(names, piece.example_inputs, strict=True):
            if not isinstance(example, torch.Tensor):
                continue
            self.tensors[name] = _random_tensor(example)
            for dim, size in enumerate(example.shape):
                if isinstance(size, torch.SymInt) and str(size).isidentifier():
                    self.dims.setdefault(name, {})[dim] = str(size)
                    readers.setdefault(str(size), f"{name}.shape[{dim}]")
        for name, example in zip(names, piece.example_inputs, strict=True):
            known = readers.get(str(example), str(_number(example))) if not isinstance(example, torch.Tensor) else name
            self.given.append(known)


def _random_tensor(example: torch.Tensor) -> str:
    shape, strides = tuple(map(_number, example.shape)), tuple(map(_number, example.stride()))
    made = f"torch.empty_strided({shape}, {strides}, dtype={example.dtype}, device={str(example.device)!r})"
    return f"{made}.normal_()" if example.is_floating_point() or example.is_complex() else f"{made}.random_(0, 2)"


def _number(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else internals.size_hint(size)
