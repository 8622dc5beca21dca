"""Attention of a whole piece at once, with its own backward: window by blocks, groups as one masked product (SPEC 5).

The same sum as `rorqual.ops.reference.attention`, arranged for training: the window of W rows meets 2 W keys in one
product, the groups that the rows could see meet them all in another, and masks say which count. Only the weights are
kept for the backward pass. `Softmax` does what lies between the products; there is a plain and a compiled one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# n rows (a multiple of W), B blocks of W rows, H heads, R = n H, C head dim, J = 2 W window keys, G groups


class Softmax(NamedTuple):
    """forward (near [R, J], banned bool [n, J], far [R, G], banned bool [n, G], sink [H]) -> the sink's weights [R];
    logits become weights in place. backward (grad [R, C], out [R, C], grad near, near, grad far, far) -> grad . out
    [R]; gradients of weights become gradients of logits in place."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def attend(
    q_nHC: Tensor,
    window_LC: Tensor,
    banned_window_nJ: Tensor,
    groups_GC: Tensor,
    banned_groups_nG: Tensor,
    sink_H: Tensor,
    scale: float,
    softmax: Softmax,
) -> Tensor:
    """fp32 [n, H, C], before the inverse rotation.

    Args:
        q_nHC: fp32 queries; n is a multiple of W.
        window_LC: fp32 [n + W, C], the keys of the W positions before the first row, then the rows' own.
        banned_window_nJ: bool, true where row t of block b = t // W must not see key j of the 2 W from b W on.
        groups_GC: fp32 compressed keys that any of these rows may see; none (0 rows) in a window layer.
        banned_groups_nG: bool, true where not selected.
        sink_H: fp32 logit of each head.
        scale: multiplies q . k, not the sink.
    """
    result: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        q_nHC, window_LC, banned_window_nJ, groups_GC, banned_groups_nG, sink_H, scale, softmax
    )
    return result


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        window: Tensor,
        banned_window: Tensor,
        groups: Tensor,
        banned_groups: Tensor,
        sink: Tensor,
        scale: float,
        softmax: Softmax,
    ) -> Tensor:
        n, heads, width = q.shape
        size = banned_window.shape[1] // 2
        blocks = n // size
        keys = _blocks(window, size)
        scaled = (q * scale).view(n * heads, width)
        near = torch.bmm(scaled.view(blocks, size * heads, width), keys.transpose(1, 2)).view(n * heads, 2 * size)
        far = torch.mm(scaled, groups.T)
        sunk = softmax.forward(near, banned_window, far, banned_groups, sink)
        out = torch.bmm(near.view(blocks, size * heads, 2 * size), keys).view(n * heads, width)
        if len(groups):
            out.addmm_(far, groups)
        ctx.save_for_backward(q, window, groups, near, far, sunk, out)
        ctx.scale, ctx.size, ctx.softmax = scale, size, softmax
        return out.view(n, heads, width)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, window, groups, near, far, sunk, out = ctx.saved_tensors
        n, heads, width = q.shape
        size = ctx.size
        blocks = n // size
        keys = _blocks(window, size)
        grad, flat_q = grad_outputs[0].contiguous().view(n * heads, width), q.reshape(n * heads, width)
        grad_b, q_b = grad.view(blocks, size * heads, width), flat_q.view(blocks, size * heads, width)
        d_near = torch.bmm(grad_b, keys.transpose(1, 2)).view(n * heads, 2 * size)
        d_far = torch.mm(grad, groups.T)
        mean = ctx.softmax.backward(grad, out, d_near, near, d_far, far)
        d_near_b, near_b = d_near.view(blocks, size * heads, -1), near.view(blocks, size * heads, -1)
        d_q = torch.bmm(d_near_b, keys).view(n * heads, width)
        d_keys = torch.bmm(d_near_b.transpose(1, 2), q_b).mul_(ctx.scale)
        d_keys.baddbmm_(near_b.transpose(1, 2), grad_b)
        # A block's 2 W keys are those of the block before and its own.
        d_window = torch.zeros_like(window)
        d_window[:n] += d_keys[:, :size].reshape(n, width)
        d_window[size:] += d_keys[:, size:].reshape(n, width)
        d_groups = torch.zeros_like(groups)
        if len(groups):
            d_q.addmm_(d_far, groups)
            torch.mm(d_far.T, flat_q, out=d_groups).mul_(ctx.scale)
            d_groups.addmm_(far.T, grad)
        d_sink = -(sunk * mean).view(n, heads).sum(0)
        return d_q.mul_(ctx.scale).view(n, heads, width), d_window, None, d_groups, None, d_sink, None, None


def _blocks(window_LC: Tensor, size: int) -> Tensor:
    """[B, 2 W, C]: the keys of each block and of the block before it."""
    per_block = window_LC.view(-1, size, window_LC.shape[1])
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
