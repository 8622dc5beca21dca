"""Training that begins at a checkpoint: its values come back exactly, and drafts alone leave the backbone as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rorqual.cli.app import main
from rorqual.config import presets
from rorqual.errors import ConfigError, InputError
from rorqual.training.export import export
from rorqual.training.learner import Phase, Totals
from rorqual.training.learner_v41 import V41Learner
from rorqual.training.recipe import LossRecipe, PhaseRecipe, Recipe
from rorqual.training.run import train
from rorqual.training.start import Start
from tests.training.fake_training import byte_tokenizer
from tests.training.models import packed, tiny_config

RECIPE = """
model = "config.json"
[data]
vocab_size = 300
seq_len = 32
batch_tokens = 64
[loss]
learn = "{learn}"
[phases]
sparse_from = 0.0
quantise_weights_from = 0.0
draft_from = 0.0
[run]
steps = 2
eval_every = 0
sample_every = 0
save_every = 1
autocast = "off"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two recipes, a text, and the model that the first of them trains."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "config.json").write_text(json.dumps(presets.load("tiny").without("vision").to_hf_dict()))
    for learn in ("all", "draft"):
        (folder / f"{learn}.toml").write_text(RECIPE.format(learn=learn))
    (folder / "text.txt").write_text("A whale surfaced, breathed, and dived again. " * 60)
    (folder / "other.txt").write_text("Krill drift with the current in the cold water. " * 60)
    train(folder / "all.toml", [folder / "text.txt"], folder / "first")
    return folder


def values(model: Path) -> dict[str, torch.Tensor]:
    start = Start.read(model)
    return start.values(start.config)


def test_what_was_exported_comes_back_and_is_exported_again_as_it_was(folder: Path, tmp_path: Path) -> None:
    start = Start.read(folder / "first" / "model")
    first = start.values(start.config)
    assert not start.config.weights.is_plain
    export(first, start.config, start.tokenizer, tmp_path / "again")
    again = values(tmp_path / "again")
    assert set(first) == set(again)
    for name, value in first.items():
        assert value.dtype == torch.float32 and torch.equal(value, again[name]), name


