"""Hostile values are refused by field name, before anything is built from them (field case 38)."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.config import CacheFormats, ModelConfig, RopeScaling, VisionConfig, WeightFormats, presets
from rorqual.config.checks import integer
from rorqual.config.rules import FIELD_CHECKS
from rorqual.errors import ConfigError

RELEASE = presets.load("v4.1-flash")

KINDS = {f.name: str(f.type) for f in dataclasses.fields(ModelConfig) if f.init}
INT_FIELDS = sorted(name for name, kind in KINDS.items() if kind == "int")
FLOAT_FIELDS = sorted(name for name, kind in KINDS.items() if kind == "float")
LIST_FIELDS = sorted(name for name, kind in KINDS.items() if kind == "tuple[int, ...]")

# 0 turns the technique off, or is an ordinary id.
ZERO_IS_LEGAL = {
    "n_routed_experts",
    "n_shared_experts",
    "engram_pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "image_token_id",
    "dspark_noise_token_id",
    "dspark_n_routed_experts",
    "num_nextn_predict_layers",  # with as many ratios: test_wrong_number_of_ratios
}
MINUS_ONE_IS_LEGAL = {"candidate_source_layer_id"}


def refused(field: str, **changes: Any) -> str:
    """The message with which the release, changed so, is refused; it must begin with the field."""
    with pytest.raises(ConfigError) as caught:
        RELEASE.replace(**changes)
    message = str(caught.value)
    assert message.startswith(field), message
    assert "must" in message, message
    return message


def test_every_field_has_one_rule() -> None:
    assert set(FIELD_CHECKS) == set(KINDS)
    assert len(INT_FIELDS) > 30
    assert len(FLOAT_FIELDS) == 7
    assert len(LIST_FIELDS) == 6


@pytest.mark.parametrize("field", INT_FIELDS)
def test_hostile_integers(field: str) -> None:
    hostile: list[Any] = [-2, 2**31, 2**63, True, False, 1.0, "1", None, math.nan, [1]]
    hostile += [] if field in ZERO_IS_LEGAL else [0]
    hostile += [] if field in MINUS_ONE_IS_LEGAL else [-1]
    for value in hostile:
        refused(field, **{field: value})


@pytest.mark.parametrize("field", FLOAT_FIELDS)
def test_hostile_floats(field: str) -> None:
    hostile: list[Any] = [math.nan, math.inf, -math.inf, -1, 10**400, True, "10", None, [1.0]]
    hostile += [] if field == "swiglu_limit" else [0, 0.0]
    for value in hostile:
        refused(field, **{field: value})


@pytest.mark.parametrize("field", LIST_FIELDS)
def test_hostile_lists(field: str) -> None:
    good = list(getattr(RELEASE, field))
    for value in ("123", 3, None, {"0": 1}):
        refused(field, **{field: value})
    for item in (-1, 2**31, True, 1.0, "1", None, math.nan):
        refused(f"{field}[{len(good) - 1}]", **{field: [*good[:-1], item]})


@pytest.mark.parametrize("field", [name for name in LIST_FIELDS if name.endswith("_ids")])
def test_id_lists_are_ascending_and_in_the_backbone(field: str) -> None:
    good = list(getattr(RELEASE, field))
    refused(field, **{field: good[::-1]})
    refused(field, **{field: [good[0], *good]})
    refused(field, **{field: [*good, 40]})


@pytest.mark.parametrize("value", [1, "fp8", None, {"main": "bf16"}, dataclasses.replace(RELEASE.weights)])
@pytest.mark.parametrize("field", ["cache", "weights", "rope_scaling", "vision"])
def test_parts_are_of_their_own_type(field: str, value: Any) -> None:
    if (value is None and field in ("rope_scaling", "vision")) or (field == "weights" and type(value) is WeightFormats):
        assert getattr(RELEASE.replace(**{field: value}), field) == value
    else:
        refused(field, **{field: value})


def test_wrong_number_of_ratios() -> None:
    message = refused("compress_ratios", num_nextn_predict_layers=0)
    assert "43" in message
    assert "3 drafts" in message
    refused("compress_ratios", compress_ratios=RELEASE.compress_ratios[:-1])
    refused("compress_ratios", compress_ratios=RELEASE.compress_ratios[:39])
    refused("compress_ratios", compress_ratios=())


@pytest.mark.parametrize("ratio", [3, 5, 8, 128])
def test_ratios_are_0_1_2_4(ratio: int) -> None:
    ratios = [ratio if r == 2 else r for r in RELEASE.compress_ratios]
    refused("compress_ratios[2]", compress_ratios=ratios)


def test_ratio_4_is_legal() -> None:
    ratios = [4 if r == 2 else r for r in RELEASE.compress_ratios]
    assert RELEASE.replace(compress_ratios=ratios).roles[2].ratio == 4


def test_drafts_read_no_global_kv() -> None:
    refused("compress_ratios[41]", compress_ratios=[*RELEASE.compress_ratios[:41], 1, 0])


def test_reader_without_a_source() -> None:
    ratios = list(RELEASE.compress_ratios)
    ratios[1] = 2
    refused("kv_source_layer_ids", compress_ratios=ratios)
    # Compression turned off by half: no sources, yet layers that read one.
    refused("kv_source_layer_ids", kv_source_layer_ids=[], index_source_layer_ids=[], candidate_source_layer_id=-1)


def test_ratio_of_a_layer_is_that_of_the_source_it_reads() -> None:
    ratios = list(RELEASE.compress_ratios)
    ratios[10] = 1
    message = refused("compress_ratios[10]", compress_ratios=ratios)
    assert "source 8" in message
    # The ratio changes at 20 without a source of its own there.
    refused("compress_ratios[20]", kv_source_layer_ids=[2, 8, 14], index_source_layer_ids=[2, 8, 14])
    # A layer without global KV may stand anywhere.
    ratios[10] = 0
    assert RELEASE.replace(compress_ratios=ratios).roles[10].kv_source is None


def test_sources_have_a_ratio_and_an_indexer() -> None:
    refused("kv_source_layer_ids", kv_source_layer_ids=[1, 2, 8, 14, 20], index_source_layer_ids=[1, 2, 8, 14, 20])
    refused("index_source_layer_ids", index_source_layer_ids=[0, 2, 8, 14, 20])
    message = refused("index_source_layer_ids", index_source_layer_ids=[2, 14, 20])
    assert "layer 8" in message


def test_candidate_source() -> None:
    refused("candidate_source_layer_id", candidate_source_layer_id=21)
    refused("candidate_source_layer_id", candidate_source_layer_id=0)
    # Layer 20 has another ratio than layer 14, whose pool it would use.
    message = refused("candidate_source_layer_id", candidate_source_layer_id=14)
    assert "layer 20 has 1" in message
    assert RELEASE.replace(candidate_source_layer_id=36).roles[36].is_candidate_source


def test_attention_shapes() -> None:
    refused("qk_rope_head_dim", qk_rope_head_dim=514)
    refused("qk_rope_head_dim", qk_rope_head_dim=63)
    refused("qk_rope_head_dim", qk_rope_head_dim=1024)
    refused("index_head_dim", qk_rope_head_dim=256)
    refused("o_groups", o_groups=7)
    refused("o_groups", o_groups=128)


def test_experts() -> None:
    refused("num_experts_per_tok", num_experts_per_tok=385)
    refused("dspark_num_experts_per_tok", dspark_num_experts_per_tok=129)
    refused("n_shared_experts", n_shared_experts=2)
    refused("n_shared_experts", n_shared_experts=0, n_routed_experts=0)
    refused("dspark_n_routed_experts", n_shared_experts=0, dspark_n_routed_experts=0)
    refused("scoring_func", scoring_func="relu")
    refused("scoring_func", scoring_func=1)
    refused("norm_topk_prob", norm_topk_prob=1)


def test_engram() -> None:
    refused("engram_num_embeddings", engram_num_embeddings=[384006168])
    refused("engram_num_embeddings", engram_num_embeddings=[])
    refused("engram_max_ngram_size", engram_max_ngram_size=1)
    refused("engram_compressed_vocab_size", engram_compressed_vocab_size=129281)


def test_drafts() -> None:
    refused("dspark_target_layer_ids", dspark_target_layer_ids=[])


def test_settings_of_a_technique_that_is_off_keep_their_range_only() -> None:
    assert RELEASE.replace(engram_layer_ids=[]).engram_num_embeddings == (384006168, 384016682)
    refused("engram_num_embeddings[0]", engram_layer_ids=[], engram_num_embeddings=[0])
    assert RELEASE.replace(candidate_source_layer_id=-1, candidate_block_size=0).candidate_block_size == 0
    assert RELEASE.replace(n_routed_experts=0, num_experts_per_tok=6).num_experts_per_tok == 6


def test_token_ids_are_below_the_vocabulary() -> None:
    fields = ["bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"]
    for field in [*fields, "engram_pad_token_id", "dspark_noise_token_id"]:
        refused(field, **{field: 129280})
    refused("image_token_id", image_token_id=-1)
    assert RELEASE.replace(image_token_id=-1, vision=None).image_token_id == -1


def test_quantised_widths_are_whole_groups() -> None:
    refused("head_dim", head_dim=500)
    refused("head_dim", head_dim=528)  # a multiple of 16, not of the window's 32
    refused("index_head_dim", index_head_dim=80)
    refused("hidden_size", hidden_size=5136)
    refused("q_lora_rank", q_lora_rank=1270)
    refused("o_groups * o_lora_rank", o_lora_rank=1)
    refused("moe_intermediate_size", moe_intermediate_size=2300)
    refused("engram_head_dim", engram_head_dim=260)
    plain = WeightFormats(dense="bf16", experts="bf16", engram="bf16")
    free = CacheFormats(main="bf16", index_key="fp32", window="bf16")
    odd = {"hidden_size": 5137, "q_lora_rank": 1271, "head_dim": 501, "index_head_dim": 81, "o_lora_rank": 3}
    assert RELEASE.replace(weights=plain, cache=free, **odd).hidden_size == 5137


def test_vision_values() -> None:
    assert RELEASE.vision is not None
    hostile: list[Any] = [0, -1, 2**31, True, "14", math.nan]
    for field in dataclasses.fields(VisionConfig):
        for value in hostile:
            with pytest.raises(ConfigError, match=rf"^vision_config\.{field.name} must be"):
                dataclasses.replace(RELEASE.vision, **{field.name: value})
    with pytest.raises(ConfigError, match=r"^vision_config\.num_attention_heads"):
        dataclasses.replace(RELEASE.vision, num_attention_heads=15)
    with pytest.raises(ConfigError, match=r"^vision_config\.num_attention_heads"):
        dataclasses.replace(RELEASE.vision, num_attention_heads=512)  # heads of 2 have one axis only
    refused("vision_config.max_image_tokens", max_position_embeddings=1023)


def test_rope_scaling_values() -> None:
    assert RELEASE.rope_scaling is not None
    hostile: list[Any] = [0, -1, 2**31, True, "16", math.nan]
    for field in dataclasses.fields(RopeScaling):
        for value in hostile:
            with pytest.raises(ConfigError, match=rf"^rope_scaling\.{field.name} must be"):
                dataclasses.replace(RELEASE.rope_scaling, **{field.name: value})
    with pytest.raises(ConfigError, match=r"^rope_scaling\.beta_slow"):
        dataclasses.replace(RELEASE.rope_scaling, beta_slow=33)


def test_format_names() -> None:
    with pytest.raises(ConfigError, match=r"^cache_formats\.main must be one of e2m1_e4m3_16, .*got 'fp4'"):
        CacheFormats(main="fp4")
    with pytest.raises(ConfigError, match=r"^cache_formats\.window"):
        CacheFormats(window="e2m1_unscaled")
    with pytest.raises(ConfigError, match=r"^weights\.dense"):
        WeightFormats(dense="fp4")


def test_unknown_field_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^num_layers is not a field"):
        RELEASE.replace(num_layers=3)


def test_a_long_hostile_value_gives_a_short_message() -> None:
    with pytest.raises(ConfigError) as caught:
        integer(0, 1)("field", list(range(10_000)))
    assert len(str(caught.value)) < 200


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_json_is_a_config_or_a_config_error(data: st.DataObject) -> None:
    """One or two keys of either layout replaced or removed: never another exception, never a crash later on."""
    root = copy.deepcopy(data.draw(st.sampled_from([RELEASE.to_hf_dict(), RELEASE.to_inference_dict()])))
    for _ in range(data.draw(st.integers(1, 2))):
        target = root
        while True:
            key = data.draw(st.sampled_from(sorted(target)))
            if isinstance(target[key], dict) and target[key] and data.draw(st.booleans()):
                target = target[key]
                continue
            break
        if data.draw(st.booleans()):
            del target[key]
        else:
            target[key] = data.draw(JSON_VALUES)
        if not root:
            break
    try:
        config = ModelConfig.from_json(root)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert ModelConfig.from_json(config.to_hf_dict()) == config
        assert ModelConfig.from_json(config.to_inference_dict()) == config
