"""Row kernels: y[p] = W x[row[p]] for packed weights W, each weight byte read once.

    vector  (AVX512) eight weight rows at a time, decoded in registers for up to three rows of x; more than six rows of
            x share a piece of K decoded into the first-level cache
    plain   (any CPU) one weight row at a time, decoded into a buffer; lanes as the compiler chose them, once

Every output is one sum in one order, whatever else is in the call: 16 lanes run along K from the left, two vectors a
32-block, then the lanes are halved. Weights reach the kernels by address: several of one shape (experts) are one call,
and they are separate, memory-mapped and possibly unaligned tensors. x is in the lane order of `row_vectors`.

T rows of x, N outputs, K inputs (Kp: padded to whole blocks), J weights, P products of a row of x and a weight.
`form` is (code, unit, scale rows) of the `Kind`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import numba
import numpy as np
from numba import prange

from rorqual.formats.fp8 import E8M0_BY_BYTE
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import TILE
from rorqual.ops.cpu import features
from rorqual.ops.fast.kernel import Kernel, kernel
from rorqual.ops.fast.row_vectors import (
    BF16,
    BLOCK_BYTES,
    FP4,
    FP8,
    FP32,
    KINDS,
    LANE_BYTES,
    ROWS,
    copy_bytes,
    expand_blocks,
    multiply_tile,
    product_tile,
    sum_lanes,
)
from rorqual.ops.fast.vectors import LANES

_Function = TypeVar("_Function", bound=Callable[..., Any])
_njit: Any = numba.njit
part: Callable[[_Function], _Function] = _njit(nogil=True, error_model="numpy")
"""Decorates what kernels call; it becomes part of their machine code."""
reassociated: Callable[[_Function], _Function] = _njit(
    nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)

_F32, _U32 = np.float32, np.uint32
# Long vectors sum in 32 or more parts, each of few terms. Short ones, or none, sum in parts so long that the last bits
# go, and with them whole codes of a cache: goldens fail.
_SUM = _F32 if "avx2" in features() else np.float64
_E8M0 = E8M0_BY_BYTE.numpy()
_VALUE_MAX = _F32(E4M3_E8M0_32.value_max)
_RECIPROCAL = _F32(1 / E4M3_E8M0_32.value_max)
_AMAX_FLOOR = _F32(E4M3_E8M0_32.amax_floor)
_FP32_MARKER = FP32.marker
_FP4_CODE, _FP8_CODE, _BF16_CODE, _FP32_CODE = (kind.code for kind in (FP4, FP8, BF16, FP32))

_FUSED = 6
"""Rows of x up to which decoding again for every three beats decoding once into a buffer."""
_CHUNK = 32
"""Rows of x whose lanes are held at once."""
_PIECE = 16
"""Blocks decoded at once into the buffer: 8 x 512 fp32 = 16 KB."""
LANES_ROOM, WIDE_ROOM = _CHUNK * ROWS * LANES, ROWS * _PIECE * TILE
"""fp32 values of the room that `share_vector` works in, whatever the rows; `rooms` gives what so many need."""


@part
def address(array: Any) -> Any:
    """Of an array's first element, for functions that take addresses."""
    # Signed: numba adds uint64 to int64 as floats.
    return np.int64(array.ctypes.data)


@part
def rooms(rows: Any) -> Any:
    """What `share_vector` works in, for so many rows of x: lanes, and a decoded piece. No more than there is use for,
    because memory that comes and goes costs page faults."""
    wide = np.empty(WIDE_ROOM if rows > _FUSED else 0, np.float32)
    return np.empty(min(rows, _CHUNK) * ROWS * LANES, np.float32), wide


@part
def _scale_offset(scale_rows: Any, row: Any, k: Any) -> Any:
    """Of the scale bytes of a weight row."""
    return row // scale_rows * ((k + TILE - 1) // TILE) if scale_rows else 0


@part
def columns(n: Any, share: Any, parts: Any) -> Any:
    """[n0, n1): a part's share of output columns, in whole eights."""
    eights = (n + ROWS - 1) // ROWS
    return eights * share // parts * ROWS, min(n, eights * (share + 1) // parts * ROWS)


