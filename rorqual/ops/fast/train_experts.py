"""`rorqual.ops.reference.experts` with gradients, for training on a CPU.

(row, slot) pairs are sorted by expert and every expert's pairs share its GEMMs; w1 and w3 are one matrix in these. The
activation, its gradient and the sum over slots are one kernel each. Kept for the backward pass: gates and ups; the rest
is recomputed. Promises as in `train_hyper`; the bits of a GEMM are torch's.

T rows, K inputs and outputs, I expert width, k slots a row, P = T k pairs, J experts; B blocks of pairs or rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numba import prange
from torch import Tensor
from torch.autograd.function import once_differentiable

from rorqual.ops.fast.kernel import kernel
from rorqual.ops.fast.row_kernels import dot, part
from rorqual.ops.fast.train_hyper import ROWS, blocks_of, fp32

_F32, _I32, _U32 = np.float32, np.int32, np.uint32


class HasTensor(Protocol):
    """A dense weight: fp32 [N, K], which may require a gradient."""

    @property
    def tensor(self) -> Tensor: ...


@part
def _exp(x: Any) -> Any:
    """e^x to about 2 ulp in plain arithmetic, which compiles to vectors as a call of libm does not."""
    inside = min(max(x, _F32(-87.0)), _F32(88.0))
    # Adding 1.5 * 2^23 rounds to a whole number.
    n = (inside * _F32(1.4426950408889634) + _F32(12582912.0)) - _F32(12582912.0)
    # ln 2 in two parts; n times the first is exact.
    r = (inside - n * _F32(0.693359375)) + n * _F32(2.12194440e-4)
    y = _F32(1.9875691500e-4) * r + _F32(1.3981999507e-3)
    y = y * r + _F32(8.3334519073e-3)
    y = y * r + _F32(4.1665795894e-2)
    y = y * r + _F32(1.6666665459e-1)
    y = y * r + _F32(5.0000001201e-1)
    y = y * r * r + r + _F32(1)
    return y * _U32(_U32(_I32(n) + _I32(127)) << _U32(23)).view(np.float32)


@part
def _clamp(x: Any, low: Any, high: Any) -> Any:
    """Keeps NaN."""
    x = high if x > high else x
    return low if x < low else x


@kernel("void(float32[:, ::1], float32[::1], float32, int64, float32[:, ::1])", parallel=True)
def _activate(both_PJ: Any, weight_P: Any, limit: Any, blocks: Any, hidden_PI: Any) -> None:
    """hidden = silu(gate) * up * weight; a row of `both` is its I gates, then its I ups. An infinite limit is none."""
    width = hidden_PI.shape[1]
    for block in prange(blocks):
        for p in range(block * ROWS, min(block * ROWS + ROWS, hidden_PI.shape[0])):
            gate_I, up_I, hidden_I, weight = both_PJ[p, :width], both_PJ[p, width:], hidden_PI[p], weight_P[p]
            for i in range(hidden_I.shape[0]):
                gate, up = _clamp(gate_I[i], -_F32(np.inf), limit), _clamp(up_I[i], -limit, limit)
                hidden_I[i] = gate / (_F32(1) + _exp(-gate)) * up * weight


@kernel(
    "void(float32[:, ::1], float32[::1], float32, int64, float32[:, ::1], float32[:, ::1], float32[:, ::1],"
    " float32[::1])",
    parallel=True,
)
def _activate_backward(
    both_PJ: Any,
    weight_P: Any,
    limit: Any,
    blocks: Any,
    grad_PI: Any,
    hidden_PI: Any,
    grad_both_PJ: Any,
    grad_weight_P: Any,
) -> None:
    """From the gradient for hidden: those for both and the weight, and hidden again. Clamped values have none."""
    width = hidden_PI.shape[1]
    for block in prange(blocks):
        for p in range(block * ROWS, min(block * ROWS + ROWS, hidden_PI.shape[0])):
            gate_I, up_I, hidden_I, grad_I = both_PJ[p, :width], both_PJ[p, width:], hidden_PI[p], grad_PI[p]
            grad_gate_I, grad_up_I, weight = grad_both_PJ[p, :width], grad_both_PJ[p, width:], weight_P[p]
            for i in range(hidden_I.shape[0]):
                gate, up = _clamp(gate_I[i], -_F32(np.inf), limit), _clamp(up_I[i], -limit, limit)
                share = _F32(1) / (_F32(1) + _exp(-gate))
                silu, grad = gate * share, grad_I[i] * weight
                slope = share * (_F32(1) + gate * (_F32(1) - share))
                hidden_I[i] = silu * up
                grad_gate_I[i] = grad * up * slope if gate == gate_I[i] else _F32(0)
                grad_up_I[i] = grad * silu if up == up_I[i] else _F32(0)
            grad_weight_P[p] = dot(grad_I, hidden_I)
            for i in range(hidden_I.shape[0]):
                hidden_I[i] *= weight


@kernel("void(float32[:, ::1], int64[::1], int64, float32[:, ::1])", parallel=True)
def _gather(x_TK: Any, row_P: Any, blocks: Any, out_PK: Any) -> None:
    for block in prange(blocks):
        for p in range(block * ROWS, min(block * ROWS + ROWS, row_P.shape[0])):
            out_K, row = out_PK[p], row_P[p]
            if row < 0:
                out_K[:] = 0
                continue
            x_K = x_TK[row]
            for i in range(x_K.shape[0]):
                out_K[i] = x_K[i]


@kernel("void(float32[:, ::1], int64[:, ::1], int64, float32[:, ::1])", parallel=True)
def _combine(y_PK: Any, pair_Tk: Any, blocks: Any, out_TK: Any) -> None:
    """out[t] = sum over slots, from the first, of y[pair_Tk[t, slot]]."""
    for block in prange(blocks):
        for t in range(block * ROWS, min(block * ROWS + ROWS, out_TK.shape[0])):
            out_K = out_TK[t]
            out_K[:] = 0
            for slot in range(pair_Tk.shape[1]):
                y_K = y_PK[pair_Tk[t, slot]]
                for i in range(out_K.shape[0]):
                    out_K[i] += y_K[i]


TILED_ROWS = 64
"""Where products go through bf16 tiles, an expert's pairs are filled up to a multiple of this: oneDNN makes code for
every new shape, which costs more than the product."""


class _Route(NamedTuple):
    """Pairs in the order of their experts, within one by row; an expert's may be filled up with pairs of no row."""

    row_P: Any
    """int64: row of each pair, -1 for none."""
    place_Tk: Any
    """int64: where the pair of (row, slot) stands."""
    bounds: list[tuple[int, int, int]]
    """(expert, first, last) of every expert that has pairs."""


