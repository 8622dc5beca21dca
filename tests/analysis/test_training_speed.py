"""The side-by-side timing, on learners whose steps take a known time."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from rorqual.analysis.dense_twin import DenseTwin, TwinConfig, initial_twin
from rorqual.analysis.training_speed import training_speed
from rorqual.config import presets
from rorqual.training.batch import Packed
from rorqual.training.learner import Phase, StepLoss, Totals
from rorqual.training.precision import gains_by_bf16
from rorqual.training.recipe import DataRecipe, Recipe, RunRecipe

TINY = TwinConfig(vocab_size=20, layers=1, heads=1, head_dim=8, intermediate=8)


class Slow(DenseTwin):
    """Takes `delay_s` longer a micro-batch, and notes what happens in a diary that learners may share."""

    def __init__(self, delay_s: float, name: str = "", diary: list[tuple[object, ...]] | None = None) -> None:
        super().__init__(TINY, initial_twin(TINY, 0))
        self.delay_s, self.name = delay_s, name
        self.diary = [] if diary is None else diary

    def loss(self, batch: Sequence[Packed], phase: Phase, totals: Totals) -> StepLoss:
        time.sleep(self.delay_s)
        self.diary.append((self.name, batch[0].number, len(batch), totals.tokens))
        found = super().loss(batch, phase, totals)
        found.loads["layers.0"] = torch.tensor([len(batch), 1])
        return found

    def after_step(self, loads: Mapping[str, Tensor]) -> None:
        self.diary.append((self.name, "after", {name: load.tolist() for name, load in loads.items()}))


def sequence(number: int) -> Packed:
    ids = torch.arange(8) + number
    return Packed(ids=ids, targets=ids + 1, starts=(0,), number=number)


def test_learners_take_turns_on_the_same_steps() -> None:
    diary: list[tuple[object, ...]] = []
    learners = {"ours": Slow(0.05, "ours", diary), "twin": Slow(0.0, "twin", diary)}
    before = {name: {k: p.detach().clone() for k, p in one.parameters.items()} for name, one in learners.items()}
    recipe = Recipe(
        name="x", model=presets.load("tiny").without("vision"), data=DataRecipe(micro_tokens=16, batch_tokens=32)
    )
    batches = [[sequence(n) for n in range(4)], [sequence(n) for n in range(4, 8)]]
    found = training_speed(learners, batches, Phase(), recipe, recipe.model, repeats=3)
    assert json.loads(json.dumps(found)) == found
    # Two micro-batches of two sequences a step, then the learner's own rule; one step each that is not counted.
    expected: list[tuple[object, ...]] = []
    for first in (0, 0, 4, 0):
        for name in learners:
            expected += [(name, first, 2, 32), (name, first + 2, 2, 32), (name, "after", {"layers.0": [4, 2]})]
    assert diary == expected
    for name, learner in learners.items():
        for key, value in before[name].items():
            assert learner.parameters[key].equal(value), f"{name}: {key} was trained"
    assert (found["of"], found["against"], found["tokens_a_step"]) == ("ours", "twin", 32)
    ours = found["learners"]["ours"]
    assert ours["gradients_s"]["min"] >= 0.1
    assert ours["tokens_per_s"]["max"] < 32 / 0.1
    assert found["ratio"]["median"] < 1
    assert found["reached"] == (found["ratio"]["median"] >= 0.4)


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_every_step_has_the_products_of_training(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward passes of both learners run inside the recipe's setting, which is written down."""
    entered: list[tuple[torch.device, str]] = []
    inside = False

    @contextmanager
    def noted(device: torch.device, setting: str) -> Iterator[None]:
        nonlocal inside
        entered.append((device, setting))
        inside = True
        yield
        inside = False

    class Watched(Slow):
        def loss(self, batch: Sequence[Packed], phase: Phase, totals: Totals) -> StepLoss:
            assert inside
            found = super().loss(batch, phase, totals)
            found.total.register_hook(lambda _: watched.append(inside))
            return found

    watched: list[bool] = []
    monkeypatch.setattr("rorqual.analysis.training_speed.reduced_products", noted)
    learners = {"ours": Watched(0.0), "twin": Watched(0.0)}
    recipe = Recipe(
        name="x",
        model=presets.load("tiny").without("vision"),
        data=DataRecipe(micro_tokens=16, batch_tokens=32),
        run=RunRecipe(autocast=setting),
    )
    found = training_speed(learners, [[sequence(n) for n in range(4)]], Phase(), recipe, recipe.model, repeats=2)
    # Two learners, two micro-batches, one step that is not counted and two that are.
    cpu = torch.device("cpu")
    assert entered == [(cpu, setting)] * 12 and watched == [True] * 12
    assert found["autocast"] == setting and found["bf16_products"] == (setting == "auto" and gains_by_bf16(cpu))


def test_the_rate_counts_all_tokens_of_a_step() -> None:
    learners = {"ours": Slow(0.0), "twin": Slow(0.0)}
    recipe = Recipe(name="x", model=presets.load("tiny").without("vision"))
    found = training_speed(
        learners, [[sequence(0)] * 3], dataclasses.replace(Phase(), draft=False), recipe, recipe.model
    )
    for one in found["learners"].values():
        seconds = one["gradients_s"]["median"] + one["update_s"]["median"]
        assert 0.2 < one["tokens_per_s"]["median"] * seconds / 24 < 5
