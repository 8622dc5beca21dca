"""Panels of weights: thirty-two rows side by side, decoded and turned for products with any rows of x.

    panel   [depth, 32] of some inputs: what rows of x are multiplied by, and small enough for the first cache
    tile    eight rows of x times a panel, [8, 32], accumulated in registers

Rows of x are read where they stand, through an index. Every element is one chain of multiply-adds along K.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rorqual.formats.fp4 import E2M1_BY_BYTE
from rorqual.formats.weights import TILE
from rorqual.ops.fast.row_kernels import part
from rorqual.ops.fast.row_vectors import BF16, FP4, FP8, FP32, KINDS
from rorqual.ops.fast.tiles import transposed
from rorqual.ops.fast.vectors import (
    ARRAY,
    I64,
    LANES,
    VECTOR_F32,
    VECTOR_I32,
    ahead,
    broadcast,
    call,
    const,
    emit_fma,
    instruction,
    load_at,
    store_at,
)

# Numba's own modules are typed too loosely for typed code.
_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic
_cgutils: Any = cgutils

WIDTH = 2 * LANES
"""Weight rows of a panel."""
DEPTH = 256
"""Inputs of a panel: 32 KiB beside the rows of x that pass."""
ROWS = 8
"""Rows of x of a tile."""
_STEPS = 4
"""Inputs that the loop of a tile takes at once; TILE is a multiple."""
_CODES = 8
"""FP4 codes of 32 bits."""
_WIDE = LANES * _CODES
"""Inputs whose codes fill a vector, FP4."""

_FP4_MARKER, _FP8_MARKER, _BF16_MARKER, _FP32_MARKER = FP4.marker, FP8.marker, BF16.marker, FP32.marker
_FP4_CODE, _FP8_CODE, _BF16_CODE = FP4.code, FP8.code, BF16.code


def _rows_at(b: Any, address: Any, step: Any, have: Any) -> list[Any]:
    """Addresses of sixteen weight rows; those past `have` repeat the last one."""
    last = b.sub(have, const(I64, 1))
    rows = (b.select(b.icmp_signed("<", const(I64, r), last), const(I64, r), last) for r in range(LANES))
    return [b.add(address, b.mul(row, step)) for row in rows]


def _vector_at(b: Any, address: Any, kind: Any) -> Any:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=1)


class _Places:
    """Where the inputs of a block stand in a panel: in plain order, or in lane order, even ones first."""

    def __init__(self, b: Any, plain: Any) -> None:
        line = 4 * WIDTH
        self._b = b
        self._even = b.select(plain, const(I64, 2 * line), const(I64, line))
        self._odd = b.select(plain, const(I64, line), const(I64, LANES * line))

    def store(self, values: Any, block: Any, i: int) -> None:
        """Input i of the block that starts at an address."""
        b = self._b
        address = b.add(block, b.add(b.mul(self._even, const(I64, i // 2)), b.mul(self._odd, const(I64, i % 2))))
        b.store(values, b.inttoptr(address, VECTOR_F32.as_pointer()), align=4)


@_intrinsic
def _turn_blocks(
    context: Any, marker: Any, out: Any, w: Any, w_step: Any, s: Any, s_step: Any, have: Any, blocks: Any, plain: Any
) -> Any:
    """Decode blocks of sixteen weight rows to half of a panel. Addresses, and byte steps between rows.

    plain: put the inputs into plain order, and do not leave them in the weight's.
    """
    kind = KINDS[str(marker.dtype)]

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _, out, w, w_step, s, s_step, have, blocks, plain = args
        w_N, s_N, places = _rows_at(b, w, w_step, have), _rows_at(b, s, s_step, have), _Places(b, plain)
        with _cgutils.for_range(b, blocks) as loop:
            target = b.add(out, b.mul(loop.index, const(I64, 4 * WIDTH * TILE)))
            for half in range(2):
                rows = []
                for w_row, s_row in zip(w_N, s_N, strict=True):
                    codes = b.add(w_row, b.mul(loop.index, const(I64, kind.unit)))
                    rows.append(kind.decode(b, codes, kind.scale(b, s_row, loop.index))[half])
                for i, values in enumerate(transposed(b, rows)):
                    # fp32 weights are in plain order.
                    places.store(values, target, LANES * half + i if kind is FP32 else 2 * i + half)
        return context.get_dummy_value()

    return types.void(marker, *[types.int64] * 7, types.boolean), emit


@_intrinsic
def _turn_fp4(
    context: Any, out: Any, w: Any, w_step: Any, s: Any, s_step: Any, have: Any, count: Any, plain: Any
) -> Any:
    """As `_turn_blocks`, `count` times four blocks: codes are turned by eight at once, before they are decoded."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, w, w_step, s, s_step, have, count, plain = args
        w_N, s_N, places = _rows_at(b, w, w_step, have), _rows_at(b, s, s_step, have), _Places(b, plain)
        table, blocks = ir.Constant(VECTOR_F32, E2M1_BY_BYTE[:16, 0].tolist()), _WIDE // TILE
        held = _cgutils.alloca_once(b, VECTOR_F32, size=blocks)
        lanes = b.bitcast(held, ir.FloatType().as_pointer())
        with _cgutils.for_range(b, count) as loop:
            first = b.mul(loop.index, const(I64, blocks))
            for block in range(blocks):
                for r, s_row in enumerate(s_N):
                    scale = b.extract_element(
                        FP4.scale(b, s_row, b.add(first, const(I64, block))), const(ir.IntType(32), 0)
                    )
                    b.store(scale, b.gep(lanes, [const(I64, block * LANES + r)]))
            rows = [_vector_at(b, b.add(w_row, b.mul(first, const(I64, FP4.unit))), VECTOR_F32) for w_row in w_N]
            scales = [b.load(b.gep(held, [const(I64, block)])) for block in range(blocks)]
            target = b.add(out, b.mul(first, const(I64, 4 * WIDTH * TILE)))
            for d, turned in enumerate(transposed(b, rows)):
                codes, block = b.bitcast(turned, VECTOR_I32), d * _CODES // TILE
                start = b.add(target, const(I64, 4 * WIDTH * TILE * block))
                for i in range(_CODES):
                    # A lookup reads the low four bits of its index only.
                    index = b.lshr(codes, const(VECTOR_I32, 4 * i))
                    values = call(b, "llvm.x86.avx512.permvar.sf.512", VECTOR_F32, table, index)
                    places.store(b.fmul(values, scales[block]), start, d * _CODES % TILE + i)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, types.boolean), emit


