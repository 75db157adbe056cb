"""What a device refuses while it records a graph, refused on a CPU too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from piecework import torch_internals as internals
from piecework.errors import CaptureError

__all__ = ["Refusing"]


class Refusing(internals.TorchDispatchMode):
    """Runs every op but those that a stream capture can't record.

    It sees the ops that a piece calls and those that their Python bodies call, not what compiled code does by itself,
    and no reads that bypass the dispatcher (``Tensor.numpy``, and outside of such bodies ``Tensor.tolist``).

    Args:
        name: what is captured.
        inside: the op whose body is looked at.
    """

    supports_higher_order_operators = True

    def __init__(self, name: str, *, inside: str = "") -> None:
        super().__init__()
        self.name, self.inside = name, inside

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, internals.OpOverload):
            return func(*args, **kwargs)
        why = _why_refused(func, args, kwargs)
        if why is not None:
            raise self.refusal(why)
        # In inference mode composite ops arrive whole, and what they do inside would not be seen.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func.namespace in ("aten", "prims", "prim"):
            return func(*args, **kwargs)
        with _InBody(Refusing(self.name, inside=func.name().partition(".")[0])):
            return internals.call_on_cpu(func, args, kwargs)

    def refusal(self, why: str) -> CaptureError:
        """Return an error that says what is refused, and where."""
        if not self.inside:
            return CaptureError(f"{self.name} can't be captured: {why}")
        return CaptureError(
            f"{self.name} can't be captured: in {self.inside}, {why}; make {self.inside} a splitting op, as in "
            f"splitting_ops=[{self.inside!r}], so that it runs between the graphs"
        )


class _InBody(TorchFunctionMode):
    """Looks at what the Python body of an op calls: the mode that met the op is off inside of it."""

    def __init__(self, refusing: Refusing) -> None:
        super().__init__()
        self.refusing = refusing

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.tolist:
            raise self.refusing.refusal("Tensor.tolist reads a tensor on the host, which needs a host synchronisation")
        with self.refusing:
            return func(*args, **(kwargs or {}))


def _why_refused(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    op = func.name().partition(".")[0]
    to_do = "do this, and what needs its result, inside a custom op that is a splitting op and gives known sizes"
    if torch.Tag.cudagraph_unsafe in func.tags:
        between = f"make it a splitting op, as in splitting_ops=[{op!r}], so that it runs between the graphs"
        return f"{op} is marked as unsafe for graphs (torch.Tag.cudagraph_unsafe); {between}"
    if op in ("aten::_local_scalar_dense", "aten::item"):
        return (
            "it reads a number from a tensor (.item(), int(), bool(), or an `if` on a tensor), which needs a host "
            "synchronisation; keep the number in a tensor, or do this inside a custom op that is a splitting op"
        )
    if torch.Tag.data_dependent_output in func.tags:
        return f"{op} returns a number that depends on data, which needs a host synchronisation; {to_do}"
    if op in _WITH_MASKS:
        if not _has_mask(args[1]) or (op != "aten::index" and args[2].numel() == 1):
            return None
        return f"indexing with a mask reads its data, which needs a host synchronisation; use torch.where, or {to_do}"
    if op == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    if torch.Tag.dynamic_output_shape in func.tags:
        return f"the size of what {op} returns depends on data, which needs a host synchronisation; {to_do}"
    return None


_WITH_MASKS = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
