"""One decoder block with single-pass hyper-connections (SPEC 6): the stream is `hc_mult` copies wide.

The `pre` that a sub-layer computes collapses the copies for the *next* sub-layer, so each layer is handed the `pre` of
the layer before and returns one for the layer after.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rorqual.config import LayerRole, ModelConfig, Part
from rorqual.model.attention import Attention
from rorqual.model.engram import Engram
from rorqual.model.moe import MoE
from rorqual.model.rows import Rows
from rorqual.model.run import Carry, Run
from rorqual.model.weights import Scope

# T rows, S residual copies, D hidden


class HyperMix(nn.Module):
    """Coefficients of one sub-layer: pre [T, S], post [T, S], comb [T, S from, S to], all fp32."""

    def __init__(self, config: ModelConfig, scope: Scope, kind: str) -> None:
        super().__init__()
        self.fn, self.base, self.scale = (scope.param(f"hc_{kind}_{part}") for part in ("fn", "base", "scale"))
        self.rms_eps, self.hc_eps, self.iters = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters

    def forward(self, x_TSD: Tensor, rows: Rows, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        return run.ops.hyper_mix(
            x_TSD, self.fn, self.scale, self.base, self.rms_eps, self.hc_eps, self.iters, rows.short_rows
        )


class Layer(nn.Module):
    """Engram write, attention, experts; `name` is the prefix of its tensors in checkpoints and traces."""

    def __init__(self, config: ModelConfig, role: LayerRole, freqs: tuple[Tensor, Tensor], scope: Scope) -> None:
        super().__init__()
        draft = role.part is Part.DRAFT
        self.role = role
        self.name = f"mtp.{role.draft_index}" if draft else f"layers.{role.layer_id}"
        self.eps = config.rms_norm_eps
        self.last = role.layer_id == config.num_hidden_layers - 1
        self.engram = Engram(config, role, scope.scope("engram")) if role.engram_index is not None else None
        self.attn_mix = HyperMix(config, scope, "attn")
        self.ffn_mix = HyperMix(config, scope, "ffn")
        self.attn_norm = scope.param("attn_norm.weight")
        self.ffn_norm = scope.param("ffn_norm.weight")
        self.attn = Attention(config, role, freqs, scope.scope("attn"))
        experts = config.dspark_n_routed_experts if draft else config.n_routed_experts
        per_token = config.dspark_num_experts_per_tok if draft else config.num_experts_per_tok
        self.ffn = MoE(config, scope.scope("ffn"), experts=experts, per_token=per_token, draft=draft)

    def enter(self, x_TSD: Tensor, pre_TS: Tensor, rows: Rows, run: Run) -> tuple[Tensor, Tensor]:
        """Engram write, then the traced entry of the block: (stream, pre)."""
        if self.engram is not None:
            if self.role.layer_id:
                x_TSD = run.record(f"{self.name}.engram.x_in", x_TSD, rows)
            x_TSD = self.engram(x_TSD, rows, run, self.name)
        return run.record(f"{self.name}.x_in", x_TSD, rows), run.record(f"{self.name}.pre_in", pre_TS, rows)

    def write_global(self, x_TSD: Tensor, pre_TS: Tensor, rows: Rows, run: Run) -> None:
        """Only this KV source's global KV, for rows whose attention will not run here (the CED seam)."""
        if self.engram is not None:
            x_TSD = self.engram(x_TSD, rows, run, self.name)
        assert self.attn.compressor is not None
        self.attn.compressor(self.collapse(x_TSD, pre_TS, self.attn_norm, run), rows, run)

    def collapse(self, x_TSD: Tensor, pre_TS: Tensor, norm: Tensor, run: Run) -> Tensor:
        """Weighted sum of the copies, rounded, then normed: a sub-layer's input [T, D]."""
        return run.norm(run.numerics.round(run.ops.hyper_collapse(x_TSD, pre_TS)), norm, self.eps)

    def forward(self, x_TSD: Tensor, pre_TS: Tensor, rows: Rows, carry: Carry, run: Run) -> tuple[Tensor, Tensor]:
        """(stream, pre) entering the block -> (stream, pre) leaving it."""
        name = self.name
        x, pre = self.enter(x_TSD, pre_TS, rows, run)
        ffn_pre, post, comb = self._mix(self.attn_mix, x, rows, run, "attn")
        ffn_pre = run.record(f"{name}.attn_pre", ffn_pre, rows)
        inner = run.record(f"{name}.attn_in", self.collapse(x, pre, self.attn_norm, run), rows)
        out = run.record(f"{name}.attn_out", self.attn(inner, rows, carry, run), rows)
        x = run.numerics.round(run.ops.hyper_expand(out, x, post, comb))
        next_pre, post, comb = self._mix(self.ffn_mix, x, rows, run, "ffn")
        inner = run.record(f"{name}.ffn_in", self.collapse(x, ffn_pre, self.ffn_norm, run), rows)
        out = run.record(f"{name}.ffn_out", self.ffn(inner, rows, run, name), rows)
        x = run.numerics.round(run.ops.hyper_expand(out, x, post, comb))
        if self.last or self.role.part is Part.DRAFT:
            x = run.record(f"{name}.x_out", x, rows)
        return x, run.record(f"{name}.pre_out", next_pre, rows)

    def _mix(self, mix: HyperMix, x_TSD: Tensor, rows: Rows, run: Run, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, comb = mix(x_TSD, rows, run)
        post = run.record(f"{self.name}.{kind}_post", post, rows)
        return pre, post, run.record(f"{self.name}.{kind}_comb", comb, rows)


def first_pre(x_TSD: Tensor) -> Tensor:
    """The first mix ever, fp32 [T, S]: one-hot on copy 0 of each row's streams."""
    pre = torch.zeros(x_TSD.shape[:2], device=x_TSD.device)
    pre[:, 0] = 1
    return pre
