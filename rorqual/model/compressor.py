"""The compressor of a Full layer: `m` tokens become one latent, kept as main KV and index key (SPEC 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rorqual.config import LayerRole, ModelConfig
from rorqual.model.kv import PagedKV
from rorqual.model.rope import Rotary
from rorqual.model.rows import SHORT_SEGMENT, Rows, Segment
from rorqual.model.run import NOT_YET, Run
from rorqual.model.weights import Scope
from rorqual.ops.dispatch import Regions
from rorqual.ops.paged import GroupWrite
from rorqual.ops.rowwise import by_row

# T rows, n rows of a segment, G groups, C head dim, D index dim


class Compressor(nn.Module):
    """m > 1: per-channel softmax over the group's gate scores, in fp32. m = 1: a projection and a norm, no gate."""

    def __init__(self, config: ModelConfig, role: LayerRole, freqs: tuple[Tensor, Tensor], scope: Scope) -> None:
        super().__init__()
        self.layer = role.layer_id
        self.ratio = role.ratio
        self.eps = config.rms_norm_eps
        self.freqs = freqs
        self.wkv = scope.weight("compressor.wkv")
        self.wgate = scope.weight("compressor.wgate") if role.ratio > 1 else None
        self.norm = scope.param("compressor.norm.weight")
        self.wk = scope.weight("indexer.wk")
        self.k_norm = scope.param("indexer.k_norm.weight")
        self._packed: Any = NOT_YET

    def forward(self, x_TD: Tensor, rows: Rows, run: Run) -> None:
        """Compress the groups that the rows complete and hand them to the KV store."""
        if all(s.write_floor >= s.end for s in rows.segments):
            return
        # Where there is a kernel for the whole, every short row takes it, whatever stands beside them (DESIGN 12).
        regions, kv, short = run.regions, run.kv, rows.short_rows
        if regions is None or not short or not isinstance(kv, PagedKV) or self._packed_for(regions, kv) is None:
            self._by_op(x_TD, rows, run)
            return
        segments = [s for s in rows.segments if s.row_end <= short and s.write_floor < s.end]
        if segments:
            self._fused(x_TD if short == len(rows) else x_TD[:short], segments, rows, run, kv)
        if short < len(rows):
            later = [s for s in rows.segments if s.row_end > short]
            moved = tuple(replace(s, row_start=s.row_start - short, row_end=s.row_end - short) for s in later)
            self._by_op(x_TD[short:], replace(rows.without_short(), segments=moved), run)

    def _packed_for(self, regions: Regions, kv: PagedKV) -> Any:
        """The layer as the region takes it; None where there is none for it."""
        if self._packed is NOT_YET:
            parts = (self.wkv, self.wgate, self.wk, self.norm, self.k_norm)
            formats = (kv.main_fmt, kv.index_fmt)
            self._packed = regions.pack_compressor(*parts, ratio=self.ratio, eps=self.eps, formats=formats)
        return self._packed

    def _fused(self, x_TD: Tensor, segments: Sequence[Segment], rows: Rows, run: Run, kv: PagedKV) -> None:
        """The short rows' part of the work; `segments` are those of them that write."""
        regions, m = run.regions, self.ratio
        assert regions is not None
        written = []
        for seg in segments:
            group = -(-kv.pooled_from(self.layer, seg) // m)
            groups = max(0, seg.end // m - group)
            skip = min(max(0, seg.write_floor // m - group), groups)
            count = seg.row_end - seg.row_start
            assert seg.block_table is not None
            where = (seg.slot, seg.block_table)
            written.append(GroupWrite(seg.row_start, count, seg.start, group, groups, skip, *where))
        pages, tails = kv.cache.pages, kv.cache.slots.tail_of(self.layer) if m > 1 else None
        store = (tails, (pages.main[self.layer], pages.index[self.layer]))
        regions.compress(x_TD, self._packed, written, *store, self._angles(written, rows), run.numerics.native)

    def _angles(self, written: Sequence[GroupWrite], rows: Rows) -> tuple[Tensor, Tensor]:
        """cos and sin [G, r] at the first position of every group."""
        if self.ratio == 1 and sum(w.rows for w in written) == len(rows):
            return rows.rotary.at(True)
        return rows.rotary.at_groups(self.ratio, tuple((w.group, w.group + w.groups) for w in written))

    def _by_op(self, x_TD: Tensor, rows: Rows, run: Run) -> None:
        if self.wgate is None:
            kv = run.linear(x_TD, self.wkv, rows)
            for seg, kv_n in zip(rows.segments, rows.split(kv), strict=True):
                if seg.write_floor < seg.end:
                    self._store(kv_n, seg.start, seg, rows, run)
            return
        # fp32 even in native: the release promotes both projections, and the tail holds fp32 rows.
        kv = run.ops.linear(x_TD.float(), self.wkv, rows.short_rows, False)
        score = run.ops.linear(x_TD.float(), self.wgate, rows.short_rows, False)
        for seg, kv_n, score_n in zip(rows.segments, rows.split(kv), rows.split(score), strict=True):
            if seg.write_floor >= seg.end:
                continue
            if run.tap.active:
                run.tap(f"layers.{self.layer}.tail_kv", kv_n, seg.start)
                run.tap(f"layers.{self.layer}.tail_score", score_n, seg.start)
            held_kv, held_score, first = run.kv.tail(self.layer, seg, kv_n, score_n)
            self._store(run.numerics.round(self._pool(held_kv, held_score, first)), first, seg, rows, run)

    def _pool(self, kv_nC: Tensor, score_nC: Tensor, first: int) -> Tensor:
        """Weighted sums of whole groups [G, C]; rows before the first group boundary and after the last are left out.

        A start inside a group happens only in exact replay, and that group is stored already (SPEC 11).
        """
        m = self.ratio
        lead = -first % m
        groups = max(0, (kv_nC.shape[0] - lead) // m)
        shape = (groups, m, kv_nC.shape[1])
        kv = kv_nC[lead : lead + groups * m].view(shape)
        score = score_nC[lead : lead + groups * m].view(shape)
        if not groups:
            return kv.new_zeros(0, shape[2])
        # A group's bits do not depend on how many are pooled at once: softmax group by group, sums in token order.
        weight = by_row(lambda x: torch.softmax(x, dim=1), score, groups if groups <= SHORT_SEGMENT else 0)
        total = weight[:, 0] * kv[:, 0]
        for t in range(1, m):
            total = total + weight[:, t] * kv[:, t]
        return total

    def _store(self, latent: Tensor, first: int, seg: Segment, rows: Rows, run: Run) -> None:
        """Norm, rotate and store groups; `first` is the position of the first pooled row."""
        if not latent.shape[0]:
            return
        group = -(-first // self.ratio)
        latent = run.norm(latent, self.norm, self.eps)
        if run.tap.active:
            latent = run.tap(f"layers.{self.layer}.latent", latent, group)
        positions = torch.arange(group, group + latent.shape[0], device=latent.device) * self.ratio
        short = latent.shape[0] if seg.row_end <= rows.short_rows else 0
        angles = Rotary(self.freqs, positions, short).at(True)
        # Index keys belong to the indexer, whose loss must not move the backbone.
        key = run.numerics.round(run.ops.linear(latent.detach().float(), self.wk, short, False))
        key = run.norm(key, self.k_norm, self.eps)
        main = run.numerics.round(run.ops.rotate(latent, angles))
        run.kv.put_groups(self.layer, seg, group, main, run.numerics.round(run.ops.rotate(key, angles)), run.tap)
