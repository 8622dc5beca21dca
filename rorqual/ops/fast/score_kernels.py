"""Index-score kernels: what they share, and the one in fp32 vectors, for CPUs that `score_bytes` does not know.

Sums have the order that `rorqual.ops.reference.index_scores` states: exact within a block of 32 channels, blocks from
the left, heads by lanes of sixteen. A block of keys is decoded once for a chunk of rows. In fp32 a block is a chain of
multiply-adds of dequantised values.

Kernel arguments, arrays flat (R rows, P panels of 16 heads, D channels, B blocks of 32, G groups):
    query    codes [R, 16 P, D/2], scales [R, 16 P, B], w [R, 16 P], visible [R]
    keys     index [R, G] of groups, or empty: then groups [group0, group0 + G); group0; G
    region   see `decode.region_arrays`
Queries are turned to panels [R, P, D, 16].
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from rorqual.ops.fast.decode import (
    BLOCK,
    CODE_BYTES,
    E8M0,
    ENTRIES,
    LINE,
    REGION,
    SCALE_BYTES,
    decode_row,
    e2m1_block,
    locate,
    locate_slot,
)
from rorqual.ops.fast.kernel import allocating, inlined, kernel
from rorqual.ops.fast.tiles import (
    TILE_ROWS,
    TILE_VECS,
    multiply_add,
    plus,
    transpose,
    weigh,
    write_lane_sums,
    zeros,
)
from rorqual.ops.fast.vectors import LANES, multiply, prefetch, splat, store

KEYS = 48
"""Keys decoded together: a multiple of every tile's rows, and within the first cache as fp32."""
ROWS = 64
"""Rows scored against one decoding of a block of keys."""

SIGNATURE = (
    "void(Tuple((uint8[::1], uint8[::1], float32[::1], int64[::1])), Tuple((int64[::1], int64, int64)),"
    f" {REGION}, int64, boolean, int64, float32[::1])"
)

HIDDEN = np.float32(-np.inf)


@inlined
def unit_of(unit, rows, keys):
    """(first row, last row, first key, keys) of a piece of work: KEYS keys, and ROWS rows unless each has its own."""
    index, _, count = keys
    chunk = 1 if index.size > 0 else ROWS
    chunks = (rows + chunk - 1) // chunk
    first, start = unit % chunks * chunk, unit // chunks * KEYS
    return first, min(first + chunk, rows), start, min(KEYS, count - start)


@inlined
def units(rows, keys):
    """How many pieces of work there are."""
    index, _, count = keys
    chunk = 1 if index.size > 0 else ROWS
    return (rows + chunk - 1) // chunk * ((count + KEYS - 1) // KEYS)


@inlined
def reach(visible, keys, row, start, n):
    """How many of the n keys from `start` a row sees."""
    index, group0, _ = keys
    return n if index.size > 0 else min(n, visible[row] - group0 - start)


@inlined
def ask(pool, codes_at, first, last):
    """Ask for the codes of some of the keys that `find` found."""
    for i in range(first, min(last, codes_at.size)):
        prefetch(pool, codes_at[i])


@inlined
def find(unit, rows, region, keys, visible, codes_at, scales_at):
    """Where the keys of a piece of work stand that some row of it sees, -1 where an index is; how many there are.

    Their scales are asked of memory. The others must not be read: their pages may hold anything. Past the last piece
    there are none.
    """
    pool, geometry, table, _ = region
    index, group0, count = keys
    if unit >= units(rows, keys):
        return 0
    first, last, start, n = unit_of(unit, rows, keys)
    most = 0
    for row in range(first, last):
        most = max(most, reach(visible, keys, row, start, n))
    if index.size > 0:
        for i in range(most):
            codes_at[i], scales_at[i] = -1, -1
            group = index[first * count + start + i]
            if group >= 0:
                codes_at[i], scales_at[i] = locate(geometry, table, group)
                prefetch(pool, scales_at[i])
    else:
        i, entries = 0, geometry[ENTRIES]
        while i < most:
            page = (group0 + start + i) // entries
            slot = group0 + start + i - page * entries
            codes, scales = locate_slot(geometry, table[page], slot)
            run = min(most - i, entries - slot)
            for j in range(run):
                codes_at[i + j] = codes + j * geometry[CODE_BYTES]
                scales_at[i + j] = scales + j * geometry[SCALE_BYTES]
            for line in range(scales, scales + run * geometry[SCALE_BYTES], LINE):
                prefetch(pool, line)
            i += run
    return most


