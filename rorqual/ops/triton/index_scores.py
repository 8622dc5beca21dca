"""Index scores of FP4 keys in Triton: the twin of `rorqual.ops.reference.index_scores`, in the same order of sums.

A program scores a few rows against a tile of keys, sixteen heads of each row at a time, block by block of 32 channels.
A block's product is taken of doubled codes, integers of at most 12, so fp16 factors and fp32 sums are exact in any
order; scales follow. Low and high nibbles, that is even and odd channels, are two products, and nothing is unpacked
beyond a register.
"""

# Kernels are typed by Triton.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.formats.spec import E2M1_E8M0_32
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference import index_scores as plain
from rorqual.ops.triton.decode import check, e2m1_doubled, e8m0, geometry, locate, round_bf16
from rorqual.ops.triton.launch import launch, refuse_gradients, serves

# R rows, H index heads, G groups, C candidates of a row, M (row, head) pairs of a panel, B bytes of a block
# b code bytes, s scale bytes

ROWS = 4
"""Rows that share a tile of keys at most; a power of two."""
GROUPS = 64
"""Keys of a tile."""


@triton.jit
def _block_dots(q_M, valid_M, k_G, read_G):
    """Four times q . k over one block's codes [M, G], exact; q_M and k_G point to the block's sixteen bytes."""
    byte_B = tl.arange(0, 16)
    q_MB = tl.load(q_M[:, None] + byte_B[None, :], mask=valid_M[:, None], other=0)
    k_BG = tl.load(k_G[None, :] + byte_B[:, None], mask=read_G[None, :], other=0)
    even = tl.dot(e2m1_doubled(q_MB & 15).to(tl.float16), e2m1_doubled(k_BG & 15).to(tl.float16))
    return tl.dot(e2m1_doubled(q_MB >> 4).to(tl.float16), e2m1_doubled(k_BG >> 4).to(tl.float16), even)


