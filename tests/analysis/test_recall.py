"""Retrieval goes through global KV: what lies far outside the windows is recalled, and is lost with the pages."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from rorqual.analysis.recall import (
    BATCH,
    RecallTask,
    answers,
    recall_config,
    recall_study,
    recall_texts,
    retold,
    share,
)
from rorqual.config import ModelConfig
from rorqual.errors import InputError
from rorqual.training.batch import IGNORE, Packed
from rorqual.training.learner import Phase
from rorqual.training.learner_v41 import V41Learner
from rorqual.training.recipe import LossRecipe

STEPS = 48
"""Of training, in the bounded test."""

TASK = RecallTask()
HARDER = {
    "pairs in one group": (RecallTask(keys=16, values=16, pairs=8, gap=48, window=8, topk=8, ratio=2), 120),
    # A group holds a key or a value, so the window layer has to learn to put the two together first.
    "pairs across groups": (RecallTask(pairs=6, gap=48, window=8, topk=8, ratio=1), 300),
}
"""Tasks of the long count, and their steps."""
TASKS = {"small": TASK} | {name: task for name, (task, _) in HARDER.items()}
PLAIN = Phase(quantise_caches=False, draft=False)


def untrained(config: ModelConfig) -> V41Learner:
    return V41Learner(config, None, LossRecipe(), 0)


def asked_losses(learner: V41Learner, text: Packed, targets: Tensor) -> Tensor:
    """Of the questions of a text, with any targets."""
    given = dataclasses.replace(text, targets=targets)
    return learner.token_losses([given], PLAIN)[0][targets != IGNORE]


def check(task: RecallTask, steps: int, at_least: float, texts: int) -> None:
    result = recall_study(task, steps, 0, texts=texts)
    found, chance = result.with_global, result.chance
    # A key's questions are answered alike in a text: what counts is told pairs.
    guess = chance + 4 * math.sqrt(chance * (1 - chance) / (texts * task.pairs))
    assert guess < at_least / 2
    assert found.right >= at_least, result
    assert found.followed >= at_least, result
    # Answers follow the pages, so those of a text that tells other values are wrong: fewer are right than by chance.
    assert found.right_swapped <= chance, result
    assert found.erased <= guess and result.without_global <= guess, result


def test_a_tiny_model_learns_to_recall_through_global_kv_only() -> None:
    check(TASK, STEPS, 0.8, texts=16)


@pytest.mark.full
@pytest.mark.parametrize(("task", "steps"), HARDER.values(), ids=HARDER)
def test_more_pairs_further_away_are_recalled_almost_always(task: RecallTask, steps: int) -> None:
    check(task, steps, 0.95, texts=32)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_pairs_lie_far_outside_the_windows_and_answers_are_not_shown(task: RecallTask) -> None:
    assert task.reach == 2 * (task.window - 1)
    assert task.distance > 3 * task.reach
    for text in recall_texts(task, 5, 7):
        told, asked = text.ids[: 2 * task.pairs].view(-1, 2), text.ids[task.told :]
        values = dict(told.tolist())
        assert len(values) == task.pairs and len(text.ids) == task.tokens
        assert text.targets[task.told :].tolist() == [values[key] for key in asked.tolist()]
        assert (text.targets[: task.told] == IGNORE).all()
        value_at = ((text.ids >= task.first_value) & (text.ids < task.first_filler)).nonzero().flatten()
        assert int(value_at.max()) == task.told - task.distance < task.told - task.reach


@pytest.mark.parametrize("global_kv", [True, False])
def test_without_global_kv_no_question_can_depend_on_what_was_told(global_kv: bool) -> None:
    config = recall_config(TASK) if global_kv else recall_config(TASK).without("compression")
    learner = untrained(config)
    (text,) = recall_texts(TASK, 1, 0)
    ours, other = (asked_losses(learner, one, text.targets) for one in (text, retold(TASK, text)))
    assert bool((ours != other).any()) is global_kv


def test_windows_reach_exactly_as_far_as_the_task_says() -> None:
    learner = untrained(recall_config(TASK).without("compression"))
    (text,) = recall_texts(TASK, 1, 0)
    last = TASK.tokens - 1
    losses = asked_losses(learner, text, text.targets)
    for back, reached in ((TASK.reach, True), (TASK.reach + 1, False)):
        ids = text.ids.clone()
        ids[last - back] = TASK.vocab_size - 1
        changed = asked_losses(learner, dataclasses.replace(text, ids=ids), text.targets)
        assert bool(changed[-1] != losses[-1]) is reached, back


def test_a_retold_text_differs_in_every_value_and_nothing_else() -> None:
    for text in recall_texts(TASK, 5, 3):
        other = retold(TASK, text)
        value = (text.ids >= TASK.first_value) & (text.ids < TASK.first_filler)
        assert ((other.ids != text.ids) == value).all() and int(value.sum()) == TASK.pairs
        assert ((other.targets != text.targets) == (text.targets != IGNORE)).all()


def test_texts_are_their_seeds_and_held_out_ones_are_others() -> None:
    def ids(*args: int, **options: bool) -> list[list[int]]:
        return [text.ids.tolist() for text in recall_texts(TASK, *args, **options)]

    assert ids(BATCH, 0) == ids(BATCH, 0)
    later = recall_texts(TASK, 2, 0, first=3)
    assert [text.ids.tolist() for text in later] == ids(5, 0)[3:] and [text.number for text in later] == [3, 4]
    assert not {tuple(x) for x in ids(9, 0)} & {tuple(x) for x in ids(9, 0, held_out=True) + ids(9, 1)}


def test_answers_are_those_of_each_text_alone() -> None:
    """Asked together in one step, over pages of one cache."""
    model = untrained(recall_config(TASK)).model
    texts = recall_texts(TASK, 3, 0)
    others = [retold(TASK, text) for text in texts]
    together = answers(model, TASK, texts, pages_of=others)
    alone = [answers(model, TASK, [text], pages_of=[other])[0] for text, other in zip(texts, others, strict=True)]
    assert torch.equal(together, torch.stack(alone))
    assert together.shape == (3, TASK.questions)


def test_a_share_is_of_all_questions() -> None:
    texts = recall_texts(TASK, 2, 0)
    right = torch.stack([text.targets[TASK.told :] for text in texts])
    half = right.clone()
    half[:, ::2] = 0
    assert (share(right, texts), share(half, texts)) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": 9}, "pairs: 9 must be in 1..8"),
        ({"gap": 4}, "gap: 4 leaves questions 5 tokens from a value, which 2 windows of 4 reach; must be at least 6"),
        ({"gap": 29}, "gap: 29 ends inside a group of 2"),
        ({"topk": 18}, "topk: 18 must be below the 18 groups"),
    ],
)
def test_a_task_that_would_show_nothing_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RecallTask(**change)
