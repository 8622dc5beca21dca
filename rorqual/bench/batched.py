"""Attention and candidate scores as plain torch does them best when a call has many rows: products that rows share.

The twins in `ops.reference` go row by row, so that a row's bits are its own. These do not: they are a baseline to
measure against, and serve no model. The arguments are the twins'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.formats.codec import dequantize
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference.gather import gather_rows

# T or R rows, H heads, C head dim, S window keys of a tile, K top-k, G groups, N candidates of a row, D index head dim

ROWS = 128
"""Rows of a tile: gathered keys of one stay in a cache."""


def batched_attention(
    q_THC: Tensor,
    positions_T: Tensor,
    window_LC: Tensor,
    base: int,
    floor: int,
    window: int,
    region: PagedRegion | None,
    block_table: Tensor | None,
    topk_TK: Tensor | None,
    sink_H: Tensor,
    scale: float,
    native: bool,
) -> Tensor:
    """`ops.reference.attention.sparse_attention`: a tile's rows share the product with the window's keys, and every
    group is dequantised once a call."""
    out = torch.empty_like(q_THC)
    groups = None
    if topk_TK is not None:
        assert region is not None and block_table is not None
        groups = _Groups(region, block_table, topk_TK)
    for first in range(0, q_THC.shape[0], ROWS):
        part = slice(first, first + ROWS)
        q, at = q_THC[part] * scale, positions_T[part]
        low = min(max(int(at.min()) - window + 1, base) - base, window_LC.shape[0])
        near = window_LC[low : max(int(at.max()) + 1 - base, 0)]
        held = torch.arange(near.shape[0], device=at.device) + (base + low)
        seen = (held <= at[:, None]) & (held > at[:, None] - window) & (held >= floor)
        logits = [(q.flatten(0, 1) @ near.T).view(*q.shape[:2], len(near)).masked_fill_(~seen[:, None], -torch.inf)]
        if groups is not None:
            far = groups.rows(part)
            logits.append((q @ far.transpose(1, 2)).masked_fill_(groups.absent[part, None], -torch.inf))
        out[part] = _mix(torch.cat(logits, -1), sink_H, native, near, None if groups is None else far)
    return out


def _mix(logits_THS: Tensor, sink_H: Tensor, native: bool, near_SC: Tensor, far_TKC: Tensor | None) -> Tensor:
    top = logits_THS.amax(-1, keepdim=True) if logits_THS.shape[-1] else logits_THS.new_zeros(*logits_THS.shape[:2], 1)
    top = top.masked_fill(top == -torch.inf, 0.0)
    p = logits_THS.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    # An empty row is zeros, whatever its sink.
    denominator = (total + torch.exp(sink_H[:, None] - top)).masked_fill(total == 0, 1.0)
    p = p.to(torch.bfloat16).float() if native else p
    own = p[..., : near_SC.shape[0]]
    out = (own.flatten(0, 1) @ near_SC).view(*own.shape[:2], -1)
    return (out if far_TKC is None else out + p[..., near_SC.shape[0] :] @ far_TKC) / denominator


class _Groups:
    """The keys of a call's chosen groups. Dequantised all at once where the rows choose more than there are."""

    def __init__(self, region: PagedRegion, block_table: Tensor, index_TK: Tensor) -> None:
        self.absent, self._index = index_TK == -1, index_TK
        self._region, self._table = region, block_table
        count = int(index_TK.max()) + 1 if index_TK.numel() else 0
        self._all: Tensor | None = None
        if index_TK.numel() > count:
            self._all = gather_rows(region, block_table, torch.arange(count, device=index_TK.device))

    def rows(self, part: slice) -> Tensor:
        """[t, K, C], anything finite where absent."""
        index = self._index[part]
        if self._all is None:
            return gather_rows(self._region, self._table, index)
        if not len(self._all):
            return self._all.new_zeros(*index.shape, self._region.width)
        return self._all.index_select(0, index.clamp_min(0).flatten()).view(*index.shape, -1)


def batched_scores_at(
    q_codes_RHb: Tensor,
    q_scales_RHs: Tensor,
    w_RH: Tensor,
    region: PagedRegion,
    block_table: Tensor,
    index_RN: Tensor,
    native: bool,
) -> Tensor:
    """`ops.reference.index_scores.index_scores_at`: where rows ask for more groups than there are, each is scored
    for every row in one product a tile, and the scores are picked."""
    rows, asked = index_RN.shape
    count = int(index_RN.max()) + 1 if index_RN.numel() else 0
    q_RHD, absent = dequantize(q_codes_RHb, q_scales_RHs, region.fmt), index_RN == -1
    if not count:
        return q_RHD.new_full((rows, asked), -torch.inf)
    shared = rows * asked > count
    groups = torch.arange(count, device=index_RN.device)
    keys = gather_rows(region, block_table, groups if shared else index_RN)
    out = q_RHD.new_empty(rows, asked)
    for first in range(0, rows, ROWS // 4):
        part = slice(first, first + ROWS // 4)
        q = q_RHD[part]
        dots = (q.flatten(0, 1) @ keys.T).view(*q.shape[:2], -1) if shared else q @ keys[part].transpose(1, 2)
        scores = _weighted(dots, w_RH[part], native)
        out[part] = scores.gather(1, index_RN[part].clamp_min(0)) if shared else scores
    return out.masked_fill_(absent, -torch.inf)


def _weighted(dots_RHG: Tensor, w_RH: Tensor, native: bool) -> Tensor:
    if not native:
        return (w_RH[:, None] @ dots_RHG.relu_())[:, 0]
    products = dots_RHG.to(torch.bfloat16).relu() * w_RH.to(torch.bfloat16)[..., None]
    return products.float().sum(1).to(torch.bfloat16).float()
