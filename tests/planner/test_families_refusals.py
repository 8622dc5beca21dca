"""What is not understood is refused, and the message names it (field case 5)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rorqual.errors import ConfigError, InputError
from rorqual.planner.families import READERS, from_config, load, read_family
from rorqual.planner.families.fields import suspicious

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 256}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 64}
QWEN = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
GEMMA = {**LLAMA, "model_type": "gemma2", "sliding_window": 64}
MLA = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
DSA = {**MLA, "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
}
FULL, SLIDING = "full_attention", "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"


def refused(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_config(config, "some")
    return str(caught.value)


@pytest.mark.parametrize("base", [LLAMA, MISTRAL, QWEN, GEMMA, MLA, DSA, V4])
def test_the_cases_below_start_from_something_legal(base: dict[str, Any]) -> None:
    assert from_config(base, "some").bytes_at(1000) > 0


@pytest.mark.parametrize(
    "model_type",
    [
        *("mamba", "jamba", "rwkv", "qwen3_next", "llama4", "gemma4", "glm_moe_dsa", "deepseek", "deepseek_v", ""),
        *("deepseek_v4_flash", "deepseek_v411", "deepseek_v41 ", "Llama", "llama2", None, 4, ["llama"], {"a": 1}, True),
    ],
)
def test_unknown_model_types(model_type: Any) -> None:
    message = refused({**LLAMA, "model_type": model_type})
    assert message.startswith("model_type must be exactly one of deepseek_v2, ")
    assert message.endswith(f"got {model_type!r}")


def test_v4_and_v41_are_different_types() -> None:
    """A V4 config called V4.1 is read by V4.1's rules, which refuse it, and the other way round."""
    assert "text_config" in refused({**V4, "model_type": "deepseek_v41"})
    assert READERS["deepseek_v4"] is not READERS["deepseek_v41"]
    assert "num_hidden_layers is missing" in refused({"model_type": "deepseek_v4", "text_config": {}})


def test_a_missing_model_type() -> None:
    config = dict(LLAMA)
    del config["model_type"]
    assert refused(config).endswith("got None")


