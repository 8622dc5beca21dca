"""LLVM code of the AVX512 row kernel: packed weights decoded in registers and multiplied by rows of x.

Functions called from kernels take addresses as 64-bit integers and check no bounds.

Lane order: element 2i of a 32-block is lane i of its first vector, element 2i + 1 lane i of its second, because nibbles
and bytes come apart that way without shuffles. fp32 weights keep the plain order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from rorqual.formats.fp4 import E2M1_BY_BYTE
from rorqual.formats.weights import TILE
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

# Numba's own modules are typed too loosely for typed code.
_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic
_cgutils: Any = cgutils

ROWS = 8
"""Weight rows of a tile."""
BLOCK_BYTES = 4 * TILE
"""Of 32 elements of x, or of a decoded weight row."""
LANE_BYTES = 4 * LANES
"""Of the lanes of one product."""

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
    # the scale carries the 2^8, so scales above 2^119 saturate. NaN codes read as +-480. No checkpoint has either.
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
    return _load(b, address, VECTOR_F32), _load(b, _at(b, address, LANE_BYTES), VECTOR_F32)


class Kind(NamedTuple):
    """How a weight's bytes are read."""

    marker: Array
    """Empty; the vector kernels are compiled once for each dtype of it."""
    dtype: str
    """Of the marker."""
    code: int
    unit: int
    """Bytes of 32 elements."""
    scale_rows: int
    """Weight rows under one row of scale bytes; 0 without scales."""
    decode: Callable[[Any, Any, Any], tuple[Any, Any]]
    """Emits 32 elements, from an address and a scale, as two vectors."""
    factor: float = 0.0
    """Of the scale table."""

    def scale(self, b: Any, s: Any, block: Any) -> Any:
        """Emits a block's scale; None without scales."""
        return _load_scale(b, _at(b, s, block), self.factor) if self.scale_rows else None


FP4 = Kind(np.empty(0, np.int8), "int8", 0, 16, 1, _decode_fp4, 1.0)
FP8 = Kind(np.empty(0, np.uint8), "uint8", 1, 32, TILE, _decode_fp8, 256.0)
BF16 = Kind(np.empty(0, np.uint16), "uint16", 2, 64, 0, _decode_bf16)
FP32 = Kind(np.empty(0, np.float32), "float32", 3, 128, 0, _decode_fp32)
KINDS: Mapping[str, Kind] = MappingProxyType({kind.dtype: kind for kind in (FP4, FP8, BF16, FP32)})


@_intrinsic
def multiply_tile(
    context: Any, marker: Any, lanes: Any, w: Any, w_step: Any, s: Any, s_step: Any, x: Any, blocks: Any, ahead: Any
) -> Any:
    """Add `blocks` blocks of eight weight rows times len(x) rows of x to lanes, fp32 [len(x), 8, 16].

    Addresses (`x` a tuple of them) and byte steps between weight rows; FP8 rows share the scales at `s`. Meanwhile the
    eight weight rows that start at `ahead` are prefetched.
    """
    kind, rows = KINDS[str(marker.dtype)], len(x)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _, lanes, *tile = args
        slots = [_at(b, lanes, i, LANE_BYTES) for i in range(rows * ROWS)]
        for total, slot in zip(_add_tile(b, kind, [_load(b, s, VECTOR_F32) for s in slots], *tile), slots, strict=True):
            _store(b, total, slot)
        return context.get_dummy_value()

    return types.void(marker, *[types.int64] * 5, x, types.int64, types.int64), emit


@_intrinsic
def product_tile(
    context: Any,
    marker: Any,
    y: Any,
    y_step: Any,
    w: Any,
    w_step: Any,
    s: Any,
    s_step: Any,
    x: Any,
    blocks: Any,
    ahead: Any,
) -> Any:
    """Products of eight weight rows with len(x) rows of x, fp32 [8] each, y_step bytes apart: what `multiply_tile` on
    empty lanes and `sum_lanes` give, without leaving the registers."""
    kind, rows = KINDS[str(marker.dtype)], len(x)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _, y, y_step, *tile = args
        sums = _add_tile(b, kind, [const(VECTOR_F32, 0.0)] * (rows * ROWS), *tile)
        for r in range(rows):
            out = _sum_eight(b, sums[r * ROWS : (r + 1) * ROWS])
            _store(b, out, _at(b, y, b.mul(y_step, const(I64, r))))
        return context.get_dummy_value()

    return types.void(marker, *[types.int64] * 6, x, types.int64, types.int64), emit


