"""Layers of short rows over the packed cache: what they share in one forward, for regions that do a layer in two calls.

The twin is `Layer.forward`, which runs where this one does not: where a step has rows that are not short, where a layer
or a cache has no such kernel, and where somebody watches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from rorqual.config import Part
from rorqual.model.kv import PagedKV
from rorqual.model.rows import Rows

if TYPE_CHECKING:
    from rorqual.model.layer import Layer
    from rorqual.model.run import Carry, Run
    from rorqual.ops.dispatch import Regions

# T rows, S residual copies, D hidden


class ShortLayers:
    """One forward's; made anew for the next."""

    def __init__(self, kv: PagedKV, regions: Regions) -> None:
        self.kv, self.regions = kv, regions
        rings = kv.cache.slots.rings.data
        self._reads = rings.device.type == "cpu" and regions.reads(kv.window_fmt, kv.main_fmt)
        # By the part of the model, because the parts' rings hold different positions.
        self._placed: dict[Part, tuple[Rows, Any]] = {}

    def forward(
        self, layer: Layer, x_TSD: Tensor, pre_TS: Tensor, rows: Rows, carry: Carry, run: Run
    ) -> tuple[Tensor, Tensor] | None:
        """(stream, pre) leaving the layer, behind its Engram; None where `Layer.forward` has to do it."""
        if not self._reads or rows.short_rows != len(rows):
            return None
        packed = layer.packed_for(self.regions, run)
        placed = None if packed is None else self._place(layer, rows, run)
        if placed is None:
            return None
        attn, regions, round_ = layer.attn, self.regions, run.numerics.round
        angles = rows.rotary.at(attn.compressed)
        begun = regions.begin(x_TSD, pre_TS, packed, placed, angles)
        if attn.compressor is not None or attn.indexer is not None:
            attn.global_kv(round_(begun.inner), round_(begun.latent), rows, carry, run)
        source = layer.role.kv_source
        region = None if source is None else self.kv.cache.pages.main[source]
        topk = carry.topk_TK if attn.compressed else None
        found: tuple[Tensor, Tensor] = regions.finish(begun, packed, placed, layer.role.layer_id, region, topk)
        return found

    def _place(self, layer: Layer, rows: Rows, run: Run) -> Any:
        known = self._placed.get(layer.role.part)
        if known is None or known[0] is not rows:
            known = self._placed[layer.role.part] = rows, self._place_rows(layer.role.layer_id, rows, run)
        return known[1]

    def _place_rows(self, layer: int, rows: Rows, run: Run) -> Any:
        """None where a segment has more rows than a ring."""
        rings, held = self.kv.cache.slots.rings, []
        for seg in rows.segments:
            if seg.end - seg.start > rings.rows:
                return None
            base = self.kv.span_start(layer, seg)
            held.append((seg.rows, seg.start, seg.slot, base, max(seg.window_floor, base), seg.block_table))
        reach, native = self.kv.config.sliding_window, run.numerics.native
        return self.regions.place(held, rows.positions_T, rows.image_T, rings.data, reach, native)
