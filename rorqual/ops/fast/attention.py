"""Attention over a window and selected groups: the Numba twin of `rorqual.ops.reference.attention`.

Three products and a softmax a row, all on sixteen heads or channels side by side:

    queries   turned to panels [P, C, 16] of sixteen heads (the last padded with zeros)
    logits    [S, 16 P], slot by slot, straight from the window and from a decoded copy of the selected groups
    p         in place, and each head's denominator
    output    [H, C], slot by slot in order, window first

Every number is one chain of operations in channel or slot order, and absent slots, which would add zero, are left out:
a row's bits depend on nothing but the row. Of many rows each thread takes whole ones (`attention_rows`); of few,
threads share the parts (`attention_parts`). `attention_plain` holds the loops that any CPU runs.

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
from rorqual.ops.fast.attention_parts import add_keys, divide, dot_keys, softmax, turn_queries
from rorqual.ops.fast.attention_plain import SIGNATURE, attend_plain, present, window_span
from rorqual.ops.fast.attention_rows import rows_task
from rorqual.ops.fast.decode import BLOCK, DECODED, NO_REGION, check_pages, decode_rows, region_arrays
from rorqual.ops.fast.kernel import Kernel, inlined, kernel, refuse_gradients, workers
from rorqual.ops.fast.vectors import LANES
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference.attention import sparse_attention as plain_sparse_attention

# T rows, H heads, C head dim, P panels of 16 heads, L window keys held, K top-k, S slots of a row

SLOTS = 64
"""Slots whose logits are one piece of work when threads share a row."""
HEADS, CHANNELS = 32, 64
"""Heads and channels whose output is one piece."""


@kernel(SIGNATURE, parallel=True)
def attend_rows(q, positions, near, region, topk, sink, heads, scale, native, tasks, out):
    for task in prange(tasks):
        rows_task(task, tasks, q, positions, near, region, topk, sink, heads, scale, native, out)


@inlined
def _split_logits(row, slot, sizes, spans, groups, held, region, turned, keys, logits):
    """Up to SLOTS slots of one row: decode what is not of the window, and the logits of both."""
    channels, chosen, stride, slots = sizes
    start, inside, far = spans[3 * row], spans[3 * row + 1], spans[3 * row + 2]
    q_at, to = row * stride * channels, row * slots * stride
    last = min(slot + SLOTS, inside)
    if slot < last:
        at = (start + slot) * channels
        dot_keys(held, at, last - slot, channels, turned, q_at, stride, logits, to + slot * stride)
    first, last = max(slot, inside) - inside, min(slot + SLOTS, inside + far) - inside
    if first < last:
        decode_rows(region, groups, row * chosen + first, row * chosen + last, channels, keys)
        at, to = (row * chosen + first) * channels, to + (inside + first) * stride
        dot_keys(keys, at, last - first, channels, turned, q_at, stride, logits, to)


@inlined
def _split_output(row, head, channel, sizes, spans, held, keys, logits, denominators, heads, out):
    """Output of up to HEADS heads and CHANNELS channels of one row."""
    channels, chosen, stride, slots = sizes
    start, inside, far = spans[3 * row], spans[3 * row + 1], spans[3 * row + 2]
    count, vecs = min(HEADS, heads - head), min(CHANNELS, channels - channel) // LANES
    to, p_at = (row * heads + head) * channels + channel, row * slots * stride + head
    add_keys(logits, p_at, stride, count, held, start * channels + channel, inside, channels, vecs, out, to, False)
    p_at, at = p_at + inside * stride, row * chosen * channels + channel
    add_keys(logits, p_at, stride, count, keys, at, far, channels, vecs, out, to, True)
    if inside + far:
        divide(out, to, channels, vecs, denominators, row * stride + head, 1, count)


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
        turn_queries(q, row, heads, channels, padded, turned, row * stride * channels)
    pieces = (slots + SLOTS - 1) // SLOTS
    for unit in prange(rows * pieces):
        slot = unit % pieces * SLOTS
        _split_logits(unit // pieces, slot, sizes, spans, groups, held, region, turned, keys, logits)
    for unit in prange(rows * panels):
        row, head = unit // panels, unit % panels * LANES
        at, n = row * slots * stride + head, spans[3 * row + 1] + spans[3 * row + 2]
        softmax(logits, at, n, stride, sink, head, scale, native, denominators, row * stride + head)
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
