"""Attention over a window and selected groups in Triton: the twin of `rorqual.ops.reference.attention`.

A program has one row and sixteen of its heads, and goes through the row's slots SLOTS at a time, the window's and then
the Top-K's, whose codes it decodes in registers. It goes twice: for the largest logit, then for p and the sums, because
native rounding is of p under the final maximum (SPEC 3). So nothing of a row's slots is held in device memory.

Every sum has an order that follows from the row alone, not the plain twin's: results agree to fp32 rounding.
"""

# Kernels are typed by Triton.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.formats.spec import E2M1_E4M3_16, E2M1_E8M0_32, NumberFormat
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference.attention import sparse_attention as plain_sparse_attention
from rorqual.ops.triton.decode import check, e2m1_doubled, e4m3, e8m0, geometry, locate, round_bf16
from rorqual.ops.triton.launch import launch, refuse_gradients, serves

# T rows, H heads (16 of them in a program), C head dim, L window keys held, K top-k, S slots of a step, G scale groups
# b code bytes

READ: tuple[NumberFormat, ...] = (E2M1_E4M3_16, E2M1_E8M0_32)
"""Formats that the kernel reads; the others go through the plain op."""
HEADS_TILE = 16
SLOTS = 16
"""Keys in fast memory at once."""
OPTIONS = {"num_warps": 8, "num_stages": 1}
"""At 512 channels queries and keys then take 65 KB of shared memory; steps that overlap would take 100."""

NO_REGION = {
    "PAGE_BYTES": 1,
    "CODES_OFFSET": 0,
    "CODE_BYTES": 1,
    "SCALES_OFFSET": 0,
    "SCALE_BYTES": 1,
    "ENTRIES": 1,
}
"""For a window layer."""


@triton.jit
def _window_tile(window_keys, start, past, CHANNELS: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr):
    """Keys [S, C] of window slots [start, start + SLOTS), and which lie below `past`; the others are not read."""
    slot_S, channel_C = start + tl.arange(0, SLOTS), tl.arange(0, WIDE)
    present_S = slot_S < past
    mask_SC = present_S[:, None] & (channel_C < CHANNELS)[None, :]
    at_SC = slot_S.to(tl.int64)[:, None] * CHANNELS + channel_C[None, :]
    return tl.load(window_keys + at_SC, mask=mask_SC, other=0.0), present_S


