"""Numba twins of `rorqual.formats.codec`: the same signatures, the same bits, few passes over the values.

The three scaled formats have kernels; other formats, other devices and fp16 go to the plain functions. Kernels are
serial (they run inside larger steps, and a parallel region costs more than a decode step's rows) and let go of the GIL.
No fast-math: a reassociated product or a reciprocal in place of a division would change codes.

Kernel arrays: bits_RW the values' bit patterns (uint32, or uint16 for bf16), codes_RB, scales_RG, out_RW;
R rows, W width, B code bytes, G groups, E the elements (or their codes) of one group. Groups are passed as slices: an
index that counts from 0 spares the loops Numba's test for negative indices, which would keep them from vectorising.
`shift` moves a bit pattern to its fp32 place: 16 for bf16, else 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rorqual.formats import codec
from rorqual.formats.codec import Packed
from rorqual.formats.fp4 import E2M1_BY_BYTE
from rorqual.formats.fp8 import E4M3_BY_BYTE, E8M0_BY_BYTE
from rorqual.formats.spec import E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32, NumberFormat

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Array = NDArray[Any]

# The numpy error model drops the zero-division test, which would keep loops from vectorising.
_jit = cast(Callable[[_Function], _Function], numba.njit(cache=True, nogil=True, error_model="numpy"))

_U32 = np.uint32
_F32 = np.float32

_MAGNITUDE = _U32(0x7FFFFFFF)
_INFINITY = _U32(0x7F800000)
_MANTISSA = _U32(0x7FFFFF)
_ONE = _U32(1)

_FLOOR_E2M1_E4M3 = _F32(E2M1_E4M3_16.amax_floor)
_FLOOR_E2M1_E8M0 = _F32(E2M1_E8M0_32.amax_floor)
_FLOOR_E4M3_E8M0 = _F32(E4M3_E8M0_32.amax_floor)
_E2M1_MAX = _F32(E2M1_E8M0_32.value_max)
_E4M3_MAX = _F32(E4M3_E8M0_32.value_max)
_E2M1_RECIPROCAL = _F32(1 / E2M1_E8M0_32.value_max)
_E4M3_RECIPROCAL = _F32(1 / E4M3_E8M0_32.value_max)


@_jit
def _float(bits: Any) -> Any:
    return _U32(bits).view(np.float32)


@_jit
def _bits(value: Any) -> Any:
    return _F32(value).view(np.uint32)


@_jit
def _e2m1_code(bits: Any, scale: Any) -> Any:
    """Code of one element over its scale. Below 1.0, where steps are 0.5, adding 2^22 rounds at that step."""
    scaled = min(_float(bits & _MAGNITUDE) / scale, _E2M1_MAX)
    u = _bits(scaled)
    small = _U32(_bits(scaled + _F32(2.0**22)) & _U32(3))
    # Nearest, ties to even, at bit 22; 126 << 1 takes the exponent's bias down to E2M1's.
    large = _U32(_U32(_U32(u + _U32(0x1FFFFF)) + _U32(_U32(u >> _U32(22)) & _ONE)) >> _U32(22)) - _U32(126 << 1)
    code = small if u < _U32(0x3F800000) else large
    return _U32(code) | _U32(_U32(bits >> _U32(28)) & _U32(8))


@_jit
def _e4m3_code(bits: Any, scale: Any) -> Any:
    """As `_e2m1_code`, for E4M3: below 2^-6 steps are 2^-9, and adding 2^14 rounds at that step."""
    scaled = min(_float(bits & _MAGNITUDE) / scale, _E4M3_MAX)
    u = _bits(scaled)
    small = _U32(_bits(scaled + _F32(2.0**14)) & _U32(15))
    large = _U32(_U32(_U32(u + _U32(0x7FFFF)) + _U32(_U32(u >> _U32(20)) & _ONE)) >> _U32(20)) - _U32(120 << 3)
    code = small if u < _U32(0x3C800000) else large
    return _U32(code) | _U32(_U32(bits >> _U32(24)) & _U32(128))


@_jit
def _e8m0_byte(value: Any) -> Any:
    """Byte of the least power of two that is not below a positive normal value."""
    u = _bits(value)
    byte = _U32(u >> _U32(23))
    return byte + _ONE if u & _MANTISSA else byte


@_jit
def _largest(bits_E: _Array, shift: Any) -> Any:
    """Bits of the largest magnitude of a group. As integers, magnitudes order as floats do, Inf and NaN on top."""
    top = _U32(0)
    for j in range(bits_E.shape[0]):
        top = max(top, _U32(_U32(_U32(bits_E[j]) << shift) & _MAGNITUDE))
    return top


@_jit
def _pack_e2m1(bits_E: _Array, shift: Any, scale: Any, codes_E: _Array) -> None:
    for j in range(codes_E.shape[0]):
        low = _e2m1_code(_U32(_U32(bits_E[2 * j]) << shift), scale)
        high = _e2m1_code(_U32(_U32(bits_E[2 * j + 1]) << shift), scale)
        codes_E[j] = low | _U32(high << _U32(4))


@_jit
def quantize_e2m1_e4m3(bits_RW: _Array, shift: Any, group: int, codes_RB: _Array, scales_RG: _Array) -> bool:
    """False at the first group that holds a NaN or an Inf."""
    half = group // 2
    for r in range(scales_RG.shape[0]):
        for g in range(scales_RG.shape[1]):
            bits_E = bits_RW[r, g * group : (g + 1) * group]
            top = _largest(bits_E, shift)
            if top >= _INFINITY:
                return False
            byte = _e4m3_code(_bits(max(_float(top), _FLOOR_E2M1_E4M3)), _E2M1_MAX)
            scales_RG[r, g] = byte
            # The byte is at least 1, and its value by the exponent rule of E4M3 is exact in fp32.
            scale = _F32(byte) * _F32(2.0**-9)
            if byte >= _U32(8):
                scale = _float(_U32(byte << _U32(20)) + _U32(120 << 23))
            _pack_e2m1(bits_E, shift, scale, codes_RB[r, g * half : (g + 1) * half])
    return True


@_jit
def quantize_e2m1_e8m0(bits_RW: _Array, shift: Any, group: int, codes_RB: _Array, scales_RG: _Array) -> bool:
    """As `quantize_e2m1_e4m3`."""
    half = group // 2
    for r in range(scales_RG.shape[0]):
        for g in range(scales_RG.shape[1]):
            bits_E = bits_RW[r, g * group : (g + 1) * group]
            top = _largest(bits_E, shift)
            if top >= _INFINITY:
                return False
            byte = _e8m0_byte(max(_float(top), _FLOOR_E2M1_E8M0) * _E2M1_RECIPROCAL)
            scales_RG[r, g] = byte
            scale = _float(_U32(byte) << _U32(23))
            _pack_e2m1(bits_E, shift, scale, codes_RB[r, g * half : (g + 1) * half])
    return True


@_jit
def quantize_e4m3_e8m0(bits_RW: _Array, shift: Any, group: int, codes_RB: _Array, scales_RG: _Array) -> bool:
    """As `quantize_e2m1_e4m3`."""
    for r in range(scales_RG.shape[0]):
        for g in range(scales_RG.shape[1]):
            bits_E = bits_RW[r, g * group : (g + 1) * group]
            top = _largest(bits_E, shift)
            if top >= _INFINITY:
                return False
            byte = _e8m0_byte(max(_float(top), _FLOOR_E4M3_E8M0) * _E4M3_RECIPROCAL)
            scales_RG[r, g] = byte
            scale = _float(_U32(byte) << _U32(23))
            codes_E = codes_RB[r, g * group : (g + 1) * group]
            for j in range(group):
                codes_E[j] = _e4m3_code(_U32(_U32(bits_E[j]) << shift), scale)
    return True


@_jit
def _dequantize_e2m1(
    codes_RB: _Array, scales_RG: _Array, group: int, pairs: _Array, scale_table: _Array, out_RW: _Array
) -> None:
    half = group // 2
    for r in range(scales_RG.shape[0]):
        for g in range(scales_RG.shape[1]):
            scale = scale_table[scales_RG[r, g]]
            codes_E = codes_RB[r, g * half : (g + 1) * half]
            out_E = out_RW[r, g * group : (g + 1) * group]
            for j in range(half):
                byte = codes_E[j]
                out_E[2 * j] = pairs[byte, 0] * scale
                out_E[2 * j + 1] = pairs[byte, 1] * scale


@_jit
def _dequantize_e4m3(
    codes_RB: _Array, scales_RG: _Array, group: int, values: _Array, scale_table: _Array, out_RW: _Array
) -> None:
    for r in range(scales_RG.shape[0]):
        for g in range(scales_RG.shape[1]):
            scale = scale_table[scales_RG[r, g]]
            codes_E = codes_RB[r, g * group : (g + 1) * group]
            out_E = out_RW[r, g * group : (g + 1) * group]
            for j in range(group):
                out_E[j] = values[codes_E[j]] * scale


_QUANTIZE: Mapping[NumberFormat, Callable[..., bool]] = MappingProxyType(
    {
        E2M1_E4M3_16: quantize_e2m1_e4m3,
        E2M1_E8M0_32: quantize_e2m1_e8m0,
        E4M3_E8M0_32: quantize_e4m3_e8m0,
    }
)
_BIT_PATTERNS: Mapping[torch.dtype, tuple[torch.dtype, np.uint32]] = MappingProxyType(
    {torch.float32: (torch.uint32, _U32(0)), torch.bfloat16: (torch.uint16, _U32(16))}
)


def quantize_fast(x: Tensor, fmt: NumberFormat) -> Packed:
    """As `codec.quantize`, bit for bit, errors included."""
    if fmt not in _QUANTIZE or x.dtype not in _BIT_PATTERNS or x.device.type != "cpu" or x.ndim == 0:
        return codec.quantize(x, fmt)
    *leading, width = x.shape
    codes = torch.empty((*leading, fmt.code_bytes(width)), dtype=torch.uint8)
    scales = torch.empty((*leading, fmt.scale_bytes(width)), dtype=torch.uint8)
    integer, shift = _BIT_PATTERNS[x.dtype]
    bits = x.detach().contiguous().view(integer)
    if not _QUANTIZE[fmt](_rows(bits), shift, fmt.group, _rows(codes), _rows(scales)):
        codec.check_finite(x.detach(), fmt)
    return Packed(codes, scales)


def dequantize_fast(codes: Tensor, scales: Tensor, fmt: NumberFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """As `codec.dequantize`, bit for bit, errors included."""
    if fmt not in _QUANTIZE or codes.device.type != "cpu":
        return codec.dequantize(codes, scales, fmt, dtype)
    out = torch.empty((*codes.shape[:-1], codec.check_packed(codes, scales, fmt)), dtype=torch.float32)
    arrays = _rows(codes.contiguous()), _rows(scales.contiguous())
    scale_table = E4M3_BY_BYTE.numpy() if fmt.scale == "e4m3" else E8M0_BY_BYTE.numpy()
    if fmt.value == "e2m1":
        _dequantize_e2m1(*arrays, fmt.group, E2M1_BY_BYTE.numpy(), scale_table, _rows(out))
    else:
        _dequantize_e4m3(*arrays, fmt.group, E4M3_BY_BYTE.numpy(), scale_table, _rows(out))
    return out.to(dtype)


def _rows(tensor: Tensor) -> _Array:
    """A contiguous tensor as a two-dimensional array over the same memory; also right for no rows at all."""
    width = tensor.shape[-1]
    array: _Array = tensor.view(tensor.numel() // width, width).numpy()
    return array
