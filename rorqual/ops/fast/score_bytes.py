"""Index-score kernels on integers (x86): a block of 32 channels is an exact sum of products of bytes.

    vnni     four products an instruction (`vpdpbusd`)
    pairs    two (`vpmaddubsw`), for CPUs without it: the `vector` path on x86

A key is *level* when the scales of its four blocks lie within three binades: its values, each block's shifted up to
the least scale, are then bytes of one scale. So is a head of a query. Where both are, q . k is one integer below 2^24
times a power of two. Every sum of its parts is exact, so blocks may be summed together; and rounding does not see a
power of two, so scales may wait: a query's is in its head's weight, a key's multiplies the score. Scales and weights
keep to ranges in which nothing overflows or becomes subnormal. Other keys, and rows that have another head, are taken
block by block: an integer, then one multiply-add with both scales.

Arguments, and the order of sums, are those of `score_kernels`. Queries are turned to panels [R, P, B, 8, 16, 4]: the
even elements of a block, then the odd ones. A key has its even elements first, of all blocks, then the odd ones.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from rorqual.ops.fast.byte_tiles import (
    KEY_TABLES,
    LEAST_SCALE,
    MOST_SCALE,
    MOST_SHIFT,
    PAIRS,
    TOGETHER,
    VNNI,
    Products,
    add_scaled,
    dot_bytes,
    key_bytes,
    level_keys,
    query_bytes,
    start_rows,
    weigh_integers,
    word_at,
)
from rorqual.ops.fast.decode import CODE_BYTES, E8M0, LINE
from rorqual.ops.fast.kernel import allocating, inlined, kernel, spliced
from rorqual.ops.fast.score_kernels import HIDDEN, KEYS, SIGNATURE, ask, find, reach, row_scores, unit_of, units
from rorqual.ops.fast.tiles import WIDE, weigh, write_lane_sums, zeros
from rorqual.ops.fast.vectors import LANES

STEPS = 4
"""Steps of four bytes in half a block."""
AHEAD = 2
"""Pieces of work whose keys are asked of memory before they are read: one is done sooner than memory answers."""
LEVEL_ROWS, LEVEL_VECS = 12, 2
LEVEL_WIDTH = 2 * TOGETHER * LANES
"""Channels of level keys."""
BLOCK_ROWS, BLOCK_VECS = (4, 2) if WIDE else (2, 1)

LEAST_WEIGHT, MOST_WEIGHT = np.float32(2.0**-40), np.float32(2.0**30)
"""Weights of level rows, unless they are 0."""

_QUARTER = np.float32(0.25)


@inlined
def level_of(scales, at, blocks):
    """The least scale byte of a level head, or 0: not level."""
    least, most = np.int64(scales[at]), np.int64(scales[at])
    for b in range(1, blocks):
        scale = np.int64(scales[at + b])
        least, most = min(least, scale), max(most, scale)
    inside = least >= LEAST_SCALE and most <= MOST_SCALE and most - least <= MOST_SHIFT
    return least if inside and blocks == TOGETHER else 0


@inlined
def level_row(query, row, heads, blocks):
    """Whether every head of a row is level, with a weight in range."""
    _, scales, w, _ = query
    for head in range(row * heads, (row + 1) * heads):
        size = abs(w[head])
        if not (size == 0 or (size >= LEAST_WEIGHT and size <= MOST_WEIGHT)):
            return False
        if level_of(scales, head * blocks, blocks) == 0:
            return False
    return True


_key_blocks, _key_block = key_bytes(TOGETHER), key_bytes(1)


@inlined
def _decode_key(pool, codes_at, blocks, keys, at):
    """One key's bytes, not shifted."""
    b = 0
    while b < blocks:
        source, to = codes_at + b * LANES, at + b * LANES
        if b + TOGETHER <= blocks:
            _key_blocks(pool, source, KEY_TABLES, 0, keys, to, blocks * LANES)
            b += TOGETHER
        else:
            _key_block(pool, source, KEY_TABLES, 0, keys, to, blocks * LANES)
            b += 1


