"""`rorqual.ops.reference.hyper` with gradients, for training on a CPU: one pass over memory where autograd makes many.

The signatures are the plain ones. `short_rows` is taken and ignored: no row's bits are promised here. What is promised
is that equal inputs give equal bits whatever the number of threads: rows are cut into blocks of a fixed length, sums
over rows are sums of blocks in their order, and nothing is added atomically. GEMMs are torch's: those over very many
rows (the gradient of `fn`) keep their bits for one number of threads, or for any under MKL_CBWR=AVX512,STRICT.

T tokens, n copies of the residual, D hidden size, C = n D, M = (2 + n) n mixes, B blocks of tokens. `lanes` arrays hold
one value of each of 16 tokens side by side, so that the Sinkhorn iterations of 16 tokens are one stream of vectors.
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
from rorqual.ops.fast.row_kernels import dot, part
from rorqual.ops.fast.row_vectors import Array
from rorqual.ops.fast.vectors import LANES, add, divide, exp, load, maximum, multiply, splat, store, subtract
from rorqual.ops.reference.hyper import Coefficients, copies_of

ROWS = 64
"""Tokens of a block: what a thread takes at a time, and what is summed before it joins the other blocks' sums."""

_F32 = np.float32


def blocks_of(rows: int) -> int:
    """Blocks of ROWS rows, the last one ragged."""
    return -(-rows // ROWS)


def fp32(tensor: Tensor) -> Array:
    """As a contiguous fp32 array, over the same memory where that is what the tensor is."""
    array: Array = tensor.detach().to(torch.float32).contiguous().numpy()
    return array


@part
def _sigmoid(x: Any) -> Any:
    one = splat(_F32(1))
    return divide(one, add(one, exp(subtract(splat(_F32(0)), x))))


@part
def _normalize(comb: Any, totals: Any, at: Any, n: Any, step: Any, hc_eps: Any) -> None:
    """Divide each of n groups of n lanes by its sum plus eps, which `totals` keeps.

    `step` is 1 along rows and n along columns. One reciprocal serves the group: what that rounds, the next
    normalisation takes back.
    """
    for group in range(n):
        first = group * (n if step == 1 else 1)
        total = load(comb, first * LANES)
        for i in range(1, n):
            total = add(total, load(comb, (first + i * step) * LANES))
        total = add(total, splat(hc_eps))
        store(totals, (at + group) * LANES, total)
        inverse = divide(splat(_F32(1)), total)
        for i in range(n):
            place = (first + i * step) * LANES
            store(comb, place, multiply(load(comb, place), inverse))


@part
def _normalize_back(comb: Any, grad: Any, totals: Any, at: Any, n: Any, step: Any) -> None:
    """Undo a `_normalize`: comb becomes what it was, grad the gradient for that."""
    for group in range(n):
        first = group * (n if step == 1 else 1)
        total = load(totals, (at + group) * LANES)
        inverse = divide(splat(_F32(1)), total)
        along = splat(_F32(0))
        for i in range(n):
            place = (first + i * step) * LANES
            along = add(along, multiply(load(grad, place), load(comb, place)))
        for i in range(n):
            place = (first + i * step) * LANES
            store(grad, place, multiply(subtract(load(grad, place), along), inverse))
            store(comb, place, multiply(load(comb, place), total))


@part
def _sinkhorn(logits: Any, soft: Any, comb: Any, totals: Any, n: Any, hc_eps: Any, iters: Any) -> None:
    """comb from the last n n logits; soft keeps the softmax, totals every sum that was divided by."""
    for row in range(n):
        first = (2 * n + row * n) * LANES
        top = load(logits, first)
        for k in range(1, n):
            top = maximum(top, load(logits, first + k * LANES))
        total = splat(_F32(0))
        for k in range(n):
            value = exp(subtract(load(logits, first + k * LANES), top))
            store(soft, (row * n + k) * LANES, value)
            total = add(total, value)
        inverse = divide(splat(_F32(1)), total)
        for k in range(n):
            place = (row * n + k) * LANES
            value = multiply(load(soft, place), inverse)
            store(soft, place, value)
            store(comb, place, add(value, splat(hc_eps)))
    _normalize(comb, totals, 0, n, n, hc_eps)
    for i in range(1, iters):
        _normalize(comb, totals, (2 * i - 1) * n, n, 1, hc_eps)
        _normalize(comb, totals, 2 * i * n, n, n, hc_eps)


@part
def _sinkhorn_back(soft: Any, comb: Any, grad: Any, totals: Any, n: Any, iters: Any, grad_logits: Any) -> None:
    """The gradient for the last n n logits from `grad`, that of comb; comb and grad are used up."""
    for i in range(iters - 1, 0, -1):
        _normalize_back(comb, grad, totals, 2 * i * n, n, n)
        _normalize_back(comb, grad, totals, (2 * i - 1) * n, n, 1)
    _normalize_back(comb, grad, totals, 0, n, n)
    for row in range(n):
        along = splat(_F32(0))
        for k in range(n):
            place = (row * n + k) * LANES
            along = add(along, multiply(load(grad, place), load(soft, place)))
        for k in range(n):
            place = (row * n + k) * LANES
            value = multiply(load(soft, place), subtract(load(grad, place), along))
            store(grad_logits, 2 * n * LANES + place, value)


@part
def _part_of(m: Any, n: Any) -> Any:
    """0 for a mix of pre, 1 of post, 2 of comb."""
    return min(m // n, 2)


@part
def _load_logits(products_TM: Any, r_T: Any, scale_3: Any, base_M: Any, n: Any, first: Any, logits: Any) -> Any:
    """Logits of up to 16 tokens from `first` on, as lanes; how many tokens there are. Lanes without a token are 0."""
    count = min(LANES, products_TM.shape[0] - first)
    for m in range(products_TM.shape[1]):
        scale = scale_3[_part_of(m, n)]
        for i in range(count):
            logits[m * LANES + i] = products_TM[first + i, m] * r_T[first + i] * scale + base_M[m]
        for i in range(count, LANES):
            logits[m * LANES + i] = _F32(0)
    return count


@kernel(
    "void(float32[:, ::1], float32[:, ::1], float32[::1], float32[::1], float32, float32, int64, int64, float32[::1],"
    " float32[:, ::1], float32[:, ::1], float32[:, ::1])",
    parallel=True,
)
def _mix_forward(
    flat_TC: Any,
    products_TM: Any,
    scale_3: Any,
    base_M: Any,
    eps_rms: Any,
    hc_eps: Any,
    iters: Any,
    blocks: Any,
    r_T: Any,
    pre_Tn: Any,
    post_Tn: Any,
    comb_TN: Any,
) -> None:
    """The coefficients and 1 / rms of every token; comb_TN is [T, n n]."""
    n, mixes = pre_Tn.shape[1], products_TM.shape[1]
    for block in prange(blocks):
        logits = np.empty(mixes * LANES, np.float32)
        soft, comb = np.empty(n * n * LANES, np.float32), np.empty(n * n * LANES, np.float32)
        totals = np.empty(2 * iters * n * LANES, np.float32)
        for first in range(block * ROWS, min(block * ROWS + ROWS, products_TM.shape[0]), LANES):
            for t in range(first, min(first + LANES, products_TM.shape[0])):
                r_T[t] = inverse_rms(flat_TC[t], eps_rms)
            count = _load_logits(products_TM, r_T, scale_3, base_M, n, first, logits)
            for j in range(2 * n):
                value = _sigmoid(load(logits, j * LANES))
                store(logits, j * LANES, value)
            _sinkhorn(logits, soft, comb, totals, n, hc_eps, iters)
            for i in range(count):
                for j in range(n):
                    pre_Tn[first + i, j] = logits[j * LANES + i] + hc_eps
                    post_Tn[first + i, j] = _F32(2) * logits[(n + j) * LANES + i]
                for j in range(n * n):
                    comb_TN[first + i, j] = comb[j * LANES + i]


@kernel(
    "void(float32[:, ::1], float32[::1], float32[::1], float32[::1], float32, int64, int64, float32[:, ::1],"
    " float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[::1], float32[:, :, ::1])",
    parallel=True,
)
def _mix_backward(
    products_TM: Any,
    r_T: Any,
    scale_3: Any,
    base_M: Any,
    hc_eps: Any,
    iters: Any,
    blocks: Any,
    grad_pre_Tn: Any,
    grad_post_Tn: Any,
    grad_comb_TN: Any,
    grad_products_TM: Any,
    grad_r_T: Any,
    sums_B2M: Any,
) -> None:
    """Gradients for the products and for 1 / rms; sums over a block of logit gradients, plain and times the mix."""
    n, mixes = grad_pre_Tn.shape[1], products_TM.shape[1]
    for block in prange(blocks):
        logits, grad_logits = np.empty(mixes * LANES, np.float32), np.empty(mixes * LANES, np.float32)
        soft, comb = np.empty(n * n * LANES, np.float32), np.empty(n * n * LANES, np.float32)
        grad = np.empty(n * n * LANES, np.float32)
        totals = np.empty(2 * iters * n * LANES, np.float32)
        sums_B2M[block] = 0
        for first in range(block * ROWS, min(block * ROWS + ROWS, products_TM.shape[0]), LANES):
            count = _load_logits(products_TM, r_T, scale_3, base_M, n, first, logits)
            grad[:] = 0
            grad_logits[:] = 0
            for i in range(count):
                for j in range(n):
                    grad_logits[j * LANES + i] = grad_pre_Tn[first + i, j]
                    grad_logits[(n + j) * LANES + i] = _F32(2) * grad_post_Tn[first + i, j]
                for j in range(n * n):
                    grad[j * LANES + i] = grad_comb_TN[first + i, j]
            for j in range(2 * n):
                value = _sigmoid(load(logits, j * LANES))
                slope = multiply(value, subtract(splat(_F32(1)), value))
                store(grad_logits, j * LANES, multiply(load(grad_logits, j * LANES), slope))
            _sinkhorn(logits, soft, comb, totals, n, hc_eps, iters)
            _sinkhorn_back(soft, comb, grad, totals, n, iters, grad_logits)
            for i in range(count):
                along, r = _F32(0), r_T[first + i]
                for m in range(mixes):
                    value, product = grad_logits[m * LANES + i], products_TM[first + i, m]
                    sums_B2M[block, 0, m] += value
                    sums_B2M[block, 1, m] += value * product * r
                    value *= scale_3[_part_of(m, n)]
                    grad_products_TM[first + i, m] = value * r
                    along += value * product
                grad_r_T[first + i] = along


@kernel("void(float32[:, ::1], float32[::1], float32[::1], int64, float32[:, ::1])", parallel=True)
def _rms_backward(flat_TC: Any, r_T: Any, grad_r_T: Any, blocks: Any, grad_TC: Any) -> None:
    """grad = the share of the streams' gradient that came through 1 / rms."""
    for block in prange(blocks):
        for t in range(block * ROWS, min(block * ROWS + ROWS, flat_TC.shape[0])):
            factor = -grad_r_T[t] * r_T[t] * r_T[t] * r_T[t] / _F32(flat_TC.shape[1])
            for c in range(flat_TC.shape[1]):
                grad_TC[t, c] = flat_TC[t, c] * factor


@part
def _weighted_rows(rows_nD: Any, weight_n: Any, out_D: Any) -> None:
    """out = sum over k of weight[k] rows[k], k from 0 up. A loop over each row: that is what compiles to vectors."""
    weight, row_D = weight_n[0], rows_nD[0]
    for d in range(out_D.shape[0]):
        out_D[d] = weight * row_D[d]
    for k in range(1, rows_nD.shape[0]):
        weight, row_D = weight_n[k], rows_nD[k]
        for d in range(out_D.shape[0]):
            out_D[d] += weight * row_D[d]


@kernel("void(float32[:, :, ::1], float32[:, ::1], int64, float32[:, ::1])", parallel=True)
def _collapse_forward(streams_TnD: Any, pre_Tn: Any, blocks: Any, out_TD: Any) -> None:
    for block in prange(blocks):
        for t in range(block * ROWS, min(block * ROWS + ROWS, out_TD.shape[0])):
            _weighted_rows(streams_TnD[t], pre_Tn[t], out_TD[t])


@kernel(
    "void(float32[:, ::1], float32[:, :, ::1], float32[:, ::1], int64, float32[:, :, ::1], float32[:, ::1])",
    parallel=True,
)
def _collapse_backward(
    grad_TD: Any, streams_TnD: Any, pre_Tn: Any, blocks: Any, grad_streams_TnD: Any, grad_pre_Tn: Any
) -> None:
    for block in prange(blocks):
        for t in range(block * ROWS, min(block * ROWS + ROWS, grad_TD.shape[0])):
            for j in range(pre_Tn.shape[1]):
                grad_pre_Tn[t, j] = dot(grad_TD[t], streams_TnD[t, j])
                factor = pre_Tn[t, j]
                for d in range(grad_TD.shape[1]):
                    grad_streams_TnD[t, j, d] = grad_TD[t, d] * factor


@kernel(
    "void(float32[:, ::1], float32[:, :, ::1], float32[:, ::1], float32[:, :, ::1], int64, float32[:, :, ::1])",
    parallel=True,
)
def _expand_forward(out_TD: Any, streams_TnD: Any, post_Tn: Any, comb_Tnn: Any, blocks: Any, result_TnD: Any) -> None:
    for block in prange(blocks):
        for t in range(block * ROWS, min(block * ROWS + ROWS, out_TD.shape[0])):
            for k in range(post_Tn.shape[1]):
                result_D, out_D, post = result_TnD[t, k], out_TD[t], post_Tn[t, k]
                _weighted_rows(streams_TnD[t], comb_Tnn[t, :, k], result_D)
                for d in range(out_D.shape[0]):
                    result_D[d] = post * out_D[d] + result_D[d]


@kernel(
    "void(float32[:, :, ::1], float32[:, ::1], float32[:, :, ::1], float32[:, ::1], float32[:, :, ::1], int64,"
    " float32[:, ::1], float32[:, :, ::1], float32[:, ::1], float32[:, :, ::1])",
    parallel=True,
)
def _expand_backward(
    grad_TnD: Any,
    out_TD: Any,
    streams_TnD: Any,
    post_Tn: Any,
    comb_Tnn: Any,
    blocks: Any,
    grad_out_TD: Any,
    grad_streams_TnD: Any,
    grad_post_Tn: Any,
    grad_comb_Tnn: Any,
) -> None:
    for block in prange(blocks):
        for t in range(block * ROWS, min(block * ROWS + ROWS, out_TD.shape[0])):
            _weighted_rows(grad_TnD[t], post_Tn[t], grad_out_TD[t])
            for j in range(post_Tn.shape[1]):
                grad_post_Tn[t, j] = dot(grad_TnD[t, j], out_TD[t])
                _weighted_rows(grad_TnD[t], comb_Tnn[t, j], grad_streams_TnD[t, j])
                for k in range(post_Tn.shape[1]):
                    grad_comb_Tnn[t, j, k] = dot(grad_TnD[t, k], streams_TnD[t, j])


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        flat_TC: Tensor,
        fn_MC: Tensor,
        scale_3: Tensor,
        base_M: Tensor,
        eps_rms: float,
        hc_eps: float,
        iters: int,
    ) -> Coefficients:
        flat_TC, tokens = flat_TC.contiguous(), flat_TC.shape[0]
        n, blocks = copies_of(fn_MC.shape[0]), blocks_of(tokens)
        products_TM, r_T = flat_TC @ fn_MC.t(), torch.empty(tokens)
        pre_Tn, post_Tn, comb_Tnn = torch.empty(tokens, n), torch.empty(tokens, n), torch.empty(tokens, n, n)
        inputs = (fp32(tensor) for tensor in (flat_TC, products_TM, scale_3, base_M))
        outputs = (tensor.numpy() for tensor in (r_T, pre_Tn, post_Tn, comb_Tnn.flatten(1)))
        _mix_forward(*inputs, _F32(eps_rms), _F32(hc_eps), iters, blocks, *outputs, tasks=blocks)
        ctx.save_for_backward(flat_TC, fn_MC, scale_3, base_M, products_TM, r_T)
        ctx.hc_eps, ctx.iters = hc_eps, iters
        return pre_Tn, post_Tn, comb_Tnn

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_pre_Tn: Tensor, grad_post_Tn: Tensor, grad_comb_Tnn: Tensor
    ) -> tuple[Tensor | None, ...]:
        flat_TC, fn_MC, scale_3, base_M, products_TM, r_T = ctx.saved_tensors
        n, mixes, blocks = grad_pre_Tn.shape[1], products_TM.shape[1], blocks_of(flat_TC.shape[0])
        grad_products_TM, grad_r_T = torch.empty_like(products_TM), torch.empty_like(r_T)
        sums_B2M = np.empty((blocks, 2, mixes), np.float32)
        inputs = (fp32(tensor) for tensor in (products_TM, r_T, scale_3, base_M))
        grads = (fp32(tensor) for tensor in (grad_pre_Tn, grad_post_Tn, grad_comb_Tnn.flatten(1)))
        outputs = grad_products_TM.numpy(), grad_r_T.numpy(), sums_B2M
        _mix_backward(*inputs, _F32(ctx.hc_eps), ctx.iters, blocks, *grads, *outputs, tasks=blocks)
        grad_flat_TC = grad_fn_MC = None
        if ctx.needs_input_grad[0]:
            grad_flat_TC = torch.empty_like(flat_TC)
            arrays = fp32(flat_TC), fp32(r_T), fp32(grad_r_T)
            _rms_backward(*arrays, blocks, grad_flat_TC.numpy(), tasks=blocks)
            grad_flat_TC.addmm_(grad_products_TM, fn_MC.detach())
        if ctx.needs_input_grad[1]:
            grad_fn_MC = grad_products_TM.t() @ flat_TC
        # numpy adds blocks one after the other, on one thread.
        grad_base_M, by_mix_M = torch.from_numpy(sums_B2M.sum(0)).unbind(0)
        grad_scale_3 = torch.stack([by_mix_M[:n].sum(), by_mix_M[n : 2 * n].sum(), by_mix_M[2 * n :].sum()])
        return grad_flat_TC, grad_fn_MC, grad_scale_3, grad_base_M, None, None, None


