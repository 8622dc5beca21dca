"""Losses of the DSpark draft (SPEC 9), for many anchors at once and with no gradient into the backbone.

An anchor is a position p of a packed sequence. After it the draft is run as at inference: a window of `main_x` keys up
to p, and the block [x_{p+1}, noise, noise, ...] at positions p + 1 .. p + g. Draft i stands at p + 1 + i and answers
for x_{p+2+i}; its predecessor, which the Markov term is given, is the true x_{p+1+i}.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rorqual.config import ModelConfig
from rorqual.formats.codec import fake_quantize
from rorqual.formats.spec import FORMATS
from rorqual.formats.weights import DenseWeight, Weight
from rorqual.model.draft import Draft, WindowOnly
from rorqual.model.layer import Layer
from rorqual.model.rope import Rotary
from rorqual.model.rows import Rows, Segment
from rorqual.model.run import Run
from rorqual.model.tap import Tap
from rorqual.ops.reference.attention import attention_over
from rorqual.training.batch import IGNORE, Packed
from rorqual.training.learner import Totals
from rorqual.training.recipe import LossRecipe
from rorqual.training.seeding import keyed_generator

# T rows of the micro-batch, A anchors, g block, P (anchor, draft) pairs with a target, U distinct rows among theirs,
# W window, M target layers x hidden, D hidden, H heads, C head dim, V vocabulary

PARTS = ("draft_ce", "draft_tv", "draft_confidence")

TILE_VALUES = 1 << 18
"""Logits worked on at once, so that they stay in a core's cache between operations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLoss:
    """total: the weighted sum, a scalar to call `backward` on (0 without a gradient where nothing can be drafted).

    parts: "draft_ce" (nats), "draft_tv" (0..1; 1 less it is the acceptance) and "draft_confidence" (nats), unweighted,
    all drafts of a block alike. Each is a mean over the pairs of a sequence, summed over sequences and divided by the
    step's. In `total` the pairs weigh as `LossRecipe.draft_decay` says.
    """

    total: Tensor
    parts: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchors:
    """row_A int64: the anchors' rows in the micro-batch, ascending; start_A: first row of their pieces.

    valid_Ag: draft i has a target. weight_A fp32: of each of the anchor's pairs, 1 / pairs of its sequence.
    """

    row_A: Tensor
    start_A: Tensor
    valid_Ag: Tensor
    weight_A: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafted:
    """The drafts of all anchors that have a target.

    logits_PV: fp32, Markov term included. confidence_P: fp32 logits. pair_P int64: anchor x block + draft.
    source_P int64: the row of the draft's predecessor; the draft has that row's target, and is held to the backbone's
        distribution there.
    """

    logits_PV: Tensor
    confidence_P: Tensor
    pair_P: Tensor
    source_P: Tensor


