"""The cache's bytes and offsets: the release's figures, byte for byte, and the shapes of the functions behind them."""

from __future__ import annotations

import doctest
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual import layout as layout_module
from rorqual.config import CacheFormats, ModelConfig, presets
from rorqual.errors import ConfigError, InputError
from rorqual.layout import KVLayout, Span

RELEASE_CONFIG = presets.load("v4.1-flash")
RELEASE = KVLayout(RELEASE_CONFIG)
GOLDENS = Path(__file__).resolve().parent / "goldens"


def with_formats(**formats: str) -> KVLayout:
    return KVLayout(RELEASE_CONFIG.replace(cache=CacheFormats(**formats)))


def test_docstring_examples() -> None:
    results = doctest.testmod(layout_module)
    assert results.attempted >= 9
    assert results.failed == 0


def test_release_bytes() -> None:
    assert RELEASE.bytes_per_token == 890
    assert [source.bytes_per_token for source in RELEASE.sources] == [178, 178, 178, 356]
    assert [source.entry_bytes for source in RELEASE.sources] == [356] * 4
    assert RELEASE.page_bytes == 3 * 64 * 356 + 128 * 356 == 113_920
    assert RELEASE.window_row_bytes == 528
    assert RELEASE.ring_rows == 133
    assert RELEASE.window_bytes_logical == 40 * 128 * 528 == 2_703_360
    assert RELEASE.window_bytes_allocated == 40 * 133 * 528 == 2_808_960
    assert RELEASE.draft_window_bytes == 3 * 128 * 528 == 202_752
    assert [RELEASE.tail_rows(ratio) for ratio in (1, 2, 4)] == [0, 6, 8]
    assert (RELEASE.tail_bytes, RELEASE.tail_bytes_logical) == (73_728, 12_288)
    assert (RELEASE.history_rows, RELEASE.history_rows_logical) == (3 + 5, 3)
    assert RELEASE.sequence_bytes_allocated == 2_808_960 + 202_752 + 73_728 + 8 * 8
    assert RELEASE.sequence_bytes_logical == 2_703_360 + 202_752 + 12_288 + 3 * 8


def test_release_without_drafting() -> None:
    plain = KVLayout(RELEASE_CONFIG, draft_rows=0)
    assert plain.window_bytes_allocated == plain.window_bytes_logical == 2_703_360
    assert plain.tail_bytes == plain.tail_bytes_logical == 12_288
    assert plain.draft_window_bytes == 0
    assert plain.history_rows == 3
    text = KVLayout(RELEASE_CONFIG.without("drafts"))
    assert text.draft_rows == 0
    assert text.sequence_bytes_allocated == plain.sequence_bytes_allocated
    # Global bytes do not depend on it (field case 3).
    assert plain.page_bytes == text.page_bytes == RELEASE.page_bytes


def test_release_offsets() -> None:
    at = 0
    for source, layer in zip(RELEASE.sources, (2, 8, 14, 20), strict=True):
        entries = 128 if layer == 20 else 64
        assert (source.layer_id, source.entries, source.offset) == (layer, entries, at)
        assert source.main_codes == Span(offset=at, entry_bytes=256)
        assert source.main_scales == Span(offset=at + entries * 256, entry_bytes=32)
        assert source.index_codes == Span(offset=at + entries * 288, entry_bytes=64)
        assert source.index_scales == Span(offset=at + entries * 352, entry_bytes=4)
        at += entries * 356
        assert source.end == at
        assert RELEASE.source(layer) is source
    assert at == RELEASE.page_bytes
    with pytest.raises(KeyError):
        RELEASE.source(3)


