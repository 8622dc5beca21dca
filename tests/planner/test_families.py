"""Other models' caches, every figure worked out by hand from the config's numbers."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.config import CacheFormats, presets
from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner.families import BF16, Family, Group, from_config, load, names, read_family
from rorqual.planner.families.formulas import (
    dsa_index_bytes,
    dsa_row_bytes,
    fp4_index_bytes,
    gqa_token_bytes,
    mla_token_bytes,
    v1_token_bytes,
    v3_token_bytes,
    v4_flash_token_bytes,
    v4_row_bytes,
    v32_token_bytes,
)

QUICK = settings(max_examples=50, deadline=None, derandomize=True)

# name: attention, native storage, B a token, fixed B, B a token in bf16, fixed B in bf16, positions
CARRIED: dict[str, tuple[str, str, Fraction | int, int, Fraction | int, int, int]] = {
    "llama-2-7b": ("MHA", BF16, 32 * 2 * 32 * 128 * 2, 0, 524_288, 0, 4096),
    "llama-3.1-8b": ("GQA", BF16, 32 * 2 * 8 * 128 * 2, 0, 131_072, 0, 131_072),
    "llama-3.1-70b": ("GQA", BF16, 80 * 2 * 8 * 128 * 2, 0, 327_680, 0, 131_072),
    "llama-3.1-405b": ("GQA", BF16, 126 * 2 * 8 * 128 * 2, 0, 516_096, 0, 131_072),
    "mixtral-8x7b-v0.1": ("GQA", BF16, 32 * 2 * 8 * 128 * 2, 0, 131_072, 0, 32_768),
    "qwen3-8b": ("GQA", BF16, 36 * 2 * 8 * 128 * 2, 0, 147_456, 0, 40_960),
    "qwen3-32b": ("GQA", BF16, 64 * 2 * 8 * 128 * 2, 0, 262_144, 0, 40_960),
    "qwen3-235b-a22b": ("GQA", BF16, 94 * 2 * 4 * 128 * 2, 0, 192_512, 0, 40_960),
    "gemma-2b": ("MQA", BF16, 18 * 2 * 1 * 256 * 2, 0, 18_432, 0, 8192),
    # Every layer slides: nothing grows for ever.
    "mistral-7b-v0.1": ("GQA, sliding", BF16, 0, 32 * 4096 * 4096, 0, 536_870_912, 32_768),
    # Every second layer slides, the first of them.
    "gemma-2-9b": ("GQA, sliding", BF16, 21 * 2 * 8 * 256 * 2, 21 * 4096 * 8192, 172_032, 704_643_072, 8192),
    # Five of six slide: layers 5, 11, .. 59 of 62 are full.
    "gemma-3-27b": ("GQA, sliding", BF16, 10 * 2 * 16 * 128 * 2, 52 * 1024 * 8192, 81_920, 436_207_616, 131_072),
    "gpt-oss-120b": ("GQA, sliding", BF16, 18 * 2 * 8 * 64 * 2, 18 * 128 * 2048, 36_864, 4_718_592, 131_072),
    "deepseek-llm-67b": ("GQA", BF16, 95 * 2 * 8 * 128 * 2, 0, 389_120, 0, 4096),
    "deepseek-v2": ("MLA", BF16, 60 * 576 * 2, 0, 69_120, 0, 163_840),
    "deepseek-v3": ("MLA", BF16, 61 * 576 * 2, 0, 70_272, 0, 163_840),
    "kimi-k2": ("MLA", BF16, 61 * 576 * 2, 0, 70_272, 0, 131_072),
    "deepseek-v3.2": ("MLA with DSA", "fp8", 61 * (656 + 132), 0, 61 * (1152 + 256), 0, 163_840),
    "deepseek-v4-flash": (
        *("CSA and HCA", "v4-rows", Fraction("3514.25"), 43 * 128 * 584),
        *(21 * 1280 // 4 + 20 * 1024 // 128, 43 * 128 * 1024, 1_048_576),
    ),
    # 30 CSA layers and 31 HCA layers.
    "deepseek-v4-pro": (
        *("CSA and HCA", "v4-rows", 30 * 163 + 31 * Fraction("4.5625"), 61 * 128 * 584),
        *(30 * 1280 // 4 + 31 * 1024 // 128, 61 * 128 * 1024, 1_048_576),
    ),
    "v4.1-flash": ("CSA2", "packed", 890, 40 * 128 * 528, 3200, 40 * 128 * 1024, 1_048_576),
}


@pytest.mark.parametrize("name", CARRIED)
def test_carried_models(name: str) -> None:
    attention, native, token, fixed, token_bf16, fixed_bf16, positions = CARRIED[name]
    family = load(name)
    assert (family.name, family.attention, family.native) == (name, attention, native)
    assert (family.token_bytes(), family.fixed_bytes()) == (token, fixed)
    assert (family.token_bytes(BF16), family.fixed_bytes(BF16)) == (token_bf16, fixed_bf16)
    assert family.max_tokens == positions


def test_every_carried_fact_is_tested_and_sourced() -> None:
    assert set(names()) == {*CARRIED, *presets.NAMES}
    for name in names():
        assert ("model card" in load(name).source) == (name not in presets.NAMES)


def test_formulas() -> None:
    """The figures of the issue."""
    assert v1_token_bytes() == 389_120
    assert (v3_token_bytes(1), v3_token_bytes(2), v3_token_bytes()) == (35_136, 70_272, 70_272)
    assert v32_token_bytes() == 48_068
    assert v4_flash_token_bytes() == Fraction("3514.25")
    assert (dsa_row_bytes(), dsa_index_bytes()) == (512 + 4 * 4 + 64 * 2, 128 + 4)
    assert v4_row_bytes() == 448 + 64 * 2 + 448 // 64 + 1 == 584
    assert fp4_index_bytes() == 128 // 2 + 128 // 32 == 68
    assert gqa_token_bytes(40, 64, 512) == 5_242_880
    assert mla_token_bytes(40, 512, 0) == 40_960


def test_formulas_and_readers_agree() -> None:
    assert load("deepseek-llm-67b").token_bytes() == v1_token_bytes()
    assert load("deepseek-v3").token_bytes() == v3_token_bytes()
    assert load("deepseek-v3").token_bytes("fp8") == v3_token_bytes(1)
    assert load("deepseek-v3.2").token_bytes() == v32_token_bytes()
    assert load("deepseek-v4-flash").token_bytes() == v4_flash_token_bytes()


@pytest.mark.parametrize("name", [*CARRIED, *presets.NAMES])
def test_the_formula_is_the_number(name: str) -> None:
    """Without its words, an entry's formula evaluates to its bytes."""
    for storage in load(name).storages:
        for group in storage.groups:
            arithmetic = re.sub(r"[A-Za-z]+", " ", group.entry.replace(" x ", " * "))
            assert eval(arithmetic) == group.entry_bytes, group.entry


