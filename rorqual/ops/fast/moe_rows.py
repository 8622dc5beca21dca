"""A whole MoE sub-layer of a few rows in one kernel: the fused twin of `model.moe.MoE` for decode and verification.

    gate product -> affinity, choice, weights          a row after the other
    pairs sorted by expert -> w1, w3 and the shared    columns shared out among threads
    activation, packed for w2                          a pair after the other
    w2 and the shared one's                            columns shared out among threads
    sum over slots, then the shared expert

Products, activation and sums are the parts of `linear` and `experts`, in their order: a row's bits depend on the row
alone, and are those of the op-by-op path but for the last bits of exp and log1p.

T rows, D hidden, E routed experts, k a row, P = T k pairs sorted by expert, J experts chosen, I expert width, S shared
width, W the wider of the two.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.formats.codec import check_finite
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import TILE, DenseWeight, Fp4Weight, Fp8Weight, Weight
from rorqual.ops.cpu import Path
from rorqual.ops.fast.experts import activated
from rorqual.ops.fast.kernel import Kernel, kernel, refuse_gradients
from rorqual.ops.fast.linear import has_vectors, parts_of
from rorqual.ops.fast.row_kernels import (
    address,
    columns,
    pack_row,
    part,
    rooms,
    round_bf16,
    share_vector,
)
from rorqual.ops.fast.row_vectors import FP4, FP8, FP32, Array

_F32 = np.float32
_FP4, _FP8, _FP32 = ((kind.code, kind.unit, kind.scale_rows) for kind in (FP4, FP8, FP32))
SCORINGS = ("sqrtsoftplus", "sigmoid", "softmax")
"""By the number that the kernel knows them by."""
_TINY = _F32(np.finfo(np.float32).tiny)


@part
def _affinity(logits_E, scoring):
    """Unbiased scores in place of the logits, as `model.moe.affinity`."""
    if scoring == 2:
        top, total = logits_E.max(), _F32(0)
        for e in range(logits_E.shape[0]):
            logits_E[e] = math.exp(logits_E[e] - top)
            total += logits_E[e]
        for e in range(logits_E.shape[0]):
            logits_E[e] /= total
        return
    for e in range(logits_E.shape[0]):
        x = logits_E[e]
        if scoring == 1:
            logits_E[e] = _F32(1) / (_F32(1) + math.exp(-x))
        else:
            soft = x if x > _F32(20) else _F32(math.log1p(math.exp(x)))
            logits_E[e] = math.sqrt(max(soft, _TINY))


@part
def _choose(scores_E, bias_E, taken_E, index_k, weight_k, normalise, scaling):
    """The k experts of the best biased scores, best first, ties to the lowest id; weights from the unbiased scores."""
    taken_E[:] = False
    for slot in range(index_k.shape[0]):
        best = -1
        for e in range(scores_E.shape[0]):
            if not taken_E[e] and (best < 0 or scores_E[e] + bias_E[e] > scores_E[best] + bias_E[best]):
                best = e
        taken_E[best] = True
        index_k[slot], weight_k[slot] = best, scores_E[best]
    total = weight_k[0]
    for slot in range(1, index_k.shape[0]):
        total += weight_k[slot]
    for slot in range(index_k.shape[0]):
        weight_k[slot] = (weight_k[slot] / (total + _F32(1e-20)) if normalise else weight_k[slot]) * scaling


@part
def _sort_pairs(index_Tk, first_E, row_P, place_Tk):
    """Pairs in the order of their experts, rows in order within: expert e has pairs [first_E[e], first_E[e + 1])."""
    first_E[:] = 0
    for t in range(index_Tk.shape[0]):
        for slot in range(index_Tk.shape[1]):
            first_E[index_Tk[t, slot] + 1] += 1
    for e in range(1, first_E.shape[0]):
        first_E[e] += first_E[e - 1]
    next_E = first_E.copy()
    for t in range(index_Tk.shape[0]):
        for slot in range(index_Tk.shape[1]):
            p = next_E[index_Tk[t, slot]]
            next_E[index_Tk[t, slot]] = p + 1
            row_P[p], place_Tk[t, slot] = t, p


@part
def _activate(gate_I, up_I, weight, limit, native, work_I, hidden_I):
    """One pair's hidden values, packed for w2; False when native has a NaN or an Inf to quantise."""
    for i in range(work_I.shape[0]):
        work_I[i] = activated(gate_I[i], up_I[i], weight, limit, native)
    return pack_row(work_I, True, native, hidden_I)


@part
def _combine(y_PD, place_k, y_D, n0, n1, native, out_D):
    """Columns [n0, n1) of one row: its pairs in the order of their slots, then the shared expert."""
    for i in range(n0, n1):
        total = _F32(0)
        for slot in range(place_k.shape[0]):
            y = y_PD[place_k[slot], i]
            total += round_bf16(y) if native else y
        out_D[i] = total + (round_bf16(y_D[i]) if native else y_D[i])