@triton.jit
def _group_tile(
    topk,
    start,
    count,
    pool,
    table,
    PAGE_BYTES: tl.constexpr,
    CODES_OFFSET: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ENTRIES: tl.constexpr,
    GROUP: tl.constexpr,
    E4M3_SCALES: tl.constexpr,
    WIDE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Keys [S, C] of Top-K slots [start, start + SLOTS), decoded, and which are present; the others are not read."""
    slot_S = start + tl.arange(0, SLOTS)
    group_S = tl.load(topk + slot_S, mask=slot_S < count, other=-1)
    present_S = group_S != -1
    page_S, entry_S = locate(table, group_S, present_S, PAGE_BYTES, ENTRIES)
    byte_b, scale_G = tl.arange(0, WIDE // 2), tl.arange(0, WIDE // GROUP)
    codes_S = pool + page_S + CODES_OFFSET + entry_S * CODE_BYTES
    scales_S = pool + page_S + SCALES_OFFSET + entry_S * SCALE_BYTES
    mask_Sb = present_S[:, None] & (byte_b < CODE_BYTES)[None, :]
    codes_Sb = tl.load(codes_S[:, None] + byte_b[None, :], mask=mask_Sb, other=0)
    mask_SG = present_S[:, None] & (scale_G < SCALE_BYTES)[None, :]
    bytes_SG = tl.load(scales_S[:, None] + scale_G[None, :], mask=mask_SG, other=0)
    scales_SG = (e4m3(bytes_SG) if E4M3_SCALES else e8m0(bytes_SG)) * 0.5
    values_SC = tl.interleave(e2m1_doubled(codes_Sb & 15), e2m1_doubled(codes_Sb >> 4))
    keys = tl.reshape(values_SC, (SLOTS, WIDE // GROUP, GROUP)) * scales_SG[:, :, None]
    return tl.reshape(keys, (SLOTS, WIDE)), present_S


@triton.jit
def _logits(q_HC, keys_SC, present_S, scale):
    """Scaled q . k [H, S]; -inf where absent."""
    logits_HS = tl.dot(q_HC, tl.trans(keys_SC), input_precision="ieee") * scale
    return tl.where(present_S[None, :], logits_HS, float("-inf"))


@triton.jit
def _weigh(logits_HS, top_H, keys_SC, below_H, out_HC, NATIVE: tl.constexpr):
    """Denominators [H] and numerators [H, C] with another tile of slots in them."""
    p_HS = tl.exp(logits_HS - top_H[:, None])
    below_H += tl.sum(p_HS, axis=1)
    if NATIVE:
        p_HS = round_bf16(p_HS)
    return below_H, tl.dot(p_HS, keys_SC, out_HC, input_precision="ieee")


@triton.jit(do_not_specialize=["base", "held", "floor", "window", "count"])
def _attend(
    q,
    positions,
    window_keys,
    base,
    held,
    floor,
    window,
    pool,
    table,
    topk,
    count,
    sink,
    scale,
    out,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    CODES_OFFSET: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ENTRIES: tl.constexpr,
    GROUP: tl.constexpr,
    E4M3_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Sixteen heads of one row; WIDE is CHANNELS rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    head_H, channel_C = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE), tl.arange(0, WIDE)
    mask_HC = (head_H < HEADS)[:, None] & (channel_C < CHANNELS)[None, :]
    at_HC = (row * HEADS + head_H)[:, None] * CHANNELS + channel_C[None, :]
    q_HC = tl.load(q + at_HC, mask=mask_HC, other=0.0)
    position = tl.load(positions + row)
    first = (tl.maximum(tl.maximum(position - window + 1, floor), base) - base).to(tl.int32)
    past = tl.minimum(position + 1 - base, held).to(tl.int32)
    topk += row * count

    seen = tl.maximum(past - first, 0)
    top_H = tl.full((HEADS_TILE,), float("-inf"), tl.float32)
    for start in range(first, past, SLOTS):
        keys_SC, present_S = _window_tile(window_keys, start, past, CHANNELS, WIDE, SLOTS)
        top_H = tl.maximum(top_H, tl.max(_logits(q_HC, keys_SC, present_S, scale), axis=1))
    for start in range(0, count, SLOTS):
        keys_SC, present_S = _group_tile(
            topk, start, count, pool, table, PAGE_BYTES, CODES_OFFSET, CODE_BYTES,
            SCALES_OFFSET, SCALE_BYTES, ENTRIES, GROUP, E4M3_SCALES, WIDE, SLOTS,
        )  # fmt: skip
        seen += tl.sum(present_S.to(tl.int32), axis=0)
        top_H = tl.maximum(top_H, tl.max(_logits(q_HC, keys_SC, present_S, scale), axis=1))
    # Any finite number does for an empty row: its p are all zero.
    top_H = tl.where(top_H == float("-inf"), 0.0, top_H)

    below_H = tl.zeros((HEADS_TILE,), tl.float32)
    out_HC = tl.zeros((HEADS_TILE, WIDE), tl.float32)
    for start in range(first, past, SLOTS):
        keys_SC, present_S = _window_tile(window_keys, start, past, CHANNELS, WIDE, SLOTS)
        logits_HS = _logits(q_HC, keys_SC, present_S, scale)
        below_H, out_HC = _weigh(logits_HS, top_H, keys_SC, below_H, out_HC, NATIVE)
    for start in range(0, count, SLOTS):
        keys_SC, present_S = _group_tile(
            topk, start, count, pool, table, PAGE_BYTES, CODES_OFFSET, CODE_BYTES,
            SCALES_OFFSET, SCALE_BYTES, ENTRIES, GROUP, E4M3_SCALES, WIDE, SLOTS,
        )  # fmt: skip
        logits_HS = _logits(q_HC, keys_SC, present_S, scale)
        below_H, out_HC = _weigh(logits_HS, top_H, keys_SC, below_H, out_HC, NATIVE)
    below_H += tl.exp(tl.load(sink + head_H, mask=head_H < HEADS, other=0.0) - top_H)
    # A very negative sink over an empty row makes 0 / 0.
    below_H = tl.where(seen == 0, 1.0, below_H)
    below_HC = tl.broadcast_to(below_H[:, None], (HEADS_TILE, WIDE))
    tl.store(out + at_HC, tl.div_rn(out_HC, below_HC), mask=mask_HC)


def sparse_attention(
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
    """As the plain `sparse_attention`, which also takes the formats that the kernel does not read. No gradients."""
    if (region is not None and region.fmt not in READ) or not serves(_attend, q_THC.device):
        return plain_sparse_attention(
            q_THC, positions_T, window_LC, base, floor, window, region, block_table, topk_TK, sink_H, scale, native
        )
    refuse_gradients(q_THC, window_LC, sink_H)
    rows, heads, channels = q_THC.shape
    out = torch.empty(rows, heads, channels, device=q_THC.device)
    if not out.numel():
        return out
    far, constants = _far(region, block_table, topk_TK, positions_T)
    near = (positions_T.contiguous(), _floats(window_LC), base, window_LC.shape[0], floor, window)
    constants |= {"HEADS": heads, "CHANNELS": channels, "WIDE": max(32, triton.next_power_of_2(channels))}
    constants |= {"NATIVE": native, "HEADS_TILE": HEADS_TILE, "SLOTS": SLOTS}
    grid = (rows, triton.cdiv(heads, HEADS_TILE))
    return launch(_attend, grid, out, _floats(q_THC), *near, *far, _floats(sink_H), scale, **constants, **OPTIONS)


def _far(
    region: PagedRegion | None, block_table: Tensor | None, topk_TK: Tensor | None, positions_T: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor, int], dict[str, Any]]:
    """(pool, block table, Top-K, K) and the constants of the region; where there are no groups, any tensors and K = 0.

    Raises:
        IndexError: a group outside the block table, or a page outside the pool.
    """
    if topk_TK is None or not topk_TK.numel():
        return (positions_T, positions_T, positions_T, 0), {**NO_REGION, "GROUP": 32, "E4M3_SCALES": False}
    assert region is not None and block_table is not None
    check(region, block_table, topk_TK[topk_TK != -1])
    far = (region.pool, block_table.contiguous(), topk_TK.contiguous(), topk_TK.shape[1])
    return far, {**geometry(region), "GROUP": region.fmt.group, "E4M3_SCALES": region.fmt.scale == "e4m3"}


def _floats(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32).contiguous()
