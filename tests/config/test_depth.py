"""Depth cuts keep every role (field case 39), and every technique can be turned off."""

from __future__ import annotations

from typing import Any

import pytest

from rorqual.config import Mode, ModelConfig, Part, presets
from rorqual.config.depth import TECHNIQUES
from rorqual.errors import ConfigError
from rorqual.layout import KVLayout

RELEASE = presets.load("v4.1-flash")
CUT = [0, 1, 2, 3, 20, 21, 24]


def test_the_field_case_cut_keeps_every_role() -> None:
    small = RELEASE.with_depth(CUT)
    new_id = {old: new for new, old in enumerate(CUT)}
    for new, old in enumerate(CUT):
        ours, theirs = small.roles[new], RELEASE.roles[old]
        assert (ours.mode, ours.ratio, ours.part) == (theirs.mode, theirs.ratio, theirs.part)
        assert ours.kv_source == (None if theirs.kv_source is None else new_id[theirs.kv_source])
        assert ours.index_source == (None if theirs.index_source is None else new_id[theirs.index_source])
        assert (ours.is_candidate_source, ours.uses_candidates) == (theirs.is_candidate_source, theirs.uses_candidates)
        assert (ours.engram_index is None) == (theirs.engram_index is None)


def test_the_field_case_cut_renumbers_every_list() -> None:
    small = RELEASE.with_depth(CUT)
    assert small.num_hidden_layers == 7
    assert small.compress_ratios == (0, 0, 2, 2, 1, 1, 1, 0, 0, 0)
    assert small.kv_source_layer_ids == (2, 4)
    assert small.index_source_layer_ids == (2, 4, 6)
    assert small.candidate_source_layer_id == 4
    assert small.engram_layer_ids == (1,)
    assert small.engram_num_embeddings == (384006168,)
    assert small.decoder_start == 4
    # 37, 38 and 39 are gone: the last three layers stand in for them.
    assert small.dspark_target_layer_ids == (4, 5, 6)
    assert [role.part for role in small.draft_roles] == [Part.DRAFT] * 3
    assert KVLayout(small).bytes_per_token == 178 + 356


def test_kept_targets_are_mapped() -> None:
    small = RELEASE.with_depth([0, 20, 36, 37, 38, 39])
    assert small.dspark_target_layer_ids == (3, 4, 5)
    assert small.engram_layer_ids == ()
    assert small.engram_num_embeddings == ()


def test_tables_left_have_the_sizes_of_the_first_ones() -> None:
    """Primes are dealt out in order of the Engram layers, so layer 14 alone gets what layer 1 had."""
    small = RELEASE.with_depth([14, *range(20, 40)])
    assert small.engram_layer_ids == (0,)
    assert small.engram_num_embeddings == (384006168,)


def test_the_whole_depth_changes_nothing() -> None:
    assert RELEASE.with_depth(range(40)) == RELEASE


def test_the_decoder_begins_at_the_last_source_left() -> None:
    small = RELEASE.without("drafts").with_depth([0, 1, 2, 3])
    assert small.decoder_start == 2
    assert small.candidate_source_layer_id == -1
    assert [role.mode for role in small.roles] == [Mode.SWA, Mode.SWA, Mode.FULL, Mode.REUSE]


@pytest.mark.parametrize(
    ("layers", "field"),
    [
        ([0, 1, 3], "kv_source_layer_ids"),
        ([0, 20, 25, 39], "index_source_layer_ids"),
        ([2, 14, 21], "kv_source_layer_ids"),
        ([], "layer_ids"),
        ([0, 40], "layer_ids"),
        ([-1, 0], "layer_ids"),
        ([1, 0], "layer_ids"),
        ([0, 0], "layer_ids"),
        ([True], "layer_ids"),
        ([0.0], "layer_ids"),
        ([0, 1], "dspark_target_layer_ids"),
    ],
)
def test_impossible_cuts(layers: list[Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}"):
        RELEASE.with_depth(layers)


def test_users_of_the_pool_need_its_source() -> None:
    config = RELEASE.replace(candidate_source_layer_id=24)
    with pytest.raises(ConfigError, match=r"^candidate_source_layer_id: layer 28 reads layer 24"):
        config.with_depth([20, 21, 28])


OFF: dict[str, dict[str, Any]] = {
    "candidates": {"candidate_source_layer_id": -1},
    "mhc": {"hc_mult": 1},
    "routed_experts": {"n_routed_experts": 0},
    "shared_expert": {"n_shared_experts": 0},
    "swiglu_clamp": {"swiglu_limit": 0},
    "yarn": {"rope_scaling": None},
    "vision": {"vision": None},
    "engram": {"engram_layer_ids": (), "engram_num_embeddings": ()},
    "drafts": {"num_nextn_predict_layers": 0, "compress_ratios": RELEASE.compress_ratios[:40]},
    "compression": {
        "compress_ratios": (0,) * 43,
        "kv_source_layer_ids": (),
        "index_source_layer_ids": (),
        "candidate_source_layer_id": -1,
    },
}


def test_every_technique_is_listed() -> None:
    assert set(OFF) == set(TECHNIQUES)


@pytest.mark.parametrize("technique", OFF)
def test_each_technique_has_values_that_turn_it_off(technique: str) -> None:
    by_hand, by_name = RELEASE.replace(**OFF[technique]), RELEASE.without(technique)
    assert by_name != RELEASE
    assert by_hand.roles == by_name.roles
    for field in OFF[technique]:
        assert getattr(by_hand, field) == getattr(by_name, field)
    for config in (by_hand, by_name):
        assert ModelConfig.from_json(config.to_hf_dict()) == config
        assert ModelConfig.from_json(config.to_inference_dict()) == config


def test_everything_off_at_once() -> None:
    bare = RELEASE.without(*(name for name in TECHNIQUES if name != "routed_experts"))
    assert bare.decoder_start == 40
    assert {role.mode for role in bare.roles} == {Mode.SWA}
    assert all(role.engram_index is None and role.part is Part.ENCODER for role in bare.roles)
    assert bare.engram_columns == 0
    assert len(bare.roles) == 40


def test_yarn_is_also_off_with_a_factor_of_1() -> None:
    text = RELEASE.to_hf_dict()
    text["text_config"]["rope_scaling"]["factor"] = 1
    config = ModelConfig.from_json(text)
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 1


def test_unknown_technique() -> None:
    with pytest.raises(ConfigError, match=r"^technique must be one of compression, "):
        RELEASE.without("attention")
