"""Whole rows of `attention`, one at a time, or two where two rows' heads fill a vector.

A pair's heads stand in turn: head h of row i is lane 2 h + i. Window keys are multiplied by the heads of both at once,
over all slots that either row sees; of selected keys each lane takes its own row's, from two that stand side by side,
channel by channel. What a row does not see is set to -inf before the softmax, adds zero to its sum, and is left out of
its output: the bits are those of the row alone.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from rorqual.ops.fast.attention_parts import add_keys, divide, dot_keys, softmax, turn_queries
from rorqual.ops.fast.attention_plain import present, window_span
from rorqual.ops.fast.decode import decode_rows
from rorqual.ops.fast.kernel import allocating, inlined
from rorqual.ops.fast.tiles import product, product_of_pairs, transpose
from rorqual.ops.fast.vectors import ARRAY, LANES, VECTOR_F32, ahead, instruction, load, load_at, pick, store, store_at

APART = 16
"""Window slots beyond W that a pair may see together; rows further apart go one by one."""

BESIDE = 16
"""Slots whose keys are put side by side at once, so that they are still in the first cache when they are read."""

_ABSENT, _ZERO = np.float32(-np.inf), np.float32(0)


@instruction(types.void, ARRAY, types.intp, types.intp, ARRAY, types.intp)
def _interleave(builder: Any, keys: Any, first: Any, second: Any, out: Any, to: Any) -> None:
    """Sixteen channels of two keys, in turn."""
    x, y = load_at(builder, keys, first, VECTOR_F32), load_at(builder, keys, second, VECTOR_F32)
    for half in range(2):
        lanes = [half * LANES // 2 + lane // 2 + LANES * (lane % 2) for lane in range(LANES)]
        store_at(builder, builder.shuffle_vector(x, y, pick(lanes)), out, ahead(builder, to, LANES, half))


@inlined
def _one_row(row, q, positions, near, region, topk, sink, heads, scale, native, room, groups, out):
    turned, padded, keys, _, logits, denominators = room
    rows, stride, held = positions.size, sink.size, near[0]
    channels, chosen = q.size // (rows * heads), topk.size // rows
    vecs = channels // LANES
    first, inside = window_span(positions[row], near, channels)
    far = present(topk, row * chosen, chosen, groups, 0)
    at = row * heads * channels
    if inside + far == 0:
        out[at : at + heads * channels] = _ZERO
        return
    decode_rows(region, groups, 0, far, channels, keys)
    turn_queries(q, row, heads, channels, padded, turned, 0)
    dot_keys(held, first * channels, inside, channels, turned, 0, stride, logits, 0)
    dot_keys(keys, 0, far, channels, turned, 0, stride, logits, inside * stride)
    for head in range(0, stride, LANES):
        softmax(logits, head, inside + far, stride, sink, head, scale, native, denominators, head)
    add_keys(logits, 0, stride, heads, held, first * channels, inside, channels, vecs, out, at, False)
    add_keys(logits, inside * stride, stride, heads, keys, 0, far, channels, vecs, out, at, True)
    divide(out, at, channels, vecs, denominators, 0, 1, heads)


@inlined
def _turn_pair(q, row, heads, channels, padded, turned):
    """q [2, H, C] of two rows to a panel [C, 16]."""
    for lane in range(LANES):
        at = ((row + lane % 2) * heads + lane // 2) * channels
        for c in range(0, channels, LANES):
            store(padded, lane * channels + c, load(q, at + c))
    for c in range(0, channels, LANES):
        transpose(padded, c, channels, turned, c * LANES)


@inlined
def _dot_pairs(keys, chosen, most, channels, both, turned, logits, to):
    """q . k of each row's own decoded keys, which stand `chosen` apart."""
    for first in range(0, most, BESIDE):
        n, at = min(BESIDE, most - first), first * channels
        for c in range(0, n * channels, LANES):
            _interleave(keys, at + c, chosen * channels + at + c, both, 2 * c)
        out = to + first * LANES
        product_of_pairs(both, 0, 2 * channels, 2, n, turned, 0, LANES, channels, logits, out, LANES)


