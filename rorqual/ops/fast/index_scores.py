"""Index scores of FP4 keys: the Numba twin of `rorqual.ops.reference.index_scores`, the same bits on every path.

    vnni     codes as small integers: a block of 32 channels is 8 x `vpdpbusd`, then one multiply-add with both scales.
             Keys are stored 2 v + 12, unsigned; sum (2 k + 12)(2 q) - 12 sum 2 q = 4 k.q
    vector   dequantised fp32, 16 heads a vector
    plain    loops

Decoding a key costs about as much as scoring it once, so a block of keys is decoded once for a chunk of rows.

Kernel arrays are flat. R rows, P panels of 16 heads (the last padded with weight 0), D channels, B blocks of 32:
q_codes [R, H, D/2], q_scales [R, H, B], w [R, 16 P], q panels [R, P, D, 16] (vnni: [R, P, B, 8, 16, 4]).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor
from torch.nn.functional import pad

from rorqual.formats.spec import E2M1_E8M0_32
from rorqual.ops.cpu import Path, best_path
from rorqual.ops.fast.decode import (
    E8M0,
    ENTRIES,
    PAIRS,
    check_groups,
    check_pages,
    decode_row,
    decode_row_plain,
    e2m1_block,
    e2m1_bytes,
    e2m1_query_bytes,
    locate,
    locate_slot,
    region_arrays,
)
from rorqual.ops.fast.kernel import allocating, inlined, kernel, workers
from rorqual.ops.fast.tiles import (
    TILE_ROWS,
    TILE_VECS,
    add_scaled,
    dot_bytes,
    integer_rows,
    multiply_add,
    plus,
    transpose,
    weigh,
    write_lane_sums,
    zeros,
)
from rorqual.ops.fast.vectors import LANES, multiply, round_bf16_scalar, splat, store
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference import index_scores as plain

BLOCK = plain.BLOCK
KEYS = 48
"""Keys decoded together: a multiple of every tile's rows, and within the first-level cache as fp32."""
ROWS = 64
"""Rows scored against one decoding of a block of keys."""
VNNI_ROWS, VNNI_VECS = 4, 2

_HIDDEN = np.float32(-np.inf)
_SIGNATURE = (
    "void(uint8[::1], int64[::1], int64[::1], uint8[::1], uint8[::1], float32[::1], int64[::1], int64[::1],"
    " int64, int64, int64, int64, boolean, int64, float32[::1])"
)


@inlined
def _reach(visible, first, last, group0, start, n):  # type: ignore[no-untyped-def]
    """How many of a block's n keys some row of [first, last) sees; the rest must not be read."""
    most = 0
    for row in range(first, last):
        most = max(most, visible[row] - group0 - start)
    return min(n, most)


@inlined
def _find(geometry, table, index, at, group0, n, codes_at, scales_at):  # type: ignore[no-untyped-def]
    """Where n keys stand: of index[at ..], or of groups [group0, group0 + n); -1 where the index is."""
    page = group0 // geometry[ENTRIES]
    slot = group0 - page * geometry[ENTRIES]
    for i in range(n):
        if index.size > 0:
            codes_at[i], scales_at[i] = -1, -1
            if index[at + i] >= 0:
                codes_at[i], scales_at[i] = locate(geometry, table, index[at + i])
        else:
            codes_at[i], scales_at[i] = locate_slot(geometry, table[page], slot)
            slot += 1
            if slot == geometry[ENTRIES]:
                page, slot = page + 1, 0


@inlined
def _emit(found, seen, n, index, at, out):  # type: ignore[no-untyped-def]
    """One row's scores of a block to their place, -inf where hidden or (index not empty) absent."""
    row_out = out[at : at + n]
    for i in range(n):
        row_out[i] = found[i] if i < seen else _HIDDEN
    if index.size > 0:
        for i in range(n):
            if index[at + i] < 0:
                row_out[i] = _HIDDEN