def _route(expert_index_Tk: Tensor, experts: int) -> _Route:
    index_Tk = expert_index_Tk.detach().contiguous().numpy()
    flat_P = index_Tk.reshape(-1)
    assert not flat_P.size or (flat_P.min() >= 0 and flat_P.max() < experts), "expert indices are out of range"
    # Of 16-bit numbers numpy's stable sort is a radix sort.
    order_P = np.argsort(flat_P.astype(np.uint16) if experts <= 1 << 16 else flat_P, kind="stable")
    counts_J = np.bincount(flat_P, minlength=experts)
    multiple = TILED_ROWS if torch.get_float32_matmul_precision() != "highest" else 1
    room_J = -(-counts_J // multiple) * multiple
    ends_J = room_J.cumsum()
    shift_J = (ends_J - room_J) - (counts_J.cumsum() - counts_J)
    to_P = np.arange(order_P.size) + shift_J[flat_P[order_P]]
    row_P = np.full(int(ends_J[-1]) if experts else 0, -1, np.int64)
    row_P[to_P] = order_P // max(1, index_Tk.shape[1])
    place_P = np.empty_like(order_P)
    place_P[order_P] = to_P
    bounds = [(j, int(ends_J[j] - room_J[j]), int(ends_J[j])) for j in np.flatnonzero(counts_J).tolist()]
    return _Route(row_P, place_P.reshape(index_Tk.shape), bounds)


def _rows_by_pair(x_TK: Tensor, route: _Route) -> Tensor:
    out_PK, blocks = torch.empty(route.row_P.size, x_TK.shape[1]), blocks_of(route.row_P.size)
    _gather(fp32(x_TK), route.row_P, blocks, out_PK.numpy(), tasks=blocks)
    return out_PK


def _sum_of_slots(y_PK: Tensor, route: _Route) -> Tensor:
    out_TK, blocks = torch.empty(route.place_Tk.shape[0], y_PK.shape[1]), blocks_of(route.place_Tk.shape[0])
    _combine(y_PK.numpy(), route.place_Tk, blocks, out_TK.numpy(), tasks=blocks)
    return out_TK


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        expert_index_Tk: Tensor,
        routing_weight_Tk: Tensor,
        limit: float,
        *weights: Tensor,
    ) -> Tensor:
        w1, w2, w3 = _thirds(weights)
        route, x_TK = _route(expert_index_Tk, len(w1)), x_TK.contiguous()
        x_PK = _rows_by_pair(x_TK, route)
        pairs, width = x_PK.shape[0], w1[0].shape[0]
        both_PJ, hidden_PI = torch.empty(pairs, 2 * width), torch.empty(pairs, width)
        for j, first, last in route.bounds:
            torch.mm(x_PK[first:last], torch.cat((w1[j], w3[j])).t(), out=both_PJ[first:last])
        weight_P = np.zeros(pairs, np.float32)
        weight_P[route.place_Tk] = fp32(routing_weight_Tk)
        blocks = blocks_of(pairs)
        _activate(both_PJ.numpy(), weight_P, _F32(limit or np.inf), blocks, hidden_PI.numpy(), tasks=blocks)
        y_PK = x_PK if w2[0].shape[0] == x_PK.shape[1] else torch.empty(pairs, w2[0].shape[0])
        for j, first, last in route.bounds:
            torch.mm(hidden_PI[first:last], w2[j].t(), out=y_PK[first:last])
        ctx.save_for_backward(x_TK, both_PJ, torch.from_numpy(weight_P), *weights)
        ctx.route, ctx.limit = route, limit
        return _sum_of_slots(y_PK, route)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, both_PJ, weight_P, *weights = ctx.saved_tensors
        route, (w1, w2, w3), width = ctx.route, _thirds(weights), both_PJ.shape[1] // 2
        grad_PK, blocks = _rows_by_pair(grad_TK, route), blocks_of(both_PJ.shape[0])
        hidden_PI, grad_hidden_PI = torch.empty(2, both_PJ.shape[0], width)
        for j, first, last in route.bounds:
            torch.mm(grad_PK[first:last], w2[j], out=grad_hidden_PI[first:last])
        grad_both_PJ, grad_weight_P = torch.empty_like(both_PJ), torch.empty_like(weight_P)
        inputs = both_PJ.numpy(), weight_P.numpy(), _F32(ctx.limit or np.inf), blocks, grad_hidden_PI.numpy()
        outputs = (tensor.numpy() for tensor in (hidden_PI, grad_both_PJ, grad_weight_P))
        _activate_backward(*inputs, *outputs, tasks=blocks)
        x_PK = _rows_by_pair(x_TK, route)
        grads: list[Tensor | None] = [None] * len(weights)
        for j, first, last in route.bounds:
            grad_both_IK = grad_both_PJ[first:last].t() @ x_PK[first:last]
            grads[j], grads[j + 2 * len(w1)] = grad_both_IK[:width], grad_both_IK[width:]
            grads[j + len(w1)] = grad_PK[first:last].t() @ hidden_PI[first:last]
            # x of these pairs is used up; its gradient takes the place.
            torch.mm(grad_both_PJ[first:last], torch.cat((w1[j], w3[j])), out=x_PK[first:last])
        grad_routing_Tk = torch.from_numpy(grad_weight_P.numpy()[route.place_Tk])
        return _sum_of_slots(x_PK, route), None, grad_routing_Tk, None, *grads


def _thirds(weights: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """w1, w2 and w3 of all experts."""
    experts = len(weights) // 3
    return (weights[i * experts : (i + 1) * experts] for i in range(3))


_apply_experts: Any = _Experts.apply


def experts(
    x_TK: Tensor,
    expert_index_Tk: Tensor,
    routing_weight_Tk: Tensor,
    w1: Sequence[HasTensor],
    w2: Sequence[HasTensor],
    w3: Sequence[HasTensor],
    limit: float,
    short_rows: int,
    native: bool,
) -> Tensor:
    """As the plain `experts`, for dense fp32 weights of one shape; an expert without a row gets no gradient.

    Native numerics have no training twin, and `short_rows` is ignored: no row's bits are promised.
    """
    assert not native, "native numerics are not trained: use the plain op"
    weights = (weight.tensor for third in (w1, w2, w3) for weight in third)
    out_TK: Tensor = _apply_experts(x_TK.float(), expert_index_Tk, routing_weight_Tk.float(), limit, *weights)
    return out_TK
