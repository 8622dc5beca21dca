"""The curve of hit rates: stack distances against a list, exact at rate 1, within a point when sampled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.config import presets
from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner.traces import synthetic
from rorqual.planner.traces.curve import Curve, Distances, measure, sampling_rate
from rorqual.planner.traces.replay import ReplaySettings, replay
from rorqual.planner.traces.request import Request
from rorqual.planner.traces.tables import curve_table

RELEASE = KVLayout(presets.load("v4.1-flash"))
BOUNDED = settings(max_examples=40, deadline=None, derandomize=True)


def exact(requests: list[Request], block: int, pages: int) -> float:
    return float(replay(requests, block, RELEASE, ReplaySettings(pool_bytes=pages * RELEASE.page_bytes)).hit_rate)


@BOUNDED
@given(uses=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=150), slots=st.sampled_from([1, 4, 64]))
def test_distances_equal_those_in_a_list(uses: list[tuple[int, int]], slots: int) -> None:
    distances, latest = Distances(slots), list[tuple[int, int]]()  # the list: (key, size), latest first
    for key, size in uses:
        place = next((n for n, (other, _) in enumerate(latest) if other == key), None)
        assert distances.above(key) == (None if place is None else sum(size for _, size in latest[:place]))
        if place is not None:
            del latest[place]
        latest.insert(0, (key, size))
        distances.use(key, size)


@BOUNDED
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=40),
    block=st.sampled_from([16, 128, 512]),
)
def test_unsampled_it_is_exact_at_every_size(prompts: list[list[int]], block: int) -> None:
    """Whole blocks, so that all keys are of one size; pages of 128 make the rule of W bite for the small blocks."""
    names: dict[tuple[int, ...], int] = {}
    requests = []
    for branches in prompts:
        many = 8 if block == 16 else 1
        path = [branch for branch in branches for _ in range(many)]
        ids = [names.setdefault(tuple(path[: n + 1]), len(names)) for n in range(len(path))]
        requests.append(Request(0, block * len(ids), 1, ids))
    curve = measure(requests, block, 128, 128)
    step = max(1, block // 128)
    for pages in range(0, 40 * step, step):
        assert curve.hit_rate(pages) == pytest.approx(exact(requests, block, pages), abs=1e-12)


@pytest.fixture(scope="module")
def sample_trace() -> list[Request]:
    """6,000 requests of the synthetic trace, 24 blocks each."""
    return [Request(1000 * time, tokens, output, ids) for time, tokens, output, ids in synthetic.generate(6000)]


@pytest.fixture(scope="module")
def exact_rates(sample_trace: list[Request]) -> dict[int, float]:
    """Hit rates of the exact replay by the pool's pages."""
    return {pages: exact(sample_trace, 512, pages) for pages in (2000, 8000, 32_000, 128_000)}


@pytest.mark.parametrize("rate", [1 / 4, 1 / 16])
def test_sampled_it_is_within_a_point_of_the_exact_replay(
    sample_trace: list[Request], exact_rates: dict[int, float], rate: float
) -> None:
    curve = measure(sample_trace, 512, RELEASE.page_tokens, 128, rate)
    uses = sum(len(request.ids) for request in sample_trace)
    assert curve.sampled == pytest.approx(rate * uses, rel=0.25)
    assert exact_rates[2000] < 0.4 < 0.7 < exact_rates[128_000]  # a curve, not a line
    for pages, there in exact_rates.items():
        assert abs(curve.hit_rate(pages) - there) <= 0.01
    # The pool that the curve recommends for a hit rate has it.
    needed = curve.pages_for(0.6)
    assert needed is not None
    assert exact(sample_trace, 512, needed) == pytest.approx(0.6, abs=0.01)


def test_the_inverse_gives_the_smallest_pool() -> None:
    curve = Curve(rate=0.5, sampled=9, requests=3, input_tokens=1000, gains={1: -50.0, 8: 250.0, 100: 300.0})
    # A correction may be negative; a hit rate is not.
    assert [curve.hit_rate(pages) for pages in (0, 1, 8, 99, 100)] == [0, 0, 0.2, 0.2, 0.5]
    assert [curve.pages_for(rate) for rate in (0, 0.1, 0.2, 0.21, 0.5, 0.51)] == [0, 8, 8, 100, 100, None]
    assert (curve.ceiling, curve.largest) == (0.5, 100)


def test_a_trace_that_never_repeats_has_a_flat_curve() -> None:
    curve = measure([Request(0, 512, 1, [n]) for n in range(20)], 512, 128, 128)
    assert curve.ceiling == 0
    assert curve.pages_for(0.1) is None
    assert measure([], 512, 128, 128).hit_rate(10) == 0


def test_rates_and_what_is_refused() -> None:
    assert [sampling_rate(uses) for uses in (0, 1 << 19, (1 << 19) + 1, 1 << 20, 1 << 24)] == [1, 1, 0.5, 0.5, 1 / 32]
    with pytest.raises(InputError, match="the trace has no block ids"):
        measure([], 0, 128, 128)
    for rate in (0, -1, 1.5, float("nan")):
        with pytest.raises(InputError, match="a sampling rate is above 0 and up to 1"):
            measure([], 512, 128, 128, rate)
    curve = measure([], 512, 128, 128)
    with pytest.raises(InputError, match=r"target hit rate must be in 0..1; got 2"):
        curve_table(curve, RELEASE, 2)


def test_the_table_ends_with_the_pool_that_never_evicts_and_the_target(sample_trace: list[Request]) -> None:
    curve = measure(sample_trace[:500], 512, RELEASE.page_tokens, 128)
    table = curve_table(curve, RELEASE, 0.3)
    *sizes, target = table.records()
    assert len(sizes) == 12
    assert sizes[-1]["pool [pages]"] == curve.largest
    assert sizes[-1]["hit rate"] == pytest.approx(curve.ceiling, abs=1e-6)
    assert target[""] == "target"
    assert target["pool [B]"] == curve.pages_for(0.3) * RELEASE.page_bytes  # type: ignore[operator]
    assert "The target of 0.99 is out of reach." in curve_table(curve, RELEASE, 0.99).note
