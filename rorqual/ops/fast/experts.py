"""Numba twin of `rorqual.ops.reference.experts`: (row, slot) pairs sorted by expert, each expert's weights read once.

Rows that must not depend on their neighbours go through the row kernel of `linear`; so do other rows of an expert that
few rows chose. An expert with many rows expands its weights in tiles for a GEMM. Long calls are cut into passes of rows
and passes into batches of experts, so that what is held at once has a bound.

T rows, k slots a row, P pairs, J experts that were chosen, I expert width, D inputs and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
from rorqual.ops.fast import expert_panels
from rorqual.ops.fast.expert_panels import hidden_panels
from rorqual.ops.fast.kernel import Kernel, inlined, kernel, refuse_gradients
from rorqual.ops.fast.linear import (
    GEMM_ROWS,
    addresses_of,
    form_of,
    has_vectors,
    in_panels,
    kind_of,
    multiply_rows,
    multiply_tiles,
    pack_rows,
    parts_of,
)
from rorqual.ops.fast.panels import multiply_panels, pack_panels, places
from rorqual.ops.fast.row_kernels import pack_row, part, round_bf16
from rorqual.ops.fast.row_vectors import FP32, Array
from rorqual.ops.fast.vectors import LANES, add, load, splat, store
from rorqual.ops.fast.vectors import round_bf16 as round_vector

PASS_BYTES = 256 << 20
"""Outputs of pairs held at once, before their sum."""
BATCH_BYTES = 64 << 20
"""What pairs hold at once besides their outputs, unless one expert alone needs more."""

PANEL_ROWS = 12
"""From this many rows of an expert on, panels beat the row kernel."""

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


@inlined
def _sum_slots(y: Any, pair_Tk: Any, shared: Any, t: Any, at: Any, width: Any, native: Any) -> Any:
    """Sixteen channels of one row's sum."""
    total = splat(_F32(0))
    for slot in range(pair_Tk.shape[1]):
        value = load(y, pair_Tk[t, slot] * width + at)
        total = add(total, round_vector(value) if native else value)
    if shared.size:
        value = load(shared, t * width + at)
        total = add(total, round_vector(value) if native else value)
    return total


