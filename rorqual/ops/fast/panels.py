"""Products of many rows with packed weights: each weight is decoded beside the product that reads it, and never whole.

    panels   rows of x turned to [V, K, 16]: sixteen rows side by side, the last of a weight's filled with copies
    unit     WEIGHT_ROWS rows of one weight, decoded into a thread's room, times all panels of that weight
    tile     [32 outputs, 32 rows], turned back into y

Every element is one chain of multiply-adds along K. Its bits do not depend on the other rows, but they are not those of
the row kernel, which sums along K in sixteen lanes.

T rows of x, N outputs, K inputs (a multiple of 32), J weights, P products sorted by weight, V panels of sixteen.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import prange, types

from rorqual.formats.weights import TILE, Weight
from rorqual.ops.fast.kernel import inlined, kernel
from rorqual.ops.fast.row_kernels import address, part
from rorqual.ops.fast.row_vectors import BF16, FP4, FP8, FP32, Array, expand_blocks
from rorqual.ops.fast.tiles import product, transpose, transposed
from rorqual.ops.fast.vectors import ARRAY, I64, LANES, VECTOR_F32, ahead, instruction, load, load_at, store, store_at

WEIGHT_ROWS = 32
"""Weight rows decoded at once: enough products for what they and the panels cost to read."""
SPARE = LANES
"""Floats between decoded rows, so that rows of 2^n floats do not share the same few lines of the first cache."""
_TILE_FLOATS, _TURNED = WEIGHT_ROWS * 2 * LANES, LANES * LANES

_FP4_MARKER, _FP8_MARKER, _BF16_MARKER, _FP32_MARKER = FP4.marker, FP8.marker, BF16.marker, FP32.marker
_FP4_CODE, _FP8_CODE, _BF16_CODE = FP4.code, FP8.code, BF16.code


def _turn(paired: bool) -> Any:
    """Instruction (x, index, at, stride, column, out, out_at): sixteen columns of sixteen rows, turned.

    paired: even columns first and odd ones sixteen places later, as weights are decoded.
    """

    @instruction(types.void, ARRAY, ARRAY, types.intp, types.intp, types.intp, ARRAY, types.intp)
    def turn(builder: Any, x: Any, index: Any, at: Any, stride: Any, column: Any, out: Any, out_at: Any) -> None:
        rows = []
        for r in range(LANES):
            row = load_at(builder, index, ahead(builder, at, 1, r), I64)
            place = builder.add(builder.mul(row, stride), column)
            rows.append(load_at(builder, x, place, VECTOR_F32))
        for r, values in enumerate(transposed(builder, rows)):
            place = (r >> 1) + (r & 1) * LANES if paired else r
            store_at(builder, values, out, ahead(builder, out_at, LANES, place))

    return turn


turn_plain, _turn_paired = _turn(False), _turn(True)


@kernel("void(float32[::1], int64, int64[::1], boolean, float32[::1], int64)", parallel=True)
def _pack(x, width, row_V, paired, panels, parts):
    count = row_V.size // LANES
    for share in prange(parts):
        for v in range(count * share // parts, count * (share + 1) // parts):
            for c in range(0, width, LANES):
                if paired:
                    place = c // TILE * TILE + c % TILE // 2
                    _turn_paired(x, row_V, v * LANES, width, c, panels, (v * width + place) * LANES)
                else:
                    turn_plain(x, row_V, v * LANES, width, c, panels, (v * width + c) * LANES)


@part
def decode_rows(form, w, s, k, row0, rows, target):
    """Weight rows [row0, row0 + rows) to fp32 in lane order, K + SPARE floats apart. w, s and target are addresses."""
    code, unit, scale_rows = form
    blocks, row_bytes = k // TILE, k * unit // TILE
    for row in range(row0, row0 + rows):
        codes, scales = w + row * row_bytes, s
        if scale_rows:
            scales += row // scale_rows * blocks
        if code == _FP4_CODE:
            expand_blocks(_FP4_MARKER, target, codes, scales, blocks)
        elif code == _FP8_CODE:
            expand_blocks(_FP8_MARKER, target, codes, scales, blocks)
        elif code == _BF16_CODE:
            expand_blocks(_BF16_MARKER, target, codes, scales, blocks)
        else:
            expand_blocks(_FP32_MARKER, target, codes, scales, blocks)
        target += 4 * (k + SPARE)


@inlined
def _turn_back(room, tile, turned, rows, vecs, y, y_at, width, have):
    """A tile [rows, 32] to y [have, rows], whose rows are `width` apart."""
    for v in range(vecs):
        for r in range(0, rows, LANES):
            transpose(room, tile + r * 2 * LANES + v * LANES, 2 * LANES, room, turned)
            for p in range(min(LANES, have - v * LANES)):
                to = y_at + (v * LANES + p) * width + r
                if r + LANES <= rows:
                    store(y, to, load(room, turned + p * LANES))
                else:
                    for i in range(rows - r):
                        y[to + i] = room[turned + p * LANES + i]


@kernel(
    "void(UniTuple(int64, 3), int64[::1], int64[::1], int64, int64, int64[::1], int64[::1], int64[::1],"
    " float32[::1], float32[::1], float32[::1], int64, int64)",
    parallel=True,
)
def _multiply(form, w_J, s_J, n, k, first_J, last_J, panel_J, panels, y, room, cuts, parts):
    chunks = (n + WEIGHT_ROWS - 1) // WEIGHT_ROWS
    for share in prange(parts):
        at, step = share * (room.size // parts), k + SPARE
        tile = at + WEIGHT_ROWS * step
        # Neighbours of one weight go to different threads: weights differ in how many rows they have.
        for unit in range(share, chunks * w_J.size * cuts, parts):
            j, row0 = unit // cuts // chunks, unit // cuts % chunks * WEIGHT_ROWS
            rows = min(WEIGHT_ROWS, n - row0)
            pairs, cut = (last_J[j] - first_J[j] + 2 * LANES - 1) // (2 * LANES), unit % cuts
            start = first_J[j] + pairs * cut // cuts * 2 * LANES
            end = min(last_J[j], first_J[j] + pairs * (cut + 1) // cuts * 2 * LANES)
            if start < end:
                decode_rows(form, w_J[j], s_J[j], k, row0, rows, address(room) + 4 * at)
            for p in range(start, end, 2 * LANES):
                have = min(2 * LANES, end - p)
                vecs, b_at = (have + LANES - 1) // LANES, (panel_J[j] + (p - first_J[j]) // LANES) * k * LANES
                product(room, at, step, 1, rows, panels, b_at, LANES, k * LANES, vecs, k, room, tile, 2 * LANES, False)
                _turn_back(room, tile, tile + _TILE_FLOATS, rows, vecs, y, p * n + row0, n, have)


KERNELS = (_pack, _multiply)


class Panels(NamedTuple):
    """Rows of x as kernels read them, for the products of each weight in turn."""

    values: Array
    """fp32 [V, K, 16], flat."""
    first: Array
    """int64 [J]: of each weight's first panel."""


