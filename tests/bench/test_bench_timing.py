"""What turns calls into samples, and samples into rows; nothing here depends on how fast the machine is."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch

from rorqual.bench.kernels import difference
from rorqual.bench.report import Bar, TimeRow
from rorqual.bench.roofline import Roofline, Work
from rorqual.bench.timing import Sample, interleaved, undisturbed

ROOFLINE = Roofline(read_bytes_per_s=10.0, read_bytes=1, gemm_flops_per_s=100.0, gemm_side=1)


def test_contestants_take_turns_on_fresh_data() -> None:
    calls: list[tuple[str, int]] = []
    functions = {name: lambda i, name=name: calls.append((name, i)) for name in "AB"}
    samples = interleaved(functions, 3, sample_s=0)
    assert calls[:4] == [("A", 0), ("A", 1), ("B", 0), ("B", 1)]
    assert calls[4:] == [(name, 2 + turn) for turn in range(3) for name in "AB"]
    assert all(sample.runs == 3 and 0 <= sample.min <= sample.median <= sample.max for sample in samples.values())


def test_a_short_call_is_repeated_to_fill_a_sample() -> None:
    counts: Counter[int] = Counter()
    interleaved({"short": lambda i: counts.update([i])}, 2, sample_s=1e-3)
    assert sum(counts.values()) > 10
    assert set(counts.values()) == {1}, "an index came twice: the call did not take the next set of inputs"


def test_no_collection_inside_and_as_before_outside() -> None:
    for before in (True, False):
        (gc.enable if before else gc.disable)()
        try:
            with undisturbed():
                assert not gc.isenabled()
            assert gc.isenabled() is before
        finally:
            gc.enable()


def test_a_sample_is_median_and_range() -> None:
    assert Sample.of([3.0, 1.0, 9.0]) == Sample(median=3.0, min=1.0, max=9.0, runs=3)


@pytest.mark.parametrize(("count", "flops", "bound", "floor"), [(20, 100, "bytes", 2.0), (20, 500, "flops", 5.0)])
def test_the_roofline_takes_the_longer_of_reading_and_multiplying(
    count: int, flops: int, bound: str, floor: float
) -> None:
    work = Work(bytes=count, flops=flops, formula="as counted")
    assert (work.bound(ROOFLINE), work.floor_s(ROOFLINE)) == (bound, floor)


def test_a_busy_spell_does_not_lower_the_roofline() -> None:
    other = Roofline(read_bytes_per_s=8.0, read_bytes=1, gemm_flops_per_s=120.0, gemm_side=1)
    best = ROOFLINE.or_better(other)
    assert (best.read_bytes_per_s, best.gemm_flops_per_s) == (10.0, 120.0)


def test_a_row_has_ratio_share_and_bar() -> None:
    times = {"plain": Sample.of([12.0]), "fast": Sample.of([4.0])}
    work = Work(bytes=20, flops=0, formula="bytes = 20")
    row = TimeRow(name="op", shape="1", times=times, work=work, bar=Bar(at_least=4)).as_json(ROOFLINE)
    assert row["ratio"] == 3.0 and row["ratio_of"] == "plain_s / fast_s"
    assert row["roofline"] == {"share": 0.5, "bound": "bytes", "bytes": 20, "flops": 0, "formula": "bytes = 20"}
    assert row["bar"] == {"at_least": 4, "reached": False}


def test_a_ceiling_is_judged_the_other_way_round() -> None:
    times = {"ced": Sample.of([2.0]), "full": Sample.of([4.0])}
    row = TimeRow(name="ced", shape="1", times=times, ratio_of=("ced", "full"), bar=Bar(at_most=0.58))
    assert row.as_json(ROOFLINE)["bar"] == {"at_most": 0.58, "reached": True}
    assert not Bar(at_most=0.58).reached(0.59)


def test_results_are_compared_before_they_are_timed() -> None:
    ours = torch.tensor([1.0, 2.0])
    assert difference(ours, ours.clone()) == 0
    assert difference(ours, torch.tensor([1.0, 2.5])) == pytest.approx(0.25)
    assert difference(ours, torch.tensor([1.0, float("nan")])) == float("inf")
    codes = torch.tensor([1, 2], dtype=torch.uint8)
    assert difference((codes, ours), (codes, ours)) == 0
    assert difference((codes, ours), (codes + 1, ours)) == float("inf")
