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

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rorqual.formats.codec import check_finite
from rorqual.formats.spec import E4M3_E8M0_32, NumberFormat
from rorqual.formats.weights import TILE
from rorqual.ops.cpu import Path
from rorqual.ops.fast.attention import attend_rows, attend_split, check_pages, split_sizes
from rorqual.ops.fast.decode import BLOCK, DECODED, E8M0, ENTRIES, NO_REGION, PAGE_BYTES, REGION, region_arrays
from rorqual.ops.fast.hyper import expand
from rorqual.ops.fast.hyper_rows import MIX, SETTINGS, MixRows, enter_kernel
from rorqual.ops.fast.kernel import Kernel, kernel, refuse_gradients
from rorqual.ops.fast.latent_rows import ANGLES, AttentionRows, latents_kernel, project_kernel
from rorqual.ops.fast.linear import has_vectors, parts_of
from rorqual.ops.fast.moe_rows import MoeRows, moe_kernel
from rorqual.ops.fast.norm import round_row
from rorqual.ops.fast.row_kernels import part
from rorqual.ops.fast.row_vectors import FP4, FP8, FP32, Array
from rorqual.ops.fast.vectors import LANES
from rorqual.ops.fast.window import GEOMETRY, NO_TABLE, window_kernel
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference.hyper import copies_of

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
    """begun: what is written, a `Begun`. mix, attention: of `LayerRows`. finite_T: as of `latent_rows`."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRows:
    """A layer as `begin` and `finish` take it: the parts as their own kernels take them."""

    mixes: tuple[Any, Any]
    latents: tuple[Any, ...]
    project: tuple[Any, ...]
    experts: tuple[Any, ...]
    sizes: tuple[int, int, int, int]
    """D, Q, H, C."""
    products: int
    """Multiplications of a row."""
    room: int
    """fp32 values that a row takes in `finish`, its attention aside."""
    held: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        attn_mix: MixRows | None,
        ffn_mix: MixRows | None,
        rows: AttentionRows | None,
        moe: MoeRows | None,
        sink_H: Tensor,
        native: bool,
    ) -> LayerRows | None:
        """None where a part has no kernel, or heads are no multiple of 32 wide."""
        if attn_mix is None or ffn_mix is None or rows is None or moe is None or rows.channels % BLOCK:
            return None
        sink = torch.nn.functional.pad(sink_H.detach().float(), (0, -sink_H.shape[0] % LANES)).numpy()
        (inner, shared, chosen, _), width = moe.sizes, rows.heads * rows.channels
        copies = copies_of(len(attn_mix.mix[2]))
        after = max(width + len(rows.groups) * rows.rank, rows.hidden + chosen * inner + shared)
        room = width + (copies + 2) * rows.hidden + after
        return cls(
            mixes=((attn_mix.mix, attn_mix.settings), (ffn_mix.mix, ffn_mix.settings)),
            latents=(rows.weights, rows.norms, rows.eps),
            project=(rows.groups, rows.wo_b, rows.rank, sink, _F32(rows.channels**-0.5)),
            experts=(moe.gate, moe.weights, moe.sizes, (*moe.settings, native)),
            sizes=(rows.hidden, rows.latent, rows.heads, rows.channels),
            products=moe.hidden * 3 * (chosen * inner + shared),
            room=room,
            held=(attn_mix, ffn_mix, rows, moe),
        )


class Begun(NamedTuple):
    """inner [T, D], the attention's input; q latent [T, Q]; q [T, H, C]; window KV [T, C]; pre, post, comb. fp32."""

    inner: Array
    latent: Array
    q: Array
    kv: Array
    pre: Array
    post: Array
    comb: Array


Held = tuple[slice, int, int, int, int, Tensor | None]
"""A segment's rows, first position, slot, first window key held, window floor, block table (None without pages)."""


