"""The compressor of a Full layer: `m` tokens become one latent, kept as main KV and index key (SPEC 5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rorqual.config import LayerRole, ModelConfig
from rorqual.model.rope import Rotary
from rorqual.model.rows import SHORT_SEGMENT, Rows, Segment
from rorqual.model.run import Run
from rorqual.model.weights import Scope
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

    def forward(self, x_TD: Tensor, rows: Rows, run: Run) -> None:
        """Compress the groups that the rows complete and hand them to the KV store."""
        if all(s.write_floor >= s.end for s in rows.segments):
            return
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