def _add_tile(
    b: Any, kind: Kind, sums: list[Any], w: Any, w_step: Any, s: Any, s_step: Any, x: Any, blocks: Any, ahead: Any
) -> list[Any]:
    """Lanes [rows of x, 8] as they were plus those of the blocks."""
    w_N = [_at(b, w, b.mul(w_step, const(I64, n))) for n in range(ROWS)]
    s_N = [_at(b, s, b.mul(s_step, const(I64, n))) for n in range(ROWS)]
    # Stack slots in name only: LLVM keeps them in registers across the loop.
    slots = [_cgutils.alloca_once_value(b, total) for total in sums]
    with _cgutils.for_range(b, blocks) as loop:
        tile_bytes = ROWS * kind.unit
        for line in range(0, 0 if kind is FP32 else tile_bytes, LANE_BYTES):
            _prefetch(b, _at(b, _at(b, ahead, loop.index, tile_bytes), line))
        x_R = [_decode_fp32(b, _at(b, address, loop.index, BLOCK_BYTES)) for address in _cgutils.unpack_tuple(b, x)]
        scale = kind.scale(b, s, loop.index)
        for n in range(ROWS):
            if kind is FP4:
                scale = kind.scale(b, s_N[n], loop.index)
            w_halves = kind.decode(b, _at(b, w_N[n], loop.index, kind.unit), scale)
            for r, x_halves in enumerate(x_R):
                total = b.load(slots[r * ROWS + n])
                for w_half, x_half in zip(w_halves, x_halves, strict=True):
                    total = emit_fma(b, w_half, x_half, total)
                b.store(total, slots[r * ROWS + n])
    return [b.load(slot) for slot in slots]


def _sum_eight(b: Any, rows: list[Any]) -> Any:
    """`sum_lanes` of eight vectors at once, fp32 [8]: two vectors' halves lie side by side before they are added."""
    width = LANES
    while len(rows) > 1 or width > 1:
        width //= 2
        low = [i for i in range(2 * LANES) if i // width % 2 == 0]
        if len(rows) == 1:
            low = low[: LANES // 2]
        pairs = [(rows[i], rows[min(i + 1, len(rows) - 1)]) for i in range(0, len(rows), 2)]
        rows = [
            b.fadd(b.shuffle_vector(x, y, pick(low)), b.shuffle_vector(x, y, pick([i + width for i in low])))
            for x, y in pairs
        ]
    return rows[0]


@_intrinsic
def expand_blocks(context: Any, marker: Any, out: Any, w: Any, s: Any, blocks: Any) -> Any:
    """Decode blocks of one weight row to fp32 in lane order. Addresses."""
    kind = KINDS[str(marker.dtype)]

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _, out, w, s, blocks = args
        with _cgutils.for_range(b, blocks) as loop:
            target = _at(b, out, loop.index, BLOCK_BYTES)
            scale = kind.scale(b, s, loop.index)
            for half, values in enumerate(kind.decode(b, _at(b, w, loop.index, kind.unit), scale)):
                _store(b, values, _at(b, target, half, LANE_BYTES))
        return context.get_dummy_value()

    return types.void(marker, *[types.int64] * 4), emit


@_intrinsic
def sum_lanes(context: Any, address: Any) -> Any:
    """Sum of 16 fp32 lanes, by halving."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        lanes = _load(b, args[0], VECTOR_F32)
        for half in (8, 4, 2, 1):
            lanes = b.fadd(lanes, b.shuffle_vector(lanes, lanes, pick([(i + half) % LANES for i in range(LANES)])))
        return b.extract_element(lanes, const(I32, 0))

    return types.float32(types.int64), emit


@_intrinsic
def copy_bytes(context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy between two addresses."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        pointers = (b.inttoptr(address, I8.as_pointer()) for address in args[:2])
        _cgutils.raw_memcpy(b, *pointers, args[2], 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit
