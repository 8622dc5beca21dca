"""What a layer needs besides its weights: ops, numerics, the KV store, the tap, and the typed carry between layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rorqual.config import LayerRole
from rorqual.formats.weights import Weight
from rorqual.model.kv import KVStore
from rorqual.model.numerics import Numerics
from rorqual.model.rows import Rows
from rorqual.model.short import ShortLayers
from rorqual.model.tap import Tap
from rorqual.ops.dispatch import Ops, Regions

NOT_YET = object()
"""In the place of a layer's weights as a fused region takes them, until first use."""


@dataclass(slots=True)
class Carry:
    """What one layer hands to later ones, for one forward (DESIGN 3).

    topk_TK: int64 groups selected by the nearest index source, -1 padded. candidates_TB: int64 block ids kept by the
    candidate source, -1 padded. hidden: layer id -> mean over the copies of the stream entering it (DSpark targets).
    """

    topk_TK: Tensor | None = None
    candidates_TB: Tensor | None = None
    hidden: dict[int, Tensor] = field(default_factory=dict)


class Hooks(Protocol):
    """What training watches, and the one choice it makes its own way; an inference run has none."""

    def select(self, role: LayerRole, q_TID: Tensor, w_TI: Tensor, rows: Rows, carry: Carry) -> Tensor:
        """Top-K of an index source, int64 [T, K], from its rotated queries and head weights."""

    def routed(self, name: str, scores_TE: Tensor, index_Tk: Tensor, rows: Rows) -> None:
        """A MoE layer's unbiased scores and its choice."""


@dataclass(slots=True, kw_only=True)
class Run:
    """One forward's constants. Nothing here outlives it."""

    ops: Ops
    numerics: Numerics
    kv: KVStore
    tap: Tap
    stale_decode: bool = False
    hooks: Hooks | None = None
    short: ShortLayers | None = None
    """None where every layer goes region by region, or op by op."""

    @property
    def regions(self) -> Regions | None:
        """Fused regions; None where there are none, or where somebody asks for what happens inside a layer."""
        return None if self.tap.active or self.hooks is not None else self.ops.regions

    def linear(self, x_TK: Tensor, weight: Weight, rows: Rows) -> Tensor:
        """x W^T in the activation dtype: one rounding of the output in native, and of a quantised weight's input."""
        return self.numerics.round(self.ops.linear(x_TK, weight, rows.short_rows, self.numerics.native))

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension, rounded once."""
        flat = x.reshape(-1, x.shape[-1])
        return self.ops.rms_norm(flat, weight, eps, self.numerics.native).view(x.shape)

    def record(self, name: str, value: Tensor, rows: Rows) -> Tensor:
        """Tap a tensor whose rows are the run's rows."""
        tap = self.tap
        return tap(name, value, rows.first) if tap.active else value


def padded(index: Tensor, width: int) -> Tensor:
    """index [T, k] with -1 columns appended up to `width`."""
    if index.shape[1] == width:
        return index
    fill = index.new_full((index.shape[0], width - index.shape[1]), -1)
    return torch.cat((index, fill), dim=1)
