"""A run that was killed and resumed ends in the bits of one that was not."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fake_training import FakeData, FakeLearner, recipe, trainer

from rorqual.training.batch import Packed
from rorqual.training.learner import Phase, StepLoss, Totals
from rorqual.training.metrics import METRICS, read_metrics
from rorqual.training.recipe import Recipe
from rorqual.training.samples import SAMPLES
from rorqual.training.state import checkpoints, read
from rorqual.training.trainer import CHECKPOINTS

MEASURED = ("seconds", "tokens_per_s", "peak_bytes")


class Killed(FakeLearner):
    """Ends its process without a word in the middle of its `call`-th loss."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.left = call

    def loss(self, batch: Sequence[Packed], phase: Phase, totals: Totals) -> StepLoss:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return super().loss(batch, phase, totals)


def go_on(recipe: Recipe, out: Path, learner: FakeLearner) -> FakeLearner:
    """Resume where `out` stands, if it stands anywhere."""
    run = trainer(recipe, out, learner)
    if kept := checkpoints(out / CHECKPOINTS):
        run.restore(read(kept[-1]))
    run.run()
    return learner


def killed(recipe: Recipe, out: Path, call: int) -> None:
    """Resume in a process of its own that kills itself."""
    # A fork has torch loaded; nothing here starts threads before it.
    process = multiprocessing.get_context("fork").Process(target=go_on, args=(recipe, out, Killed(call)))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def assert_same(one: Path, other: Path, steps: int) -> None:
    """Checkpoints to the bit, optimiser included; metrics but for the clock; samples."""
    names = [checkpoints(out / CHECKPOINTS)[-1] for out in (one, other)]
    assert [path.name for path in names] == [f"step-{steps:08d}"] * 2
    first, second = (path / "state.safetensors" for path in names)
    assert first.read_bytes() == second.read_bytes()
    records = [
        [{k: v for k, v in record.items() if k not in MEASURED} for record in read_metrics(out / METRICS)]
        for out in (one, other)
    ]
    assert records[0] == records[1]
    assert [record["step"] for record in records[1] if record["kind"] == "step"] == list(range(1, steps + 1))
    assert (one / SAMPLES).read_bytes() == (other / SAMPLES).read_bytes()


def test_killed_and_resumed_is_the_unbroken_run_to_the_bit(tmp_path: Path) -> None:
    plan = recipe(steps=8, save_every=4, sample_every=4)
    go_on(plan, tmp_path / "whole", FakeLearner())
    out = tmp_path / "broken"
    killed(plan, out, call=6)  # in step 7: steps 5 and 6 are in metrics.jsonl, and lost
    assert [path.name for path in checkpoints(out / CHECKPOINTS)] == ["step-00000004"]
    assert read_metrics(out / METRICS)[-1]["step"] == 6
    go_on(plan, out, FakeLearner(seed=99))
    assert_same(tmp_path / "whole", out, 8)


def test_killed_before_the_first_checkpoint_begins_again(tmp_path: Path) -> None:
    plan = recipe(steps=2, save_every=0, sample_every=1)
    go_on(plan, tmp_path / "whole", FakeLearner())
    killed(plan, tmp_path / "broken", call=1)
    go_on(plan, tmp_path / "broken", FakeLearner())
    assert_same(tmp_path / "whole", tmp_path / "broken", 2)


@pytest.mark.full
def test_killed_again_and_again(tmp_path: Path) -> None:
    plan = recipe(steps=40, save_every=1, eval_every=3, sample_every=5)
    go_on(plan, tmp_path / "whole", FakeLearner())
    generator = torch.Generator().manual_seed(0)
    kills = 0
    while True:
        kept = checkpoints(tmp_path / "broken" / CHECKPOINTS)
        done = int(kept[-1].name.removeprefix("step-")) if kept else 0
        call = int(torch.randint(1, 4, (1,), generator=generator))
        if done + call >= 40:
            break
        killed(plan, tmp_path / "broken", call)
        kills += 1
    assert kills >= 10
    go_on(plan, tmp_path / "broken", FakeLearner())
    assert_same(tmp_path / "whole", tmp_path / "broken", 40)


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path: Path) -> None:
    plan = recipe(steps=2, save_every=1)
    go_on(plan, tmp_path, FakeLearner())
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"kind": "step", "st')
    assert read_metrics(tmp_path / METRICS)[-1]["step"] == 2
    go_on(plan, tmp_path, FakeLearner())
    assert all(json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines())


class Interrupted(FakeLearner):
    """Sends its process a signal in the middle of its third loss, and in every later one."""

    def __init__(self, number: int, times: int) -> None:
        super().__init__()
        self.number, self.times = number, times

    def loss(self, batch: Sequence[Packed], phase: Phase, totals: Totals) -> StepLoss:
        if self.steps == 2:
            for _ in range(self.times):
                signal.raise_signal(self.number)
        return super().loss(batch, phase, totals)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_finishes_the_step_and_saves(number: int, tmp_path: Path) -> None:
    plan = recipe(steps=8, save_every=0)
    before = signal.getsignal(number)
    ended = trainer(plan, tmp_path, Interrupted(number, 1)).run()
    assert signal.getsignal(number) is before
    assert (ended.step, ended.signal) == (3, number)
    assert read(checkpoints(tmp_path / CHECKPOINTS)[-1]).step == 3
    go_on(plan, tmp_path, FakeLearner())
    go_on(plan, tmp_path / "whole", FakeLearner())
    whole, broken = (read(checkpoints(out / CHECKPOINTS)[-1]) for out in (tmp_path / "whole", tmp_path))
    assert all(torch.equal(broken.parameters[name], value) for name, value in whole.parameters.items())


def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer(recipe(steps=8, save_every=0), tmp_path, Interrupted(signal.SIGINT, 2)).run()
    assert checkpoints(tmp_path / CHECKPOINTS) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_the_data_of_a_step_depend_on_the_step_alone() -> None:
    one, other = FakeData(recipe()), FakeData(recipe())
    one.batch(0, 0, 1)
    for a, b in zip(one.batch(5, 0, 1), other.batch(5, 0, 1), strict=True):
        assert torch.equal(a.ids, b.ids)
