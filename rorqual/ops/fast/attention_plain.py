"""The attention kernel that any CPU runs, for any head dim, and what it shares with the vector kernels.

Arguments are those of `attention`; so is the order of slots. Heads stand side by side: queries [C, H], logits [S, H].
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

from math import exp

import numpy as np
from numba import prange

from rorqual.ops.fast.decode import REGION, decode_row_plain, locate
from rorqual.ops.fast.kernel import allocating, inlined, kernel
from rorqual.ops.fast.vectors import round_bf16_scalar

SIGNATURE = (
    f"void(float32[::1], int64[::1], Tuple((float32[::1], int64, int64, int64)), {REGION}, int64[::1],"
    " float32[::1], int64, float32, boolean, int64, float32[::1])"
)

_ZERO = np.float32(0)


@inlined
def window_span(position, near, channels):
    """(first, count) of the held window keys that a row sees."""
    held, base, floor, window = near
    first = max(floor, base, position - window + 1) - base
    return first, max(0, min(position + 1 - base, held.size // channels) - first)


@inlined
def present(topk, at, count, groups, to):
    """One row's Top-K to groups[to ..] without its -1s; returns how many."""
    n = 0
    for j in range(count):
        if topk[at + j] >= 0:
            groups[to + n] = topk[at + j]
            n += 1
    return n


@inlined
def _add_two(out, x, y, a, b):
    for i in range(out.size):
        out[i] += x[i] * a + y[i] * b


@inlined
def _logits(key, turned, heads, logit):
    """q . k of one key for all heads, channels in pairs from the first."""
    logit[:] = _ZERO
    for c in range(0, key.size - 1, 2):
        x, y = turned[c * heads : (c + 1) * heads], turned[(c + 1) * heads : (c + 2) * heads]
        _add_two(logit, x, y, key[c], key[c + 1])
    if key.size % 2:
        c = key.size - 1
        for h in range(heads):
            logit[h] += turned[c * heads + h] * key[c]


@inlined
def _softmax(logits, n, heads, h, sink, scale, native):
    """One head's logits to p in place; returns the denominator."""
    top = np.float32(-np.inf)
    for s in range(n):
        logits[s * heads + h] *= scale
        top = max(top, logits[s * heads + h])
    total = _ZERO
    for s in range(n):
        p = np.float32(exp(logits[s * heads + h] - top))
        total += p
        logits[s * heads + h] = round_bf16_scalar(p) if native else p
    return total + np.float32(exp(sink[h] - top))


@inlined
def _add_keys(logits, n, heads, h, keys, out):
    """out [C] of one head = sum over slots of p * key, slots in pairs from the first."""
    width = out.size
    out[:] = _ZERO
    for s in range(0, n - 1, 2):
        x, y = keys[s * width : (s + 1) * width], keys[(s + 1) * width : (s + 2) * width]
        _add_two(out, x, y, logits[s * heads + h], logits[(s + 1) * heads + h])
    if n % 2:
        p = logits[(n - 1) * heads + h]
        for c in range(width):
            out[c] += keys[(n - 1) * width + c] * p


@allocating
def _task(task, tasks, q, positions, near, region, topk, sink, heads, scale, native, out):
    rows = positions.size
    channels, chosen, slots = q.size // (rows * heads), topk.size // rows, near[3] + topk.size // rows
    turned, groups = np.empty(heads * channels, np.float32), np.empty(chosen, np.int64)
    keys, logits = np.empty(slots * channels, np.float32), np.empty(slots * heads, np.float32)
    for row in range(task, rows, tasks):
        first, inside = window_span(positions[row], near, channels)
        far = present(topk, row * chosen, chosen, groups, 0)
        for i in range(inside * channels):
            keys[i] = near[0][first * channels + i]
        for m in range(far):
            codes, scales = locate(region[1], region[2], groups[m])
            decode_row_plain(region, codes, scales, channels, keys, (inside + m) * channels)
        for h in range(heads):
            for c in range(channels):
                turned[c * heads + h] = q[(row * heads + h) * channels + c]
        for s in range(inside + far):
            _logits(keys[s * channels : (s + 1) * channels], turned, heads, logits[s * heads : (s + 1) * heads])
        for h in range(heads):
            row_out = out[(row * heads + h) * channels : (row * heads + h + 1) * channels]
            below = np.float32(1)
            if inside + far > 0:
                below = _softmax(logits, inside + far, heads, h, sink, scale, native)
            _add_keys(logits, inside + far, heads, h, keys, row_out)
            for c in range(channels):
                row_out[c] /= below


@kernel(SIGNATURE, parallel=True)
def attend_plain(q, positions, near, region, topk, sink, heads, scale, native, tasks, out):
    for task in prange(tasks):
        _task(task, tasks, q, positions, near, region, topk, sink, heads, scale, native, out)
