"""What a few rows write to a source's global KV, fused: the twin of `model.compressor.Compressor`'s `forward`.

    products with wkv and wgate                             columns shared out among threads
    complete groups pooled, from held rows and new ones     group by group
    norm -> wk -> norm: their index keys
    both rotated, quantised, stored in their pages; the new rows kept in their tail

Nothing is stored before everything is quantised, so a NaN leaves tails and pages as they are. Products, norms and
quantisers are the parts of `linear`, `norm` and `codec`, in their order: the bits are those of the op-by-op path but
for the last bits of the exp that pools groups.

T rows, D hidden, C head dim, K index dim, m ratio, G complete groups, P segments, R rows of a tail.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.formats.codec import check_finite
from rorqual.formats.spec import NumberFormat
from rorqual.formats.weights import TILE, DenseWeight, Weight
from rorqual.ops.cpu import Path
from rorqual.ops.fast.arrays import angle_arrays, floats, pool_arrays
from rorqual.ops.fast.codec import quantize_e2m1_e4m3, quantize_e2m1_e8m0, quantize_e4m3_e8m0
from rorqual.ops.fast.decode import CODE_BYTES, DECODED, ENTRIES, PAGE_BYTES, SCALE_BYTES, locate_slot
from rorqual.ops.fast.kernel import Kernel, kernel, refuse_gradients
from rorqual.ops.fast.latent_rows import turned
from rorqual.ops.fast.linear import has_vectors, parts_of
from rorqual.ops.fast.norm import norm_row
from rorqual.ops.fast.row_kernels import address, columns, pack_row, part, rooms, share_vector
from rorqual.ops.fast.row_vectors import BF16, Array
from rorqual.ops.paged import GroupWrite, PagedRegion

_F32, _U32 = np.float32, np.uint32
_BF16 = BF16.code, BF16.unit, BF16.scale_rows
_ROW, _COUNT, _START, _GROUP, _GROUPS, _SKIP, _SLOT, _TABLE, _PAGES = range(9)
"""Numbers of a segment, in the order of `GroupWrite`; its block table is pages [table, table + pages) of all tables."""
_STORED, _NOT_FINITE, _NO_PAGE = range(3)


@part
def _held(new_TC, tail_R2C, which, segment, position):
    """A row to pool: a new one, or one of the tail (which: 0 kv, 1 score)."""
    if position >= segment[_START]:
        return new_TC[segment[_ROW] + position - segment[_START]]
    return tail_R2C[position % tail_R2C.shape[0], which]


@part
def _pool(kv_TC, score_TC, tail_R2C, segment, first, work_mC, out_C):
    """Weighted sum of the group whose first row is at position `first`: a softmax a channel, sums in token order."""
    ratio, channels = work_mC.shape[0] - 2, out_C.shape[0]
    top_C, total_C = work_mC[ratio], work_mC[ratio + 1]
    top_C[:], total_C[:] = -np.inf, 0
    for t in range(ratio):
        score_C = _held(score_TC, tail_R2C, 1, segment, first + t)
        for c in range(channels):
            top_C[c] = max(top_C[c], score_C[c])
    for t in range(ratio):
        score_C = _held(score_TC, tail_R2C, 1, segment, first + t)
        for c in range(channels):
            work_mC[t, c] = math.exp(score_C[c] - top_C[c])
            total_C[c] += work_mC[t, c]
    for t in range(ratio):
        kv_C = _held(kv_TC, tail_R2C, 0, segment, first + t)
        for c in range(channels):
            weighted = work_mC[t, c] / total_C[c] * kv_C[c]
            out_C[c] = weighted if t == 0 else out_C[c] + weighted


@part
def _pool_all(kv_TC, score_TC, tails, segments_P9, ratio, out_GC):
    i, work_mC = 0, np.empty((ratio + 2, out_GC.shape[1]), np.float32)
    for p in range(segments_P9.shape[0]):
        segment = segments_P9[p]
        for g in range(segment[_GROUP], segment[_GROUP] + segment[_GROUPS]):
            if ratio == 1:
                out_GC[i] = kv_TC[segment[_ROW] + g - segment[_START]]
            else:
                _pool(kv_TC, score_TC, tails[segment[_SLOT]], segment, g * ratio, work_mC, out_GC[i])
            i += 1


@part
def _quantise(fmt, values_GW, segments_P9, codes_GB, scales_GS):
    """What is to be stored, by place of the format in `DECODED`; False where there is a NaN or an Inf."""
    i, bits = 0, values_GW.view(np.uint32)
    for p in range(segments_P9.shape[0]):
        first, i = i + segments_P9[p, _SKIP], i + segments_P9[p, _GROUPS]
        b, codes, scales = bits[first:i], codes_GB[first:i], scales_GS[first:i]
        if fmt == 0:
            finite = quantize_e2m1_e4m3(b, _U32(0), 16, codes, scales)
        elif fmt == 1:
            finite = quantize_e2m1_e8m0(b, _U32(0), 32, codes, scales)
        else:
            finite = quantize_e4m3_e8m0(b, _U32(0), 32, codes, scales)
        if not finite:
            return False
    return True


@part
def _has_pages(segments_P9, tables, geometry, pages):
    for p in range(segments_P9.shape[0]):
        segment = segments_P9[p]
        for g in range(segment[_GROUP] + segment[_SKIP], segment[_GROUP] + segment[_GROUPS]):
            page = g // geometry[ENTRIES]
            if page >= segment[_PAGES] or not 0 <= tables[segment[_TABLE] + page] < pages:
                return False
    return True


@part
def _store_groups(pool, geometry, tables, segments_P9, codes_GB, scales_GS):
    i = 0
    for p in range(segments_P9.shape[0]):
        segment = segments_P9[p]
        for n in range(segment[_GROUPS]):
            if n >= segment[_SKIP]:
                page = (segment[_GROUP] + n) // geometry[ENTRIES]
                slot = segment[_GROUP] + n - page * geometry[ENTRIES]
                codes_at, scales_at = locate_slot(geometry, tables[segment[_TABLE] + page], slot)
                pool[codes_at : codes_at + codes_GB.shape[1]] = codes_GB[i]
                pool[scales_at : scales_at + scales_GS.shape[1]] = scales_GS[i]
            i += 1


@part
def _keep(kv_TC, score_TC, tails, segments_P9):
    """New rows into their tails: of more than a tail's worth the last ones."""
    held = tails.shape[1]
    for p in range(segments_P9.shape[0]):
        segment = segments_P9[p]
        for n in range(max(0, segment[_COUNT] - held), segment[_COUNT]):
            tail_2C = tails[segment[_SLOT], (segment[_START] + n) % held]
            tail_2C[0], tail_2C[1] = kv_TC[segment[_ROW] + n], score_TC[segment[_ROW] + n]


