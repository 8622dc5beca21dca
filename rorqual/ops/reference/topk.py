"""The k best of each row, by one tie rule, in plain torch. The fast twin is `rorqual.ops.fast.topk`."""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.errors import FormatError

# R rows, G scores a row, K chosen

TILE_SCORES = 1 << 22
"""Scores looked at together: bounds the running counts (int64) at 32 MB."""


def topk_lowest(scores_RG: Tensor, k: int) -> Tensor:
    """Indices int64 [R, k] of the k best scores of each row, ascending, -1 padded at the end.

    -inf is never selected, +inf is an ordinary best score, and of equal scores at the edge the lowest indices win
    (SPEC 5), whatever else is in the call.

    Worked example: scores [2, 5, 5, -inf, 5] with k = 2 give [1, 2]; with k = 5 they give [0, 1, 2, 4, -1].

    Raises:
        FormatError: a NaN score.
    """
    rows, width = scores_RG.shape
    if bool(torch.isnan(scores_RG).any()):
        at = tuple(torch.isnan(scores_RG).nonzero()[0].tolist())
        raise FormatError(f"score {at} is NaN: scores must be numbers or -inf")
    out = torch.full((rows, k), -1, dtype=torch.int64, device=scores_RG.device)
    if k == 0 or width == 0:
        return out
    tile = max(1, TILE_SCORES // width)
    for first in range(0, rows, tile):
        chosen = _chosen(scores_RG[first : first + tile], k)
        row, column = chosen.nonzero(as_tuple=True)
        place = (chosen.cumsum(1) - 1)[row, column]
        out[row + first, place] = column
    return out


def _chosen(scores_RG: Tensor, k: int) -> Tensor:
    """Bool [R, G], at most k true in a row: everything above the k-th best score, then ties from the left."""
    finite_or_best = scores_RG > -torch.inf
    if scores_RG.shape[1] <= k:
        return finite_or_best
    edge = scores_RG.topk(k, dim=1).values[:, -1:]
    above, tied = scores_RG > edge, scores_RG == edge
    room = k - above.sum(1, keepdim=True)
    return (above | (tied & (tied.cumsum(1) <= room))) & finite_or_best
