"""The techniques: the issue's figures, savings against whole alternatives, and configs that lack a technique."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

import pytest

from rorqual.config import CacheFormats, ModelConfig, WeightFormats, presets
from rorqual.config.depth import TECHNIQUES as SWITCHES
from rorqual.errors import InputError
from rorqual.formats.spec import FORMATS
from rorqual.inventory.names import expected_tensors
from rorqual.inventory.parameters import active_parameters, parameter_count
from rorqual.layout import KVLayout
from rorqual.planner.explain import (
    FACTORS,
    NAMES,
    OFF,
    TECHNIQUES,
    Technique,
    answers,
    chain,
    chain_table,
    find,
    overview,
)
from rorqual.planner.figure import Figure
from rorqual.planner.speculation import tokens_per_step
from rorqual.planner.work import index_flops, index_read_bytes, kv_read_bytes

RELEASE = presets.load("v4.1-flash")
SMALL = ("tiny", "demo", "mid", "real-pair")
FEW = RELEASE.replace(n_routed_experts=8)
"""The release with 8 experts a layer: the same figures but for those of experts, and a fiftieth of the names."""
PLAIN = RELEASE.without("compression", "mhc", "engram", "drafts", "vision").replace(
    cache=CacheFormats(window="bf16"), weights=WeightFormats(dense="bf16", experts="bf16", engram="bf16")
)
# Which techniques each switch of a config turns off. The others of `SWITCHES` are no savings and turn off none.
TURNS_OFF: Mapping[str, set[str]] = {
    "compression": {
        "compression",
        "cross-layer-sharing",
        "topk-reuse",
        "fp4-main-kv",
        "fp4-index",
        "ced",
        "hsi",
        "bounded-replay",
    },
    "candidates": {"hsi"},
    "mhc": {"single-pass-mhc"},
    "engram": {"engram"},
    "drafts": {"dspark"},
    "vision": {"pixel-unshuffle"},
    "routed_experts": set(),
    "shared_expert": set(),
    "swiglu_clamp": set(),
    "yarn": set(),
}


def evaluated(expression: str) -> float:
    """A printed expression as a number: x is a product, ^ a power, commas group thousands."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", expression).replace(" x ", " * ").replace("^", "**")
    assert re.fullmatch(r"[\d\s.,()*/+\-]*(min\([\d\s.,()*/+\-]*)*", text), expression
    return float(eval(text, {"__builtins__": {}, "min": min}))


def values(technique: str, config: ModelConfig = RELEASE) -> dict[str, int | float | Fraction]:
    return {figure.id: figure.value for figure in find(technique).savings(config)}


def configs() -> list[ModelConfig]:
    formats = [CacheFormats(main=name, index_key="bf16") for name in ("bf16", "e4m3_e8m0_32", "e2m1_unscaled")]
    variants = [FEW.without(name) for name in SWITCHES] + [FEW.replace(cache=cache) for cache in formats]
    return [RELEASE, *(presets.load(name) for name in SMALL), *variants]


def test_every_technique_answers_three_questions() -> None:
    assert NAMES == (
        "shared-latent",
        "swa",
        "compression",
        "cross-layer-sharing",
        "topk-reuse",
        "fp4-main-kv",
        "fp4-index",
        "ced",
        "hsi",
        "bounded-replay",
        "single-pass-mhc",
        "engram",
        "dspark",
        "pixel-unshuffle",
        "qat",
    )
    spelled = [name for technique in TECHNIQUES for name in (technique.id, *technique.aliases)]
    assert len(spelled) == len(set(spelled))
    assert {technique.factor for technique in TECHNIQUES} == set(FACTORS)
    for technique in TECHNIQUES:
        texts = (technique.moves, technique.approximation, technique.expressiveness, technique.training)
        assert all(text.endswith((".", "(extrapolated).")) for text in texts), technique.id
        assert technique.savings(RELEASE), technique.id