@part
def _gate(fp32, gate_w, x_TD, logits_TE, n0, n1):
    """Columns [n0, n1) of the gate's product."""
    rows, hidden = x_TD.shape
    lanes, wide = rooms(rows)
    x_T = address(x_TD) + np.arange(rows) * (hidden * 4)
    share_vector(fp32, _FP32, gate_w, gate_w, logits_TE.shape[1], hidden, n0, n1, x_T, logits_TE, lanes, wide)


_SIGNATURE = (
    "void(Tuple((int8[::1], uint8[::1], float32[::1])), float32[:, ::1], uint8[::1], Tuple((int64, float32[:, ::1])), "
    "Tuple((int64[:, ::1], int64[:, ::1], int64[::1], int64[::1])), UniTuple(int64, 4), "
    "Tuple((float32, float32, float32, boolean, boolean)), float32[::1], float32[:, ::1], boolean[::1], int64)"
)


@kernel(_SIGNATURE, parallel=True)
def moe_kernel(markers, x_TD, image_T, gate, weights, sizes, settings, room, out_TD, finite_T, parts):
    """gate: (address, biases [2, E]: of text, of image rows). weights: addresses of the experts' codes and scales
    [3 (w1, w2, w3), E], of the shared ones' [3]. sizes: I, S, k, number of the scoring. settings: temperature, scaling,
    limit, normalise, native. room: [T (D + k I + S)]; what is used by address must outlive its last mention, which an
    array of the kernel's own does not. finite_T: False where native has a NaN or an Inf to quantise."""
    fp4, fp8, fp32 = markers
    (rows, hidden), (gate_w, bias_2E) = x_TD.shape, gate
    (w_3E, s_3E, shared_w, shared_s), (inner, shared, chosen, scoring) = weights, sizes
    temperature, scaling, limit, normalise, native = settings
    experts, pairs = bias_2E.shape[1], rows * chosen

    a, b, c = rows * hidden, pairs * inner, rows * shared
    packed_TD = room[:a].reshape(rows, hidden)
    hidden_PI, hidden_TS = room[a : a + b].reshape(pairs, inner), room[a + b : a + b + c].reshape(rows, shared)
    logits_TE = np.empty((rows, experts), np.float32)
    for t in range(rows):
        finite_T[t] = pack_row(x_TD[t], True, native, packed_TD[t])
    step = np.arange(rows) * (hidden * 4)
    if rows * experts * hidden >= 1 << 18:
        for share in prange(parts):
            n0, n1 = columns(experts, share, parts)
            _gate(fp32, gate_w, x_TD, logits_TE, n0, n1)
    else:
        _gate(fp32, gate_w, x_TD, logits_TE, 0, experts)

    index_Tk, weight_Tk = np.empty((rows, chosen), np.int64), np.empty((rows, chosen), np.float32)
    taken_E = np.empty(experts, np.bool_)
    for t in range(rows):
        for e in range(experts):
            logits_TE[t, e] /= temperature
        _affinity(logits_TE[t], scoring)
        _choose(logits_TE[t], bias_2E[image_T[t]], taken_E, index_Tk[t], weight_Tk[t], normalise, scaling)
    first_E, row_P, place_Tk = np.empty(experts + 1, np.int64), np.empty(pairs, np.int64), np.empty_like(index_Tk)
    _sort_pairs(index_Tk, first_E, row_P, place_Tk)

    x_T = address(packed_TD) + step
    x_P = x_T[row_P]
    gate_PI, up_PI = np.empty((pairs, inner), np.float32), np.empty((pairs, inner), np.float32)
    gate_TS, up_TS = np.empty((rows, shared), np.float32), np.empty((rows, shared), np.float32)
    for share in prange(parts):
        lanes, wide = rooms(rows)
        n0, n1 = columns(inner, share, parts)
        for e in range(experts):
            p0, p1 = first_E[e], first_E[e + 1]
            if p0 < p1:
                x, w, s = x_P[p0:p1], w_3E[:, e], s_3E[:, e]
                share_vector(fp4, _FP4, w[0], s[0], inner, hidden, n0, n1, x, gate_PI[p0:p1], lanes, wide)
                share_vector(fp4, _FP4, w[2], s[2], inner, hidden, n0, n1, x, up_PI[p0:p1], lanes, wide)
        n0, n1 = columns(shared, share, parts)
        share_vector(fp8, _FP8, shared_w[0], shared_s[0], shared, hidden, n0, n1, x_T, gate_TS, lanes, wide)
        share_vector(fp8, _FP8, shared_w[2], shared_s[2], shared, hidden, n0, n1, x_T, up_TS, lanes, wide)

    work_W = np.empty(max(inner, shared), np.float32)
    for t in range(rows):
        for slot in range(chosen):
            p = place_Tk[t, slot]
            finite = _activate(gate_PI[p], up_PI[p], weight_Tk[t, slot], limit, native, work_W[:inner], hidden_PI[p])
            finite_T[t] = finite_T[t] and finite
        finite = _activate(gate_TS[t], up_TS[t], _F32(1), limit, native, work_W[:shared], hidden_TS[t])
        finite_T[t] = finite_T[t] and finite

    y_PD, y_TD = np.empty((pairs, hidden), np.float32), np.empty((rows, hidden), np.float32)
    h_P = address(hidden_PI) + np.arange(pairs) * (inner * 4)
    h_T = address(hidden_TS) + np.arange(rows) * (shared * 4)
    for share in prange(parts):
        lanes, wide = rooms(rows)
        n0, n1 = columns(hidden, share, parts)
        for e in range(experts):
            p0, p1 = first_E[e], first_E[e + 1]
            if p0 < p1:
                w, s = w_3E[1, e], s_3E[1, e]
                share_vector(fp4, _FP4, w, s, hidden, inner, n0, n1, h_P[p0:p1], y_PD[p0:p1], lanes, wide)
        share_vector(fp8, _FP8, shared_w[1], shared_s[1], hidden, shared, n0, n1, h_T, y_TD, lanes, wide)
        for t in range(rows):
            _combine(y_PD, place_Tk[t], y_TD[t], n0, n1, native, out_TD[t])