def _turner(products: Products) -> Any:
    """Part: one panel's queries as signed bytes, with all that goes with them."""
    turn = query_bytes(products)

    @inlined
    def turn_panel(query, panel, blocks, level, shifts, turned):
        codes, scales, w, _ = query
        q, q_scales, corrections, wholes, weights = turned
        for lane in range(LANES):
            head = panel * LANES + lane
            least = level_of(scales, head * blocks, blocks) if level else 0
            for b in range(blocks):
                scale = np.int64(scales[head * blocks + b])
                shifts[b * LANES + lane] = scale - least if level else 0
                q_scales[(panel * blocks + b) * LANES + lane] = _QUARTER * E8M0[least if level else scale]
            weights[head] = w[head] * _QUARTER * E8M0[least] if level else np.float32(0)
            wholes[head] = 0
        for b in range(blocks):
            at, first = (panel * blocks + b) * LANES, (panel * LANES * blocks + b) * LANES
            turn(codes, first, blocks * LANES, shifts, b * LANES, q, at * 2 * LANES, corrections, at)
            for lane in range(LANES):
                wholes[panel * LANES + lane] += corrections[at + lane]

    return turn_panel


def _block_scores(products: Products, rows: int, wide: int) -> Any:
    """Part: scores of one row against the first n keys, block by block."""

    def panels_of(vecs: int) -> Any:
        tile_zeros, start, dot = zeros(rows, vecs), start_rows(rows, vecs), dot_bytes(products, rows, vecs)
        scale, tile_weigh = add_scaled(products, rows, vecs), weigh(rows, vecs)

        @inlined
        def panels(lanes, held, key, turned, panel, w, blocks, native):
            keys, key_scales = held
            q, q_scales, corrections, _, _ = turned
            half = blocks * LANES
            total, s_at, q_vec = tile_zeros(), panel * half, half * 2 * LANES
            for b in range(blocks):
                dots = start(corrections, s_at, half)
                key_at, q_at = key * 2 * half + b * LANES, s_at * 2 * LANES
                for step in range(STEPS):
                    dots = dot(dots, keys, key_at + step * 4, 2 * half, q, q_at + step * 64, q_vec)
                for step in range(STEPS):
                    dots = dot(dots, keys, key_at + half + step * 4, 2 * half, q, q_at + (STEPS + step) * 64, q_vec)
                total = scale(total, dots, key_scales, key * blocks + b, blocks, q_scales, s_at, half)
                s_at += LANES
            return tile_weigh(lanes, total, w, panel * LANES, native)

        return panels

    return row_scores(panels_of(wide), panels_of(1), rows, wide)


def _level_panels(vecs: int) -> Any:
    """Part: add `vecs` panels' weighted dots with level keys to the lanes of a tile of them."""
    start, dot = start_rows(LEVEL_ROWS, vecs), dot_bytes(VNNI, LEVEL_ROWS, vecs)
    tile_weigh = weigh_integers(LEVEL_ROWS, vecs)

    @spliced
    def panels(lanes, keys, key, turned, panel, native):
        q, _, _, wholes, weights = turned
        q_at, q_vec = panel * LEVEL_WIDTH * LANES, LEVEL_WIDTH * LANES
        dots = start(wholes, panel * LANES, LANES)
        for b in range(TOGETHER):
            key_at = key * LEVEL_WIDTH + b * LANES
            for step in range(STEPS):
                dots = dot(dots, keys, key_at + step * 4, LEVEL_WIDTH, q, q_at + step * 64, q_vec)
            for step in range(STEPS):
                dots = dot(
                    dots, keys, key_at + LEVEL_WIDTH // 2 + step * 4, LEVEL_WIDTH, q, q_at + (STEPS + step) * 64, q_vec
                )
            q_at += 2 * STEPS * 64
        return tile_weigh(lanes, dots, weights, panel * LANES, native)

    return panels