@pytest.mark.parametrize(
    ("technique", "expected"),
    [
        # 131,072 - 1,024 and forty of them: the first step of the waterfall
        ("shared-latent", {"shared_latent_layer": 130_048, "shared_latent_token": 5_242_880 - 40_960}),
        ("swa", {"swa_token": 40 * 528, "swa_sequence": 40 * 528 * (2**20 - 128), "swa_flops": 274_844_352_512}),
        # Three sources of 356 bytes at half the entries, and their indexers at half the keys
        ("compression", {"compression_token": 534, "compression_index_flops": 3 * 2**19 * 2 * 32 * 128}),
        # Field case 4: 10,324 without sharing
        ("cross-layer-sharing", {"cross_layer_token": 10_324 - 890}),
        ("fp4-main-kv", {"fp4_main_entry": 1_024 - 288, "fp4_main_token": 2_560 - 720, "fp4_main_read": 14_319_616}),
        ("fp4-index", {"fp4_index_entry": 256 - 68, "fp4_index_token": 470, "fp4_index_read": 2_686_976 * 188}),
        ("hsi", {"hsi_flops": 4 * (2**20 - 16_384) * 8_192, "hsi_bytes": 4 * (2**20 - 16_384) * 68}),
        # 2,540 tokens and 128; 2,541 rows and 128; the release's windows
        (
            "bounded-replay",
            {
                "replay_encoder": 20 * (2_540 - 128),
                "replay_decoder": 20 * (2_541 - 128),
                "replay_windows": 2_703_360,
            },
        ),
        # (2n + 2) of (4n + 4) vectors of 5,120 in bf16, 80 sub-layers
        ("single-pass-mhc", {"mhc_token": 80 * 10 * 5_120 * 2, "mhc_sub_layer": 10 * 5_120 * 2}),
        ("engram", {"engram_flops": 2 * 768_022_850 * 256, "engram_device": 768_022_850 * 264}),
        ("pixel-unshuffle", {"unshuffle_positions": 5_184 - 576, "unshuffle_bytes": (5_184 - 576) * 890}),
        (
            "qat",
            {
                "qat_cache_token": 3_200 - 890,
                "qat_window_sequence": 40 * 128 * (1_024 - 528),
                "qat_experts": 40 * 384 * 35_389_440 * Fraction(47, 32),
                "qat_tables": 768_022_850 * (512 - 264),
            },
        ),
    ],
)
def test_savings_of_the_release(technique: str, expected: dict[str, int]) -> None:
    assert values(technique) == expected


def test_savings_of_work_in_the_release() -> None:
    reuse = values("topk-reuse")
    # 15 Reuse layers in the encoder would see half a key a token, 15 in the decoder the pool
    keys = 15 * 2**19 + 15 * 16_384
    assert (reuse["topk_reuse_flops"], reuse["topk_reuse_bytes"]) == (keys * 8_192, keys * 68)
    assert reuse["topk_reuse_projections"] == 30 * 2 * (32 * 128 * 1_280 + 32 * 5_120)
    ced = values("ced")
    assert ced["ced_layer_tokens"] == 1_310_720 - 657_920
    assert ced["ced_flops"] / 2 == pytest.approx(15.47e9 - 7.89e9, rel=2e-3)
    # (1 - 0.8^6) / 0.2 = 3.68928 tokens a step
    dspark = values("dspark")
    assert dspark["dspark_steps"] == 1 - Fraction(100_000, 368_928)
    assert tokens_per_step(Fraction(4, 5), 5) == Fraction(368_928, 100_000)


def test_savings_equal_what_the_alternative_would_cost() -> None:
    context = RELEASE.max_position_embeddings
    # No pool: every index source scores all it sees.
    all_scored = index_flops(RELEASE.without("candidates"), context)
    assert values("hsi")["hsi_flops"] == all_scored - index_flops(RELEASE, context)
    # Every layer that reads global KV as an index source: Reindex in place of Reuse.
    sparse = tuple(role.layer_id for role in RELEASE.backbone_roles if role.ratio)
    no_reuse = RELEASE.replace(index_source_layer_ids=sparse)
    assert values("topk-reuse")["topk_reuse_flops"] == index_flops(no_reuse, context) - index_flops(RELEASE, context)
    read = index_read_bytes(KVLayout(no_reuse), context) - index_read_bytes(KVLayout(RELEASE), context)
    assert values("topk-reuse")["topk_reuse_bytes"] == read
    assert "topk_reuse_flops" not in values("topk-reuse", no_reuse)
    # Every one of them as a KV source.
    no_sharing = no_reuse.replace(kv_source_layer_ids=sparse)
    saved = values("cross-layer-sharing")["cross_layer_token"]
    assert saved == KVLayout(no_sharing).bytes_per_token - KVLayout(RELEASE).bytes_per_token
    # No compression: every ratio 1.
    ratios = tuple(min(ratio, 1) for ratio in RELEASE.compress_ratios)
    coarse = RELEASE.replace(compress_ratios=ratios)
    assert values("compression")["compression_token"] == KVLayout(coarse).bytes_per_token - 890
    scored = index_flops(coarse, context) - index_flops(RELEASE, context)
    assert values("compression")["compression_index_flops"] == scored
    assert find("compression").savings(coarse) == ()
    # bf16 caches
    wide = KVLayout(RELEASE.replace(cache=CacheFormats(main="bf16")))
    assert values("fp4-main-kv")["fp4_main_token"] == wide.bytes_per_token - 890
    read = kv_read_bytes(wide, context) - kv_read_bytes(KVLayout(RELEASE), context)
    assert values("fp4-main-kv")["fp4_main_read"] == read
    wide = KVLayout(RELEASE.replace(cache=CacheFormats(main="bf16", index_key="bf16", window="bf16")))
    assert values("qat")["qat_cache_token"] == wide.bytes_per_token - 890
    assert values("qat")["qat_window_sequence"] == wide.window_bytes_logical - 2_703_360


