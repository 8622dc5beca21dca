"""The learning rate's factor over a run."""

from __future__ import annotations

import math

import pytest

from rorqual.training.optim import factor
from rorqual.training.recipe import OptimRecipe

RECIPE = OptimRecipe(warmup=0.1, decay_from=0.5, lr_end=0.1)


def test_the_docstrings_example() -> None:
    values = [factor(step, 100, RECIPE) for step in range(100)]
    assert values[0] == pytest.approx(0.1)
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert values[9:51] == [1.0] * 42
    assert values[51] < 1.0
    assert values[99] == pytest.approx(0.1)
    assert values[50:] == sorted(values[50:], reverse=True)


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert factor(50 + 49 // 2, 100, RECIPE) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 24 / 49)))


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("warmup", "decay_from"), [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.02, 0.5), (0.7, 0.3)])
def test_always_positive_and_at_most_one(steps: int, warmup: float, decay_from: float) -> None:
    recipe = OptimRecipe(warmup=warmup, decay_from=decay_from, lr_end=0.05)
    values = [factor(step, steps, recipe) for step in range(steps)]
    assert all(0 < value <= 1 for value in values)


def test_past_the_end_the_last_value_holds() -> None:
    assert factor(250, 100, RECIPE) == pytest.approx(0.1)


def test_no_warmup_and_no_decay_is_flat() -> None:
    recipe = OptimRecipe(warmup=0.0, decay_from=1.0)
    assert {factor(step, 50, recipe) for step in range(50)} == {1.0}
