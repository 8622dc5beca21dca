"""Numba twin of `rorqual.ops.reference.experts`: (row, slot) pairs sorted by expert, each expert's weights read once.

Rows that must not depend on their neighbours go through the row kernel of `linear`; so do other rows of an expert that
few rows chose. An expert with many rows expands its weights in tiles for a GEMM. Long calls are cut into passes of rows
and passes into batches of experts, so that what is held at once has a bound.

T rows, k slots a row, P pairs, J experts that were chosen, I expert width, D inputs and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rorqual.formats.codec import check_finite
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import TILE, Weight
from rorqual.ops.cpu import Path
from rorqual.ops.fast.kernel import kernel, refuse_gradients
from rorqual.ops.fast.linear import (
    GEMM_ROWS,
    kind_of,
    multiply_rows,
    multiply_tiles,
    pack_rows,
    parts_of,
)
from rorqual.ops.fast.row_kernels import pack_row, part, round_bf16
from rorqual.ops.fast.row_vectors import FP32, Array

PASS_BYTES = 256 << 20
"""Outputs of pairs held at once, before their sum."""
BATCH_BYTES = 64 << 20
"""Gates, ups and hidden values held at once, unless one expert alone needs more."""

_F32 = np.float32


@part
def activated(gate: Any, up: Any, weight: Any, limit: Any, native: Any) -> Any:
    """silu(min(gate, limit)) * clamp(up, +-limit) * weight, rounded where native does; limit 0 clamps nothing."""
    if native:
        gate, up = round_bf16(gate), round_bf16(up)
    if limit > 0:
        gate = limit if gate > limit else gate
        up = limit if up > limit else (-limit if up < -limit else up)
    value = gate / (_F32(1) + math.exp(-gate)) * up * weight
    return round_bf16(value) if native else value


@kernel(
    "void(float32[:, ::1], float32[::1], float32, boolean, boolean, boolean, float32[:, ::1], boolean[::1], int64)",
    parallel=True,
)
def _activate(
    gate_up_QI: Any,
    weight_P: Any,
    limit: Any,
    native: Any,
    paired: Any,
    quantise: Any,
    hidden_PI: Any,
    finite_P: Any,
    parts: Any,
) -> None:
    """silu(gate) * up * weight, packed for w2; rows of gate_up are P gates, then P ups."""
    pairs = weight_P.shape[0]
    for share in prange(parts):
        row_I = np.empty(gate_up_QI.shape[1], np.float32)
        for p in range(pairs * share // parts, pairs * (share + 1) // parts):
            for i in range(row_I.shape[0]):
                row_I[i] = activated(gate_up_QI[p, i], gate_up_QI[pairs + p, i], weight_P[p], limit, native)
            finite_P[p] = pack_row(row_I, paired, quantise, hidden_PI[p])


@kernel("void(float32[:, ::1], int64[:, ::1], boolean, float32[:, ::1], int64)", parallel=True)
def _combine(y_PD: Any, pair_Tk: Any, native: Any, out_TD: Any, parts: Any) -> None:
    """out[t] = sum over slots, from the first, of y[pair_Tk[t, slot]]."""
    for share in prange(parts):
        for t in range(out_TD.shape[0] * share // parts, out_TD.shape[0] * (share + 1) // parts):
            for i in range(out_TD.shape[1]):
                total = _F32(0)
                for slot in range(pair_Tk.shape[1]):
                    y = y_PD[pair_Tk[t, slot], i]
                    total += round_bf16(y) if native else y
                out_TD[t, i] = total


KERNELS = (_activate, _combine)


def experts(
    x_TK: Tensor,
    expert_index_Tk: Tensor,
    routing_weight_Tk: Tensor,
    w1: Sequence[Weight],
    w2: Sequence[Weight],
    w3: Sequence[Weight],
    limit: float,
    short_rows: int,
    native: bool,
    *,
    path: Path | None = None,
) -> Tensor:
    """As the plain `experts`, without gradients. All experts have one kind and shape. `path` as in `linear`."""
    refuse_gradients(x_TK, routing_weight_Tk)
    layer = _Layer(w1=w1, w2=w2, w3=w3, limit=limit, native=native, path=path)
    x = pack_rows(x_TK, kind_of(w1[0]), native and kind_of(w1[0]).scale_rows > 0)
    index_Tk = expert_index_Tk.contiguous().numpy()
    weight_Tk = routing_weight_Tk.detach().to(torch.float32).contiguous().numpy()
    out_TD = torch.empty(x_TK.shape[0], w2[0].shape[0])
    for rows, short in _passes(x_TK.shape[0], short_rows, 4 * index_Tk.shape[1] * out_TD.shape[1]):
        layer.run(x[rows], index_Tk[rows], weight_Tk[rows], out_TD[rows].numpy(), None if short else GEMM_ROWS)
    return out_TD


class _Sorted(NamedTuple):
    """Pairs sorted by expert: experts[j] has pairs [first[j], last[j])."""

    experts: Array
    first: Array
    last: Array

    def batches(self, most: int) -> Iterator[_Sorted]:
        """Runs of experts with at most so many pairs together, or one expert with more."""
        start = 0
        while start < len(self.experts):
            end = max(start + 1, int(np.searchsorted(self.last, self.first[start] + most, side="right")))
            yield _Sorted(*(field[start:end] for field in self))
            start = end


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    w1: Sequence[Weight]
    w2: Sequence[Weight]
    w3: Sequence[Weight]
    limit: float
    native: bool
    path: Path | None

    def run(self, x: Array, index_Tk: Array, weight_Tk: Array, out_TD: Array, gemm_rows: int | None) -> None:
        """One pass. Experts with at least `gemm_rows` pairs use a GEMM; None: no expert does."""
        order = index_Tk.reshape(-1).argsort(kind="stable")
        chosen, first = np.unique(index_Tk.reshape(-1)[order], return_index=True)
        assert len(chosen) == 0 or (chosen[0] >= 0 and chosen[-1] < len(self.w1)), "expert indices are out of range"
        pairs = _Sorted(chosen, first, np.append(first[1:], len(order)))
        row_P, weight_P = order // index_Tk.shape[1], weight_Tk.reshape(-1)[order]
        y_PD = np.empty((len(order), out_TD.shape[1]), np.float32)
        inner = self.w1[0].shape[0]
        for batch in pairs.batches(max(1, BATCH_BYTES // (12 * inner))):
            p0, p1 = batch.first[0], batch.last[-1]
            batch = batch._replace(first=batch.first - p0, last=batch.last - p0)
            self._multiply_batch(batch, x, row_P[p0:p1], weight_P[p0:p1], y_PD[p0:p1], gemm_rows)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        parts = parts_of(y_PD.size)
        _combine(y_PD, place.reshape(index_Tk.shape), self.native, out_TD, parts, tasks=parts)

    def _multiply_batch(
        self, batch: _Sorted, x: Array, row_P: Array, weight_P: Array, y_PD: Array, gemm_rows: int | None
    ) -> None:
        pairs = len(row_P)
        gate_up = np.empty((2 * pairs, self.w1[0].shape[0]), np.float32)
        both = _Sorted(
            np.append(batch.experts, batch.experts + len(self.w1)),
            np.append(batch.first, batch.first + pairs),
            np.append(batch.last, batch.last + pairs),
        )
        self._multiply([*self.w1, *self.w3], both, x, np.append(row_P, row_P), gate_up, gemm_rows)
        self._multiply(self.w2, batch, self._activate(gate_up, weight_P), np.arange(pairs), y_PD, gemm_rows)

    def _multiply(
        self, weights: Sequence[Weight], pairs: _Sorted, x: Array, row_P: Array, y: Array, gemm_rows: int | None
    ) -> None:
        many = pairs.last - pairs.first >= gemm_rows if gemm_rows else np.zeros(len(pairs.first), np.bool_)
        for expert, first, last in zip(*(field[many] for field in pairs), strict=True):
            rows = torch.from_numpy(x[row_P[first:last]])
            multiply_tiles(weights[expert], rows, torch.from_numpy(y[first:last]), self.path)
        experts, first_J, last_J = (field[~many] for field in pairs)
        if len(experts):
            multiply_rows([weights[expert] for expert in experts], x, row_P, first_J, last_J, y, self.path)

    def _activate(self, gate_up: Array, weight_P: Array) -> Array:
        kind, (pairs, inner) = kind_of(self.w2[0]), (len(weight_P), gate_up.shape[1])
        hidden, finite = np.zeros((pairs, inner + -inner % TILE), np.float32), np.ones(pairs, np.bool_)
        quantise, parts = self.native and kind.scale_rows > 0, parts_of(gate_up.size)
        form = _F32(self.limit), self.native, kind is not FP32, quantise
        _activate(gate_up, weight_P, *form, hidden, finite, parts, tasks=parts)
        if not finite.all():
            check_finite(torch.from_numpy(hidden[~finite]), E4M3_E8M0_32)
        return hidden


def _passes(rows: int, short_rows: int, row_bytes: int) -> Iterator[tuple[slice, bool]]:
    """Cuts of [0, rows), and whether all of a cut's rows are short ones."""
    most, short_rows = max(1, PASS_BYTES // row_bytes), min(short_rows, rows)
    for start, end, short in ((0, short_rows, True), (short_rows, rows, False)):
        for first in range(start, end, most):
            yield slice(first, min(first + most, end)), short