@kernel("void(float32[::1], int64[:, ::1], float32[::1], boolean, float32[::1], int64)", parallel=True)
def _combine(y: Any, pair_Tk: Any, shared: Any, native: Any, out: Any, parts: Any) -> None:
    """out[t] = sum over slots, from the first, of y[pair_Tk[t, slot]], then shared[t], where there is one."""
    rows = pair_Tk.shape[0]
    width = out.size // rows
    for share in prange(parts):
        for t in range(rows * share // parts, rows * (share + 1) // parts):
            for i in range(0, width // LANES * LANES, LANES):
                store(out, t * width + i, _sum_slots(y, pair_Tk, shared, t, i, width, native))
            for i in range(width // LANES * LANES, width):
                total = _F32(0)
                for slot in range(pair_Tk.shape[1]):
                    value = y[pair_Tk[t, slot] * width + i]
                    total += round_bf16(value) if native else value
                if shared.size:
                    value = shared[t * width + i]
                    total += round_bf16(value) if native else value
                out[t * width + i] = total


def kernels(path: Path) -> tuple[Kernel, ...]:
    """What `experts` runs on `path`, beside those of `linear`."""
    return (_activate, _combine, *(expert_panels.KERNELS if has_vectors(path) else ()))


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
    shared: Sequence[Weight] | None = None,
    *,
    path: Path | None = None,
) -> Tensor:
    """As the plain `experts`, without gradients. All experts have one kind and shape, which the shared one need not
    have. `path` as in `linear`."""
    refuse_gradients(x_TK, routing_weight_Tk)
    layer = _Layer(w1=w1, w2=w2, w3=w3, limit=limit, native=native, path=path)
    every = None
    if shared is not None:
        gate, down, up = ([weight] for weight in shared)
        every = _Layer(w1=gate, w2=down, w3=up, limit=limit, native=native, path=path)
    x_TK = x_TK.detach().to(torch.float32).contiguous()
    index_Tk = expert_index_Tk.contiguous().numpy()
    weight_Tk = routing_weight_Tk.detach().to(torch.float32).contiguous().numpy()
    out_TD = torch.empty(x_TK.shape[0], w2[0].shape[0])
    held = index_Tk.shape[1] + (every is not None)
    for rows, short in _passes(x_TK.shape[0], short_rows, 4 * held * out_TD.shape[1]):
        y_PD, pair_Tk = layer.outputs(x_TK[rows], index_Tk[rows], weight_Tk[rows], short)
        also = _NONE if every is None else every.of_all(x_TK[rows], short).reshape(-1)
        parts = parts_of(y_PD.size)
        _combine(y_PD.reshape(-1), pair_Tk, also, native, out_TD[rows].view(-1).numpy(), parts, tasks=parts)
    return out_TD


_NONE = np.empty(0, np.float32)


class _Sorted(NamedTuple):
    """Pairs sorted by expert: experts[j] has pairs [first[j], last[j])."""

    experts: Array
    first: Array
    last: Array

    def cut(self, experts: slice) -> _Sorted:
        """Some of the experts, with the pairs they have."""
        return _Sorted(*(field[experts] for field in self))

    def batches(self, most: int) -> Iterator[_Sorted]:
        """Runs of experts with at most so many pairs together, or one expert with more."""
        start = 0
        while start < len(self.experts):
            end = max(start + 1, int(np.searchsorted(self.last, self.first[start] + most, side="right")))
            yield self.cut(slice(start, end))
            start = end


_Batch = tuple[_Sorted, Array, Array, Array]
_Multiply = Callable[[Sequence[Weight], _Sorted, Array, Array, Array], None]
"""(weights, pairs, x, row_P, y): the products of each expert's weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    w1: Sequence[Weight]
    w2: Sequence[Weight]
    w3: Sequence[Weight]
    limit: float
    native: bool
    path: Path | None

    def of_all(self, x_TK: Tensor, short: bool) -> Array:
        """Outputs [T, D] of the one expert there is, which every row takes with a weight of one."""
        rows = len(x_TK)
        y_TD, _ = self.outputs(x_TK, np.zeros((rows, 1), np.int64), np.ones((rows, 1), np.float32), short)
        return y_TD

    def outputs(self, x_TK: Tensor, index_Tk: Array, weight_Tk: Array, short: bool) -> tuple[Array, Array]:
        """One pass: outputs of all pairs [P, D], and which of them is each row's and slot's [T, k].

        short: no expert takes its rows together.
        """
        index, count = index_Tk.reshape(-1), len(self.w1)
        assert not len(index) or (index.min() >= 0 and index.max() < count), "expert indices are out of range"
        panels = not short and self._fit_panels()
        most = len(index) + 1 if short else PANEL_ROWS if panels else GEMM_ROWS
        # Experts with few rows stand first.
        key = index + (np.bincount(index, minlength=count) >= most)[index] * count
        order = key.argsort(kind="stable")
        chosen, first = np.unique(key[order], return_index=True)
        pairs = _Sorted(chosen % count, first, np.append(first[1:], len(order)))
        row_P, weight_P = order // index_Tk.shape[1], weight_Tk.reshape(-1)[order]
        y_PD = np.empty((len(order), self.w2[0].shape[0]), np.float32)
        few = int(np.searchsorted(chosen, count))
        for some, run in (
            (pairs.cut(slice(few)), self._by_rows),
            (pairs.cut(slice(few, None)), self._in_panels if panels else self._by_tiles),
        ):
            if len(some.experts):
                run(some, x_TK, row_P, weight_P, y_PD)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return y_PD, place.reshape(index_Tk.shape)

    def _fit_panels(self) -> bool:
        whole = self.w1[0].shape[0] % LANES == 0
        return whole and in_panels([*self.w1, *self.w2, *self.w3], self.path)

    def _batches(self, pairs: _Sorted, row_P: Array, weight_P: Array, y_PD: Array) -> Iterator[_Batch]:
        inner, width = self.w1[0].shape
        floats = 3 * inner + width  # a pair's gate, up and hidden; its row of x, where panels hold a copy
        for batch in pairs.batches(max(1, BATCH_BYTES // (4 * floats))):
            p0, p1 = batch.first[0], batch.last[-1]
            batch = batch._replace(first=batch.first - p0, last=batch.last - p0)
            yield batch, row_P[p0:p1], weight_P[p0:p1], y_PD[p0:p1]

    def _by_rows(self, pairs: _Sorted, x_TK: Tensor, row_P: Array, weight_P: Array, y_PD: Array) -> None:
        """Each expert's rows through the row kernel."""

        def multiply(weights: Sequence[Weight], pairs: _Sorted, x: Array, row_P: Array, y: Array) -> None:
            multiply_rows([weights[e] for e in pairs.experts], x, row_P, pairs.first, pairs.last, y, self.path)

        self._op_by_op(multiply, pairs, x_TK, row_P, weight_P, y_PD)

    def _by_tiles(self, pairs: _Sorted, x_TK: Tensor, row_P: Array, weight_P: Array, y_PD: Array) -> None:
        """A GEMM for each weight, expanded in tiles."""

        def multiply(weights: Sequence[Weight], pairs: _Sorted, x: Array, row_P: Array, y: Array) -> None:
            for expert, first, last in zip(*pairs, strict=True):
                rows = torch.from_numpy(x[row_P[first:last]])
                multiply_tiles(weights[expert], rows, torch.from_numpy(y[first:last]), self.path)

        self._op_by_op(multiply, pairs, x_TK, row_P, weight_P, y_PD)

    def _op_by_op(
        self, multiply: _Multiply, pairs: _Sorted, x_TK: Tensor, row_P: Array, weight_P: Array, y_PD: Array
    ) -> None:
        x = pack_rows(x_TK, kind_of(self.w1[0]), self._quantises(self.w1))
        for batch, row_B, weight_B, y_BD in self._batches(pairs, row_P, weight_P, y_PD):
            count = len(row_B)
            gate_up = np.empty((2 * count, self.w1[0].shape[0]), np.float32)
            both = _Sorted(
                np.append(batch.experts, batch.experts + len(self.w1)),
                np.append(batch.first, batch.first + count),
                np.append(batch.last, batch.last + count),
            )
            multiply([*self.w1, *self.w3], both, x, np.append(row_B, row_B), gate_up)
            multiply(self.w2, batch, self._activate(gate_up, weight_B), np.arange(count), y_BD)

    def _in_panels(self, pairs: _Sorted, x_TK: Tensor, row_P: Array, weight_P: Array, y_PD: Array) -> None:
        """All experts in two kernels; where w2 takes quantised values, they are made in between, row by row."""
        kind, after, quantise = kind_of(self.w1[0]), kind_of(self.w2[0]), self._quantises(self.w1)
        x = pack_rows(x_TK, kind, True) if quantise else x_TK.numpy()
        for batch, row_B, weight_B, y_BD in self._batches(pairs, row_P, weight_P, y_PD):
            w1, w2, w3 = ([weights[e] for e in batch.experts] for weights in (self.w1, self.w2, self.w3))
            spans, parts = (batch.first, batch.last), parts_of(len(row_B) * w1[0].shape[0] * w1[0].shape[1])
            panels = pack_panels(x, row_B, *spans, kind is not FP32 and not quantise, parts)
            if quantise:
                gate_up = np.empty((2 * len(row_B), w1[0].shape[0]), np.float32)
                for weights, y in ((w1, gate_up[: len(row_B)]), (w3, gate_up[len(row_B) :])):
                    multiply_panels(form_of(kind), addresses_of(weights), w1[0].shape, *spans, panels, y, parts)
                hidden = pack_panels(self._activate(gate_up, weight_B), np.arange(len(row_B)), *spans, False, parts)
            else:
                weight_V = weight_B[places(*spans)[1]]
                form = self.limit, self.native, after is not FP32
                gates, ups = addresses_of(w1), addresses_of(w3)
                hidden = hidden_panels(form_of(kind), gates, ups, w1[0].shape, panels, weight_V, *form, parts)
            multiply_panels(form_of(after), addresses_of(w2), w2[0].shape, *spans, hidden, y_BD, parts)

    def _quantises(self, weights: Sequence[Weight]) -> bool:
        return self.native and kind_of(weights[0]).scale_rows > 0

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