class _Collapse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams_TnD: Tensor, pre_Tn: Tensor) -> Tensor:
        ctx.save_for_backward(streams_TnD, pre_Tn)
        out_TD, blocks = torch.empty(streams_TnD.shape[0], streams_TnD.shape[2]), blocks_of(streams_TnD.shape[0])
        _collapse_forward(fp32(streams_TnD), fp32(pre_Tn), blocks, out_TD.numpy(), tasks=blocks)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor]:
        streams_TnD, pre_Tn = ctx.saved_tensors
        grads, blocks = (torch.empty(streams_TnD.shape), torch.empty(pre_Tn.shape)), blocks_of(grad_TD.shape[0])
        inputs = (fp32(tensor) for tensor in (grad_TD, streams_TnD, pre_Tn))
        _collapse_backward(*inputs, blocks, *(grad.numpy() for grad in grads), tasks=blocks)
        return grads


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_TD: Tensor, streams_TnD: Tensor, post_Tn: Tensor, comb_Tnn: Tensor) -> Tensor:
        ctx.save_for_backward(out_TD, streams_TnD, post_Tn, comb_Tnn)
        result_TnD, blocks = torch.empty(streams_TnD.shape), blocks_of(streams_TnD.shape[0])
        arrays = (fp32(tensor) for tensor in (out_TD, streams_TnD, post_Tn, comb_Tnn))
        _expand_forward(*arrays, blocks, result_TnD.numpy(), tasks=blocks)
        return result_TnD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TnD: Tensor) -> tuple[Tensor, ...]:
        grads = tuple(torch.empty(tensor.shape) for tensor in ctx.saved_tensors)
        inputs = (fp32(tensor) for tensor in (grad_TnD, *ctx.saved_tensors))
        blocks = blocks_of(grad_TnD.shape[0])
        _expand_backward(*inputs, blocks, *(grad.numpy() for grad in grads), tasks=blocks)
        return grads


_apply_mix: Any = _Mix.apply
_apply_collapse: Any = _Collapse.apply
_apply_expand: Any = _Expand.apply


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
    """As the plain `hyper_mix`; the gradient goes back through every Sinkhorn iteration, recomputed, not stored."""
    coefficients: Coefficients = _apply_mix(
        streams_TnD.float().flatten(1), fn_MC, scale_3, base_M, eps_rms, hc_eps, iters
    )
    return coefficients


def hyper_collapse(streams_TnD: Tensor, pre_Tn: Tensor) -> Tensor:
    """As the plain `hyper_collapse`."""
    out_TD: Tensor = _apply_collapse(streams_TnD.float(), pre_Tn)
    return out_TD


def hyper_expand(out_TD: Tensor, streams_TnD: Tensor, post_Tn: Tensor, comb_Tnn: Tensor) -> Tensor:
    """As the plain `hyper_expand`."""
    result_TnD: Tensor = _apply_expand(out_TD.float(), streams_TnD.float(), post_Tn, comb_Tnn)
    return result_TnD
