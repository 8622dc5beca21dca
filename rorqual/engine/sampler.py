"""Choosing a token from logits: temperature, top-k, top-p, seeded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.errors import FormatError, InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy. top_k 0 and top_p 1 keep every token. seed None draws a fresh one.

    Raises:
        InputError: naming the parameter and its legal values.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature: {self.temperature} is not legal; legal: 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise InputError(f"top_k: {self.top_k} is not legal; legal: 0 (off) or a positive count")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p: {self.top_p} is not legal; legal: above 0, at most 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InputError(f"seed: {self.seed} is not legal; legal: 0..2^63 - 1")


class Sampler:
    """One sequence's random stream: its draws do not depend on what else is running."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed)

    def __call__(self, logits_V: Tensor) -> int:
        """A token id from fp32 logits [V]; ties of greedy go to the lowest id.

        Raises:
            FormatError: NaN or Inf among the logits; nothing sensible can be sampled.
        """
        # Draws come from the CPU's generator, whatever device computed the logits.
        logits_V = logits_V.cpu()
        if not bool(logits_V.isfinite().all()):
            raise FormatError("logits: NaN or Inf; the checkpoint's weights are damaged or overflow")
        if self.params.temperature == 0:
            return int(logits_V.argmax())
        weights = probabilities(logits_V, self.params)
        return int(torch.multinomial(weights, 1, generator=self.generator))


def probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """fp64 distribution [V] after temperature, top-k and top-p; the most likely token always stays."""
    scaled = (logits_V.double() - logits_V.max()) / params.temperature
    order = scaled.sort(descending=True, stable=True)
    values = order.values
    if 0 < params.top_k < values.shape[0]:
        values = values.clone()
        values[params.top_k :] = float("-inf")
    weights = values.softmax(0)
    if params.top_p < 1:
        before = weights.cumsum(0) - weights
        weights = weights.masked_fill(before >= params.top_p, 0)
        weights = weights / weights.sum()
    return torch.zeros_like(weights).scatter_(0, order.indices, weights)