@part
def _packed(fmt, geometry, values_GW, segments_P9):
    """(codes, scales, whether all is finite) of what is to be stored."""
    groups = values_GW.shape[0]
    codes_GB = np.empty((groups, geometry[CODE_BYTES]), np.uint8)
    scales_GS = np.empty((groups, geometry[SCALE_BYTES]), np.uint8)
    return codes_GB, scales_GS, _quantise(fmt, values_GW, segments_P9, codes_GB, scales_GS)


_SIGNATURE = (
    "void(uint16[::1], float32[:, ::1], UniTuple(int64, 3), UniTuple(float32[::1], 2), "
    "Tuple((int64, float32, boolean, int64, int64)), int64[:, ::1], Tuple((uint8[::1], UniTuple(int64[::1], 2), "
    "int64[::1])), float32[:, :, :, ::1], UniTuple(float32[:, ::1], 2), float32[::1], UniTuple(float32[:, ::1], 2), "
    "int64[::1], int64)"
)


@kernel(_SIGNATURE, parallel=True)
def _compress(bf16, x_TD, weights, norms, settings, segments_P9, pages, tails, angles, room, values, status, parts):
    """weights: addresses of wkv, wgate (0 without), wk. norms: of latents, of keys. settings: m, eps, native, places in
    `DECODED` of the formats of main KV and keys. pages: pool, geometry of main KV and keys, all block tables. tails:
    [slots, R, 2, C]. angles: cos, sin [G, r]. room: [T D + G C], used by address and so not the kernel's own. values:
    main KV [G, C] and keys [G, K] before quantisation, written. status: one number, written."""
    (rows, hidden), (main_GC, key_GK), (wkv, wgate, wk) = x_TD.shape, values, weights
    (ratio, eps, native, main_fmt, key_fmt), (pool, (main_at, key_at), tables) = settings, pages
    (groups, channels), width, (cos_Gr, sin_Gr) = main_GC.shape, key_GK.shape[1], angles
    x_packed = room[: rows * hidden].reshape(rows, hidden)
    latent_packed = room[rows * hidden :].reshape(groups, channels)
    for t in range(rows):
        pack_row(x_TD[t], True, False, x_packed[t])
    x_T = address(x_packed) + np.arange(rows) * (hidden * 4)
    kv_TC, score_TC = np.empty((rows, channels), np.float32), np.empty((rows if wgate else 0, channels), np.float32)
    for share in prange(parts):
        lanes, wide = rooms(rows)
        n0, n1 = columns(channels, share, parts)
        share_vector(bf16, _BF16, wkv, wkv, channels, hidden, n0, n1, x_T, kv_TC, lanes, wide)
        if wgate:
            share_vector(bf16, _BF16, wgate, wgate, channels, hidden, n0, n1, x_T, score_TC, lanes, wide)
    _pool_all(kv_TC, score_TC, tails, segments_P9, ratio, main_GC)
    for i in range(groups):
        norm_row(main_GC[i], norms[0], eps, native)
        pack_row(main_GC[i], True, False, latent_packed[i])
    if groups:
        lanes, wide = rooms(groups)
        latent_G = address(latent_packed) + np.arange(groups) * (channels * 4)
        share_vector(bf16, _BF16, wk, wk, width, channels, 0, width, latent_G, key_GK, lanes, wide)
    for i in range(groups):
        norm_row(key_GK[i], norms[1], eps, native)
        turned(key_GK[i], cos_Gr[i], sin_Gr[i], native)
        turned(main_GC[i], cos_Gr[i], sin_Gr[i], native)
    main_codes, main_scales, main_finite = _packed(main_fmt, main_at, main_GC, segments_P9)
    key_codes, key_scales, key_finite = _packed(key_fmt, key_at, key_GK, segments_P9)
    count = pool.size // main_at[PAGE_BYTES]
    if not (main_finite and key_finite):
        status[0] = _NOT_FINITE
    elif not (_has_pages(segments_P9, tables, main_at, count) and _has_pages(segments_P9, tables, key_at, count)):
        status[0] = _NO_PAGE
    else:
        status[0] = _STORED
        if wgate:
            _keep(kv_TC, score_TC, tails, segments_P9)
        _store_groups(pool, main_at, tables, segments_P9, main_codes, main_scales)
        _store_groups(pool, key_at, tables, segments_P9, key_codes, key_scales)


