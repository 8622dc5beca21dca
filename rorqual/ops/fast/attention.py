"""Attention over a window and selected groups: the Numba twin of `rorqual.ops.reference.attention`.

Three products and a softmax a row, all on sixteen heads or channels side by side:

    queries   turned to panels [P, C, 16] of sixteen heads (the last padded with zeros)
    logits    [S, 16 P], slot by slot, straight from the window and from a decoded copy of the selected groups
    p         in place, and each head's denominator
    output    [H, C], slot by slot in order, window first

Every number is one chain of operations in channel or slot order, and absent slots, which would add zero, are left out:
a row's bits depend on nothing but the row. Of many rows each thread takes whole ones; of few, threads share the parts.
`attention_plain` holds the loops that any CPU runs.

Kernel arguments, arrays flat: q [T, H, C]; positions [T]; near (window keys [L, C], base, floor, W);
region (`decode.region_arrays`) and topk [T, K], both empty for a window layer; sink [16 P].
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.ops.cpu import Path, best_path
from rorqual.ops.fast.attention_plain import SIGNATURE, attend_plain, present, window_span
from rorqual.ops.fast.decode import BLOCK, DECODED, NO_REGION, check_pages, decode_rows, region_arrays
from rorqual.ops.fast.kernel import Kernel, allocating, inlined, kernel, refuse_gradients, spliced, workers
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
    splat,
    store,
    subtract,
)
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference.attention import sparse_attention as plain_sparse_attention

# T rows, H heads, C head dim, P panels of 16 heads, L window keys held, K top-k, S slots of a row

SLOTS = 64
"""Slots whose logits are one piece of work when threads share a row."""
HEADS, CHANNELS = 32, 64
"""Heads and channels whose output is one piece."""


@inlined
def _turn_queries(q, row, heads, channels, padded, turned, to):
    """One row's q [H, C] to panels [P, C, 16]; `padded` [16, C] is scratch for a last panel that is not full."""
    for panel in range((heads + LANES - 1) // LANES):
        at = (row * heads + panel * LANES) * channels
        have = min(LANES, heads - panel * LANES) * channels
        if have < LANES * channels:
            for i in range(LANES * channels):
                padded[i] = q[at + i] if i < have else np.float32(0)
        for c in range(0, channels, LANES):
            if have < LANES * channels:
                transpose(padded, c, channels, turned, to + (panel * channels + c) * LANES)
            else:
                transpose(q, at + c, channels, turned, to + (panel * channels + c) * LANES)


@spliced
def _dot_keys(keys, at, n, channels, turned, q_at, stride, logits, to):
    """q . k of n keys for all heads."""
    panels, panel = stride // LANES, channels * LANES
    product(keys, at, channels, 1, n, turned, q_at, LANES, panel, panels, channels, logits, to, stride, False)


@inlined
def _softmax(logits, at, n, stride, sink, sink_at, scale, native, denominators, to):
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


@spliced
def _add_keys(p, p_at, stride, heads, keys, at, n, channels, vecs, out, to, onto):
    """out [heads, 16 vecs] (+)= sum over n slots of p * key, for some heads and channels."""
    product(p, p_at, 1, stride, heads, keys, at, channels, LANES, vecs, n, out, to, channels, onto)


@inlined
def _divide(out, at, channels, vecs, denominators, head, heads):
    for h in range(heads):
        below = splat(denominators[head + h])
        for v in range(vecs):
            place = at + h * channels + v * LANES
            store(out, place, divide(load(out, place), below))


@allocating
def _rows_task(task, tasks, q, positions, near, region, topk, sink, heads, scale, native, out):
    """Every tasks-th row, whole."""
    rows, stride, held = positions.size, sink.size, near[0]
    channels, chosen = q.size // (rows * heads), topk.size // rows
    vecs, slots = channels // LANES, near[3] + chosen
    turned, padded = np.empty(stride * channels, np.float32), np.empty(LANES * channels, np.float32)
    keys, groups = np.empty(chosen * channels, np.float32), np.empty(chosen, np.int64)
    logits, denominators = np.empty(slots * stride, np.float32), np.empty(stride, np.float32)
    for row in range(task, rows, tasks):
        first, inside = window_span(positions[row], near, channels)
        far = present(topk, row * chosen, chosen, groups, 0)
        at = row * heads * channels
        if inside + far == 0:
            out[at : at + heads * channels] = np.float32(0)
            continue
        decode_rows(region, groups, 0, far, channels, keys)
        _turn_queries(q, row, heads, channels, padded, turned, 0)
        _dot_keys(held, first * channels, inside, channels, turned, 0, stride, logits, 0)
        _dot_keys(keys, 0, far, channels, turned, 0, stride, logits, inside * stride)
        for head in range(0, stride, LANES):
            _softmax(logits, head, inside + far, stride, sink, head, scale, native, denominators, head)
        _add_keys(logits, 0, stride, heads, held, first * channels, inside, channels, vecs, out, at, False)
        _add_keys(logits, inside * stride, stride, heads, keys, 0, far, channels, vecs, out, at, True)
        _divide(out, at, channels, vecs, denominators, 0, heads)


@kernel(SIGNATURE, parallel=True)
def attend_rows(q, positions, near, region, topk, sink, heads, scale, native, tasks, out):
    for task in prange(tasks):
        _rows_task(task, tasks, q, positions, near, region, topk, sink, heads, scale, native, out)


@inlined
def _split_logits(row, slot, sizes, spans, groups, held, region, turned, keys, logits):
    """Up to SLOTS slots of one row: decode what is not of the window, and the logits of both."""
    channels, chosen, stride, slots = sizes
    start, inside, far = spans[3 * row], spans[3 * row + 1], spans[3 * row + 2]
    q_at, to = row * stride * channels, row * slots * stride
    last = min(slot + SLOTS, inside)
    if slot < last:
        at = (start + slot) * channels
        _dot_keys(held, at, last - slot, channels, turned, q_at, stride, logits, to + slot * stride)
    first, last = max(slot, inside) - inside, min(slot + SLOTS, inside + far) - inside
    if first < last:
        decode_rows(region, groups, row * chosen + first, row * chosen + last, channels, keys)
        at, to = (row * chosen + first) * channels, to + (inside + first) * stride
        _dot_keys(keys, at, last - first, channels, turned, q_at, stride, logits, to)


@inlined
def _split_output(row, head, channel, sizes, spans, held, keys, logits, denominators, heads, out):
    """Output of up to HEADS heads and CHANNELS channels of one row."""
    channels, chosen, stride, slots = sizes
    start, inside, far = spans[3 * row], spans[3 * row + 1], spans[3 * row + 2]
    count, vecs = min(HEADS, heads - head), min(CHANNELS, channels - channel) // LANES
    to, p_at = (row * heads + head) * channels + channel, row * slots * stride + head
    _add_keys(logits, p_at, stride, count, held, start * channels + channel, inside, channels, vecs, out, to, False)
    p_at, at = p_at + inside * stride, row * chosen * channels + channel
    _add_keys(logits, p_at, stride, count, keys, at, far, channels, vecs, out, to, True)
    if inside + far:
        _divide(out, to, channels, vecs, denominators, row * stride + head, count)


def split_sizes(rows: Any, channels: Any, chosen: Any, window: Any, stride: Any) -> tuple[Any, ...]:
    """fp32 values of the room that `attend_split` works in, array by array."""
    slots = window + chosen
    return rows * stride * channels, LANES * channels, rows * chosen * channels, rows * slots * stride, rows * stride


_split_sizes = inlined(split_sizes)


@kernel(SIGNATURE[:-1] + ", float32[::1])", parallel=True)
def attend_split(q, positions, near, region, topk, sink, heads, scale, native, tasks, out, room):
    rows, stride, held = positions.size, sink.size, near[0]
    channels, chosen, panels = q.size // (rows * heads), topk.size // rows, stride // LANES
    slots = near[3] + chosen
    sizes = (channels, chosen, stride, slots)
    a, b, c, d, e = _split_sizes(rows, channels, chosen, near[3], stride)
    turned, padded, keys = room[:a], room[a : a + b], room[a + b : a + b + c]
    logits, denominators = room[a + b + c : a + b + c + d], room[a + b + c + d : a + b + c + d + e]
    groups = np.empty(rows * chosen, np.int64)
    spans = np.empty(3 * rows, np.int64)
    for row in range(rows):
        spans[3 * row], spans[3 * row + 1] = window_span(positions[row], near, channels)
        spans[3 * row + 2] = present(topk, row * chosen, chosen, groups, row * chosen)
        _turn_queries(q, row, heads, channels, padded, turned, row * stride * channels)
    pieces = (slots + SLOTS - 1) // SLOTS
    for unit in prange(rows * pieces):
        slot = unit % pieces * SLOTS
        _split_logits(unit // pieces, slot, sizes, spans, groups, held, region, turned, keys, logits)
    for unit in prange(rows * panels):
        row, head = unit // panels, unit % panels * LANES
        at, n = row * slots * stride + head, spans[3 * row + 1] + spans[3 * row + 2]
        _softmax(logits, at, n, stride, sink, head, scale, native, denominators, row * stride + head)
    high, wide = (heads + HEADS - 1) // HEADS, (channels + CHANNELS - 1) // CHANNELS
    for unit in prange(rows * high * wide):
        row, head, channel = unit // (high * wide), unit // wide % high * HEADS, unit % wide * CHANNELS
        _split_output(row, head, channel, sizes, spans, held, keys, logits, denominators, heads, out)


ALONE = 1 << 21
"""Products (queries x channels x slots) below which waking another thread costs more than it saves."""


def kernels(path: Path) -> tuple[Kernel, ...]:
    """What `sparse_attention` runs on `path`; odd head dims take the plain loops on any."""
    return (attend_plain,) if path == "plain" else (attend_rows, attend_split)


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
    """As the plain `sparse_attention`, which also takes the formats that kernels do not read. No gradients.

    path: of `rorqual.ops.cpu`; None takes the best. Head dims that are no multiple of 32 take the plain loops.
    """
    if (region is not None and region.fmt not in DECODED) or q_THC.device.type != "cpu":
        return plain_sparse_attention(
            q_THC, positions_T, window_LC, base, floor, window, region, block_table, topk_TK, sink_H, scale, native
        )
    refuse_gradients(q_THC, window_LC, sink_H)
    rows, heads, channels = q_THC.shape
    out = torch.empty(rows, heads, channels)
    if not out.numel():
        return out
    arrays, topk = NO_REGION, positions_T[:0]
    if topk_TK is not None and topk_TK.numel():
        assert region is not None and block_table is not None
        check_pages(region, block_table, topk_TK)
        arrays, topk = region_arrays(region, block_table), topk_TK
    vectors = (path or best_path()) != "plain" and channels % BLOCK == 0
    # Too few rows to keep every thread busy to the end.
    split = vectors and rows < 2 * workers()
    run = attend_split if split else attend_rows if vectors else attend_plain
    products = rows * heads * channels * (window + topk.shape[-1])
    tasks = 1 if products < ALONE else 0 if split else min(workers(), rows)
    sink = torch.nn.functional.pad(sink_H.detach(), (0, -heads % LANES))
    near = (_floats(window_LC), base, floor, window)
    inputs = (_floats(q_THC), positions_T.contiguous().numpy(), near, arrays, topk.contiguous().view(-1).numpy())
    sizes = split_sizes(rows, channels, topk.shape[-1], window, sink.shape[0])
    room = (np.empty(sum(sizes), np.float32),) if split else ()
    run(*inputs, _floats(sink), heads, np.float32(scale), native, tasks, out.view(-1).numpy(), *room, tasks=tasks)
    return out


def _floats(x: Tensor) -> Any:
    return x.detach().to(torch.float32).contiguous().view(-1).numpy()
