"""Products of many rows with packed weights: each weight is decoded beside the product that reads it, and never whole.

    unit     thirty-two rows of one weight, decoded and turned panel by panel, times all rows of x of that weight
    tile     eight rows of x times a panel; after the last panel written to y

Rows of x are read where they stand. Every element is one chain of multiply-adds along K, in the order of x. Its bits do
not depend on the other rows, but they are not those of the row kernel, which sums along K in sixteen lanes.

`decode_rows` and `turn_plain` are for `hyper_panels`, which holds a weight decoded and turns rows of x instead.

T rows of x, N outputs, K inputs (a multiple of 32), J weights, P products sorted by weight.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange, types

from rorqual.formats.weights import TILE, Weight
from rorqual.ops.fast.kernel import inlined, kernel
from rorqual.ops.fast.row_kernels import address, part
from rorqual.ops.fast.row_vectors import BF16, FP4, FP8, FP32, Array, expand_blocks
from rorqual.ops.fast.tiles import transposed
from rorqual.ops.fast.vectors import ARRAY, I64, LANES, VECTOR_F32, ahead, instruction, load, load_at, store, store_at
from rorqual.ops.fast.weight_panels import DEPTH, ROWS, WIDTH, multiply_half, multiply_tile, room_floats, turn_weights

SPARE = LANES
"""Floats between decoded rows, so that rows of 2^n floats do not share the same few lines of the first cache."""

_FP4_MARKER, _FP8_MARKER, _BF16_MARKER, _FP32_MARKER = FP4.marker, FP8.marker, BF16.marker, FP32.marker
_FP4_CODE, _FP8_CODE, _BF16_CODE = FP4.code, FP8.code, BF16.code


@instruction(types.void, ARRAY, ARRAY, types.intp, types.intp, types.intp, ARRAY, types.intp)
def turn_plain(builder: Any, x: Any, index: Any, at: Any, stride: Any, column: Any, out: Any, out_at: Any) -> None:
    """Sixteen columns of sixteen rows, turned: (x, index, at, stride, column, out, out_at)."""
    rows = []
    for r in range(LANES):
        row = load_at(builder, index, ahead(builder, at, 1, r), I64)
        place = builder.add(builder.mul(row, stride), column)
        rows.append(load_at(builder, x, place, VECTOR_F32))
    for r, values in enumerate(transposed(builder, rows)):
        store_at(builder, values, out, ahead(builder, out_at, LANES, r))


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
def _write(room, sums, rows, have, y, to, width):
    """Sums of `rows` rows and `have` outputs to y, whose rows are `width` apart."""
    for r in range(rows):
        for i in range(0, have - have % LANES, LANES):
            store(y, to + r * width + i, load(room, sums + r * WIDTH + i))
        for i in range(have - have % LANES, have):
            y[to + r * width + i] = room[sums + r * WIDTH + i]


@kernel(
    "void(UniTuple(int64, 3), int64[::1], int64[::1], int64, int64, int64[::1], int64[::1], float32[::1], int64[::1],"
    " boolean, float32[::1], float32[::1], int64, int64)",
    parallel=True,
)
def _multiply(form, w_J, s_J, n, k, first_J, last_J, x, row_P, plain, y, room, cuts, parts):
    chunks = (n + WIDTH - 1) // WIDTH
    for share in prange(parts):
        panel = share * (room.size // parts)
        sums, kept = panel + WIDTH * DEPTH, WIDTH if k > DEPTH else 0
        # Neighbours of one weight go to different threads: weights differ in how many rows they have.
        for unit in range(share, chunks * w_J.size * cuts, parts):
            j, row0 = unit // cuts // chunks, unit // cuts % chunks * WIDTH
            tiles, cut = (last_J[j] - first_J[j] + ROWS - 1) // ROWS, unit % cuts
            start = first_J[j] + tiles * cut // cuts * ROWS
            end = min(last_J[j], first_J[j] + tiles * (cut + 1) // cuts * ROWS)
            have = min(WIDTH, n - row0)
            for k0 in range(0, k if start < end else 0, DEPTH):
                depth = min(DEPTH, k - k0)
                for half in range(0, have, LANES):
                    rows, to = min(LANES, have - half), address(room) + 4 * (panel + half)
                    turn_weights(form, w_J[j], s_J[j], k, row0 + half, rows, k0, depth, plain, to)
                for p in range(start, end, ROWS):
                    tile = sums + (p - start) * kept
                    if have > LANES:
                        multiply_tile(x, row_P, p, end - 1, k, k0, room, panel, tile, depth, k0 > 0)
                    else:
                        multiply_half(x, row_P, p, end - 1, k, k0, room, panel, tile, depth, k0 > 0)
                    if k0 + depth == k:
                        _write(room, tile, min(ROWS, end - p), have, y, p * n + row0, n)


KERNELS = (_multiply,)


class Rows(NamedTuple):
    """Rows of x for the products of each weight in turn."""

    x: Array
    """fp32 [T, K], flat."""
    row: Array
    """int64 [P]: of x, for each product."""
    plain: bool
    """x is in plain order, also where weights are decoded in lane order."""
    first: Array
    """int64 [J]: of each weight, the first product."""
    last: Array
    """int64 [J]: past the last."""


def fits(weight: Weight) -> bool:
    """Whether the kernels take a weight of this shape."""
    return weight.shape[1] % TILE == 0


def pack_panels(x_TK: Array, row_P: Array, first_J: Array, last_J: Array, paired: bool, parts: int) -> Rows:
    """Rows row_P[first_J[j] .. last_J[j]] of x for weight j, for every j. Nothing is copied.

    Args:
        x_TK: fp32, contiguous.
        row_P: int64; first_J and last_J too.
        paired: x is in plain order and the weight in lane order.
        parts: as the kernels take it; packing needs none.
    """
    del parts
    return Rows(x_TK.reshape(-1), row_P, paired, first_J, last_J)


def places(first_J: Array, last_J: Array) -> tuple[Array, Array]:
    """(first place of each weight [J], the product in every place [P]): products stand as they are sorted."""
    return first_J - first_J[0], np.arange(first_J[0], last_J[-1])


def multiply_panels(
    form: tuple[int, ...],
    addresses: tuple[Array, Array],
    shape: tuple[int, int],
    first_J: Array,
    last_J: Array,
    rows: Rows,
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
    units = -(-n // WIDTH) * len(first_J)
    # A weight of few outputs is decoded again for each of some cuts of the rows, so that every thread has its share.
    cuts = 1 if parts == 1 or units >= 4 * parts else -(-4 * parts // units)
    room = room_of(int((last_J - first_J).max()), k, parts)
    inputs = form, *addresses, n, k, first_J, last_J, rows.x, rows.row, rows.plain
    _multiply(*inputs, y_PN.reshape(-1), room, cuts, parts, tasks=parts)


def room_of(rows: int, k: int, parts: int) -> Array:
    """What threads turn weights and add products in; weights have up to so many rows of x. On whole cache lines."""
    return torch.empty(parts * room_floats(rows, k)).numpy()
