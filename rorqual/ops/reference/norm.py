"""RMSNorm (SPEC 3), and the sum it rests on: one whose order depends on nothing but the length. In plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

# T rows, K channels


def rms_norm(x_TK: Tensor, weight_K: Tensor, eps: float, native: bool) -> Tensor:
    """w * (x * rsqrt(mean(x^2) + eps)), computed in fp32 and given back in the dtype of x [..., K]. Differentiable.

    Every row's bits depend on that row alone.

    Args:
        x_TK: fp32 or bf16.
        weight_K: fp32 or bf16.
        eps: 1e-20 in the backbone, 1e-6 in the vision tower (SPEC 3).
        native: round the result to bf16, whatever dtype carries it.
    """
    x = x_TK.float()
    scale = torch.rsqrt(mean_square(x) + eps)
    y = weight_K.float() * (x * scale.unsqueeze(-1))
    return (y.to(torch.bfloat16) if native else y).to(x_TK.dtype)


def mean_square(x: Tensor) -> Tensor:
    """mean of x^2 over the last dimension, fp32 [...]; every row's bits are its own."""
    return row_sum(x * x) / x.shape[-1]


WHOLE_ROW = 1 << 14
"""Elements that torch sums in one order whatever stands beside the row; it splits a lone row of 2^15 over threads."""


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, torch's own order (the reference's), the same for a row alone and in a batch."""
    if x.shape[-1] <= WHOLE_ROW:
        return x.sum(-1)
    return torch.stack([part.contiguous().sum(-1) for part in x.split(WHOLE_ROW, dim=-1)], dim=-1).sum(-1)
