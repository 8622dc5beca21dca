"""Tiles of integer dots for Numba kernels: FP4 values as bytes, keys unsigned and queries signed (x86).

A key's bytes are 2 v 2^s + 96, a query's 2 v 2^s, with s up to 3, so that both fit. A step adds four products to a
lane; what 96 adds to a dot is taken from it at the start: the *correction* of a query. As in `tiles`, a tile is rows
(keys) x vecs vectors of sixteen columns (heads).
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from rorqual.ops.cpu import features
from rorqual.ops.fast.decode import E2M1_VALUES
from rorqual.ops.fast.tiles import either
from rorqual.ops.fast.vectors import (
    ARRAY,
    F32,
    I8,
    I32,
    LANES,
    S32,
    VECTOR_F32,
    VECTOR_I32,
    ahead,
    broadcast,
    call,
    const,
    emit_fma,
    emit_round_bf16,
    instruction,
    load_at,
    pick,
    store_at,
    tuple_of,
)

MOST_SHIFT = 3
OFFSET = 96
TOGETHER = 4
"""Blocks of a key that are decoded at once."""
LEAST_SCALE, MOST_SCALE = 127 - 20, 127 + 20
"""Scale bytes of level keys and heads."""

_BYTES, _WORDS = ir.VectorType(I8, 64), ir.VectorType(ir.IntType(16), 32)
_WIDEST = 64 if "avx512bw" in features() else 32


def _key_tables() -> Any:
    """uint8 [256, 4, 16]: byte of an E2M1 code in each of four blocks, shifted by a number's two-bit digits."""
    values = (2 * np.array(E2M1_VALUES)).astype(np.int64)
    shifts = np.arange(256)[:, None] >> (2 * np.arange(TOGETHER)) & MOST_SHIFT
    return np.ascontiguousarray(((values << shifts[..., None]) + OFFSET).astype(np.uint8).reshape(-1))


KEY_TABLES = _key_tables()


class Products(NamedTuple):
    """How the products of a lane's four bytes are summed, in lanes of 32 bits.

    kind: what stands in a lane while it is summed; add: (builder, total, unsigned, signed) -> total, whole: (builder,
    total) -> int32.
    """

    kind: ir.VectorType
    add: Callable[[Any, Any, Any, Any], Any]
    whole: Callable[[Any, Any], Any]


