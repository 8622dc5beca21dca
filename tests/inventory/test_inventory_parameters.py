"""Parameter counts of the release, each against the published figure and a formula written out by hand."""

from __future__ import annotations

import pytest

from rorqual.config import ModelConfig, presets
from rorqual.inventory.names import PARTS
from rorqual.inventory.parameters import (
    active_parameters,
    backbone_parameters,
    expert_parameters,
    parameters_by_part,
)

BILLION = 10**9


@pytest.fixture(scope="module")
def release() -> ModelConfig:
    return presets.load("v4.1-flash")


@pytest.fixture(scope="module")
def parts(release: ModelConfig) -> dict[str, int]:
    return parameters_by_part(release)


def test_routed_experts(release, parts):
    assert expert_parameters(release) == 35_389_440
    assert parts["experts"] == 40 * 384 * 35_389_440 == 543_581_798_400
    assert parts["draft_experts"] == 3 * 128 * 35_389_440


def test_engram_tables(parts):
    assert parts["engram_tables"] == (384_006_168 + 384_016_682) * 256
    assert parts["engram_tables"] / BILLION == pytest.approx(196.6, abs=0.05)


def test_backbone_leaves_out_engram_drafts_and_vision(parts):
    assert backbone_parameters(parts) / BILLION == pytest.approx(551.6, abs=0.05)
    assert list(parts) == [part for part in PARTS if part in parts] == list(PARTS)


def test_active_in_decode_counts_engrams_projection_but_not_the_head(release):
    active = active_parameters(release)
    assert active.decode / BILLION == pytest.approx(15.47, abs=0.005)
    assert active.decode_with_head / BILLION == pytest.approx(16.13, abs=0.005)
    assert active.head == 129_280 * 5120


def test_active_in_prefill_is_the_encoder(release):
    active = active_parameters(release)
    assert active.prefill / BILLION == pytest.approx(7.89, abs=0.005)
    assert active.seam == 512 * 5120 + 512 + 128 * 512 + 128


def test_active_by_hand_on_a_small_config(tiny_config):
    config = tiny_config.without("engram", "vision", "drafts", "compression")
    d, heads = config.hidden_size, config.num_attention_heads
    n = config.hc_mult
    low, c = config.q_lora_rank, config.head_dim
    out = config.o_groups * config.o_lora_rank
    attention = heads + d * low + low + low * heads * c + d * c + c + config.o_lora_rank * heads * c + out * d
    mixing = 2 * d + 2 * ((2 + n) * n * (n * d + 1) + 3)
    experts = (config.num_experts_per_tok + 1) * 3 * d * config.moe_intermediate_size
    router = config.n_routed_experts * (d + 1)
    layer = attention + mixing + experts + router
    active = active_parameters(config)
    assert active.decode == config.num_hidden_layers * layer + d
    assert active.prefill == config.num_hidden_layers * layer  # no source: everything is encoder
    assert active.seam == 0
