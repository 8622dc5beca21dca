"""Index scores (SPEC 5): score[r, g] = sum_h w[r, h] * relu(q[r, h] . k[g]), in plain torch.

A score's bits are a function of its row's query and its group's key alone (DESIGN 12), because every sum has one order:

    q . k       over blocks of 32 channels from the left. Inside a block FP4 products and their sums are exact in fp32
                (small integers times one power of two), so no GEMM can order them differently; other formats sum the
                block in fp64.
    over heads  lane j of 16 takes heads j, j + 16, ... from the left; then lanes are halved: 8, 4, 2, 1.

The fast twin (`rorqual.ops.fast.index_scores`) keeps the same order, so that FP4 scores are equal bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.formats.codec import dequantize
from rorqual.formats.spec import NumberFormat
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference.gather import gather_rows

# R rows, H index heads, D index head dim, G groups, C candidates of a row, b code bytes, s scale bytes, B products

BLOCK = 32
"""Channels summed together: the group of the index formats."""
LANES = 16
TILE_DOTS = 1 << 19
"""Products q . k held at once, over rows, heads and groups: 2 MB a temporary, so that it stays in a cache."""


def index_scores(
    q_codes_RHb: Tensor,
    q_scales_RHs: Tensor,
    w_RH: Tensor,
    region: PagedRegion,
    block_table: Tensor,
    group0: int,
    group1: int,
    visible_R: Tensor,
    native: bool,
) -> Tensor:
    """Scores fp32 [R, group1 - group0] of groups [group0, group1); -inf where group >= visible_R[row].

    Groups that no row sees are not read: their pages may hold anything.

    Args:
        q_codes_RHb: uint8 queries packed in the region's format.
        q_scales_RHs: their scale bytes.
        w_RH: fp32 head weights.
        region: index keys.
        block_table: int64 [pages of the sequence].
        group0: first group.
        group1: one past the last.
        visible_R: int64, groups [0, visible) are visible to the row: (i + 1) // m at position i.
        native: round as SPEC 3.

    Raises:
        IndexError: a visible group outside the block table.
    """
    q_RHD = dequantize(q_codes_RHb, q_scales_RHs, region.fmt)
    rows, heads, _ = q_RHD.shape
    out = q_RHD.new_full((rows, group1 - group0), -torch.inf)
    end = min(group1, int(visible_R.max())) if rows else group0
    row_tile = max(1, TILE_DOTS // (heads * min(max(end - group0, 1), 1024)))
    for first in range(0, rows, row_tile):
        part = slice(first, first + row_tile)
        group_tile = max(BLOCK, TILE_DOTS // (heads * len(q_RHD[part])))
        for start in range(group0, end, group_tile):
            groups = torch.arange(start, min(start + group_tile, end), device=out.device)
            k_GD = gather_rows(region, block_table, groups)
            scores = scores_from_values(q_RHD[part], w_RH[part], k_GD, native, dot_dtype(region.fmt))
            hidden = groups >= visible_R[part, None]
            out[part, start - group0 : start - group0 + len(groups)] = scores.masked_fill(hidden, -torch.inf)
    return out


def index_scores_at(
    q_codes_RHb: Tensor,
    q_scales_RHs: Tensor,
    w_RH: Tensor,
    region: PagedRegion,
    block_table: Tensor,
    index_RC: Tensor,
    native: bool,
) -> Tensor:
    """Scores fp32 [R, C] of each row's own groups `index_RC` int64 (a candidate pool); -inf where the index is -1.

    The same bits as `index_scores` gives for the same row and group.
    """
    q_RHD = dequantize(q_codes_RHb, q_scales_RHs, region.fmt)
    out = q_RHD.new_full(tuple(index_RC.shape), -torch.inf)
    for r in range(q_RHD.shape[0]):
        present = index_RC[r] != -1
        k_GD = gather_rows(region, block_table, index_RC[r, present])
        scores = scores_from_values(q_RHD[r : r + 1], w_RH[r : r + 1], k_GD, native, dot_dtype(region.fmt))
        out[r, present] = scores[0]
    return out


def dot_dtype(fmt: NumberFormat) -> torch.dtype:
    """The dtype in which a block of 32 products of `fmt` values sums to the same bits in any order."""
    return torch.float32 if fmt.value == "e2m1" else torch.float64


def scores_from_values(
    q_RHD: Tensor, w_RH: Tensor, k_GD: Tensor, native: bool, block_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Scores fp32 [R, G] from dequantised queries and keys; differentiable, nothing masked.

    Args:
        q_RHD: fp32 queries.
        w_RH: fp32 head weights.
        k_GD: fp32 keys.
        native: round as SPEC 3.
        block_dtype: see `dot_dtype`. fp32 (the default, and what training wants) is exact for FP4 values.
    """
    rows, heads, width = q_RHD.shape
    q_PD, k_GD = q_RHD.flatten(0, 1).to(block_dtype), k_GD.to(block_dtype)
    dots_PG: Tensor | None = None
    for first in range(0, width, BLOCK):
        block = slice(first, min(first + BLOCK, width))
        part = (q_PD[:, block] @ k_GD[:, block].T).float()
        dots_PG = part if dots_PG is None else dots_PG + part
    assert dots_PG is not None
    return _weighted_head_sum(dots_PG.view(rows, heads, k_GD.shape[0]), w_RH, native)


def _weighted_head_sum(dots_RHG: Tensor, w_RH: Tensor, native: bool) -> Tensor:
    """relu, head weights, and the sum over heads in the order this file's head states."""
    products = _rounded(dots_RHG, native).relu() * _rounded(w_RH, native).unsqueeze(-1)
    products = _rounded(products, native)
    heads = products.shape[1]
    if heads % LANES:
        products = torch.nn.functional.pad(products, (0, 0, 0, -heads % LANES))
    by_lane = products.unflatten(1, (-1, LANES))
    lanes = by_lane[:, 0]
    for step in range(1, by_lane.shape[1]):
        lanes = lanes + by_lane[:, step]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return _rounded(lanes[:, 0], native)


def _rounded(x: Tensor, native: bool) -> Tensor:
    return x.to(torch.bfloat16).float() if native else x