def test_drafts_alone_change_the_drafts_alone(folder: Path, tmp_path: Path) -> None:
    model, texts = folder / "first" / "model", [folder / "other.txt"]
    trained = train(folder / "draft.toml", texts, tmp_path / "drafts", init=model, plain=True)
    before, plain = values(model), values(tmp_path / "drafts" / "model-plain")
    assert trained.model is not None
    after = values(trained.model)
    for name, value in before.items():
        kept = torch.equal(value, after[name])
        assert kept or name.startswith("mtp."), name
        if not name.startswith("mtp."):
            # Norms, mixing and embeddings lie in BF16 and F32 in both.
            assert torch.equal(value.bfloat16(), plain[name].bfloat16()), name
    moved = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert len(moved) > 20
    stated = json.loads((tmp_path / "drafts" / "run.json").read_text())
    assert stated["init"] == str(model)
    last = json.loads((tmp_path / "drafts" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["loss"] == pytest.approx(last["draft_ce"] + last["draft_tv"] + 0.1 * last["draft_confidence"], rel=1e-5)
    assert last["grad_norm"] == 0 and last["grad_norm_draft"] > 0
    assert (trained.model / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()


def test_a_run_from_a_checkpoint_resumes_to_the_same_bits(folder: Path, tmp_path: Path) -> None:
    model, texts, recipe = folder / "first" / "model", [folder / "other.txt"], folder / "draft.toml"
    for out in ("whole", "broken"):
        train(recipe, texts, tmp_path / out, init=model, export=False)
    state = tmp_path / "broken" / "checkpoints" / "step-00000002" / "state.safetensors"
    whole = (tmp_path / "whole" / "checkpoints" / "step-00000002" / "state.safetensors").read_bytes()
    for file in state.parent.iterdir():
        file.unlink()
    state.parent.rmdir()
    train(recipe, texts, tmp_path / "broken", init=model, export=False, resume=True)
    assert state.read_bytes() == whole
    with pytest.raises(InputError, match=r"init: none given; drafts alone are trained for a model that is there"):
        train(recipe, texts, tmp_path / "broken", resume=True)


def test_all_parts_learn_from_a_checkpoint_too(folder: Path, tmp_path: Path) -> None:
    model = folder / "first" / "model"
    trained = train(folder / "all.toml", [folder / "other.txt"], tmp_path / "more", init=model)
    assert trained.model is not None
    before, after = values(model), values(trained.model)
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert "embed.weight" in changed and "layers.0.attn.wq_a.weight" in changed


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["draft.toml"], "init: none given; drafts alone are trained for a model that is there: --init FOLDER"),
        (["draft.toml", "--init", "nowhere"], "nowhere is not a folder"),
        (["draft.toml", "--init", "bare"], "has no tokenizer.json"),
        (["demo.toml", "--init", "first/model"], "is another model: its hidden_size is 96, the recipe's is 256"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], named: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bare").mkdir(exist_ok=True)
    (folder / "bare" / "config.json").write_text((folder / "config.json").read_text())
    (folder / "demo.toml").write_text('model = "demo"\n')
    words = [str(folder / word) if (folder / word).exists() else word for word in options]
    assert main(["train", *words, "--data", str(folder / "text.txt"), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert named in message
    assert not (tmp_path / "out" / "run.json").exists()


def test_the_preset_is_for_the_model_that_ships() -> None:
    recipe = Recipe.load("drafts")
    assert recipe.loss.learn == "draft" and recipe.model == Recipe.load("demo").model


def test_a_recipe_of_drafts_needs_drafts_from_the_first_step() -> None:
    recipe = Recipe.load("drafts")
    with pytest.raises(ConfigError, match=r"phases\.draft_from is 0\.3, must be 0 where loss\.learn is 'draft'"):
        recipe.replace(phases=PhaseRecipe())
    with pytest.raises(ConfigError, match=r"loss\.learn is 'draft', and the model has no draft layers"):
        recipe.replace(model=recipe.model.without("drafts"))


def test_the_drafts_losses_are_those_of_training_all_parts() -> None:
    """But for what training all parts adds to the inputs: noise, and seams."""
    batch = [packed([40, 24], number=1), packed([64], number=2)]
    totals, phase = Totals(tokens=124, sequences=2), Phase(replay=0.0)
    found = []
    for learn in ("all", "draft"):
        loss = LossRecipe(learn=learn, anchors=1.0, indexer=0.0, balance=0.0)
        learner = V41Learner(tiny_config(), None, loss, 0, fast=False)
        step = learner.loss(batch, phase, totals)
        step.total.backward()
        drafts = {n: p.grad for n, p in learner.parameters.items() if n.startswith("mtp.") and p.grad is not None}
        rest = [n for n, p in learner.parameters.items() if not n.startswith("mtp.") and p.grad is not None]
        assert bool(rest) == (learn == "all")
        found.append((step, drafts))
    (whole, ours), (alone, theirs) = found
    assert set(ours) == set(theirs) and len(theirs) > 50
    for name in ("draft_ce", "draft_tv", "draft_confidence"):
        assert alone.parts[name] == pytest.approx(whole.parts[name], rel=1e-6)
    for name, gradient in ours.items():
        assert torch.allclose(gradient, theirs[name], rtol=1e-4, atol=1e-7), name
    assert all(name.startswith("mtp.") for name in alone.loads)


def test_a_tokenizer_of_another_vocabulary_is_another_model(folder: Path) -> None:
    start = Start.read(folder / "first" / "model")
    other = replace(start, tokenizer=byte_tokenizer())
    assert other.values(start.config), "values are the checkpoint's own, whatever reads the texts"
    with pytest.raises(InputError, match="its vocab_size is 300, the recipe's is 301"):
        start.values(start.config.replace(vocab_size=301))
