"""Attention over a window and selected groups: the Numba twin of `rorqual.ops.reference.attention`.

Three products and a softmax a row, all on sixteen heads or channels side by side:

    queries   turned to panels [P, C, 16] of sixteen heads (the last padded with zeros)
    logits    [S, 16 P], key by key, straight from the window and from a decoded copy of the selected groups
    p         in place, and the denominator of each head
    output    [H, C], slot by slot in order, window first

Every number is one chain of operations in slot or channel order, and absent slots (which would add zero) are left out:
a row's bits depend on nothing but the row. Many rows are shared out over the threads whole; of few rows, the parts are.
"""

from __future__ import annotations

from math import exp as scalar_exp
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.ops.cpu import Path, best_path
from rorqual.ops.fast.decode import BLOCK, DECODED, check_pages, decode_row, decode_row_plain, locate, region_arrays
from rorqual.ops.fast.kernel import allocating, inlined, kernel, workers
from rorqual.ops.fast.tiles import product, transpose
from rorqual.ops.fast.vectors import (
    LANES,
    add,
    divide,
    exp,
    load,
    maximum,
    multiply,
    round_bf16,
    round_bf16_scalar,
    splat,
    store,
    subtract,
)
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference.attention import sparse_attention as plain_sparse_attention

# T rows, H heads, C head dim, P panels of 16 heads, L window keys held, K top-k, S slots present

SLOTS = 32
"""Slots whose logits are one piece of work when a row is split; channels are split by 4 x 32."""
_CHANNELS = 128

_SIGNATURE = (
    "void(float32[::1], int64[::1], float32[::1], int64, int64, int64, uint8[::1], int64[::1], int64[::1],"
    " float32[::1], int64[::1], float32[::1], int64, float32, boolean, int64, float32[::1])"
)


@inlined
def _window_span(position, base, floor, window, held):  # type: ignore[no-untyped-def]
    """[first, last) of the held window keys that a row sees."""
    first = max(floor, base, position - window + 1) - base
    return first, max(first, min(position + 1 - base, held))


@inlined
def _present(topk, at, count, groups):  # type: ignore[no-untyped-def]
    """The groups of one row's Top-K without its -1s; how many."""
    n = 0
    for j in range(count):
        if topk[at + j] >= 0:
            groups[n] = topk[at + j]
            n += 1
    return n


