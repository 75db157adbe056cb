"""Say what went wrong when a model was traced: the line of the user's, and the way out."""

from __future__ import annotations

import re

import sympy

from piecework import torch_internals as internals
from piecework.arguments import Arguments, trace_sizes
from piecework.assumptions import readable
from piecework.errors import CompileError


def trace_error(
    error: BaseException, shape_env: internals.ShapeEnv | None, owner: str, arguments: Arguments
) -> CompileError:
    """Return an error that says which line of the model can't be traced once, and what to do.

    Args:
        error: what Dynamo, or the backend of level 2, raised.
        shape_env: what was known about the sizes by then; None where it ended before there was a graph.
        owner: name of the model.
        arguments: of the first call.
    """
    changed = internals.changed_state(error)
    if changed is not None:
        state = _readable_state(changed)
        way_out = "Keep such state in a buffer and change it in place"
        if "_buffers" in state or "_parameters" in state:
            way_out = "Change a buffer in place by a method, `self.n.add_(1)`: `self.n += 1` assigns it, too"
        return CompileError(
            f"{owner} changes Python state in its forward: {state}{_user_line(error)}; one trace can't repeat that at "
            f"every call. {way_out}, or use level 1"
        )
    if isinstance(error, internals.BackendCompilerFailed):
        inner = error.inner_exception
        what = f"{type(inner).__name__}: {_first_line(inner)}"
        return CompileError(f"the torch.compile backend of level 2 failed on {owner}: {what}")
    specialised = _specialised(error, shape_env, arguments)
    if specialised:
        return CompileError(f"{specialised} (tracing {owner})")
    if re.search("does not support running with fake tensors|There was no fake impl registered for", str(error)):
        return CompileError(
            f"{owner} can't be traced as one graph: an op has no fake implementation{_user_line(error)}; give it one "
            "with torch.library.register_fake"
        )
    refused = re.search(r": got (\w+\(.*\))$", str(error), re.MULTILINE)
    if isinstance(error, internals.TorchRuntimeError) and refused is not None:
        raised = f"an op raised {refused[1]}{_user_line(error)}"
        return CompileError(f"{owner} can't be traced as one graph: {raised}{_traced_at(arguments)}")
    return CompileError(
        f"{owner} can't be traced as one graph: {_first_line(error)}{_user_line(error)}; move that line out of the "
        "forward, make it an op with torch.library.custom_op, or use level 1 (DYNAMO_AS_IS), which allows graph breaks"
    )


def _traced_at(arguments: Arguments) -> str:
    """Return a hint where the trace took other sizes than the first call: dims of different names never have one."""
    chosen = trace_sizes(arguments.sizes)
    if chosen == arguments.sizes:
        return ""
    sizes = ", ".join(f"{name} = {size}" for name, size in chosen.items())
    return (
        f". It was traced with {sizes}: dims of different names get different sizes of at least 2. If two are always "
        "equal, give them one name in dynamic_arg_dims; if one follows from another, let the first call have such sizes"
    )


def _readable_state(sources: str) -> str:
    return re.sub(r"[GL]\['(\w+)'\]", r"\1", readable(sources))


def _specialised(error: BaseException, shape_env: internals.ShapeEnv | None, arguments: Arguments) -> str | None:
    if shape_env is None or "specialized" not in str(error) and "Constraint" not in type(error).__name__:
        return None
    sources = internals.symbol_sources(shape_env)
    for guard in internals.shape_guards(shape_env):
        relation = guard.relation
        if isinstance(relation, sympy.Eq) and len(relation.free_symbols) == 1:
            (symbol,) = relation.free_symbols
            source = sources.get(symbol)  # pyright: ignore[reportArgumentType] - sympy calls it Basic
            path = re.sub(r"L\['(\w+)'\]", r"\1", source.tensor) if source else ""
            spec = next((spec for spec in arguments.tensors if spec.path == path), None)
            if spec is None or source is None:
                continue
            dim, name = source.dim, spec.dims[source.dim]
            (value,) = sympy.solve(relation, symbol) or [relation]
            line = f", by this line: {guard.user_line}" if guard.user_line else ""
            return (
                f"dim {dim} ({name!r}) of argument {path} is meant to vary, but the model fixes it to {value}{line}; "
                f"mend that line, or leave the dim out of dynamic_arg_dims{_unnamed_alike(arguments, value)}"
            )
    return None


def _unnamed_alike(arguments: Arguments, value: sympy.Basic) -> str:
    """Return a hint at static dims of the same size: most often one of them was meant to vary too."""
    alike = [
        f"dim {dim} of {spec.path}" for spec in arguments.tensors for dim, size in enumerate(spec.dims) if size == value
    ]
    return f"; if they vary with it, name these too: {', '.join(alike)}" if alike else ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _user_line(error: BaseException) -> str:
    """Return the innermost line of the user's that an error of Dynamo tells of."""
    frames = [frame for frame in getattr(error, "real_stack", None) or [] if not frame.filename.startswith("<")]
    if frames:
        last = next((frame for frame in reversed(frames) if "/torch/" not in frame.filename), frames[-1])
        return f', at {last.filename}:{last.lineno} in {last.name}: "{(last.line or "").strip()}"'
    found = re.findall(r'File "([^"<]+)", line (\d+), in (\w+)\n\s*(.*)', str(error))
    outside = [item for item in found if "/torch/" not in item[0]]
    if outside:
        filename, number, function, line = outside[-1]
        return f', at {filename}:{number} in {function}: "{line.strip()}"'
    return ""
