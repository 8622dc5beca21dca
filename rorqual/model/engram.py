"""Engram: gated n-gram memory written into the residual stream before a layer's own mixing (SPEC 8)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rorqual.config import LayerRole, ModelConfig
from rorqual.model.rows import Rows
from rorqual.model.run import NOT_YET, Run
from rorqual.model.weights import Scope
from rorqual.ops.dispatch import Regions
from rorqual.ops.reference.norm import mean_square, row_sum
from rorqual.ops.rowwise import by_row, joined

# T rows, S residual copies, D hidden

ROW_TILE = 64
"""Rows matched with their keys, and written, at once: what that needs stays in a cache, whatever the chunk."""


class Engram(nn.Module):
    """Looks up (max_ngram - 1) x heads rows a token, projects them to one key a copy and one value, and gates."""

    def __init__(self, config: ModelConfig, role: LayerRole, scope: Scope) -> None:
        super().__init__()
        assert role.engram_index is not None
        self.column = role.engram_index
        self.copies, self.hidden, self.eps = config.hc_mult, config.hidden_size, config.rms_norm_eps
        self.table = scope.table("embed")
        self.wkv = scope.weight("wkv")
        self.q_weight, self.k_weight = scope.param("q_weight"), scope.param("k_weight")
        self._packed: Any = NOT_YET

    def forward(self, x_TSD: Tensor, rows: Rows, run: Run, name: str) -> Tensor:
        """The stream plus gate x value, in fp32, rounded once; image-span positions get nothing."""
        assert rows.engram_TLE is not None
        # Where there is a kernel for the whole, every short row takes it, whatever stands beside them (DESIGN 12).
        regions, short = run.regions, rows.short_rows
        if regions is None or not short or self._packed_for(regions) is None:
            return self._by_op(x_TSD, rows, run, name)
        image = None if rows.image_T is None else rows.image_T[:short]
        index, few = rows.engram_TLE[:short, self.column], x_TSD if short == len(rows) else x_TSD[:short]
        found = regions.engram(few, self._packed, index, image, run.numerics.native)
        if found is None:  # what is refused, by name
            return self._by_op(x_TSD, rows, run, name)
        if short == len(rows):
            return run.numerics.round(found)
        return torch.cat((run.numerics.round(found), self._by_op(x_TSD[short:], rows.without_short(), run, name)))

    def _packed_for(self, regions: Regions) -> Any:
        """The layer as the region takes it; None where there is none for it."""
        if self._packed is NOT_YET:
            parts = (self.table.packed, self.wkv, self.q_weight, self.k_weight)
            self._packed = regions.pack_engram(*parts, eps=self.eps)
        return self._packed

    def _by_op(self, x_TSD: Tensor, rows: Rows, run: Run, name: str) -> Tensor:
        assert rows.engram_TLE is not None
        memory = run.numerics.round(self.table.rows(rows.engram_TLE[:, self.column]).flatten(1))
        projected = run.linear(memory, self.wkv, rows).unflatten(-1, (self.copies + 1, self.hidden))
        tiles = [slice(first, first + ROW_TILE) for first in range(0, len(rows), ROW_TILE)]
        z = joined([self._match(x_TSD[tile].float(), projected[tile, :-1].float()) for tile in tiles])
        gate = by_row(torch.sigmoid, z.sign() * z.abs().clamp_min(1e-6).sqrt(), rows.short_rows)
        if rows.image_T is not None:
            gate = gate.masked_fill(rows.image_T[:, None], 0.0)
        gate = run.record(f"{name}.engram.gate", gate, rows)
        value = projected[:, -1:]
        written = (x_TSD[tile].float() + gate[tile, :, None] * value[tile].float() for tile in tiles)
        return joined([run.numerics.round(part) for part in written])

    def _match(self, x_TSD: Tensor, key_TSD: Tensor) -> Tensor:
        """How well the streams fit their keys, both normed: z [T, S]."""
        z = row_sum(x_TSD * (self.q_weight * self.k_weight) * key_TSD)
        return z * (self._rstd(x_TSD) * self._rstd(key_TSD)) * float(self.hidden**-0.5)

    def _rstd(self, x: Tensor) -> Tensor:
        return torch.rsqrt(mean_square(x) + self.eps)