@part
def turn_weights(form, w, s, k, row0, have, k0, depth, plain, target):
    """Inputs [k0, k0 + depth) of weight rows [row0, row0 + have) to half of a panel, whose other lanes hold repeats.

    w, s and target are addresses; depth is a multiple of 32; `have` is at most 16, and row0 a multiple.
    plain: as `_turn_blocks`.
    """
    code, unit, scale_rows = form
    blocks, w_step, s_step = depth // TILE, k * unit // TILE, k // TILE
    w += row0 * w_step + k0 * unit // TILE
    if scale_rows:
        s += row0 // scale_rows * s_step + k0 // TILE
    if scale_rows != 1:
        s_step = 0
    if code == _FP4_CODE:
        wide = depth // _WIDE
        _turn_fp4(target, w, w_step, s, s_step, have, wide, plain)
        done = wide * (_WIDE // TILE)
        w, s, target = w + done * unit, s + done, target + 4 * WIDTH * TILE * done
        _turn_blocks(_FP4_MARKER, target, w, w_step, s, s_step, have, blocks - done, plain)
    elif code == _FP8_CODE:
        _turn_blocks(_FP8_MARKER, target, w, w_step, s, s_step, have, blocks, plain)
    elif code == _BF16_CODE:
        _turn_blocks(_BF16_MARKER, target, w, w_step, s, s_step, have, blocks, plain)
    else:
        _turn_blocks(_FP32_MARKER, target, w, w_step, s, s_step, have, blocks, True)


def _tile(vecs: int) -> Any:
    """Instruction: eight rows of x times a panel, or times the first half of one, as `multiply_tile` says."""

    @instruction(
        types.void, ARRAY, ARRAY, types.intp, types.intp, types.intp, types.intp, ARRAY, types.intp, types.intp,
        types.intp, types.boolean,
    )  # fmt: skip
    def tile(
        builder: Any, x: Any, index: Any, first: Any, last: Any, k: Any, k0: Any, room: Any, panel: Any, sums: Any,
        depth: Any, onto: Any,
    ) -> None:  # fmt: skip
        x_R = []
        for r in range(ROWS):
            at = ahead(builder, first, 1, r)
            row = load_at(builder, index, builder.select(builder.icmp_signed("<", at, last), at, last), I64)
            x_R.append(builder.gep(x, [builder.add(builder.mul(row, k), k0)]))
        places = [ahead(builder, sums, 1, r * WIDTH + v * LANES) for r in range(ROWS) for v in range(vecs)]
        slots = [_cgutils.alloca_once_value(builder, const(VECTOR_F32, 0.0)) for _ in places]
        with builder.if_then(onto):
            for slot, place in zip(slots, places, strict=True):
                builder.store(load_at(builder, room, place, VECTOR_F32), slot)
        with _cgutils.for_range(builder, builder.sdiv(depth, const(I64, _STEPS))) as loop:
            for step in range(_STEPS):
                input_ = ahead(builder, builder.mul(loop.index, const(I64, _STEPS)), 1, step)
                at = builder.add(panel, builder.mul(input_, const(I64, WIDTH)))
                columns = [load_at(builder, room, ahead(builder, at, LANES, v), VECTOR_F32) for v in range(vecs)]
                for r, row in enumerate(x_R):
                    value = broadcast(builder, load_at(builder, row, input_, ir.FloatType()), VECTOR_F32)
                    for slot, column in zip(slots[vecs * r : vecs * (r + 1)], columns, strict=True):
                        builder.store(emit_fma(builder, value, column, builder.load(slot)), slot)
        for slot, place in zip(slots, places, strict=True):
            store_at(builder, builder.load(slot), room, place)

    return tile


multiply_tile, multiply_half = _tile(2), _tile(1)
"""sums [8, 32] (+)= x[index[p], k0 .. k0 + depth] @ panel for eight p from `first`; those past `last` repeat it.

Arguments (x, index, first, last, k, k0, room, panel, sums, depth, onto): rows of x stand k apart; panel and sums are
places in room; depth is a multiple of 32; `onto` goes on with the chains that sums hold.
"""


def room_floats(rows: int, k: int) -> int:
    """fp32 values that a thread needs: a panel, and the sums of so many rows, or of one tile where no panel follows."""
    return WIDTH * (DEPTH + (-(-rows // ROWS) if k > DEPTH else 1) * ROWS)
