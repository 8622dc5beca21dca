"""`rms_norm` and `rotate` of `rorqual.ops.reference` with gradients, for training on a CPU.

Promises as in `train_hyper`: equal inputs give equal bits whatever the number of threads.

T rows, K channels, H heads, W channels that turn; B blocks of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor
from torch.autograd.function import once_differentiable

from rorqual.ops.fast.kernel import kernel
from rorqual.ops.fast.norm import inverse_rms
from rorqual.ops.fast.row_kernels import dot
from rorqual.ops.fast.train_hyper import ROWS, blocks_of, fp32

_F32 = np.float32


@kernel("void(float32[:, ::1], float32[::1], float32, int64, float32[:, ::1])", parallel=True)
def _norm_forward(x_TK: Any, weight_K: Any, eps: Any, blocks: Any, out_TK: Any) -> None:
    for block in prange(blocks):
        for t in range(block * ROWS, min(block * ROWS + ROWS, x_TK.shape[0])):
            scale = inverse_rms(x_TK[t], eps)
            for k in range(x_TK.shape[1]):
                out_TK[t, k] = weight_K[k] * (x_TK[t, k] * scale)


@kernel(
    "void(float32[:, ::1], float32[:, ::1], float32[::1], float32, int64, float32[:, ::1], float32[:, ::1])",
    parallel=True,
)
def _norm_backward(
    grad_TK: Any, x_TK: Any, weight_K: Any, eps: Any, blocks: Any, grad_x_TK: Any, grad_weight_BK: Any
) -> None:
    """Gradient for x, and of each block's rows for the weight."""
    for block in prange(blocks):
        sums_K = grad_weight_BK[block]
        sums_K[:] = 0
        for t in range(block * ROWS, min(block * ROWS + ROWS, x_TK.shape[0])):
            x_K, grad_K, out_K = x_TK[t], grad_TK[t], grad_x_TK[t]
            scale = inverse_rms(x_K, eps)
            for k in range(x_K.shape[0]):
                out_K[k] = grad_K[k] * weight_K[k]
            # d(1 / rms) / dx is -x / (K rms^3).
            pull = dot(out_K, x_K) * scale * scale / _F32(x_K.shape[0])
            for k in range(x_K.shape[0]):
                sums_K[k] += grad_K[k] * (x_K[k] * scale)
            for k in range(x_K.shape[0]):
                out_K[k] = scale * (out_K[k] - x_K[k] * pull)


@kernel("void(float32[:, :, ::1], float32[:, ::1], float32[:, ::1], float32, int64, float32[:, :, ::1])", parallel=True)
def _rotate(x_THK: Any, cos_TP: Any, sin_TP: Any, sign: Any, blocks: Any, out_THK: Any) -> None:
    still = x_THK.shape[2] - 2 * cos_TP.shape[1]
    for block in prange(blocks):
        for t in range(block * ROWS, min(block * ROWS + ROWS, x_THK.shape[0])):
            for h in range(x_THK.shape[1]):
                x_K, out_K = x_THK[t, h], out_THK[t, h]
                for i in range(still):
                    out_K[i] = x_K[i]
                x_W, out_W = x_K[still:], out_K[still:]
                for j in range(cos_TP.shape[1]):
                    cos, sin = cos_TP[t, j], sin_TP[t, j] * sign
                    a, b = x_W[2 * j], x_W[2 * j + 1]
                    out_W[2 * j] = a * cos - b * sin
                    out_W[2 * j + 1] = a * sin + b * cos


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_TK, weight_K)
        ctx.eps = eps
        out_TK, blocks = torch.empty(x_TK.shape), blocks_of(x_TK.shape[0])
        _norm_forward(fp32(x_TK), fp32(weight_K), _F32(eps), blocks, out_TK.numpy(), tasks=blocks)
        return out_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TK, weight_K = ctx.saved_tensors
        blocks, grad_x_TK = blocks_of(x_TK.shape[0]), torch.empty(x_TK.shape)
        sums_BK = np.empty((blocks, x_TK.shape[1]), np.float32)
        inputs = (fp32(tensor) for tensor in (grad_TK, x_TK, weight_K))
        _norm_backward(*inputs, _F32(ctx.eps), blocks, grad_x_TK.numpy(), sums_BK, tasks=blocks)
        # numpy adds blocks one after the other, on one thread.
        return grad_x_TK, torch.from_numpy(sums_BK.sum(0)), None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cos_TP: Tensor, sin_TP: Tensor, sign: float) -> Tensor:
        ctx.save_for_backward(cos_TP, sin_TP)
        ctx.sign = sign
        return _turn(x_THK, cos_TP, sin_TP, sign)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THK: Tensor) -> tuple[Tensor, None, None, None]:
        cos_TP, sin_TP = ctx.saved_tensors
        return _turn(grad_THK, cos_TP, sin_TP, -ctx.sign), None, None, None


def _turn(x_THK: Tensor, cos_TP: Tensor, sin_TP: Tensor, sign: float) -> Tensor:
    out_THK, blocks = torch.empty(x_THK.shape), blocks_of(x_THK.shape[0])
    _rotate(fp32(x_THK), fp32(cos_TP), fp32(sin_TP), _F32(sign), blocks, out_THK.numpy(), tasks=blocks)
    return out_THK


_apply_norm: Any = _RmsNorm.apply
_apply_rotation: Any = _Rotation.apply


def rms_norm(x_TK: Tensor, weight_K: Tensor, eps: float, native: bool) -> Tensor:
    """As the plain `rms_norm`; native numerics have no training twin."""
    assert not native, "native numerics are not trained: use the plain op"
    y: Tensor = _apply_norm(x_TK.float().reshape(-1, x_TK.shape[-1]), weight_K, eps)
    return y.view(x_TK.shape).to(x_TK.dtype)


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor], *, inverse: bool = False, overwrite: bool = False) -> Tensor:
    """As `rorqual.ops.reference.rope.rotate`, gradient for x alone; x is never written."""
    heads = x.shape[1:-1].numel()
    x_THK = x.float().reshape(x.shape[0], heads, x.shape[-1])
    turned: Tensor = _apply_rotation(x_THK, *cos_sin, -1.0 if inverse else 1.0)
    return turned.view(x.shape)
