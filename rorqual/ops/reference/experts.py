"""Routed experts: each row's weighted sum over its chosen experts (SPEC 7), in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rorqual.formats.weights import Weight
from rorqual.ops.reference.linear import linear

# T rows, K inputs and outputs, I expert width, k experts a row, P (row, slot) pairs


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
) -> Tensor:
    """sum over slots of w2(silu(min(g, limit)) * clamp(u, +-limit) * routing weight), g = w1 x, u = w3 x; fp32 [T, K].

    Slots are added in the order they stand in. The first `short_rows` rows are computed one by one (their bits depend
    on nothing else); the rest are grouped by expert. Native rounds g, u, the product and each expert's output to bf16
    (SPEC 3); the caller rounds the sum.

    Args:
        x_TK: activations, fp32 or bf16.
        expert_index_Tk: int64, indices into w1, w2, w3.
        routing_weight_Tk: fp32.
        w1: gate projections [I, K], one an expert.
        w2: down projections [K, I].
        w3: up projections [I, K].
        limit: 0 for no clamp.
        short_rows: leading rows whose bits must not depend on the others.
        native: SPEC 3 numerics.
        shared: w1, w2 and w3 of an expert that every row takes, with a weight of one, added after the others.
    """
    mlp = _ExpertMlp(w1=w1, w2=w2, w3=w3, limit=limit, native=native)
    rows = [
        _one_row(mlp, x_TK[t : t + 1], expert_index_Tk[t].tolist(), routing_weight_Tk[t : t + 1])
        for t in range(min(short_rows, x_TK.shape[0]))
    ]
    if x_TK.shape[0] > short_rows or not rows:
        rows.append(_grouped_rows(mlp, x_TK[short_rows:], expert_index_Tk[short_rows:], routing_weight_Tk[short_rows:]))
    total_TK = torch.cat(rows)
    if shared is None:
        return total_TK
    count, (gate, down, up) = x_TK.shape[0], shared
    all_T1 = expert_index_Tk.new_zeros(count, 1), routing_weight_Tk.new_ones(count, 1)
    return total_TK + experts(x_TK, *all_T1, [gate], [down], [up], limit, short_rows, native)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, +-limit); no clamp when the limit is 0."""
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


@dataclass(frozen=True, kw_only=True, slots=True)
class _ExpertMlp:
    w1: Sequence[Weight]
    w2: Sequence[Weight]
    w3: Sequence[Weight]
    limit: float
    native: bool

    def __call__(self, x_TK: Tensor, expert: int, weight_T1: Tensor, short_rows: int) -> Tensor:
        assert 0 <= expert < len(self.w1), "expert indices are out of range"
        gate_TI = self._round(linear(x_TK, self.w1[expert], short_rows, self.native))
        up_TI = self._round(linear(x_TK, self.w3[expert], short_rows, self.native))
        hidden_TI = self._round(swiglu(gate_TI, up_TI, self.limit) * weight_T1)
        return self._round(linear(hidden_TI, self.w2[expert], short_rows, self.native))

    def _round(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).float() if self.native else values


def _one_row(mlp: _ExpertMlp, x_1K: Tensor, chosen: list[int], weight_1k: Tensor) -> Tensor:
    # Fresh tensors of one shape: elementwise kernels, too, may treat a tail differently from a full vector.
    total = x_1K.new_zeros(1, mlp.w2[0].shape[0], dtype=torch.float32)
    for slot, expert in enumerate(chosen):
        total = total + mlp(x_1K.clone(), expert, weight_1k[:, slot : slot + 1], 1)
    return total


def _grouped_rows(mlp: _ExpertMlp, x_TK: Tensor, expert_index_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
    slots = expert_index_Tk.shape[1]
    by_expert_P = expert_index_Tk.flatten().argsort(stable=True)
    row_P = by_expert_P // slots
    weight_P1 = weight_Tk.flatten()[by_expert_P, None]
    chosen, counts = expert_index_Tk.unique(return_counts=True)
    outputs, start = [x_TK.new_zeros(0, mlp.w2[0].shape[0], dtype=torch.float32)], 0
    for expert, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        pairs = slice(start, start + count)
        outputs.append(mlp(x_TK[row_P[pairs]], expert, weight_P1[pairs], 0))
        start += count
    y_PK = torch.cat(outputs)[by_expert_P.argsort()]
    total = y_PK.new_zeros(x_TK.shape[0], y_PK.shape[1])
    for slot in range(slots):
        total = total + y_PK[slot::slots]
    return total
