"""The index-score kernel that any CPU runs: loops over a block of keys turned to [D, KEYS], keys side by side.

Arguments, and the order of sums, are those of `score_kernels`.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np
from numba import prange

from rorqual.ops.fast.decode import BLOCK, CODE_BYTES, E8M0, PAIRS, decode_row_plain
from rorqual.ops.fast.kernel import allocating, inlined, kernel
from rorqual.ops.fast.score_kernels import KEYS, SIGNATURE, emit, find, reach, unit_of, units
from rorqual.ops.fast.vectors import LANES, round_bf16_scalar

_ZERO = np.float32(0)


@inlined
def _block_dots(keys, q, dots):
    """dots [KEYS] of one head with a block of keys [32, KEYS], four channels a pass; exact, so in any order."""
    dots[:] = _ZERO
    for d in range(0, q.size, 4):
        a, b = keys[d * KEYS : (d + 1) * KEYS], keys[(d + 1) * KEYS : (d + 2) * KEYS]
        c, e = keys[(d + 2) * KEYS : (d + 3) * KEYS], keys[(d + 3) * KEYS : (d + 4) * KEYS]
        q_a, q_b, q_c, q_e = q[d], q[d + 1], q[d + 2], q[d + 3]
        for i in range(dots.size):
            dots[i] += (a[i] * q_a + b[i] * q_b) + (c[i] * q_c + e[i] * q_e)


@inlined
def _weigh(total, weight, native, lane):
    for i in range(lane.size):
        dot = round_bf16_scalar(total[i]) if native else total[i]
        # Not max(): a NaN must stay one.
        product = (_ZERO if dot < _ZERO else dot) * weight
        lane[i] += round_bf16_scalar(product) if native else product


@inlined
def _row(keys, row, heads, width, q, w, native, scratch, found):
    """Scores of one row against a whole block of keys."""
    dots, total, lanes = scratch
    lanes[:] = _ZERO
    for head in range(row * heads, (row + 1) * heads):
        total[:] = _ZERO
        for d in range(0, width, BLOCK):
            at = head * width + d
            _block_dots(keys[d * KEYS : (d + BLOCK) * KEYS], q[at : at + BLOCK], dots)
            for i in range(total.size):
                total[i] += dots[i]
        lane = head % LANES
        _weigh(total, w[head], native, lanes[lane * KEYS : (lane + 1) * KEYS])
    half = LANES // 2
    while half:
        for i in range(half * KEYS):
            lanes[i] += lanes[half * KEYS + i]
        half //= 2
    for i in range(KEYS):
        found[i] = round_bf16_scalar(lanes[i]) if native else lanes[i]


@allocating
def _task(task, tasks, query, q, keys, region, rows, native, out):
    _, _, w, visible = query
    heads, width = w.size // rows, region[1][CODE_BYTES] * 2
    decoded, key = np.empty(width * KEYS, np.float32), np.empty(width, np.float32)
    scratch = (np.empty(KEYS, np.float32), np.empty(KEYS, np.float32), np.empty(LANES * KEYS, np.float32))
    codes_at, scales_at = np.empty(KEYS, np.int64), np.empty(KEYS, np.int64)
    found = np.empty(KEYS, np.float32)
    for unit in range(task, units(rows, keys), tasks):
        first, last, start, n = unit_of(unit, rows, keys)
        for i in range(find(unit, rows, region, keys, visible, codes_at, scales_at)):
            if codes_at[i] >= 0:
                decode_row_plain(region, codes_at[i], scales_at[i], width, key, 0)
                for d in range(width):
                    decoded[d * KEYS + i] = key[d]
        for row in range(first, last):
            seen = reach(visible, keys, row, start, n)
            if seen > 0:
                _row(decoded, row, heads, width, q, w, native, scratch, found)
            emit(found, seen, n, keys, row, start, out)


@kernel(SIGNATURE, parallel=True)
def score_plain(query, keys, region, rows, native, tasks, out):
    codes, scales, w, _ = query
    q = np.empty(w.size * region[1][CODE_BYTES] * 2, np.float32)
    for i in range(q.size // 2):
        scale = E8M0[scales[2 * i // BLOCK]]
        q[2 * i], q[2 * i + 1] = PAIRS[codes[i], 0] * scale, PAIRS[codes[i], 1] * scale
    for task in prange(tasks):
        _task(task, tasks, query, q, keys, region, rows, native, out)
