"""When two aligned tensors are equal enough, element by element.

fp32: |a - b| <= 1e-4 + 1e-4 |b|, integers exact (`compare.excess`). native: relative RMS error and, for a single
element or row, a bf16 step plus a few times that RMS; up to 1 % of a cache's elements may stand on another code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rorqual.analysis.compare import CACHE_BYTES, FP32_MARGIN, NATIVE_BYTES, NATIVE_MARGIN, NATIVE_RMS, excess
from rorqual.analysis.diff_order import QUANTISED, parse

BF16_STEP = 2.0**-7
"""The widest distance of neighbouring bf16 numbers, relative to the smaller."""
ELEMENT_SIGMAS = 4.0
"""A single element may be this many times the RMS bound off; noise at the bound goes no further but in 1 of 16,000."""
ROW_SIGMAS = 2.0
NUMERICS = ("fp32", "native")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """numerics: "fp32" or "native". noise: relative RMS noise by tensor name, as a golden's README.json states it."""

    numerics: str
    noise: Mapping[str, float] = field(default_factory=dict)

    @property
    def margin(self) -> float:
        """A selection made by less than this is a tie."""
        return NATIVE_MARGIN if self.numerics == "native" else FP32_MARGIN

    def wrong(self, name: str, ours: Tensor, theirs: Tensor) -> Tensor:
        """bool, shaped as the tensors: elements out of tolerance.

        ours, theirs: float64 or int64 of one shape, rows first, at least one dimension.
        """
        if not ours.is_floating_point():
            unequal = ours != theirs
            few = self.numerics == "native" and CACHE_BYTES.search(name) and ours.numel()
            if few and float(unequal.float().mean()) <= 1 - NATIVE_BYTES:
                return torch.zeros_like(unequal)
            return unequal
        if self.numerics == "fp32":
            return excess(ours, theirs) > 1
        return self._native(name, ours, theirs)

    def _native(self, name: str, ours: Tensor, theirs: Tensor) -> Tensor:
        bound = max(2 * self.noise.get(name, 0.0), NATIVE_RMS)
        finite = ours.isfinite() & theirs.isfinite()
        gap = torch.where(finite, ours - theirs, 0.0).abs()
        size = torch.where(finite, theirs, 0.0)
        whole = float(size.square().mean().sqrt()) if size.numel() else 0.0
        # A row of tiny values beside large ones is held to a tenth of the tensor's own size.
        row = rows_of(size).square().mean(1).sqrt().clamp(min=max(whole / 10, 1e-30))
        spread = row.reshape(-1, *[1] * (ours.dim() - 1))
        wrong = gap > BF16_STEP * size.abs() + ELEMENT_SIGMAS * bound * spread
        bad_row = rows_of(gap).square().mean(1).sqrt() > ROW_SIGMAS * bound * row
        wrong |= (gap > bound * spread) & bad_row.reshape(spread.shape)
        if whole and float(gap.square().mean().sqrt()) > bound * whole:
            wrong |= gap > bound * whole
        if parse(name).last in QUANTISED and float(wrong.float().mean()) <= 1 - NATIVE_BYTES:
            wrong = torch.zeros_like(wrong)
        return wrong | (~finite & (ours != theirs))

    def error(self, name: str, ours: Tensor, theirs: Tensor) -> float:
        """The whole error: worst |a - b| / (1 + |b|) in fp32, relative RMS in native, unequal elements of integers."""
        if not ours.numel():
            return 0.0
        if not ours.is_floating_point():
            return float((ours != theirs).sum())
        gap = torch.where(ours == theirs, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        if self.numerics == "fp32":
            return float((gap / (1 + theirs.abs())).nan_to_num(nan=torch.inf, posinf=torch.inf).max())
        size = torch.where(theirs.isfinite(), theirs, 0.0).square().mean().sqrt()
        return float(gap.square().mean().sqrt() / (size if size else 1.0))


def rows_of(x: Tensor) -> Tensor:
    """[rows, all else]: the first dimension kept, the rest flattened; a vector becomes one column."""
    return x.reshape(x.shape[0], -1) if x.numel() else x.new_zeros(x.shape[0], 1)
