"""Attention over a window and selected groups (SPEC 5), in plain torch: one key head shared by all heads, K = V.

    l = scale * q . k        m = max over S of l, the sink not in it
    o = sum p k / (sum p + exp(sink - m)),  p = exp(l - m)

An empty S gives zeros. A row has a fixed number of slots in a fixed order, W of the window (position pos - W + 1 + j)
and then K of the Top-K, masked where absent: a row's products have the same shapes whatever else is in the call, which
is what makes its bits its own (DESIGN 12). The fast twin is `rorqual.ops.fast.attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference.gather import gather_rows

# T rows, H heads, C head dim, L window keys held, K top-k, S slots of a row (W + K)

TILE_BYTES = 32 << 20
"""Gathered keys held at once; joining window and groups doubles it for a moment."""


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
    """Attention output fp32 [T, H, C], before the inverse RoPE.

    Args:
        q_THC: fp32 queries after RoPE.
        positions_T: int64 position of each row.
        window_LC: fp32 (dequantised) window keys of positions [base, base + L).
        base: position of the first window key held.
        floor: no window key below it is seen, though it be held.
        window: W. Row t sees positions [max(floor, pos - W + 1), pos], as far as they are held.
        region, block_table, topk_TK: the groups of topk_TK int64 (-1 skipped); all None for a window layer.
        sink_H: fp32 logit per head, not scaled.
        scale: head_dim ** -0.5.
        native: round as SPEC 3; the caller rounds the result.
    """
    rows, _, channels = q_THC.shape
    out = torch.empty_like(q_THC)
    slots = window + (topk_TK.shape[1] if topk_TK is not None else 0)
    tile = max(1, TILE_BYTES // (4 * max(slots, 1) * channels))
    for first in range(0, rows, tile):
        part = slice(first, first + tile)
        keys, valid = _window_slots(positions_T[part], window_LC, base, floor, window)
        if topk_TK is not None:
            assert region is not None and block_table is not None
            keys = torch.cat((keys, gather_rows(region, block_table, topk_TK[part])), 1)
            valid = torch.cat((valid, topk_TK[part] != -1), 1)
        out[part] = attention_over(q_THC[part], keys, valid, sink_H, scale, native)
    return out


def _window_slots(positions_T: Tensor, window_LC: Tensor, base: int, floor: int, window: int) -> tuple[Tensor, Tensor]:
    """Keys [T, W, C], zeros where absent, and which are present [T, W]."""
    at = positions_T[:, None] + torch.arange(1 - window, 1, device=positions_T.device)
    held = window_LC.shape[0]
    valid = (at >= max(floor, base)) & (at < base + held)
    if not held:
        return window_LC.new_zeros(*at.shape, window_LC.shape[1]), valid
    keys = window_LC[(at - base).clamp(0, held - 1)]
    return keys.masked_fill_(~valid[..., None], 0.0), valid


def attention_over(
    q_THC: Tensor,
    k_TSC: Tensor,
    valid_TS: Tensor,
    sink_H: Tensor,
    scale: float,
    native: bool,
) -> Tensor:
    """Attention of each row over its own gathered keys: fp32 [T, H, C]; differentiable.

    Where no gradient is asked for, rows are computed one by one, so that a row's bits do not depend on T. With one,
    they go through a batched product.

    Args:
        q_THC: fp32 queries.
        k_TSC: fp32 keys, finite (zeros, say) where not valid.
        valid_TS: bool, which slots count.
        sink_H: fp32 logits.
        scale: multiplies q . k, not the sink.
        native: the numerator takes bf16(p), the denominator the fp32 p (SPEC 3).
    """
    rows = q_THC.shape[0]
    if k_TSC.shape[1] == 0 or rows == 0:
        return q_THC * 0.0
    wants_grad = torch.is_grad_enabled() and (q_THC.requires_grad or k_TSC.requires_grad or sink_H.requires_grad)
    if wants_grad:
        return _attend(q_THC, k_TSC, valid_TS, sink_H, scale, native)
    return torch.stack(
        [_attend(_own(q_THC[t]), _own(k_TSC[t]), valid_TS[t], sink_H, scale, native) for t in range(rows)]
    )


def _own(row: Tensor) -> Tensor:
    """A row at an address aligned like any other's: a GEMM library may choose its code by that."""
    return row if row.numel() % 16 == 0 else row.clone()


def _attend(q_HC: Tensor, k_SC: Tensor, valid_S: Tensor, sink_H: Tensor, scale: float, native: bool) -> Tensor:
    """One row, or a batch of them in leading dimensions."""
    logits = (q_HC @ k_SC.transpose(-1, -2)) * scale
    logits = logits.masked_fill(~valid_S.unsqueeze(-2), -torch.inf)
    top = logits.detach().amax(-1, keepdim=True)
    # Any finite number does for an empty row: its p are all zero.
    top = top.masked_fill(top == -torch.inf, 0.0)
    p = torch.exp(logits - top)
    denominator = p.sum(-1, keepdim=True) + torch.exp(sink_H.unsqueeze(-1) - top)
    # A very negative sink over an empty row makes 0 / 0.
    denominator = denominator.masked_fill(~valid_S.any(-1)[..., None, None], 1.0)
    numerator = p.to(torch.bfloat16).float() if native else p
    return (numerator @ k_SC) / denominator