def kernels(path: Path | None = None) -> tuple[Kernel, ...]:
    """What `moe_rows` runs on `path`."""
    return (moe_kernel,) if has_vectors(path) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeRows:
    """A MoE layer as `moe_rows` takes it: addresses of its weights, which `held` keeps in memory."""

    gate: tuple[int, Array]
    weights: tuple[Array, Array, Array, Array]
    sizes: tuple[int, int, int, int]
    settings: tuple[Any, Any, Any, bool]
    hidden: int
    held: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        gate: DenseWeight,
        bias_E: Tensor,
        bias_vl_E: Tensor | None,
        w1: Sequence[Weight],
        w2: Sequence[Weight],
        w3: Sequence[Weight],
        shared: Sequence[Weight] | None,
        *,
        per_token: int,
        scoring: str,
        temperature: float,
        scaling: float,
        normalise: bool,
        limit: float,
    ) -> MoeRows | None:
        """None where the kernel does not read a layer: experts that are not FP4, a shared one that is not FP8 or is not
        there, widths that are no multiple of 32, weights that lie in no memory of their own."""
        if shared is None or not all(type(w) is Fp4Weight and w.addresses for w in (*w1, *w2, *w3)):
            return None
        if not all(type(w) is Fp8Weight and w.addresses for w in shared):
            return None
        (inner, hidden), width = w1[0].shape, shared[0].shape[0]
        gate_ED = gate.tensor.detach()
        if inner % TILE or hidden % TILE or width % TILE or gate_ED.dtype != torch.float32 or scoring not in SCORINGS:
            return None
        gate_ED = gate_ED.contiguous()
        bias_2E = torch.stack((bias_E, bias_E if bias_vl_E is None else bias_vl_E)).float().numpy()
        pairs = np.array([[w.addresses for w in some] for some in (w1, w2, w3)], dtype=np.int64)
        alone = np.array([w.addresses for w in shared], dtype=np.int64)
        split = (np.ascontiguousarray(part) for part in (pairs[..., 0], pairs[..., 1], alone[:, 0], alone[:, 1]))
        w_3E, s_3E, shared_w, shared_s = split
        return cls(
            gate=(gate_ED.data_ptr(), bias_2E),
            weights=(w_3E, s_3E, shared_w, shared_s),
            sizes=(inner, width, per_token, SCORINGS.index(scoring)),
            settings=(_F32(temperature), _F32(scaling), _F32(limit), normalise),
            hidden=hidden,
            held=(gate_ED, w1, w2, w3, shared),
        )


_MARKERS = (FP4.marker, FP8.marker, FP32.marker)
_TEXT = np.zeros(64, np.uint8)


def moe_rows(x_TD: Tensor, layer: MoeRows, image_T: Tensor | None, native: bool) -> Tensor:
    """The sub-layer's output fp32 [T, D] before its last rounding, without gradients.

    Args:
        x_TD: its input, fp32 or bf16.
        layer: from `MoeRows.of`.
        image_T: bool, rows of image spans; None for none.
        native: SPEC 3 numerics.

    Raises:
        FormatError: NaN or Inf in what native quantises.
    """
    refuse_gradients(x_TD)
    x = x_TD.detach().to(torch.float32).contiguous()
    rows = x.shape[0]
    image = _TEXT[:rows] if image_T is None and rows <= len(_TEXT) else np.zeros(rows, np.uint8)
    if image_T is not None:
        image = image_T.to(torch.uint8).contiguous().numpy()
    out, finite = torch.empty_like(x), np.empty(rows, np.bool_)
    inner, shared, chosen, _ = layer.sizes
    room = np.empty(rows * (layer.hidden + chosen * inner + shared), np.float32)
    parts = parts_of(rows * chosen * inner * layer.hidden)
    moe_kernel(
        _MARKERS,
        x.numpy(),
        image,
        layer.gate,
        layer.weights,
        layer.sizes,
        (*layer.settings, native),
        room,
        out.numpy(),
        finite,
        parts,
        tasks=parts,
    )
    if native and not finite.all():
        check_finite(x, E4M3_E8M0_32)
        check_finite(torch.full((1, TILE), torch.nan), E4M3_E8M0_32)  # among the activations
    return out
