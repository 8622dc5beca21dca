"""Numba twin of `rorqual.ops.reference.linear`: products with packed weights, each weight byte read once.

Every output of the row kernels is one sum in one order, whatever else is in the call (DESIGN 12): 16 lanes run along K
from the left, two vectors a 32-block, then the lanes are halved. Decode and verification rows go through them; larger
row counts expand tiles of the weight into a small scratch for torch's GEMM. Two row kernels:

    vector  (AVX512; the paths `vnni` and `vector`) eight weight rows at a time, decoded in registers for up to three
            rows of x; more than six rows of x share a piece of K decoded into the first-level cache
    plain   (any CPU) one weight row at a time, decoded into a buffer; lanes as the compiler chose them, once

Several weights of one shape (experts) are one call. They reach the kernels by address, since they are separate,
memory-mapped and possibly unaligned tensors.

Lane order: element 2i of a 32-block is lane i of its first vector, element 2i + 1 lane i of its second, because nibbles
and bytes come apart that way without shuffles. `pack_rows` brings x into it. fp32 weights keep the plain order.

T rows of x, N outputs, K inputs (Kp: padded to whole blocks), J weights, P products of a row of x and a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from rorqual.formats.codec import check_finite
from rorqual.formats.fp4 import E2M1_BY_BYTE
from rorqual.formats.fp8 import E8M0_BY_BYTE
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import TILE, DenseWeight, Fp8Weight, Weight
from rorqual.ops.cpu import Path, best_path, features
from rorqual.ops.fast.kernel import Kernel, kernel, workers
from rorqual.ops.fast.vectors import (
    I8,
    I32,
    I64,
    LANES,
    VECTOR_F32,
    VECTOR_I8,
    VECTOR_I32,
    broadcast,
    call,
    const,
    emit_fma,
    pick,
)

Array = NDArray[Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])

# numba's own modules are typed too loosely to be called from typed code.
_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic
_cgutils: Any = cgutils
_njit: Any = numba.njit
part: Callable[[_Function], _Function] = _njit(nogil=True, error_model="numpy")
"""Decorates what kernels call; it becomes part of their machine code."""
reassociated: Callable[[_Function], _Function] = _njit(
    nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)

SCRATCH_BYTES = 8 << 20
"""Expanded weight held at once for a GEMM."""
GEMM_ROWS = 64
"""From this many rows on, a GEMM over expanded tiles beats the row kernel."""
PART_PRODUCTS = 1 << 17
"""Multiplications worth a thread of their own."""


_F32, _U32 = np.float32, np.uint32
_E8M0 = E8M0_BY_BYTE.numpy()
_VALUE_MAX = _F32(E4M3_E8M0_32.value_max)
_RECIPROCAL = _F32(1 / E4M3_E8M0_32.value_max)
_AMAX_FLOOR = _F32(E4M3_E8M0_32.amax_floor)

_ROWS = 8
"""Weight rows of a tile."""
_FUSED = 6
"""Rows of x up to which decoding again for every three beats decoding once into a buffer."""
_CHUNK = 32
"""Rows of x whose lanes are held at once."""
_PIECE = 16
"""Blocks decoded at once into the buffer: 8 x 512 fp32 = 16 KB."""
_BLOCK_BYTES = 4 * TILE
_LANE_BYTES = 4 * LANES

_VECTOR_F16 = ir.VectorType(ir.HalfType(), LANES)
_VECTOR_I16 = ir.VectorType(ir.IntType(16), LANES)


def _at(b: Any, address: Any, index: Any, step: int = 1) -> Any:
    """`b` is LLVM's code builder, here and below; addresses are 64-bit integers."""
    return b.add(address, b.mul(const(I64, index) if isinstance(index, int) else index, const(I64, step)))


def _load(b: Any, address: Any, kind: Any) -> Any:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=1)


def _store(b: Any, value: Any, address: Any) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)


def _prefetch(b: Any, address: Any) -> None:
    # A read (0), into the second-level cache (2), of data (1).
    flags = (const(I32, flag) for flag in (0, 2, 1))
    call(b, "llvm.prefetch", ir.VoidType(), b.inttoptr(address, I8.as_pointer()), *flags)