def test_formula_texts() -> None:
    csa, hca, window = load("deepseek-v4-flash").groups()
    assert csa.formula.startswith("21 layers x (448 codes + 64 rotary x 2 + 7 scales + 1 padding + 64 index key")
    assert csa.formula.endswith("B for every 4 tokens")
    assert hca.formula.endswith("B for every 128 tokens")
    assert window.formula.endswith("B for each of the last 128 tokens")
    assert load("llama-3.1-8b").groups()[0].formula == "32 layers x 2 x 8 KV heads x 128 x 2 B a token"
    assert load("deepseek-v3").groups()[0].formula == "61 layers x (512 latent + 64 rotary) x 2 B a token"
    assert load("gemma-2b").groups()[0].formula == "18 layers x 2 x 1 KV head x 256 x 2 B a token"


def test_windows_grow_until_they_are_full() -> None:
    gemma = load("gemma-3-27b")
    assert gemma.bytes_at(0) == 0
    assert gemma.bytes_at(1) == 62 * 8192
    assert gemma.bytes_at(1024) == 62 * 1024 * 8192
    assert gemma.bytes_at(1025) == gemma.bytes_at(1024) + 10 * 8192
    assert gemma.bytes_at(131_072) == 131_072 * 81_920 + 436_207_616


def test_entries_are_counted_by_complete_groups() -> None:
    flash = load("deepseek-v4-flash")
    growing = [flash.bytes_at(tokens) - 43 * 584 * tokens for tokens in (3, 4, 7, 8, 127, 128)]
    assert growing == [0, 21 * 652, 21 * 652, 2 * 21 * 652, 31 * 21 * 652, 32 * 21 * 652 + 20 * 584]


PRESET_LAYOUTS = {name: KVLayout(presets.load(name)) for name in presets.NAMES}


@given(name=st.sampled_from(presets.NAMES), tokens=st.integers(0, 10**7))
@QUICK
def test_this_model_is_its_layout(name: str, tokens: int) -> None:
    layout, family = PRESET_LAYOUTS[name], load(name)
    config = layout.config
    assert family.token_bytes() == layout.bytes_per_token
    assert family.fixed_bytes() == layout.window_bytes_logical
    window = config.num_hidden_layers * min(tokens, config.sliding_window) * layout.window_row_bytes
    assert family.bytes_at(tokens) == layout.global_bytes_logical(tokens) + window