def draft_losses(
    draft: Draft,
    embed: Tensor,
    head: Weight,
    hidden_TM: Tensor,
    normed_TD: Tensor,
    batch: Sequence[Packed],
    *,
    run: Run,
    loss: LossRecipe,
    totals: Totals,
    seed: int,
    quantise: bool,
) -> DraftLoss:
    """A micro-batch's share of the draft's losses; only the draft's own tensors get a gradient.

    Args:
        embed, head: the backbone's.
        hidden_TM: the backbone's target layers side by side, all rows of the batch in order.
        normed_TD: the backbone's normed output rows, which `head` turns into its distribution.
        run: ops with gradients, numerics, and whatever else the layers are to be given; its `kv` is not used.
        loss: weights, also within a block, and the share of positions that are anchors.
        seed: with a sequence's number it decides that sequence's anchors, however the step is cut.
        quantise: window keys go through the cache's format, straight through.
    """
    block = draft.config.dspark_block_size
    anchors = draw_anchors(batch, loss.anchors, block, seed)
    if not len(anchors.row_A):
        return DraftLoss(total=hidden_TM.new_zeros((), dtype=torch.float32), parts=dict.fromkeys(PARTS, 0.0))
    drafted = run_drafts(draft, embed, head, hidden_TM, batch, anchors, run=run, quantise=quantise)
    row_U, of_P = drafted.source_P.unique(return_inverse=True)
    with torch.no_grad():
        backbone_UV = run.ops.linear(normed_TD[row_U].float(), head, 0, False).softmax(-1)
    target_P = torch.cat([s.targets for s in batch])[drafted.source_P]
    ce, tv = distances(drafted.logits_PV, backbone_UV, of_P, target_P)
    sure = F.binary_cross_entropy_with_logits(drafted.confidence_P, 1 - tv.detach(), reduction="none")
    even = anchors.weight_A[drafted.pair_P // block] / totals.sequences
    each = loss.draft_ce * ce + loss.draft_tv * tv + loss.draft_confidence * sure
    weight = even * block_weights(block, loss.draft_decay, even.device)[drafted.pair_P % block]
    parts = [float((part.detach() * even).sum()) for part in (ce, tv, sure)]
    return DraftLoss(total=(each * weight).sum(), parts=dict(zip(PARTS, parts, strict=True)))


def block_weights(block: int, decay: float, device: torch.device | None = None) -> Tensor:
    """fp32 [g], 1 on average: of each draft of a block.

    >>> block_weights(3, 0.5).tolist()
    [1.7142857313156128, 0.8571428656578064, 0.4285714328289032]
    """
    weights = decay ** torch.arange(block, dtype=torch.float32, device=device)
    return weights / weights.mean()


def run_drafts(
    draft: Draft,
    embed: Tensor,
    head: Weight,
    hidden_TM: Tensor,
    batch: Sequence[Packed],
    anchors: Anchors,
    *,
    run: Run,
    quantise: bool,
) -> Drafted:
    """Every anchor's block at once, teacher-forced; arguments as of `draft_losses`. There is at least one anchor."""
    block, device = draft.config.dspark_block_size, hidden_TM.device
    ids_T = torch.cat([s.ids for s in batch])
    positions_T = torch.cat([torch.arange(b - a, device=device) for s in batch for a, b in s.pieces()])
    kv = AnchorKV(draft, hidden_TM.detach(), positions_T, anchors, run, quantise=quantise)

    step_g = torch.arange(1, block + 1, device=device)
    block_ids = ids_T.new_full((len(anchors.row_A), block), draft.config.dspark_noise_token_id)
    block_ids[:, 0] = ids_T[anchors.row_A + 1]
    rows = _rows((positions_T[anchors.row_A][:, None] + step_g).flatten(), draft)
    embedded = run.numerics.round(embed.detach()[block_ids.flatten()])
    hidden = draft.block_hidden(embedded, rows, dataclasses.replace(run, kv=kv))

    pair_P = anchors.valid_Ag.flatten().nonzero()[:, 0]
    source_P = (anchors.row_A[:, None] + step_g).flatten()[pair_P]
    hidden_PD = hidden[pair_P]
    logits = draft.block_logits(hidden_PD, DenseWeight(head.expand().detach()), 0, run)
    logits, confidence = draft.finish(ids_T[source_P], logits, hidden_PD, 0, run.ops)
    return Drafted(logits_PV=logits.float(), confidence_P=confidence.float(), pair_P=pair_P, source_P=source_P)


def draw_anchors(batch: Sequence[Packed], share: float, block: int, seed: int) -> Anchors:
    """round(share x n) anchors of each sequence of n tokens, at least 1 where one is possible and the share is not 0.

    A position can be an anchor when a draft after it has a target within its piece.
    """
    row, start, valid, weight = [], [], [], []
    offset = 0
    for sequence in batch:
        n = len(sequence.ids)
        device = sequence.ids.device
        bounds = list(sequence.pieces())
        length = torch.tensor([b - a for a, b in bounds], dtype=torch.int64, device=device)
        first_n, end_n = (
            torch.tensor([bound[k] for bound in bounds], dtype=torch.int64, device=device).repeat_interleave(length)
            for k in (0, 1)
        )
        at_n = torch.arange(n, device=device)
        trained_n = (sequence.targets != IGNORE) & (at_n + 1 < end_n)
        source_ng = at_n[:, None] + torch.arange(1, block + 1, device=device)
        valid_ng = (source_ng < end_n[:, None]) & trained_n[source_ng.clamp(max=max(n - 1, 0))] if n else source_ng > 0
        candidates = valid_ng.any(1).nonzero()[:, 0]
        wanted = min(len(candidates), max(1, round(share * n))) if share else 0
        order = torch.randperm(
            len(candidates), generator=keyed_generator("anchors", seed, sequence.number), device="cpu"
        )
        picked = candidates[order[:wanted].to(device)].sort().values
        pairs = valid_ng[picked].sum()
        row.append(picked + offset)
        start.append(first_n[picked] + offset)
        valid.append(valid_ng[picked])
        weight.append((1.0 / pairs.float()).expand(wanted))
        offset += n
    return Anchors(
        row_A=torch.cat(row), start_A=torch.cat(start), valid_Ag=torch.cat(valid), weight_A=torch.cat(weight)
    )


def _rows(positions_T: Tensor, draft: Draft) -> Rows:
    """Rows at given positions as one segment, none of them short: a training GEMM takes them all."""
    count = len(positions_T)
    whole = Segment(
        row_start=0, row_end=count, start=0, end=count, slot=0, block_table=None, write_floor=0, window_floor=0
    )
    return Rows(segments=(whole,), positions_T=positions_T, rotary=Rotary(draft.freqs, positions_T, 0), short_rows=0)


class AnchorKV(WindowOnly):
    """The draft's keys for all anchors of a micro-batch: each block sees W positions up to its anchor and itself whole.

    The rows of a run are the anchors' blocks one after the other, one segment for all.
    """

    def __init__(
        self, draft: Draft, hidden_TM: Tensor, positions_T: Tensor, anchors: Anchors, run: Run, *, quantise: bool
    ) -> None:
        config: ModelConfig = draft.config
        self.first_layer = config.num_hidden_layers
        self.block = config.dspark_block_size
        self.scale = config.head_dim**-0.5
        self.native = run.numerics.native
        self.fmt = FORMATS[config.cache.window] if quantise else None
        depth_A = anchors.row_A - anchors.start_A
        reach = min(config.sliding_window, int(depth_A.max()) + 1)
        back_W = torch.arange(reach - 1, -1, -1, device=depth_A.device)
        held_AW = back_W <= depth_A[:, None]
        self.at_AW = torch.where(held_AW, anchors.row_A[:, None] - back_W, anchors.row_A[:, None])
        self.held_AS = F.pad(held_AW, (0, self.block), value=True)
        rows = _rows(positions_T, draft)
        main_x = draft.main_x(hidden_TM, rows, run)
        self.main = [self._fake(cast(Layer, layer).attn.window_kv(main_x, rows, run)) for layer in draft.layers]

    def _fake(self, kv: Tensor) -> Tensor:
        return (kv if self.fmt is None else fake_quantize(kv, self.fmt)).float()

    def window(self, layer: int, seg: Segment, kv_nC: Tensor, tap: Tap) -> tuple[Tensor, int]:
        """Keys fp32 [A, W + g, C], slots before a piece holding any key of it; the int means nothing."""
        own = self._fake(kv_nC).unflatten(0, (-1, self.block))
        # An embedding's backward adds up what anchors share far faster than indexing's.
        return torch.cat((F.embedding(self.at_AW, self.main[layer - self.first_layer]), own), 1), 0

    def attend(
        self,
        source: int | None,
        seg: Segment,
        q_nHC: Tensor,
        window: tuple[Tensor, int],
        topk_nK: Tensor | None,
        sink_H: Tensor,
    ) -> Tensor:
        """The g queries of an anchor see the same keys, so they count as g x H heads of one row."""
        q = q_nHC.float().unflatten(0, (-1, self.block)).flatten(1, 2)
        out = attention_over(q, window[0], self.held_AS, sink_H.repeat(self.block), self.scale, self.native)
        return out.view(q_nHC.shape)


def distances(logits_PV: Tensor, backbone_UV: Tensor, of_P: Tensor, target_P: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the targets (nats) and total variation from the backbone, fp32 [P] each.

    Args:
        logits_PV: fp32, the draft's; the only argument that gets a gradient.
        backbone_UV: probabilities; of_P int64: which of its rows belongs to a pair.
        target_P: int64.
    """
    return cast(tuple[Tensor, Tensor], _apply_distances(logits_PV, backbone_UV, of_P, target_P))


class _Distances(torch.autograd.Function):
    """Both losses from one softmax, tile by tile: [P, V] is the largest tensor of a step, and autograd makes ten of it.

    With q = softmax(l), p the backbone's and a = [q > p]: TV = sum a (q - p), and as a is constant nearly everywhere
    dTV/dl = q (a - sum q a); dCE/dl = q - onehot.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_PV: Tensor, backbone_UV: Tensor, of_P: Tensor, target_P: Tensor
    ) -> tuple[Tensor, Tensor]:
        # q, negative where it is below p: the mask needs no tensor of its own.
        signed_PV = torch.empty_like(logits_PV)
        ce, tv = torch.empty_like(logits_PV[:, 0]), torch.empty_like(logits_PV[:, 0])
        for t in _tiles(logits_PV):
            log_q = logits_PV[t].log_softmax(-1)
            ce[t] = -log_q.gather(1, target_P[t, None])[:, 0]
            q = log_q.exp_()
            over = q - backbone_UV[of_P[t]]
            torch.copysign(q, over, out=signed_PV[t])
            tv[t] = over.relu_().sum(-1)
        ctx.save_for_backward(signed_PV, target_P)
        return ce, tv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        signed_PV, target_P = ctx.saved_tensors
        ce_P1, tv_P1 = (g[:, None].contiguous() for g in grads)
        grad = torch.empty_like(signed_PV)
        for t in _tiles(signed_PV):
            above = signed_PV[t].relu()
            shift = ce_P1[t] - tv_P1[t] * above.sum(-1, keepdim=True)
            torch.mul(signed_PV[t].abs(), shift, out=grad[t]).add_(above.mul_(tv_P1[t]))
        grad.scatter_add_(1, target_P[:, None], -ce_P1)
        return grad, None, None, None


_apply_distances: Any = _Distances.apply


def _tiles(x_PV: Tensor) -> list[slice]:
    step = max(1, TILE_VALUES // x_PV.shape[1])
    return [slice(i, i + step) for i in range(0, x_PV.shape[0], step)]
