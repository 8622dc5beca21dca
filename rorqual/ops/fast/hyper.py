"""Numba twin of `rorqual.ops.reference.hyper`: a token's arithmetic is a loop of its own, so no token sees another.

`hyper_collapse` and `hyper_expand` add in the plain order, rounding alike: they give the plain bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.formats.weights import DenseWeight
from rorqual.ops.cpu import Path
from rorqual.ops.fast.kernel import inlined, kernel, refuse_gradients
from rorqual.ops.fast.linear import linear, parts_of
from rorqual.ops.fast.norm import inverse_rms
from rorqual.ops.fast.row_kernels import part
from rorqual.ops.fast.row_vectors import Array
from rorqual.ops.fast.vectors import LANES, add, load, multiply, splat, store
from rorqual.ops.reference.hyper import Coefficients, copies_of

# T tokens, n copies of the residual, D hidden size, C = n D, M = (2 + n) n mixes

_F32 = np.float32


@part
def _sigmoid(x: Any) -> Any:
    return _F32(1) / (_F32(1) + math.exp(-x))


@part
def _normalize_rows(comb_nn: Any, hc_eps: Any) -> None:
    for j in range(comb_nn.shape[0]):
        total = comb_nn[j, 0]
        for k in range(1, comb_nn.shape[0]):
            total += comb_nn[j, k]
        for k in range(comb_nn.shape[0]):
            comb_nn[j, k] /= total + hc_eps


@part
def _softmax_rows(comb_nn: Any, hc_eps: Any) -> None:
    """Softmax of each row, plus eps."""
    for j in range(comb_nn.shape[0]):
        top = comb_nn[j, 0]
        for k in range(1, comb_nn.shape[0]):
            top = max(top, comb_nn[j, k])
        total = _F32(0)
        for k in range(comb_nn.shape[0]):
            comb_nn[j, k] = math.exp(comb_nn[j, k] - top)
            total += comb_nn[j, k]
        for k in range(comb_nn.shape[0]):
            comb_nn[j, k] = comb_nn[j, k] / total + hc_eps


@part
def split(
    mixes_M: Any, factor: Any, scale_3: Any, base_M: Any, hc_eps: Any, iters: Any, pre_n: Any, post_n: Any, comb_nn: Any
) -> None:
    """One token's coefficients, from its mixes times a factor."""
    n = pre_n.shape[0]
    for j in range(n):
        pre_n[j] = _sigmoid(mixes_M[j] * factor * scale_3[0] + base_M[j]) + hc_eps
        post_n[j] = _F32(2) * _sigmoid(mixes_M[n + j] * factor * scale_3[1] + base_M[n + j])
        for k in range(n):
            m = (2 + j) * n + k
            comb_nn[j, k] = mixes_M[m] * factor * scale_3[2] + base_M[m]
    _softmax_rows(comb_nn, hc_eps)
    _normalize_rows(comb_nn.T, hc_eps)
    for _ in range(iters - 1):
        _normalize_rows(comb_nn, hc_eps)
        _normalize_rows(comb_nn.T, hc_eps)


@part
def collapse(streams_nD: Any, pre_n: Any, out_D: Any) -> None:
    """One token's weighted sum of the copies."""
    for d in range(out_D.shape[0]):
        total = pre_n[0] * streams_nD[0, d]
        for j in range(1, pre_n.shape[0]):
            total += pre_n[j] * streams_nD[j, d]
        out_D[d] = total


@part
def expand(out_D: Any, streams_nD: Any, post_n: Any, comb_nn: Any, result_nD: Any) -> None:
    """One token's streams after a sub-layer gave `out_D`."""
    for k in range(post_n.shape[0]):
        for d in range(out_D.shape[0]):
            total = comb_nn[0, k] * streams_nD[0, d]
            for j in range(1, post_n.shape[0]):
                total += comb_nn[j, k] * streams_nD[j, d]
            result_nD[k, d] = post_n[k] * out_D[d] + total


_MIX = (
    "void(float32[:, ::1], float32[:, ::1], float32[::1], float32[::1], float32, float32, int64,"
    " float32[:, ::1], float32[:, ::1], float32[:, :, ::1], int64)"
)


