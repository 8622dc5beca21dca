"""DSpark: a three-layer draft that proposes a block of tokens at once (SPEC 9).

The draft's window is fed from the backbone (`main_x`), never from its own block, so a proposal leaves no state behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rorqual.cache.kv_cache import KVCache
from rorqual.config import ModelConfig, Part
from rorqual.formats.spec import FORMATS
from rorqual.formats.weights import DenseWeight, Weight
from rorqual.model.layer import Layer, first_pre
from rorqual.model.rows import Rows, Segment, build_rows
from rorqual.model.run import Carry, Run
from rorqual.model.tap import Tap
from rorqual.model.weights import Scope
from rorqual.ops.dispatch import Ops

# B sequences, g block, T rows, S copies, D hidden, V vocabulary, R Markov rank

Choose = Callable[[Tensor, int], Tensor]
"""(logits [B, V] of draft i, i) -> token ids int64 [B]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """ids int64 [B, g]; logits fp32 [B, g, V], Markov term included; confidence fp32 logits [B, g]."""

    ids_Bg: Tensor
    logits_BgV: Tensor
    confidence_Bg: Tensor


class Draft(nn.Module):
    """The draft layers, the projection that feeds their windows, the Markov and the confidence head."""

    def __init__(self, config: ModelConfig, freqs: tuple[Tensor, Tensor], scope: Scope) -> None:
        super().__init__()
        self.config = config
        self.freqs = freqs
        self.eps = config.rms_norm_eps
        roles = [r for r in config.roles if r.part is Part.DRAFT]
        self.layers = nn.ModuleList(Layer(config, role, freqs, scope.scope(str(i))) for i, role in enumerate(roles))
        first, last = scope.scope("0"), scope.scope(str(len(roles) - 1))
        self.main_proj = first.weight("main_proj")
        self.main_norm = first.param("main_norm.weight")
        self.norm = last.param("norm.weight")
        self.markov_embed = last.tensor("markov_head.embed.weight")
        self.markov_head = last.weight("markov_head.head")
        self.confidence = DenseWeight(last.param("confidence_head.proj.weight"))

    def main_x(self, hidden_TM: Tensor, rows: Rows, run: Run) -> Tensor:
        """What the windows are made of [T, D], from the target layers' hidden states side by side."""
        return run.norm(run.linear(hidden_TM, self.main_proj, rows), self.main_norm, self.eps)

    def feed(self, cache: KVCache, hidden_TM: Tensor, rows: Rows, run: Run) -> Tensor:
        """Write the draft windows of the rows' positions from the backbone's hidden states; returns main_x [T, D]."""
        main_x = self.main_x(hidden_TM, rows, run)
        fmt = FORMATS[self.config.cache.window]
        rings = cache.slots.draft_rings
        few = not run.tap.active and all(s.end - s.start <= rings.rows for s in rows.segments)
        slots = torch.tensor([s.slot for s in rows.segments for _ in range(s.start, s.end)]) if few else None
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            kv = layer.attn.window_kv(main_x, rows, run)
            if slots is not None:
                rings.write_rows(i, slots.to(kv.device), rows.positions_T, run.ops.quantize(kv, fmt))
                continue
            for seg in rows.segments:
                own = run.tap.nudge(f"mtp.{i}.window_kv", kv[seg.rows], fmt, seg.start)
                packed = run.ops.quantize(own, fmt)
                if run.tap.active:
                    values = run.ops.dequantize(packed.codes, packed.scales, fmt)
                    run.tap(f"mtp.{i}.window_kv", run.numerics.round(values), seg.start)
                rings.write(i, seg.slot, seg.start, packed)
        for seg in rows.segments:
            span = cache.slots.states[seg.slot].draft
            if seg.start > span.hi:
                span.reset(seg.start)
            span.advance(seg.start, seg.end)
        return main_x

    def propose(
        self,
        cache: KVCache,
        embed: Tensor,
        head: Weight,
        slots: Sequence[int],
        next_ids_B: Tensor,
        choose: Choose,
        run: Run,
        drafts: int | None = None,
    ) -> Proposal:
        """Draft a block, or the first `drafts` of it, after each sequence's already-sampled next token.

        Args:
            cache: whose draft windows end at position p of each slot.
            embed, head: the backbone's, shared.
            next_ids_B: int64 [B], the token at position p + 1.
        """
        block = self.config.dspark_block_size
        rows = self._block_rows(cache, slots, block)
        next_ids_B = next_ids_B.to(embed.device)
        ids = next_ids_B.new_full((len(slots), block), self.config.dspark_noise_token_id)
        ids[:, 0] = next_ids_B
        inner = Run(ops=run.ops, numerics=run.numerics, kv=DraftKV(self.config, cache, run), tap=run.tap)
        hidden = self.block_hidden(run.numerics.round(embed[ids.flatten()]), rows, inner)
        logits = self.block_logits(hidden, head, rows.short_rows, run).unflatten(0, (len(slots), block))
        hidden = hidden.unflatten(0, (len(slots), block))
        return self._sample(logits[:, :drafts], hidden[:, :drafts], next_ids_B, choose, run.ops)

    def block_hidden(self, embedded_TD: Tensor, rows: Rows, run: Run) -> Tensor:
        """The last layer's collapsed stream [T, D] of block rows, un-normed; `run.kv` gives them their windows."""
        x = embedded_TD[:, None].expand(-1, self.config.hc_mult, -1)
        pre = first_pre(x)
        carry = Carry()
        for layer in self.layers:
            x, pre = layer(x, pre, rows, carry, run)
        return run.record("hidden", run.numerics.round(run.ops.hyper_collapse(x, pre)), rows)

    def block_logits(self, hidden_TD: Tensor, head: Weight, short_rows: int, run: Run) -> Tensor:
        """fp32 [T, V] of the backbone's head, before the Markov term."""
        normed = run.norm(hidden_TD, self.norm, self.eps)
        return run.ops.linear(normed.float(), head, short_rows, False)

    def finish(
        self, prev_B: Tensor, logits_BV: Tensor, hidden_BD: Tensor, short_rows: int, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """Logits fp32 [B, V] of drafts whose predecessor is `prev_B`, and confidence logits fp32 [B].

        logits_BV, hidden_BD: of `block_logits` and `block_hidden`.
        """
        markov = self.markov_embed[prev_B].float()
        logits = logits_BV + ops.linear(markov, self.markov_head, short_rows, False)
        joined = torch.cat((hidden_BD.float(), markov), dim=1)
        return logits, ops.linear(joined, self.confidence, short_rows, False)[:, 0]

    def _block_rows(self, cache: KVCache, slots: Sequence[int], block: int) -> Rows:
        segments = []
        for i, slot in enumerate(slots):
            start = cache.slots.states[slot].draft.hi
            segments.append(
                Segment(
                    row_start=i * block,
                    row_end=(i + 1) * block,
                    start=start,
                    end=start + block,
                    slot=slot,
                    block_table=None,
                    write_floor=0,
                    window_floor=0,
                )
            )
        return build_rows(segments, self.freqs)

    def _sample(self, logits_BgV: Tensor, hidden_BgD: Tensor, prev_B: Tensor, choose: Choose, ops: Ops) -> Proposal:
        """Left to right: add the Markov term of the predecessor, choose, score the confidence."""
        ids, logits, confidence = [], [], []
        for i in range(logits_BgV.shape[1]):
            row, sure = self.finish(prev_B, logits_BgV[:, i], hidden_BgD[:, i], len(prev_B), ops)
            confidence.append(sure)
            prev_B = choose(row, i).to(row.device)
            ids.append(prev_B)
            logits.append(row)
        return Proposal(
            ids_Bg=torch.stack(ids, 1), logits_BgV=torch.stack(logits, 1), confidence_Bg=torch.stack(confidence, 1)
        )


class WindowOnly:
    """What a store of layers without global KV is never asked."""

    def tail(self, source: int, seg: Segment, kv_nC: Tensor, score_nC: Tensor) -> tuple[Tensor, Tensor, int]:
        raise AssertionError("draft layers have no compressor")

    def put_groups(self, source: int, seg: Segment, first: int, main_GC: Tensor, key_GD: Tensor, tap: Tap) -> None:
        raise AssertionError("draft layers have no compressor")

    def index_scores(
        self, source: int, seg: Segment, q_nID: Tensor, w_nI: Tensor, groups: tuple[int, int], visible_n: Tensor
    ) -> Tensor:
        raise AssertionError("draft layers have no indexer")

    def index_scores_at(self, source: int, seg: Segment, q_nID: Tensor, w_nI: Tensor, index_nK: Tensor) -> Tensor:
        raise AssertionError("draft layers have no indexer")


class DraftKV(WindowOnly):
    """The draft's keys: the window [p-W+1, p] from the ring and the whole block, both ways, the block never stored."""

    def __init__(self, config: ModelConfig, cache: KVCache, run: Run) -> None:
        self.config, self.cache, self.run = config, cache, run
        self.fmt = FORMATS[config.cache.window]
        self.backbone_layers = config.num_hidden_layers

    def window(self, layer: int, seg: Segment, kv_nC: Tensor, tap: Tap) -> tuple[Tensor, int]:
        ops, rings = self.run.ops, self.cache.slots.draft_rings
        span = self.cache.slots.states[seg.slot].draft
        base = max(0, seg.start - self.config.sliding_window, span.held_from(rings.rows))
        held = rings.read(layer - self.backbone_layers, seg.slot, base, seg.start)
        own = ops.quantize(kv_nC, self.fmt)
        parts = [ops.dequantize(p.codes, p.scales, self.fmt) for p in (held, own)]
        return torch.cat(parts), base

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
        block = seg.end - seg.start
        # Every query sees what the block's last one does: all of the window and the whole block.
        last = torch.full((block,), seg.end - 1, device=q_nHC.device)
        reach = self.config.sliding_window + block
        scale = self.config.head_dim**-0.5
        native = self.run.numerics.native
        return self.run.ops.sparse_attention(
            q_nHC.float(), last, keys, base, base, reach, None, None, None, sink_H, scale, native
        )
