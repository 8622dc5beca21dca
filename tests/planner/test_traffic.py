"""Hand-overs, pool traffic and break-even: the issue's figures, arithmetic written out, and inverses."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.config import presets
from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner import traffic
from rorqual.planner.traffic_tables import TrafficCase, traffic_figures, traffic_tables

RELEASE = KVLayout(presets.load("v4.1-flash"))
BOUNDED = settings(max_examples=40, deadline=None, derandomize=True)


def test_the_parts_of_each_handover() -> None:
    replay, streams, rings = (traffic.handover(RELEASE, 129, mode) for mode in traffic.HANDOVERS)
    assert traffic.HANDOVERS == ("replay", "streams", "rings")
    for sizes in (replay, streams, rings):
        assert sizes.pages == 2 * (3 * 64 * 356 + 128 * 356) == 2 * 113_920
        assert sizes.tails == 3 * 1 * 2 * 512 * 4 == 12_288
        assert sizes.history == 3 * 8
        assert sizes.carried == 0
    assert replay.total == 2 * 113_920 + 12_288 + 24
    assert streams.rings == 20 * 128 * 528 == 1_351_680
    assert streams.streams == 128 * 4 * 5120 * 2 == 5_242_880
    assert streams.mixing == 128 * 4 * 4 == 2048
    assert streams.total == replay.total + 1_351_680 + 5_242_880 + 2048
    assert rings.rings == 40 * 128 * 528 == 2_703_360
    assert rings.drafts == 3 * 128 * 528 == 202_752
    assert rings.logits == 129_280 * 4 == 517_120
    assert rings.total == replay.total + 2_703_360 + 202_752 + 517_120
    assert traffic.handover_bytes(RELEASE, 129, "rings") == rings.total


def test_a_prompt_shorter_than_the_window_has_fewer_rows() -> None:
    short = traffic.handover(RELEASE, 10, "streams")
    assert (short.pages, short.rings, short.streams) == (113_920, 20 * 10 * 528, 10 * 4 * 5120 * 2)
    assert traffic.handover(RELEASE, 10, "rings").drafts == 3 * 10 * 528
    assert [traffic.handover_layer_tokens(RELEASE, 10, mode) for mode in traffic.HANDOVERS] == [400, 200, 0]


def test_what_a_config_does_without_is_not_handed_over() -> None:
    bare = KVLayout(presets.load("v4.1-flash").without("engram", "drafts"))
    sizes = traffic.handover(bare, 4096, "rings")
    assert (sizes.history, sizes.drafts) == (0, 0)
    empty = KVLayout(presets.load("v4.1-flash").without("compression"))
    # Without a KV source every layer is encoder, and only windows are left.
    assert traffic.handover(empty, 4096, "replay").total == 24
    assert traffic.handover(empty, 4096, "streams").rings == traffic.handover(empty, 4096, "rings").rings == 2_703_360


def test_streams_are_as_wide_as_activations() -> None:
    wide, narrow = (traffic.handover(RELEASE, 129, "streams", size) for size in (4, 2))
    assert wide.streams == 2 * narrow.streams and wide.total == narrow.total + narrow.streams
    assert narrow == traffic.handover(RELEASE, 129, "streams")


def test_draft_targets_below_the_seam_cross_it() -> None:
    config = presets.load("v4.1-flash")
    below = KVLayout(config.replace(dspark_target_layer_ids=(10, 19, 39)))
    assert traffic.handover(below, 4096, "streams").carried == 2 * 128 * 5120 * 2


@BOUNDED
@given(tokens=st.integers(0, 3000), more=st.integers(0, 300), mode=st.sampled_from(traffic.HANDOVERS))
def test_a_longer_prompt_hands_over_no_less(tokens: int, more: int, mode: str) -> None:
    assert traffic.handover_bytes(RELEASE, tokens, mode) <= traffic.handover_bytes(RELEASE, tokens + more, mode)


def test_hits_are_whole_pages_above_the_window() -> None:
    """Field case 8: 0, 1, 127, 128 found tokens are no hit; 129 and more floor to a page, and 128 is not above W."""
    assert [traffic.hit_tokens(RELEASE, n, 1) for n in (0, 1, 127, 128, 129, 255, 256, 383)] == [0] * 6 + [256, 256]
    assert traffic.hit_tokens(RELEASE, 1000, Fraction(999, 1000)) == 7 * 128
    assert traffic.hit_tokens(RELEASE, 1000, 0) == 0
    assert traffic.computed_tokens(RELEASE, 1000, 7 * 128) == 1000 - 896 + 128
    assert traffic.computed_tokens(RELEASE, 1000, 0) == 1000


def test_bytes_of_the_pool() -> None:
    assert traffic.pool_read_bytes(RELEASE, 896) == 7 * 113_920
    # 1,000 + 100 tokens are 8 whole pages; 7 of them were there.
    assert traffic.pool_write_bytes(RELEASE, 1000, 100, 896) == 113_920
    assert traffic.pool_write_bytes(RELEASE, 1000, 23, 896) == 0
    assert traffic.replay_layer_tokens(RELEASE, 896) == 20 * 128
    assert traffic.replay_layer_tokens(RELEASE, 8192, "exact") == 20 * 2540


def test_rates_of_a_node() -> None:
    # 20,000 tokens/s of 10,000-token prompts are 2 a second.
    assert traffic.node_rate(20_000, 10_000) == 2
    assert traffic.emitted_rate(30_000_000, 20_000, 10_000) == 60_000_000


@BOUNDED
@given(
    size=st.integers(1, 10**12), target=st.fractions(Fraction(1, 100), 100), latency=st.fractions(0, Fraction(1, 101))
)
def test_a_link_for_a_time_takes_that_time(size: int, target: Fraction, latency: Fraction) -> None:
    assert traffic.transfer_s(size, traffic.link_for(size, target, latency), latency) == target


def test_break_even() -> None:
    assert traffic.break_even_link(RELEASE, 20_000) == 890 * 20_000
    pair = KVLayout(presets.load("real-pair"))
    assert traffic.break_even_link(pair, 10) == 10 * pair.bytes_per_token


@BOUNDED
@given(
    rate=st.integers(100, 10**6),
    link=st.integers(10**5, 10**11),
    latency=st.sampled_from([Fraction(0), Fraction(1, 1000), Fraction(1, 4)]),
)
def test_the_shortest_fetch_is_the_shortest(rate: int, link: int, latency: Fraction) -> None:
    def pays(tokens: int) -> bool:
        return latency + tokens * Fraction(890, link) + Fraction(128, rate) <= Fraction(tokens, rate)

    shortest = traffic.shortest_fetch(RELEASE, rate, link, latency)
    if shortest is None:
        assert link <= 890 * rate
        assert not any(pays(tokens) for tokens in (256, 2**20, 2**60))
    else:
        assert shortest % 128 == 0
        assert shortest >= 256
        assert pays(shortest)
        assert shortest == 256 or not pays(shortest - 128)


def test_disks() -> None:
    # 100 MB/s are 8.64 TB a day: one drive write a day of 8.64 TB; rated so for 5 years, it lives 5 years.
    assert traffic.drive_writes_per_day(10**8, 8_640_000_000_000) == 1
    endurance = traffic.endurance_bytes(8_640_000_000_000, 1, 5)
    assert endurance == 8_640_000_000_000 * 1825
    assert traffic.disk_life_s(10**8, endurance) == 1825 * 86_400
    assert traffic.disk_life_s(10**8, endurance, 2) == 1825 * 43_200
    assert traffic.disk_life_s(0, endurance) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: traffic.handover(RELEASE, 1, "all"), "hand-over must be one of replay, streams, rings; got 'all'"),
        (lambda: traffic.handover_layer_tokens(RELEASE, 1, ""), "hand-over must be one of replay, streams, rings"),
        (lambda: traffic.handover(RELEASE, -1, "rings"), "tokens must be an integer of 0 or more; got -1"),
        (lambda: traffic.hit_tokens(RELEASE, 1, 1.5), "hit rate must be in 0..1; got 1.5"),
        (lambda: traffic.hit_tokens(RELEASE, 1, float("nan")), "hit rate must be a number of 0 or more; got nan"),
        (lambda: traffic.node_rate(0, 1), "prefill rate must be a number above 0; got 0"),
        (lambda: traffic.transfer_s(1, float("inf")), "link must be a number above 0; got inf"),
        (lambda: traffic.link_for(1, 0.5, 0.5), "target time must be above the latency of 0.5 s; got 0.5 s"),
        (lambda: traffic.disk_life_s(1, 0), "endurance must be a number above 0; got 0"),
        (lambda: traffic.drive_writes_per_day(-1, 1), "write rate must be a number of 0 or more; got -1"),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_tables_hold_what_the_functions_give() -> None:
    case = TrafficCase(prompt=1000, output=100, rate=3, hit_rate=Fraction(9, 10), disk=10**12, endurance=10**15)
    handovers, links, figures = traffic_tables(RELEASE, case)
    assert [row["total [B]"] for row in handovers.records()] == [
        traffic.handover_bytes(RELEASE, 1000, mode) for mode in traffic.HANDOVERS
    ]
    replay = links.records()[0]
    assert replay["all requests [GB/s]"] == pytest.approx(3 * (8 * 113_920 + 12_288 + 24) / 1e9)
    assert replay["time at 50 GB/s [ms]"] == pytest.approx((8 * 113_920 + 12_288 + 24) / 50e9 * 1e3)
    # 1,000 x 0.9 = 900 tokens are 7 pages, of which 128 tokens are computed again.
    values = {record["figure"]: record["value"] for record in figures.records()}
    assert values["hit_tokens"] == 896
    assert values["reused_tokens"] == 768
    assert values["computed_tokens"] == 232
    assert values["pool_read_rate"] == 3 * 7 * 113_920
    assert values["pool_write_rate"] == 3 * 113_920
    assert values["prefill_nodes"] == pytest.approx(3 * 232 / 20_000)
    assert values["disk_life"] == pytest.approx(10**15 / (3 * 113_920) / 86_400)


def test_expressions_evaluate_to_their_values() -> None:
    case = TrafficCase(
        prompt=5000, rate=2, hit_rate=Fraction(1, 2), latency_s=Fraction(1, 8), disk=10**12, endurance=10**15
    )
    figures = traffic_figures(RELEASE, case)
    assert len(figures) == 15
    for figure in figures:
        text = figure.expression.replace(" x ", " * ").replace("floor", "int")
        value = float(eval(text))
        if figure.id == "shortest_fetch":
            assert 0 <= figure.value - value < 128
        else:
            assert value == pytest.approx(float(figure.value)), figure.id
