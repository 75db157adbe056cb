"""What a trace assumed besides its arguments, and how that is told when it is no longer so."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from piecework import torch_internals as internals
from piecework.config_checks import show

TARGET = "_pw_target"
"""The name under which the traced frame holds the model or function."""


@dataclass
class Assumptions:
    """What Dynamo recorded besides the arguments: attributes, globals, code."""

    manager: Any
    scope: dict[str, Any]
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    hooks_of_all: tuple[Callable[..., Any], ...] = field(default_factory=internals.hooks_of_all_modules)
    """Dynamo leaves no guard where there were none."""

    def departure(self) -> str | None:
        """Return the first thing that no longer is as it was traced, with both values, or None."""
        if torch.get_default_dtype() != self.default_dtype:
            return f"the default dtype was {self.default_dtype} when traced, now it is {torch.get_default_dtype()}"
        if (now := internals.hooks_of_all_modules()) != self.hooks_of_all:
            return (
                f"the hooks of all modules (register_module_forward_hook and its like) were {list(self.hooks_of_all)} "
                f"when traced, now they are {list(now)}"
            )
        with torch.inference_mode(False), torch.no_grad():
            failed = internals.failed_guard(self.manager, self.scope)
        return None if failed is None else self._describe(failed)

    def _describe(self, failed: str) -> str:
        if "___check_torch_function_mode_stack" in failed:
            modes = "such as `with torch.device(...)`, or what torch.set_default_device sets"
            return f"other torch function modes are active than when it was traced, {modes}"
        condition, _, where = failed.partition("  # ")
        # Of the length of a dict, Dynamo says what failed, and not what was asked for.
        condition = re.sub(r"^(len\(.*\)) != (\d+)$", r"\1 == \2", condition.strip())
        compared = re.fullmatch(rf"((?!.*___).*L\['{TARGET}'\].*) == .*", condition)  # no helper of Dynamo's
        expression = compared or re.search(rf"(L\['{TARGET}'\][\w.\[\]']*)", condition)
        now = ""
        if expression is not None and " is L[" not in condition:
            try:
                current = eval(expression[1], {"L": self.scope, "G": {}})  # noqa: S307 - Dynamo's own source text
                now = f", now it is {_shown(current)}"
            except (AttributeError, KeyError, IndexError, TypeError):
                now = ", now it is gone"
        line = f" (read at: {where.strip()})" if where else ""
        if (found := _OF_IDENTITY.match(condition)) is not None:
            return f"{readable(found[1])} is no longer the one that was traced{line}"
        if (found := _NOT_FOUND.fullmatch(condition)) is not None:
            if found[1].startswith("G['__"):
                return f"{internals.RESET_OF_DYNAMO} dropped what was recorded to check the trace by ({found[1]})"
            return f"{readable(found[1])} is no longer held where it was when traced{now}{line}"
        return f"the trace relies on {readable(condition)}{now}{line}"


def _shown(value: Any) -> str:
    is_large = isinstance(value, (torch.nn.Module, torch.Tensor))
    return f"a {type(value).__name__}" if is_large else show(value)


_OF_IDENTITY = re.compile(r"___check_obj_id\((.*), \d+\)")
_NOT_FOUND = re.compile(r"(?:KeyError|AttributeError|IndexError) on (.*)")
"""What Dynamo says of an attribute or item that is gone, or that became a part of a module and was none."""


def readable(source: str) -> str:
    """Return source expressions of Dynamo's in a text as a user would write them."""
    text = re.sub(r"G\['__import_(\w+)'\]", lambda match: match.group(1).replace("_dot_", "."), source)
    text = text.replace(f"L['{TARGET}']", "self")
    text = re.sub(r"dict\((type\([^()]*\))(?:\.__mro__\[\d+\])?\.__dict__\)\['(\w+)'\]", r"\1.\2", text)
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", text)
