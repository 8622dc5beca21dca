"""Where a layer's keys come from. Two stores of one interface, bit for bit alike:

PagedKV keeps real packed bytes in a KVCache; DenseKV keeps fake-quantised tensors and lets gradients through, which is
what training and the equivalence tests use. Layers do not know which one they have.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rorqual.cache.kv_cache import KVCache
from rorqual.config import ModelConfig
from rorqual.formats.codec import Packed, dequantize, quantize
from rorqual.formats.spec import FORMATS, NumberFormat
from rorqual.model.rows import Segment
from rorqual.model.tap import Tap
from rorqual.ops.dispatch import Ops

# n rows of a segment, L window keys, H heads, C head dim, I index heads, D index dim, G groups, K top-k


class KVStore(Protocol):
    """Keys of every layer and source, addressed by segment (slot, block table) and position."""

    def window(self, layer: int, seg: Segment, kv_nC: Tensor, tap: Tap) -> tuple[Tensor, int]:
        """Quantise and keep the window keys of a segment. Returns (keys fp32 [L, C], position of the first key):
        the predecessors still held, then the segment's own."""

    def tail(self, source: int, seg: Segment, kv_nC: Tensor, score_nC: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keep compressor input rows. Returns (kv, score, first position): held rows of the unfinished group, then
        the segment's own."""

    def put_groups(self, source: int, seg: Segment, first: int, main_GC: Tensor, key_GD: Tensor, tap: Tap) -> None:
        """Quantise and store complete groups [first, first + G); groups below the write floor are left alone."""

    def index_scores(
        self, source: int, seg: Segment, q_nID: Tensor, w_nI: Tensor, groups: tuple[int, int], visible_n: Tensor
    ) -> Tensor:
        """Scores fp32 [n, G] of groups [groups[0], groups[1]), -inf where not visible."""

    def index_scores_at(self, source: int, seg: Segment, q_nID: Tensor, w_nI: Tensor, index_nK: Tensor) -> Tensor:
        """Scores fp32 [n, K] at given groups, -inf at -1."""

    def attend(
        self,
        source: int | None,
        seg: Segment,
        q_nHC: Tensor,
        window: tuple[Tensor, int],
        topk_nK: Tensor | None,
        sink_H: Tensor,
    ) -> Tensor:
        """Attention of a segment over its window and selected groups; fp32 [n, H, C]."""


class PagedKV:
    """The packed cache. Every read takes (block table, group index) or (slot, position)."""

    def __init__(self, config: ModelConfig, cache: KVCache, ops: Ops, native: bool) -> None:
        self.config = config
        self.cache = cache
        self.ops = ops
        self.native = native
        self.scale = config.head_dim**-0.5
        self.window_fmt = FORMATS[config.cache.window]
        self.main_fmt = FORMATS[config.cache.main]
        self.index_fmt = FORMATS[config.cache.index_key]

    def span_start(self, layer: int, seg: Segment) -> int:
        """First window position that the segment may read: its floor, its reach, and what the ring still holds."""
        slots = self.cache.slots
        state = slots.states[seg.slot]
        span = state.encoder if layer < self.config.decoder_start else state.decoder
        if span.hi < seg.start:  # a part that begins here (CED, or after a hit): what the ring holds is not adjacent
            return seg.start
        reach = seg.start - self.config.sliding_window + 1
        return min(seg.start, max(seg.window_floor, reach, span.held_from(slots.rings.rows), 0))

    def window(self, layer: int, seg: Segment, kv_nC: Tensor, tap: Tap) -> tuple[Tensor, int]:
        rings, base = self.cache.slots.rings, self.span_start(layer, seg)
        if not tap.active and self.ops.regions is not None:
            keys = self.ops.regions.window(rings.data[layer, seg.slot], self.window_fmt, kv_nC, seg.start, base)
            if keys is not None:
                return keys, base
        kv_nC = tap.nudge(f"layers.{layer}.window_kv", kv_nC, self.window_fmt, seg.start)
        packed = self.ops.quantize(kv_nC, self.window_fmt)
        if tap.active:
            packed = tap_packed(tap, f"layers.{layer}.window_kv", packed, self.window_fmt, kv_nC.dtype, seg.start)
        own = self.ops.dequantize(packed.codes, packed.scales, self.window_fmt)
        keys = own
        if base < seg.start:
            held = rings.read(layer, seg.slot, base, seg.start)
            keys = torch.cat((self.ops.dequantize(held.codes, held.scales, self.window_fmt), own))
        rings.write(layer, seg.slot, seg.start, packed)
        return keys, base

    def tail(self, source: int, seg: Segment, kv_nC: Tensor, score_nC: Tensor) -> tuple[Tensor, Tensor, int]:
        tail = self.cache.slots.tail_of(source)[seg.slot]
        first = self.pooled_from(source, seg)
        index = torch.arange(first, seg.start, device=tail.device) % tail.shape[0]
        held = tail[index]
        kv, score = torch.cat((held[:, 0], kv_nC)), torch.cat((held[:, 1], score_nC))
        keep = min(kv_nC.shape[0], tail.shape[0])
        index = torch.arange(seg.end - keep, seg.end, device=tail.device) % tail.shape[0]
        tail[index, 0], tail[index, 1] = kv_nC[kv_nC.shape[0] - keep :], score_nC[score_nC.shape[0] - keep :]
        return kv, score, first

    def pooled_from(self, source: int, seg: Segment) -> int:
        """Position of the first row that a segment pools: of its unfinished group, what the tail still holds."""
        ratio = self.config.roles[source].ratio
        if ratio == 1:
            return seg.start
        span, rows = self.cache.slots.states[seg.slot].tail, self.cache.slots.tail_of(source).shape[1]
        return max(seg.start // ratio * ratio, span.held_from(rows))

    def put_groups(self, source: int, seg: Segment, first: int, main_GC: Tensor, key_GD: Tensor, tap: Tap) -> None:
        ratio = self.config.roles[source].ratio
        skip = min(max(0, seg.write_floor // ratio - first), main_GC.shape[0])
        pages = self.cache.pages
        assert seg.block_table is not None
        for kind, values, fmt, region in (
            ("compress_kv", main_GC, self.main_fmt, pages.main[source]),
            ("index_k", key_GD, self.index_fmt, pages.index[source]),
        ):
            name = f"layers.{source}.{kind}"
            values = tap.nudge(name, values[skip:], fmt, first + skip)
            packed = self.ops.quantize(values, fmt)
            if tap.active:
                packed = tap_packed(tap, name, packed, fmt, values.dtype, first + skip)
            pages.write(region, seg.block_table, first + skip, packed)

    def index_scores(
        self, source: int, seg: Segment, q_nID: Tensor, w_nI: Tensor, groups: tuple[int, int], visible_n: Tensor
    ) -> Tensor:
        q = self.ops.quantize(q_nID, self.index_fmt)
        assert seg.block_table is not None
        region = self.cache.pages.index[source]
        return self.ops.index_scores(
            q.codes, q.scales, w_nI.float(), region, seg.block_table, groups[0], groups[1], visible_n, self.native
        )

    def index_scores_at(self, source: int, seg: Segment, q_nID: Tensor, w_nI: Tensor, index_nK: Tensor) -> Tensor:
        q = self.ops.quantize(q_nID, self.index_fmt)
        assert seg.block_table is not None
        region = self.cache.pages.index[source]
        return self.ops.index_scores_at(q.codes, q.scales, w_nI.float(), region, seg.block_table, index_nK, self.native)

    def attend(
        self,
        source: int | None,
        seg: Segment,
        q_nHC: Tensor,
        window: tuple[Tensor, int],
        topk_nK: Tensor | None,
        sink_H: Tensor,
    ) -> Tensor:
        keys, base = window
        return self.ops.sparse_attention(
            q_nHC.float(),
            torch.arange(seg.start, seg.end, device=q_nHC.device),
            keys,
            base,
            max(seg.window_floor, base),
            self.config.sliding_window,
            None if source is None else self.cache.pages.main[source],
            seg.block_table,
            topk_nK,
            sink_H,
            self.scale,
            self.native,
        )


def tap_packed(tap: Tap, name: str, packed: Packed, fmt: NumberFormat, dtype: torch.dtype, first: int) -> Packed:
    """Record a cache entry as values, codes and scale bytes; injected bytes take the place of ours.

    An injected `name` (values) is quantised again, which gives back the bytes it came from.
    """
    values = dequantize(packed.codes, packed.scales, fmt).to(dtype)
    given = tap(name, values, first)
    if given is not values:
        packed = quantize(given, fmt)
    codes = tap(f"{name}.{'codes' if fmt.value == 'e4m3' else 'packed'}", packed.codes, first)
    scales = tap(f"{name}.scale", packed.scales, first) if packed.scales.shape[-1] else packed.scales
    return Packed(codes, scales)
