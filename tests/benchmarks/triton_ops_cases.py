"""What bench_triton_ops.py measures: each op with its inputs, its rivals, what it must compute, and how it is tuned."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from piecework_triton_ops import activation, native, norm, quantize, rotary
from piecework_triton_ops.launching import MAX_BLOCK, Launch, next_power_of_2

__all__ = ["OPS", "Case", "Op"]

EPS = 1e-5
HEAD_DIM = 128
NUM_KV_HEADS = 8
MAX_POSITIONS = 8200
HALF_STEP = {torch.int8: (0.0, 0.5), torch.float8_e4m3fn: (2.0**-4, 2.0**-10)}
"""Relative to the value, and to the scale: how far a code may be from what it stands for."""

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Op:
    """One op as it is measured.

    Attributes:
        inputs: tensors for so many rows of so many elements on a device.
        kernel: calls the kernel; its last argument overrides the launch constants.
        plain: the same in plain PyTorch.
        is_right: whether results are near enough to those in float64; it is given the last rows.
        launches: the grid that ``--tune`` tries.
    """

    name: str
    inputs: Callable[[int, int, torch.device], Tensors]
    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    is_right: Callable[[Tensors, Tensors], bool]
    launches: Callable[[int], Iterator[Launch]]


@dataclass(frozen=True)
class Case:
    """One op at one size."""

    op: Op
    rows: int
    hidden: int

    @property
    def name(self) -> str:
        return f"{self.op.name} {self.rows} x {self.hidden}"

    def check(self, who: str, inputs: Tensors, results: Any) -> None:
        """Compare the last 64 rows with float64; weights and tables have no rows, and are passed whole."""
        results = results if isinstance(results, tuple) else (results,)
        cut = tuple(x[-64:] if x.shape[0] == self.rows and x.ndim + (x.dtype == torch.int64) > 1 else x for x in inputs)
        if not self.op.is_right(cut, tuple(result[-64:] for result in results)):
            raise SystemExit(f"{self.name}: {who} is wrong")


def near(actual: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether results in bfloat16 are two roundings from exact ones, as Inductor's may be."""
    return torch.allclose(actual.double(), exact, rtol=2.0**-7, atol=1e-5)


