"""A layer of a few rows in two kernels, composed of the regions' own: the twin of `model.layer.Layer.forward`.

    begin    enter the attention sub-layer -> its projections     then a source compresses and an index source chooses
    finish   window and attention, segment by segment -> output projections -> enter the experts -> experts -> streams

Each step is the kernel of `hyper_rows`, `latent_rows`, `window`, `attention`, `moe_rows` and `hyper`: the bits are
theirs. What lies between them never leaves the kernel, and what the layers of a step share is made once (`Placed`).

T rows, n copies of the residual, D hidden, H heads, C head dim, Q q_lora rank, K top-k, S segments.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rorqual.formats.codec import check_finite
from rorqual.formats.spec import E4M3_E8M0_32, NumberFormat
from rorqual.formats.weights import TILE
from rorqual.ops.cpu import Path
from rorqual.ops.fast.attention import attend_rows, attend_split
from rorqual.ops.fast.decode import DECODED, E8M0, ENTRIES, PAGE_BYTES, REGION, check_pages
from rorqual.ops.fast.hyper import expand
from rorqual.ops.fast.hyper_rows import MIX, SETTINGS, enter_kernel
from rorqual.ops.fast.kernel import Kernel, kernel, refuse_gradients
from rorqual.ops.fast.latent_rows import ANGLES, latents_kernel, project_kernel
from rorqual.ops.fast.layer_parts import Begun, LayerRows, Placed
from rorqual.ops.fast.linear import has_vectors
from rorqual.ops.fast.moe_rows import moe_kernel
from rorqual.ops.fast.norm import round_row
from rorqual.ops.fast.row_kernels import part
from rorqual.ops.fast.row_vectors import FP4, FP8, FP32, Array
from rorqual.ops.fast.window import GEOMETRY, NO_TABLE, window_kernel
from rorqual.ops.paged import PagedRegion

_F32 = np.float32
_BEGINS = enter_kernel, latents_kernel
_FINISHES = window_kernel, attend_rows, attend_split, project_kernel, enter_kernel, moe_kernel
_enter, _latents = (made.code for made in _BEGINS)
_window, _rows, _split, _project, _enter, _moe = (made.code for made in _FINISHES)

_MARKERS = FP4.marker, FP8.marker, FP32.marker
_MARKED = "Tuple((int8[::1], uint8[::1], float32[::1]))"
_MIX = f"Tuple(({MIX}, {SETTINGS}))"
_BEGUN = (
    "Tuple((float32[:, ::1], float32[:, ::1], float32[:, :, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], "
    "float32[:, :, ::1]))"
)
_BEGIN = (
    f"void({_MARKED}, float32[:, :, ::1], float32[:, ::1], {_MIX}, Tuple((int64[:, ::1], UniTuple(float32[::1], 2), "
    f"float32)), {ANGLES}, boolean, {_BEGUN}, boolean[::1], int64)"
)


@kernel(_BEGIN, calls=_BEGINS)
def _begin(markers, x_TnD, pre_Tn, mix, attention, angles, native, begun, finite_T, parts):
    """begun: what is written, of a `Begun`. mix, attention: of `LayerRows`. finite_T: as of `latent_rows`."""
    (_, fp8, fp32), (inner_TD, qr_TQ, q_THC, kv_TC, new_pre_Tn, post_Tn, comb_Tnn) = markers, begun
    nothing, none = np.empty((0, 0), np.float32), np.empty((0, 0, 0), np.float32)
    mixed = new_pre_Tn, post_Tn, comb_Tnn
    _enter(fp32, x_TnD, nothing, (nothing, none), pre_Tn, mix[0], mix[1], native, x_TnD, mixed, inner_TD, parts)
    weights, norms, eps = attention
    room = np.empty(inner_TD.size + qr_TQ.size, np.float32)
    _latents(fp8, inner_TD, weights, norms, angles, eps, native, room, qr_TQ, q_THC, kv_TC, finite_T, parts)


@part
def _inside(region, topk):
    """Whether every group, -1 aside, lies in the block table, and its page in the pool."""
    pool, geometry, table, _ = region
    pages = pool.shape[0] // geometry[PAGE_BYTES] if topk.shape[0] else 0
    for i in range(topk.shape[0]):
        group = topk[i]
        page = group // geometry[ENTRIES]
        if group < -1 or page >= table.shape[0] or (group >= 0 and not 0 <= table[page] < pages):
            return False
    return True


NOT_FINITE, OUTSIDE = 1, 2
"""What may be wrong; where, stands beside it."""

_SEGMENTS = "int64[:, ::1]"
_PLACED = f"Tuple(({_SEGMENTS}, int64[::1], uint8[::1], int64))"
_FINISH = (
    f"void({_MARKED}, {_BEGUN}, float32[:, :, ::1], {_MIX}, "
    "Tuple((int64[:, ::1], int64[::1], int64, float32[::1], float32)), "
    "Tuple((Tuple((int64, float32[:, ::1])), Tuple((int64[:, ::1], int64[:, ::1], int64[::1], int64[::1])), "
    "UniTuple(int64, 4), Tuple((float32, float32, float32, boolean, boolean)))), "
    f"{ANGLES}, boolean, {_PLACED}, Tuple((uint8[:, :, ::1], int64[::1], int64[::1], float32[::1])), {REGION}, "
    "int64[:, ::1], Tuple((float32[::1], int64, int64)), float32[:, :, ::1], float32[:, ::1], int64[::1], "
    "boolean[::1], int64)"
)


@kernel(_FINISH, calls=_FINISHES)
def _finish(
    markers,
    begun,
    x_TnD,
    mix,
    attention,
    experts,
    angles,
    native,
    placed,
    rings,
    region,
    topk_TK,
    rooms,
    out_TnD,
    pre_Tn,
    wrong,
    finite_T,
    parts,
):
    """rings: of the layer [slots, R, B], and the geometry, table and scales that its rows are decoded by. region: with
    the tables of all segments. rooms: of `Placed.room`. wrong: written, (what, segment); nothing else is when it is not
    (0, 0)."""
    (_, fp8, fp32), (inner_TD, _, q_THC, kv_TC, mid_pre_Tn, post_Tn, comb_Tnn) = markers, begun
    (segments, positions, image_T, reach), (groups, wo_b, rank, sink, scale) = placed, attention
    (rows, heads, channels), chosen, hidden = q_THC.shape, topk_TK.shape[1], inner_TD.shape[1]
    room, for_keys, for_split = rooms
    keys, room = room[:for_keys], room[for_keys:]
    split_room, room = room[:for_split], room[for_split:]
    o_THC, room = room[: q_THC.size].reshape(q_THC.shape), room[q_THC.size :]
    y_TnD, room = room[: x_TnD.size].reshape(x_TnD.shape), room[x_TnD.size :]
    out_TD, room = room[: inner_TD.size].reshape(inner_TD.shape), room[inner_TD.size :]
    next_TD, room = room[: inner_TD.size].reshape(inner_TD.shape), room[inner_TD.size :]
    for i in range(segments.shape[0]):
        row0, row1, start, base, floor, slot, table0, table1 = segments[i]
        own = keys[: (start + row1 - row0 - base) * channels]
        bits = kv_TC[row0:row1].view(np.uint32)
        if not _window(rings[0][slot], bits, start, base, rings[1], rings[2], rings[3], own):
            wrong[0], wrong[1] = NOT_FINITE, i
            return
        pages = (region[0], region[1], region[2][table0:table1], region[3])
        topk = topk_TK[row0:row1].reshape((row1 - row0) * chosen)
        if not _inside(pages, topk):
            wrong[0], wrong[1] = OUTSIDE, i
            return
        near, size = (own, base, floor, reach), (row1 - row0) * heads * channels
        q, o, at = q_THC[row0:row1].reshape(size), o_THC[row0:row1].reshape(size), positions[row0:row1]
        if row1 - row0 < 2 * parts:
            _split(q, at, near, pages, topk, sink, heads, scale, native, 0, o, split_room)
        else:
            _rows(q, at, near, pages, topk, sink, heads, scale, native, parts, o)
    own = room[: o_THC.size + rows * groups.shape[0] * rank]
    _project(fp8, o_THC, groups, wo_b, angles, native, rank, own, out_TD, finite_T, parts)
    _round_rows(out_TD, native)
    for t in range(rows):
        if not finite_T[t]:
            wrong[0] = NOT_FINITE
    mixed = pre_Tn, np.empty_like(post_Tn), np.empty_like(comb_Tnn)
    written = post_Tn, comb_Tnn
    _enter(fp32, x_TnD, out_TD, written, mid_pre_Tn, mix[0], mix[1], native, y_TnD, mixed, next_TD, parts)
    gate, weights, sizes, settings = experts
    own = room[: rows * (hidden + sizes[2] * sizes[0] + sizes[1])]
    _moe(markers, next_TD, image_T, gate, weights, sizes, settings, own, out_TD, finite_T, parts)
    _round_rows(out_TD, native)
    for t in range(rows):
        expand(out_TD[t], y_TnD[t], mixed[1][t], mixed[2][t], out_TnD[t])
        _round_rows(out_TnD[t], native)
        if native and not finite_T[t]:
            wrong[0] = NOT_FINITE


@part
def _round_rows(x_TK, native):
    for t in range(x_TK.shape[0]):
        round_row(x_TK[t], native)


def kernels(path: Path | None = None) -> tuple[Kernel, ...]:
    """What `begin` and `finish` run on `path`."""
    return (_begin, _finish) if has_vectors(path) else ()


def reads(window_fmt: NumberFormat, main_fmt: NumberFormat) -> bool:
    """Whether the kernels read caches of these formats."""
    return window_fmt is E4M3_E8M0_32 and main_fmt in DECODED


_DECODED = GEOMETRY, NO_TABLE, E8M0


def begin(x_TnD: Tensor, pre_Tn: Tensor, layer: LayerRows, placed: Placed, cos_sin: tuple[Tensor, Tensor]) -> Begun:
    """Enter the attention sub-layer and project; what comes back is good until the next layer begins.

    Raises:
        FormatError: NaN or Inf in what native quantises.
    """
    refuse_gradients(x_TnD, pre_Tn)
    begun, native = placed.begun(layer, x_TnD, pre_Tn), placed.native
    turn, begun.back = placed.angles(cos_sin)
    x, pre = begun.streams
    finite, parts = begun.finite, begun.parts
    _begin(_MARKERS, x, pre, layer.mixes[0], layer.latents, turn, native, begun.written, finite, parts, tasks=parts)
    if native and not finite.all():
        _refuse(begun.written[0])
    return begun


def finish(
    begun: Begun,
    layer: LayerRows,
    placed: Placed,
    ring: int,
    region: PagedRegion | None,
    topk_TK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The rest of the layer: streams [T, n, D] in the activation dtype and the next pre [T, n], fp32; the window's keys
    are kept.

    Args:
        begun: of `begin`.
        layer: from `LayerRows.of`.
        placed: of the step.
        ring: the layer's rings in `placed`.
        region: of the main KV that the layer reads, or None.
        topk_TK: int64 groups, -1 padded, or None.

    Raises:
        FormatError: NaN or Inf in what is quantised.
        IndexError: a group that its block table does not hold, or a page outside the pool.
    """
    (x, pre), wrong, parts = begun.streams, begun.wrong, begun.parts
    room = placed.room(layer, 0 if topk_TK is None else topk_TK.shape[1])
    out, next_pre = np.empty(x.shape, np.float32), np.empty(pre.shape, np.float32)
    arrays, topk = placed.region(region, topk_TK)
    _finish(
        _MARKERS,
        begun.written,
        x,
        layer.mixes[1],
        layer.project,
        layer.experts,
        begun.back,
        placed.native,
        placed.placed,
        (placed.rings[ring], *_DECODED),
        arrays,
        topk,
        room,
        out,
        next_pre,
        wrong,
        begun.finite,
        parts,
        tasks=parts,
    )
    if wrong[0] == OUTSIDE:
        own, *_, table = placed.held[int(wrong[1])]
        assert region is not None and topk_TK is not None and table is not None
        check_pages(region, table, topk_TK[own])
        raise IndexError(f"a group below -1 among the selected ones of segment {int(wrong[1])}")
    if wrong[0]:
        _refuse(begun.written[3])
    return placed.give((out, next_pre))


def _refuse(x: Array) -> None:
    check_finite(torch.from_numpy(x), E4M3_E8M0_32)
    check_finite(torch.full((1, TILE), torch.nan), E4M3_E8M0_32)  # among the activations
    raise AssertionError("unreachable: a NaN is refused")
