"""Every op, its kernel against its plain twin: `rorqual bench kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rorqual.bench.baseline import baseline_ops
from rorqual.bench.cases import FULL, QUICK, Case, cases
from rorqual.bench.profile import kernels_profile
from rorqual.bench.report import JsonRow, TimeRow
from rorqual.bench.timing import Sample, interleaved
from rorqual.ops.cpu import best_path, missing
from rorqual.ops.dispatch import Backend, Progress, fast_ops

REPEATS = 9
TOLERANCE = 1e-4
"""Of fp32 results, relative to the largest magnitude; integers and bytes must be equal."""

NOTES = (
    "plain_s and fast_s are seconds a call: samples in turn, plain then fast; a sample repeats a short call for 20 ms",
    "plain is torch with weights expanded to fp32 beforehand and attention in batched products; baseline_roofline is "
    "its share of the same roofline, its weights counted in fp32",
    "bf16, fp32 and unscaled caches have no kernels: the fast ops hand them to the plain ones, so they are not listed",
    "the roofline knows memory and the fp32 GEMM: a share above 1 means data in a cache or integer products (vnni)",
)


def run_kernels(
    *, repeats: int = REPEATS, quick: bool = False, profile: bool = False, progress: Progress | None = None
) -> list[TimeRow | JsonRow]:
    """Rows of every op; an index-score path that this CPU cannot run is listed as such.

    profile: one more row, where a decode step of a random checkpoint goes.
    """
    Backend("fast").warm()
    rows: list[TimeRow | JsonRow] = []
    total = sum(1 for _ in cases(QUICK))
    with torch.inference_mode():
        for done, group in enumerate(cases(QUICK if quick else FULL)):
            if progress is not None:
                progress(done, total)
            rows += measure_group(group, repeats)
    if profile:
        rows.append(kernels_profile(quick))
    if progress is not None:
        progress(total, total)
    return rows


def measure_group(group: Sequence[Case], repeats: int) -> list[TimeRow]:
    """Cases on the same inputs take turns with one baseline; those without a path on this CPU say so."""
    plain = baseline_ops()
    baseline = partial(group[0].baseline or group[0].run, plain)
    able = [case for case in group if case.path is None or not missing(case.path)]
    ops = {_label(case): fast_ops(case.path) for case in able}
    differences = {_label(case): difference(baseline(0), case.run(ops[_label(case)], 0)) for case in able}
    for case in able:
        apart = differences[_label(case)]
        assert apart <= TOLERANCE, f"{case.name} {case.shape} {_label(case)}: kernel and twin differ by {apart}"
    contestants = {"plain": baseline}
    contestants |= {_label(case): partial(case.run, ops[_label(case)]) for case in able}
    times = interleaved(contestants, repeats)
    return [_row(case, times, differences.get(_label(case))) for case in group]


def _label(case: Case) -> str:
    """A contestant's name; the path `plain` is a kernel too, and not the baseline."""
    return f"fast {case.path or best_path()}"


def _row(case: Case, times: dict[str, Sample], apart: float | None) -> TimeRow:
    label = _label(case)
    lacks = () if case.path is None else missing(case.path)
    return TimeRow(
        name=case.name,
        shape=case.shape,
        times={"plain": times["plain"]} | ({"fast": times[label]} if label in times and not lacks else {}),
        work=case.work,
        baseline_work=case.baseline_work,
        bar=case.bar,
        difference=apart,
        unavailable=f"not on this CPU: needs {', '.join(lacks)}" if lacks else None,
        extra={"path": case.path or best_path()},
    )


def difference(ours: object, theirs: object) -> float:
    """Worst difference of two results of an op, relative to the largest magnitude; infinite for unequal integers."""
    worst = 0.0
    for a, b in zip(_tensors(ours), _tensors(theirs), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
        if not a.dtype.is_floating_point:
            worst = worst if torch.equal(a, b) else float("inf")
        elif a.numel():
            scale = max(float(a.abs().max()), float(torch.finfo(a.dtype).tiny))
            apart = float((a - b).abs().max()) / scale
            worst = max(worst, apart if apart == apart else float("inf"))
    return worst


def _tensors(result: object) -> Sequence[Tensor]:
    if isinstance(result, Tensor):
        return (result,)
    assert isinstance(result, tuple)
    return result
