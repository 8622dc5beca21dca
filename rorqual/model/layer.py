"""One decoder block with single-pass hyper-connections (SPEC 6): the stream is `hc_mult` copies wide.

The `pre` that a sub-layer computes collapses the copies for the *next* sub-layer, so each layer is handed the `pre` of
the layer before and returns one for the layer after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rorqual.config import LayerRole, ModelConfig, Part
from rorqual.model.attention import Attention
from rorqual.model.compressor import Compressor
from rorqual.model.engram import Engram
from rorqual.model.moe import MoE
from rorqual.model.rows import Rows
from rorqual.model.run import NOT_YET, Carry, Run
from rorqual.model.weights import Scope
from rorqual.ops.dispatch import Regions

# T rows, S residual copies, D hidden


Written = tuple[Tensor, Tensor, Tensor]
"""A sub-layer's output [T, D], and the post [T, S] and comb [T, S, S] that write it to the stream."""
Entered = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class HyperMix(nn.Module):
    """Coefficients of one sub-layer: pre [T, S], post [T, S], comb [T, S from, S to], all fp32."""

    def __init__(self, config: ModelConfig, scope: Scope, kind: str) -> None:
        super().__init__()
        self.fn, self.base, self.scale = (scope.param(f"hc_{kind}_{part}") for part in ("fn", "base", "scale"))
        self.rms_eps, self.hc_eps, self.iters = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
        self.packed: Any = NOT_YET

    def packed_for(self, regions: Regions, norm: Tensor, eps: float) -> Any:
        """The mix and the norm behind it as the region takes them; None where there is none for them."""
        if self.packed is NOT_YET:
            settings = {"mix_eps": self.rms_eps, "hc_eps": self.hc_eps, "iters": self.iters, "eps": eps}
            self.packed = regions.pack_mix(self.fn, self.scale, self.base, norm, **settings)
        return self.packed

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
        self._packed: Any = NOT_YET
        self.ffn = MoE(config, scope.scope("ffn"), experts=experts, per_token=per_token, draft=draft)

    def enter(self, x_TSD: Tensor, pre_TS: Tensor, rows: Rows, run: Run) -> tuple[Tensor, Tensor]:
        """Engram write, then the traced entry of the block: (stream, pre)."""
        if self.engram is not None:
            if self.role.layer_id:
                x_TSD = run.record(f"{self.name}.engram.x_in", x_TSD, rows)
            x_TSD = self.engram.forward(x_TSD, rows, run, self.name)
        if not run.tap.active:
            return x_TSD, pre_TS
        return run.record(f"{self.name}.x_in", x_TSD, rows), run.record(f"{self.name}.pre_in", pre_TS, rows)

    @property
    def compressor(self) -> Compressor:
        """Of a KV source."""
        assert self.attn.compressor is not None
        return self.attn.compressor

    def write_global(self, x_TSD: Tensor, pre_TS: Tensor, rows: Rows, run: Run) -> None:
        """Only this KV source's global KV, for rows whose attention will not run here (the CED seam)."""
        if self.engram is not None:
            x_TSD = self.engram.forward(x_TSD, rows, run, self.name)
        self.compressor(self.collapse(x_TSD, pre_TS, self.attn_norm, run), rows, run)

    def collapse(self, x_TSD: Tensor, pre_TS: Tensor, norm: Tensor, run: Run) -> Tensor:
        """Weighted sum of the copies, rounded, then normed: a sub-layer's input [T, D]."""
        return collapse(x_TSD, pre_TS, norm, self.eps, run)

    def forward(self, x_TSD: Tensor, pre_TS: Tensor, rows: Rows, carry: Carry, run: Run) -> tuple[Tensor, Tensor]:
        """(stream, pre) entering the block -> (stream, pre) leaving it."""
        name = self.name
        x, pre = self.enter(x_TSD, pre_TS, rows, run)
        whole = None if run.short is None else run.short.forward(self, x, pre, rows, carry, run)
        if whole is not None:
            return whole
        x, inner, ffn_pre, post, comb = self.enter_sublayer("attn", x, pre, None, rows, run)
        out = run.record(f"{name}.attn_out", self.attn(inner, rows, carry, run), rows)
        x, inner, next_pre, post, comb = self.enter_sublayer("ffn", x, ffn_pre, (out, post, comb), rows, run)
        out = run.record(f"{name}.ffn_out", self.ffn(inner, rows, run, name), rows)
        x = self.leave_sublayer(x, (out, post, comb), rows, run)
        if self.last or self.role.part is Part.DRAFT:
            x = run.record(f"{name}.x_out", x, rows)
        return x, run.record(f"{name}.pre_out", next_pre, rows)

    def packed_for(self, regions: Regions, run: Run) -> Any:
        """The layer as the regions of whole layers take it; None where there are none for it."""
        if self._packed is NOT_YET:
            mixes = (
                self.attn_mix.packed_for(regions, self.attn_norm, self.eps),
                self.ffn_mix.packed_for(regions, self.ffn_norm, self.eps),
            )
            parts = self.attn.packed_for(regions), self.ffn.packed_for(regions), self.attn.sink
            self._packed = regions.pack_layer(*mixes, *parts, run.numerics.native)
        return self._packed

    def enter_sublayer(
        self, kind: str, x_TSD: Tensor, pre_TS: Tensor, written: Written | None, rows: Rows, run: Run
    ) -> Entered:
        """Add what the last sub-layer gave, if any, and make the next one's input and coefficients.

        Returns:
            (stream [T, S, D], input [T, D], its pre [T, S], post [T, S], comb [T, S, S]).
        """
        mix, norm = (self.attn_mix, self.attn_norm) if kind == "attn" else (self.ffn_mix, self.ffn_norm)
        # Where there is a kernel for the whole, every short row takes it, whatever stands beside them (DESIGN 12).
        regions = run.regions
        packed = None if regions is None else mix.packed_for(regions, norm, self.eps)
        short = rows.short_rows
        if regions is None or packed is None:
            return self._enter_by_op(kind, x_TSD, pre_TS, written, rows, run)
        if not short:
            return _rounded(regions.enter_long(x_TSD, pre_TS, packed, run.numerics.native, written), run)
        first = None if written is None else _cut(written, slice(0, short))
        found = _rounded(regions.enter(x_TSD[:short], pre_TS[:short], packed, run.numerics.native, first), run)
        if short < len(rows):
            cut = slice(short, None)
            last = None if written is None else _cut(written, cut)
            rest = _rounded(regions.enter_long(x_TSD[cut], pre_TS[cut], packed, run.numerics.native, last), run)
            x, inner, pre, post, comb = (torch.cat(pair) for pair in zip(found, rest, strict=True))
            return x, inner, pre, post, comb
        return found

    def leave_sublayer(self, x_TSD: Tensor, written: Written, rows: Rows, run: Run) -> Tensor:
        """The streams [T, S, D] with what the layer's last sub-layer gave; x is the layer's own, and may be written."""
        out, post, comb = written
        expand = run.ops.hyper_expand
        if run.regions is not None and not rows.short_rows:
            expand = run.regions.leave_long
        return run.numerics.round(expand(out, x_TSD, post, comb))

    def _enter_by_op(
        self, kind: str, x_TSD: Tensor, pre_TS: Tensor, written: Written | None, rows: Rows, run: Run
    ) -> Entered:
        name = self.name
        mix, norm = (self.attn_mix, self.attn_norm) if kind == "attn" else (self.ffn_mix, self.ffn_norm)
        if written is not None:
            out, post, comb = written
            x_TSD = run.numerics.round(run.ops.hyper_expand(out, x_TSD, post, comb))
        pre, post, comb = mix(x_TSD, rows, run)
        post = run.record(f"{name}.{kind}_post", post, rows)
        comb = run.record(f"{name}.{kind}_comb", comb, rows)
        if kind == "attn":
            pre = run.record(f"{name}.attn_pre", pre, rows)
        return x_TSD, run.record(f"{name}.{kind}_in", self.collapse(x_TSD, pre_TS, norm, run), rows), pre, post, comb