@kernel(_MIX, parallel=True)
def _mix(
    flat_TC: Any,
    mixes_TM: Any,
    scale_3: Any,
    base_M: Any,
    eps_rms: Any,
    hc_eps: Any,
    iters: Any,
    pre_Tn: Any,
    post_Tn: Any,
    comb_Tnn: Any,
    parts: Any,
) -> None:
    """Every token's coefficients; without columns in flat_TC the mixes are taken as they are."""
    tokens = mixes_TM.shape[0]
    for share in prange(parts):
        for t in range(tokens * share // parts, tokens * (share + 1) // parts):
            factor = inverse_rms(flat_TC[t], eps_rms) if flat_TC.shape[1] else _F32(1)
            split(mixes_TM[t], factor, scale_3, base_M, hc_eps, iters, pre_Tn[t], post_Tn[t], comb_Tnn[t])


@inlined
def collapse_vectors(streams: Any, pre: Any, t: Any, n: Any, width: Any, out: Any) -> None:
    """`collapse` of token t over flat arrays, sixteen channels at a time; the last few alone."""
    at, whole = t * n * width, width // LANES * LANES
    for d in range(0, whole, LANES):
        total = multiply(splat(pre[t * n]), load(streams, at + d))
        for j in range(1, n):
            total = add(total, multiply(splat(pre[t * n + j]), load(streams, at + j * width + d)))
        store(out, t * width + d, total)
    for d in range(whole, width):
        rest = pre[t * n] * streams[at + d]
        for j in range(1, n):
            rest += pre[t * n + j] * streams[at + j * width + d]
        out[t * width + d] = rest


@inlined
def expand_vectors(
    out: Any, streams: Any, post: Any, comb: Any, t: Any, n: Any, k: Any, width: Any, result: Any
) -> None:
    """Copy k of `expand` of token t, as `collapse_vectors`."""
    at, to, weights, whole = t * n * width, (t * n + k) * width, t * n * n + k, width // LANES * LANES
    for d in range(0, whole, LANES):
        total = multiply(splat(comb[weights]), load(streams, at + d))
        for j in range(1, n):
            total = add(total, multiply(splat(comb[weights + j * n]), load(streams, at + j * width + d)))
        store(result, to + d, add(multiply(splat(post[t * n + k]), load(out, t * width + d)), total))
    for d in range(whole, width):
        rest = comb[weights] * streams[at + d]
        for j in range(1, n):
            rest += comb[weights + j * n] * streams[at + j * width + d]
        result[to + d] = post[t * n + k] * out[t * width + d] + rest


@kernel("void(float32[::1], float32[::1], int64, int64, float32[::1], int64)", parallel=True)
def _collapse(streams: Any, pre: Any, tokens: Any, width: Any, out: Any, parts: Any) -> None:
    for share in prange(parts):
        for t in range(tokens * share // parts, tokens * (share + 1) // parts):
            collapse_vectors(streams, pre, t, pre.size // tokens, width, out)


@kernel(
    "void(float32[::1], float32[::1], float32[::1], float32[::1], int64, int64, float32[::1], int64)", parallel=True
)
def _expand(out: Any, streams: Any, post: Any, comb: Any, tokens: Any, width: Any, result: Any, parts: Any) -> None:
    for share in prange(parts):
        for t in range(tokens * share // parts, tokens * (share + 1) // parts):
            for k in range(post.size // tokens):
                expand_vectors(out, streams, post, comb, t, post.size // tokens, k, width, result)


KERNELS = (_mix, _collapse, _expand)


def hyper_mix(
    streams_TnD: Tensor,
    fn_MC: Tensor,
    scale_3: Tensor,
    base_M: Tensor,
    eps_rms: float,
    hc_eps: float,
    iters: int,
    short_rows: int,
    *,
    path: Path | None = None,
) -> Coefficients:
    """As the plain `hyper_mix`, without gradients. `path` as in `linear`."""
    refuse_gradients(streams_TnD, fn_MC, scale_3, base_M)
    flat_TC = streams_TnD.detach().to(torch.float32).flatten(1).contiguous()
    mixes_TM = linear(flat_TC, DenseWeight(fn_MC), short_rows, native=False, path=path)
    return _coefficients(flat_TC, mixes_TM, scale_3, base_M, eps_rms, hc_eps, iters)


def split_mixes(
    mixes_TM: Tensor, scale_3: Tensor, base_M: Tensor, hc_eps: float, iters: int, short_rows: int = 0
) -> Coefficients:
    """As the plain `split_mixes`, without gradients. Every token's bits are its own, whatever `short_rows`."""
    refuse_gradients(mixes_TM, scale_3, base_M)
    return _coefficients(mixes_TM.new_empty(mixes_TM.shape[0], 0), mixes_TM, scale_3, base_M, 0.0, hc_eps, iters)


def hyper_collapse(streams_TnD: Tensor, pre_Tn: Tensor) -> Tensor:
    """As the plain `hyper_collapse`, bit for bit, without gradients."""
    refuse_gradients(streams_TnD, pre_Tn)
    tokens, _, width = streams_TnD.shape
    out_TD, parts = torch.empty(tokens, width), parts_of(streams_TnD.numel())
    if tokens:
        inputs = _flat(streams_TnD), _flat(pre_Tn)
        _collapse(*inputs, tokens, width, out_TD.view(-1).numpy(), parts, tasks=parts)
    return out_TD


def hyper_expand(out_TD: Tensor, streams_TnD: Tensor, post_Tn: Tensor, comb_Tnn: Tensor) -> Tensor:
    """As the plain `hyper_expand`, bit for bit, without gradients."""
    refuse_gradients(out_TD, streams_TnD, post_Tn, comb_Tnn)
    tokens, copies, width = streams_TnD.shape
    result_TnD, parts = torch.empty(streams_TnD.shape), parts_of(streams_TnD.numel() * copies)
    if tokens:
        inputs = (_flat(tensor) for tensor in (out_TD, streams_TnD, post_Tn, comb_Tnn))
        _expand(*inputs, tokens, width, result_TnD.view(-1).numpy(), parts, tasks=parts)
    return result_TnD


def _coefficients(
    flat_TC: Tensor, mixes_TM: Tensor, scale_3: Tensor, base_M: Tensor, eps_rms: float, hc_eps: float, iters: int
) -> Coefficients:
    tokens, n = mixes_TM.shape[0], copies_of(mixes_TM.shape[1])
    pre_Tn, post_Tn, comb_Tnn = torch.empty(tokens, n), torch.empty(tokens, n), torch.empty(tokens, n, n)
    parts = parts_of(flat_TC.numel())
    inputs = (_array(tensor) for tensor in (flat_TC, mixes_TM, scale_3, base_M))
    outputs = (tensor.numpy() for tensor in (pre_Tn, post_Tn, comb_Tnn))
    _mix(*inputs, _F32(eps_rms), _F32(hc_eps), iters, *outputs, parts, tasks=parts)
    return pre_Tn, post_Tn, comb_Tnn


def _array(tensor: Tensor) -> Array:
    return tensor.detach().to(torch.float32).contiguous().numpy()


def _flat(tensor: Tensor) -> Array:
    return tensor.detach().to(torch.float32).contiguous().view(-1).numpy()
