"""Field case 59: one micro-batch of four sequences and four of one give the same step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from fake_training import FakeData, FakeLearner, recipe, trainer

from rorqual.config import presets
from rorqual.training.batch import micro_batches
from rorqual.training.learner import Phase, Totals
from rorqual.training.learner_v41 import V41Learner
from rorqual.training.metrics import METRICS, add_up, read_metrics

MEASURED = ("seconds", "tokens_per_s", "peak_bytes")


def run(out: Path, micro_tokens: int) -> tuple[FakeLearner, list[dict[str, float]]]:
    base = recipe(steps=4)
    learner = FakeLearner()
    trainer(base.replace(data=dataclasses.replace(base.data, micro_tokens=micro_tokens)), out, learner).run()
    return learner, read_metrics(out / METRICS)


def test_accumulated_steps_are_the_whole_ones(tmp_path: Path) -> None:
    whole, whole_records = run(tmp_path / "whole", 64)
    parts, part_records = run(tmp_path / "parts", 16)
    assert len(parts.phases) > 3 * len(whole.phases) / 2, "the parts were not taken one by one"
    for name, parameter in whole.parameters.items():
        torch.testing.assert_close(parts.parameters[name], parameter, rtol=0, atol=2e-6)
    for one, other in zip(whole_records, part_records, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"kind", *MEASURED}:
            assert abs(one[key] - other[key]) < 1e-5, key


def test_gradients_of_the_whole_step(tmp_path: Path) -> None:
    gradients = []
    for micro_tokens in (64, 16):
        base = recipe(steps=1)
        changed = base.replace(data=dataclasses.replace(base.data, micro_tokens=micro_tokens))
        learner, data = FakeLearner(), FakeData(changed)
        trainer(changed, tmp_path / str(micro_tokens), learner, data=data)._gradients(data.batch(0, 0, 1), 0)
        gradients.append({n: None if p.grad is None else p.grad.to_dense() for n, p in learner.parameters.items()})
        assert learner.parameters["layers.0.engram.embed.weight"].grad.is_sparse
    for name, whole in gradients[0].items():
        if whole is None:
            assert gradients[1][name] is None
        else:
            torch.testing.assert_close(gradients[1][name], whole, rtol=1e-5, atol=1e-8)
    assert gradients[0]["layers.0.ffn.experts.2.w1.weight"] is None, "nobody was routed to the last expert"


def test_micro_batches_keep_order_and_never_split_a_sequence() -> None:
    batch = FakeData(recipe()).batch(0, 0, 1)
    assert [len(part) for part in micro_batches(batch, 47)] == [2, 2]
    assert [len(part) for part in micro_batches(batch, 1)] == [1, 1, 1, 1]
    assert [packed for part in micro_batches(batch, 33) for packed in part] == batch


def test_gradients_of_the_real_model() -> None:
    """With everything on: replay, drafts, the indexer's and the balance loss, experts, Engram."""
    config = presets.load("tiny").without("vision")
    batch = FakeData(recipe()).batch(0, 0, 1)
    totals = Totals(tokens=sum(packed.trained for packed in batch), sequences=len(batch))
    steps = []
    for micro_tokens in (64, 16):
        learner = V41Learner(config, None, dataclasses.replace(recipe().loss, replay=0.5), seed=0)
        parts: dict[str, float] = {}
        loads: dict[str, torch.Tensor] = {}
        for micro in micro_batches(batch, micro_tokens):
            loss = learner.loss(micro, Phase(replay=0.5), totals)
            loss.total.backward()
            add_up(parts, loss.parts)
            add_up(loads, loss.loads)
        steps.append((learner.parameters, parts, loads))
    (whole, whole_parts, whole_loads), (cut, cut_parts, cut_loads) = steps
    assert {"loss", "indexer", "balance", "draft_ce", "draft_tv", "draft_confidence"} <= whole_parts.keys()
    assert cut_parts == pytest.approx(whole_parts, rel=1e-4)
    assert all(torch.equal(cut_loads[name], load) for name, load in whole_loads.items())
    for name, parameter in whole.items():
        if parameter.grad is None:
            assert cut[name].grad is None, name
        else:
            one, other = parameter.grad.to_dense(), cut[name].grad.to_dense()
            assert float((one - other).norm()) <= 1e-3 * float(one.norm()) + 1e-7, name
