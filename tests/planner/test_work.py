"""What a decoded token computes and reads: the release's figures by hand, and how they grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.config import CacheFormats, ModelConfig, WeightFormats, presets
from rorqual.inventory.parameters import active_parameters, parameters_by_part
from rorqual.layout import KVLayout
from rorqual.planner import work
from rorqual.planner.counts import active_counts, few_experts, part_counts

RELEASE = presets.load("v4.1-flash")
LAYOUT = KVLayout(RELEASE)
MEBI = 2**20


@pytest.mark.parametrize("name", presets.NAMES)
def test_counts_are_the_inventorys(name: str) -> None:
    config = presets.load(name)
    assert part_counts(config) == parameters_by_part(config)
    assert list(part_counts(config)) == list(parameters_by_part(config))
    assert active_counts(config) == active_parameters(config)


@pytest.mark.parametrize(
    "change",
    [
        {"n_routed_experts": 0},
        {"n_routed_experts": 2},
        {"n_routed_experts": 3},
        {"n_routed_experts": 40, "num_experts_per_tok": 1},
        {"vision": None},
        {"weights": WeightFormats(dense="bf16", experts="bf16", engram="bf16")},
        {"n_shared_experts": 0, "n_routed_experts": 12},
    ],
)
def test_counts_of_changed_configs(change: dict[str, object]) -> None:
    config = presets.load("tiny").replace(**change)
    assert part_counts(config) == parameters_by_part(config)
    assert active_counts(config) == active_parameters(config)
    assert few_experts(config).n_routed_experts <= config.n_routed_experts


def test_index_work_of_a_long_context() -> None:
    groups = 3 * 524_288 + 1_048_576 + 4 * 16_384
    assert work.index_groups(RELEASE, MEBI) == groups == 2_686_976
    assert work.index_flops(RELEASE, MEBI) == 2 * 32 * 128 * groups
    assert work.index_read_bytes(LAYOUT, MEBI) == 68 * groups
    # Without a pool every later index source scores the whole context.
    assert work.index_groups(RELEASE.without("candidates"), MEBI) == 3 * 524_288 + 5 * 1_048_576


def test_reads_saturate_at_the_top_k_and_the_window() -> None:
    assert work.kv_read_bytes(LAYOUT, MEBI) == 38 * 512 * 288 + 40 * 128 * 528
    assert work.kv_read_bytes(LAYOUT, 1) == 20 * 288 + 40 * 528
    assert work.kv_read_bytes(LAYOUT, 600) == (18 * 300 + 20 * 512) * 288 + 40 * 128 * 528
    assert [work.attended(RELEASE, RELEASE.roles[i], 600) for i in (0, 2, 20)] == [128, 428, 640]
    assert work.attention_flops(RELEASE, 1) == 4 * 64 * 512 * (40 + 20)


def test_without_compression_only_windows_are_left() -> None:
    config = RELEASE.without("compression")
    assert work.kv_read_bytes(KVLayout(config), MEBI) == 2_703_360
    assert work.index_flops(config, MEBI) == work.index_read_bytes(KVLayout(config), MEBI) == 0
    assert work.decode_flops(config, MEBI) == work.decode_flops(config, 128)


def test_engram_rows_by_format() -> None:
    def stored(engram: str) -> ModelConfig:
        return RELEASE.replace(weights=replace(RELEASE.weights, engram=engram))

    assert [work.engram_read_bytes(stored(name)) for name in ("fp8", "bf16", "fp32")] == [
        2 * 24 * (256 + 8),
        2 * 24 * 512,
        2 * 24 * 1024,
    ]
    assert work.engram_read_bytes(RELEASE.without("engram")) == 0


def test_decode_flops_by_width() -> None:
    flops = work.decode_flops(RELEASE, MEBI)
    active = active_parameters(RELEASE)
    assert flops.fp4 == 22_011_707_392
    assert flops.total == 2 * active.decode_with_head + flops.fp4 + work.attention_flops(RELEASE, MEBI)
    assert flops.fp8_equivalent == flops.fp4 / 2 + flops.fp8 + 2 * flops.bf16
    # Wo_a, 8 groups of [1024, 4096] a layer, is stored FP8 and multiplied in BF16; so is the head.
    assert flops.bf16 - work.attention_flops(RELEASE, MEBI) > 2 * (40 * 8 * 1024 * 4096 + 129_280 * 5120)
    # All of the chosen and shared experts are FP8 work.
    assert flops.fp8 > 2 * 40 * 7 * 35_389_440
    short = work.decode_flops(RELEASE, 4096)
    assert (short.fp8, short.bf16) == (flops.fp8, flops.bf16)
    assert round(flops.fp8_equivalent / short.fp8_equivalent, 4) == 1.2528


def test_index_scores_count_at_the_width_of_the_keys() -> None:
    fp4 = work.decode_flops(RELEASE, MEBI)
    for key, width in (("bf16", "bf16"), ("fp32", "bf16"), ("e4m3_e8m0_32", "fp8")):
        wide = work.decode_flops(RELEASE.replace(cache=CacheFormats(index_key=key)), MEBI)
        assert wide.fp4 == 0
        assert getattr(wide, width) == getattr(fp4, width) + fp4.fp4
        assert wide.total == fp4.total


def test_plain_weights_leave_no_fp8_work() -> None:
    tiny = presets.load("tiny")
    plain = tiny.replace(weights=WeightFormats(dense="bf16", experts="bf16", engram="bf16"))
    flops = work.decode_flops(plain, 64)
    assert (flops.fp8, flops.total) == (0, work.decode_flops(tiny, 64).total)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(tokens=st.integers(0, 2**20), more=st.integers(0, 10_000), name=st.sampled_from(["v4.1-flash", "tiny", "demo"]))
def test_work_never_falls_with_the_context(tokens: int, more: int, name: str) -> None:
    config = presets.load(name)
    layout = KVLayout(config)
    for measure in (work.index_groups, work.index_flops, work.attention_flops):
        assert measure(config, tokens) <= measure(config, tokens + more)
    assert work.kv_read_bytes(layout, tokens) <= work.kv_read_bytes(layout, tokens + more)
    assert work.index_read_bytes(layout, tokens) <= work.index_read_bytes(layout, tokens + more)
    assert work.decode_flops(config, tokens).total <= work.decode_flops(config, tokens + more).total
