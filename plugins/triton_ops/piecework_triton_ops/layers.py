"""Layers of transformers as custom ops: plain PyTorch, for which this plugin brings kernels.

A model may use them as they are, or have layers of its own under the same op names. What an op of each name has to be
for the kernels of this plugin, its class here says: the arguments of ``forward_native``, its results, the attributes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from piecework import CustomOp
from piecework_triton_ops import native

__all__ = ["GeluAndMul", "QuantizeDynamic", "QuantizeStatic", "RMSNorm", "RotaryEmbedding", "SiluAndMul"]


class RMSNorm(CustomOp, op_name="rms_norm"):
    """Root mean square normalisation over the last dim, of the sum with a residual if there is one.

    An op of this name has the attributes ``weight`` (``[hidden]``) and ``eps``.

    Args:
        hidden: width of a row.
        eps: added to the mean of squares.
    """

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Take ``[..., hidden]``; return it normalised, and with a residual the sum too."""
        if residual is None:
            return native.rms_norm(x, self.weight, self.eps)
        return native.rms_norm(x, self.weight, self.eps, residual)


class SiluAndMul(CustomOp, op_name="silu_and_mul"):
    """Gate the second half of the last dim by the SiLU of the first; an op of this name has no attributes."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """Take ``[..., 2 * width]``; return ``[..., width]``."""
        return native.silu_and_mul(x)


class GeluAndMul(CustomOp, op_name="gelu_and_mul"):
    """Gate the second half of the last dim by the GELU of the first.

    An op of this name has the attribute ``approximate``.

    Args:
        approximate: ``"none"`` or ``"tanh"``, as for ``torch.nn.GELU``.

    Raises:
        ValueError: another word.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f"GeluAndMul: approximate must be 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """Take ``[..., 2 * width]``; return ``[..., width]``."""
        return native.gelu_tanh_and_mul(x) if self.approximate == "tanh" else native.gelu_and_mul(x)


class _KeepsFloat32(nn.Module):
    """Keeps a table in float32 where a model is turned into another dtype: ``model.bfloat16()`` would round it."""

    table_name: ClassVar[str]

    def make_table(self) -> torch.Tensor:
        """Return the table anew, on the CPU: one that was on the meta device holds nothing to be moved."""
        raise NotImplementedError(f"{type(self).__qualname__} has no make_table")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        kept: torch.Tensor = getattr(self, self.table_name)
        result = super()._apply(*args, **kwargs)
        device = getattr(self, self.table_name).device
        setattr(self, self.table_name, (self.make_table() if kept.is_meta else kept).to(device))
        return result


class RotaryEmbedding(_KeepsFloat32, CustomOp, op_name="rotary_embedding"):
    """Rotate the first elements of each head of queries and keys by angles that follow from the position.

    An op of this name has the attributes ``cos_sin`` (``[max_positions, rotary_dim]``, cosines, then sines; here
    float32 whatever the dtype of the model) and ``is_neox``.

    Args:
        head_dim: width of a head.
        max_positions: positions are below it.
        rotary_dim: how many elements of a head are rotated; left out, all.
        base: of the angles, ``position * base ** (-2 * i / rotary_dim)``.
        is_neox: the halves of a head are rotated into each other (GPT-NeoX, Llama), or neighbours (GPT-J).
    """

    cos_sin: torch.Tensor
    table_name = "cos_sin"

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        *,
        rotary_dim: int | None = None,
        base: float = 10000.0,
        is_neox: bool = True,
    ) -> None:
        super().__init__()
        self.max_positions, self.base, self.is_neox = max_positions, base, is_neox
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.register_buffer("cos_sin", self.make_table().to(torch.get_default_device()), persistent=False)

    def make_table(self) -> torch.Tensor:
        """Return cosines and sines of all angles, found in float64."""
        with torch.device("cpu"):
            exponents = -torch.arange(0, self.rotary_dim, 2, dtype=torch.float64) / self.rotary_dim
            angles = torch.arange(self.max_positions, dtype=torch.float64)[:, None] * self.base**exponents
            return torch.cat([angles.cos(), angles.sin()], dim=-1).float()

    def forward_native(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take ``[tokens]``, ``[tokens, heads, head_dim]``, ``[tokens, kv_heads, head_dim]``; return both rotated."""
        return native.rotary_embedding(positions, q, k, self.cos_sin, self.is_neox)


class QuantizeDynamic(CustomOp, op_name="quantize_dynamic"):
    """Quantise each row by a scale of its own; an op of this name has the attribute ``dtype``.

    Args:
        dtype: ``torch.int8``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward_native(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take ``[..., width]``; return it quantised, and the scales, ``[..., 1]`` in float32."""
        return native.quantize_dynamic(x, self.dtype)


class QuantizeStatic(_KeepsFloat32, CustomOp, op_name="quantize_static"):
    """Quantise by a given scale; an op of this name has the attributes ``scale`` and ``dtype``.

    Args:
        scale: one number, float32.
        dtype: ``torch.int8``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
    """

    scale: torch.Tensor
    table_name = "scale"

    def __init__(self, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.initial_scale = scale
        self.register_buffer("scale", self.make_table().to(torch.get_default_device()))
        self.dtype = dtype

    def make_table(self) -> torch.Tensor:
        """Return the scale that was given."""
        return torch.tensor([self.initial_scale], dtype=torch.float32, device="cpu")

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """Take ``[..., width]``; return it quantised."""
        return native.quantize_static(x, self.scale, self.dtype)
