"""What was trained is what is shipped: the exported model's trace against the trainer's own forward.

Trainer and model multiply the same values (weights in the stored formats; caches packed in one, fake-quantised in the
other), so tensors agree to fp32 noise. That noise may move a cache entry across a rounding boundary: rows that read it
then differ by a little more, as far as `FLIP`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import rorqual
from rorqual.checkpoint.initial import distribution, draw, favour_own_copy
from rorqual.config import ModelConfig, presets
from rorqual.model.tap import Recorder
from rorqual.training import learner_v41
from rorqual.training.batch import Packed
from rorqual.training.export import export
from rorqual.training.learner import Phase
from rorqual.training.learner_v41 import V41Learner
from rorqual.training.parameters import trained_specs
from rorqual.training.recipe import LossRecipe

TOKENS = 160
NOISE, FLIP = 1e-4, 0.02
"""Of a tensor's largest element."""
FLIPPED_ROWS = 0.3


def learner_of(config: ModelConfig) -> V41Learner:
    """A learner whose activations are a trained model's: values as `rorqual init` draws them."""
    learner = V41Learner(config, None, LossRecipe(), 0, fast=False)
    with torch.no_grad():
        for name, spec in trained_specs(config).items():
            parameter = learner.parameters[name]
            values = draw(3, name, 0, tuple(parameter.shape), distribution(spec, parameter.shape[-1], config))
            if name.endswith("_base"):
                favour_own_copy(values, config.hc_mult)
            parameter.copy_(torch.from_numpy(values))
    return learner


def round_as_stored(learner: V41Learner, quantised: bool) -> None:
    """BF16 where the checkpoint will be BF16; what it quantises is rounded in the forward."""
    with torch.no_grad():
        for name, spec in trained_specs(learner.config).items():
            if spec.dtypes[0] == "BF16" or (not quantised and spec.dtypes[0] != "F32"):
                learner.parameters[name].copy_(learner.parameters[name].to(torch.bfloat16))


def losses_of(learner: V41Learner, ids: Tensor, quantised: bool) -> Tensor:
    packed = Packed(ids=ids[:-1], targets=ids[1:], starts=(0,), number=0)
    (losses,) = learner.token_losses([packed], Phase(quantise_weights=quantised, draft=False))
    return losses


def trace_of(learner: V41Learner, ids: Tensor, folder: Path, quantised: bool) -> dict[str, Tensor]:
    export(learner.parameters, learner.config, None, folder, quantised=quantised)
    return rorqual.trace(rorqual.load(folder, page_tokens=16, kernels="plain"), ids[:-1])


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return presets.load("tiny").without("vision")


@pytest.fixture(scope="module")
def ids(config: ModelConfig) -> Tensor:
    return torch.randint(3, config.vocab_size - 2, (TOKENS + 1,), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("quantised", [True, False])
def test_every_tensor_of_the_trace_is_the_trainers(
    quantised: bool, config: ModelConfig, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, recorder = learner_of(config), Recorder()
    round_as_stored(learner, quantised)
    monkeypatch.setattr(learner_v41, "Tap", lambda: recorder)
    losses = losses_of(learner, ids, quantised)
    trained = recorder.tensors()
    traced = trace_of(learner, ids, tmp_path / "out", quantised)

    shared = sorted(name for name in trained if name in traced)
    parts = ("x_in", "attn_in", "attn_out", "ffn_in", "moe_weights", "ffn_out")
    assert {f"layers.{layer}.{part}" for layer in range(config.num_hidden_layers) for part in parts} <= set(shared)
    assert {name: text for name in shared if (text := difference(traced[name], trained[name]))} == {}
    expected = F.cross_entropy(traced["logits"], ids[1:], reduction="none")
    assert difference(losses, expected) == ""
    assert abs(float(losses.mean() - expected.mean())) < 1e-3


def difference(found: Tensor, wanted: Tensor) -> str:
    """Empty where the rows agree; see the file's head."""
    assert found.shape == wanted.shape
    error = (found.float() - wanted.float()).abs().reshape(found.shape[0], -1).amax(1) / wanted.float().abs().max()
    beyond = float((error > NOISE).float().mean())
    return "" if beyond <= FLIPPED_ROWS and float(error.max()) <= FLIP else f"{beyond:.0%} of rows, {error.max():.2g}"


@pytest.mark.parametrize("quantised", [True, False])
def test_the_file_holds_no_more_than_the_rounded_values(quantised: bool, config: ModelConfig, tmp_path: Path) -> None:
    """So the traces above are those of the fp32 parameters too: rounding them first changes no byte."""
    learner = learner_of(config)
    files = []
    for name in ("fp32", "rounded"):
        export(learner.parameters, config, None, tmp_path / name, quantised=quantised)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
        round_as_stored(learner, quantised)
    assert files[0] == files[1]