@inlined
def _turn_queries(q, row, heads, channels, padded, panels_q, out_at):  # type: ignore[no-untyped-def]
    """q [H, C] of one row to panels [P, C, 16]; `padded` [16, C] is scratch for a last panel that is not full."""
    for p in range((heads + LANES - 1) // LANES):
        at = (row * heads + p * LANES) * channels
        full = (p + 1) * LANES <= heads
        if not full:
            have = (heads - p * LANES) * channels
            for i in range(LANES * channels):
                padded[i] = q[at + i] if i < have else np.float32(0)
        for c in range(0, channels, LANES):
            to = out_at + (p * channels + c) * LANES
            if full:
                transpose(q, at + c, channels, panels_q, to)
            else:
                transpose(padded, c, channels, panels_q, to)


@inlined
def _logits(keys, keys_at, n, channels, panels_q, q_at, panels, logits, logits_at):  # type: ignore[no-untyped-def]
    """q . k of n keys in a row from keys_at, for all heads."""
    product(
        keys, keys_at, channels, 1, n, panels_q, q_at, LANES, channels * LANES, panels, channels,
        logits, logits_at, panels * LANES, False,
    )  # fmt: skip


@inlined
def _softmax(logits, at, n, stride, sink, sink_at, scale, native, denominators, to):  # type: ignore[no-untyped-def]
    """Sixteen heads' logits [n] to p in place, rounded for the numerator where native; and their denominators."""
    factor, top = splat(scale), splat(np.float32(-np.inf))
    for s in range(n):
        scaled = multiply(load(logits, at + s * stride), factor)
        store(logits, at + s * stride, scaled)
        top = maximum(scaled, top)
    total = splat(np.float32(0))
    for s in range(n):
        p = exp(subtract(load(logits, at + s * stride), top))
        total = add(total, p)
        store(logits, at + s * stride, round_bf16(p) if native else p)
    store(denominators, to, add(total, exp(subtract(load(sink, sink_at), top))))


@inlined
def _weighted(p, p_at, stride, heads, keys, keys_at, n, channels, vecs, out, out_at, onto):  # type: ignore[no-untyped-def]
    """out [heads, 16 vecs] (+)= sum over n slots of p * key, for some heads and channels."""
    product(
        p, p_at, 1, stride, heads, keys, keys_at, channels, LANES, vecs, n, out, out_at, channels, onto,
    )  # fmt: skip


@inlined
def _divide(out, at, channels, vecs, denominators, head, heads):  # type: ignore[no-untyped-def]
    for h in range(heads):
        below = splat(denominators[head + h])
        for v in range(vecs):
            place = at + h * channels + v * LANES
            store(out, place, divide(load(out, place), below))


@allocating
def _rows_task(  # type: ignore[no-untyped-def]
    task, tasks, q, positions, held, base, floor, window, pool, geometry, table, scale_table, topk, sink, heads, scale,
    native, out,
):  # fmt: skip
    """Every tasks-th row, whole."""
    rows, stride = positions.size, sink.size
    channels, chosen = q.size // (rows * heads), topk.size // rows
    panels_q, padded = np.empty(stride * channels, np.float32), np.empty(LANES * channels, np.float32)
    keys, groups = np.empty(chosen * channels, np.float32), np.empty(chosen, np.int64)
    logits, denominators = np.empty((window + chosen) * stride, np.float32), np.empty(stride, np.float32)
    for row in range(task, rows, tasks):
        first, last = _window_span(positions[row], base, floor, window, held.size // channels)
        near, far = last - first, _present(topk, row * chosen, chosen, groups)
        for m in range(far):
            codes, scales = locate(geometry, table, groups[m])
            decode_row(pool, codes, scales, geometry, scale_table, channels, keys, m * channels)
        at, panels = row * heads * channels, stride // LANES
        if near + far == 0:
            out[at : at + heads * channels] = np.float32(0)
            continue
        _turn_queries(q, row, heads, channels, padded, panels_q, 0)
        _logits(held, first * channels, near, channels, panels_q, 0, panels, logits, 0)
        _logits(keys, 0, far, channels, panels_q, 0, panels, logits, near * stride)
        for p in range(panels):
            _softmax(
                logits, p * LANES, near + far, stride, sink, p * LANES, scale, native, denominators, p * LANES
            )
        vecs = channels // LANES
        _weighted(logits, 0, stride, heads, held, first * channels, near, channels, vecs, out, at, False)
        _weighted(logits, near * stride, stride, heads, keys, 0, far, channels, vecs, out, at, True)
        _divide(out, at, channels, vecs, denominators, 0, heads)


@kernel(_SIGNATURE, parallel=True)
def _attend_rows(  # type: ignore[no-untyped-def]
    q, positions, held, base, floor, window, pool, geometry, table, scale_table, topk, sink, heads, scale, native,
    tasks, out,
):  # fmt: skip
    for task in prange(tasks):
        _rows_task(
            task, tasks, q, positions, held, base, floor, window, pool, geometry, table, scale_table, topk, sink,
            heads, scale, native, out,
        )  # fmt: skip


@inlined
def _split_logits(  # type: ignore[no-untyped-def]
    row, first_slot, last_slot, spans, groups, held, pool, geometry, table, scale_table, channels, chosen, panels_q,
    panels, keys, logits, logits_row,
):  # fmt: skip
    """Slots [first_slot, last_slot) of one row: decode what is not of the window, and the logits of both."""
    start, near, far = spans[3 * row], spans[3 * row + 1], spans[3 * row + 2]
    stride, q_at = panels * LANES, row * panels * LANES * channels
    last = min(last_slot, near)
    if first_slot < last:
        at = logits_row + first_slot * stride
        _logits(
            held, (start + first_slot) * channels, last - first_slot, channels, panels_q, q_at, panels, logits, at
        )
    first, last = max(first_slot, near) - near, min(last_slot, near + far) - near
    if first < last:
        for m in range(first, last):
            codes, scales = locate(geometry, table, groups[row * chosen + m])
            decode_row(pool, codes, scales, geometry, scale_table, channels, keys, (row * chosen + m) * channels)
        at = logits_row + (near + first) * stride
        _logits(
            keys, (row * chosen + first) * channels, last - first, channels, panels_q, q_at, panels, logits, at
        )


@inlined
def _split_output(  # type: ignore[no-untyped-def]
    row, panel, channel, spans, held, channels, chosen, heads, stride, keys, logits, logits_row, denominators, out
):  # fmt: skip
    """Output of one panel's heads and up to _CHANNELS channels of one row."""
    start, near, far = spans[3 * row], spans[3 * row + 1], spans[3 * row + 2]
    first = panel * LANES
    count, vecs = min(LANES, heads - first), min(_CHANNELS, channels - channel) // LANES
    at, p_at = (row * heads + first) * channels + channel, logits_row + first
    _weighted(logits, p_at, stride, count, held, start * channels + channel, near, channels, vecs, out, at, False)
    p_at += near * stride
    _weighted(logits, p_at, stride, count, keys, row * chosen * channels + channel, far, channels, vecs, out, at, True)
    if near + far:
        _divide(out, at, channels, vecs, denominators, row * stride + first, count)


@kernel(_SIGNATURE, parallel=True)
def _attend_split(  # type: ignore[no-untyped-def]
    q, positions, held, base, floor, window, pool, geometry, table, scale_table, topk, sink, heads, scale, native,
    tasks, out,
):  # fmt: skip
    rows, stride = positions.size, sink.size
    channels, chosen, panels = q.size // (rows * heads), topk.size // rows, stride // LANES
    panels_q, padded = np.empty(rows * stride * channels, np.float32), np.empty(LANES * channels, np.float32)
    keys, groups = np.empty(rows * chosen * channels, np.float32), np.empty(rows * chosen, np.int64)
    slots = window + chosen
    logits, denominators = np.empty(rows * slots * stride, np.float32), np.empty(rows * stride, np.float32)
    spans = np.empty(3 * rows, np.int64)
    for row in range(rows):
        first, last = _window_span(positions[row], base, floor, window, held.size // channels)
        far = _present(topk, row * chosen, chosen, groups[row * chosen : (row + 1) * chosen])
        spans[3 * row], spans[3 * row + 1], spans[3 * row + 2] = first, last - first, far
        _turn_queries(q, row, heads, channels, padded, panels_q, row * stride * channels)
    pieces = (slots + SLOTS - 1) // SLOTS
    for unit in prange(rows * pieces):
        row, piece = unit // pieces, unit % pieces
        _split_logits(
            row, piece * SLOTS, (piece + 1) * SLOTS, spans, groups, held, pool, geometry, table, scale_table, channels,
            chosen, panels_q, panels, keys, logits, row * slots * stride,
        )  # fmt: skip
    for unit in prange(rows * panels):
        row, panel = unit // panels, unit % panels
        _softmax(
            logits, row * slots * stride + panel * LANES, spans[3 * row + 1] + spans[3 * row + 2], stride, sink,
            panel * LANES, scale, native, denominators, row * stride + panel * LANES,
        )  # fmt: skip
    parts = (channels + _CHANNELS - 1) // _CHANNELS
    for unit in prange(rows * panels * parts):
        row, panel = unit // (panels * parts), unit // parts % panels
        _split_output(
            row, panel, unit % parts * _CHANNELS, spans, held, channels, chosen, heads, stride, keys, logits,
            row * slots * stride, denominators, out,
        )  # fmt: skip


@inlined
def _add_scaled(out, x, y, a, b):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] += x[i] * a + y[i] * b


@inlined
def _plain_logits(key, q_turned, heads, logit):  # type: ignore[no-untyped-def]
    """q . k of one key for all heads, from queries [C, H]."""
    logit[:] = np.float32(0)
    for c in range(0, key.size - 1, 2):
        x, y = q_turned[c * heads : (c + 1) * heads], q_turned[(c + 1) * heads : (c + 2) * heads]
        _add_scaled(logit, x, y, key[c], key[c + 1])
    if key.size % 2:
        c = key.size - 1
        for h in range(heads):
            logit[h] += q_turned[c * heads + h] * key[c]


@inlined
def _plain_softmax(logits, n, heads, h, sink, scale, native):  # type: ignore[no-untyped-def]
    """One head's logits [n, H] to p in place; returns the denominator."""
    top = np.float32(-np.inf)
    for s in range(n):
        logits[s * heads + h] *= scale
        top = max(top, logits[s * heads + h])
    total = np.float32(0)
    for s in range(n):
        p = np.float32(scalar_exp(logits[s * heads + h] - top))
        total += p
        logits[s * heads + h] = round_bf16_scalar(p) if native else p
    return total + np.float32(scalar_exp(sink[h] - top))


@allocating
def _plain_task(  # type: ignore[no-untyped-def]
    task, tasks, q, positions, held, base, floor, window, pool, geometry, table, scale_table, topk, sink, heads, scale,
    native, out,
):  # fmt: skip
    """As `_rows_task`, in loops that any CPU runs and for any number of channels."""
    rows = positions.size
    channels, chosen = q.size // (rows * heads), topk.size // rows
    turned, groups = np.empty(heads * channels, np.float32), np.empty(chosen, np.int64)
    keys = np.empty((window + chosen) * channels, np.float32)
    logits = np.empty((window + chosen) * heads, np.float32)
    for row in range(task, rows, tasks):
        first, last = _window_span(positions[row], base, floor, window, held.size // channels)
        near = last - first
        n = near + _present(topk, row * chosen, chosen, groups)
        keys[: near * channels] = held[first * channels : last * channels]
        for m in range(near, n):
            codes, scales = locate(geometry, table, groups[m - near])
            decode_row_plain(pool, codes, scales, geometry, scale_table, channels, keys, m * channels)
        row_out = out[row * heads * channels : (row + 1) * heads * channels]
        row_out[:] = np.float32(0)
        for h in range(heads):
            for c in range(channels):
                turned[c * heads + h] = q[(row * heads + h) * channels + c]
        for s in range(n):
            _plain_logits(
                keys[s * channels : (s + 1) * channels], turned, heads, logits[s * heads : (s + 1) * heads]
            )
        for h in range(heads):
            if n:
                below = _plain_softmax(logits, n, heads, h, sink, scale, native)
                o = row_out[h * channels : (h + 1) * channels]
                for s in range(n):
                    p, key = logits[s * heads + h], keys[s * channels : (s + 1) * channels]
                    for c in range(channels):
                        o[c] += p * key[c]
                for c in range(channels):
                    o[c] /= below


@kernel(_SIGNATURE, parallel=True)
def _attend_plain(  # type: ignore[no-untyped-def]
    q, positions, held, base, floor, window, pool, geometry, table, scale_table, topk, sink, heads, scale, native,
    tasks, out,
):  # fmt: skip
    for task in prange(tasks):
        _plain_task(
            task, tasks, q, positions, held, base, floor, window, pool, geometry, table, scale_table, topk, sink,
            heads, scale, native, out,
        )  # fmt: skip


def sparse_attention(
    q_THC: Tensor,
    positions_T: Tensor,
    window_LC: Tensor,
    base: int,
    floor: int,
    window: int,
    region: PagedRegion | None,
    block_table: Tensor | None,
    topk_TK: Tensor | None,
    sink_H: Tensor,
    scale: float,
    native: bool,
    *,
    path: Path | None = None,
) -> Tensor:
    """As the plain `sparse_attention`, which also takes the formats that kernels do not read.

    path: of `rorqual.ops.cpu`; None takes the best. Head dims that are no multiple of 32 take the plain loops.
    """
    if (region is not None and region.fmt not in DECODED) or q_THC.device.type != "cpu":
        return plain_sparse_attention(
            q_THC, positions_T, window_LC, base, floor, window, region, block_table, topk_TK, sink_H, scale, native
        )
    rows, heads, channels = q_THC.shape
    out = torch.empty(rows, heads, channels)
    if not out.numel():
        return out
    if region is None or block_table is None or topk_TK is None:
        topk_TK, arrays = torch.empty(0, dtype=torch.int64), _NO_REGION
    else:
        check_pages(region, block_table, topk_TK)
        arrays = region_arrays(region, block_table)
    vectors = (path or best_path()) != "plain" and channels % BLOCK == 0
    sink = sink_H.detach()
    if vectors and heads % LANES:
        sink = torch.nn.functional.pad(sink, (0, -heads % LANES))
    # Too few rows to keep every thread busy to the end.
    split = vectors and rows < 2 * workers()
    run = _attend_split if split else _attend_rows if vectors else _attend_plain
    tasks = 0 if split else min(workers(), rows)
    window_args = (_flat(window_LC), base, floor, window)
    run(
        _flat(q_THC), _flat(positions_T), *window_args, *arrays, _flat(topk_TK), _flat(sink), heads,
        np.float32(scale), native, tasks, out.view(-1).numpy(), tasks=tasks,
    )  # fmt: skip
    return out


def _flat(x: Tensor) -> Any:
    return x.detach().contiguous().view(-1).numpy()


_EMPTY = np.zeros(0, np.int64)
_NO_REGION = (np.zeros(0, np.uint8), np.ones(8, np.int64), _EMPTY, np.zeros(256, np.float32))
KERNELS = {"vector": (_attend_rows, _attend_split), "plain": (_attend_plain,)}