def test_weights_that_are_saved_or_read() -> None:
    tensors = expected_tensors(FEW).values()
    decoder = sum(
        parameter_count(tensor)
        for tensor in tensors
        if tensor.name.startswith("layers.")
        and int(tensor.name.split(".")[1]) >= 20
        and tensor.part not in ("experts", "engram_tables")
    )
    chosen = 20 * 6 * 35_389_440
    seam = 512 * 5_120 + 512 + 128 * 512 + 128  # Wkv and its norm, Wk and its norm
    assert values("ced", FEW)["ced_flops"] == 2 * (decoder + chosen - seam)
    wide = sum(2 * parameter_count(tensor) - tensor.nbytes for tensor in tensors if tensor.part == "experts")
    assert values("qat", FEW)["qat_experts"] == wide
    backbone = [tensor for tensor in tensors if tensor.name.split(".")[0] in ("layers", "head", "norm")]
    fixed = sum(t.nbytes for t in backbone if t.part not in ("experts", "router", "engram_tables"))
    assert values("dspark", FEW)["dspark_weights"] == fixed * (1 - Fraction(3_125, 11_529))
    # Nearly all in FP8, a byte a parameter: about what is active besides the chosen experts, router aside.
    active = active_parameters(FEW).decode_with_head - 40 * 6 * 35_389_440
    assert active < fixed < 1.2 * active


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_technique_that_is_off_saves_nothing(switch: str) -> None:
    config = FEW.without(switch)
    off = {technique.id for technique in TECHNIQUES if not technique.savings(config)}
    assert off == TURNS_OFF[switch]
    shown = {row[0]: row[3:] for row in overview(config).rows}
    assert {name for name, row in shown.items() if row == (None, None, OFF)} == off
    for name in off:
        (table,) = answers(find(name), config)
        assert {row[0]: row[1] for row in table.rows}["what it saves"] == f"nothing: {OFF}"
        document = find(name).document(config)
        assert (document["status"], document["saves"]) == (OFF, {})


def test_what_is_left_of_a_plain_config() -> None:
    on = [technique.id for technique in TECHNIQUES if technique.savings(PLAIN)]
    assert on == ["shared-latent", "swa"]
    assert find("swa").savings(PLAIN)[0].value == 40 * 1_024
    # QAT without anything but a quantised window, or quantised weights only
    windows = PLAIN.replace(cache=CacheFormats())
    assert values("qat", windows) == {"qat_window_sequence": 40 * 128 * (1_024 - 528)}
    weights = PLAIN.replace(weights=WeightFormats(dense="bf16", experts="fp8", engram="bf16"))
    assert values("qat", weights) == {"qat_experts": 40 * 384 * 35_389_440 * (1 - Fraction(1, 1_024))}
    wide = RELEASE.replace(cache=CacheFormats(main="e4m3_e8m0_32", index_key="bf16"))
    assert find("fp4-main-kv").savings(wide) == find("fp4-index").savings(wide) == ()


def test_other_configs() -> None:
    demo = presets.load("demo")
    # 4 heads of 64: 2 x 4 x 64 x 2 - 64 x 2; sources of ratios 2 and 1 with entries of 36 + 17 = 53 bytes
    assert values("shared-latent", demo)["shared_latent_layer"] == 1_024 - 128
    assert values("compression", demo)["compression_token"] == Fraction(53, 2)
    assert values("cross-layer-sharing", demo)["cross_layer_token"] == 2 * Fraction(53, 2) + 3 * 53
    # One user of the pool, 4,096 groups against 32 x 8
    assert values("hsi", demo)["hsi_flops"] == (4_096 - 256) * 2 * 4 * 32
    # 4 encoder layers look back 4 x 127 tokens; the prompt is all of the 4,096 positions
    assert values("bounded-replay", demo)["replay_encoder"] == 4 * (508 - 128)
    assert values("ced", demo)["ced_layer_tokens"] == 4 * (4_096 - 128)
    # A prefill without encoder layers: the one source is layer 0.
    pair = presets.load("real-pair")
    assert "replay_encoder" not in values("bounded-replay", pair)
    assert values("ced", pair)["ced_layer_tokens"] == 2 * (32_768 - 128)
    # A context below the window: nothing beyond it, nothing to replay beyond the hit
    short = RELEASE.without("vision").replace(max_position_embeddings=100)
    assert values("swa", short)["swa_sequence"] == 0
    assert set(values("bounded-replay", short).values()) == {0, 2_703_360}
    assert values("hsi", short) == {"hsi_flops": 0, "hsi_bytes": 0}


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.id)
def test_expressions_evaluate_to_values(technique: Technique) -> None:
    seen = 0
    for config in configs():
        for figure in technique.savings(config):
            assert_figure(figure)
            seen += 1
    assert seen