@allocating
def _bytes(count):
    """Scratch that begins with a cache line, so that no vector of it lies on two."""
    room = np.empty(count + LINE, np.uint8)
    start = -room.ctypes.data % LINE
    return room[start : start + count]


_level_wide, _level_narrow = _level_panels(LEVEL_VECS), _level_panels(1)
_level_lanes, _level_write = zeros(LEVEL_ROWS, 1), write_lane_sums(LEVEL_ROWS)


@inlined
def _level_scores(keys, n, turned, row, panels, native, found, pool, ahead):
    """Scores, but for their scales, of one level row against the first n level keys; asks as `row_scores`."""
    for key in range(0, n, LEVEL_ROWS):
        ask(pool, ahead, key, key + LEVEL_ROWS)
        lanes = _level_lanes()
        p, last = row * panels, (row + 1) * panels
        while p < last:
            if p + LEVEL_VECS <= last:
                lanes = _level_wide(lanes, keys, key, turned, p, native)
                p += LEVEL_VECS
            else:
                lanes = _level_narrow(lanes, keys, key, turned, p, native)
                p += 1
        _level_write(lanes, found, key, native)


@inlined
def _decode_keys(pool, blocks, level, found_keys, apart, alike, words):
    """Keys to bytes: level ones to `alike` if wanted, others to `apart`; how many there are of each. -1 is left out."""
    codes_at, scales_at, many = found_keys
    keys, scales, places = apart
    level_bytes, level_scales, level_places = alike
    own, least, shifts = words
    if level:
        for i in range(many):
            own[i] = word_at(pool, scales_at[i]) if codes_at[i] >= 0 else 0
        for i in range(0, many, LANES):
            level_keys(own, least, shifts, i)
    n, level_n = 0, 0
    for i in range(many):
        codes = codes_at[i]
        if codes < 0:
            continue
        if level and least[i] > 0:
            table, to = np.int64(shifts[i]) * TOGETHER * LANES, level_n * 2 * TOGETHER * LANES
            _key_blocks(pool, codes, KEY_TABLES, table, level_bytes, to, TOGETHER * LANES)
            level_scales[level_n], level_places[level_n] = E8M0[least[i]], i
            level_n += 1
        else:
            _decode_key(pool, codes, blocks, keys, n * blocks * 2 * LANES)
            for b in range(blocks):
                scales[n * blocks + b] = E8M0[pool[scales_at[i] + b]]
            places[n] = i
            n += 1
    return n, level_n


