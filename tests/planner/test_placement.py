"""Weights by part, format and rank: against the full list of tensors, and against sums written out."""

from __future__ import annotations

from collections import Counter

import pytest

from rorqual.config import ModelConfig, WeightFormats, presets
from rorqual.errors import InputError
from rorqual.inventory.names import expected_tensors
from rorqual.inventory.parameters import parameter_count
from rorqual.planner.parallel import Ranks, arrange, rank_bytes, rank_share, sharing
from rorqual.planner.placement import Placement, format_bytes, home, placed, tensor_kinds, weight_bytes

RELEASE = presets.load("v4.1-flash")
TINY = presets.load("tiny")
CONFIGS = {
    "release": RELEASE,
    "tiny": TINY,
    "plain": TINY.replace(weights=WeightFormats(dense="bf16", experts="bf16", engram="bf16")),
    "no experts": TINY.without("routed_experts"),
    "text": RELEASE.without("vision", "drafts", "engram"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_kinds_are_the_checkpoints_tensors(name: str) -> None:
    """The short cut over routed experts loses no tensor, byte or parameter of any part."""
    config = CONFIGS[name]
    tensors, nbytes, parameters = Counter[str](), Counter[str](), Counter[str]()
    for spec in expected_tensors(config).values():
        tensors[spec.part] += 1
        nbytes[spec.part] += spec.nbytes
        parameters[spec.part] += parameter_count(spec)
    kinds = tensor_kinds(config)
    for part in tensors:
        mine = [kind for kind in kinds if kind.spec.part == part]
        assert sum(kind.count for kind in mine) == tensors[part]
        assert sum(kind.nbytes for kind in mine) == nbytes[part]
        assert sum(kind.parameters for kind in mine) == parameters[part]
    assert weight_bytes(config) == nbytes
    by_format = format_bytes(config)
    assert {part: sum(row.values()) for part, row in by_format.items()} == nbytes


def test_the_release_weighs_what_was_published() -> None:
    by_part = weight_bytes(RELEASE)
    assert sum(by_part.values()) == 510_286_023_000
    # 40 layers x 384 experts x 3 x 5,120 x 2,304 parameters: half a byte each, and a scale byte for 32.
    values = 40 * 384 * 3 * 5120 * 2304
    assert by_part["experts"] == values // 2 + values // 32
    assert by_part["engram_tables"] == (384_006_168 + 384_016_682) * (256 + 8)
    assert by_part["embed"] == by_part["head"] == 129_280 * 5120 * 2
    assert format_bytes(RELEASE)["embed"] == {"BF16": 129_280 * 5120 * 2}


def test_parts_that_are_left_out() -> None:
    everything = weight_bytes(RELEASE)
    text = weight_bytes(placed(RELEASE, Placement(drafts=False, vision=False, engram="off")))
    gone = {"draft", "draft_experts", "vision", "engram", "engram_tables"}
    assert set(everything) - set(text) == gone
    # Routers lose the second bias that images use, 384 fp32 a layer.
    assert everything["router"] - text["router"] == 40 * 384 * 4
    assert placed(RELEASE, Placement(engram="host")) is RELEASE
    assert [home("engram_tables", Placement(engram=where)) for where in ("device", "host", "disk", "off")] == [
        "device",
        "host",
        "disk",
        "device",
    ]
    assert home("engram", Placement(engram="host")) == "device"
    with pytest.raises(InputError, match=r"^--engram must be one of device, host, disk, off; got 'gpu'"):
        Placement(engram="gpu")


def test_one_rank_holds_everything() -> None:
    one = arrange(RELEASE)
    assert one == Ranks(count=1, tp=1, dp_attention=1, ep=1)
    assert rank_bytes(RELEASE, one, Placement()) == weight_bytes(RELEASE)
    assert sharing("experts", one) == "whole"


def test_eight_ranks_with_attention_copied() -> None:
    share = rank_bytes(RELEASE, arrange(RELEASE, 8), Placement())
    whole = weight_bytes(RELEASE)
    assert share["experts"] * 8 == whole["experts"]
    assert share["draft_experts"] * 8 == whole["draft_experts"]
    # 384,006,168 / 8 = 48,000,771 rows; 384,016,682 / 8 = 48,002,085.25, so the fullest rank holds one row more.
    assert share["engram_tables"] == (48_000_771 + 48_002_086) * 264
    copied = set(whole) - {"experts", "draft_experts", "engram_tables"}
    assert {part: share[part] for part in copied} == {part: whole[part] for part in copied}


def test_eight_ranks_with_heads_split() -> None:
    ranks = arrange(RELEASE, 8, tp=8)
    assert (ranks.dp_attention, ranks.ep, ranks.expert_tp) == (1, 8, 1)
    share, whole = rank_bytes(RELEASE, ranks, Placement()), weight_bytes(RELEASE)
    # What one KV head needs is copied: Wq_a 1,280 x 5,120 and Wkv 512 x 5,120 with their scales, and two norms in bf16.
    copied = 40 * (1280 * 5120 + 40 * 160 + 512 * 5120 + 16 * 160 + 2 * (1280 + 512))
    assert share["attention"] == copied + (whole["attention"] - copied) // 8
    assert share["shared"] * 8 == whole["shared"]
    assert share["embed"] * 8 == whole["embed"]
    for part in ("compressor", "indexer", "router", "norms", "mhc", "engram", "vision"):
        assert share[part] == whole[part]
    # The drafts' heads, shared expert and Markov head split, main_proj and the rest do not.
    assert whole["draft"] // 8 < share["draft"] < whole["draft"]


def test_experts_may_be_split_in_width() -> None:
    by_width = arrange(RELEASE, 8, tp=8, ep=1)
    assert by_width.expert_tp == 8
    by_expert = rank_bytes(RELEASE, arrange(RELEASE, 8), Placement())
    assert rank_bytes(RELEASE, by_width, Placement())["experts"] == by_expert["experts"]
    shapes = {
        kind.spec.name: rank_share(kind, by_width).spec.shape
        for kind in tensor_kinds(RELEASE)
        if kind.spec.part == "experts"
    }
    assert shapes["w1.weight"] == (2304 // 8, 5120 // 2)
    assert shapes["w1.scale"] == (2304 // 8, 5120 // 32)
    assert shapes["w2.weight"] == (5120, 2304 // 2 // 8)
    assert shapes["w2.scale"] == (5120, 2304 // 32 // 8)
    assert sharing("experts", by_width) == "1 shards of experts, each over 8 ranks"


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (8, {"tp": 4, "dp_attention": 4}, r"^--tp x --dp-attention must be --count; got 4 x 4, not 8"),
        (8, {"tp": 3}, r"^--tp x --dp-attention must be --count; got 3 x 2, not 8"),
        (8, {"dp_attention": 16}, r"^--tp x --dp-attention must be --count"),
        (16, {"tp": 16}, r"^--tp must be .* num_attention_heads \(64\) and o_groups \(8\) .*: 1, 2, 4, 8; got 16"),
        (6, {"tp": 3}, r"^--tp must be .*: 1, 2; got 3"),
        (
            8,
            {"ep": 3},
            r"^--ep must be a divisor of --count that divides 384 and 128 routed experts.*: 1, 2, 4, 8; got 3",
        ),
        (6, {"ep": 6}, r"^--ep must be .*; got 6"),
        (5, {}, r"^--count must allow an --ep, which is a divisor of --count that divides .*; 5 allows none"),
        (0, {}, r"^--count must be in 1..65536; got 0"),
        (8, {"tp": 0}, r"^--tp must be in 1..65536; got 0"),
        (8, {"ep": -1}, r"^--ep must be in 1..65536; got -1"),
    ],
)
def test_illegal_arrangements(count: int, options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        arrange(RELEASE, count, **options)


def test_the_widest_legal_spread_of_experts_is_taken() -> None:
    # 128 draft experts do not divide by 6 or 3; pairs of ranks do, and 2,304 / 3 is 24 groups of 32.
    assert arrange(RELEASE, 6) == Ranks(count=6, tp=1, dp_attention=6, ep=2)
    assert arrange(RELEASE.without("drafts"), 6).ep == 6
    dense = TINY.without("routed_experts")
    assert arrange(dense, 2).ep == 1
    with pytest.raises(InputError, match=r"^--ep must be .* no routed experts"):
        arrange(dense, 2, ep=2)


def test_tiles_are_not_cut() -> None:
    # Four heads of 64 in two output groups of 32 rows: halves are whole 32-wide tiles; the shared width 64 is two.
    assert arrange(TINY, 2, tp=2).tp == 2
    narrow = TINY.replace(o_lora_rank=16, o_groups=4)
    with pytest.raises(InputError, match=r"^--tp must be .*32-wide tiles: 1, 2; got 4"):
        arrange(narrow, 4, tp=4, ep=1)
    plain = narrow.replace(weights=WeightFormats(dense="bf16", experts="bf16", engram="bf16"))
    assert arrange(plain, 4, tp=4, ep=1).tp == 4


@pytest.mark.parametrize(("count", "tp", "ep"), [(2, 1, 2), (4, 2, 4), (8, 4, 2), (8, 8, 1), (16, 2, 16), (64, 8, 64)])
def test_shares_add_up_to_the_whole(count: int, tp: int, ep: int) -> None:
    """No byte is lost; only copies, and rows that do not divide, take more."""
    config: ModelConfig = RELEASE
    ranks = arrange(config, count, tp=tp, ep=ep)
    share, whole = rank_bytes(config, ranks, Placement()), weight_bytes(config)
    for part, total in whole.items():
        assert total <= share[part] * count <= total * count
        if part in ("experts", "draft_experts"):
            assert share[part] * count == total
