"""CSA2 attention by role (SPEC 5): one latent head, K = V, a window and the selected compressed groups.

Worth knowing when porting: no norm on q after its up-projection; the window KV is quantised after RoPE over all
channels; layers that read a global cache rotate *everything* by the compressed theta with YaRN; the attention output's
rotary channels are rotated back by the query's angle before the grouped output projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rorqual.config import LayerRole, Mode, ModelConfig
from rorqual.model.compressor import Compressor
from rorqual.model.indexer import Indexer
from rorqual.model.rows import Rows
from rorqual.model.run import NOT_YET, Carry, Run
from rorqual.model.weights import Scope, row_groups
from rorqual.ops.dispatch import Regions
from rorqual.ops.rowwise import joined

# T rows, D hidden, H heads, C head dim, Q q_lora rank, K top-k


class Attention(nn.Module):
    """SWA, Full, Reindex and Reuse differ in what they compute and where they read; the rest is one path."""

    def __init__(self, config: ModelConfig, role: LayerRole, freqs: tuple[Tensor, Tensor], scope: Scope) -> None:
        super().__init__()
        self.role = role
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.groups = config.o_groups
        self.eps = config.rms_norm_eps
        self.compressed = role.mode is not Mode.SWA
        self.wq_a = scope.weight("wq_a")
        self.q_norm = scope.param("q_norm.weight")
        self.wq_b = scope.weight("wq_b")
        self.wkv = scope.weight("wkv")
        self.kv_norm = scope.param("kv_norm.weight")
        self.sink = scope.param("attn_sink")
        self.wo_a = row_groups(scope.weight("wo_a"), config.o_groups)
        self.wo_b = scope.weight("wo_b")
        self._packed: Any = NOT_YET
        self.compressor = Compressor(config, role, freqs, scope) if role.mode is Mode.FULL else None
        self.indexer = Indexer(config, role, scope) if role.mode in (Mode.FULL, Mode.REINDEX) else None

    def window_kv(self, x_TD: Tensor, rows: Rows, run: Run) -> Tensor:
        """RoPE(RMSNorm(x Wkv)) [T, C], before its quantiser."""
        kv = run.norm(run.linear(x_TD, self.wkv, rows), self.kv_norm, self.eps)
        return run.numerics.round(run.ops.rotate(kv, rows.rotary.at(self.compressed), overwrite=True))

    def forward(self, x_TD: Tensor, rows: Rows, carry: Carry, run: Run) -> Tensor:
        """Attention output [T, D] in the activation dtype."""
        qr, q, kv = self.latents(x_TD, rows, run)
        self.global_kv(x_TD, qr, rows, carry, run)
        out = []
        for seg, q_n, kv_n in zip(rows.segments, rows.split(q), rows.split(kv), strict=True):
            window = run.kv.window(self.role.layer_id, seg, kv_n, run.tap)
            topk = carry.topk_TK[seg.rows] if self.compressed and carry.topk_TK is not None else None
            out.append(run.kv.attend(self.role.kv_source, seg, q_n, window, topk, self.sink))
        return self.project(joined(out), rows, run)

    def global_kv(self, x_TD: Tensor, qr_TQ: Tensor, rows: Rows, carry: Carry, run: Run) -> None:
        """What a source compresses, and what an index source chooses."""
        if self.compressor is not None:
            self.compressor.forward(x_TD, rows, run)
        if self.indexer is not None:
            carry.topk_TK = self.indexer.forward(x_TD, qr_TQ, rows, carry, run)

    def latents(self, x_TD: Tensor, rows: Rows, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Normed q latent [T, Q], queries [T, H, C], window KV [T, C] before its quantiser."""
        regions = run.regions
        short = self._fused_rows(rows, regions)
        if regions is None or not short:
            return self._latents_by_op(x_TD, rows, run)
        angles, round_ = rows.rotary.at(self.compressed), run.numerics.round
        found = regions.latents(x_TD[:short], self._packed, _first(angles, short), run.numerics.native)
        qr, q, kv = (round_(x) for x in found)
        if short < len(rows):
            rest = self._latents_by_op(x_TD[short:], rows.without_short(), run)
            qr, q, kv = (torch.cat(pair) for pair in zip((qr, q, kv), rest, strict=True))
        return qr, q, kv

    def _latents_by_op(self, x_TD: Tensor, rows: Rows, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        qr = run.norm(run.linear(x_TD, self.wq_a, rows), self.q_norm, self.eps)
        q = run.linear(qr, self.wq_b, rows).unflatten(-1, (self.heads, self.head_dim))
        q = run.numerics.round(run.ops.rotate(q, rows.rotary.at(self.compressed), overwrite=True))
        return qr, q, self.window_kv(x_TD, rows, run)

    def project(self, o_THC: Tensor, rows: Rows, run: Run) -> Tensor:
        """Rotated back, then the grouped output projection: contiguous heads of group g through rows g * o_lora.. of
        Wo_a, then Wo_b."""
        regions = run.regions
        short = self._fused_rows(rows, regions)
        if regions is None or not short:
            return self._project_by_op(o_THC, rows, run)
        angles = _first(rows.rotary.at(self.compressed), short)
        out = run.numerics.round(regions.project(o_THC[:short], self._packed, angles, run.numerics.native))
        if short == len(rows):
            return out
        return torch.cat((out, self._project_by_op(o_THC[short:], rows.without_short(), run)))

    def _fused_rows(self, rows: Rows, regions: Regions | None) -> int:
        """Rows that take the fused projections: where there are any, every short row, whatever stands beside them."""
        if not rows.short_rows or regions is None:
            return 0
        return 0 if self.packed_for(regions) is None else rows.short_rows

    def packed_for(self, regions: Regions) -> Any:
        """The projections as the regions take them; None where there are none for them."""
        if self._packed is NOT_YET:
            parts = (self.wq_a, self.wq_b, self.wkv, self.wo_a, self.wo_b, self.q_norm, self.kv_norm)
            self._packed = regions.pack_attention(*parts, eps=self.eps, heads=self.heads)
        return self._packed

    def _project_by_op(self, o_THC: Tensor, rows: Rows, run: Run) -> Tensor:
        # Native rounds before *and* after the inverse rotation (SPEC 3).
        angles, round_ = rows.rotary.at(self.compressed), run.numerics.round
        o_THC = round_(run.ops.rotate(round_(o_THC), angles, inverse=True))
        grouped = o_THC.reshape(len(rows), self.groups, -1).float()
        # Wo_a is stored FP8 but used as bf16 with no rounding of its input (SPEC 3); each group rounds its output.
        latent = run.numerics.round(run.ops.grouped_linear(grouped, self.wo_a, rows.short_rows))
        return run.linear(latent.flatten(1), self.wo_b, rows)


def _first(angles: tuple[Tensor, Tensor], rows: int) -> tuple[Tensor, Tensor]:
    return angles[0][:rows], angles[1][:rows]
