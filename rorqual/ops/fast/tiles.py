"""Register-blocked products for Numba kernels.

A tile is rows x vecs vectors of sixteen columns (vector v of row r stands at r * vecs + v of a tuple): a block of a
matrix product, accumulated in registers. Adding an outer product to it loads `vecs` vectors and broadcasts `rows`
scalars for rows * vecs multiply-adds.

Every element is one chain of multiply-adds along k, from zero or from what stood there. Its bits depend on its own row
and column alone, not on the tile's shape nor on its place in a tile.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from rorqual.ops.cpu import features
from rorqual.ops.fast.kernel import inlined
from rorqual.ops.fast.vectors import (
    ARRAY,
    F32,
    I64,
    LANES,
    VECTOR_F32,
    ahead,
    broadcast,
    const,
    emit_fma,
    emit_relu,
    emit_round_bf16,
    instruction,
    load_at,
    pick,
    store_at,
    tuple_of,
)

# Accumulators, column vectors and one broadcast fill at most 32 registers of AVX512, or 16 of half the width of AVX2.
WIDE = "avx512f" in features()
TILE_ROWS = 8 if WIDE else 6
TILE_VECS = 2 if WIDE else 1
_VECTOR_F64 = ir.VectorType(ir.DoubleType(), LANES // 2)
DEPTH = 128
"""Steps of k that `product` takes with all tiles before it goes on: what they share then stays in the first cache."""


def zeros(rows: int, vecs: int) -> Any:
    """Instruction () -> tile of zeros."""

    @instruction(tuple_of(F32, rows * vecs))
    def tile_zeros(builder: Any) -> Any:
        return ir.Constant(ir.ArrayType(VECTOR_F32, rows * vecs), None)

    return tile_zeros


def multiply_add(rows: int, vecs: int) -> Any:
    """Instruction (tile, a, a_at, a_row, b, b_at, b_vec) -> tile plus an outer product.

    tile[r, v] + a[a_at + r * a_row] * b[b_at + v * b_vec ..+16], each rounded once.
    """
    tile_type = tuple_of(F32, rows * vecs)

    @instruction(tile_type, tile_type, ARRAY, types.intp, types.intp, ARRAY, types.intp, types.intp)
    def tile_multiply_add(builder: Any, tile: Any, a: Any, a_at: Any, a_row: Any, b: Any, b_at: Any, b_vec: Any) -> Any:
        tile = [builder.extract_value(tile, i) for i in range(rows * vecs)]
        return _joined(builder, _outer(builder, tile, vecs, a, a_at, a_row, b, b_at, b_vec))

    return tile_multiply_add


def _outer(
    builder: Any, tile: list[Any], vecs: int, a: Any, a_at: Any, a_row: Any, b: Any, b_at: Any, b_vec: Any
) -> list[Any]:
    """A tile's vectors plus an outer product."""
    columns = [load_at(builder, b, ahead(builder, b_at, b_vec, v), VECTOR_F32) for v in range(vecs)]
    result = []
    for i, total in enumerate(tile):
        if i % vecs == 0:
            scalar = load_at(builder, a, ahead(builder, a_at, a_row, i // vecs), a.type.pointee)
            row = broadcast(builder, scalar, VECTOR_F32)
        result.append(emit_fma(builder, row, columns[i % vecs], total))
    return result


def _joined(builder: Any, vectors: list[Any]) -> Any:
    """A tuple of the vectors."""
    tile = ir.Constant(ir.ArrayType(vectors[0].type, len(vectors)), ir.Undefined)
    for i, vector in enumerate(vectors):
        tile = builder.insert_value(tile, vector, i)
    return tile


def plus(rows: int, vecs: int) -> Any:
    """Instruction (tile, tile) -> their sum."""
    tile_type = tuple_of(F32, rows * vecs)

    @instruction(tile_type, tile_type, tile_type)
    def tile_plus(builder: Any, x: Any, y: Any) -> Any:
        for i in range(rows * vecs):
            x = builder.insert_value(x, builder.fadd(builder.extract_value(x, i), builder.extract_value(y, i)), i)
        return x

    return tile_plus


def weigh(rows: int, vecs: int) -> Any:
    """Instruction (lanes, dots, w, w_at, native) -> lanes [rows x 1] plus relu(dots) * w over the columns in order.

    native: dots and products are rounded to bf16 (SPEC 3); w is taken as it is.
    """
    lanes_type, dots_type = tuple_of(F32, rows), tuple_of(F32, rows * vecs)

    @instruction(lanes_type, lanes_type, dots_type, ARRAY, types.intp, types.boolean)
    def tile_weigh(builder: Any, lanes: Any, dots: Any, w: Any, w_at: Any, native: Any) -> Any:
        weights = [load_at(builder, w, ahead(builder, w_at, LANES, v), VECTOR_F32) for v in range(vecs)]

        def weighed(rounded: Callable[[Any], Any]) -> Any:
            result = lanes
            for r in range(rows):
                total = builder.extract_value(lanes, r)
                for v in range(vecs):
                    dot = rounded(builder.extract_value(dots, r * vecs + v))
                    product = rounded(builder.fmul(emit_relu(builder, dot), weights[v]))
                    total = builder.fadd(total, product)
                result = builder.insert_value(result, total, r)
            return result

        return either(builder, native, lambda: weighed(partial(emit_round_bf16, builder)), lambda: weighed(lambda x: x))

    return tile_weigh


def write_lane_sums(rows: int) -> Any:
    """Instruction (lanes, data, at, native): the sum of each row's sixteen lanes, as bf16 where native.

    Lanes 8 apart are added first, then 4, 2, 1. Rows are folded into one another on the way, so that eight of them cost
    little more than one.
    """
    assert rows <= LANES

    @instruction(types.void, tuple_of(F32, rows), ARRAY, types.intp, types.boolean)
    def tile_write_lane_sums(builder: Any, lanes: Any, data: Any, at: Any, native: Any) -> None:
        vectors = [builder.extract_value(lanes, r) for r in range(rows)]
        for half in (8, 4, 2, 1):
            vectors = [_folded(builder, vectors[i : i + 2], half) for i in range(0, len(vectors), 2)]
        total = builder.select(native, emit_round_bf16(builder, vectors[0]), vectors[0])
        store_at(builder, builder.shuffle_vector(total, total, pick(list(range(rows)))), data, at)

    return tile_write_lane_sums


def _folded(builder: Any, vectors: list[Any], half: int) -> Any:
    """One or two vectors of segments of 2 x half lanes to one of segments of half, the two halves of each added."""
    starts = [start + (LANES if second else 0) for second in (0, 1) for start in range(0, LANES, 2 * half)]
    first, last = vectors[0], vectors[-1]
    low = pick([start + lane for start in starts for lane in range(half)])
    high = pick([start + half + lane for start in starts for lane in range(half)])
    return builder.fadd(builder.shuffle_vector(first, last, low), builder.shuffle_vector(first, last, high))


def either(builder: Any, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """The value of one of two emitted branches."""
    with builder.if_else(condition) as (if_true, if_false):
        with if_true:
            true_value, true_end = then(), builder.block
        with if_false:
            false_value, false_end = otherwise(), builder.block
    merged = builder.phi(true_value.type)
    merged.add_incoming(true_value, true_end)
    merged.add_incoming(false_value, false_end)
    return merged


def _product(rows: int, vecs: int, pairs: bool = False) -> Any:
    """Instruction: one tile of `product`, its loop over k included.

    pairs: even columns are multiplied by the scalar at a's place, odd ones by the one that follows it.
    """
    place = (types.intp, types.intp)

    @instruction(
        types.void, ARRAY, *place, types.intp, ARRAY, *place, types.intp, types.intp, ARRAY, *place, types.boolean
    )
    def tile_product(
        builder: Any, a: Any, a_at: Any, a_row: Any, a_k: Any, b: Any, b_at: Any, b_k: Any, b_vec: Any, count: Any,
        out: Any, out_at: Any, out_row: Any, onto: Any,
    ) -> None:  # fmt: skip
        places = [
            ahead(builder, ahead(builder, out_at, out_row, r), LANES, v) for r in range(rows) for v in range(vecs)
        ]
        held = either(
            builder,
            onto,
            lambda: _joined(builder, [load_at(builder, out, place, VECTOR_F32) for place in places]),
            lambda: ir.Constant(ir.ArrayType(VECTOR_F32, rows * vecs), None),
        )
        start = [builder.extract_value(held, i) for i in range(rows * vecs)]
        a_R = [_settled(builder, builder.gep(a, [ahead(builder, a_at, a_row, r)])) for r in range(rows)]

        def step(k: Any, tile: list[Any]) -> list[Any]:
            a_at_k, b_at_k = builder.mul(k, a_k), builder.add(b_at, builder.mul(k, b_k))
            columns = [load_at(builder, b, ahead(builder, b_at_k, b_vec, v), VECTOR_F32) for v in range(vecs)]
            result = []
            for r, row in enumerate(a_R):
                scalar = load_at(builder, row, a_at_k, ir.DoubleType() if pairs else a.type.pointee)
                value = broadcast(builder, scalar, _VECTOR_F64 if pairs else VECTOR_F32)
                value = builder.bitcast(value, VECTOR_F32)
                result += [emit_fma(builder, value, column, tile[r * vecs + v]) for v, column in enumerate(columns)]
            return result

        for place, total in zip(places, _repeated(builder, count, start, step), strict=True):
            store_at(builder, total, out, place)

    return tile_product


def _settled(builder: Any, pointer: Any) -> Any:
    """A pointer whose origin LLVM forgets. It would find each row's place from the one before it at every step, and
    the additions would take the time of multiply-adds."""
    return builder.asm(ir.FunctionType(pointer.type, [pointer.type]), "", "=r,0", [pointer], False)


def _repeated(builder: Any, count: Any, start: list[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """`values = step(k, values)` for k < count, from `start`; the values live in registers."""
    before, body, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", count, const(I64, 0)), body, after)
    builder.position_at_end(body)
    k, values = builder.phi(I64), [builder.phi(value.type) for value in start]
    stepped = step(k, values)
    following, end = builder.add(k, const(I64, 1)), builder.block
    builder.cbranch(builder.icmp_signed("<", following, count), body, after)
    builder.position_at_end(after)
    results = [builder.phi(value.type) for value in start]
    for phi, first, next_value in zip((k, *values), (const(I64, 0), *start), (following, *stepped), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(next_value, end)
    for phi, first, last in zip(results, start, stepped, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, end)
    return results


_wide, _narrow = _product(TILE_ROWS, TILE_VECS), _product(TILE_ROWS, 1)
_row_wide, _row_narrow = _product(1, TILE_VECS), _product(1, 1)


@inlined
def product(a, a_at, a_row, a_k, rows, b, b_at, b_k, b_vec, vecs, count, out, out_at, out_row, onto):
    """out[r, 16 v ..] (+)= sum over k of a[r, k] * b[k, 16 v ..] for r < rows, v < vecs, k < count.

    a[r, k] stands at a_at + r * a_row + k * a_k; vector v of b's row k at b_at + k * b_k + v * b_vec; vector v of
    out's row r at out_at + r * out_row + 16 v. `onto` adds to what out holds, going on with its chains.
    """
    k = 0
    while k == 0 or k < count:
        depth = min(DEPTH, count - k)
        v = 0
        while v < vecs:
            wide = v + TILE_VECS <= vecs
            b_v, out_v = b_at + k * b_k + v * b_vec, out_at + v * LANES
            r = 0
            while r < rows:
                a_r, out_r = a_at + k * a_k + r * a_row, out_v + r * out_row
                if r + TILE_ROWS <= rows:
                    if wide:
                        _wide(a, a_r, a_row, a_k, b, b_v, b_k, b_vec, depth, out, out_r, out_row, onto or k > 0)
                    else:
                        _narrow(a, a_r, a_row, a_k, b, b_v, b_k, b_vec, depth, out, out_r, out_row, onto or k > 0)
                    r += TILE_ROWS
                else:
                    if wide:
                        _row_wide(a, a_r, a_row, a_k, b, b_v, b_k, b_vec, depth, out, out_r, out_row, onto or k > 0)
                    else:
                        _row_narrow(a, a_r, a_row, a_k, b, b_v, b_k, b_vec, depth, out, out_r, out_row, onto or k > 0)
                    r += 1
            v += TILE_VECS if wide else 1
        k += DEPTH


_pairs, _row_pairs = _product(TILE_ROWS, 1, True), _product(1, 1, True)


@inlined
def product_of_pairs(a, a_at, a_row, a_k, rows, b, b_at, b_k, count, out, out_at, out_row):
    """out[r, 0 .. 16] = sum over k < count of a[r, k] * b[k, 0 .. 16] for r < rows, as `product`, where a[r, k] is two
    numbers: one for even columns and one for odd ones."""
    for k in range(0, count, DEPTH):
        depth = min(DEPTH, count - k)
        a_k0, b_k0, r = a_at + k * a_k, b_at + k * b_k, 0
        while r + TILE_ROWS <= rows:
            _pairs(a, a_k0 + r * a_row, a_row, a_k, b, b_k0, b_k, 0, depth, out, out_at + r * out_row, out_row, k > 0)
            r += TILE_ROWS
        while r < rows:
            _row_pairs(
                a, a_k0 + r * a_row, a_row, a_k, b, b_k0, b_k, 0, depth, out, out_at + r * out_row, out_row, k > 0
            )
            r += 1


@instruction(types.void, ARRAY, types.intp, types.intp, ARRAY, types.intp)
def transpose(builder: Any, data: Any, at: Any, row_stride: Any, out: Any, out_at: Any) -> None:
    """Sixteen rows of sixteen floats, `row_stride` apart, to their transpose, sixteen apart."""
    rows = [load_at(builder, data, ahead(builder, at, row_stride, r), VECTOR_F32) for r in range(LANES)]
    for r, values in enumerate(transposed(builder, rows)):
        store_at(builder, values, out, ahead(builder, out_at, LANES, r))


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen vectors of sixteen floats, rows made columns."""
    rows = list(rows)
    for bit in (1, 2, 4, 8):
        # Swap what stands off the diagonal in every 2 x 2 arrangement of bit x bit blocks.
        upper = pick([lane if not lane & bit else LANES + lane - bit for lane in range(LANES)])
        lower = pick([lane + bit if not lane & bit else LANES + lane for lane in range(LANES)])
        for r in range(LANES):
            if not r & bit:
                x, y = rows[r], rows[r + bit]
                rows[r] = builder.shuffle_vector(x, y, upper)
                rows[r + bit] = builder.shuffle_vector(x, y, lower)
    return rows