def kernels(path: Path | None = None) -> tuple[Kernel, ...]:
    """What `compress_rows` runs on `path`."""
    return (_compress,) if has_vectors(path) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressRows:
    """A compressor as the kernel takes it: addresses of its weights, which `held` keeps in memory."""

    weights: tuple[int, int, int]
    norms: tuple[Array, Array]
    settings: tuple[int, Any, int, int]
    formats: tuple[NumberFormat, NumberFormat]
    shape: tuple[int, int, int]
    held: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        wkv: Weight,
        wgate: Weight | None,
        wk: Weight,
        norm_C: Tensor,
        k_norm_K: Tensor,
        *,
        ratio: int,
        eps: float,
        formats: tuple[NumberFormat, NumberFormat],
    ) -> CompressRows | None:
        """None where the kernel does not read a layer: weights that are not bf16 or lie in no memory of their own,
        widths that are no multiple of 32, other cache formats than the scaled ones.

        Args:
            wkv: [C, D].
            wgate: [C, D]; None exactly where the ratio is 1.
            wk: [K, C].
            norm_C: of the latent.
            k_norm_K: of the key.
            ratio: m.
            eps: of both norms.
            formats: of main KV, of keys.
        """
        dense: list[Any] = [wkv, wk] if wgate is None else [wkv, wk, wgate]
        if not all(type(w) is DenseWeight and w.tensor.dtype == torch.bfloat16 and w.addresses for w in dense):
            return None
        (channels, hidden), width = wkv.shape, wk.shape[0]
        if channels % TILE or hidden % TILE or width % TILE or not all(fmt in DECODED for fmt in formats):
            return None
        addresses = [w.addresses[0] for w in dense]
        norms = (norm_C.detach().float().contiguous().numpy(), k_norm_K.detach().float().contiguous().numpy())
        return cls(
            weights=(addresses[0], addresses[2] if wgate is not None else 0, addresses[1]),
            norms=norms,
            settings=(ratio, _F32(eps), DECODED.index(formats[0]), DECODED.index(formats[1])),
            formats=formats,
            shape=(hidden, channels, width),
            held=(dense,),
        )


