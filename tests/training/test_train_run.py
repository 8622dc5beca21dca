"""A whole run by `train`: what stands in its folder, and when it is refused."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_training import TEXT, FakeLearner, recipe
from tokenizers import Tokenizer

from rorqual.errors import ConfigError, InputError
from rorqual.training.metrics import METRICS, read_metrics
from rorqual.training.progress import Reporter
from rorqual.training.recipe import Recipe
from rorqual.training.run import Trained, changed, chosen_device, summary, train
from rorqual.training.state import checkpoints, read

VOCAB = 300


def fake(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> FakeLearner:
    return FakeLearner(recipe.run.seed, vocab=tokenizer.get_vocab_size())


def plan(**run: Any) -> Recipe:
    base = recipe(**({"steps": 4} | run))
    return base.replace(data=dataclasses.replace(base.data, vocab_size=VOCAB, heldout=("held*",)))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("one", "two", "held"):
        (folder / f"{name}.txt").write_text(f"{name}: {TEXT}", encoding="utf-8")
    return folder


def go(recipe: Recipe, texts: Path, out: Path, **more: Any) -> Trained:
    return train(recipe, [texts], out, learner=fake, reporter=Reporter(silent=True), **more)


def test_what_a_run_leaves(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    trained = go(plan(sample_every=2), texts, out)
    names = {path.name for path in out.iterdir()}
    assert names == {"run.json", "metrics.jsonl", "samples.txt", "checkpoints", "data", "loss.png"}
    assert (trained.out, trained.plot, trained.model) == (out, out / "loss.png", None)
    document = json.loads((out / "run.json").read_text())
    assert document["recipe"]["run"]["steps"] == 4
    assert document["fingerprint"] == read(checkpoints(out / "checkpoints")[-1]).fingerprint
    lines = summary(trained)
    assert lines[0].startswith(f"{out}: 4 of 4 steps in ")
    assert any("bits a character" in line for line in lines)
    assert f"checkpoints: {out / 'checkpoints'}" in lines


def test_equal_seeds_give_equal_runs_and_others_do_not(texts: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    states = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        go(plan(seed=seed), texts, tmp_path / name, cache=cache)
        assert not (tmp_path / name / "data").exists()
        states.append(read(checkpoints(tmp_path / name / "checkpoints")[-1]).parameters["head.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_resume_goes_on_to_the_bits_of_an_unbroken_run(texts: Path, tmp_path: Path) -> None:
    class Crash(FakeLearner):
        def after_step(self, loads: Any) -> None:
            super().after_step(loads)
            if self.steps == 3:
                raise RuntimeError("the power is gone")

    def crashing(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> FakeLearner:
        return Crash(recipe.run.seed, vocab=tokenizer.get_vocab_size())

    quiet = Reporter(silent=True)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    go(plan(), texts, whole)
    with pytest.raises(RuntimeError, match="power"):
        train(plan(), [texts], broken, learner=crashing, reporter=quiet)
    with pytest.raises(InputError, match=r"broken is not empty \(it holds checkpoints\); go on with --resume"):
        go(plan(), texts, broken)
    go(plan(), texts, broken, resume=True)
    one, other = (checkpoints(out / "checkpoints")[-1] / "state.safetensors" for out in (whole, broken))
    assert one.read_bytes() == other.read_bytes()
    assert [r["step"] for r in read_metrics(broken / METRICS) if r["kind"] == "step"] == [1, 2, 3, 4]


def test_resume_is_refused_where_recipe_or_data_differ(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    go(plan(), texts, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"the recipe differs: run\.steps was 4, is 8"):
        go(plan(), texts, out, resume=True, overrides={"run.steps": 8})
    (texts / "three.txt").write_text("Another text. " * 50, encoding="utf-8")
    with pytest.raises(InputError, match="the data differ"):
        go(plan(), texts, out, resume=True, cache=tmp_path / "cache")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_resume_where_nothing_began_is_a_fresh_run(texts: Path, tmp_path: Path) -> None:
    assert go(plan(), texts, tmp_path / "out", resume=True).ended.step == 4


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_other_files_is_left_alone(resume: bool, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="no run to resume" if resume else "is not empty"):
        go(plan(), texts, out, resume=resume)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_out_that_is_a_file_is_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a file"):
        go(plan(), texts, texts / "one.txt")


def test_a_try_that_failed_on_the_data_is_no_obstacle(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        go(plan(), tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_nor_is_one_that_was_stopped_while_it_read_them(resume: bool, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "data").mkdir(parents=True)
    assert go(plan(), texts, tmp_path / "out", resume=resume).ended.step == 4


def test_two_runs_do_not_share_a_folder(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    handle = os.open(out, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="another run is training in"):
        go(plan(), texts, out)
    os.close(handle)
    assert go(plan(), texts, out, resume=True).ended.step == 4
    assert go(plan(), texts, tmp_path / "other").ended.step == 4, "the lock of a run ends with it"


def test_missing_extras(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'rorqual\[training\]'"):
        go(plan(), texts, tmp_path / "out", tensorboard=True)
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trained = go(plan(), texts, tmp_path / "out")
    assert trained.plot is None
    assert not any("curve" in line for line in summary(trained))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"run.step": 1}, r"run\.step is unknown; legal: steps, seed"),
        ({"steps": 1}, "steps is no key of a recipe; legal: SECTION.KEY, the sections data, loss"),
        ({"model.hidden_size": 1}, r"model\.hidden_size is no"),
        ({"name.x": 1}, r"name\.x is no"),
        ({"run.steps": 0}, r"run\.steps is 0, must be in 1\.\."),
        ({"optim.lr": -1.0}, r"optim\.lr is -1\.0, must be in 0\.\.10"),
        ({"data.seq_len": 1 << 19}, r"data\.seq_len"),
        ({"run.steps": "8"}, r"run\.steps must be an integer, got '8'"),
        ({"run.steps": 8.5}, r"run\.steps must be an integer"),
        ({"run.steps": True}, r"run\.steps must be an integer"),
        ({"data.heldout": "abc"}, r"data\.heldout must be a list of strings"),
    ],
)
def test_overrides_are_checked(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        changed(recipe(), overrides)


def test_overrides_change_their_fields_alone() -> None:
    base = recipe()
    found = changed(base, {"run.steps": 99, "run.seed": 7, "data.batch_tokens": 32})
    assert (found.run.steps, found.run.seed, found.data.batch_tokens) == (99, 7, 32)
    assert found.replace(run=base.run, data=base.data) == base


def test_devices() -> None:
    assert chosen_device("cpu").type == "cpu"
    with pytest.raises(InputError, match="legal: auto, cpu, cuda"):
        chosen_device("tpu")


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        with pytest.raises(InputError, match=r"the 1 CUDA devices of this machine; legal: 1\.\.1"):
            chosen_device("cuda")