def _load_scale(b: Any, address: Any, factor: float) -> Any:
    """The E8M0 byte at an address times a factor, in every lane. By table: a broadcasting load is cheapest."""
    name = f"rorqual.e8m0.{factor:g}"
    if name not in b.module.globals:
        values = [min(2.0 ** (byte - 127) * factor, 2.0**127) for byte in range(256)]
        table = ir.GlobalVariable(b.module, ir.ArrayType(ir.FloatType(), 256), name)
        table.linkage, table.global_constant = "internal", True
        table.initializer = ir.Constant(table.type.pointee, [const(ir.FloatType(), value) for value in values])
    table = b.ptrtoint(b.module.globals[name], I64)
    scale = _load(b, _at(b, table, b.zext(_load(b, address, I8), I64), 4), ir.FloatType())
    return broadcast(b, scale, VECTOR_F32)


def _decode_fp4(b: Any, address: Any, scale: Any) -> tuple[Any, Any]:
    # The 16 values times the scale are the table; a lookup reads the low four bits of its index only.
    table = b.fmul(ir.Constant(VECTOR_F32, E2M1_BY_BYTE[:16, 0].tolist()), scale)
    even = b.zext(_load(b, address, VECTOR_I8), VECTOR_I32)
    odd = b.lshr(even, const(VECTOR_I32, 4))
    first, second = (call(b, "llvm.x86.avx512.permvar.sf.512", VECTOR_F32, table, codes) for codes in (even, odd))
    return first, second


def _decode_fp8(b: Any, address: Any, scale: Any) -> tuple[Any, Any]:
    # An E4M3 byte with its sign moved up by one is the top of an fp16 number 2^-8 times as large, subnormals included;
    # the scale carries the 2^8. NaN codes would read as +-480.
    pairs = _load(b, address, _VECTOR_I16)
    even = b.ashr(b.shl(pairs, const(_VECTOR_I16, 8)), const(_VECTOR_I16, 1))
    odd = b.ashr(pairs, const(_VECTOR_I16, 1))
    halves = (b.bitcast(b.and_(half, const(_VECTOR_I16, 0xBF80)), _VECTOR_F16) for half in (even, odd))
    first, second = (b.fmul(b.fpext(half, VECTOR_F32), scale) for half in halves)
    return first, second


def _decode_bf16(b: Any, address: Any, scale: Any) -> tuple[Any, Any]:
    pairs = _load(b, address, VECTOR_I32)
    even, odd = b.shl(pairs, const(VECTOR_I32, 16)), b.and_(pairs, const(VECTOR_I32, 0xFFFF0000))
    return b.bitcast(even, VECTOR_F32), b.bitcast(odd, VECTOR_F32)


def _decode_fp32(b: Any, address: Any, scale: Any = None) -> tuple[Any, Any]:
    return _load(b, address, VECTOR_F32), _load(b, _at(b, address, _LANE_BYTES), VECTOR_F32)


class Kind(NamedTuple):
    """How a weight's bytes are read."""

    marker: Array
    """Empty; the vector kernels are compiled once for each dtype of it."""
    code: int
    unit: int
    """Bytes of 32 elements."""
    scale_rows: int
    """Weight rows under one row of scale bytes; 0 without scales."""
    decode: Callable[[Any, Any, Any], tuple[Any, Any]]
    """Emits 32 elements, from an address and a scale, as two vectors."""
    factor: float = 0.0
    """Of the scale table."""

    @property
    def dtype(self) -> str:
        return self.marker.dtype.name

    def scale(self, b: Any, s: Any, block: Any) -> Any:
        """Emits a block's scale; None without scales."""
        return _load_scale(b, _at(b, s, block), self.factor) if self.scale_rows else None