_NO_TAILS = np.empty((0, 0, 2, 0), np.float32)


def compress_rows(
    x_TD: Tensor,
    layer: CompressRows,
    segments: Sequence[GroupWrite],
    tails: Tensor | None,
    regions: tuple[PagedRegion, PagedRegion],
    cos_sin: tuple[Tensor, Tensor],
    native: bool,
) -> None:
    """Store the groups that rows complete, and keep the rows.

    Args:
        x_TD: the sub-layer's input, fp32 or bf16.
        layer: from `CompressRows.of`.
        segments: of the rows; rows outside are left alone.
        tails: fp32 [slots, R, 2, C], the source's; None where the ratio is 1.
        regions: of main KV and keys, in one pool.
        cos_sin: [G, r], at the position of each group's first row.
        native: SPEC 3 numerics.

    Raises:
        FormatError: NaN or Inf in what is to be stored. Nothing is.
        IndexError: a group without a page. Nothing is stored.
    """
    refuse_gradients(x_TD)
    x, (hidden, channels, width) = floats(x_TD), layer.shape
    tables, numbers, at = [], [], 0
    for segment in segments:
        *own, table = segment
        numbers.append((*own, at, table.shape[0]))
        tables.append(table)
        at += table.shape[0]
    rows, groups = x.shape[0], sum(segment.groups for segment in segments)
    values = np.empty((groups, channels), np.float32), np.empty((groups, width), np.float32)
    status = np.empty(1, np.int64)
    block_tables = (tables[0] if len(tables) == 1 else torch.cat(tables)).contiguous().numpy()
    (pool, main_at), (_, key_at) = pool_arrays(regions[0]), pool_arrays(regions[1])
    pages = pool, (main_at, key_at), block_tables
    ratio, eps, main_fmt, key_fmt = layer.settings
    settings = ratio, eps, native, main_fmt, key_fmt
    parts = parts_of(rows * hidden * channels * (2 if layer.weights[1] else 1))
    _compress(
        BF16.marker,
        x,
        layer.weights,
        layer.norms,
        settings,
        np.array(numbers, dtype=np.int64),
        pages,
        _NO_TAILS if tails is None else tails.numpy(),
        angle_arrays(cos_sin),
        np.empty(rows * hidden + groups * channels, np.float32),
        values,
        status,
        parts,
        tasks=parts,
    )
    if status[0] != _STORED:
        _refuse(int(status[0]), layer, segments, values)


def _refuse(status: int, layer: CompressRows, segments: Sequence[GroupWrite], values: tuple[Array, ...]) -> None:
    if status == _NO_PAGE:
        raise IndexError(
            f"groups up to {max(s.group + s.groups for s in segments)} leave their block tables or the pool"
        )
    at = 0
    for segment in segments:
        for value, fmt in zip(values, layer.formats, strict=True):
            check_finite(torch.from_numpy(value[at + segment.skip : at + segment.groups]), fmt)
        at += segment.groups