def assert_figure(figure: Figure) -> None:
    assert math.isclose(evaluated(figure.expression), float(figure.value), rel_tol=1e-12), figure
    assert isinstance(figure.value, int | Fraction)
    # The denominator is in the unit, and the alternative is named.
    assert re.fullmatch(r"[A-Za-z-]+( .*)? (a|an) [a-z].*", figure.unit), figure.unit
    assert figure.note.startswith("Against ")


def test_find_refuses_by_name() -> None:
    assert find(" Top-K Reuse ").id == "topk-reuse"
    assert find("MHC").id == "single-pass-mhc"
    with pytest.raises(InputError, match=r"must be one of shared-latent, swa, .*, qat; got 'nsa'") as error:
        find("nsa")
    assert "\n" not in str(error.value)


def test_answers_in_full() -> None:
    answer, saves = answers(find("ced"), FEW)
    assert [row[0] for row in answer.rows] == [
        "which factor it moves",
        "what it saves",
        "what it pays: approximation",
        "what it pays: expressiveness",
        "what it pays: training",
    ]
    assert answer.rows[0][1] == f"work. {find('ced').moves}"
    assert saves.rows[0][:4] == ("ced_layer_tokens", 652_800, "652,800", "layer-tokens a prompt of 32,768")
    assert saves.rows[0][5] == "20 x (32,768 - min(128, 32,768))"


def test_chain_of_the_release() -> None:
    links = {link.symbol: link.value for link in chain(RELEASE)}
    assert links == {
        "main": 288,
        "index": 68,
        "entry": 356,
        "entries": Fraction(5, 2),
        "main_token": 720,
        "index_token": 170,
        "token": 890,
        "layers": 40,
        "W": 128,
        "slot": 528,
        "window": 2_703_360,
        "crossing": Fraction(2_703_360, 890),
        "N": 2**20,
        "chosen": 38 * 512,
        "kv_read": 8_306_688,
        "scored": 2_686_976,
        "index_read": 182_714_368,
        "score": 8_192,
        "index_flops": 22_011_707_392,
        "E": 20,
        "D": 20,
        "back": 2_540,
        "field": 2_541,
        "P": 32_768,
        "prefill": Fraction(657_920, 1_310_720),
        "content": 4,
        "address": 8,
        "query": 40,
    }
    assert chain_table(RELEASE).note == "content : address : query = 4 : 8 : 40"
    shown = {row[0]: row[3:] for row in chain_table(RELEASE).rows}
    assert shown["crossing"][0] == "2,703,360 / 890 ≈ 3,037.48"
    assert round(float(links["crossing"]), 1) == 3_037.5
    assert shown["entries"] == ("3/2 + 1/1 = 2.5", 2.5, "entries a token", "config")
    assert shown["N"] == ("1,048,576", 2**20, "tokens", "config")


def test_chain_uses_only_rows_above() -> None:
    for config in configs():
        above: dict[str, int | Fraction] = {}
        for link in chain(config):
            assert set(link.uses) <= set(above), link.symbol
            assert math.isclose(evaluated(link.expression), float(link.value), rel_tol=1e-12), link
            if link.uses:
                # The formula itself, with the values of the rows above in place of the symbols.
                formula = link.formula.replace(" x ", " * ")
                assert eval(formula, {"__builtins__": {}, "min": min}, dict(above)) == link.value, link
            above[link.symbol] = Fraction(link.value)
        assert above["query"] == config.num_hidden_layers
        assert above.get("token", 0) == KVLayout(config).bytes_per_token


def test_chain_without_global_kv() -> None:
    symbols = [link.symbol for link in chain(RELEASE.without("compression"))]
    assert "token" not in symbols
    assert "index_flops" not in symbols
    assert chain_table(RELEASE.without("compression")).note == "content : address : query = 0 : 0 : 40"


def test_formats_of_the_text() -> None:
    # The text on FP4 quotes the formats' tolerances and range.
    main, index = FORMATS["e2m1_e4m3_16"], FORMATS["e2m1_e8m0_32"]
    assert "3/17" in find("fp4-main-kv").approximation
    assert main.tolerance == 3 / 17
    assert "1/5" in find("fp4-index").approximation
    assert index.tolerance == 1 / 5
    assert "2,688" in find("fp4-main-kv").approximation
    assert main.value_max * 448 == 2_688
