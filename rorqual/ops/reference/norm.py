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
    """mean of x^2 over the last dimension, fp32 [...]."""
    return ordered_sum(x * x) / x.shape[-1]


def ordered_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by halving: element j takes element j + half, again and again.

    torch's own reductions split the work by the shape of the whole tensor, so one row's sum may change with the number
    of rows beside it.
    """
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        paired = x.shape[-1] - half
        folded = x[..., :paired] + x[..., half:]
        x = folded if paired == half else torch.cat([folded, x[..., paired:half]], dim=-1)
    return x.squeeze(-1)
