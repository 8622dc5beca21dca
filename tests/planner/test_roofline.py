"""The decode step at best: bytes and FLOPs against the planner's own terms, times against a division by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from rorqual.config import CacheFormats, ModelConfig, WeightFormats, presets
from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner.devices import DEVICES, find_device
from rorqual.planner.parallel import arrange
from rorqual.planner.placement import Placement
from rorqual.planner.roofline import (
    cache_read_bytes,
    decode_step,
    decode_steps,
    experts_touched,
    rank_flops,
    weight_read_bytes,
)
from rorqual.planner.storage import row_format
from rorqual.planner.work import decode_flops, index_read_bytes, kv_read_bytes

CONFIG = presets.load("v4.1-flash")
RELEASE = KVLayout(CONFIG)
TINY = presets.load("tiny")
EIGHT = arrange(CONFIG, 8)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        TINY,
        TINY.without("routed_experts"),
        TINY.replace(weights=WeightFormats(dense="bf16", experts="bf16", engram="bf16")),
        TINY.replace(cache=CacheFormats(index_key="bf16")),
        TINY.replace(cache=CacheFormats(index_key="e4m3_e8m0_32")),
        TINY.without("compression", "engram", "vision", "drafts"),
    ],
)
@pytest.mark.parametrize("tokens", [1, 500, 10**6])
def test_one_rank_and_one_sequence_compute_what_a_decoded_token_does(config: ModelConfig, tokens: int) -> None:
    assert rank_flops(config, arrange(config), 1, tokens) == decode_flops(config, tokens)


def test_ranks_share_the_work() -> None:
    whole, alone = rank_flops(CONFIG, arrange(CONFIG), 64, 4096), decode_flops(CONFIG, 4096)
    assert whole.total == 64 * alone.total
    # Eight groups: each makes an eighth of everything. Eight ranks of one group: index scores are made by all.
    assert rank_flops(CONFIG, EIGHT, 64, 4096).total * 8 == whole.total
    split = rank_flops(CONFIG, arrange(CONFIG, 8, tp=8), 64, 4096)
    assert split.fp4 == whole.fp4
    assert whole.total / 8 < split.total < whole.total / 4
    # A batch below the groups leaves some idle; the busiest has one sequence.
    assert rank_flops(CONFIG, EIGHT, 1, 4096).fp4 == alone.fp4


def test_cache_reads_are_the_planners_terms() -> None:
    for tokens in (1, 127, 4096, 2**20):
        assert cache_read_bytes(RELEASE, tokens) == kv_read_bytes(RELEASE, tokens) + index_read_bytes(RELEASE, tokens)
    # bf16 rows: 38 layers x 512 entries x 1,024, 40 windows of 128 x 1,024, and 256 bytes of each index key scored.
    keys = 3 * 2**19 + 2**20 + 4 * 16_384
    wide = cache_read_bytes(RELEASE, 2**20, row_format(RELEASE, "bf16"))
    assert wide == 38 * 512 * 1024 + 40 * 128 * 1024 + keys * 256


def test_experts_touched() -> None:
    assert experts_touched(384, 6, 0) == 0
    assert experts_touched(384, 6, 1) == 6
    assert experts_touched(384, 6, 2) == 12 - Fraction(36, 384)
    assert experts_touched(0, 6, 5) == 0
    assert experts_touched(4, 8, 1) == 4
    assert 383.9 < experts_touched(384, 6, 1024) < 384


def test_weights_read() -> None:
    # Every part but embedding, tables, vision, drafts and experts, then embedding rows and the experts touched.
    every_step = 510_286_023_000 - 1_323_827_200 - 202_758_032_400 - 970_536_960
    every_step -= 713_428_872 + 7_219_445_760 + 288_777_830_400
    one = arrange(CONFIG)
    assert weight_read_bytes(CONFIG, one, 1) == every_step + 10_240 + Fraction(288_777_830_400 * 6, 384)
    all_read = weight_read_bytes(CONFIG, one, 100_000)
    assert all_read == pytest.approx(every_step + 100_000 * 10_240 + 288_777_830_400)
    assert (
        weight_read_bytes(CONFIG, EIGHT, 8)
        == every_step + 10_240 + 288_777_830_400 * experts_touched(384, 6, 8) / 384 / 8
    )


def test_times_and_bounds() -> None:
    step = decode_step(RELEASE, DEVICES["h200"], 64, 131_072, ranks=EIGHT)
    read = weight_read_bytes(CONFIG, EIGHT, 64) + 8 * cache_read_bytes(RELEASE, 131_072) + 64 * 12_672 // 8
    assert step.memory_s == pytest.approx(float(read) / 4.8e12, rel=1e-12)
    assert step.compute_s is not None
    # No FP4 on this device: index scores run at the FP8 rate.
    work = step.flops
    assert step.compute_s == pytest.approx((work.fp4 + work.fp8) / 1979e12 + work.bf16 / 989e12)
    assert (step.bound, step.seconds) == ("memory", step.memory_s)
    assert step.tokens_per_second == pytest.approx(64 / step.memory_s)
    # Slow arithmetic turns the bound around.
    slow = find_device("cpu", memory=10**12, bandwidth=10**12, bf16=10**12)
    bound = decode_step(RELEASE, slow, 64, 131_072, ranks=arrange(CONFIG))
    assert bound.compute_s is not None
    assert (bound.bound, bound.seconds) == ("compute", bound.compute_s)
    # Without published rates memory is all there is to say.
    silent = decode_step(RELEASE, DEVICES["m3ultra"], 1, 4096, ranks=arrange(CONFIG))
    assert (silent.compute_s, silent.bound) == (None, "memory")


def test_engram_rows_count_only_where_they_are_read_from_the_device() -> None:
    one = arrange(CONFIG)
    rows = {
        where: decode_step(
            RELEASE, DEVICES["b200"], 10, 4096, ranks=one, placement=Placement(engram=where)
        ).engram_bytes
        for where in ("device", "host", "disk")
    }
    assert rows == {"device": 10 * 12_672, "host": 0, "disk": 0}


def test_steps_slow_down_with_batch_and_context() -> None:
    steps = decode_steps(RELEASE, DEVICES["h200"], (1, 64, 1024), (1, 4096, 2**20), ranks=EIGHT)
    times = [[step.seconds for step in steps[i : i + 3]] for i in (0, 3, 6)]
    assert all(row == sorted(row) for row in times)
    assert all(list(column) == sorted(column) for column in zip(*times, strict=True))


def test_what_has_no_roofline() -> None:
    with pytest.raises(InputError, match=r"^--device cpu has no published bandwidth; give --bandwidth"):
        decode_step(RELEASE, find_device("cpu", memory=1), 1, 1, ranks=arrange(CONFIG))
    for batch, context in ((0, 1), (1, 0)):
        with pytest.raises(InputError, match=r"^a step has a batch and a context of 1 or more"):
            decode_step(RELEASE, DEVICES["h200"], batch, context, ranks=arrange(CONFIG))