def fits(weight: Weight) -> bool:
    """Whether the kernels take a weight of this shape."""
    return weight.shape[1] % TILE == 0


def pack_panels(x_TK: Array, row_P: Array, first_J: Array, last_J: Array, paired: bool, parts: int) -> Panels:
    """Rows row_P[first_J[j] .. last_J[j]] of x for weight j, for every j.

    Args:
        x_TK: fp32, contiguous.
        row_P: int64; first_J and last_J too.
        paired: x is in plain order and the weight in lane order.
    """
    if len(first_J) == 1 and len(row_P) % LANES == 0:
        panel_J, lanes = first_J, np.arange(len(row_P))
    else:
        panel_J, lanes = places(first_J, last_J)
    values = np.empty(len(lanes) * x_TK.shape[1], np.float32)
    _pack(x_TK.reshape(-1), x_TK.shape[1], row_P[lanes], paired, values, parts, tasks=parts)
    return Panels(values, panel_J)


def places(first_J: Array, last_J: Array) -> tuple[Array, Array]:
    """(first panel of each weight [J], the product in every lane [16 V]); spare lanes repeat the weight's last."""
    counts = -(-(last_J - first_J) // LANES)
    panel_J = np.cumsum(counts) - counts
    weight_V = np.repeat(np.arange(len(counts)), counts)
    start_V = first_J[weight_V] + (np.arange(len(weight_V)) - panel_J[weight_V]) * LANES
    lanes = np.minimum(start_V[:, None] + np.arange(LANES), last_J[weight_V][:, None] - 1)
    return panel_J, lanes.reshape(-1)


def multiply_panels(
    form: tuple[int, ...],
    addresses: tuple[Array, Array],
    shape: tuple[int, int],
    first_J: Array,
    last_J: Array,
    panels: Panels,
    y_PN: Array,
    parts: int,
) -> None:
    """y_PN[p] = weights[j] @ x of p, for p in [first_J[j], last_J[j]).

    Args:
        form: of the `Kind`.
        addresses: int64 [J] each, of codes and scales.
        y_PN: fp32, contiguous, written.
    """
    n, k = shape
    units = -(-n // WEIGHT_ROWS) * len(first_J)
    # A weight of few outputs is decoded again for each of some cuts of the rows, so that every thread has its share.
    cuts = 1 if parts == 1 or units >= 4 * parts else -(-4 * parts // units)
    inputs = form, *addresses, n, k, first_J, last_J, panels.first, panels.values
    _multiply(*inputs, y_PN.reshape(-1), room_of(k, parts), cuts, parts, tasks=parts)


def room_of(k: int, parts: int) -> Array:
    """What threads decode and multiply in."""
    return np.empty(parts * (WEIGHT_ROWS * (k + SPARE) + _TILE_FLOATS + _TURNED), np.float32)
