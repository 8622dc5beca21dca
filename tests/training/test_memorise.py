"""The smallest proof that training trains: two layers learn a text by heart."""

from __future__ import annotations

import math

import pytest
import torch

from rorqual.config import Mode, ModelConfig, presets
from rorqual.training.batch import Packed
from rorqual.training.learner import Phase, Totals
from rorqual.training.learner_v41 import V41Learner
from rorqual.training.optim import Optimizers, factor, query_heads
from rorqual.training.recipe import LossRecipe, OptimRecipe

TOKENS = 1000
STEPS, STEPS_FULL = 20, 60
KNOWN = 0.1
"""Nats a token. The text is random, so that nothing of it can be guessed: unlearned, a token costs ln(vocabulary)."""
OPTIM = OptimRecipe(lr=0.02, lr_adam=0.02, lr_table=0.05, momentum=0.9, weight_decay=0.0, warmup=0.05)


def two_layers(*without: str) -> ModelConfig:
    """A window layer and a Full one, as `tiny` has them; drafts fed from both."""
    base = presets.load("tiny").without("vision").replace(dspark_target_layer_ids=(0, 1))
    return base.with_depth((0, 1)).without(*without)


def memorised(config: ModelConfig, steps: int) -> tuple[float, torch.Tensor]:
    """(first loss, losses of every token at last): all is on that a config has, from its step of a run on."""
    ids = torch.randint(3, config.vocab_size - 2, (TOKENS + 1,), generator=torch.Generator().manual_seed(1))
    learner = V41Learner(config, None, LossRecipe(), 0)
    optimizers = Optimizers(learner.parameters, OPTIM, query_heads(learner.parameters, config))
    drafts = config.num_nextn_predict_layers > 0
    totals = Totals(tokens=TOKENS, sequences=1)
    first = math.inf
    for step in range(steps):
        text = Packed(ids=ids[:-1], targets=ids[1:], starts=(0,), number=step)
        phase = Phase(sparse=step >= 0.2 * steps, quantise_weights=step >= 0.5 * steps, draft=drafts, replay=0.25)
        loss = learner.loss([text], phase, totals)
        first = loss.parts["loss"] if step == 0 else first
        optimizers.zero_grad()
        loss.total.backward()
        optimizers.step(factor(step, steps, OPTIM))
        learner.after_step(loss.loads)
    return first, learner.token_losses([text], Phase(quantise_weights=True, draft=False))[0]


def check(config: ModelConfig, steps: int) -> None:
    assert [role.mode for role in config.backbone_roles] == [Mode.SWA, Mode.FULL]
    first, last = memorised(config, steps)
    assert first > 0.9 * math.log(config.vocab_size)
    assert len(last) == TOKENS and float(last.mean()) < KNOWN, float(last.mean())
    # By heart, not on average: each token is the likeliest by far.
    assert float((last < math.log(2)).float().mean()) > 0.99


def test_two_layers_memorise_a_thousand_tokens_with_every_part_on() -> None:
    """FP4 and FP8 caches, FP8 and FP4 weights, Top-K, Engram, routed experts, mHC, seams and drafts."""
    check(two_layers(), STEPS)


@pytest.mark.full
def test_attention_and_experts_memorise_alone() -> None:
    """Engram's n-grams could hold such a text by themselves."""
    check(two_layers("engram", "drafts"), STEPS_FULL)
