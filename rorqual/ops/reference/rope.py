"""The rotation of positions (SPEC 4), in plain torch: adjacent pairs as complex numbers on the trailing channels."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor], *, inverse: bool = False, overwrite: bool = False) -> Tensor:
    """Rotate the trailing D channels of x [T, ..., C] by the row's angle (back again when `inverse`); fp32 result.

    D is twice the width of cos. Pair j is channels (C - D + 2j, C - D + 2j + 1).

    overwrite: nobody reads x afterwards, so that it may hold the result. This function leaves it as it is.
    """
    cos, sin = cos_sin
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[1],)
    cos, sin = cos.view(shape), sin.view(shape)
    if inverse:
        sin = -sin
    width = 2 * cos.shape[-1]
    x = x.float()
    still, turning = x[..., :-width], x[..., -width:]
    a, b = turning[..., 0::2], turning[..., 1::2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((still, turned), dim=-1)