def test_this_model_stored_in_bf16_has_one_storage() -> None:
    config = presets.load("tiny").replace(cache=CacheFormats(main=BF16, index_key=BF16, window=BF16))
    family = from_config(config.to_hf_dict(), "wide")
    assert [storage.name for storage in family.storages] == [BF16]
    assert family.token_bytes() == KVLayout(config).bytes_per_token


@given(name=st.sampled_from(names()), tokens=st.integers(0, 10**7), more=st.integers(1, 10**4))
@QUICK
def test_properties_of_every_family(name: str, tokens: int, more: int) -> None:
    family = load(name)
    for storage in family.storages:
        total = family.bytes_at(tokens, storage.name)
        assert family.bytes_at(0, storage.name) == 0
        assert total <= family.bytes_at(tokens + more, storage.name)
        assert total == sum(group.bytes_at(tokens) for group in storage.groups)
        # Never above the line that it tends to, and below it by less than an unfinished group of every layer.
        line = tokens * family.token_bytes(storage.name) + family.fixed_bytes(storage.name)
        slack = sum(group.layers * group.entry_bytes for group in storage.groups if group.window is None)
        assert total <= line
        if all(group.window is None or tokens >= group.window for group in storage.groups):
            assert line - total <= slack


@given(
    layers=st.integers(1, 100),
    kv_heads=st.integers(1, 8),
    share=st.integers(1, 16),
    head_dim=st.integers(1, 512),
    tokens=st.integers(0, 10**6),
)
@QUICK
def test_any_llama(layers: int, kv_heads: int, share: int, head_dim: int, tokens: int) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * share,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    family = from_config(config, "any")
    elements = layers * 2 * kv_heads * head_dim * tokens
    assert (family.bytes_at(tokens), family.bytes_at(tokens, "fp8")) == (2 * elements, elements)
    assert family.max_tokens is None


WINDOW = {"sliding_window": 100}
UPPER = {"use_sliding_window": True, "max_window_layers": 4, **WINDOW}
BASE = {"num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}


def sliding(family: Family) -> tuple[int, int | None]:
    """Sliding layers and their window."""
    groups = [group for group in family.groups() if group.window is not None]
    return (groups[0].layers, groups[0].window) if groups else (0, None)


TYPES = ["sliding_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": None}, (0, None)),
        ({"model_type": "mistral", **WINDOW}, (12, 100)),
        ({"model_type": "qwen2", **UPPER, "use_sliding_window": False}, (0, None)),
        ({"model_type": "qwen2", **UPPER}, (8, 100)),
        ({"model_type": "qwen3", **UPPER, "max_window_layers": 12}, (0, None)),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 12}, (0, None)),
        ({"model_type": "qwen3_moe", "sliding_window": None, "max_window_layers": 12}, (0, None)),
        ({"model_type": "gemma2", "sliding_window": 100, "sliding_window_size": 100}, (6, 100)),
        ({"model_type": "gemma3_text", "sliding_window": 100}, (10, 100)),
        ({"model_type": "gemma3_text", "sliding_window": 100, "sliding_window_pattern": 5}, (10, 100)),
        ({"model_type": "gemma3_text", "sliding_window": 100, "_sliding_window_pattern": 4}, (9, 100)),
        ({"model_type": "gemma3_text", "sliding_window": 100, "layer_types": TYPES * 3}, (9, 100)),
        ({"model_type": "gpt_oss", "sliding_window": 100, "layer_types": ["full_attention"] * 12}, (0, None)),
        ({"model_type": "gpt_oss", "sliding_window": 100}, (6, 100)),
    ],
)
def test_which_layers_slide(fields: dict[str, Any], expected: tuple[int, int | None]) -> None:
    family = from_config({**BASE, **fields}, "some")
    assert sliding(family) == expected
    assert sum(group.layers for group in family.groups()) == 12


def test_what_published_files_leave_out() -> None:
    """gemma-3-4b-it states neither heads nor head dim; llama-7b no KV heads; Llama and Qwen2 no head dim."""
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}
    family = from_config({"model_type": "gemma3", "text_config": gemma}, "gemma-3-4b")
    assert family.token_bytes() == 5 * 2 * 4 * 256 * 2
    assert (family.model_type, family.max_tokens) == ("gemma3", 131_072)
    llama = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    assert from_config(llama, "llama-7b").token_bytes() == 524_288
    nulls = {**llama, "num_key_value_heads": None, "head_dim": None, "sliding_window": None}
    assert from_config(nulls, "llama-7b").token_bytes() == 524_288