class Placed:
    """What the layers of one step share. Made once for a step's rows and a part of the model.

    Args:
        held: segment by segment.
        positions_T: int64.
        image_T: bool, rows of image spans, or None.
        rings: uint8 [layers, slots, R, B], of E4M3 rows.
        reach: positions that a query sees of its window.
        native: SPEC 3 numerics.
    """

    def __init__(
        self, held: Sequence[Held], positions_T: Tensor, image_T: Tensor | None, rings: Tensor, reach: int, native: bool
    ) -> None:
        tables, numbers, at = [], [], 0
        for rows, start, slot, base, floor, table in held:
            pages = 0 if table is None else table.shape[0]
            numbers.append((rows.start, rows.stop, start, base, floor, slot, at, at + pages))
            at += pages
            if table is not None:
                tables.append(table)
        self.rows, self.native = positions_T.shape[0], native
        image = np.zeros(self.rows, np.uint8) if image_T is None else image_T.to(torch.uint8).contiguous().numpy()
        self.placed = np.array(numbers, np.int64), positions_T.contiguous().numpy(), image, reach
        self.rings = rings.numpy()
        self.held = held
        self.table = torch.cat(tables) if tables else None
        # By identity; what has it is kept, so that nothing else comes by it.
        self._angles: dict[int, tuple[Any, ...]] = {}
        self._regions: dict[int, tuple[Any, ...]] = {}
        self._begun: dict[tuple[int, int, int, int], Begun] = {}
        self._rooms: dict[tuple[int, int], tuple[int, int]] = {}
        self._nothing = np.empty((self.rows, 0), np.int64)

    def angles(self, cos_sin: tuple[Tensor, Tensor]) -> tuple[Any, Any]:
        """To turn by, and to turn back by."""
        found = self._angles.get(id(cos_sin))
        if found is None:
            cos, sin = (x.contiguous().numpy() for x in cos_sin)
            found = self._angles[id(cos_sin)] = (cos, sin), (cos, -sin), cos_sin
        return found[0], found[1]

    def begun(self, layer: LayerRows, copies: int) -> Begun:
        """What `begin` writes; the step's layers of one shape write it in turn."""
        hidden, latent, heads, channels = layer.sizes
        if layer.sizes not in self._begun:
            shapes = (hidden,), (latent,), (heads, channels), (channels,), (copies,), (copies,), (copies, copies)
            self._begun[layer.sizes] = Begun(*(np.empty((self.rows, *shape), np.float32) for shape in shapes))
        return self._begun[layer.sizes]

    def room(self, layer: LayerRows, chosen: int) -> tuple[Array, int, int]:
        """For `finish`: all of it, and how much is for keys and for `attend_split`."""
        key = layer.room, chosen
        if key not in self._rooms:
            (segments, _, _, reach), channels, stride = self.placed, layer.sizes[3], len(layer.project[3])
            counts = segments[:, 1] - segments[:, 0]
            keys = int((segments[:, 2] + counts - segments[:, 3]).max()) * channels
            split = sum(split_sizes(int(counts.max()), channels, chosen, reach, stride))
            self._rooms[key] = keys, split
        keys, split = self._rooms[key]
        return _ROOMS.of(keys + split + self.rows * layer.room), keys, split

    def region(self, region: PagedRegion | None, topk_TK: Tensor | None) -> tuple[Any, Array]:
        """As the kernel takes them; a layer without either reads its window alone."""
        if region is None or topk_TK is None or self.table is None:
            return NO_REGION, self._nothing
        found = self._regions.get(id(region))
        if found is None:
            found = self._regions[id(region)] = region_arrays(region, self.table), region
        return found[0], topk_TK.contiguous().numpy()


class _Rooms(threading.local):
    """What the kernels of a thread work in: kept, because fresh memory costs a page fault for every 4 KB."""

    room = np.empty(0, np.float32)

    def of(self, size: int) -> Array:
        if size > self.room.shape[0]:
            self.room = np.empty(size, np.float32)
        return self.room


_ROOMS = _Rooms()


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
    x, pre, (rows, copies) = _floats(x_TnD), _floats(pre_Tn), pre_Tn.shape
    begun = placed.begun(layer, copies)
    finite, parts = np.empty(rows, np.bool_), parts_of(rows * layer.products)
    turn, _ = placed.angles(cos_sin)
    native = placed.native
    _begin(_MARKERS, x, pre, layer.mixes[0], layer.latents, turn, native, tuple(begun), finite, parts, tasks=parts)
    if native and not finite.all():
        _refuse(begun.inner)
    return begun


def finish(
    x_TnD: Tensor,
    begun: Begun,
    layer: LayerRows,
    placed: Placed,
    cos_sin: tuple[Tensor, Tensor],
    ring: int,
    region: PagedRegion | None,
    topk_TK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The rest of the layer: streams [T, n, D] and the next pre [T, n], fp32; the window's keys are kept.

    Args:
        x_TnD: as `begin` had it.
        begun: of `begin`.
        layer: from `LayerRows.of`.
        placed: of the step.
        cos_sin: of the layer's kind.
        ring: the layer's rings in `placed`.
        region: of the main KV that the layer reads, or None.
        topk_TK: int64 groups, -1 padded, or None.

    Raises:
        FormatError: NaN or Inf in what is quantised.
        IndexError: a group that its block table does not hold, or a page outside the pool.
    """
    x, parts = _floats(x_TnD), parts_of(placed.rows * layer.products)
    room = placed.room(layer, 0 if topk_TK is None else topk_TK.shape[1])
    out, next_pre = torch.empty(x.shape), torch.empty(begun.pre.shape)
    wrong, finite = np.zeros(2, np.int64), np.empty(placed.rows, np.bool_)
    (arrays, topk), (_, back) = placed.region(region, topk_TK), placed.angles(cos_sin)
    _finish(
        _MARKERS,
        tuple(begun),
        x,
        layer.mixes[1],
        layer.project,
        layer.experts,
        back,
        placed.native,
        placed.placed,
        (placed.rings[ring], *_DECODED),
        arrays,
        topk,
        room,
        out.numpy(),
        next_pre.numpy(),
        wrong,
        finite,
        parts,
        tasks=parts,
    )
    if wrong[0] == OUTSIDE:
        own, *_, table = placed.held[int(wrong[1])]
        assert region is not None and topk_TK is not None and table is not None
        check_pages(region, table, topk_TK[own])
        raise IndexError(f"a group below -1 among the selected ones of segment {int(wrong[1])}")
    if wrong[0]:
        _refuse(begun.kv)
    return out, next_pre


def _floats(x: Tensor) -> Array:
    return x.detach().to(torch.float32).contiguous().numpy()


def _refuse(x: Array) -> None:
    check_finite(torch.from_numpy(x), E4M3_E8M0_32)
    check_finite(torch.full((1, TILE), torch.nan), E4M3_E8M0_32)  # among the activations
    raise AssertionError("unreachable: a NaN is refused")
