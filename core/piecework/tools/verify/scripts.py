"""Write a small script that shows a departure by itself."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from piecework import torch_internals as internals
from piecework.config import CompilationConfig
from piecework.effects import op_name
from piecework.pieces import Piece
from piecework.tools.origins import Lines, import_of_op, imports_of_ops, reference, registration_of_plugins
from piecework.tools.repro import Given, random_inputs, write_repro, write_whole
from piecework.tools.verify.blame import WrongOp
from piecework.tools.verify.chains import Finding
from piecework.tools.verify.comparing import Tolerance

_OP_TEMPLATE = '''"""{name} alone, as it was called when verify looked at it:

{text}
"""

import copy
import sys
from pathlib import Path

import torch

{imports}

op = {op}
stored = {stored}
args, kwargs = {args}, {kwargs}
problems = []
{check}
for problem in dict.fromkeys(problems):
    print(problem)
if not problems:
    print("it does not show here")
sys.exit(1 if problems else 0)
'''

_CHECKS = {
    "declaration": """
results = []  # They are held: memory that is given twice shows.
for _ in range(2):
    given = copy.deepcopy((args, kwargs))
    result, found = checked_call(op, {overload}, *given)
    results.append(result)
    problems += found
""",
    "implementation": """
def outcome(function):
    \"\"\"Return what a function gives, and its arguments afterwards.\"\"\"
    torch.manual_seed(0)
    given = copy.deepcopy((args, kwargs))
    return {{"result": function(*given[0], **given[1]), "arguments": given}}


found = first_difference(outcome({implementation}), outcome(op), "it", {tolerance})
problems += [f"the implementation of {name}: {{found}}"] if found else []
""",
    "rows": """
other_args, other_kwargs = {other_args}, {other_kwargs}  # with another last row


def rows_before_the_last(given):
    \"\"\"Return those of the tensor that departs, after a call.\"\"\"
    torch.manual_seed(0)
    args, kwargs = copy.deepcopy(given)
    return tensors_in((args, kwargs, op(*args, **kwargs)))[{index}].narrow({dim}, 0, {num_rows} - 1)