@inlined
def _hide(logits, i, slot, last):
    """Slots that row i of a pair does not see."""
    for s in range(slot, last):
        for lane in range(i, LANES, 2):
            logits[s * LANES + lane] = _ABSENT


@inlined
def _pair(row, spans, q, near, region, chosen, far, sinks, heads, channels, scale, native, room, groups, out):
    turned, padded, keys, both, logits, denominators = room
    held, vecs, most = near[0], channels // LANES, max(far[0], far[1])
    first, inside = spans
    start, end = min(first[0], first[1]), max(first[0] + inside[0], first[1] + inside[1])
    slots = end - start
    for i in range(2):
        decode_rows(region, groups, i * chosen, i * chosen + far[i], channels, keys)
        # Where one row has fewer, zeros stand beside the other's.
        keys[(i * chosen + far[i]) * channels : (i * chosen + most) * channels] = _ZERO
    _turn_pair(q, row, heads, channels, padded, turned)
    dot_keys(held, start * channels, slots, channels, turned, 0, LANES, logits, 0)
    _dot_pairs(keys, chosen, most, channels, both, turned, logits, slots * LANES)
    for i in range(2):
        _hide(logits, i, 0, first[i] - start)
        _hide(logits, i, first[i] + inside[i] - start, slots)
        _hide(logits, i, slots + far[i], slots + most)
    softmax(logits, 0, slots + most, LANES, sinks, 0, scale, native, denominators, 0)
    for i in range(2):
        at, p_at = (row + i) * heads * channels, (first[i] - start) * LANES + i
        product(
            logits, p_at, 2, LANES, heads, held, first[i] * channels, channels, LANES, vecs, inside[i], out, at,
            channels, False,
        )  # fmt: skip
        p_at, key = slots * LANES + i, i * chosen * channels
        product(logits, p_at, 2, LANES, heads, keys, key, channels, LANES, vecs, far[i], out, at, channels, True)
        divide(out, at, channels, vecs, denominators, i, 2, heads)


@allocating
def rows_task(task, tasks, q, positions, near, region, topk, sink, heads, scale, native, out):
    """Every tasks-th row, or pair of rows, whole."""
    rows, stride, window = positions.size, sink.size, near[3]
    channels, chosen = q.size // (rows * heads), topk.size // rows
    group = 2 if 2 * heads == LANES else 1
    turned, padded = np.empty(stride * channels, np.float32), np.empty(LANES * channels, np.float32)
    keys, groups = np.empty(group * chosen * channels, np.float32), np.empty(group * chosen, np.int64)
    both, sinks = np.empty((group - 1) * 2 * BESIDE * channels, np.float32), np.empty(LANES, np.float32)
    logits, denominators = np.empty((window + APART + chosen) * stride, np.float32), np.empty(stride, np.float32)
    room = turned, padded, keys, both, logits, denominators
    if group == 2:
        for lane in range(LANES):
            sinks[lane] = sink[lane // 2]
    for unit in range(task, (rows + group - 1) // group, tasks):
        row = unit * group
        if group == 2 and row + 1 < rows:
            first0, inside0 = window_span(positions[row], near, channels)
            first1, inside1 = window_span(positions[row + 1], near, channels)
            seen = max(first0 + inside0, first1 + inside1) - min(first0, first1)
            if min(inside0, inside1) > 0 and seen <= window + APART:
                far0 = present(topk, row * chosen, chosen, groups, 0)
                far1 = present(topk, (row + 1) * chosen, chosen, groups, chosen)
                spans, far = ((first0, first1), (inside0, inside1)), (far0, far1)
                _pair(
                    row, spans, q, near, region, chosen, far, sinks, heads, channels, scale, native, room, groups, out
                )
                continue
        for one in range(row, min(row + group, rows)):
            _one_row(one, q, positions, near, region, topk, sink, heads, scale, native, room, groups, out)
