"""Every figure of the release as it is quoted, each expression evaluated, and the same for other configs."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import pytest

from rorqual.config import CacheFormats, ModelConfig, WeightFormats, presets
from rorqual.layout import exact_replay
from rorqual.planner.numbers import IDS, numbers
from rorqual.planner.numbers.exact import Proportion
from tests.planner.spelled import evaluate, rounds_to

RELEASE_CONFIG = presets.load("v4.1-flash")
RELEASE = numbers(RELEASE_CONFIG)

QUOTED: dict[str, tuple[str, int | float | Fraction]] = {
    "mha_layer_bytes": ("131,072", 2 * 64 * 512 * 2),
    "mha_token_bytes": ("5,242,880", 40 * 131_072),
    "mla_entry_bytes": ("1,024", 1024),
    "mla_1m_bytes": ("40.96 GB", 40 * 1024 * 10**6),
    "main_entry_elements": ("512", 512),
    "hidden_over_latent": ("10", 10),
    "swa_receptive_field_20": ("2,541", 1 + 20 * 127),
    "swa_loose_20": ("2,560", 2560),
    "swa_loose_40": ("5,120", 5120),
    "sparse_read_entries": ("640", 128 + 512),
    "candidate_pool": ("16,384", 2048 * 8),
    "main_entry_bytes": ("288", 256 + 32),
    "index_entry_bytes": ("68", 64 + 4),
    "increment_ratio2": ("178", 178),
    "equivalent_entries": ("2.5", Fraction(5, 2)),
    "main_token_bytes": ("720", 720),
    "index_token_bytes": ("170", 170),
    "global_token_bytes": ("890", 3 * 178 + 356),
    "v4_flash_token_bytes": ("3,514.25", 21 * 163 + 20 * Fraction("4.5625")),
    "v4_saving": ("3.95", Fraction("3514.25") / 890),
    "persistent_saving": ("7.9", 2 * Fraction("3514.25") / 890),
    "v3_token_bytes": ("35,136", 35_136),
    "v3_token_bytes_bf16": ("70,272", 70_272),
    "v3_saving": ("39.5", Fraction(35_136, 890)),
    "v32_token_bytes": ("48,068", 48_068),
    "v1_token_bytes": ("389,120", 389_120),
    "v1_saving": ("437.2", Fraction(389_120, 890)),
    "swa_total_bytes": ("2,703,360", 528 * 128 * 40),
    "pool_1m_bytes": ("890 MB", 890 * 10**6),
    "pool_over_window_1m": ("329", Fraction(890 * 10**6, 2_703_360)),
    "window_equals_global_tokens": ("3,037.5", Fraction(2_703_360, 890)),
    "ced_prefill_ratio_32768": ("0.502", Fraction(657_920, 1_310_720)),
    "active_params_prefill": ("7.89 B", 7_892_875_448),
    "active_params_decode": ("15.47 B", 15_468_675_184),
    "routed_params": ("543.58 B", 40 * 384 * 35_389_440),
    "routed_params_per_expert": ("35,389,440", 3 * 5120 * 2304),
    "backbone_params": ("551.6 B", 551_566_180_464),
    "engram_params": ("196.6 B", 768_022_850 * 256),
    "engram_read_bytes_token": ("12,672", 2 * 24 * 264),
    "kv_read_bytes_decode": ("8,306,688", 38 * 512 * 288 + 2_703_360),
    "index_flops_1mi": ("22.01 G", 2 * 32 * 128 * 2_686_976),
    "index_read_bytes_1mi": ("182,714,368", 68 * 2_686_976),
    "decode_flops_growth": ("1.25", Fraction("1.2528")),
    "fp4_range": ("2,688", 6 * 448),
    "mhc_traffic": ("1/2", Fraction(10, 20)),
    "spec_tokens_per_step": ("3.69", sum(Fraction(4, 5) ** k for k in range(6))),
    "spec_accepted": ("2.69", sum(Fraction(4, 5) ** k for k in range(1, 6))),
    "max_image_tokens": ("1,024", 1024),
    "min_pixels": ("295,936", 544 * 544),
    "vision_patches_1008": ("5,184", 72 * 72),
    "vision_features_1008": ("576", 24 * 24),
    "vision_features_1344x756": ("576", 32 * 18),
    "vision_features_1344": ("1,024", 32 * 32),
    "vision_released_1302": ("961", 31 * 31),
    "refresh_content_address_query": ("4 : 8 : 40", 10),
}

CONFIGS: dict[str, ModelConfig] = {
    **{name: presets.load(name) for name in presets.NAMES},
    "no compression": RELEASE_CONFIG.without("compression"),
    "no candidates": RELEASE_CONFIG.without("candidates"),
    "no experts": RELEASE_CONFIG.without("routed_experts"),
    "text, no Engram, no drafts": RELEASE_CONFIG.without("vision", "engram", "drafts", "mhc"),
    "plain": RELEASE_CONFIG.replace(
        cache=CacheFormats(main="bf16", index_key="fp32", window="bf16"),
        weights=WeightFormats(dense="bf16", experts="bf16", engram="bf16"),
    ),
    "ratio 4": RELEASE_CONFIG.replace(compress_ratios=[4 if r == 2 else r for r in RELEASE_CONFIG.compress_ratios]),
    "cut": RELEASE_CONFIG.with_depth([0, 1, 2, 3, 20, 21, 24]),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def test_ids_are_those_quoted_in_order() -> None:
    assert tuple(RELEASE) == IDS == tuple(QUOTED)


@pytest.mark.parametrize("id", IDS)
def test_a_figure_of_the_release(id: str) -> None:
    figure, (shown, value) = RELEASE[id], QUOTED[id]
    assert figure.shown == shown
    assert (round(figure.value, 4) if id == "decode_flops_growth" else figure.value) == value


@every_config
def test_expressions_evaluate_to_values_and_values_round_to_what_is_shown(config: ModelConfig) -> None:
    figures = numbers(config)
    assert [id for id in IDS if id in figures] == list(figures)
    for figure in figures.values():
        assert type(figure.value) is int or (isinstance(figure.value, Fraction) and figure.value.denominator > 1)
        assert figure.formula and figure.unit
        if isinstance(figure, Proportion):
            assert [int(evaluate(term)) for term in figure.expression.split(" : ")] == list(figure.terms)
            assert figure.shown == figure.expression and figure.value == Fraction(figure.terms[-1], figure.terms[0])
            continue
        assert evaluate(figure.expression) == figure.value, figure
        assert rounds_to(figure.value, figure.shown), figure


@every_config
def test_formulas_name_fields_that_exist(config: ModelConfig) -> None:
    """A word with an underscore is a field of the config, a figure's id, or one of a few said in the formula."""
    said = {"best_height", "best_width", *IDS}
    if config.vision is not None:
        said |= {"vision_config.max_image_tokens", "vision_config.min_pixels", "patch_size", "downsample_ratio"}
    for figure in numbers(config).values():
        for word in re.findall(r"[a-z0-9.]+_[a-z0-9_.]*", figure.formula):
            assert word in said or hasattr(config, word), (figure.id, word)