FP4 = Kind(np.empty(0, np.int8), 0, 16, 1, _decode_fp4, 1.0)
FP8 = Kind(np.empty(0, np.uint8), 1, 32, TILE, _decode_fp8, 256.0)
BF16 = Kind(np.empty(0, np.uint16), 2, 64, 0, _decode_bf16)
FP32 = Kind(np.empty(0, np.float32), 3, 128, 0, _decode_fp32)
_KINDS: Mapping[str, Kind] = MappingProxyType({kind.dtype: kind for kind in (FP4, FP8, BF16, FP32)})
_FP32_MARKER = FP32.marker
_FP4_CODE, _FP8_CODE, _BF16_CODE, _FP32_CODE = (kind.code for kind in _KINDS.values())


@_intrinsic
def _multiply_tile(
    context: Any, marker: Any, lanes: Any, w: Any, w_step: Any, s: Any, s_step: Any, x: Any, blocks: Any, ahead: Any
) -> Any:
    """Add `blocks` blocks of eight weight rows times len(x) rows of x to lanes, fp32 [len(x), 8, 16].

    Addresses (`x` a tuple of them) and byte steps between weight rows; FP8 rows share the scales at `s`. Meanwhile the
    eight weight rows that start at `ahead` are prefetched.
    """
    kind, rows = _KINDS[str(marker.dtype)], len(x)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _, lanes, w, w_step, s, s_step, x, blocks, ahead = args
        w_N = [_at(b, w, b.mul(w_step, const(I64, n))) for n in range(_ROWS)]
        s_N = [_at(b, s, b.mul(s_step, const(I64, n))) for n in range(_ROWS)]
        slots = [_at(b, lanes, i, _LANE_BYTES) for i in range(rows * _ROWS)]
        # Stack slots in name only: LLVM keeps them in registers across the loop.
        sums = [_cgutils.alloca_once_value(b, _load(b, slot, VECTOR_F32)) for slot in slots]
        with _cgutils.for_range(b, blocks) as loop:
            tile_bytes = _ROWS * kind.unit
            for line in range(0, 0 if kind is FP32 else tile_bytes, _LANE_BYTES):
                _prefetch(b, _at(b, _at(b, ahead, loop.index, tile_bytes), line))
            x_R = [
                _decode_fp32(b, _at(b, address, loop.index, _BLOCK_BYTES)) for address in _cgutils.unpack_tuple(b, x)
            ]
            scale = kind.scale(b, s, loop.index)
            for n in range(_ROWS):
                if kind is FP4:
                    scale = kind.scale(b, s_N[n], loop.index)
                w_halves = kind.decode(b, _at(b, w_N[n], loop.index, kind.unit), scale)
                for r, x_halves in enumerate(x_R):
                    total = b.load(sums[r * _ROWS + n])
                    for w_half, x_half in zip(w_halves, x_halves, strict=True):
                        total = emit_fma(b, w_half, x_half, total)
                    b.store(total, sums[r * _ROWS + n])
        for total, slot in zip(sums, slots, strict=True):
            _store(b, b.load(total), slot)
        return context.get_dummy_value()

    return types.void(marker, *[types.int64] * 5, x, types.int64, types.int64), emit


@_intrinsic
def _expand_blocks(context: Any, marker: Any, out: Any, w: Any, s: Any, blocks: Any) -> Any:
    """Decode blocks of one weight row to fp32 in lane order. Addresses."""
    kind = _KINDS[str(marker.dtype)]

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _, out, w, s, blocks = args
        with _cgutils.for_range(b, blocks) as loop:
            target = _at(b, out, loop.index, _BLOCK_BYTES)
            scale = kind.scale(b, s, loop.index)
            for half, values in enumerate(kind.decode(b, _at(b, w, loop.index, kind.unit), scale)):
                _store(b, values, _at(b, target, half, _LANE_BYTES))
        return context.get_dummy_value()

    return types.void(marker, *[types.int64] * 4), emit


