"""Write a small script that shows a departure by itself."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from piecework.config import CompilationConfig
from piecework.effects import op_name
from piecework.pieces import Piece
from piecework.tools.repro import Given, random_inputs, write_repro, write_whole
from piecework.tools.verify.blame import WrongOp
from piecework.tools.verify.chains import Finding

_OP_TEMPLATE = '''"""{name} alone, {why}:

{text}
"""

import copy
{imports}

import torch

# Import here what registers the ops of torch.ops.{namespace}.

torch.manual_seed(0)
args, kwargs = {args}, {kwargs}
before = copy.deepcopy((args, kwargs))
result = torch.ops.{namespace}.{op}(*args, **kwargs)
print("schema:", torch.ops.{namespace}.{op}.{overload}._schema)
for name, was, now in [
    *((f"argument {{i}}", *pair) for i, pair in enumerate(zip(before[0], args, strict=True))),
    *((name, before[1][name], now) for name, now in kwargs.items()),
]:
    if isinstance(now, torch.Tensor):
        print(f"{{name}}: changed" if not torch.equal(was, now) else f"{{name}}: as before")
print("result:", result if not isinstance(result, torch.Tensor) else (result.dtype, result.shape, result.stride()))
'''


def script_of_piece(
    piece: Piece,
    finding: Finding,
    wrong: WrongOp | None,
    config: CompilationConfig,
    folder: Path,
    *,
    shows: Callable[[Sequence[Any]], bool],
) -> Path:
    """Write a script that runs a piece, or its ops up to the one that departs; return its path.

    Args:
        piece: the piece that departs.
        finding: how it does.
        wrong: the op that departs.
        config: how it was compiled.
        folder: made if it is missing.
        shows: whether the departure is there with other arguments; where random ones will do, the script makes them.
    """
    if wrong is not None and wrong.graph is not None:
        piece = replace(piece, name=f"{piece.name} up to {_word(wrong.name)}", key=key_of_graph(wrong.graph))
    assert finding.args is not None
    random = random_inputs(finding.args)
    are_random = shows(random)
    given = Given(random if are_random else finding.args, are_random=are_random, is_captured=finding.kind == "capture")
    return write_repro(piece, f"{finding.place}: {finding.difference}", folder, config=config, given=given)


def key_of_graph(graph: GraphModule) -> str:
    """Return a hash of the code of a graph."""
    return hashlib.sha256(graph.code.encode()).hexdigest()


def script_of_op(finding: Finding, folder: Path) -> Path | None:
    """Write a script that calls an op, and shows what it does to its arguments; None where it has no name to call."""
    node = finding.node
    name = op_name(node) if node is not None else None
    if name is None or finding.piece is not None:
        return None
    namespace, _, op = name.partition("::")
    stored: dict[str, torch.Tensor] = {}
    args = _text((*(finding.args or ()),), stored)
    kwargs = _text(dict(finding.kwargs), stored)
    path = folder / f"{_word(name)}.py"
    if stored:
        write_whole(path.with_suffix(".pt"), lambda file: torch.save(stored, file))
    text = _OP_TEMPLATE.format(
        name=name,
        why="as it was called when verify looked at it",
        text=str(finding.difference).strip().replace("\\", "\\\\").replace('"""', "'''"),
        imports="from pathlib import Path" if stored else "",
        namespace=namespace,
        op=op,
        overload="default",
        args=args,
        kwargs=kwargs,
    )
    write_whole(path, lambda file: file.write(text.encode()))
    return path


def _text(value: Any, stored: dict[str, torch.Tensor]) -> str:
    """Return Python for some arguments; tensors are stored beside the script."""
    if isinstance(value, torch.Tensor):
        name = f"tensor {len(stored)}"
        stored[name] = value
        return f"torch.load(Path(__file__).with_suffix('.pt'))[{name!r}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{_text(item, stored)}, ' for item in value)})"
    if isinstance(value, list):
        return f"[{', '.join(_text(item, stored) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_text(item, stored)}' for key, item in value.items())}}}"
    return repr(value)


def _word(text: str) -> str:
    return re.sub("[^0-9A-Za-z]+", "_", text.partition(" (")[0]).strip("_")