@part
def _multiply_blocks(
    marker: Any, lanes: Any, w: Any, w_step: Any, s: Any, s_step: Any, x_P: Any, block: Any, blocks: Any, ahead: Any
) -> None:
    """`multiply_tile` for any number of rows of x, from a block of x on."""
    offset = block * BLOCK_BYTES
    for p in range(0, x_P.shape[0], 3):
        left, target, x = x_P.shape[0] - p, lanes + p * ROWS * LANE_BYTES, x_P[p] + offset
        if left == 1:
            multiply_tile(marker, target, w, w_step, s, s_step, (x,), blocks, ahead)
        elif left == 2:
            multiply_tile(marker, target, w, w_step, s, s_step, (x, x_P[p + 1] + offset), blocks, ahead)
        else:
            triple = (x, x_P[p + 1] + offset, x_P[p + 2] + offset)
            multiply_tile(marker, target, w, w_step, s, s_step, triple, blocks, ahead)


@part
def _multiply_eight(
    marker: Any, unit: Any, lanes: Any, w: Any, w_step: Any, s: Any, s_step: Any, blocks: Any, x_P: Any, wide: Any
) -> None:
    """All of K: lanes [P, 8, 16] of eight weight rows times rows of x. `wide` is room for a decoded piece."""
    if x_P.shape[0] <= _FUSED:
        _multiply_blocks(marker, lanes, w, w_step, s, s_step, x_P, 0, blocks, w + ROWS * w_step)
        return
    for block in range(0, blocks, _PIECE):
        piece = min(_PIECE, blocks - block)
        for n in range(ROWS):
            row, scales = w + n * w_step + block * unit, s + n * s_step + block
            expand_blocks(marker, wide + n * _PIECE * BLOCK_BYTES, row, scales, piece)
        _multiply_blocks(_FP32_MARKER, lanes, wide, _PIECE * BLOCK_BYTES, 0, 0, x_P, block, piece, 0)


@part
def _share_few(marker: Any, form: Any, w: Any, s: Any, k: Any, n0: Any, n1: Any, x_P: Any, y: Any, y_step: Any) -> None:
    """Whole eights of output columns of few rows of x, all of K at once; `y` is the address of column 0."""
    _, unit, scale_rows = form
    blocks, step, scale_bytes = k // TILE, k // TILE * unit, _scale_offset(scale_rows, 1, k)
    for first in range(n0, n1, ROWS):
        codes, scales, out = w + first * step, s + _scale_offset(scale_rows, first, k), y + first * 4
        ahead = codes + ROWS * step
        for p in range(0, x_P.shape[0], 3):
            left, at, x = x_P.shape[0] - p, out + p * y_step, x_P[p]
            if left == 1:
                product_tile(marker, at, y_step, codes, step, scales, scale_bytes, (x,), blocks, ahead)
            elif left == 2:
                product_tile(marker, at, y_step, codes, step, scales, scale_bytes, (x, x_P[p + 1]), blocks, ahead)
            else:
                triple = (x, x_P[p + 1], x_P[p + 2])
                product_tile(marker, at, y_step, codes, step, scales, scale_bytes, triple, blocks, ahead)


