"""How fast learners train, side by side in one process on the same batches."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rorqual.config import ModelConfig
from rorqual.training.batch import Packed, micro_batches
from rorqual.training.learner import Learner, Phase, Totals
from rorqual.training.optim import Optimizers, clip_gradients, query_heads
from rorqual.training.recipe import Recipe

AT_LEAST = 0.40
"""Of the dense twin's tokens a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Seconds of one step: gradients of all its micro-batches, then clipping and the optimiser."""

    gradients: float
    update: float


class _Contestant:
    """A learner with the recipe's optimiser."""

    def __init__(self, learner: Learner, recipe: Recipe, config: ModelConfig) -> None:
        self.learner, self.recipe = learner, recipe
        heads = query_heads(learner.parameters, config)
        self.optimiser = Optimizers(learner.parameters, recipe.optim, heads)

    def step(self, batch: Sequence[Packed], phase: Phase) -> Taken:
        totals = Totals(tokens=max(1, sum(sequence.trained for sequence in batch)), sequences=len(batch))
        start = time.perf_counter()
        self.optimiser.zero_grad()
        for micro in micro_batches(batch, self.recipe.data.micro_tokens):
            self.learner.loss(micro, phase, totals).total.backward()
        middle = time.perf_counter()
        clip_gradients(self.learner.parameters, self.recipe.optim.clip)
        # At rate 0 the work is the same and the learner stays as it was.
        self.optimiser.step(0.0)
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

    The learners take turns, step by step, after one step each that is not counted. "ratio" is the median over turns of
    the first's tokens a second over the last's. Peak memory is the process's so far: the last learner's uncounted step
    comes first, so that what the first adds can be told.

    batches: steps' sequences, taken in turn. config: what says which weights are query heads.
    """
    assert len(learners) > 1 and batches
    contestants = {name: _Contestant(learner, recipe, config) for name, learner in learners.items()}
    peaks: dict[str, int] = {}
    for name in reversed(contestants):
        contestants[name].step(batches[0], phase)
        peaks[name] = peak_bytes()
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
                "peak_bytes_so_far": peaks[name],
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
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """The most memory this process has held at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}
