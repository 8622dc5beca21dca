"""What the kernels of `layer_rows` are handed: a layer's weights, made once, and what the layers of one step share.

T rows, n copies of the residual, D hidden, H heads, C head dim, Q q_lora rank, K top-k.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rorqual.ops.fast.arrays import angle_arrays, floats, region_arrays
from rorqual.ops.fast.attention import split_sizes
from rorqual.ops.fast.decode import BLOCK, NO_REGION
from rorqual.ops.fast.hyper_rows import MixRows
from rorqual.ops.fast.latent_rows import AttentionRows
from rorqual.ops.fast.linear import parts_of
from rorqual.ops.fast.moe_rows import MoeRows
from rorqual.ops.fast.row_vectors import Array
from rorqual.ops.fast.vectors import LANES
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference.hyper import copies_of

_F32 = np.float32


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


@dataclass(kw_only=True, slots=True)
class Begun:
    """What `begin` made of a layer, good until the next one begins. fp32."""

    streams: tuple[Array, Array]
    """As the layer was given them: [T, n, D], and their pre [T, n]."""
    written: tuple[Array, ...]
    """inner [T, D], the attention's input; q latent [T, Q]; q [T, H, C]; window KV [T, C]; pre, post, comb."""
    inner: Tensor
    latent: Tensor
    """The same memory."""
    finite: Array
    wrong: Array
    parts: int
    back: Any = None
    """Angles to turn the attention's output back by."""


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
        self._begun: dict[tuple[tuple[int, int, int, int], int], Begun] = {}
        self._given: tuple[Any, ...] = (None, None)
        self._rooms: dict[tuple[int, int], tuple[Array, int, int]] = {}
        self._topk: tuple[Tensor | None, Any] = None, None
        self._nothing = np.empty((self.rows, 0), np.int64)

    def angles(self, cos_sin: tuple[Tensor, Tensor]) -> tuple[Any, Any]:
        """To turn by, and to turn back by."""
        found = self._angles.get(id(cos_sin))
        if found is None:
            cos, sin = angle_arrays(cos_sin)
            found = self._angles[id(cos_sin)] = (cos, sin), (cos, -sin), cos_sin
        return found[0], found[1]

    def begun(self, layer: LayerRows, x_TnD: Tensor, pre_Tn: Tensor) -> Begun:
        """What `begin` reads and writes; the step's layers of one shape write it in turn."""
        key = layer.sizes, layer.products
        found = self._begun.get(key)
        if found is None:
            found = self._begun[key] = _ROOMS.begun(self.rows, layer, pre_Tn.shape[1])
        given = self._given
        # A stream that comes straight from the layer before is known by its array.
        known = given[0] is x_TnD and given[1] is pre_Tn
        found.streams = given[2] if known else (floats(x_TnD), floats(pre_Tn))
        return found

    def give(self, streams: tuple[Array, Array]) -> tuple[Tensor, Tensor]:
        """As tensors, the streams in the activation dtype; a layer that is handed these very tensors reads the arrays,
        which nothing may write from here on."""
        x, pre = torch.from_numpy(streams[0]), torch.from_numpy(streams[1])
        if self.native:
            x = x.to(torch.bfloat16)
        self._given = x, pre, streams
        return x, pre

    def room(self, layer: LayerRows, chosen: int) -> tuple[Array, int, int]:
        """For `finish`: all of it, and how much is for keys and for `attend_split`."""
        key = layer.room, chosen
        known = self._rooms.get(key)
        if known is None:
            (segments, _, _, reach), channels, stride = self.placed, layer.sizes[3], len(layer.project[3])
            counts = segments[:, 1] - segments[:, 0]
            keys = int((segments[:, 2] + counts - segments[:, 3]).max()) * channels
            split = sum(split_sizes(int(counts.max()), channels, chosen, reach, stride))
            known = self._rooms[key] = _ROOMS.of(keys + split + self.rows * layer.room), keys, split
        return known

    def region(self, region: PagedRegion | None, topk_TK: Tensor | None) -> tuple[Any, Array]:
        """As the kernel takes them; a layer without either reads its window alone."""
        if region is None or topk_TK is None or self.table is None:
            return NO_REGION, self._nothing
        found = self._regions.get(id(region))
        if found is None:
            found = self._regions[id(region)] = region_arrays(region, self.table), region
        if self._topk[0] is not topk_TK:
            self._topk = topk_TK, topk_TK.contiguous().numpy()
        return found[0], self._topk[1]


class _Rooms(threading.local):
    """What the kernels of a thread work in: kept, because fresh memory costs a page fault for every 4 KB."""

    room = np.empty(0, np.float32)

    def __init__(self) -> None:
        self._begun: dict[tuple[int, int, int, int], Begun] = {}

    def begun(self, rows: int, layer: LayerRows, copies: int) -> Begun:
        """What `begin` writes for so many rows of a layer; the last step's, where it had as many."""
        found = self._begun.get(layer.sizes)
        if found is None or found.written[-1].shape != (rows, copies, copies):
            found = self._begun[layer.sizes] = _new_begun(rows, layer.sizes, copies)
        return replace(found, wrong=np.zeros(2, np.int64), parts=parts_of(rows * layer.products))

    def of(self, size: int) -> Array:
        if size > self.room.shape[0]:
            self.room = np.empty(size, np.float32)
        return self.room


def _new_begun(rows: int, sizes: tuple[int, int, int, int], copies: int) -> Begun:
    hidden, latent, heads, channels = sizes
    shapes = (hidden,), (latent,), (heads, channels), (channels,), (copies,), (copies,), (copies, copies)
    written = tuple(np.empty((rows, *shape), np.float32) for shape in shapes)
    return Begun(
        streams=(written[0], written[0]),
        written=written,
        inner=torch.from_numpy(written[0]),
        latent=torch.from_numpy(written[1]),
        finite=np.empty(rows, np.bool_),
        wrong=np.zeros(2, np.int64),
        parts=1,
    )


_ROOMS = _Rooms()
