"""Numba twin of `rorqual.ops.reference.norm`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.ops.fast.kernel import kernel, refuse_gradients
from rorqual.ops.fast.linear import parts_of
from rorqual.ops.fast.row_kernels import dot, part, round_bf16

# T rows, K channels

_F32 = np.float32


@part
def inverse_rms(x_K: Any, eps: Any) -> Any:
    """1 / sqrt(mean(x^2) + eps) of one row, fp32; the sum's order depends on K alone."""
    return _F32(1) / _F32(math.sqrt(_F32(dot(x_K, x_K) / _F32(x_K.shape[0])) + eps))


@part
def round_row(x_K: Any, native: Any) -> None:
    """To bf16 in place where native rounds."""
    if native:
        for k in range(x_K.shape[0]):
            x_K[k] = round_bf16(x_K[k])


@part
def norm_row(x_K: Any, weight_K: Any, eps: Any, native: Any) -> None:
    """RMSNorm of one row in place, rounded before and after where native rounds."""
    round_row(x_K, native)
    scale = inverse_rms(x_K, eps)
    for k in range(x_K.shape[0]):
        x_K[k] = weight_K[k] * (x_K[k] * scale)
    round_row(x_K, native)


@kernel("void(float32[:, ::1], float32[::1], float32, float32[:, ::1], int64)", parallel=True)
def _rms_norm(x_TK: Any, weight_K: Any, eps: Any, out_TK: Any, parts: Any) -> None:
    for share in prange(parts):
        for t in range(x_TK.shape[0] * share // parts, x_TK.shape[0] * (share + 1) // parts):
            scale = inverse_rms(x_TK[t], eps)
            for k in range(x_TK.shape[1]):
                out_TK[t, k] = weight_K[k] * (x_TK[t, k] * scale)


KERNELS = (_rms_norm,)


def rms_norm(x_TK: Tensor, weight_K: Tensor, eps: float, native: bool) -> Tensor:
    """As the plain `rms_norm`, without gradients."""
    refuse_gradients(x_TK, weight_K)
    x = x_TK.detach().to(torch.float32).contiguous()
    weight = weight_K.detach().to(torch.float32).contiguous()
    y, parts = torch.empty_like(x), parts_of(x.numel())
    width = x.shape[-1]
    _rms_norm(x.view(-1, width).numpy(), weight.numpy(), _F32(eps), y.view(-1, width).numpy(), parts, tasks=parts)
    return (y.to(torch.bfloat16) if native else y).to(x_TK.dtype)