@inlined
def emit(found, seen, n, keys, row, start, out):
    """One row's scores of a block to their place, -inf where hidden or absent."""
    index, _, count = keys
    at = row * count + start
    row_out = out[at : at + n]
    for i in range(n):
        row_out[i] = found[i] if i < seen else HIDDEN
    if index.size > 0:
        for i in range(n):
            if index[at + i] < 0:
                row_out[i] = HIDDEN


def _vector_panels(vecs: int) -> Any:
    """Part: add `vecs` panels' weighted dots to the lanes of a tile of keys."""
    tile_zeros, tile_plus = zeros(TILE_ROWS, vecs), plus(TILE_ROWS, vecs)
    update, tile_weigh = multiply_add(TILE_ROWS, vecs), weigh(TILE_ROWS, vecs)

    @inlined
    def panels(lanes, keys, key, q, panel, w, width, native):
        key_at, q_at = key * width, panel * width * LANES
        total = tile_zeros()
        for b in range(0, width, BLOCK):
            dots = tile_zeros()
            for d in range(b, b + BLOCK):
                dots = update(dots, keys, key_at + d, width, q, q_at + d * LANES, width * LANES)
            total = tile_plus(total, dots)
        return tile_weigh(lanes, total, w, panel * LANES, native)

    return panels


def row_scores(several: Any, one: Any, rows: int, vecs: int) -> Any:
    """Part: scores of one row against the first n keys, `rows` of them at a time; on the way it asks for the codes of
    as many that stand at `ahead`.

    Args:
        several, one: parts that add the weighted dots of `vecs` panels, or of one, with a tile of keys to its lanes.
    """
    start_lanes, write = zeros(rows, 1), write_lane_sums(rows)

    @inlined
    def scores(keys, n, q, row, panels, w, width, native, found, pool, ahead):
        for key in range(0, n, rows):
            ask(pool, ahead, key, key + rows)
            lanes = start_lanes()
            p, last = row * panels, (row + 1) * panels
            while p < last:
                if p + vecs <= last:
                    lanes = several(lanes, keys, key, q, p, w, width, native)
                    p += vecs
                else:
                    lanes = one(lanes, keys, key, q, p, w, width, native)
                    p += 1
            write(lanes, found, key, native)

    return scores


_vector_row = row_scores(_vector_panels(TILE_VECS), _vector_panels(1), TILE_ROWS, TILE_VECS)


@inlined
def _vector_query(query, panel, width, scratch, q):
    """One panel's queries, dequantised, sixteen heads side by side; `scratch` is [16, D]."""
    codes, scales, _, _ = query
    for lane in range(LANES):
        head = panel * LANES + lane
        for b in range(width // BLOCK):
            first, second = e2m1_block(codes, head * width // 2 + b * LANES)
            scale = splat(E8M0[scales[head * (width // BLOCK) + b]])
            store(scratch, lane * width + b * BLOCK, multiply(first, scale))
            store(scratch, lane * width + b * BLOCK + LANES, multiply(second, scale))
    for d in range(0, width, LANES):
        transpose(scratch, d, width, q, (panel * width + d) * LANES)


@allocating
def _vector_task(task, tasks, query, q, keys, region, rows, native, out):
    _, _, w, visible = query
    panels, width = w.size // (rows * LANES), region[1][CODE_BYTES] * 2
    decoded, found = np.empty(KEYS * width, np.float32), np.empty(KEYS, np.float32)
    codes_at, scales_at = np.empty(KEYS, np.int64), np.empty(KEYS, np.int64)
    for unit in range(task, units(rows, keys), tasks):
        first, last, start, n = unit_of(unit, rows, keys)
        many = find(unit, rows, region, keys, visible, codes_at, scales_at)
        ask(region[0], codes_at, 0, many)
        for i in range(many):
            if codes_at[i] >= 0:
                decode_row(region, codes_at[i], scales_at[i], width, decoded, i * width)
        for row in range(first, last):
            seen = reach(visible, keys, row, start, n)
            _vector_row(decoded, seen, q, row, panels, w, width, native, found, region[0], codes_at[:0])
            emit(found, seen, n, keys, row, start, out)


@kernel(SIGNATURE, parallel=True)
def score_vector(query, keys, region, rows, native, tasks, out):
    width, heads = region[1][CODE_BYTES] * 2, query[2].size
    q, scratch = np.empty(heads * width, np.float32), np.empty(LANES * width, np.float32)
    for panel in range(heads // LANES):
        _vector_query(query, panel, width, scratch, q)
    for task in prange(tasks):
        _vector_task(task, tasks, query, q, keys, region, rows, native, out)
