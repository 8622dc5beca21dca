"""Manifold-constrained hyper-connections, single pass (SPEC 6), in plain torch.

Sums over the n copies and the Sinkhorn sums are explicit additions in index order, so that a token's bits do not depend
on the number of tokens (DESIGN 12).
"""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor

from rorqual.formats.weights import DenseWeight
from rorqual.ops.reference.linear import linear
from rorqual.ops.reference.norm import mean_square
from rorqual.ops.rowwise import by_row

# T tokens, n copies of the residual, D hidden size, M = (2 + n) n mixes: pre n | post n | comb n x n, row = from

Coefficients = tuple[Tensor, Tensor, Tensor]
"""pre [T, n], post [T, n], comb [T, n, n], fp32."""


def hyper_mix(
    streams_TnD: Tensor,
    fn_MC: Tensor,
    scale_3: Tensor,
    base_M: Tensor,
    eps_rms: float,
    hc_eps: float,
    iters: int,
    short_rows: int,
) -> Coefficients:
    """The coefficients of one sub-layer, from the stream before it; always fp32. Differentiable.

    Args:
        streams_TnD: the residual, fp32 or bf16.
        fn_MC: fp32 [(2 + n) n, n D], over the copies flattened copy-major.
        scale_3: fp32, of pre, post and comb.
        base_M: fp32.
        eps_rms: `rms_norm_eps`.
        hc_eps: `hc_eps`, added to pre and to every Sinkhorn denominator.
        iters: `hc_sinkhorn_iters`.
        short_rows: leading tokens whose bits must not depend on the others.
    """
    flat_TC = streams_TnD.float().flatten(1)
    products_TM = linear(flat_TC, DenseWeight(fn_MC), short_rows, native=False)
    mixes_TM = products_TM * torch.rsqrt(mean_square(flat_TC) + eps_rms).unsqueeze(-1)
    return split_mixes(mixes_TM, scale_3, base_M, hc_eps, iters, short_rows)


def split_mixes(
    mixes_TM: Tensor, scale_3: Tensor, base_M: Tensor, hc_eps: float, iters: int, short_rows: int = 0
) -> Coefficients:
    """pre = sigmoid + eps, post = 2 sigmoid, comb = Sinkhorn of the three scaled and shifted parts of the mixes."""
    n = copies_of(mixes_TM.shape[1])
    part_M = torch.tensor([0] * n + [1] * n + [2] * n * n, device=mixes_TM.device)
    logits_TM = mixes_TM * scale_3[part_M] + base_M
    # Contiguous parts: torch's sigmoid has other last bits on a strided view.
    pre_Tn, post_Tn = (by_row(torch.sigmoid, g.contiguous(), short_rows) for g in logits_TM[:, : 2 * n].split(n, 1))
    rows_Tnn = logits_TM[:, 2 * n :].reshape(-1, n, n)
    # Written out, not torch.softmax: the reference's bits.
    rows_Tnn = by_row(torch.exp, rows_Tnn - rows_Tnn.amax(-1, keepdim=True), short_rows)
    rows_Tnn = _normalize(rows_Tnn, 2, 0.0)
    return pre_Tn + hc_eps, 2 * post_Tn, _sinkhorn(rows_Tnn + hc_eps, hc_eps, iters)


def hyper_collapse(streams_TnD: Tensor, pre_Tn: Tensor) -> Tensor:
    """sum_j pre[j] X_j, fp32 [T, D]; j from 0 up."""
    total = pre_Tn[:, 0, None] * streams_TnD[:, 0].float()
    for j in range(1, streams_TnD.shape[1]):
        total = total + pre_Tn[:, j, None] * streams_TnD[:, j].float()
    return total


def hyper_expand(out_TD: Tensor, streams_TnD: Tensor, post_Tn: Tensor, comb_Tnn: Tensor) -> Tensor:
    """X'_k = post[k] out + sum_j comb[j, k] X_j, fp32 [T, n, D]; the sum first, j from 0 up: the reference's order."""
    total = comb_Tnn[:, 0].unsqueeze(-1) * streams_TnD[:, 0, None].float()
    for j in range(1, streams_TnD.shape[1]):
        total = total + comb_Tnn[:, j].unsqueeze(-1) * streams_TnD[:, j, None].float()
    return post_Tn.unsqueeze(-1) * out_TD.float().unsqueeze(1) + total


def copies_of(mixes: int) -> int:
    """n from M = (2 + n) n."""
    n = isqrt(mixes + 1) - 1
    assert n >= 1 and (2 + n) * n == mixes, f"{mixes} mixes are not (2 + n) n for any n"
    return n


def _sinkhorn(comb_Tnn: Tensor, hc_eps: float, iters: int) -> Tensor:
    comb_Tnn = _normalize(comb_Tnn, 1, hc_eps)
    for _ in range(iters - 1):
        comb_Tnn = _normalize(_normalize(comb_Tnn, 2, hc_eps), 1, hc_eps)
    return comb_Tnn


def _normalize(comb_Tnn: Tensor, dim: int, hc_eps: float) -> Tensor:
    total = comb_Tnn.narrow(dim, 0, 1)
    for j in range(1, comb_Tnn.shape[dim]):
        total = total + comb_Tnn.narrow(dim, j, 1)
    return comb_Tnn / (total + hc_eps)
