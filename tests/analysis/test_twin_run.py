"""The twin goes through the model's own training, and comes back from its folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from rorqual.analysis.dense_twin import DenseTwin, twin_config
from rorqual.analysis.twin_run import load_twin, train_twin, twin_learner
from rorqual.config import presets
from rorqual.errors import InputError
from rorqual.training.batch import Packed
from rorqual.training.data.bpe import train_tokenizer
from rorqual.training.data.documents import Document
from rorqual.training.data.prepare import TrainingData
from rorqual.training.fit import fit_config
from rorqual.training.learner import Phase, Totals
from rorqual.training.metrics import METRICS, read_metrics
from rorqual.training.objective import noised
from rorqual.training.progress import Reporter
from rorqual.training.recipe import DataRecipe, LossRecipe, OptimRecipe, Recipe, RunRecipe

TEXT = "A whale surfaced, breathed, and dived again; the sea closed over it. " * 30
RECIPE = Recipe(
    name="small",
    model=presets.load("tiny").without("vision"),
    data=DataRecipe(vocab_size=300, seq_len=64, batch_tokens=128, micro_tokens=128, heldout=("held*",)),
    optim=OptimRecipe(warmup=0.2),
    run=RunRecipe(steps=12, eval_every=12, eval_sequences=2, sample_every=0, save_every=12),
)


def test_train_and_load(tmp_path: Path) -> None:
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    for name in ("one", "two", "held"):
        (texts / f"{name}.txt").write_text(f"{name}: {TEXT}", encoding="utf-8")
    trained = train_twin(RECIPE, [texts], out, reporter=Reporter(silent=True))
    assert trained.ended.step == 12
    assert trained.model is None, "only the V4.1 model is exported"
    steps = [row for row in read_metrics(out / METRICS) if row["kind"] == "step"]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5

    checkpoint = next((out / "checkpoints").iterdir())
    config = fit_config(RECIPE.model, Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    data = TrainingData.prepare(RECIPE, [texts], out / "data", RECIPE.run.seed)
    found = load_twin(out, config, data.fingerprint)
    twin = found.learner
    assert twin.config == twin_config(config)
    ids = torch.arange(20) + 30
    assert not twin.next_logits(ids, Phase()).equal(DenseTwin.fresh(config, RECIPE.run.seed).next_logits(ids, Phase()))
    assert found.trained == {"step": 12, "tokens": 12 * 128, "lr": RECIPE.optim.lr, "lr_table": RECIPE.optim.lr_table}
    assert found.recipe["data"]["seq_len"] == 64

    with pytest.raises(InputError, match="not the dense twin of this model"):
        load_twin(out, config.replace(vocab_size=301), data.fingerprint)
    with pytest.raises(InputError, match="holds no checkpoint"):
        load_twin(texts, config, data.fingerprint)

    # The same texts in another order are other data.
    reordered = TrainingData.prepare(RECIPE, [texts], out / "data", RECIPE.run.seed + 1)
    with pytest.raises(InputError, match=r"was trained on other data .*; train it by the model's recipe"):
        load_twin(out, config, reordered.fingerprint)

    document = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    document["recipe"]["run"]["steps"] = 1650
    (checkpoint / "state.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InputError, match="stopped after step 12 of 1,650; go on with --resume"):
        load_twin(out, config, data.fingerprint)


def test_phases_change_nothing() -> None:
    twin = DenseTwin.fresh(RECIPE.model, 0)
    ids = torch.arange(12)
    batch = [Packed(ids=ids[:-1], targets=ids[1:], starts=(0,), number=0)]
    one = twin.token_losses(batch, Phase())
    other = twin.token_losses(batch, Phase(quantise_caches=False, quantise_weights=True, sparse=False, replay=1.0))
    assert one[0].equal(other[0])


def test_it_trains_on_the_noise_of_the_recipe_and_is_judged_without() -> None:
    tokenizer = train_tokenizer([Document(name="one", text=TEXT)], 300)
    recipe = dataclasses.replace(RECIPE, loss=LossRecipe(noise=0.4))
    loud = twin_learner(recipe, tokenizer, torch.device("cpu"))
    quiet = twin_learner(RECIPE, tokenizer, torch.device("cpu"))
    ids = torch.arange(60) + 30
    whole = Packed(ids=ids[:-1], targets=ids[1:], starts=(0,), number=4)
    totals = Totals(tokens=59, sequences=1)
    noise_id = fit_config(recipe.model, tokenizer).dspark_noise_token_id
    by_hand = noised(whole, 0.4, noise_id, recipe.run.seed)
    assert (by_hand.ids == noise_id).sum() > 10
    assert loud.loss([whole], Phase(), totals).parts == quiet.loss([by_hand], Phase(), totals).parts
    assert loud.loss([whole], Phase(), totals).parts != quiet.loss([whole], Phase(), totals).parts
    assert loud.token_losses([whole], Phase())[0].equal(quiet.token_losses([whole], Phase())[0])
