"""Rotary positions: adjacent pairs as complex numbers on the trailing channels, with or without YaRN (SPEC 4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rorqual.config import ModelConfig
from rorqual.ops.rowwise import by_row

# T rows, D rotary channels, C channels of a head


def frequencies(config: ModelConfig, compressed: bool) -> Tensor:
    """fp32 [D / 2]. `compressed`: the layer reads a global cache, and *everything* in it rotates by
    `compress_rope_theta` with YaRN; otherwise `rope_theta` and no YaRN."""
    width = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    freqs = 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    scaling = config.rope_scaling
    if not compressed or scaling is None:
        return freqs
    low, high = yarn_range(width, theta, scaling.original_max_position_embeddings, scaling.beta_fast, scaling.beta_slow)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    weight = ramp.clamp(0, 1)
    return freqs * (1 - weight) + freqs / scaling.factor * weight


def yarn_range(width: int, theta: float, original: int, beta_fast: float, beta_slow: float) -> tuple[int, int]:
    """First and last frequency of the YaRN ramp.

    >>> yarn_range(64, 160000, 65536, 32, 1)   # the release
    (15, 25)
    """

    def index(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(index(beta_fast)), math.ceil(index(beta_slow))
    return max(0, min(low, width - 1)), max(0, min(high, width - 1))


class Rotary:
    """cos and sin [T, D/2] at given positions, for both kinds of layer, computed once a step and shared by layers."""

    def __init__(self, freqs: tuple[Tensor, Tensor], positions_T: Tensor, short_rows: int) -> None:
        self._freqs = freqs
        self._short_rows = short_rows
        self._positions = positions_T.to(torch.float32)
        self._cache: dict[bool, tuple[Tensor, Tensor]] = {}
        self._groups: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[Tensor, Tensor]] = {}

    def at_groups(self, ratio: int, spans: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
        """cos and sin [G, D/2] of a compressed layer at the first position of every group of the spans [first, end).

        Each row is computed alone, and once for all sources of a ratio.
        """
        known = self._groups.get((ratio, spans))
        if known is None:
            known = self._groups[ratio, spans] = self._of_groups(ratio, [(a, b) for a, b in spans if a < b])
        return known

    def _of_groups(self, ratio: int, spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        if not spans:
            cos, sin = self.at(True)
            return cos[:0], sin[:0]
        device = self._positions.device
        positions = torch.cat([torch.arange(first * ratio, end * ratio, ratio, device=device) for first, end in spans])
        return Rotary(self._freqs, positions, len(positions)).at(True)

    def without_short(self) -> Rotary:
        """Of the rows after the short ones; angles that are there already are kept."""
        return self._cut(slice(self._short_rows, None), 0)

    def only_short(self) -> Rotary:
        """Of the short rows."""
        return self._cut(slice(self._short_rows), self._short_rows)

    def _cut(self, cut: slice, short_rows: int) -> Rotary:
        made = Rotary(self._freqs, self._positions[cut], short_rows)
        made._cache = {kind: (cos[cut], sin[cut]) for kind, (cos, sin) in self._cache.items()}
        return made

    def at(self, compressed: bool) -> tuple[Tensor, Tensor]:
        if compressed not in self._cache:
            # Angles are fp32 position x fp32 frequency, as in the release.
            angles = self._positions[:, None] * self._freqs[int(compressed)]
            short = self._short_rows
            self._cache[compressed] = (by_row(torch.cos, angles, short), by_row(torch.sin, angles, short))
        return self._cache[compressed]
