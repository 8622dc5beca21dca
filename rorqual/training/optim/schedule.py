"""The learning rate over a run: linear warm-up, flat, cosine."""

from __future__ import annotations

import math

from rorqual.training.recipe import OptimRecipe


def factor(step: int, steps: int, recipe: OptimRecipe) -> float:
    """What every learning rate is multiplied by at a step, counted from 0.

    Warm-up rises to 1 at its last step and never starts at 0; the cosine leaves 1 at `decay_from` and reaches `lr_end`
    at the last step. E.g. 100 steps, warmup 0.1, decay_from 0.5, lr_end 0.1: 0.1 at step 0, 1 at 9..50, 0.1 at 99.
    Where warm-up and decay overlap the smaller holds.
    """
    warm = recipe.warmup * steps
    rising = min(1.0, (step + 1) / warm) if warm > 0 else 1.0
    start = recipe.decay_from * steps
    progress = min(1.0, (step - start) / max(1.0, steps - 1 - start)) if step > start else 0.0
    falling = recipe.lr_end + (1 - recipe.lr_end) * 0.5 * (1 + math.cos(math.pi * progress))
    return min(rising, falling)