@pytest.mark.parametrize(
    ("base", "fields", "named"),
    [
        # Fields of some other attention.
        (LLAMA, {"kv_lora_rank": 512}, "kv_lora_rank"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window"),
        (LLAMA, {"v_head_dim": 64}, "v_head_dim"),
        (LLAMA, {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        (LLAMA, {"attention_chunk_size": 8192}, "attention_chunk_size"),
        (LLAMA, {"attention_k_eq_v": True}, "attention_k_eq_v"),
        (LLAMA, {"full_attention_interval": 4}, "full_attention_interval"),
        (LLAMA, {"linear_num_key_heads": 16}, "linear_num_key_heads"),
        (LLAMA, {"mamba_d_state": 16}, "mamba_d_state"),
        (LLAMA, {"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        (LLAMA, {"some_future_kv_trick": 1}, "some_future_kv_trick"),
        (LLAMA, {"layers_block_type": ["mamba"] * 4}, "layers_block_type"),
        (LLAMA, {"text_config": {"num_hidden_layers": 2}}, "text_config"),
        (MISTRAL, {"use_sliding_window": True}, "use_sliding_window"),
        (MLA, {"sliding_window": 128}, "sliding_window"),
        (MLA, {"index_topk": 2048}, "index_topk"),
        (MLA, {"layer_types": [FULL] * 4}, "layer_types"),
        (DSA, {"index_topk_freq": 4}, "index_topk_freq"),
        (DSA, {"indexer_types": ["full", "shared"] * 2}, "indexer_types"),
        (V4, {"kv_source_layer_ids": [2]}, "kv_source_layer_ids"),
        (V4, {"candidate_index_blocks": 8}, "candidate_index_blocks"),
        # Layer kinds.
        (LLAMA, {"layer_types": [FULL, FULL, FULL, "linear_attention"]}, r"layer_types[3]"),
        (LLAMA, {"layer_types": [FULL, SLIDING, FULL, FULL]}, r"layer_types[1]"),
        (MISTRAL, {"layer_types": [SLIDING, FULL, SLIDING, FULL]}, r"layer_types[1]"),
        (QWEN, {"layer_types": [FULL, SLIDING, SLIDING, SLIDING]}, r"layer_types[1]"),
        (QWEN, {"use_sliding_window": False, "layer_types": [FULL, FULL, FULL, SLIDING]}, r"layer_types[3]"),
        (GEMMA, {"layer_types": [SLIDING, FULL, "chunked_attention", FULL]}, r"layer_types[2]"),
        (GEMMA, {"layer_types": [SLIDING, FULL]}, "layer_types"),
        (GEMMA, {"layer_types": SLIDING}, "layer_types"),
        (GEMMA, {"sliding_window_pattern": 2, "layer_types": [FULL, SLIDING, FULL, SLIDING]}, r"layer_types[0]"),
        (GEMMA, {"sliding_window_pattern": 2, "_sliding_window_pattern": 3}, "_sliding_window_pattern"),
        (GEMMA, {"sliding_window_size": 65}, "sliding_window_size"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (DSA, {"layer_types": ["indexed_attention"] * 3 + [FULL]}, r"layer_types[3]"),
        (V4, {"compress_ratios": [0, 4, 128, 2]}, r"compress_ratios[3]"),
        (V4, {"compress_ratios": [0, 4, 128, True]}, r"compress_ratios[3]"),
        (V4, {"compress_ratios": [0, 4, 128]}, "compress_ratios"),
        (V4, {"compress_ratios": [0, 4, 128, 4, 0]}, "compress_ratios"),
        (V4, {"compress_ratios": None}, "compress_ratios"),
        (V4, {"layer_types": [SLIDING, CSA, HCA, HCA]}, "layer_types"),
        (V4, {"compress_ratios": None, "layer_types": [SLIDING, CSA, HCA, FULL]}, r"layer_types[3]"),
        (V4, {"compress_rates": {CSA: 8}}, "compress_rates"),
        (V4, {"compress_rates": {"other_attention": 8}}, "compress_rates"),
        (V4, {"compress_rates": {CSA: 0}}, f"compress_rates.{CSA}"),
        (V4, {"compress_rates": 4}, "compress_rates"),
        # Storage.
        (LLAMA, {"quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "int"}}}, "quantization_config"),
        (MLA, {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, "quantization_config.kv_cache_quant_algo"),
        (DSA, {"quantization_config": {"kv_cache_quant_algo": "INT8"}}, "quantization_config.kv_cache_quant_algo"),
        (V4, {"quantization_config": {"kv_cache_scheme": "fp4"}}, "quantization_config.kv_cache_scheme"),
        # Values.
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": 4.0}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers"),
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (LLAMA, {"num_key_value_heads": 0}, "num_key_value_heads"),
        (LLAMA, {"hidden_size": 255}, "head_dim"),
        (LLAMA, {"head_dim": -1}, "head_dim"),
        (LLAMA, {"max_position_embeddings": "131072"}, "max_position_embeddings"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window"),
        (QWEN, {"use_sliding_window": 1}, "use_sliding_window"),
        (QWEN, {"max_window_layers": None}, "max_window_layers"),
        ({**QWEN, "model_type": "qwen3_moe"}, {}, "use_sliding_window"),
        (GEMMA, {"sliding_window": None}, "sliding_window"),
        (MLA, {"kv_lora_rank": None}, "kv_lora_rank"),
        (DSA, {"index_head_dim": None}, "index_head_dim"),
        (V4, {"num_key_value_heads": 8}, "num_key_value_heads"),
        (V4, {"index_head_dim": None}, "index_head_dim"),
        (V4, {"qk_rope_head_dim": 513}, "qk_rope_head_dim"),
        (V4, {"qk_rope_head_dim": None}, "qk_rope_head_dim"),
        (V4, {"qk_rope_head_dim": None, "partial_rotary_factor": 2}, "partial_rotary_factor"),
    ],
)
def test_refusals_name_the_field(base: dict[str, Any], fields: dict[str, Any], named: str) -> None:
    message = refused({**base, **fields})
    assert message.startswith(named)
    assert "\n" not in message


def test_an_absent_window_is_not_a_null_one() -> None:
    config = dict(MISTRAL)
    del config["sliding_window"]
    assert refused(config) == "sliding_window is missing; give null for full attention"


def test_nested_configs_name_the_path() -> None:
    text = {**GEMMA, "model_type": "gemma3_text", "kv_lora_rank": 4}
    assert refused({"model_type": "gemma3", "text_config": text}).startswith("text_config.kv_lora_rank must be absent")
    wrong = {**GEMMA, "model_type": "gemma2"}
    assert refused({"model_type": "gemma3", "text_config": wrong}).startswith("text_config.model_type must be gemma3_")
    assert refused({"model_type": "gemma3", **GEMMA | {"model_type": "gemma3"}}).startswith("text_config must be")


def test_what_is_off_or_says_nothing_about_the_cache_is_no_obstacle() -> None:
    off: dict[str, Any] = {"kv_lora_rank": None, "use_mla": False, "num_kv_shared_layers": 0, "attn_type_list": []}
    inert = {"attention_bias": True, "use_cache": True, "rope_local_base_freq": 1e4, "boi_token_index": 5, "dtype": "x"}
    assert from_config({**LLAMA, **off, **inert}, "some") == from_config(LLAMA, "some")


def test_suspicion_is_by_words() -> None:
    for name in ("kv_heads_ratio", "new_cache_trick", "swa_rope_theta", "conv_kernel", "global_head_dim"):
        assert suspicious(name), name
    for name in ("hidden_size", "router_key", "rope_index", "image_token_index", "num_experts", "statement"):
        assert not suspicious(name), name


def test_files(tmp_path: Path) -> None:
    torn = tmp_path / "torn.json"
    torn.write_text('{"model_type": ', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"torn\.json is not JSON"):
        read_family(str(torn))
    (tmp_path / "latin.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ConfigError, match=r"latin\.json cannot be read"):
        read_family(str(tmp_path / "latin.json"))
    with pytest.raises(ConfigError, match=r"config file not found in .*expected config\.json"):
        read_family(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "kv_lora_rank": 4}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^kv_lora_rank must be absent .*\(.*config\.json\)$"):
        read_family(str(tmp_path))


def test_unknown_names() -> None:
    with pytest.raises(InputError, match=r"^model must be one of v4\.1-flash, .*deepseek-v3, .*; got 'gpt-2'$"):
        load("gpt-2")
    with pytest.raises(InputError, match=r"^'gpt-2' is neither a folder, a config file, nor a carried model \(v4"):
        read_family("gpt-2")