head, expected = (rows_before_the_last(given) for given in ((other_args, other_kwargs), (args, kwargs)))
found = first_difference(head, expected, "what precedes the last row", {tolerance})
problems += [f"{name}: {{found}}"] if found else []
""",
}
"""By kind of finding: what a script compares."""

_IMPORTS = {
    "declaration": ("from piecework.declarations import checked_call",),
    "implementation": ("from piecework.tools.verify.comparing import Tolerance, first_difference",),
    "rows": (
        "from piecework.effects import tensors_in",
        "from piecework.tools.verify.comparing import Tolerance, first_difference",
    ),
}


@dataclass(frozen=True)
class Script:
    """A script that shows a departure by itself.

    Attributes:
        path: of the file.
        missing: what has to be added to it by hand first.
    """

    path: Path
    missing: tuple[str, ...] = ()


def script_of_piece(
    piece: Piece,
    finding: Finding,
    wrong: WrongOp | None,
    config: CompilationConfig,
    folder: Path,
    *,
    shows: Callable[[Sequence[Any]], bool],
    tolerance: Tolerance,
    plugins: Sequence[str],
    program: str | None,
) -> Script:
    """Write a script that runs a piece, or its ops up to the one that departs.

    Args:
        piece: the piece that departs.
        finding: how it does.
        wrong: the op that departs.
        config: how it was compiled.
        folder: made if it is missing.
        shows: whether the departure is there with other arguments; where random ones will do, the script makes them.
        tolerance: for the results.
        plugins: names of those that compiled and captured it.
        program: the module of the user's model.
    """
    if wrong is not None and wrong.graph is not None:
        piece = replace(piece, name=f"{piece.name} up to {_word(wrong.name)}", key=key_of_graph(wrong.graph))
    assert finding.args is not None
    random = random_inputs(finding.args)
    are_random = shows(random)
    imports = imports_of_ops(piece.graph, program) + registration_of_plugins(plugins)
    given = Given(
        random if are_random else finding.args,
        are_random=are_random,
        is_captured=finding.kind == "capture",
        imports=imports.lines,
        tolerance=repr(tolerance),
    )
    path = write_repro(piece, f"{finding.place}: {finding.difference}", folder, config=config, given=given)
    return Script(path, imports.missing)


def key_of_graph(graph: GraphModule) -> str:
    """Return a hash of the code of a graph."""
    return hashlib.sha256(graph.code.encode()).hexdigest()


def script_of_op(finding: Finding, tolerance: Tolerance, folder: Path, *, program: str | None) -> Script | None:
    """Write a script that calls an op and compares what departs; None where it has no name to call.

    Args:
        finding: what the op did.
        tolerance: for the results.
        folder: made if it is missing.
        program: the module of the user's model.
    """
    node, other = finding.node, finding.other_rows
    name = op_name(node) if node is not None else None
    if name is None:
        return None
    namespace, _, op = name.partition("::")
    stored: dict[str, torch.Tensor] = {}
    called = f"torch.ops.{namespace}.{op}"
    overload = None if finding.overload is None else internals.overload_name(finding.overload).rpartition(".")[2]
    implementation, imports = _implementation(finding)
    check = _CHECKS[finding.kind].format(
        name=name,
        overload="op" if overload else None,
        implementation=implementation,
        tolerance=tolerance,
        other_args=_text((*(other.args if other else ()),), stored),
        other_kwargs=_text(dict(other.kwargs if other else {}), stored),
        **({} if other is None else {"index": other.index, "dim": other.dim, "num_rows": other.num_rows}),
    )
    imports = Lines(_IMPORTS[finding.kind]) + import_of_op(name, program) + imports
    args, kwargs = _text((*(finding.args or ()),), stored), _text(dict(finding.kwargs), stored)
    text = _OP_TEMPLATE.format(
        name=name,
        text=str(finding.difference).strip().replace("\\", "\\\\").replace('"""', "'''"),
        imports="\n".join(line for line in imports.lines if line != "import sys"),
        op=f"{called}.{overload}" if overload else called,
        stored="torch.load(Path(__file__).with_suffix('.pt'))" if stored else "{}",
        args=args,
        kwargs=kwargs,
        check=check.strip("\n"),
    )
    tensors = io.BytesIO()
    torch.save(stored, tensors)
    digest = hashlib.sha256(text.encode() + tensors.getvalue()).hexdigest()
    path = folder / f"{_word(name)}_{digest[:12]}.py"
    if stored:
        write_whole(path.with_suffix(".pt"), lambda file: file.write(tensors.getvalue()))
    write_whole(path, lambda file: file.write(text.encode()))
    return Script(path, imports.missing)


def _implementation(finding: Finding) -> tuple[str, Lines]:
    """Return Python for the function that a ``SplittingOp`` names, and its import."""
    if finding.implementation is None:
        return "", Lines()
    found = reference(finding.implementation)
    if found is not None:
        return found[1], Lines(found[0])
    lines = (
        f"# Import here the implementation of the op: {finding.implementation!r}.",
        'print("import the implementation in this script first, and delete these lines", file=sys.stderr)',
        "sys.exit(2)",
    )
    return "implementation", Lines(lines, ("import the implementation as `implementation`",))


def _text(value: Any, stored: dict[str, torch.Tensor]) -> str:
    """Return Python for some arguments; tensors are stored beside the script."""
    if isinstance(value, torch.Tensor):
        name = f"tensor {len(stored)}"
        stored[name] = value
        return f"stored[{name!r}]"
    if isinstance(value, (torch.device, float)):
        return f"torch.device({str(value)!r})" if isinstance(value, torch.device) else f"float({str(value)!r})"
    if isinstance(value, tuple):
        return f"({''.join(f'{_text(item, stored)}, ' for item in value)})"
    if isinstance(value, list):
        return f"[{', '.join(_text(item, stored) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_text(item, stored)}' for key, item in value.items())}}}"
    return repr(value)


def _word(text: str) -> str:
    return re.sub("[^0-9A-Za-z]+", "_", text.partition(" (")[0]).strip("_")