@_intrinsic
def _sum_lanes(context: Any, address: Any) -> Any:
    """Sum of 16 fp32 lanes, by halving."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        lanes = _load(b, args[0], VECTOR_F32)
        for half in (8, 4, 2, 1):
            lanes = b.fadd(lanes, b.shuffle_vector(lanes, lanes, pick([(i + half) % LANES for i in range(LANES)])))
        return b.extract_element(lanes, const(I32, 0))

    return types.float32(types.int64), emit


@_intrinsic
def _copy_bytes(context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy between two addresses."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        pointers = (b.inttoptr(address, I8.as_pointer()) for address in args[:2])
        _cgutils.raw_memcpy(b, *pointers, args[2], 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


@part
def _address(array: Any) -> Any:
    # Signed: numba adds uint64 to int64 as floats.
    return np.int64(array.ctypes.data)


@part
def _scale_offset(scale_rows: Any, row: Any, k: Any) -> Any:
    """Of the scale bytes of a weight row."""
    return row // scale_rows * ((k + TILE - 1) // TILE) if scale_rows else 0


@part
def _multiply_blocks(
    marker: Any, lanes: Any, w: Any, w_step: Any, s: Any, s_step: Any, x_P: Any, block: Any, blocks: Any, ahead: Any
) -> None:
    """`_multiply_tile` for any number of rows of x, from a block of x on."""
    offset = block * _BLOCK_BYTES
    for p in range(0, x_P.shape[0], 3):
        left, target, x = x_P.shape[0] - p, lanes + p * _ROWS * _LANE_BYTES, x_P[p] + offset
        if left == 1:
            _multiply_tile(marker, target, w, w_step, s, s_step, (x,), blocks, ahead)
        elif left == 2:
            _multiply_tile(marker, target, w, w_step, s, s_step, (x, x_P[p + 1] + offset), blocks, ahead)
        else:
            triple = (x, x_P[p + 1] + offset, x_P[p + 2] + offset)
            _multiply_tile(marker, target, w, w_step, s, s_step, triple, blocks, ahead)


@part
def _multiply_eight(
    marker: Any, unit: Any, lanes: Any, w: Any, w_step: Any, s: Any, s_step: Any, blocks: Any, x_P: Any, wide: Any
) -> None:
    """All of K: lanes [P, 8, 16] of eight weight rows times rows of x. `wide` is room for a decoded piece."""
    if x_P.shape[0] <= _FUSED:
        _multiply_blocks(marker, lanes, w, w_step, s, s_step, x_P, 0, blocks, w + _ROWS * w_step)
        return
    for block in range(0, blocks, _PIECE):
        piece = min(_PIECE, blocks - block)
        for n in range(_ROWS):
            row, scales = w + n * w_step + block * unit, s + n * s_step + block
            _expand_blocks(marker, wide + n * _PIECE * _BLOCK_BYTES, row, scales, piece)
        _multiply_blocks(_FP32_MARKER, lanes, wide, _PIECE * _BLOCK_BYTES, 0, 0, x_P, block, piece, 0)


@part
def _share_vector(
    marker: Any, form: Any, w: Any, s: Any, n: Any, k: Any, n0: Any, n1: Any, x_P: Any, y_PN: Any, lanes: Any, wide: Any
) -> None:
    """Output columns [n0, n1) of one weight times rows of x; n0 is a multiple of eight. `lanes` and `wide` are room."""
    _, unit, scale_rows = form
    blocks, row_bytes, scale_bytes = (k + TILE - 1) // TILE, k * unit // TILE, _scale_offset(scale_rows, 1, k)
    for first in range(n0, n1, _ROWS):
        rows, step = min(_ROWS, n - first), row_bytes
        codes, scales = w + first * row_bytes, s + _scale_offset(scale_rows, first, k)
        # Nothing past the weight may be read: ragged edges are completed with zeros in a buffer.
        ragged = rows < _ROWS or blocks * unit > row_bytes
        spare = np.zeros((_ROWS if ragged else 0) * (blocks * unit + scale_bytes), np.uint8)
        if ragged:
            step = blocks * unit
            for i in range(rows):
                _copy_bytes(_address(spare) + i * step, codes + i * row_bytes, row_bytes)
            codes = _address(spare)
            if scale_bytes:
                _copy_bytes(codes + _ROWS * step, scales, rows * scale_bytes)
                scales = codes + _ROWS * step
        for p in range(0, x_P.shape[0], _CHUNK):
            x = x_P[p : p + _CHUNK]
            for i in range(x.shape[0] * _ROWS * LANES):
                lanes[i] = 0
            _multiply_eight(marker, unit, _address(lanes), codes, step, scales, scale_bytes, blocks, x, _address(wide))
            for i in range(x.shape[0] * _ROWS):
                if i % _ROWS < rows:
                    y_PN[p + i // _ROWS, first + i % _ROWS] = _sum_lanes(_address(lanes) + i * _LANE_BYTES)


def _multiply_vector(
    marker: Any,
    form: Any,
    w_J: Any,
    s_J: Any,
    n: Any,
    k: Any,
    first_J: Any,
    last_J: Any,
    row_P: Any,
    x_TK: Any,
    y_PN: Any,
    parts: Any,
) -> None:
    """Each part has its share of the output columns, for every weight."""
    eights = (n + _ROWS - 1) // _ROWS
    for share in prange(parts):
        n0, n1 = eights * share // parts * _ROWS, min(n, eights * (share + 1) // parts * _ROWS)
        x_P = _address(x_TK) + row_P * (x_TK.shape[1] * 4)
        lanes, wide = np.empty(_CHUNK * _ROWS * LANES, np.float32), np.empty(_ROWS * _PIECE * TILE, np.float32)
        for j in range(w_J.shape[0]):
            x, y = x_P[first_J[j] : last_J[j]], y_PN[first_J[j] : last_J[j]]
            _share_vector(marker, form, w_J[j], s_J[j], n, k, n0, n1, x, y, lanes, wide)


@part
def _e2m1_value(code: Any) -> Any:
    """By arithmetic, which compilers turn into vectors; a table they do not."""
    magnitude = _U32(code) & _U32(7)
    bits = (magnitude << _U32(22)) + _U32(126 << 23)
    bits = _U32(126 << 23) if magnitude == _U32(1) else bits
    bits = _U32(0) if magnitude == _U32(0) else bits
    return _U32(bits | ((_U32(code) & _U32(8)) << _U32(28))).view(np.float32)


@part
def _e4m3_value(code: Any) -> Any:
    magnitude = _U32(code) & _U32(127)
    normal = _U32((magnitude << _U32(20)) + _U32(120 << 23)).view(np.float32)
    value = normal if magnitude >= _U32(8) else _F32(np.int32(magnitude)) * _F32(2.0**-9)
    return -value if _U32(code) >= _U32(128) else value


@part
def _decode_row(code: Any, unit: Any, w: Any, s: Any, k: Any, out_K: Any, raw_B: Any) -> None:
    """One weight row to fp32 in lane order, in plain loops. `raw_B` is room for its bytes, zeros past them."""
    _copy_bytes(_address(raw_B), w, k * unit // TILE)
    scales = np.empty(out_K.shape[0] // TILE, np.uint8)
    if code <= _FP8_CODE:
        _copy_bytes(_address(scales), s, scales.shape[0])
    bits_K, raw_H = out_K.view(np.uint32), raw_B.view(np.uint16)
    for block in range(scales.shape[0]):
        first, second, scale = block * TILE, block * TILE + LANES, _E8M0[scales[block]]
        if code == _FP4_CODE:
            for i in range(LANES):
                byte = raw_B[block * LANES + i]
                out_K[first + i] = _e2m1_value(byte) * scale
                out_K[second + i] = _e2m1_value(byte >> 4) * scale
        elif code == _FP8_CODE:
            for i in range(LANES):
                out_K[first + i] = _e4m3_value(raw_B[first + 2 * i]) * scale
                out_K[second + i] = _e4m3_value(raw_B[first + 2 * i + 1]) * scale
        elif code == _BF16_CODE:
            for i in range(LANES):
                bits_K[first + i] = _U32(raw_H[first + 2 * i]) << _U32(16)
                bits_K[second + i] = _U32(raw_H[first + 2 * i + 1]) << _U32(16)
    if code == _FP32_CODE:
        _copy_bytes(_address(out_K), _address(raw_B), out_K.shape[0] * 4)


@reassociated
def dot(a_K: Any, b_K: Any) -> Any:
    """Sum of products in an order that the compiler chose once: it depends on the length alone."""
    total = _F32(0)
    for i in range(a_K.shape[0]):
        total += a_K[i] * b_K[i]
    return total


def _multiply_plain(
    marker: Any,
    form: Any,
    w_J: Any,
    s_J: Any,
    n: Any,
    k: Any,
    first_J: Any,
    last_J: Any,
    row_P: Any,
    x_TK: Any,
    y_PN: Any,
    parts: Any,
) -> None:
    """As `_multiply_vector`."""
    code, unit, scale_rows = form
    row_bytes = k * unit // TILE
    for share in prange(parts):
        w_K, raw_B = np.empty(x_TK.shape[1], np.float32), np.zeros(x_TK.shape[1] // TILE * unit, np.uint8)
        for j in range(w_J.shape[0]):
            for row in range(n * share // parts, n * (share + 1) // parts):
                scales = s_J[j] + _scale_offset(scale_rows, row, k)
                _decode_row(code, unit, w_J[j] + row * row_bytes, scales, k, w_K, raw_B)
                for p in range(first_J[j], last_J[j]):
                    y_PN[p, row] = dot(w_K, x_TK[row_P[p]])


def _expand_vector(marker: Any, form: Any, w: Any, s: Any, k: Any, row0: Any, out_NK: Any) -> None:
    """Weight rows from row0 on, to fp32 in lane order."""
    _, unit, scale_rows = form
    blocks, row_bytes = out_NK.shape[1] // TILE, k * unit // TILE
    for i in prange(out_NK.shape[0]):
        row = w + (row0 + i) * row_bytes
        spare = np.zeros(blocks * unit if blocks * unit > row_bytes else 0, np.uint8)
        if spare.size:
            _copy_bytes(_address(spare), row, row_bytes)
            row = _address(spare)
        _expand_blocks(marker, _address(out_NK[i]), row, s + _scale_offset(scale_rows, row0 + i, k), blocks)


def _expand_plain(marker: Any, form: Any, w: Any, s: Any, k: Any, row0: Any, out_NK: Any) -> None:
    """As `_expand_vector`."""
    code, unit, scale_rows = form
    for i in prange(out_NK.shape[0]):
        raw_B = np.zeros(out_NK.shape[1] // TILE * unit, np.uint8)
        row, scales = w + (row0 + i) * (k * unit // TILE), s + _scale_offset(scale_rows, row0 + i, k)
        _decode_row(code, unit, row, scales, k, out_NK[i], raw_B)


@part
def fake_e4m3(value: Any, scale: Any, inverse: Any) -> Any:
    """The E4M3 value nearest to value / scale, ties to even, times the scale: a power of two, its inverse given."""
    magnitude = min(abs(value) * inverse, _VALUE_MAX)
    u = _F32(magnitude).view(np.uint32)
    rounded = _U32(_U32(u + _U32(0x7FFFF) + _U32(_U32(u >> _U32(20)) & _U32(1))) & _U32(0xFFF00000)).view(np.float32)
    # Below 2^-6 the steps are 2^-9, which is the step of fp32 at 2^14.
    stepped = (magnitude + _F32(2.0**14)) - _F32(2.0**14)
    return math.copysign((stepped if magnitude < _F32(2.0**-6) else rounded) * scale, value)


@part
def pack_row(x_K: Any, paired: Any, quantise: Any, out_K: Any) -> Any:
    """One row in lane order; False, its values undefined, when it is to be quantised and holds a NaN or an Inf.

    Args:
        x_K: fp32.
        paired: even elements of a block before odd ones.
        quantise: to E4M3 / E8M0 per 32 and back (SPEC 2).
        out_K: fp32 [Kp], zeros past K.
    """
    bits_K, finite = x_K.view(np.uint32), True
    for first in range(0, x_K.shape[0], TILE):
        width, scale, inverse = min(TILE, x_K.shape[0] - first), _F32(1), _F32(1)
        if quantise:
            top = _U32(0)
            for i in range(first, first + width):
                top = max(top, _U32(bits_K[i] & _U32(0x7FFFFFFF)))
            finite = finite and bool(top < _U32(0x7F800000))
            u = _F32(max(_U32(top).view(np.float32), _AMAX_FLOOR) * _RECIPROCAL).view(np.uint32)
            byte = _U32(_U32(u >> _U32(23)) + _U32((u & _U32(0x7FFFFF)) != 0))
            scale = _U32(byte << _U32(23)).view(np.float32)
            inverse = _U32(_U32(_U32(254) - byte) << _U32(23)).view(np.float32)
        for i in range(width):
            value = fake_e4m3(x_K[first + i], scale, inverse) if quantise else x_K[first + i]
            out_K[first + ((i >> 1) + (i & 1) * LANES if paired else i)] = value
    return finite


@kernel("void(float32[:, ::1], boolean, boolean, float32[:, ::1], boolean[::1], int64)", parallel=True)
def _pack(x_TK: Any, paired: Any, quantise: Any, out_TK: Any, finite_T: Any, parts: Any) -> None:
    for share in prange(parts):
        for t in range(x_TK.shape[0] * share // parts, x_TK.shape[0] * (share + 1) // parts):
            finite_T[t] = pack_row(x_TK[t], paired, quantise, out_TK[t])


_WEIGHT = "void({}[::1], UniTuple(int64, 3), "
_PRODUCTS = "int64[::1], int64[::1], int64[::1], float32[:, ::1], float32[:, ::1], int64)"
_MULTIPLY = _WEIGHT + "int64[::1], int64[::1], int64, int64, " + _PRODUCTS
_EXPAND = _WEIGHT + "int64, int64, int64, int64, float32[:, ::1])"


def _kernels(signature: str, vector: Callable[..., None], plain: Callable[..., None]) -> Mapping[str, Kernel]:
    """By dtype of the marker; "plain" reads any kind, and takes the marker of FP4."""
    kernels = {dtype: kernel(signature.format(dtype), parallel=True)(vector) for dtype in _KINDS}
    return MappingProxyType(kernels | {"plain": kernel(signature.format(FP4.dtype), parallel=True)(plain)})


MULTIPLY = _kernels(_MULTIPLY, _multiply_vector, _multiply_plain)
EXPAND = _kernels(_EXPAND, _expand_vector, _expand_plain)
KERNELS = (_pack, *MULTIPLY.values(), *EXPAND.values())


def linear(x_TK: Tensor, weight: Weight, short_rows: int, native: bool, *, path: Path | None = None) -> Tensor:
    """As the plain `linear`, without gradients. `path` is one of `rorqual.ops.cpu`; None takes the best.

    Fewer than GEMM_ROWS rows beyond the short ones go through the row kernel with them.
    """
    refuse_gradients(x_TK)
    kind, total = kind_of(weight), x_TK.shape[0]
    short_rows = min(short_rows, total) if total - short_rows >= GEMM_ROWS else total
    x = pack_rows(x_TK, kind, native and kind.scale_rows > 0)
    y_TN = torch.empty(total, weight.shape[0])
    multiply_rows([weight], x, np.arange(short_rows), np.zeros(1, np.int64), np.array([short_rows]), y_TN.numpy(), path)
    if short_rows < total:
        multiply_tiles(weight, torch.from_numpy(x[short_rows:]), y_TN[short_rows:], path)
    return y_TN


def kind_of(weight: Weight) -> Kind:
    """How the kernels read a weight. fp16, which no checkpoint of the release has, is widened to fp32 first."""
    if isinstance(weight, DenseWeight):
        return BF16 if weight.tensor.dtype == torch.bfloat16 else FP32
    return FP8 if isinstance(weight, Fp8Weight) else FP4


def pack_rows(x_TK: Tensor, kind: Kind, quantise: bool) -> Array:
    """x in the lane order of a kind of weight: fp32 [T, Kp], zeros past K.

    Raises:
        FormatError: NaN or Inf in an x that is to be quantised.
    """
    x_TK = x_TK.detach().to(torch.float32).contiguous()
    rows, width = x_TK.shape
    if kind is FP32 and width % TILE == 0:
        return x_TK.numpy()
    packed = (np.zeros if width % TILE else np.empty)((rows, width + -width % TILE), np.float32)
    finite, parts = np.ones(rows, np.bool_), parts_of(rows * width)
    _pack(x_TK.numpy(), kind is not FP32, quantise, packed, finite, parts, tasks=parts)
    if not finite.all():
        check_finite(x_TK, E4M3_E8M0_32)
    return packed


def multiply_rows(
    weights: Sequence[Weight], x_TK: Array, row_P: Array, first_J: Array, last_J: Array, y_PN: Array, path: Path | None
) -> None:
    """y_PN[p] = weights[j] @ x_TK[row_P[p]] for p in [first_J[j], last_J[j]), each sum in the one order.

    Args:
        weights: of one kind and shape.
        x_TK: from `pack_rows`, for this kind.
        row_P: int64.
        first_J: int64.
        last_J: int64.
        y_PN: fp32, written.
        path: as in `linear`.
    """
    kind, (n, k) = kind_of(weights[0]), weights[0].shape
    assert all(kind_of(weight) is kind and weight.shape == (n, k) for weight in weights)
    held = [_tensors(weight) for weight in weights]
    w_J, s_J = (np.array([pair[i].data_ptr() for pair in held]) for i in (0, 1))
    parts = parts_of(len(row_P) * n * k)
    run, form = _choose(MULTIPLY, kind, path)
    run(*form, w_J, s_J, n, k, first_J, last_J, row_P, x_TK, y_PN, parts, tasks=parts)


def multiply_tiles(weight: Weight, x_TK: Tensor, y_TN: Tensor, path: Path | None) -> None:
    """y = x W^T for many rows from `pack_rows`, by GEMM over expanded tiles of the weight, SCRATCH_BYTES at a time."""
    kind, (n, k), (w, s) = kind_of(weight), weight.shape, _tensors(weight)
    if kind is FP32:
        torch.mm(x_TK[:, :k], w.t(), out=y_TN)
        return
    rows = max(_ROWS, min(n, SCRATCH_BYTES // (4 * x_TK.shape[1])))
    scratch = torch.empty(rows, x_TK.shape[1])
    run, form = _choose(EXPAND, kind, path)
    for start in range(0, n, rows):
        tile = scratch[: n - start]
        run(*form, w.data_ptr(), s.data_ptr(), k, start, tile.numpy())
        torch.mm(x_TK, tile.t(), out=y_TN[:, start : start + rows])


def parts_of(products: int) -> int:
    """Into how many parts so many multiplications are cut: one, or one a thread."""
    return workers() if products >= 2 * PART_PRODUCTS else 1


def refuse_gradients(*tensors: Tensor) -> None:
    """Assert that no gradient is asked of a fast op."""
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    assert not recorded, "fast ops have no gradient: use the plain op, or torch.no_grad()"


def _choose(
    kernels: Mapping[str, Kernel], kind: Kind, path: Path | None
) -> tuple[Kernel, tuple[Array, tuple[int, ...]]]:
    """A kernel for this kind, and its first two arguments."""
    form = kind.code, kind.unit, kind.scale_rows
    if (path or best_path()) == "plain" or "avx512f" not in features():
        return kernels["plain"], (FP4.marker, form)
    return kernels[kind.dtype], (kind.marker, form)


def _tensors(weight: Weight) -> tuple[Tensor, Tensor]:
    """Codes and scales, contiguous; a dense weight stands in for its own scales."""
    if isinstance(weight, DenseWeight):
        tensor = weight.tensor.detach().contiguous()
        return (tensor.float() if tensor.dtype == torch.float16 else tensor,) * 2
    codes = weight.codes if isinstance(weight, Fp8Weight) else weight.packed
    return codes.contiguous(), weight.scales.contiguous()
