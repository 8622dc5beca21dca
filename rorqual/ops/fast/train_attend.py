"""The elementwise part of attention in training: one joint softmax over window, groups and sink, and its gradient.

The products around it are torch's (`rorqual.training.attend`); here each matrix of logits is gone through once, masked,
exponentiated and normalised in place. Promises as in `train_hyper`.

n rows, H heads, R = n H rows of logits (heads of a row side by side), J window keys, G groups, C head dim; B blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.ops.fast.kernel import kernel
from rorqual.ops.fast.row_kernels import dot, part
from rorqual.ops.fast.train_experts import _exp as exp_of
from rorqual.ops.fast.train_hyper import ROWS, blocks_of, fp32

_F32 = np.float32
_NONE = _F32(-3.0e38)
"""Stands for the logit of what is masked: finite, so that maxima compile to vectors."""

# NaN-free by construction: the maximum may be taken in any order.
_njit: Any = numba.njit
_Function = TypeVar("_Function", bound=Callable[..., Any])
ordered: Callable[[_Function], _Function] = _njit(nogil=True, error_model="numpy", fastmath={"nnan", "nsz", "reassoc"})


@ordered
def _largest(x_K: Any, banned_K: Any) -> Any:
    top = _NONE
    for k in range(x_K.shape[0]):
        value = _NONE if banned_K[k] else x_K[k]
        top = value if value > top else top
    return top


@ordered
def _sum(x_K: Any) -> Any:
    total = _F32(0)
    for k in range(x_K.shape[0]):
        total += x_K[k]
    return total


@part
def _exponentiate(x_K: Any, banned_K: Any, top: Any) -> Any:
    """e^(x - top), 0 where banned, in place; returns the sum."""
    for k in range(x_K.shape[0]):
        value = exp_of(x_K[k] - top)
        x_K[k] = _F32(0) if banned_K[k] else value
    return _sum(x_K)


@part
def _scale(x_K: Any, factor: Any) -> None:
    for k in range(x_K.shape[0]):
        x_K[k] *= factor


@kernel(
    "void(float32[:, ::1], uint8[:, ::1], float32[:, ::1], uint8[:, ::1], float32[::1], int64, float32[::1])",
    parallel=True,
)
def _softmax(near_RJ: Any, banned_nJ: Any, far_RG: Any, banned_nG: Any, sink_H: Any, blocks: Any, sunk_R: Any) -> None:
    """Logits to weights in place; `sunk` takes the sink's weight."""
    heads = sink_H.shape[0]
    for block in prange(blocks):
        for r in range(block * ROWS, min(block * ROWS + ROWS, sunk_R.shape[0])):
            near_J, far_G, row = near_RJ[r], far_RG[r], r // heads
            top = max(_largest(near_J, banned_nJ[row]), _largest(far_G, banned_nG[row]))
            sink = sink_H[r % heads]
            top = max(top, sink)
            sunk = exp_of(sink - top)
            total = sunk + _exponentiate(near_J, banned_nJ[row], top) + _exponentiate(far_G, banned_nG[row], top)
            share = _F32(1) / total
            _scale(near_J, share)
            _scale(far_G, share)
            sunk_R[r] = sunk * share


@part
def _through(grad_K: Any, weight_K: Any, mean: Any) -> None:
    for k in range(grad_K.shape[0]):
        grad_K[k] = (grad_K[k] - mean) * weight_K[k]


@kernel(
    "void(float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1],"
    " int64, float32[::1])",
    parallel=True,
)
def _softmax_backward(
    grad_RC: Any, out_RC: Any, grad_near_RJ: Any, near_RJ: Any, grad_far_RG: Any, far_RG: Any, blocks: Any, mean_R: Any
) -> None:
    """Gradients of weights to gradients of logits, in place; `mean` takes each row's grad . out."""
    for block in prange(blocks):
        for r in range(block * ROWS, min(block * ROWS + ROWS, mean_R.shape[0])):
            mean = dot(grad_RC[r], out_RC[r])
            mean_R[r] = mean
            _through(grad_near_RJ[r], near_RJ[r], mean)
            _through(grad_far_RG[r], far_RG[r], mean)


def joint_softmax(near_RJ: Tensor, banned_nJ: Tensor, far_RG: Tensor, banned_nG: Tensor, sink_H: Tensor) -> Tensor:
    """Logits to weights in place; returns the sink's weight fp32 [R].

    Args:
        near_RJ, far_RG: fp32 contiguous; either may be 0 wide.
        banned_nJ, banned_nG: bool, for all heads of a row.
        sink_H: fp32 logits.
    """
    rows = near_RJ.shape[0]
    sunk_R, blocks = torch.empty(rows), blocks_of(rows)
    banned = [mask.contiguous().view(torch.uint8).numpy() for mask in (banned_nJ, banned_nG)]
    _softmax(near_RJ.numpy(), banned[0], far_RG.numpy(), banned[1], fp32(sink_H), blocks, sunk_R.numpy(), tasks=blocks)
    return sunk_R


def joint_softmax_backward(
    grad_RC: Tensor, out_RC: Tensor, grad_near_RJ: Tensor, near_RJ: Tensor, grad_far_RG: Tensor, far_RG: Tensor
) -> Tensor:
    """Gradients of the weights to gradients of the logits, in place; returns grad . out of each row, fp32 [R]."""
    rows = grad_RC.shape[0]
    mean_R, blocks = torch.empty(rows), blocks_of(rows)
    arrays = (t.numpy() for t in (grad_RC, out_RC, grad_near_RJ, near_RJ, grad_far_RG, far_RG))
    _softmax_backward(*arrays, blocks, mean_R.numpy(), tasks=blocks)
    return mean_R
