"""The loop around a learner: what it evaluates, samples, saves, measures, and when it stops."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from fake_training import FakeData, FakeLearner, recipe, trainer

from rorqual.errors import ConfigError
from rorqual.training.batch import IGNORE, Packed
from rorqual.training.metrics import METRICS, Record, read_metrics
from rorqual.training.recipe import PhaseRecipe
from rorqual.training.samples import SAMPLES
from rorqual.training.state import checkpoints, read
from rorqual.training.trainer import CHECKPOINTS


class Sink(list[Record]):
    """Collects records."""

    closed = False

    def __call__(self, record: Record) -> None:
        self.append(record)

    def close(self) -> None:
        self.closed = True


def test_a_run_leaves_metrics_samples_and_checkpoints(tmp_path: Path) -> None:
    sink = Sink()
    run = trainer(recipe(steps=7, save_every=3, sample_every=3, keep=3), tmp_path)
    run.sinks.append(sink)
    ended = run.run()
    records = read_metrics(tmp_path / METRICS)
    assert [(r["kind"], r["step"]) for r in records] == [
        *[("step", step) for step in (1, 2, 3, 4)],
        ("eval", 4),
        *[("step", step) for step in (5, 6, 7)],
        ("eval", 7),
    ]
    assert records == sink
    assert sink.closed
    assert ended.last == records[-2]
    assert ended.evaluation == records[-1]
    assert [r["tokens"] for r in records if r["kind"] == "step"] == [64 * step for step in range(1, 8)]
    wanted = {
        "loss",
        "sequences",
        "total",
        "grad_norm",
        "lr",
        "seq_len",
        "imbalance",
        "tokens_per_s",
        "seconds",
        "peak_bytes",
    }
    assert wanted <= records[0].keys()
    heads = [line for line in (tmp_path / SAMPLES).read_text().splitlines() if line.startswith("== ")]
    assert heads == ["== step 3", "== step 6", "== step 7"]
    kept = checkpoints(tmp_path / CHECKPOINTS)
    assert [path.name for path in kept] == ["step-00000003", "step-00000006", "step-00000007"]
    assert "vocab" in (kept[-1] / "tokenizer.json").read_text()


def test_it_learns(tmp_path: Path) -> None:
    trainer(recipe(steps=60, eval_every=60, save_every=0), tmp_path).run()
    records = read_metrics(tmp_path / METRICS)
    assert records[0]["loss"] > 5.5
    assert records[-1]["loss"] < 3.5


def test_evaluation_by_hand(tmp_path: Path) -> None:
    plan = recipe(eval_sequences=5)
    run, data = trainer(plan, tmp_path), FakeData(plan)
    record = run.evaluate()
    nats, count, characters = 0.0, 0, 0
    batch = data.heldout_batches(16, 5)
    for packed, losses in zip(batch, run.learner.token_losses(batch, plan.phase_at(plan.run.steps - 1)), strict=True):
        kept = packed.targets[packed.targets != IGNORE]
        nats, count = nats + float(losses.sum()), count + len(kept)
        characters += len(data.tokenizer.decode(kept.tolist()))
    assert record["eval_tokens"] == count == characters
    assert record["loss"] == pytest.approx(nats / count)
    assert record["bits_per_character"] == pytest.approx(nats / characters / math.log(2))


def test_nothing_held_out_is_nothing_to_evaluate(tmp_path: Path) -> None:
    class NothingHeld(FakeData):
        def heldout_batches(self, seq_len: int, limit: int) -> list[Packed]:
            return []

    plan = recipe(steps=2, eval_every=1, sample_every=1)
    assert trainer(plan, tmp_path, data=NothingHeld(plan)).run().evaluation is None
    assert {record["kind"] for record in read_metrics(tmp_path / METRICS)} == {"step"}


def test_phases_and_lengths_follow_the_recipe(tmp_path: Path) -> None:
    plan = recipe(steps=8, eval_every=4)
    plan = plan.replace(
        data=dataclasses.replace(plan.data, long_seq_len=32, long_from=0.5),
        phases=PhaseRecipe(sparse_from=0.25, quantise_from=0.0, quantise_weights_from=0.75, draft_from=1.0),
        loss=dataclasses.replace(plan.loss, replay=0.5),
    )
    learner = FakeLearner()
    trainer(plan, tmp_path, learner).run()
    trained = [phase for phase in learner.phases if phase.replay]
    assert [phase.sparse for phase in trained] == [False] * 2 + [True] * 6
    assert [phase.quantise_weights for phase in trained] == [False] * 6 + [True] * 2
    assert not any(phase.draft for phase in trained)
    evaluated = [phase for phase in learner.phases if not phase.replay]
    assert evaluated[0] == dataclasses.replace(plan.phase_at(3), replay=0.0)
    assert evaluated[-1] == dataclasses.replace(plan.phase_at(plan.run.steps - 1), replay=0.0)
    records = read_metrics(tmp_path / METRICS)
    assert [r["seq_len"] for r in records if r["kind"] == "step"] == [16] * 4 + [32] * 4
    assert [r["seq_len"] for r in records if r["kind"] == "eval"] == [16, 32]
    sizes = [r["eval_tokens"] for r in records if r["kind"] == "eval"]
    assert sizes[1] / sizes[0] == pytest.approx(1, abs=0.15), "longer sequences, as many tokens"


@pytest.mark.parametrize("save_every", [2, 0])
def test_a_loss_that_is_not_finite_stops_the_run(save_every: int, tmp_path: Path) -> None:
    learner = FakeLearner(poison_step=4)
    where = "the last good checkpoint is .*step-00000004" if save_every else "there is no checkpoint yet"
    with pytest.raises(ConfigError, match=f"the loss is nan at step 5; {where}"):
        trainer(recipe(save_every=save_every), tmp_path, learner).run()
    assert [r["step"] for r in read_metrics(tmp_path / METRICS) if r["kind"] == "step"] == [1, 2, 3, 4]
    assert all(value.isfinite().all() for value in learner.parameters.values()), "the step was taken"
    for path in checkpoints(tmp_path / CHECKPOINTS):
        assert all(value.isfinite().all() for value in read(path).parameters.values())


def test_a_gradient_that_is_not_finite_names_its_parameter(tmp_path: Path) -> None:
    learner = FakeLearner()
    learner.parameters["norm.weight"].register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(ConfigError, match=r"the gradient of norm\.weight is not finite at step 1"):
        trainer(recipe(), tmp_path, learner).run()


def test_gradients_are_clipped(tmp_path: Path) -> None:
    plan = recipe(steps=1)
    run = trainer(plan.replace(optim=dataclasses.replace(plan.optim, clip=0.01)), tmp_path)
    run.run()
    record = read_metrics(tmp_path / METRICS)[0]
    assert record["grad_norm"] > 0.1, "the norm before clipping is what is logged"
    squares = [float(p.grad.to_dense().square().sum()) for p in run.learner.parameters.values() if p.grad is not None]
    assert math.sqrt(sum(squares)) == pytest.approx(0.01, rel=1e-4)


def test_router_biases_follow_the_loads_of_the_whole_step(tmp_path: Path) -> None:
    learner = FakeLearner()
    trainer(recipe(steps=1), tmp_path, learner).run()
    bias = learner.parameters["layers.0.ffn.gate.bias"]
    assert bias[2] > 0 > bias.min()


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    plan = recipe(steps=2)
    trainer(plan, tmp_path).run()
    again = trainer(plan, tmp_path)
    again.restore(read(checkpoints(tmp_path / CHECKPOINTS)[-1]))
    before = (tmp_path / METRICS).read_bytes()
    ended = again.run()
    assert (ended.step, ended.last, ended.evaluation) == (2, {}, None)
    assert (tmp_path / METRICS).read_bytes() == before


@pytest.mark.parametrize(
    ("setting", "gains", "precision"), [("off", True, "highest"), ("auto", True, "medium"), ("auto", False, "highest")]
)
def test_products_are_as_the_recipe_says_and_nothing_stays_changed(
    setting: str, gains: bool, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(FakeLearner):
        def _logits(self, ids: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            assert torch.get_float32_matmul_precision() == precision
            return super()._logits(ids, before)

    monkeypatch.setattr("rorqual.training.precision.gains_by_bf16", lambda device: gains)
    learner = Watched()
    assert trainer(recipe(steps=1, autocast=setting), tmp_path, learner).run().step == 1
    assert learner.phases
    assert torch.get_float32_matmul_precision() == "highest"
