"""What a divergence looks like: detectors from the most specific to the least; the first to explain all of it wins."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from math import e, log, prod, sqrt

import torch
from torch import Tensor

from rorqual.analysis.compare import NATIVE_RMS
from rorqual.analysis.diff_case import Case, Cause
from rorqual.analysis.diff_layouts import (
    find_layout,
    find_moved_columns,
    find_moved_rows,
    find_tile_scales,
    find_transposed,
    near_layout,
)
from rorqual.analysis.diff_rotation import find_rotation
from rorqual.analysis.diff_selection import find_selection, is_selection
from rorqual.analysis.diff_steps import find_step, is_few
from rorqual.analysis.diff_tolerance import BF16_STEP, Tolerance, rows_of

LEAST_ELEMENTS = 8
"""A factor between fewer numbers is no evidence."""
FLIPPED = 0.01
"""Share of elements that noise may round to the next bf16 number."""
MOST_STEPS = 4
"""bf16 steps that the worst element of a precision noise may be off."""
SAME_FACTOR = 1e-3
"""A factor this close to 1 is a matter of precision."""

Detector = Callable[[Case], Cause | None]


def classify(case: Case) -> Cause:
    """The cause that a divergent tensor suggests."""
    if found := _not_finite(case):
        return found
    if is_selection(case):
        found = find_moved_rows(case) if case.ours.dim() > 1 and len(case.rows) > 1 else None
        chosen = find_selection(case)
        return found if found is not None and chosen.kind == "error" else chosen
    # Few elements one step away are rounding; many may be a layout whose numbers happen to be neighbours.
    steps: tuple[Detector, ...] = (find_step,)
    placed: tuple[Detector, ...] = (find_moved_rows, find_layout, find_transposed, find_moved_columns)
    order = (*steps, *placed) if is_few(case) else (*placed, *steps)
    for detector in (*order, _offset, find_tile_scales, _factor, _precision, near_layout, find_rotation):
        if found := detector(case):
            return found
    return Cause(kind="error", what="", detail=pattern(case))


def _not_finite(case: Case) -> Cause | None:
    """NaN or infinity on one side only; an index score's -inf is a mask."""
    if not case.ours.is_floating_point():
        return None
    odd = case.ours.isfinite() != case.theirs.isfinite()
    if not bool(odd.any()):
        return None
    if case.parsed.last == "index_score" and not bool((case.ours.isnan() | case.theirs.isnan()).any()):
        return find_moved_rows(case) or find_moved_columns(case) or _mask(case)
    side, values = ("theirs", case.theirs) if bool((odd & ~case.theirs.isfinite()).any()) else ("ours", case.ours)
    bad = odd & ~values.isfinite()
    what = "NaN" if bool(values[bad].isnan().any()) else "infinity"
    count = int(bad.sum())
    return Cause(
        kind="error", what=what, detail=f"{count} element{'s' if count > 1 else ''} in {side} only; {pattern(case)}"
    )


def _mask(case: Case) -> Cause | None:
    seen = [x.isfinite().sum(-1) for x in (case.ours, case.theirs)]
    both = case.ours.isfinite() & case.theirs.isfinite()
    if bool((case.wrong & both).any()):
        return None
    more = (seen[1] - seen[0])[case.rows]
    row = int(case.rows[0])
    counts = f"{int(seen[0][row])} groups in ours and {int(seen[1][row])} in theirs"
    detail = f"scores agree, visibility does not: row {row} sees {counts}"
    one = bool((more == more[0]).all()) and abs(int(more[0])) == 1
    return Cause(kind="shift" if one else "error", what="visibility" if one else "mask", detail=detail)


def _offset(case: Case) -> Cause | None:
    """theirs = ours + a constant, or a constant of each column: another numbering, an eps or a bias."""
    if case.parsed.part:
        return None
    floats = case.ours.is_floating_point()
    gap = rows_of(case.theirs - case.ours)[case.rows]
    ours, theirs = rows_of(case.ours)[case.rows], rows_of(case.theirs)[case.rows]
    if not bool(gap.double().isfinite().all()):
        return None
    by_column = gap.double().mean(0) if floats else gap[0]
    one = by_column.double().mean() if floats else by_column[0]
    kind, why = ("error", "an eps or a bias?") if floats else ("shift", "numbered from elsewhere?")
    if gap.numel() >= (LEAST_ELEMENTS if floats else 4) and case.equal(ours, theirs - one):
        return Cause(kind=kind, what="offset", detail=f"theirs is ours {float(one):+g} wherever it diverges: {why}")
    if len(gap) >= 4 and case.equal(ours, theirs - by_column):
        why = "a bias?" if floats else "bucket offsets?"
        return Cause(kind=kind, what="offset", detail=f"each column of theirs is off by a constant of its own: {why}")
    return None