def _task(products: Products, rows_wide: tuple[int, int], levels: bool) -> Any:
    """Part: every tasks-th piece of work."""
    block_scores = _block_scores(products, *rows_wide)

    @allocating
    def task(first_unit, tasks, query, turned, level_rows, keys, region, rows, native, out):
        pool, geometry, _, _ = region
        _, _, w, visible = query
        panels, blocks, count = w.size // (rows * LANES), geometry[CODE_BYTES] // LANES, keys[2]
        width = blocks * 2 * LANES
        places, level_places = np.empty(KEYS, np.int64), np.empty(KEYS, np.int64)
        apart = (_bytes(KEYS * width), np.empty(KEYS * blocks, np.float32), places)
        alike = (_bytes(KEYS * width), np.empty(KEYS, np.float32), level_places)
        words = (np.empty(KEYS, np.int32), np.empty(KEYS, np.int32), np.empty(KEYS, np.int32))
        found, held = np.empty(KEYS, np.float32), (apart[0], apart[1])
        codes_at, scales_at = np.empty((AHEAD + 1, KEYS), np.int64), np.empty((AHEAD + 1, KEYS), np.int64)
        many = np.empty(AHEAD + 1, np.int64)
        # Keys are found some pieces ahead, and their codes asked for between tiles: a core waits for sixteen cache
        # lines at most, so that more of them at once would hold up the arithmetic.
        for i in range(AHEAD):
            many[i] = find(first_unit + i * tasks, rows, region, keys, visible, codes_at[i], scales_at[i])
        for i, unit in enumerate(range(first_unit, units(rows, keys), tasks)):
            first, last, start, n = unit_of(unit, rows, keys)
            here, then = i % (AHEAD + 1), (i + AHEAD) % (AHEAD + 1)
            many[then] = find(unit + AHEAD * tasks, rows, region, keys, visible, codes_at[then], scales_at[then])
            level = levels
            for row in range(first, last):
                level = level and level_rows[row]
            found_keys = codes_at[here], scales_at[here], many[here]
            apart_n, level_n = _decode_keys(pool, blocks, level, found_keys, apart, alike, words)
            for row in range(first, last):
                seen = reach(visible, keys, row, start, n)
                ahead = codes_at[then, : many[then] if row == first else 0]
                row_out = out[row * count + start : row * count + start + n]
                # `levels` first: where it is False, Numba leaves out code that this CPU may not have.
                if levels and level_n == seen and seen == n:  # every key, in its place
                    _level_scores(alike[0], n, turned, row, panels, native, found, pool, ahead)
                    for i in range(n):
                        row_out[i] = found[i] * alike[1][i]
                    continue
                row_out[:] = HIDDEN
                if seen <= 0:
                    continue
                if levels and level_n > 0:
                    _level_scores(alike[0], level_n, turned, row, panels, native, found, pool, ahead)
                    for i in range(level_n):
                        if level_places[i] < seen:
                            row_out[level_places[i]] = found[i] * alike[1][i]
                if apart_n > 0:
                    block_scores(held, apart_n, turned, row, panels, w, blocks, native, found, pool, ahead[level_n:])
                    for i in range(apart_n):
                        if places[i] < seen:
                            row_out[places[i]] = found[i]

    return task


def _queries(products: Products, levels: bool) -> Any:
    """Part: every row's queries as bytes, and which rows are level, if values may be shifted."""
    turn_panel = _turner(products)

    @allocating
    def queries(query, rows, blocks):
        heads = query[2].size
        q, shifts = _bytes(heads * blocks * 2 * LANES).view(np.int8), np.empty(blocks * LANES, np.int32)
        q_scales, corrections = np.empty(heads * blocks, np.float32), np.empty(heads * blocks, np.int32)
        turned = (q, q_scales, corrections, np.empty(heads, np.int32), np.empty(heads, np.float32))
        level_rows, panels = np.empty(rows, np.bool_), heads // rows // LANES
        for row in range(rows):
            level_rows[row] = levels and level_row(query, row, heads // rows, blocks)
            for panel in range(row * panels, (row + 1) * panels):
                turn_panel(query, panel, blocks, level_rows[row], shifts, turned)
        return turned, level_rows

    return queries


_vnni_queries, _vnni_task = _queries(VNNI, True), _task(VNNI, (BLOCK_ROWS, BLOCK_VECS), True)
_pairs_queries, _pairs_task = _queries(PAIRS, False), _task(PAIRS, (BLOCK_ROWS, BLOCK_VECS), False)


@kernel(SIGNATURE, parallel=True)
def score_vnni(query, keys, region, rows, native, tasks, out):
    turned, level_rows = _vnni_queries(query, rows, region[1][CODE_BYTES] // LANES)
    for task in prange(tasks):
        _vnni_task(task, tasks, query, turned, level_rows, keys, region, rows, native, out)


@kernel(SIGNATURE, parallel=True)
def score_pairs(query, keys, region, rows, native, tasks, out):
    turned, level_rows = _pairs_queries(query, rows, region[1][CODE_BYTES] // LANES)
    for task in prange(tasks):
        _pairs_task(task, tasks, query, turned, level_rows, keys, region, rows, native, out)