def v4(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "sliding_window": 128,
        **fields,
    }


CSA, HCA, SWA = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"


def test_v4_layers_by_ratio_or_by_type() -> None:
    by_ratio = from_config(v4(compress_ratios=[0, 4, 128, 4]), "a")
    by_type = from_config(v4(layer_types=[SWA, CSA, HCA, CSA]), "a")
    both = from_config(v4(layer_types=[SWA, CSA, HCA, CSA], compress_ratios=[0, 4, 128, 4]), "a")
    assert by_ratio == by_type == both
    assert by_ratio.token_bytes() == 2 * 163 + Fraction("4.5625")
    drafts = v4(compress_ratios=[0, 4, 128, 4, 0], num_nextn_predict_layers=1)
    assert from_config(drafts, "a") == by_ratio
    rates = v4(layer_types=[SWA, CSA, HCA, CSA], compress_rates={CSA: 8, HCA: 64})
    assert from_config(rates, "a").token_bytes() == 2 * Fraction(652, 8) + Fraction(584, 64)
    legacy = v4(layer_types=[SWA, CSA, HCA, CSA], compress_rate_csa=8, compress_rate_hca=64)
    assert from_config(legacy, "a") == from_config(rates, "a")


def test_v4_rotary_share_and_no_index() -> None:
    share = v4(layer_types=[HCA] * 4, partial_rotary_factor=0.125, qk_rope_head_dim=None, index_head_dim=None)
    family = from_config(share, "a")
    assert family.token_bytes() == 4 * Fraction(584, 128)
    windows = from_config(v4(compress_ratios=[0] * 4), "a")
    assert windows.token_bytes() == 0
    assert windows.fixed_bytes() == 4 * 128 * 584


@pytest.mark.parametrize(
    ("scheme", "native"),
    [
        ({"kv_cache_scheme": None}, BF16),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, "fp8"),
        ({"kv_cache_scheme": "FP8"}, "fp8"),
        ({"kv_cache_quant_algo": "FP8"}, "fp8"),
    ],
)
def test_a_checkpoint_may_state_its_own_storage(scheme: dict[str, Any], native: str) -> None:
    config = {"model_type": "llama", **BASE, "quantization_config": scheme}
    assert from_config(config, "some").native == native
    mla = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert from_config({**mla, "quantization_config": scheme}, "some").native == native


def test_files_folders_and_names(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **BASE}), encoding="utf-8")
    (tmp_path / "other.json").write_text(json.dumps({"model_type": "llama", **BASE}), encoding="utf-8")
    by_folder, by_file = read_family(str(folder)), read_family(str(folder / "config.json"))
    assert by_folder == by_file
    assert (by_folder.name, by_folder.source) == ("my-llama", "")
    assert read_family(str(tmp_path / "other.json")).name == "other"
    assert read_family("DeepSeek-V3.2") == load("deepseek-v3.2")


def test_this_model_in_every_spelling(tmp_path: Path) -> None:
    config = presets.load("tiny")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config.to_hf_dict()), encoding="utf-8")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "inference_config.json").write_text(json.dumps(config.to_inference_dict()), encoding="utf-8")
    own = tmp_path / "own"
    for path in (tmp_path / "hf", tmp_path / "hf" / "config.json", own, own / "inference_config.json"):
        assert read_family(str(path)).storages == load("tiny").storages


@pytest.mark.parametrize("tokens", [-1, 1.0, True, "4096"])
def test_illegal_contexts(tokens: Any) -> None:
    with pytest.raises(InputError, match=r"^tokens must be an integer of 0 or more; got"):
        load("llama-3.1-8b").bytes_at(tokens)


def test_unknown_storage() -> None:
    with pytest.raises(InputError, match=r"^storage of deepseek-v3.2 must be one of fp8, bf16; got 'fp4'"):
        load("deepseek-v3.2").bytes_at(1, "fp4")


def test_a_window_of_entries_that_stand_for_several_tokens() -> None:
    group = Group(name="some", layers=3, entry_bytes=10, entry="10", entry_tokens=4, window=10)
    assert [group.bytes_at(tokens) for tokens in (3, 4, 8, 100)] == [0, 30, 60, 60]
    assert group.token_bytes == 0
    assert group.fixed_bytes == 60