@triton.jit
def _halved(lanes_RLG, ROWS: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr):
    """Lanes [ROWS, LANES, G] to [ROWS, LANES / 2, G]: a sum of two has one order."""
    return tl.sum(tl.reshape(lanes_RLG, (ROWS, 2, LANES // 2, GROUPS)), axis=1)


@triton.jit
def _tile_scores(
    q_codes,
    q_scales,
    w,
    first,
    rows,
    pool,
    table,
    group_G,
    read_G,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    CODES_OFFSET: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ENTRIES: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Scores [ROWS, G] of rows from `first` on against groups; where `read_G` is False nothing is read."""
    start_G, entry_G = locate(table, group_G, read_G, PAGE_BYTES, ENTRIES)
    k_G = pool + start_G + CODES_OFFSET + entry_G * CODE_BYTES
    k_scale_G = pool + start_G + SCALES_OFFSET + entry_G * SCALE_BYTES
    pair_M = tl.arange(0, ROWS * 16)
    row_M = first.to(tl.int64) + pair_M // 16
    lanes_MG = tl.zeros((ROWS * 16, GROUPS), tl.float32)
    for panel in range(0, HEADS, 16):
        head_M = panel + pair_M % 16
        valid_M = (row_M < rows) & (head_M < HEADS)
        at_M = row_M * HEADS + head_M
        dots_MG = tl.zeros((ROWS * 16, GROUPS), tl.float32)
        for block in range(BLOCKS):
            q_scale_M = e8m0(tl.load(q_scales + at_M * BLOCKS + block, mask=valid_M, other=127)) * 0.25
            scale_G = e8m0(tl.load(k_scale_G + block, mask=read_G, other=127))
            q_M = q_codes + at_M * (BLOCKS * 16) + block * 16
            part_MG = _block_dots(q_M, valid_M, k_G + block * 16, read_G)
            dots_MG += part_MG * q_scale_M[:, None] * scale_G[None, :]
        w_M = tl.load(w + at_M, mask=valid_M, other=0.0)
        if NATIVE:
            dots_MG, w_M = round_bf16(dots_MG), round_bf16(w_M)
        # Not a maximum, which may lose a NaN.
        products_MG = tl.where(dots_MG < 0, 0.0, dots_MG) * w_M[:, None]
        lanes_MG += round_bf16(products_MG) if NATIVE else products_MG
    halves = _halved(tl.reshape(lanes_MG, (ROWS, 16, GROUPS)), ROWS, 16, GROUPS)
    halves = _halved(_halved(halves, ROWS, 8, GROUPS), ROWS, 4, GROUPS)
    scores_RG = tl.reshape(_halved(halves, ROWS, 2, GROUPS), (ROWS, GROUPS))
    return round_bf16(scores_RG) if NATIVE else scores_RG


@triton.jit(do_not_specialize=["rows", "group0", "group1"])
def _score_groups(
    q_codes,
    q_scales,
    w,
    visible,
    pool,
    table,
    rows,
    group0,
    group1,
    out,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    CODES_OFFSET: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ENTRIES: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One tile of [group0, group1) for ROWS rows; `out` [R, group1 - group0] comes filled with -inf."""
    start, first = group0 + tl.program_id(0) * GROUPS, tl.program_id(1) * ROWS
    row_R, group_G = first + tl.arange(0, ROWS), start + tl.arange(0, GROUPS)
    visible_R = tl.load(visible + row_R, mask=row_R < rows, other=0)
    # What no row of the tile sees is not read.
    end = tl.minimum(tl.max(visible_R, 0), group1)
    if start < end:
        scores_RG = _tile_scores(
            q_codes, q_scales, w, first, rows, pool, table, group_G, group_G < end, HEADS, BLOCKS,
            PAGE_BYTES, CODES_OFFSET, CODE_BYTES, SCALES_OFFSET, SCALE_BYTES, ENTRIES, NATIVE, ROWS, GROUPS,
        )  # fmt: skip
        out_RG = out + row_R.to(tl.int64)[:, None] * (group1 - group0) + (group_G - group0)[None, :]
        seen_RG = (group_G[None, :] < visible_R[:, None]) & (group_G < end)[None, :]
        tl.store(out_RG, scores_RG, mask=seen_RG)


@triton.jit(do_not_specialize=["rows", "count"])
def _score_candidates(
    q_codes,
    q_scales,
    w,
    index,
    pool,
    table,
    rows,
    count,
    out,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    CODES_OFFSET: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ENTRIES: tl.constexpr,
    NATIVE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One tile of one row's own groups `index` [R, C]; `out` [R, C] comes filled with -inf."""
    row = tl.program_id(0)
    place_C = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at_C = row.to(tl.int64) * count + place_C
    group_C = tl.load(index + at_C, mask=place_C < count, other=-1)
    present_C = group_C != -1
    scores_RC = _tile_scores(
        q_codes, q_scales, w, row, rows, pool, table, group_C, present_C, HEADS, BLOCKS,
        PAGE_BYTES, CODES_OFFSET, CODE_BYTES, SCALES_OFFSET, SCALE_BYTES, ENTRIES, NATIVE, 1, GROUPS,
    )  # fmt: skip
    tl.store(out + at_C[None, :], scores_RC, mask=present_C[None, :])


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
    """As the plain `index_scores`, which also takes the formats other than E2M1/E8M0/32. No gradients."""
    query = (q_codes_RHb, q_scales_RHs, w_RH)
    if region.fmt != E2M1_E8M0_32 or not serves(_score_groups, w_RH.device):
        return plain.index_scores(*query, region, block_table, group0, group1, visible_R, native)
    rows = w_RH.shape[0]
    out = torch.full((rows, group1 - group0), -torch.inf, device=w_RH.device)
    end = min(group1, int(visible_R.max())) if rows else group0
    if end <= group0:
        return out
    # The groups that are read lie between the two.
    check(region, block_table, torch.tensor([group0, end - 1]))
    tile = min(ROWS, triton.next_power_of_2(rows))
    grid = (triton.cdiv(end - group0, GROUPS), triton.cdiv(rows, tile))
    args = (visible_R.contiguous(), region.pool, block_table.contiguous(), rows, group0, group1)
    return launch(_score_groups, grid, out, *_query(*query), *args, ROWS=tile, **_constants(w_RH, region, native))


def index_scores_at(
    q_codes_RHb: Tensor,
    q_scales_RHs: Tensor,
    w_RH: Tensor,
    region: PagedRegion,
    block_table: Tensor,
    index_RC: Tensor,
    native: bool,
) -> Tensor:
    """As the plain `index_scores_at`, formats and gradients as in `index_scores`."""
    query = (q_codes_RHb, q_scales_RHs, w_RH)
    if region.fmt != E2M1_E8M0_32 or not serves(_score_candidates, w_RH.device):
        return plain.index_scores_at(*query, region, block_table, index_RC, native)
    rows, count = index_RC.shape
    out = torch.full((rows, count), -torch.inf, device=w_RH.device)
    if not out.numel():
        return out
    check(region, block_table, index_RC[index_RC != -1])
    args = (index_RC.contiguous(), region.pool, block_table.contiguous(), rows, count)
    grid = (rows, triton.cdiv(count, GROUPS))
    return launch(_score_candidates, grid, out, *_query(*query), *args, **_constants(w_RH, region, native))


def _query(codes: Tensor, scales: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    refuse_gradients(w)
    return codes.contiguous(), scales.contiguous(), w.detach().to(torch.float32).contiguous()


def _constants(w_RH: Tensor, region: PagedRegion, native: bool) -> dict[str, int | bool]:
    sizes = {"HEADS": w_RH.shape[1], "BLOCKS": region.scale_bytes, "NATIVE": native, "GROUPS": GROUPS}
    return {**sizes, **geometry(region)}
