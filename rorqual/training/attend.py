"""Attention of a whole piece at once, with its own backward: window by blocks, groups by tiles of rows (SPEC 5).

The same sum as `rorqual.ops.reference.attention`, arranged for training: each block of W rows meets 2 W window keys in
one product, each tile of rows meets all groups that its last row sees in another, and masks say which count. Only the
weights are kept for the backward pass. `Softmax` does what lies between the products; a plain and a compiled one exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# n rows, N rows filled up to a multiple of W, B blocks of W rows, H heads, R = N H, C head dim, J = 2 W, G groups


class Softmax(NamedTuple):
    """forward (near [R, J], banned bool [N, J], far [R, G], banned bool [N, G], sink [H]) -> the sink's weights [R];
    logits become weights in place. backward (grad [R, C], out [R, C], grad near, near, grad far, far) -> grad . out
    [R]; gradients of weights become gradients of logits in place."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Masks(NamedTuple):
    """Which keys the rows of a piece must not see.

    window_NJ: bool, row t of block b = t // W against key j of the 2 W from (b - 1) W on.
    groups_NG: bool; rows beyond the piece's end see none. ratio: tokens a group, 0 without groups.
    """

    window_NJ: Tensor
    groups_NG: Tensor
    ratio: int


ROW_TILE = 256
"""Rows that meet their groups at once: a later tile sees more groups than an earlier one."""
GROUP_TILE = 64
"""Groups are taken in multiples of it. Pieces have many lengths, and where products go through bf16 tiles oneDNN makes
code for every new shape, which costs more than the product."""


def attend(
    q_nHC: Tensor, keys_nC: Tensor, groups_GC: Tensor, masks: Masks, sink_H: Tensor, scale: float, softmax: Softmax
) -> Tensor:
    """fp32 [n, H, C], before the inverse rotation.

    Args:
        q_nHC: fp32 queries of positions 0 .. n - 1.
        keys_nC: fp32 window keys of the same positions.
        groups_GC: fp32 compressed keys; none (0 rows) in a window layer.
        sink_H: fp32 logit of each head.
        scale: multiplies q . k, not the sink.
    """
    result: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        q_nHC, keys_nC, groups_GC, sink_H, masks, scale, softmax
    )
    return result


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, groups: Tensor, sink: Tensor, masks: Masks, scale: float, softmax: Softmax
    ) -> Tensor:
        return _forward(ctx, q, keys, groups, sink, masks, scale, softmax)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad_outputs[0])


def _forward(
    ctx: Any, q: Tensor, keys: Tensor, groups: Tensor, sink: Tensor, masks: Masks, scale: float, softmax: Softmax
) -> Tensor:
    n, heads, width = q.shape
    filled, doubled = masks.window_NJ.shape
    size = doubled // 2
    blocks = filled // size
    count = len(groups)
    groups, banned_groups = _filled_groups(groups, masks.groups_NG)
    scaled = pad(q.reshape(n, heads * width) * scale, (0, 0, 0, filled - n)).view(filled * heads, width)
    near_keys = _blocks(keys, size, filled)
    near = torch.bmm(scaled.view(blocks, size * heads, width), near_keys.transpose(1, 2)).view(-1, doubled)
    far: list[Tensor] = []
    sunk = torch.empty(filled * heads, device=q.device)
    for rows, seen in _tiles(filled, size, len(groups), masks.ratio):
        part = slice(rows.start * heads, rows.stop * heads)
        far.append(torch.mm(scaled[part], groups[:seen].T))
        banned = masks.window_NJ[rows], banned_groups[rows, :seen]
        sunk[part] = softmax.forward(near[part], banned[0], far[-1], banned[1], sink)
    out = torch.bmm(near.view(blocks, size * heads, doubled), near_keys).view(-1, width)
    for tile, (rows, seen) in zip(far, _tiles(filled, size, len(groups), masks.ratio), strict=True):
        if seen:
            out[rows.start * heads : rows.stop * heads].addmm_(tile, groups[:seen])
    ctx.save_for_backward(scaled, keys, groups, near, sunk, out, *far)
    ctx.constants = (n, count, heads, size, masks.ratio, scale, softmax)
    return out.view(filled, heads, width)[:n]