def _factor(case: Case) -> Cause | None:
    """ours = r x theirs with one r, one a row, one a group of channels, or one a channel."""
    if not case.ours.is_floating_point():
        return None
    ours, theirs = case.ours[case.rows], case.theirs[case.rows]
    finite = ours.isfinite() & theirs.isfinite()
    ours, theirs = torch.where(finite, ours, 0.0), torch.where(finite, theirs, 0.0)
    if min(int((theirs != 0).sum()), int((ours != 0).sum())) < LEAST_ELEMENTS:
        return None
    flat = rows_of(ours), rows_of(theirs)
    ratio = float(_ratio(flat[0].flatten(), flat[1].flatten()))
    if abs(ratio - 1) > SAME_FACTOR and case.equal(ours, theirs * ratio):
        return Cause(kind="scale", what="", detail=f"ours is theirs x {factor_name(ratio, case)}")
    width = flat[0].shape[1]
    for group, what in ((width, "row"), (32, "group of 32"), (16, "group of 16")):
        # Every factor takes one number's freedom; what is left over is the evidence.
        if (
            width % group
            or (group < width and ours.shape[-1] % group)
            or len(flat[0]) * (width - width // group) < LEAST_ELEMENTS
        ):
            continue
        a, b = (x.reshape(len(x), -1, group) for x in flat)
        by_group = _ratio(a, b)[..., None]
        if case.equal(ours, (b * by_group).reshape(ours.shape)):
            hint = (
                "a norm, a softmax denominator or a normalisation" if what == "row" else "scales misread or misplaced"
            )
            low, high = float(by_group.min()), float(by_group.max())
            return Cause(kind="scale", what=f"one a {what}", detail=f"ours is theirs x {low:.4g} to {high:.4g}: {hint}")
    if len(flat[0]) >= 4:
        by_channel = _ratio(flat[0].T, flat[1].T)
        if case.equal(ours, (flat[1] * by_channel).reshape(ours.shape)):
            low, high = float(by_channel.min()), float(by_channel.max())
            detail = f"ours is theirs x {low:.4g} to {high:.4g}: a norm's or a projection's weight"
            return Cause(kind="scale", what="one a channel", detail=detail)
    return None


def _ratio(ours: Tensor, theirs: Tensor) -> Tensor:
    """Least squares r of ours = r x theirs along the last dimension; 1 where theirs is zero."""
    length = theirs.square().sum(-1)
    return torch.where(length > 0, (ours * theirs).sum(-1) / length.clamp(min=1e-300), 1.0)


def factor_name(ratio: float, case: Case) -> str:
    """A factor and what it may be: -1, a power of two, a root or a multiple of one of the tensor's dimensions.

    >>> factor_name(0.125, Case(...))          # of a tensor [97, 64]
    '0.125 (1/8, 1/sqrt(64))'
    """
    if abs(ratio + 1) < SAME_FACTOR:
        return "-1 (the opposite sign)"
    width = case.ours.shape[-1]
    candidates = {f"{n}": float(n) for n in (2, 3, 4, 5, 6, 8, 16, 32, 64, 128, 256, 448, 512, width)}
    candidates |= {f"sqrt({n})": sqrt(n) for n in (2, 8, 32, 64, 128, 512, width)}
    candidates |= {"1.5": 1.5, "2.5": 2.5, "log2(e)": log(e, 2)}
    size = abs(ratio)
    names = [name for name, value in candidates.items() if abs(size / value - 1) < SAME_FACTOR]
    names += [f"1/{name}" for name, value in candidates.items() if abs(size * value - 1) < SAME_FACTOR]
    if case.parsed.last in ("moe_weights", "ffn_out"):
        names.append("routed_scaling_factor?")
    sign = "-" if ratio < 0 else ""
    return f"{ratio:.6g}" + (f" ({', '.join(sign + name for name in names)})" if names else "")


def _precision(case: Case) -> Cause | None:
    """Rounding of half precision in most elements, and nothing beyond it."""
    if not case.ours.is_floating_point():
        return None
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        for side, other, text in (
            (case.theirs, case.ours, "theirs is ours"),
            (case.ours, case.theirs, "ours is theirs"),
        ):
            if not torch.equal(side, side.to(dtype).double()):
                continue
            # Noise below the tolerance rounds a few elements to the next number.
            rounded = other.to(dtype).double()
            wrong = case.tolerance.wrong(case.name, side, rounded)
            one_step = bool(((side - rounded).abs() <= BF16_STEP * side.abs())[wrong].all())
            if one_step and float(wrong.float().mean()) < FLIPPED:
                return Cause(
                    kind="precision", what=name, detail=f"{text} rounded to {name} (`--numerics native` allows for it)"
                )
    finite = case.ours.isfinite() & case.theirs.isfinite()
    gap, size = (torch.where(finite, x, 0.0).abs() for x in (case.ours - case.theirs, case.theirs))
    spread = size.square().mean().sqrt()
    rms = float(gap.square().mean().sqrt() / spread.clamp(min=1e-300))
    large = size > spread / 10
    widespread = float((gap[large] > 1e-6 * size[large]).double().mean()) > 0.5 if bool(large.any()) else False
    steps = BF16_STEP * torch.maximum(size, rows_of(size).amax(1).reshape(-1, *[1] * (size.dim() - 1)) / 2)
    if rms <= NATIVE_RMS and widespread and bool((gap <= MOST_STEPS * steps).all()):
        return Cause(
            kind="precision",
            what="",
            detail=f"small noise everywhere, {rms:.2g} relative RMS, as bf16 or reordered sums give",
        )
    return None


def pattern(case: Case) -> str:
    """Where an unexplained divergence is: rows, channels, and how large."""
    rows, count = case.rows, case.ours.shape[0]
    first, last = int(rows[0]), int(rows[-1])
    if len(rows) == count:
        where = "every row" if count > 1 else "the only row"
    elif len(rows) == 1:
        where = f"row {first} alone"
    elif len(rows) == last - first + 1:
        where = f"rows {first} to {last}" + (", the last" if last == count - 1 else "")
    else:
        where = f"{len(rows)} rows from {first} to {last}"
    channels = (
        case.wrong.reshape(-1, case.wrong.shape[-1]).any(0).nonzero().flatten() if case.wrong.dim() > 1 else rows[:0]
    )
    if 0 < len(channels) < case.wrong.shape[-1] and int(channels[-1] - channels[0]) == len(channels) - 1:
        where += (
            f", channels {int(channels[0])} to {int(channels[-1])} only"
            if len(channels) > 1
            else f", channel {int(channels[0])} only"
        )
    ours, theirs = case.ours[case.wrong].double(), case.theirs[case.wrong].double()
    if not bool(theirs.any()):
        return f"{where}; theirs is zero there"
    if not bool(ours.any()):
        return f"{where}; ours is zero there"
    if not bool((ours - theirs).isfinite().all()):
        return where
    rms = float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())
    return f"{where}; {rms:.2g} relative RMS where it diverges"


