"""Scopes: relative names, each tensor exactly once, quantised weights as packed objects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rorqual.checkpoint.load import Checkpoint
from rorqual.checkpoint.scope import WeightScope
from rorqual.checkpoint.table import EngramTable
from rorqual.config import ModelConfig
from rorqual.errors import CheckpointError
from rorqual.formats.weights import DenseWeight, Fp4Weight, Fp8Weight


@pytest.fixture
def scope(tiny_folder, tiny_config) -> WeightScope:
    return Checkpoint.open(tiny_folder, tiny_config).scope()


def golden_cases() -> list[str]:
    goldens = Path(__file__).resolve().parents[1] / "goldens"
    return sorted(folder.name for folder in goldens.iterdir() if (folder / "model.safetensors").exists())


def take_all(scope: WeightScope, names) -> None:
    for name in names:
        stem = name.removesuffix(".weight")
        if name.endswith(".scale"):
            continue
        if name.endswith("engram.embed.weight"):
            scope.table(stem)
        elif scope.has(f"{stem}.scale"):
            scope.weight(stem)
        else:
            scope.param(name)


@pytest.mark.parametrize("case", golden_cases())
def test_reference_checkpoints_are_used_whole(goldens, case):
    config = ModelConfig.from_json(goldens / case)
    checkpoint = Checkpoint.open(goldens / case, config)
    take_all(checkpoint.scope(), checkpoint.specs)
    checkpoint.assert_all_taken()


def test_weights_are_what_the_config_stores(scope, tiny_config):
    layer = scope.scope("layers.0")
    wq_a = layer.scope("attn").weight("wq_a")
    assert isinstance(wq_a, Fp8Weight)
    assert wq_a.shape == (tiny_config.q_lora_rank, tiny_config.hidden_size)
    w2 = layer.weight("ffn.experts.0.w2")
    assert isinstance(w2, Fp4Weight)
    assert w2.shape == (tiny_config.hidden_size, tiny_config.moe_intermediate_size)
    assert isinstance(scope.weight("head"), DenseWeight)
    assert isinstance(scope.scope("layers.1.engram").table("embed"), EngramTable)


def test_param_is_a_converted_copy(tiny_folder, tiny_config):
    checkpoint = Checkpoint.open(tiny_folder, tiny_config)
    value = checkpoint.scope().param("norm.weight")
    assert value.dtype == torch.float32
    assert torch.equal(value, checkpoint.tensor("norm.weight").float())
    same = checkpoint.scope().param("layers.0.attn.attn_sink")  # F32 in the file: still a copy
    same.zero_()
    assert checkpoint.tensor("layers.0.attn.attn_sink").count_nonzero()


def test_has_takes_nothing(scope):
    inner = scope.scope("layers.0.attn")
    assert inner.has("wq_a.scale") and not inner.has("wq_c.weight") and not scope.scope("layers.99").has("attn_sink")
    inner.weight("wq_a")
    assert inner.has("wq_a.weight")


def test_taking_twice_asserts_across_scopes(scope):
    scope.weight("layers.0.attn.wq_a")
    with pytest.raises(AssertionError, match=r"layers\.0\.attn\.wq_a\.weight was already taken"):
        scope.scope("layers.0.attn").tensor("wq_a.weight")
    with pytest.raises(AssertionError, match=r"layers\.0\.attn\.wq_a\.scale was already taken"):
        scope.tensor("layers.0.attn.wq_a.scale")


def test_taking_what_is_not_there_asserts(scope):
    with pytest.raises(AssertionError, match=r"layers\.0\.nothing is not a tensor of this checkpoint"):
        scope.scope("layers.0").param("nothing")


def test_codes_are_never_handed_out_as_values(scope):
    with pytest.raises(AssertionError, match="quantised"):
        scope.param("layers.0.attn.wq_a.weight")


def test_leftovers_are_named(tiny_folder, tiny_config):
    checkpoint = Checkpoint.open(tiny_folder, tiny_config)
    take_all(checkpoint.scope(), [name for name in checkpoint.specs if name != "layers.1.ffn_norm.weight"])
    with pytest.raises(AssertionError, match=r"1 tensors were never used: layers\.1\.ffn_norm\.weight"):
        checkpoint.assert_all_taken()
    checkpoint.scope("layers.0").assert_all_taken()
    checkpoint.scope("layers.1").param("ffn_norm.weight")
    checkpoint.assert_all_taken()


@pytest.mark.parametrize("stem", ["layers.0.attn.wq_a", "layers.0.ffn.experts.1.w2"])
def test_scale_byte_255_is_refused_by_name(edited, tiny_config, stem):
    folder = edited(lambda tensors: tensors[f"{stem}.scale"].view(torch.uint8)[1, 0].fill_(255))
    scope = Checkpoint.open(folder, tiny_config).scope()
    with pytest.raises(CheckpointError, match=rf"{stem}\.scale: scale byte 255 \(NaN\) at \(1, 0\)"):
        scope.weight(stem)


def test_tiles_keep_their_own_scales(tmp_path, tiny_config):
    """A 64 x 64 FP8 matrix of ones under four distinct tile scales (field case 26)."""
    codes = torch.ones(64, 64).to(torch.float8_e4m3fn)
    scales = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    values = Fp8Weight(codes, scales).expand()
    for row in (0, 1):
        for column in (0, 1):
            tile = values[row * 32 : row * 32 + 32, column * 32 : column * 32 + 32]
            assert (tile == 2.0 ** (2 * row + column)).all()
