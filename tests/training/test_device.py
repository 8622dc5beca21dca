"""The learner on a device that is not the CPU (`tests.elsewhere`), and on a real one where there is one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.training import run
from rorqual.training.fit import fit_config
from rorqual.training.learner import Phase, Totals
from rorqual.training.learner_v41 import V41Learner
from rorqual.training.optim import Optimizers, query_heads
from rorqual.training.optim.clip import clip_gradients
from rorqual.training.progress import Reporter
from rorqual.training.recipe import LossRecipe, OptimRecipe, Recipe
from rorqual.training.run import train
from rorqual.training.samples import SampleParams
from rorqual.training.state import checkpoints
from rorqual.training.trainer import CHECKPOINTS
from tests.elsewhere import elsewhere
from tests.training.models import SMALL_MODEL, packed, tiny_config

PHASE = Phase(quantise_caches=True, quantise_weights=True, sparse=True, draft=True, replay=1.0)
RECIPE = f"""
{SMALL_MODEL}[data]
vocab_size = 320
seq_len = 32
batch_tokens = 64
micro_tokens = 64
heldout = ["held*"]
heldout_fraction = 0.0
[phases]
sparse_from = 0.0
quantise_from = 0.0
draft_from = 0.0
quantise_weights_from = 0.0
[run]
steps = 2
eval_every = 2
sample_every = 2
save_every = 1
autocast = "off"  # bf16 tiles are the CPU's alone
"""
SHAPES = ([70], [33, 40], [1, 2, 64, 3])
Result = tuple[list[float], dict[str, Tensor], dict[str, Tensor], list[Tensor], Tensor]


def trained(device: torch.device) -> Result:
    """A step of everything on a device, and what the model computes after it; all results on the CPU."""
    config = tiny_config()
    made = V41Learner(config, None, LossRecipe(indexer_rows=0.5, anchors=0.2, replay=1.0), 3, device=device, fast=False)
    assert all(parameter.device.type == device.type for parameter in made.parameters.values())
    batch = [packed(list(shape), number) for number, shape in enumerate(SHAPES)]
    batch = [dataclasses.replace(p, ids=p.ids.to(device), targets=p.targets.to(device)) for p in batch]
    totals = Totals(tokens=sum(p.trained for p in batch), sequences=len(batch))
    optimiser = Optimizers(made.parameters, OptimRecipe(), query_heads(made.parameters, config))
    found = made.loss(batch, PHASE, totals)
    found.total.backward()
    losses = [found.total.item(), *found.parts.values(), clip_gradients(made.parameters, 1.0).value]
    grads = {name: grad.to_dense().cpu() for name, p in made.parameters.items() if (grad := p.grad) is not None}
    optimiser.step(1.0)
    made.after_step(found.loads)
    parameters = {name: parameter.detach().cpu() for name, parameter in made.parameters.items()}
    following = made.next_logits(batch[1].ids, PHASE).cpu()
    return losses, grads, parameters, [one.cpu() for one in made.token_losses(batch, PHASE)], following


def test_training_stays_on_its_device_and_computes_the_same_there() -> None:
    here = trained(torch.device("cpu"))
    with elsewhere() as device:
        there = trained(device)
    assert here[0] == there[0]
    for ours, theirs in zip(here[1:3], there[1:3], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name
    assert all(torch.equal(a, b) for a, b in zip(here[3], there[3], strict=True))
    assert torch.equal(here[4], there[4])


@pytest.mark.full
def test_a_whole_run_leaves_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, samples, checkpoints to resume from, and the exported model, whatever the device."""
    (tmp_path / "one.txt").write_text("The whale breathed and dived. " * 40, encoding="utf-8")
    (tmp_path / "held.txt").write_text("The sea closed over it again. " * 20, encoding="utf-8")
    (tmp_path / "run.toml").write_text(RECIPE, encoding="utf-8")
    recipe = Recipe.load(tmp_path / "run.toml")

    def plain(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> V41Learner:
        config = fit_config(recipe.model, tokenizer)
        return V41Learner(config, tokenizer, recipe.loss, recipe.run.seed, device=device, fast=False)

    monkeypatch.setattr(run, "v41_learner", plain)
    monkeypatch.setattr("rorqual.training.trainer.SampleParams", lambda: SampleParams(count=1, prompt=4, tokens=4))

    def files(name: str) -> tuple[list[dict[str, Any]], str, bytes]:
        out, texts = tmp_path / name, [tmp_path / "one.txt", tmp_path / "held.txt"]
        for resume in (False, True):
            train(recipe, texts, out, resume=resume, reporter=Reporter(silent=True))
            shutil.rmtree(checkpoints(out / CHECKPOINTS)[-1])
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for record in metrics:
            for name in ("tokens_per_s", "seconds", "peak_bytes"):
                record.pop(name, None)
        samples = (out / "samples.txt").read_text(encoding="utf-8")
        return metrics, samples, (out / "model" / "model.safetensors").read_bytes()

    here = files("here")
    assert [record["kind"] for record in here[0]].count("eval") == 1
    with elsewhere() as device:
        monkeypatch.setattr(run, "chosen_device", lambda _: device)
        there = files("there")
    assert here == there


def test_the_other_device_refuses_what_a_gpu_would() -> None:
    with elsewhere() as device:
        there = torch.arange(6, device=device)
        assert (there + torch.tensor([1] * 6, device=device)).tolist() == [1, 2, 3, 4, 5, 6]
        assert (there * 2 + torch.tensor(1)).tolist() == [1, 3, 5, 7, 9, 11]
        with pytest.raises(AssertionError, match=r"aten\.add"):
            there + torch.ones(6)
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        assert there.cpu().numpy().sum() == 15


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    here, there = trained(torch.device("cpu")), trained(torch.device("cuda"))
    # Two machines' sums: a rounding or a selection that hangs on the last bit moves a few rows.
    assert here[0][0] == pytest.approx(there[0][0], abs=5e-3)
    assert (torch.cat(here[3]) - torch.cat(there[3])).abs().mean() < 2e-2