def _backward(ctx: Any, grad_nHC: Tensor) -> tuple[Tensor | None, ...]:
    scaled, keys, groups, near, sunk, out, *far = ctx.saved_tensors
    n, count, heads, size, ratio, scale, softmax = ctx.constants
    width, filled = keys.shape[1], len(scaled) // heads
    blocks = filled // size
    grad = pad(grad_nHC.reshape(n, heads * width), (0, 0, 0, filled - n)).view(-1, width)
    by_block = grad.view(blocks, size * heads, width)
    near_keys = _blocks(keys, size, filled)
    d_near = torch.bmm(by_block, near_keys.transpose(1, 2)).view(-1, 2 * size)
    d_groups = torch.zeros_like(groups)
    mean, d_far = torch.empty_like(sunk), []
    for tile, (rows, seen) in zip(far, _tiles(filled, size, len(groups), ratio), strict=True):
        part = slice(rows.start * heads, rows.stop * heads)
        d_far.append(torch.mm(grad[part], groups[:seen].T))
        mean[part] = softmax.backward(grad[part], out[part], d_near[part], near[part], d_far[-1], tile)
        if seen:
            # The queries are scaled already.
            d_groups[:seen].addmm_(d_far[-1].T, scaled[part]).addmm_(tile.T, grad[part])
    d_near_b = d_near.view(blocks, size * heads, 2 * size)
    d_q = torch.bmm(d_near_b, near_keys).view(-1, width)
    for d_tile, (rows, seen) in zip(d_far, _tiles(filled, size, len(groups), ratio), strict=True):
        if seen:
            d_q[rows.start * heads : rows.stop * heads].addmm_(d_tile, groups[:seen])
    d_near_keys = torch.bmm(d_near_b.transpose(1, 2), scaled.view(blocks, size * heads, width))
    d_near_keys.baddbmm_(near.view(blocks, size * heads, -1).transpose(1, 2), by_block)
    # A block's 2 W keys are those of the block before and its own.
    d_keys = d_near_keys[:, size:].reshape(filled, width)
    d_keys[: filled - size] += d_near_keys[1:, :size].reshape(-1, width)
    d_sink = -(sunk * mean).view(filled, heads).sum(0)
    return d_q.mul_(scale).view(filled, heads, width)[:n], d_keys[:n], d_groups[:count], d_sink, None, None, None


def _tiles(filled: int, size: int, groups: int, ratio: int) -> Iterator[tuple[slice, int]]:
    """(rows, groups that the last of them could see); one tile where there are no groups."""
    step = -(-ROW_TILE // size) * size if groups else filled
    for first in range(0, filled, step):
        end = min(first + step, filled)
        yield slice(first, end), min(groups, -(-(end // ratio) // GROUP_TILE) * GROUP_TILE) if groups else 0


def _filled_groups(groups_GC: Tensor, banned_NG: Tensor) -> tuple[Tensor, Tensor]:
    """Both with groups that nobody sees up to a multiple of GROUP_TILE."""
    short = -len(groups_GC) % GROUP_TILE
    return pad(groups_GC, (0, 0, 0, short)), pad(banned_NG, (0, short), value=True)


def _blocks(keys_nC: Tensor, size: int, filled: int) -> Tensor:
    """[B, 2 W, C]: the keys of each block and of the block before it, zeros before the first and after the last."""
    per_block = pad(keys_nC, (0, 0, size, filled - len(keys_nC))).view(-1, size, keys_nC.shape[1])
    return torch.cat((per_block[:-1], per_block[1:]), dim=1)


def _plain_forward(near: Tensor, banned_near: Tensor, far: Tensor, banned_far: Tensor, sink: Tensor) -> Tensor:
    heads = sink.shape[0]
    columns = sink.repeat(near.shape[0] // heads)[:, None]
    joint = torch.cat((near, far, columns), dim=1)
    banned = torch.cat((banned_near, banned_far), dim=1).repeat_interleave(heads, dim=0)
    joint[:, :-1].masked_fill_(banned, -torch.inf)
    joint = joint.softmax(dim=1)
    near.copy_(joint[:, : near.shape[1]])
    far.copy_(joint[:, near.shape[1] : -1])
    return joint[:, -1].contiguous()


def _plain_backward(
    grad: Tensor, out: Tensor, grad_near: Tensor, near: Tensor, grad_far: Tensor, far: Tensor
) -> Tensor:
    mean = (grad * out).sum(1)
    grad_near.sub_(mean[:, None]).mul_(near)
    grad_far.sub_(mean[:, None]).mul_(far)
    return mean


PLAIN = Softmax(_plain_forward, _plain_backward)