def shape_cause(name: str, ours: Tensor, theirs: Tensor, tolerance: Tolerance) -> Cause:
    """What two shapes that do not match may be."""

    def equal(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and a.numel() > 0 and not bool(tolerance.wrong(name, a, b).any())

    shapes = f"{list(ours.shape)} in ours, {list(theirs.shape)} in theirs"
    if ours.dim() == theirs.dim() and sorted(ours.shape) == sorted(theirs.shape):
        for order in permutations(range(theirs.dim())):
            if equal(ours, theirs.permute(order)):
                return Cause(
                    kind="permutation",
                    what="axes transposed",
                    detail=f"{shapes}; equal once theirs is permuted to {list(order)}",
                )
    if prod(ours.shape) == prod(theirs.shape):
        same = (
            ": the same numbers in the same order" if equal(ours, theirs.reshape(ours.shape)) else ", as many numbers"
        )
        return Cause(kind="shape", what="", detail=shapes + same)
    if ours.dim() == theirs.dim():
        kept = tuple(slice(min(a, b)) for a, b in zip(ours.shape, theirs.shape, strict=True))
        if equal(ours[kept], theirs[kept]):
            return Cause(kind="shape", what="", detail=f"{shapes}; equal where both have elements")
        for skip in {len(ours) - len(theirs), 1, -1} if ours.shape[1:] == theirs.shape[1:] else ():
            a, b = ours[max(skip, 0) :], theirs[max(-skip, 0) :]
            few = min(len(a), len(b))
            if equal(a[:few], b[:few]):
                detail = f"{shapes}; equal when row {max(-skip, 0)} of theirs is row {max(skip, 0)} of ours"
                return Cause(kind="shift", what="rows", detail=detail)
    return Cause(kind="shape", what="", detail=shapes)