def _in_parts(builder: Any, name: str, result: ir.VectorType, *args: Any) -> Any:
    """An instruction of the widest registers that this CPU has, on vectors of 64 bytes."""
    parts = []
    for part in range(64 // _WIDEST):
        pieces = []
        for arg in args:
            count = arg.type.count * _WIDEST // 64
            pieces.append(builder.shuffle_vector(arg, arg, pick([part * count + i for i in range(count)])))
        kind = ir.VectorType(result.element, result.count * _WIDEST // 64)
        parts.append(call(builder, name, kind, *pieces))
    while len(parts) > 1:
        parts = [
            builder.shuffle_vector(x, y, pick(list(range(2 * x.type.count))))
            for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


_PAIRS = {64: "llvm.x86.avx512.pmaddubs.w.512", 32: "llvm.x86.avx2.pmadd.ub.sw"}[_WIDEST]
_FOURS = {64: "llvm.x86.avx512.pmaddw.d.512", 32: "llvm.x86.avx2.pmadd.wd"}[_WIDEST]
_LOOKUP = {64: "llvm.x86.avx512.pshuf.b.512", 32: "llvm.x86.avx2.pshuf.b"}[_WIDEST]


def _add_fours(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", VECTOR_I32, total, unsigned, signed)


def _add_pairs(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    unsigned, signed = builder.bitcast(unsigned, _BYTES), builder.bitcast(signed, _BYTES)
    products = _in_parts(builder, _PAIRS, _WORDS, unsigned, signed)
    return builder.bitcast(builder.add(builder.bitcast(total, _WORDS), products), VECTOR_I32)


def _whole_pairs(builder: Any, total: Any) -> Any:
    return _in_parts(builder, _FOURS, VECTOR_I32, builder.bitcast(total, _WORDS), const(_WORDS, 1))


VNNI = Products(VECTOR_I32, _add_fours, lambda builder, total: total)
"""`vpdpbusd`: any number of steps."""
PAIRS = Products(_WORDS, _add_pairs, _whole_pairs)
"""Two sums of 16 bits a lane, wide enough for a block of 32 channels of keys and queries that are not shifted."""


def _looked_up(builder: Any, table: Any, codes: Any) -> Any:
    """Bytes of a table of sixteen, repeated to the width of the codes, by code."""
    if codes.type.count == LANES:
        return call(builder, "llvm.x86.ssse3.pshuf.b.128", codes.type, table, codes)
    return _in_parts(builder, _LOOKUP, codes.type, table, codes)


def key_bytes(blocks: int) -> Any:
    """Instruction (data, offset, tables, table_at, out, at, half): 32 channels x blocks (1 or 4) of a key as bytes.

    From 16 bytes a block, by a table of 16 bytes a block. The even elements go to `at`, the odd ones `half` further, 16
    a block.
    """
    kind = ir.VectorType(I8, blocks * LANES)

    @instruction(types.void, ARRAY, types.intp, ARRAY, types.intp, ARRAY, types.intp, types.intp)
    def e2m1_key_bytes(
        builder: Any, data: Any, offset: Any, tables: Any, table_at: Any, out: Any, at: Any, half: Any
    ) -> None:
        packed, table = load_at(builder, data, offset, kind), load_at(builder, tables, table_at, kind)
        even = builder.and_(packed, const(kind, 15))
        odd = builder.lshr(packed, const(kind, 4))
        store_at(builder, _looked_up(builder, table, even), out, at)
        store_at(builder, _looked_up(builder, table, odd), out, builder.add(at, half))

    return e2m1_key_bytes


def _levels(builder: Any, words: Any) -> tuple[Any, Any]:
    """(least bytes or 0, shifts) of sixteen scale words; see `level_keys`."""
    scales = [builder.and_(builder.lshr(words, const(VECTOR_I32, 8 * b)), const(VECTOR_I32, 255)) for b in range(4)]
    least = most = scales[0]
    shifts = const(VECTOR_I32, 0)
    for b, scale in enumerate(scales):
        least = builder.select(builder.icmp_signed("<", scale, least), scale, least)
        most = builder.select(builder.icmp_signed(">", scale, most), scale, most)
        shifts = builder.add(shifts, builder.shl(scale, const(VECTOR_I32, 2 * b)))
    shifts = builder.sub(shifts, builder.mul(least, const(VECTOR_I32, 0b01010101)))
    near = builder.icmp_signed("<=", builder.sub(most, least), const(VECTOR_I32, MOST_SHIFT))
    inside = builder.and_(
        builder.icmp_signed(">=", least, const(VECTOR_I32, LEAST_SCALE)),
        builder.icmp_signed("<=", most, const(VECTOR_I32, MOST_SCALE)),
    )
    level = builder.and_(near, inside)
    zero = const(VECTOR_I32, 0)
    return builder.select(level, least, zero), builder.select(level, shifts, zero)


@instruction(types.void, ARRAY, ARRAY, ARRAY, types.intp)
def level_keys(builder: Any, words: Any, least: Any, shifts: Any, at: Any) -> None:
    """From sixteen keys' four scale bytes: the least, or 0 where the key is not level; and how far the blocks stand
    above it, as the row of `KEY_TABLES`."""
    found = _levels(builder, load_at(builder, words, at, VECTOR_I32))
    for values, out in zip(found, (least, shifts), strict=True):
        store_at(builder, values, out, at)


@instruction(types.int32, ARRAY, types.intp)
def word_at(builder: Any, data: Any, offset: Any) -> Any:
    """Four bytes as one number, the first lowest."""
    return load_at(builder, data, offset, I32)


def query_bytes(products: Products) -> Any:
    """Instruction (data, at, head_stride, shifts, shift_at, q, q_at, corrections, correction_at): a block of 32
    channels of sixteen heads, as `dot_bytes` wants its columns.

    From 16 bytes a head, and a shift a head: 8 steps of 16 heads x 4 bytes, first those of the even elements, then of
    the odd ones; and what a sum of the products with a key starts from.
    """
    table = ir.Constant(_BYTES, [int(2 * value) for value in E2M1_VALUES] * 4)

    @instruction(types.void, ARRAY, types.intp, types.intp, ARRAY, types.intp, ARRAY, types.intp, ARRAY, types.intp)
    def e2m1_query_bytes(
        builder: Any, data: Any, at: Any, head_stride: Any, shifts: Any, shift_at: Any, q: Any, q_at: Any,
        corrections: Any, correction_at: Any,
    ) -> None:  # fmt: skip
        shift, total = load_at(builder, shifts, shift_at, VECTOR_I32), const(VECTOR_I32, 0)
        ones = const(VECTOR_I32, 0x01010101)
        # The bits that a byte gets from its lower neighbour when four are shifted as one number.
        kept = builder.not_(builder.sub(builder.shl(ones, shift), ones))
        offsets = const(VECTOR_I32, OFFSET * 0x01010101)
        for step in range(4):
            words = ir.Constant(VECTOR_I32, ir.Undefined)
            for head in range(LANES):
                word = load_at(builder, data, ahead(builder, ahead(builder, at, head_stride, head), 4, step), I32)
                words = builder.insert_element(words, word, I32(head))
            for half in range(2):
                codes = builder.and_(builder.lshr(words, const(VECTOR_I32, 4 * half)), const(VECTOR_I32, 0x0F0F0F0F))
                values = _looked_up(builder, table, builder.bitcast(codes, _BYTES))
                values = builder.and_(builder.shl(builder.bitcast(values, VECTOR_I32), shift), kept)
                store_at(builder, values, q, ahead(builder, q_at, 64, half * 4 + step))
                total = products.add(builder, total, offsets, values)
        negative = builder.neg(builder.bitcast(total, products.kind))
        store_at(builder, builder.bitcast(negative, VECTOR_I32), corrections, correction_at)

    return e2m1_query_bytes


def start_rows(rows: int, vecs: int) -> Any:
    """Instruction (data, at, vec_stride) -> int32 tile whose rows are all the same vectors."""

    @instruction(tuple_of(S32, rows * vecs), ARRAY, types.intp, types.intp)
    def tile_start_rows(builder: Any, data: Any, at: Any, vec_stride: Any) -> Any:
        tile = ir.Constant(ir.ArrayType(VECTOR_I32, rows * vecs), ir.Undefined)
        for v in range(vecs):
            vector = load_at(builder, data, ahead(builder, at, vec_stride, v), VECTOR_I32)
            for r in range(rows):
                tile = builder.insert_value(tile, vector, r * vecs + v)
        return tile

    return tile_start_rows


def dot_bytes(products: Products, rows: int, vecs: int) -> Any:
    """Instruction (tile, a, a_at, a_row, b, b_at, b_vec) -> tile plus products of four bytes each.

    a holds unsigned bytes, four of a row from a_at + r * a_row; b signed ones, four of each of sixteen columns from
    b_at + v * b_vec.
    """
    tile_type = tuple_of(S32, rows * vecs)

    @instruction(tile_type, tile_type, ARRAY, types.intp, types.intp, ARRAY, types.intp, types.intp)
    def tile_dot_bytes(builder: Any, tile: Any, a: Any, a_at: Any, a_row: Any, b: Any, b_at: Any, b_vec: Any) -> Any:
        columns = [load_at(builder, b, ahead(builder, b_at, b_vec, v), VECTOR_I32) for v in range(vecs)]
        for r in range(rows):
            row = broadcast(builder, load_at(builder, a, ahead(builder, a_at, a_row, r), I32), VECTOR_I32)
            for v in range(vecs):
                total = products.add(builder, builder.extract_value(tile, r * vecs + v), row, columns[v])
                tile = builder.insert_value(tile, total, r * vecs + v)
        return tile

    return tile_dot_bytes


def add_scaled(products: Products, rows: int, vecs: int) -> Any:
    """Instruction (tile, dots, a, a_at, a_row, b, b_at, b_vec) -> tile plus dots * (a[row] * b[column])."""
    tile_type, dots_type = tuple_of(F32, rows * vecs), tuple_of(S32, rows * vecs)

    @instruction(tile_type, tile_type, dots_type, ARRAY, types.intp, types.intp, ARRAY, types.intp, types.intp)
    def tile_add_scaled(
        builder: Any, tile: Any, dots: Any, a: Any, a_at: Any, a_row: Any, b: Any, b_at: Any, b_vec: Any
    ) -> Any:
        columns = [load_at(builder, b, ahead(builder, b_at, b_vec, v), VECTOR_F32) for v in range(vecs)]
        for r in range(rows):
            row = broadcast(builder, load_at(builder, a, ahead(builder, a_at, a_row, r), a.type.pointee), VECTOR_F32)
            for v in range(vecs):
                at = r * vecs + v
                dot = products.whole(builder, builder.extract_value(dots, at))
                scale = builder.fmul(row, columns[v])
                total = emit_fma(builder, builder.sitofp(dot, VECTOR_F32), scale, builder.extract_value(tile, at))
                tile = builder.insert_value(tile, total, at)
        return tile

    return tile_add_scaled


def weigh_integers(rows: int, vecs: int) -> Any:
    """Instruction (lanes, dots, w, w_at, native): as `tiles.weigh`, of int32 dots below 2^24."""
    lanes_type, dots_type = tuple_of(F32, rows), tuple_of(S32, rows * vecs)

    @instruction(lanes_type, lanes_type, dots_type, ARRAY, types.intp, types.boolean)
    def tile_weigh_integers(builder: Any, lanes: Any, dots: Any, w: Any, w_at: Any, native: Any) -> Any:
        weights = [load_at(builder, w, ahead(builder, w_at, LANES, v), VECTOR_F32) for v in range(vecs)]
        zero = const(VECTOR_I32, 0)

        def weighed(rounded: Callable[[Any], Any]) -> Any:
            result = lanes
            for r in range(rows):
                total = builder.extract_value(lanes, r)
                for v in range(vecs):
                    dot = builder.extract_value(dots, r * vecs + v)
                    positive = builder.select(builder.icmp_signed(">", dot, zero), dot, zero)
                    product = builder.fmul(rounded(builder.sitofp(positive, VECTOR_F32)), weights[v])
                    total = builder.fadd(total, rounded(product))
                result = builder.insert_value(result, total, r)
            return result

        return either(builder, native, lambda: weighed(partial(emit_round_bf16, builder)), lambda: weighed(lambda x: x))

    return tile_weigh_integers
