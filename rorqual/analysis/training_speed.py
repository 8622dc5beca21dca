"""How fast learners train, side by side in one process on the same batches."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rorqual.config import ModelConfig
from rorqual.training.batch import Packed, micro_batches
from rorqual.training.learner import Learner, Phase, Totals
from rorqual.training.metrics import add_up
from rorqual.training.optim import Optimizers, by_loss, clip_gradients, query_heads
from rorqual.training.precision import gains_by_bf16, reduced_products
from rorqual.training.recipe import Recipe

AT_LEAST = 0.40
"""Of the dense twin's tokens a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Seconds of one step: gradients of all micro-batches; then clipping, the optimiser and the learner's own rule."""

    gradients: float
    update: float


class _Contestant:
    """A learner with the recipe's optimiser."""

    def __init__(self, learner: Learner, recipe: Recipe, config: ModelConfig) -> None:
        self.learner, self.recipe = learner, recipe
        heads = query_heads(learner.parameters, config)
        self.optimiser = Optimizers(learner.parameters, recipe.optim, heads)

    @property
    def device(self) -> torch.device:
        return next(iter(self.learner.parameters.values())).device

    def step(self, batch: Sequence[Packed], phase: Phase) -> Taken:
        """What the trainer does in a step, with products as the recipe has them."""
        totals = Totals(tokens=max(1, sum(sequence.trained for sequence in batch)), sequences=len(batch))
        loads: dict[str, Tensor] = {}
        start = time.perf_counter()
        self.optimiser.zero_grad()
        for micro in micro_batches(batch, self.recipe.data.micro_tokens):
            with reduced_products(self.device, self.recipe.run.autocast):
                loss = self.learner.loss(micro, phase, totals)
                loss.total.backward()
            add_up(loads, {name: load.detach().cpu() for name, load in loss.loads.items()})
        middle = time.perf_counter()
        for part in by_loss(self.learner.parameters).values():
            clip_gradients(part, self.recipe.optim.clip)
        # At rate 0 the work is the same, and all that the optimiser has stays as it was.
        self.optimiser.step(0.0)
        self.learner.after_step(loads)
        end = time.perf_counter()
        self.optimiser.zero_grad()
        return Taken(gradients=middle - start, update=end - middle)


def training_speed(
    learners: Mapping[str, Learner],
    batches: Sequence[Sequence[Packed]],
    phase: Phase,
    recipe: Recipe,
    config: ModelConfig,
    *,
    repeats: int = 5,
) -> dict[str, Any]:
    """Seconds and tokens a second of whole training steps; the first learner against the last.

    The learners take turns, step by step, after one step each that is not counted; of their parameters only the
    routers' biases move. "ratio" is the median over turns of the first's tokens a second over the last's.
    "bf16_products": whether the recipe's setting, "autocast", reduced matrix products on the learners' device.

    batches: steps' sequences, taken in turn. config: what says which weights are query heads.
    """
    assert len(learners) > 1 and batches
    contestants = {name: _Contestant(learner, recipe, config) for name, learner in learners.items()}
    for contestant in contestants.values():
        contestant.step(batches[0], phase)
    taken: dict[str, list[Taken]] = {name: [] for name in contestants}
    gc.collect()
    for turn in range(repeats):
        for name, contestant in contestants.items():
            taken[name].append(contestant.step(batches[turn % len(batches)], phase))
    tokens = [sum(len(sequence.ids) for sequence in batches[turn % len(batches)]) for turn in range(repeats)]
    rates = {
        name: [count / (one.gradients + one.update) for count, one in zip(tokens, steps, strict=True)]
        for name, steps in taken.items()
    }
    ours, baseline = (list(learners)[place] for place in (0, -1))
    ratios = [a / b for a, b in zip(rates[ours], rates[baseline], strict=True)]
    return {
        "learners": {
            name: {
                "tokens_per_s": _spread(rates[name]),
                "gradients_s": _spread([one.gradients for one in taken[name]]),
                "update_s": _spread([one.update for one in taken[name]]),
            }
            for name in contestants
        },
        "of": ours,
        "against": baseline,
        "ratio": _spread(ratios),
        "at_least": AT_LEAST,
        "reached": median(ratios) >= AT_LEAST,
        "repeats": repeats,
        "tokens_a_step": tokens[0],
        "autocast": recipe.run.autocast,
        "bf16_products": recipe.run.autocast == "auto" and gains_by_bf16(contestants[ours].device),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}