@part
def share_vector(
    marker: Any, form: Any, w: Any, s: Any, n: Any, k: Any, n0: Any, n1: Any, x_P: Any, y_PN: Any, lanes: Any, wide: Any
) -> None:
    """Output columns [n0, n1) of one weight times rows of x; n0 is a multiple of eight. `lanes` and `wide` are `rooms`
    for these rows or more; y_PN is contiguous, and mentioned by the caller afterwards, as it is used by address."""
    _, unit, scale_rows = form
    blocks, row_bytes, scale_bytes = (k + TILE - 1) // TILE, k * unit // TILE, _scale_offset(scale_rows, 1, k)
    few = n1 // ROWS * ROWS if x_P.shape[0] <= _FUSED and k % TILE == 0 else n0
    if n0 < few:
        _share_few(marker, form, w, s, k, n0, few, x_P, address(y_PN), y_PN.strides[0])
    for first in range(max(n0, few), n1, ROWS):
        rows, step = min(ROWS, n - first), row_bytes
        codes, scales = w + first * row_bytes, s + _scale_offset(scale_rows, first, k)
        # Nothing past the weight may be read: ragged edges are completed with zeros in a buffer.
        ragged = rows < ROWS or blocks * unit > row_bytes
        spare = np.zeros((ROWS if ragged else 0) * (blocks * unit + scale_bytes), np.uint8)
        if ragged:
            step = blocks * unit
            for i in range(rows):
                copy_bytes(address(spare) + i * step, codes + i * row_bytes, row_bytes)
            codes = address(spare)
            if scale_bytes:
                copy_bytes(codes + ROWS * step, scales, rows * scale_bytes)
                scales = codes + ROWS * step
        for p in range(0, x_P.shape[0], _CHUNK):
            x = x_P[p : p + _CHUNK]
            for i in range(x.shape[0] * ROWS * LANES):
                lanes[i] = 0
            _multiply_eight(marker, unit, address(lanes), codes, step, scales, scale_bytes, blocks, x, address(wide))
            for i in range(x.shape[0] * ROWS):
                # Numba frees an array after its last mention, whatever still reads its address.
                if i % ROWS < rows and spare.size >= 0:
                    y_PN[p + i // ROWS, first + i % ROWS] = sum_lanes(address(lanes) + i * LANE_BYTES)


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
    for share in prange(parts):
        n0, n1 = columns(n, share, parts)
        x_P = address(x_TK) + row_P * (x_TK.shape[1] * 4)
        lanes, wide = rooms(row_P.shape[0])
        for j in range(w_J.shape[0]):
            x, y = x_P[first_J[j] : last_J[j]], y_PN[first_J[j] : last_J[j]]
            share_vector(marker, form, w_J[j], s_J[j], n, k, n0, n1, x, y, lanes, wide)


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
    copy_bytes(address(raw_B), w, k * unit // TILE)
    scales = np.empty(out_K.shape[0] // TILE, np.uint8)
    if code <= _FP8_CODE:
        copy_bytes(address(scales), s, scales.shape[0])
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
        copy_bytes(address(out_K), address(raw_B), out_K.shape[0] * 4)


@reassociated
def dot(a_K: Any, b_K: Any) -> Any:
    """Sum of products in an order that the compiler chose once: it depends on the length alone."""
    total = _SUM(0)
    for i in range(a_K.shape[0]):
        total += _SUM(a_K[i]) * _SUM(b_K[i])
    return _F32(total)


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
            copy_bytes(address(spare), row, row_bytes)
            row = address(spare)
        expand_blocks(marker, address(out_NK[i]), row, s + _scale_offset(scale_rows, row0 + i, k), blocks)
        if spare.size < 0:  # held until here: Numba frees an array after its last mention
            out_NK[i, 0] = 0


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
def round_bf16(value: Any) -> Any:
    """To the nearest bf16, ties to even, as fp32."""
    u = _F32(value).view(np.uint32)
    return _U32((u + _U32(0x7FFF) + ((u >> _U32(16)) & _U32(1))) & _U32(0xFFFF0000)).view(np.float32)


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
def pack(x_TK: Any, paired: Any, quantise: Any, out_TK: Any, finite_T: Any, parts: Any) -> None:
    for share in prange(parts):
        for t in range(x_TK.shape[0] * share // parts, x_TK.shape[0] * (share + 1) // parts):
            finite_T[t] = pack_row(x_TK[t], paired, quantise, out_TK[t])


_WEIGHT = "void({}[::1], UniTuple(int64, 3), "
_PRODUCTS = "int64[::1], int64[::1], int64[::1], float32[:, ::1], float32[:, ::1], int64)"
_MULTIPLY = _WEIGHT + "int64[::1], int64[::1], int64, int64, " + _PRODUCTS
_EXPAND = _WEIGHT + "int64, int64, int64, int64, float32[:, ::1])"


def _kernels(
    signature: str, dtypes: Iterable[str], vector: Callable[..., None], plain: Callable[..., None]
) -> Mapping[str, Kernel]:
    """By dtype of the marker; "plain" reads any kind, and takes the marker of FP4."""
    kernels = {dtype: kernel(signature.format(dtype), parallel=True)(vector) for dtype in dtypes}
    return MappingProxyType(kernels | {"plain": kernel(signature.format(FP4.dtype), parallel=True)(plain)})


MULTIPLY = _kernels(_MULTIPLY, KINDS, _multiply_vector, _multiply_plain)
EXPAND = _kernels(_EXPAND, (FP4.dtype, FP8.dtype, BF16.dtype), _expand_vector, _expand_plain)