def _vnni_panels(vecs: int) -> Any:
    """Part: add `vecs` panels' weighted dots to the lanes of a tile of keys."""
    rows = VNNI_ROWS
    tile_zeros, start, dot = zeros(rows, vecs), integer_rows(rows, vecs), dot_bytes(rows, vecs)
    scale, tile_weigh = add_scaled(rows, vecs), weigh(rows, vecs)

    @inlined
    def panels(lanes, keys, key_at, key_scales, scale_at, blocks, q, q_at, q_scales, corrections, s_at, w, w_at, native):  # type: ignore[no-untyped-def]
        width = blocks * BLOCK
        total = tile_zeros()
        for b in range(blocks):
            dots = start(corrections, s_at, blocks * LANES)
            for step in range(BLOCK // 4):
                dots = dot(dots, keys, key_at + step * 4, width, q, q_at + step * 64, width * LANES)
            total = scale(total, dots, key_scales, scale_at + b, blocks, q_scales, s_at, blocks * LANES)
            key_at += BLOCK
            q_at += BLOCK * LANES
            s_at += LANES
        return tile_weigh(lanes, total, w, w_at, native)

    return panels


_vnni_wide, _vnni_narrow = _vnni_panels(VNNI_VECS), _vnni_panels(1)
_vnni_lanes, _vnni_write = zeros(VNNI_ROWS, 1), write_lane_sums(VNNI_ROWS)


@inlined
def _vnni_row(keys, key_scales, n, row, panels, blocks, q, q_scales, corrections, w, native, found):  # type: ignore[no-untyped-def]
    """Scores of one row against the first n keys of a block."""
    width = blocks * BLOCK
    for key in range(0, n, VNNI_ROWS):
        lanes = _vnni_lanes()
        k, ks = key * width, key * blocks
        p = row * panels
        while p < (row + 1) * panels:
            qa, sa, wa = p * width * LANES, p * blocks * LANES, p * LANES
            if p + VNNI_VECS <= (row + 1) * panels:
                lanes = _vnni_wide(
                    lanes, keys, k, key_scales, ks, blocks, q, qa, q_scales, corrections, sa, w, wa, native
                )
                p += VNNI_VECS
            else:
                lanes = _vnni_narrow(
                    lanes, keys, k, key_scales, ks, blocks, q, qa, q_scales, corrections, sa, w, wa, native
                )
                p += 1
        _vnni_write(lanes, found, key, native)


@inlined
def _vnni_query(q_codes, q_scales, row, panels, blocks, q, scales, corrections):  # type: ignore[no-untyped-def]
    """One row's queries (heads padded to whole panels) as signed bytes, scales a quarter of theirs, corrections."""
    for p in range(row * panels, (row + 1) * panels):
        for b in range(blocks):
            at = (p * blocks + b) * LANES
            source = (p * LANES * blocks + b) * LANES
            e2m1_query_bytes(q_codes, source, blocks * LANES, q, corrections, at * BLOCK, at)
            for lane in range(LANES):
                scales[at + lane] = np.float32(0.25) * E8M0[q_scales[(p * LANES + lane) * blocks + b]]


@allocating
def _vnni_task(  # type: ignore[no-untyped-def]
    task, tasks, pool, geometry, table, q, q_scales, corrections, w, visible, index, group0, count, rows, width, native, out
):
    panels, blocks, own = w.size // (rows * LANES), width // BLOCK, index.size > 0
    chunk = 1 if own else ROWS
    chunks, key_blocks = (rows + chunk - 1) // chunk, (count + KEYS - 1) // KEYS
    keys, key_scales = np.empty(KEYS * width, np.uint8), np.empty(KEYS * blocks, np.float32)
    found = np.empty(KEYS, np.float32)
    codes_at, scales_at = np.empty(KEYS, np.int64), np.empty(KEYS, np.int64)
    for unit in range(task, chunks * key_blocks, tasks):
        first, start = unit % chunks * chunk, unit // chunks * KEYS
        last, n = min(first + chunk, rows), min(KEYS, count - start)
        readable = n if own else _reach(visible, first, last, group0, start, n)
        _find(geometry, table, index, first * count + start, group0 + start, readable, codes_at, scales_at)
        for i in range(readable):
            if codes_at[i] >= 0:
                for b in range(blocks):
                    e2m1_bytes(pool, codes_at[i] + b * LANES, keys, i * width + b * BLOCK)
                    key_scales[i * blocks + b] = E8M0[pool[scales_at[i] + b]]
        for row in range(first, last):
            seen = n if own else min(n, visible[row] - group0 - start)
            _vnni_row(keys, key_scales, seen, row, panels, blocks, q, q_scales, corrections, w, native, found)
            _emit(found, seen, n, index, row * count + start, out)


@kernel(_SIGNATURE, parallel=True)
def _scores_vnni(  # type: ignore[no-untyped-def]
    pool, geometry, table, q_codes, q_scales, w, visible, index, group0, count, rows, width, native, tasks, out
):
    panels, blocks = w.size // (rows * LANES), width // BLOCK
    q = np.empty(w.size * width, np.int8)
    scales, corrections = np.empty(w.size * blocks, np.float32), np.empty(w.size * blocks, np.int32)
    for row in range(rows):
        _vnni_query(q_codes, q_scales, row, panels, blocks, q, scales, corrections)
    for task in prange(tasks):
        _vnni_task(
            task, tasks, pool, geometry, table, q, scales, corrections, w, visible, index, group0, count, rows, width,
            native, out,
        )


def _vector_panels(vecs: int) -> Any:
    """Part: as `_vnni_panels`, from fp32 keys and queries."""
    tile_zeros, tile_plus = zeros(TILE_ROWS, vecs), plus(TILE_ROWS, vecs)
    update, tile_weigh = multiply_add(TILE_ROWS, vecs), weigh(TILE_ROWS, vecs)

    @inlined
    def panels(lanes, keys, key_at, width, q, q_at, w, w_at, native):  # type: ignore[no-untyped-def]
        total = tile_zeros()
        for b in range(0, width, BLOCK):
            dots = tile_zeros()
            for d in range(b, b + BLOCK):
                dots = update(dots, keys, key_at + d, width, q, q_at + d * LANES, width * LANES)
            total = tile_plus(total, dots)
        return tile_weigh(lanes, total, w, w_at, native)

    return panels


_vector_wide, _vector_narrow = _vector_panels(TILE_VECS), _vector_panels(1)
_vector_lanes, _vector_write = zeros(TILE_ROWS, 1), write_lane_sums(TILE_ROWS)


@inlined
def _vector_row(keys, n, row, panels, width, q, w, native, found):  # type: ignore[no-untyped-def]
    """As `_vnni_row`."""
    for key in range(0, n, TILE_ROWS):
        lanes = _vector_lanes()
        p = row * panels
        while p < (row + 1) * panels:
            if p + TILE_VECS <= (row + 1) * panels:
                lanes = _vector_wide(lanes, keys, key * width, width, q, p * width * LANES, w, p * LANES, native)
                p += TILE_VECS
            else:
                lanes = _vector_narrow(lanes, keys, key * width, width, q, p * width * LANES, w, p * LANES, native)
                p += 1
        _vector_write(lanes, found, key, native)


@allocating
def _vector_query(q_codes, q_scales, row, panels, width, q):  # type: ignore[no-untyped-def]
    """One row's queries, dequantised, sixteen heads side by side."""
    heads = np.empty(LANES * width, np.float32)
    for p in range(row * panels, (row + 1) * panels):
        for lane in range(LANES):
            head = p * LANES + lane
            for b in range(width // BLOCK):
                first, second = e2m1_block(q_codes, (head * width // 2) + b * LANES)
                scale = splat(E8M0[q_scales[head * (width // BLOCK) + b]])
                store(heads, lane * width + b * BLOCK, multiply(first, scale))
                store(heads, lane * width + b * BLOCK + LANES, multiply(second, scale))
        for d in range(0, width, LANES):
            transpose(heads, d, width, q, (p * width + d) * LANES)


@allocating
def _vector_task(  # type: ignore[no-untyped-def]
    task, tasks, pool, geometry, table, q, w, visible, index, group0, count, rows, width, native, out
):
    panels, own = w.size // (rows * LANES), index.size > 0
    chunk = 1 if own else ROWS
    chunks, key_blocks = (rows + chunk - 1) // chunk, (count + KEYS - 1) // KEYS
    keys, found = np.empty(KEYS * width, np.float32), np.empty(KEYS, np.float32)
    codes_at, scales_at = np.empty(KEYS, np.int64), np.empty(KEYS, np.int64)
    for unit in range(task, chunks * key_blocks, tasks):
        first, start = unit % chunks * chunk, unit // chunks * KEYS
        last, n = min(first + chunk, rows), min(KEYS, count - start)
        readable = n if own else _reach(visible, first, last, group0, start, n)
        _find(geometry, table, index, first * count + start, group0 + start, readable, codes_at, scales_at)
        for i in range(readable):
            if codes_at[i] >= 0:
                decode_row(pool, codes_at[i], scales_at[i], geometry, E8M0, width, keys, i * width)
        for row in range(first, last):
            seen = n if own else min(n, visible[row] - group0 - start)
            _vector_row(keys, seen, row, panels, width, q, w, native, found)
            _emit(found, seen, n, index, row * count + start, out)


@kernel(_SIGNATURE, parallel=True)
def _scores_vector(  # type: ignore[no-untyped-def]
    pool, geometry, table, q_codes, q_scales, w, visible, index, group0, count, rows, width, native, tasks, out
):
    panels = w.size // (rows * LANES)
    q = np.empty(w.size * width, np.float32)
    for row in range(rows):
        _vector_query(q_codes, q_scales, row, panels, width, q)
    for task in prange(tasks):
        _vector_task(
            task, tasks, pool, geometry, table, q, w, visible, index, group0, count, rows, width, native, out
        )


@inlined
def _plain_block_dots(keys, q, dots):  # type: ignore[no-untyped-def]
    """dots [KEYS] of one head with a block of keys [32, KEYS], four channels a pass; exact, so in any order."""
    dots[:] = np.float32(0)
    for d in range(0, q.size, 4):
        a, b = keys[d * KEYS : (d + 1) * KEYS], keys[(d + 1) * KEYS : (d + 2) * KEYS]
        c, e = keys[(d + 2) * KEYS : (d + 3) * KEYS], keys[(d + 3) * KEYS : (d + 4) * KEYS]
        q_a, q_b, q_c, q_e = q[d], q[d + 1], q[d + 2], q[d + 3]
        for i in range(dots.size):
            dots[i] += (a[i] * q_a + b[i] * q_b) + (c[i] * q_c + e[i] * q_e)


@inlined
def _plain_weigh(total, weight, native, lane):  # type: ignore[no-untyped-def]
    for i in range(lane.size):
        dot = round_bf16_scalar(total[i]) if native else total[i]
        product = (np.float32(0) if dot < np.float32(0) else dot) * weight
        lane[i] += round_bf16_scalar(product) if native else product


@inlined
def _plain_row(keys, row, panels, width, q, w, native, dots, total, lanes, found):  # type: ignore[no-untyped-def]
    """Scores of one row against a whole block of keys [D, KEYS], key by key side by side."""
    lanes[:] = np.float32(0)
    for head in range(row * panels * LANES, (row + 1) * panels * LANES):
        total[:] = np.float32(0)
        for d in range(0, width, BLOCK):
            last = min(d + BLOCK, width)
            _plain_block_dots(keys[d * KEYS : last * KEYS], q[head * width + d : head * width + last], dots)
            for i in range(total.size):
                total[i] += dots[i]
        lane = head % LANES
        _plain_weigh(total, w[head], native, lanes[lane * KEYS : (lane + 1) * KEYS])
    half = LANES // 2
    while half:
        for i in range(half * KEYS):
            lanes[i] += lanes[half * KEYS + i]
        half //= 2
    for i in range(KEYS):
        found[i] = round_bf16_scalar(lanes[i]) if native else lanes[i]


@allocating
def _plain_task(  # type: ignore[no-untyped-def]
    task, tasks, pool, geometry, table, q, w, visible, index, group0, count, rows, width, native, out
):
    panels, own = w.size // (rows * LANES), index.size > 0
    chunk = 1 if own else ROWS
    chunks, key_blocks = (rows + chunk - 1) // chunk, (count + KEYS - 1) // KEYS
    keys, key, lanes = np.empty(width * KEYS, np.float32), np.empty(width, np.float32), np.empty(LANES * KEYS, np.float32)
    dots, total, found = np.empty(KEYS, np.float32), np.empty(KEYS, np.float32), np.empty(KEYS, np.float32)
    codes_at, scales_at = np.empty(KEYS, np.int64), np.empty(KEYS, np.int64)
    for unit in range(task, chunks * key_blocks, tasks):
        first, start = unit % chunks * chunk, unit // chunks * KEYS
        last, n = min(first + chunk, rows), min(KEYS, count - start)
        readable = n if own else _reach(visible, first, last, group0, start, n)
        _find(geometry, table, index, first * count + start, group0 + start, readable, codes_at, scales_at)
        for i in range(readable):
            if codes_at[i] >= 0:
                decode_row_plain(pool, codes_at[i], scales_at[i], geometry, E8M0, width, key, 0)
                for d in range(width):
                    keys[d * KEYS + i] = key[d]
        for row in range(first, last):
            seen = n if own else min(n, visible[row] - group0 - start)
            if seen > 0:
                _plain_row(keys, row, panels, width, q, w, native, dots, total, lanes, found)
            _emit(found, seen, n, index, row * count + start, out)


@kernel(_SIGNATURE, parallel=True)
def _scores_plain(  # type: ignore[no-untyped-def]
    pool, geometry, table, q_codes, q_scales, w, visible, index, group0, count, rows, width, native, tasks, out
):
    q = np.empty(w.size * width, np.float32)
    for i in range(q.size // 2):
        scale = E8M0[q_scales[2 * i // BLOCK]]
        q[2 * i], q[2 * i + 1] = PAIRS[q_codes[i], 0] * scale, PAIRS[q_codes[i], 1] * scale
    for task in prange(tasks):
        _plain_task(
            task, tasks, pool, geometry, table, q, w, visible, index, group0, count, rows, width, native, out
        )


KERNELS = {"vnni": _scores_vnni, "vector": _scores_vector, "plain": _scores_plain}


def index_scores(
    q_codes_RHb: Tensor,
    q_scales_RHs: Tensor,
    w_RH: Tensor,
    region: PagedRegion,
    block_table: Tensor,
    group0: int,
    group1: int,
    visible_R: Tensor,
    native: bool,
    *,
    path: Path | None = None,
) -> Tensor:
    """As the plain `index_scores`, which also takes the formats other than E2M1/E8M0/32.

    path: of `rorqual.ops.cpu`; None takes the best.
    """
    if region.fmt != E2M1_E8M0_32 or region.pool.device.type != "cpu":
        return plain.index_scores(
            q_codes_RHb, q_scales_RHs, w_RH, region, block_table, group0, group1, visible_R, native
        )
    rows, count = q_codes_RHb.shape[0], group1 - group0
    if rows == 0 or count == 0:
        return torch.empty(rows, count)
    check_groups(region, block_table, group0, min(group1, int(visible_R.max())))
    empty = torch.empty(0, dtype=torch.int64)
    units = -(-count // KEYS) * -(-rows // ROWS)
    return _run(path, q_codes_RHb, q_scales_RHs, w_RH, region, block_table, visible_R, empty, group0, count, units, native)


def index_scores_at(
    q_codes_RHb: Tensor,
    q_scales_RHs: Tensor,
    w_RH: Tensor,
    region: PagedRegion,
    block_table: Tensor,
    index_RC: Tensor,
    native: bool,
    *,
    path: Path | None = None,
) -> Tensor:
    """As the plain `index_scores_at`; `path` as in `index_scores`."""
    if region.fmt != E2M1_E8M0_32 or region.pool.device.type != "cpu":
        return plain.index_scores_at(q_codes_RHb, q_scales_RHs, w_RH, region, block_table, index_RC, native)
    rows, count = index_RC.shape
    if index_RC.numel() == 0:
        return torch.empty(rows, count)
    check_pages(region, block_table, index_RC)
    units = -(-count // KEYS) * rows
    visible = torch.empty(0, dtype=torch.int64)
    return _run(path, q_codes_RHb, q_scales_RHs, w_RH, region, block_table, visible, index_RC, 0, count, units, native)


def _run(
    path: Path | None,
    q_codes_RHb: Tensor,
    q_scales_RHs: Tensor,
    w_RH: Tensor,
    region: PagedRegion,
    block_table: Tensor,
    visible_R: Tensor,
    index: Tensor,
    group0: int,
    count: int,
    units: int,
    native: bool,
) -> Tensor:
    rows, heads, _ = q_codes_RHb.shape
    w = w_RH.detach().to(torch.bfloat16).float() if native else w_RH.detach()
    if heads % LANES:
        more = -heads % LANES
        w = pad(w, (0, more))
        q_codes_RHb, q_scales_RHs = pad(q_codes_RHb, (0, 0, 0, more)), pad(q_scales_RHs, (0, 0, 0, more))
    out = torch.empty(rows, count)
    tasks = min(workers(), units)
    pool, geometry, table, _ = region_arrays(region, block_table)
    arrays = (_flat(q_codes_RHb), _flat(q_scales_RHs), _flat(w), _flat(visible_R), _flat(index))
    shape = (group0, count, rows, region.width, native, tasks)
    run = KERNELS[path or best_path()]
    run(pool, geometry, table, *arrays, *shape, out.view(-1).numpy(), tasks=tasks)
    return out


def _flat(x: Tensor) -> Any:
    return x.contiguous().view(-1).numpy()