def rows_of_blocks(hidden: int) -> Iterator[Launch]:
    """Whole rows, and halves and quarters of one."""
    whole = next_power_of_2(hidden)
    for block, num_warps, rows in itertools.product((whole, whole // 2, whole // 4), (2, 4, 8, 16, 32), (1, 2)):
        fits = rows * block <= MAX_BLOCK and 4 <= rows * block // (32 * num_warps) <= 128
        if fits and not (block < hidden and rows > 1):
            yield Launch(num_warps=num_warps, block=block, rows=rows)


def tiles(hidden: int) -> Iterator[Launch]:
    """Parts of a row."""
    for block, num_warps in itertools.product((128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8)):
        if block <= next_power_of_2(hidden) and 1 <= block // (32 * num_warps) <= 32:
            yield Launch(num_warps=num_warps, block=block)


def heads(hidden: int) -> Iterator[Launch]:
    """So many heads of a token."""
    for rows, num_warps in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8)):
        if rows * HEAD_DIM <= max(hidden, HEAD_DIM) and 2 <= rows * (HEAD_DIM // 2) // (32 * num_warps) <= 32:
            yield Launch(num_warps=num_warps, block=HEAD_DIM // 2, rows=rows)


def _random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _norm_ops() -> Iterator[Op]:
    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        value = x.double()
        return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + EPS) * weight.double()

    def sum_is_right(given: Tensors, results: Tensors) -> bool:
        x, residual, weight = given
        return near(results[1], x.double() + residual.double()) and near(results[0], exact(results[1], weight))

    yield Op(
        "rms_norm",
        lambda rows, hidden, device: (_random(rows, hidden, device=device), _random(hidden, device=device)),
        lambda x, weight, launch=None: norm.rms_norm(x, weight, EPS, launch),
        lambda x, weight: native.rms_norm(x, weight, EPS),
        lambda given, results: near(results[0], exact(*given)),
        rows_of_blocks,
    )
    yield Op(
        "add_rms_norm",
        lambda rows, hidden, device: (
            _random(rows, hidden, device=device),
            _random(rows, hidden, device=device),
            _random(hidden, device=device),
        ),
        lambda x, residual, weight, launch=None: norm.add_rms_norm(x, residual, weight, EPS, launch),
        lambda x, residual, weight: native.rms_norm(x, weight, EPS, residual=residual),
        sum_is_right,
        rows_of_blocks,
    )


def _activation_op(name: str, exact: Callable[[torch.Tensor], torch.Tensor]) -> Op:
    def is_right(given: Tensors, results: Tensors) -> bool:
        gate, up = given[0].double().chunk(2, dim=-1)
        return near(results[0], exact(gate) * up)

    return Op(
        name,
        lambda rows, hidden, device: (_random(rows, 2 * hidden, device=device),),
        getattr(activation, name),
        getattr(native, name),
        is_right,
        tiles,
    )


def _rotary_op(name: str, is_neox: bool) -> Op:
    def inputs(rows: int, hidden: int, device: torch.device) -> Tensors:
        angles = torch.rand(MAX_POSITIONS, HEAD_DIM // 2, device=device) * 6.3
        return (
            torch.randint(MAX_POSITIONS, (rows,), device=device),
            _random(rows, max(1, hidden // HEAD_DIM), HEAD_DIM, device=device),
            _random(rows, NUM_KV_HEADS, HEAD_DIM, device=device),
            torch.cat([angles.cos(), angles.sin()], dim=-1),
        )

    def is_right(given: Tensors, results: Tensors) -> bool:
        positions, *heads, cos_sin = given
        turned = torch.complex(*cos_sin.double()[positions].chunk(2, dim=-1))[:, None]
        for x, result in zip(heads, results, strict=True):
            pairs = [one.double().unflatten(-1, (2, -1) if is_neox else (-1, 2)) for one in (x, result)]
            before, after = (torch.complex(*one.unbind(-2 if is_neox else -1)) for one in pairs)
            product = before * turned
            if not (near(after.real, product.real) and near(after.imag, product.imag)):
                return False
        return True

    return Op(
        name,
        inputs,
        lambda positions, q, k, cos_sin, launch=None: rotary.rotary_embedding(
            positions, q, k, cos_sin, is_neox, launch
        ),
        lambda positions, q, k, cos_sin: native.rotary_embedding(positions, q, k, cos_sin, is_neox),
        is_right,
        heads,
    )


def _quantize_ops() -> Iterator[Op]:
    for name, dtype in (("fp8", torch.float8_e4m3fn), ("int8", torch.int8)):

        def is_near(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = dtype) -> bool:
            relative, absolute = (1.01 * part for part in HALF_STEP[dtype])
            error = (codes.double() * scale.double() - x.double()).abs()
            return bool((error <= relative * x.double().abs() + absolute * scale.double()).all())

        yield Op(
            f"quantize_dynamic {name}",
            lambda rows, hidden, device: (_random(rows, hidden, device=device),),
            lambda x, launch=None, dtype=dtype: quantize.quantize_dynamic(x, dtype, launch),
            lambda x, dtype=dtype: native.quantize_dynamic(x, dtype),
            lambda given, results, is_near=is_near: is_near(given[0], results[0], results[1]),
            rows_of_blocks,
        )
        yield Op(
            f"quantize_static {name}",
            lambda rows, hidden, device: (_random(rows, hidden, device=device), torch.full((1,), 0.06, device=device)),
            lambda x, scale, launch=None, dtype=dtype: quantize.quantize_static(x, scale, dtype, launch),
            lambda x, scale, dtype=dtype: native.quantize_static(x, scale, dtype),
            lambda given, results, is_near=is_near: is_near(given[0], results[0], given[1]),
            tiles,
        )


OPS: Sequence[Op] = (
    *_norm_ops(),
    _activation_op("silu_and_mul", F.silu),
    _activation_op("gelu_and_mul", F.gelu),
    _activation_op("gelu_tanh_and_mul", lambda gate: F.gelu(gate, approximate="tanh")),
    _rotary_op("rotary neox", True),
    _rotary_op("rotary gptj", False),
    *_quantize_ops(),
)
