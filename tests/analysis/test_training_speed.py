"""The side-by-side timing, on learners whose steps take a known time."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence

import torch

from rorqual.analysis.dense_twin import DenseTwin, TwinConfig, initial_twin
from rorqual.analysis.training_speed import peak_bytes, training_speed
from rorqual.config import presets
from rorqual.training.batch import Packed
from rorqual.training.learner import Phase, StepLoss, Totals
from rorqual.training.recipe import DataRecipe, Recipe

TINY = TwinConfig(vocab_size=20, layers=1, heads=1, head_dim=8, intermediate=8)


class Slow(DenseTwin):
    """Takes `delay_s` longer a micro-batch, and remembers what it was given."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(TINY, initial_twin(TINY, 0))
        self.delay_s = delay_s
        self.seen: list[tuple[int, int, int]] = []

    def loss(self, batch: Sequence[Packed], phase: Phase, totals: Totals) -> StepLoss:
        time.sleep(self.delay_s)
        self.seen.append((batch[0].number, len(batch), totals.tokens))
        return super().loss(batch, phase, totals)


def sequence(number: int) -> Packed:
    ids = torch.arange(8) + number
    return Packed(ids=ids, targets=ids + 1, starts=(0,), number=number)


def test_learners_take_turns_on_the_same_steps() -> None:
    learners = {"ours": Slow(0.05), "twin": Slow(0.0)}
    before = {name: {k: p.detach().clone() for k, p in one.parameters.items()} for name, one in learners.items()}
    recipe = Recipe(name="x", model=presets.load("tiny"), data=DataRecipe(micro_tokens=16, batch_tokens=32))
    batches = [[sequence(n) for n in range(4)], [sequence(n) for n in range(4, 8)]]
    found = training_speed(learners, batches, Phase(), recipe, recipe.model, repeats=3)
    assert json.loads(json.dumps(found)) == found
    # Two micro-batches of two sequences a step; one step that is not counted, then three.
    starts = [0, 2, 0, 2, 4, 6, 0, 2]
    for name, learner in learners.items():
        assert learner.seen == [(start, 2, 32) for start in starts], name
        for key, value in before[name].items():
            assert learner.parameters[key].equal(value), f"{name}: {key} was trained"
    assert (found["of"], found["against"], found["tokens_a_step"]) == ("ours", "twin", 32)
    ours = found["learners"]["ours"]
    assert ours["gradients_s"]["min"] >= 0.1
    assert ours["tokens_per_s"]["max"] < 32 / 0.1
    assert found["ratio"]["median"] < 1
    assert found["reached"] == (found["ratio"]["median"] >= 0.4)
    assert ours["peak_bytes_so_far"] <= found["peak_bytes"] <= peak_bytes()


def test_the_rate_counts_all_tokens_of_a_step() -> None:
    learners = {"ours": Slow(0.0), "twin": Slow(0.0)}
    recipe = Recipe(name="x", model=presets.load("tiny"))
    found = training_speed(
        learners, [[sequence(0)] * 3], dataclasses.replace(Phase(), draft=False), recipe, recipe.model
    )
    for one in found["learners"].values():
        seconds = one["gradients_s"]["median"] + one["update_s"]["median"]
        assert 0.2 < one["tokens_per_s"]["median"] * seconds / 24 < 5