LACKING: dict[str, set[str]] = {
    "no candidates": {"candidate_pool"},
    "no experts": {"routed_params", "routed_params_per_expert"},
    "text, no Engram, no drafts": {
        *(id for id in IDS if id.startswith(("vision_", "spec_", "engram_"))),
        *("max_image_tokens", "min_pixels", "mhc_traffic"),
    },
    "plain": {"fp4_range"},
    "ratio 4": {"increment_ratio2"},
    "cut": {"swa_receptive_field_20", "swa_loose_20", "swa_loose_40"},
}


@pytest.mark.parametrize("name", LACKING)
def test_figures_of_what_a_config_lacks_are_left_out(name: str) -> None:
    assert set(IDS) - set(numbers(CONFIGS[name])) == LACKING[name]


def test_without_global_kv_other_models_keep_their_figures() -> None:
    figures = numbers(CONFIGS["no compression"])
    models = {"v4_flash_token_bytes", "v3_token_bytes", "v3_token_bytes_bf16", "v32_token_bytes", "v1_token_bytes"}
    assert models <= set(figures)
    assert not {id for id in figures if "saving" in id or "main_" in id or "index_" in id or "pool" in id}
    assert figures["kv_read_bytes_decode"].value == 2_703_360
    assert figures["decode_flops_growth"].value == 1


def test_another_config_is_recomputed_and_other_models_stay() -> None:
    figures = numbers(CONFIGS["ratio 4"])
    assert figures["global_token_bytes"].value == 623 == Fraction(3 * 356, 4) + 356
    assert figures["v3_token_bytes"].value == 35_136
    assert (figures["v3_saving"].value, figures["v3_saving"].shown) == (Fraction(35_136, 623), "56.4")
    tiny = numbers(CONFIGS["tiny"])
    # Entries of 32 + 4 and 16 + 1 bytes; sources of ratio 2 and 1.
    assert tiny["global_token_bytes"].value == Fraction(53 * 3, 2)
    assert tiny["global_token_bytes"].shown == "79.5"
    # 1008 x 1008 does not fit in 64 positions: 7 rows of 7 cells do.
    assert tiny["vision_features_1008"].value == 49
    assert tiny["vision_features_1344"].value == 1024
    assert tiny["fp4_range"].shown == "2,688"


def test_the_receptive_field_is_the_layouts_replay() -> None:
    assert RELEASE["swa_receptive_field_20"].value == 1 + 9000 - exact_replay(9000, 20, 128)


def test_notes_say_what_is_easily_misread() -> None:
    for id in ("spec_tokens_per_step", "spec_accepted"):
        assert "3.69 the accepted drafts and 4.69 the output" in RELEASE[id].note
    assert "16.13 B with the output head" in RELEASE["active_params_decode"].note
    assert "1,058 positions" in RELEASE["vision_features_1344"].note
    assert "961" in RELEASE["vision_features_1344"].note
    assert RELEASE["vision_released_1302"].note.startswith("994 positions")
    assert "2,540 tokens" in RELEASE["swa_receptive_field_20"].note
    assert "FP4, counted half" in RELEASE["decode_flops_growth"].note
    assert "178 + 178 + 178 + 356" in RELEASE["global_token_bytes"].note


def test_documents_are_json() -> None:
    document = json.loads(json.dumps({id: figure.document() for id, figure in RELEASE.items()}, allow_nan=False))
    assert document["global_token_bytes"]["value"] == 890
    assert document["spec_accepted"]["value"] == pytest.approx(2.68928, abs=1e-15)
    assert document["refresh_content_address_query"]["value"] == [4, 8, 40]
    for figure in document.values():
        assert {"value", "shown", "unit", "formula", "expression", "provenance"} <= set(figure)
        assert figure["provenance"] in ("report", "config", "derived")