class Seam(nn.Module):
    """Of the decoder's first layer, what an encoder alone needs: the global KV that all later layers read."""

    TENSORS = ("engram.", "attn_norm.", "attn.compressor.", "attn.indexer.wk.", "attn.indexer.k_norm.")
    """Beginnings of the names of its tensors, below the layer's."""

    def __init__(self, config: ModelConfig, role: LayerRole, freqs: tuple[Tensor, Tensor], scope: Scope) -> None:
        super().__init__()
        self.name, self.eps = f"layers.{role.layer_id}", config.rms_norm_eps
        self.engram = Engram(config, role, scope.scope("engram")) if role.engram_index is not None else None
        self.attn_norm = scope.param("attn_norm.weight")
        self.compressor = Compressor(config, role, freqs, scope.scope("attn"))

    def write_global(self, x_TSD: Tensor, pre_TS: Tensor, rows: Rows, run: Run) -> None:
        """`Layer.write_global`."""
        if self.engram is not None:
            x_TSD = self.engram.forward(x_TSD, rows, run, self.name)
        self.compressor(collapse(x_TSD, pre_TS, self.attn_norm, self.eps, run), rows, run)


def collapse(x_TSD: Tensor, pre_TS: Tensor, norm: Tensor, eps: float, run: Run) -> Tensor:
    """Weighted sum of the copies, rounded, then normed [T, D]."""
    return run.norm(run.numerics.round(run.ops.hyper_collapse(x_TSD, pre_TS)), norm, eps)


def _rounded(entered: Sequence[Tensor], run: Run) -> Entered:
    x, inner, pre, post, comb = entered
    return run.numerics.round(x), run.numerics.round(inner), pre, post, comb


def _cut(written: Written, rows: slice) -> Written:
    out, post, comb = written
    return out[rows], post[rows], comb[rows]


def first_pre(x_TSD: Tensor) -> Tensor:
    """The first mix ever, fp32 [T, S]: one-hot on copy 0 of each row's streams."""
    pre = torch.zeros(x_TSD.shape[:2], device=x_TSD.device)
    pre[:, 0] = 1
    return pre
