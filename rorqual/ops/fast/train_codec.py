"""Fake quantisation for training on a CPU: values of a format or a stored weight, in place of the codes.

Quantised and dequantised in registers, bit for bit what `formats.codec.fake_quantize` and
`formats.weights.quantize_weight(...).expand()` give; the gradient passes unchanged (straight-through).

R rows, K their width, B blocks of rows. No fast-math, for the reason that `codec` gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.formats import codec
from rorqual.formats.spec import E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32, NumberFormat
from rorqual.formats.weights import TILE, quantize_weight
from rorqual.ops.fast.kernel import kernel
from rorqual.ops.fast.row_kernels import part
from rorqual.ops.fast.train_hyper import ROWS, blocks_of, fp32

_F32, _U32 = np.float32, np.uint32

_E2M1_E4M3, _E2M1_E8M0, _E4M3_E8M0 = range(3)
_RULE: Mapping[NumberFormat, int] = MappingProxyType(
    {E2M1_E4M3_16: _E2M1_E4M3, E2M1_E8M0_32: _E2M1_E8M0, E4M3_E8M0_32: _E4M3_E8M0}
)
_FLOOR_E2M1_E4M3 = _F32(E2M1_E4M3_16.amax_floor)
_FLOOR_E2M1_E8M0 = _F32(E2M1_E8M0_32.amax_floor)
_FLOOR_E4M3_E8M0 = _F32(E4M3_E8M0_32.amax_floor)
_E2M1_MAX, _E4M3_MAX = _F32(E2M1_E8M0_32.value_max), _F32(E4M3_E8M0_32.value_max)
_E2M1_RECIPROCAL, _E4M3_RECIPROCAL = _F32(1 / E2M1_E8M0_32.value_max), _F32(1 / E4M3_E8M0_32.value_max)
# The floor of a weight's tile: its scale is then the least normal number.
_FLOOR_TILE = _F32(E4M3_E8M0_32.value_max * 2.0**-126)


@part
def _nearest(magnitude: Any, bits: Any, one: Any, magic: Any) -> Any:
    """To `bits` mantissa bits fewer, ties to even; below `one`, to the steps of fp32 at `magic`."""
    u = _F32(magnitude).view(np.uint32)
    half = _U32((_U32(1) << _U32(bits - _U32(1))) - _U32(1))
    up = _U32(_U32(u + half) + _U32(_U32(u >> bits) & _U32(1)))
    large = _U32(_U32(up >> bits) << bits).view(np.float32)
    small = (magnitude + magic) - magic
    return small if magnitude < one else large


@part
def _nearest_e2m1(magnitude: Any) -> Any:
    return _nearest(min(magnitude, _E2M1_MAX), _U32(22), _F32(1), _F32(2.0**22))


@part
def _nearest_e4m3(magnitude: Any) -> Any:
    return _nearest(min(magnitude, _E4M3_MAX), _U32(20), _F32(2.0**-6), _F32(2.0**14))


@part
def _power_above(value: Any) -> Any:
    """The least power of two that is not below a positive normal value."""
    u = _F32(value).view(np.uint32)
    return _U32(_U32(_U32(u + _U32(0x7FFFFF)) >> _U32(23)) << _U32(23)).view(np.float32)


@part
def _largest(bits_K: Any) -> Any:
    """Bits of the largest magnitude. As integers, magnitudes order as floats do, Inf and NaN on top."""
    top = _U32(0)
    for k in range(bits_K.shape[0]):
        top = max(top, _U32(bits_K[k] & _U32(0x7FFFFFFF)))
    return top


@part
def _scale_of(rule: Any, top: Any) -> Any:
    if rule == _E2M1_E4M3:
        return _nearest_e4m3(max(top, _FLOOR_E2M1_E4M3) / _E2M1_MAX)
    if rule == _E2M1_E8M0:
        return _power_above(max(top, _FLOOR_E2M1_E8M0) * _E2M1_RECIPROCAL)
    return _power_above(max(top, _FLOOR_E4M3_E8M0) * _E4M3_RECIPROCAL)


@kernel("void(float32[:, ::1], int64, int64, int64, float32[:, ::1], boolean[::1])", parallel=True)
def _quantise_rows(x_RK: Any, rule: Any, group: Any, blocks: Any, out_RK: Any, finite_B: Any) -> None:
    for block in prange(blocks):
        finite = True
        for r in range(block * ROWS, min(block * ROWS + ROWS, x_RK.shape[0])):
            for first in range(0, x_RK.shape[1], group):
                x_K, out_K = x_RK[r, first : first + group], out_RK[r, first : first + group]
                top = _largest(x_K.view(np.uint32))
                finite = finite and bool(top < _U32(0x7F800000))
                scale = _scale_of(rule, _U32(top).view(np.float32))
                if rule == _E4M3_E8M0:
                    for k in range(x_K.shape[0]):
                        out_K[k] = math.copysign(_nearest_e4m3(abs(x_K[k]) / scale) * scale, x_K[k])
                else:
                    for k in range(x_K.shape[0]):
                        out_K[k] = math.copysign(_nearest_e2m1(abs(x_K[k]) / scale) * scale, x_K[k])
        finite_B[block] = finite


@kernel("void(float32[:, ::1], int64, float32[:, ::1], boolean[::1])", parallel=True)
def _quantise_tiles(w_NK: Any, strips: Any, out_NK: Any, finite_B: Any) -> None:
    """FP8 under one power of two a 32 x 32 tile; both edges may be ragged."""
    for strip in prange(strips):
        finite = True
        for first in range(0, w_NK.shape[1], TILE):
            tile = w_NK[strip * TILE : strip * TILE + TILE, first : first + TILE]
            out = out_NK[strip * TILE : strip * TILE + TILE, first : first + TILE]
            top = _U32(0)
            for n in range(tile.shape[0]):
                top = max(top, _largest(tile[n].view(np.uint32)))
            finite = finite and bool(top < _U32(0x7F800000))
            scale = _power_above(max(_U32(top).view(np.float32), _FLOOR_TILE) / _E4M3_MAX)
            for n in range(tile.shape[0]):
                w_K, out_K = tile[n], out[n]
                for k in range(w_K.shape[0]):
                    out_K[k] = math.copysign(_nearest_e4m3(abs(w_K[k]) / scale) * scale, w_K[k])
        finite_B[strip] = finite


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: NumberFormat) -> Tensor:
        return _rows_of(x, fmt)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _FakeWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w_NK: Tensor, kind: Literal["fp8", "fp4"]) -> Tensor:
        ctx.set_materialize_grads(False)  # an expert that nobody was routed to has no gradient, not one of zeros
        usable = w_NK.dtype == torch.float32 and w_NK.device.type == "cpu" and w_NK.ndim == 2 and w_NK.numel() > 0
        if kind == "fp4" and usable:
            return _rows_of(w_NK, E2M1_E8M0_32)
        if kind != "fp8" or not usable:
            # Names what is wrong, where something is.
            return quantize_weight(w_NK, kind).expand(w_NK.dtype)
        strips, out_NK = -(-w_NK.shape[0] // TILE), torch.empty(w_NK.shape)
        finite_B = np.empty(strips, np.bool_)
        _quantise_tiles(fp32(w_NK), strips, out_NK.numpy(), finite_B, tasks=strips)
        if not finite_B.all():
            codec.check_finite(w_NK.detach(), E4M3_E8M0_32)
        return out_NK

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, None]:
        return grad_outputs[0], None


def _rows_of(x: Tensor, fmt: NumberFormat) -> Tensor:
    if fmt not in _RULE or x.dtype != torch.float32 or x.device.type != "cpu" or x.ndim == 0:
        return codec.dequantize(*codec.quantize(x, fmt), fmt, x.dtype)
    fmt.code_bytes(x.shape[-1])  # refuses a width that the format does not hold
    x_RK = x.detach().reshape(-1, x.shape[-1])
    out_RK, blocks = torch.empty(x_RK.shape), blocks_of(x_RK.shape[0])
    finite_B = np.empty(blocks, np.bool_)
    _quantise_rows(fp32(x_RK), _RULE[fmt], fmt.group, blocks, out_RK.numpy(), finite_B, tasks=blocks)
    if not finite_B.all():
        codec.check_finite(x.detach(), fmt)
    return out_RK.view(x.shape)


_apply_values: Any = _FakeQuantize.apply
_apply_weight: Any = _FakeWeight.apply


def fake_quantize(x: Tensor, fmt: NumberFormat) -> Tensor:
    """As `formats.codec.fake_quantize`, bit for bit, errors included."""
    values: Tensor = _apply_values(x, fmt)
    return values


def fake_quantize_weight(w_NK: Tensor, kind: Literal["fp8", "fp4"]) -> Tensor:
    """`quantize_weight(w, kind).expand()` in the dtype of w [N, K], bit for bit, with a straight-through gradient.

    Raises:
        FormatError: as `quantize_weight`.
    """
    weight: Tensor = _apply_weight(w_NK, kind)
    return weight