LAYOUTS: dict[str, KVLayout] = {
    "release": RELEASE,
    "release, large pages": KVLayout(RELEASE_CONFIG, page_tokens=1024),
    "tiny": KVLayout(presets.load("tiny"), page_tokens=16),
    "mid": KVLayout(presets.load("mid")),
    "pair": KVLayout(presets.load("real-pair")),
    "bf16": with_formats(main="bf16", index_key="bf16", window="bf16"),
    "fp32": with_formats(main="fp32", index_key="fp32", window="fp32"),
    "unscaled": with_formats(main="e2m1_unscaled"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_spans_tile_the_page_without_gap_or_overlap(name: str) -> None:
    layout = LAYOUTS[name]
    at = 0
    for source in layout.sources:
        assert source.entries * source.ratio == layout.page_tokens
        for span in source.spans:
            assert span.offset == at
            at += source.entries * span.entry_bytes
    assert at == layout.page_bytes == layout.bytes_per_token * layout.page_tokens


def test_the_layout_follows_the_formats() -> None:
    assert with_formats(main="bf16").sources[0].entry_bytes == 512 * 2 + 68
    assert with_formats(main="e4m3_e8m0_32").sources[0].entry_bytes == 512 + 16 + 68
    assert with_formats(main="e2m1_e8m0_32").sources[0].entry_bytes == 256 + 16 + 68
    assert with_formats(main="fp32", index_key="bf16").sources[0].entry_bytes == 512 * 4 + 128 * 2
    assert with_formats(window="bf16").window_row_bytes == 1024
    unscaled = with_formats(main="e2m1_unscaled", index_key="e2m1_unscaled")
    # FP4 without scales: the wrong answer of field case 4, and here a format of its own.
    assert unscaled.bytes_per_token == 800
    assert unscaled.sources[0].main_scales.entry_bytes == 0


def test_bytes_per_token_may_be_a_fraction() -> None:
    config = RELEASE_CONFIG.replace(
        compress_ratios=[4 if r == 2 else r for r in RELEASE_CONFIG.compress_ratios],
        head_dim=32 * 17,
    )
    entry = 17 * (16 + 2) + 68
    assert KVLayout(config).bytes_per_token == Fraction(3 * entry, 4) + entry


def test_logical_and_allocated_bytes_are_two_figures() -> None:
    """Field case 2. A group still filling is in the tail, not in the global KV."""
    assert [RELEASE.global_bytes_logical(n) for n in (0, 1, 2, 3, 128)] == [0, 356, 5 * 356, 6 * 356, 113_920]
    assert [RELEASE.global_bytes_allocated(n) for n in (0, 1, 128, 129)] == [0, 113_920, 113_920, 227_840]
    assert RELEASE.global_bytes_logical(10**6) == 890 * 10**6
    assert RELEASE.global_bytes_allocated(10**6) == 7813 * 113_920


@given(capacity=st.integers(0, 10**9))
def test_capacity_is_the_inverse_of_allocated_bytes(capacity: int) -> None:
    tokens = RELEASE.tokens_in(capacity)
    assert tokens is not None
    assert RELEASE.global_bytes_allocated(tokens) <= capacity < RELEASE.global_bytes_allocated(tokens + 1)


def test_bytes_per_token_do_not_depend_on_the_length_planned_for() -> None:
    """Field case 1."""
    lengths = (4096, 131_072, 1_048_576)
    layouts = [KVLayout(RELEASE_CONFIG.replace(max_position_embeddings=length)) for length in lengths]
    assert {layout.bytes_per_token for layout in layouts} == {890}
    assert {layout.sequence_bytes_allocated for layout in layouts} == {RELEASE.sequence_bytes_allocated}


def test_without_a_source_there_is_no_global_kv() -> None:
    layout = KVLayout(RELEASE_CONFIG.without("compression"))
    assert layout.sources == ()
    assert layout.page_bytes == layout.bytes_per_token == layout.tail_bytes == 0
    assert layout.global_bytes_allocated(1000) == layout.global_bytes_logical(1000) == 0
    assert layout.tokens_in(10**9) is None
    assert layout.window_bytes_logical == 2_703_360


def test_without_engram_there_is_no_history() -> None:
    layout = KVLayout(RELEASE_CONFIG.without("engram"))
    assert layout.history_rows == layout.history_rows_logical == layout.history_bytes == 0


@pytest.mark.parametrize("page_tokens", [0, -1, 2**31, True, 128.0, "128", None, 1, 4, 12, 127, 132])
def test_illegal_pages(page_tokens: Any) -> None:
    """The candidate span is 8 groups of ratio 1: pages are multiples of 8."""
    with pytest.raises(ConfigError, match=r"^page_tokens must be"):
        KVLayout(RELEASE_CONFIG, page_tokens=page_tokens)


def test_pages_are_multiples_of_every_ratio_and_of_the_candidate_span() -> None:
    assert KVLayout(RELEASE_CONFIG, page_tokens=8).page_bytes == 8 * 890
    free = RELEASE_CONFIG.replace(candidate_source_layer_id=-1)
    assert KVLayout(free, page_tokens=2).page_bytes == 2 * 890
    with pytest.raises(ConfigError, match=r"multiple of 2 \(the ratio of source 2\); got 3"):
        KVLayout(free, page_tokens=3)
    # A span counts groups of the candidate source's own ratio.
    config = presets.load("tiny").without("engram", "drafts", "vision")
    config = config.replace(compress_ratios=[0, 2, 2, 2, 2, 2])
    with pytest.raises(ConfigError, match=r"multiple of 8 \(candidate_block_size 4 x ratio 2\); got 4"):
        KVLayout(config, page_tokens=4)
    assert KVLayout(config, page_tokens=8).sources[1].entries == 4


def test_wide_formats_need_aligned_pages() -> None:
    config = RELEASE_CONFIG.replace(
        candidate_source_layer_id=-1, head_dim=32, qk_rope_head_dim=16, cache=CacheFormats(index_key="fp32")
    )
    # Two tokens are one entry of 16 + 2 bytes: the fp32 keys after it would begin at byte 18.
    with pytest.raises(ConfigError, match=r"^page_tokens must be a multiple of 8 when a cache format is fp32; got 2"):
        KVLayout(config, page_tokens=2)
    assert KVLayout(config, page_tokens=8).page_bytes == 8 * KVLayout(config).bytes_per_token


@pytest.mark.parametrize("draft_rows", [-1, 2**31, True, 5.0, "5"])
def test_illegal_draft_rows(draft_rows: Any) -> None:
    with pytest.raises(ConfigError, match=r"^draft_rows must be"):
        KVLayout(RELEASE_CONFIG, draft_rows=draft_rows)


@pytest.mark.parametrize("case", ["fp32-text", "fp32-dspark", "native-text", "fp32-edges", "fp32-vision"])
def test_goldens_use_pages_of_16(case: str) -> None:
    config = ModelConfig.from_json(GOLDENS / case)
    layout = KVLayout(config, page_tokens=16)
    entry = 64 // 2 + 64 // 16 + 32 // 2 + 32 // 32
    assert layout.page_bytes == 8 * entry + 16 * entry
    assert layout.window_row_bytes == 64 + 2
    assert layout.ring_rows == 16 + (5 if case == "fp32-dspark" else 0)


def test_bounded_replay() -> None:
    assert [RELEASE.replay_tokens(hit) for hit in (0, 1, 127, 128, 129, 100_000)] == [0, 1, 127, 128, 128, 128]
    assert RELEASE.replay_tokens(4096, "bounded", "full", length=4096) == 128


def test_exact_replay_reaches_as_far_as_the_layers_that_see_every_token() -> None:
    far = 100_000
    assert RELEASE.replay_tokens(far, "exact", "ced") == 20 * 127 == 2540
    assert RELEASE.replay_tokens(far, "exact", "full") == 40 * 127 == 5080
    assert RELEASE.replay_tokens(2540, "exact") == 2540
    assert RELEASE.replay_tokens(2541, "exact") == 2540
    assert RELEASE.replay_tokens(100, "exact", "full") == 100
    assert RELEASE.replay_tokens(0, "exact") == 0


def test_exact_replay_covers_the_rows_that_the_decoder_keeps() -> None:
    """The decoder takes the encoder's streams of the last W rows, below the hit too when the suffix is short."""
    hit = 8192
    assert RELEASE.replay_tokens(hit, "exact", "ced", length=hit) == 2540 + 128
    assert RELEASE.replay_tokens(hit, "exact", "ced", length=hit + 1) == 2540 + 127
    assert RELEASE.replay_tokens(hit, "exact", "ced", length=hit + 127) == 2540 + 1
    assert RELEASE.replay_tokens(hit, "exact", "ced", length=hit + 128) == 2540
    assert RELEASE.replay_tokens(hit, "exact", "ced", length=hit + 5000) == 2540
    assert RELEASE.replay_tokens(hit, "exact", "full", length=hit) == 5080
    # The kept rows begin before the prompt does: everything is computed again.
    assert RELEASE.replay_tokens(100, "exact", "ced", length=100) == 100


def test_exact_replay_when_the_decoder_is_everything_or_nothing() -> None:
    pair = KVLayout(presets.load("real-pair"))
    assert pair.config.decoder_start == 0
    assert pair.replay_tokens(4096, "exact") == 0
    assert pair.replay_tokens(4096, "exact", length=4096) == 128
    no_source = KVLayout(RELEASE_CONFIG.without("compression"))
    assert no_source.replay_tokens(9000, "exact", "ced", length=9000) == 5080


def test_illegal_replays() -> None:
    illegal: list[dict[str, Any]] = [{"mode": "approximate"}, {"prefill": "half"}, {"length": 99}]
    for arguments in illegal:
        with pytest.raises(InputError, match=f"^{next(iter(arguments))} must be"):
            RELEASE.replay_tokens(100, **arguments)
    hits: list[Any] = [-1, 1.0, True]
    for hit in hits:
        with pytest.raises(InputError, match=r"^tokens must be an integer of 0 or more"):
            RELEASE.replay_tokens(hit)


def test_layer_tokens_of_a_prefill() -> None:
    assert RELEASE.prefill_layer_tokens(32_768) == 20 * 32_768 + 20 * 128
    assert RELEASE.prefill_layer_tokens(32_768, "full") == 40 * 32_768
    assert RELEASE.prefill_layer_tokens(100) == RELEASE.prefill_layer_tokens(100, "full") == 4000
    with pytest.raises(InputError, match=r"^prefill must be one of ced, full"):
        RELEASE.prefill_layer_tokens(1, "half")
