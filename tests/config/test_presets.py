"""The configs that come with the package say what their names promise, and their numbers hang together."""

from __future__ import annotations

import doctest
import math

import pytest

from rorqual.config import Mode, ModelConfig, presets, roles
from rorqual.config.cache_formats import FORMAT_GROUPS, LEGAL_FORMATS
from rorqual.errors import ConfigError
from rorqual.formats.spec import FORMATS


def table_rows(config: ModelConfig) -> tuple[int, ...]:
    """Sums of the primes of SPEC 8: per n-gram size the next unused ones from `engram_vocab_size`, never one twice."""
    used: set[int] = set()
    rows = []
    for _ in config.engram_layer_ids:
        total = 0
        for _ in range(2, config.engram_max_ngram_size + 1):
            candidate = config.engram_vocab_size
            for _ in range(config.engram_n_heads):
                while candidate in used or any(candidate % k == 0 for k in range(2, math.isqrt(candidate) + 1)):
                    candidate += 1
                used.add(candidate)
                total += candidate
        rows.append(total)
    return tuple(rows)


@pytest.mark.parametrize("name", presets.NAMES)
def test_preset_loads_and_round_trips(name: str) -> None:
    config = presets.load(name)
    assert ModelConfig.from_json(config.to_hf_dict()) == config
    assert ModelConfig.from_json(config.to_inference_dict()) == config


@pytest.mark.parametrize("name", presets.NAMES)
def test_engram_tables_are_the_sums_of_their_primes(name: str) -> None:
    config = presets.load(name)
    assert table_rows(config) == config.engram_num_embeddings


@pytest.mark.parametrize("name", [name for name in presets.NAMES if name != "v4.1-flash"])
def test_presets_without_a_tokenizer_keep_every_id_apart(name: str) -> None:
    config = presets.load(name)
    assert config.engram_compressed_vocab_size == config.vocab_size


def test_tiny_has_every_mechanism() -> None:
    config = presets.load("tiny")
    assert {role.mode for role in config.roles} == set(Mode)
    assert {role.ratio for role in config.kv_sources} == {1, 2}
    assert any(role.uses_candidates for role in config.roles)
    assert config.vision is not None
    assert config.num_nextn_predict_layers == 3
    assert len(config.engram_layer_ids) == 2
    assert config.hc_mult == 4
    assert (config.weights.dense, config.weights.experts) == ("fp8", "fp4")
    assert config.vocab_size == 512


def test_mid_is_the_config_that_is_timed() -> None:
    config = presets.load("mid")
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (512, 12, 128)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.num_attention_heads) == (16, 4, 8)
    assert (config.sliding_window, config.index_topk, config.vocab_size) == (128, 128, 4096)
    assert config.decoder_start == config.candidate_source_layer_id == 6
    assert [role.layer_id for role in config.roles if role.mode is Mode.REINDEX] == [9]
    assert config.dspark_target_layer_ids == (9, 10, 11)


def test_real_pair_has_the_release_widths() -> None:
    pair, release = presets.load("real-pair"), presets.load("v4.1-flash")
    widths = ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_lora_rank", "index_n_heads")
    for field in (*widths, "index_head_dim", "moe_intermediate_size", "num_experts_per_tok", "weights", "cache"):
        assert getattr(pair, field) == getattr(release, field)
    assert [role.mode for role in pair.roles] == [Mode.FULL, Mode.REUSE]
    assert [role.mode for role in pair.roles] == [release.roles[layer].mode for layer in (20, 21)]
    assert pair.n_routed_experts == 8


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match=r"^preset must be one of v4\.1-flash, tiny, mid, demo, real-pair; got 'big'"):
        presets.load("big")
    with pytest.raises(ConfigError, match=r"^preset"):
        presets.file("tiny", inference=True)


def test_format_names_and_groups_agree_with_the_formats() -> None:
    assert set(FORMAT_GROUPS) == set(FORMATS)
    assert {name: fmt.width_multiple for name, fmt in FORMATS.items()} == dict(FORMAT_GROUPS)
    assert all(set(names) <= set(FORMATS) for names in LEGAL_FORMATS.values())


def test_docstring_examples() -> None:
    results = doctest.testmod(roles)
    assert results.attempted > 0
    assert results.failed == 0
