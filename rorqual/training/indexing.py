"""The indexer in training: selection of a whole piece as masks, and what the indexer learns from.

The report does not disclose its indexer loss; this one is ours. Its teacher is the joint softmax of the layer's own
attention over window, *every* visible group and the sink, per head, averaged over the heads; the groups' part of it,
normalised, is what the softmax of the index scores should be. A head that looks at its window, or at the sink, thereby
says less about groups (field case 58).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.ops.dispatch import Ops

# n rows, R drawn rows, H heads, C head dim, I index heads, D index dim, G groups, W window


def index_scores(q_nID: Tensor, w_nI: Tensor, keys_GD: Tensor) -> Tensor:
    """sum_h w relu(q . k), fp32 [n, G]; nothing masked."""
    rows, heads, width = q_nID.shape
    dots = (q_nID.reshape(rows * heads, width) @ keys_GD.T).relu().view(rows, heads, -1)
    return torch.bmm(w_nI.unsqueeze(1), dots).squeeze(1)


def select(scores_nG: Tensor, topk: int, ops: Ops) -> Tensor:
    """Bool [n, G]: the `topk` best finite scores of each row, ties to the lowest group."""
    if scores_nG.shape[1] <= topk:
        return scores_nG > -torch.inf
    return as_mask(ops.topk_lowest(scores_nG, topk), scores_nG.shape[1])


def block_pool(scores_nG: Tensor, visible_n: Tensor, block: int, keep: int, ops: Ops) -> Tensor:
    """Bool [n, G]: groups of the `keep` best blocks, the newest visible group's block among them (SPEC 5)."""
    groups = scores_nG.shape[1]
    padded = torch.nn.functional.pad(scores_nG, (0, -groups % block), value=-torch.inf)
    best = padded.view(padded.shape[0], -1, block).amax(-1)
    newest = torch.div(visible_n - 1, block, rounding_mode="floor")
    pinned = (visible_n > 0)[:, None] & (torch.arange(best.shape[1], device=best.device) == newest[:, None])
    kept = select(best.masked_fill(pinned, torch.inf), keep, ops)
    return kept.repeat_interleave(block, dim=1)[:, :groups]


def as_mask(index_nK: Tensor, width: int) -> Tensor:
    """Bool [n, width] of indices, -1 being none."""
    mask = torch.zeros(index_nK.shape[0], width + 1, dtype=torch.bool, device=index_nK.device)
    return mask.scatter_(1, index_nK.masked_fill(index_nK < 0, width), True)[:, :width]


@torch.no_grad()
def teacher(
    q_RHC: Tensor,
    window_RWC: Tensor,
    seen_RW: Tensor,
    groups_GC: Tensor,
    visible_RG: Tensor,
    sink_H: Tensor,
    scale: float,
) -> Tensor:
    """fp32 [R, G]: mean over the heads of the joint softmax's share of each visible group. Rows sum to less than 1."""
    near = (q_RHC @ window_RWC.transpose(1, 2)) * scale
    far = (q_RHC @ groups_GC.T) * scale
    near = near.masked_fill(~seen_RW[:, None], -torch.inf)
    far = far.masked_fill(~visible_RG[:, None], -torch.inf)
    sink = sink_H[None, :, None].expand(q_RHC.shape[0], -1, 1)
    joint = torch.softmax(torch.cat((far, near, sink), dim=2), dim=2)
    return joint[:, :, : groups_GC.shape[0]].mean(1)


def index_kl(scores_RG: Tensor, teacher_RG: Tensor, visible_RG: Tensor) -> Tensor:
    """sum over the rows of KL(teacher's share of the groups, normalised || softmax of the scores), nats.

    A row that sees no group, or whose heads give groups nothing, counts 0.
    """
    mass = teacher_RG.sum(1, keepdim=True)
    target = teacher_RG / mass.clamp_min(1e-20)
    logits = scores_RG.masked_fill(~visible_RG, -torch.inf)
    told = (mass > 1e-8) & visible_RG.any(1, keepdim=True)
    # A row without groups would be a softmax over nothing; it is replaced before, so that no NaN meets the gradient.
    logits = torch.where(told, logits, torch.zeros_like(logits))
    log_p = torch.log_softmax(logits, dim=1)
    terms = torch.where(target > 0, target * (target.clamp_min(1e-30).log() - log_p), torch.zeros_like(target))
    return torch.where(told, terms, torch.zeros_like(terms)).sum()
