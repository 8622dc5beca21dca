"""Divergences of selections: Top-K, candidates, experts, sampled ids.

A selection is a set a row. Two sets that differ where the choice hung on nothing are a tie, and nobody's error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.analysis.diff_case import Case, Cause
from rorqual.analysis.diff_order import MARGINS, SELECTIONS

SCORES = {"topk_idxs": "index_score", "argmax": "logits"}
WEIGHTS = {"moe_indices": "moe_weights"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One divergent row: what only ours and only theirs selected, and by how little the choice was made.

    gap: the smallest of the dumps' margins and of the score differences between the two sides; None when neither is
    there.
    """

    index: tuple[int, ...]
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    gap: float | None


def is_selection(case: Case) -> bool:
    return case.parsed.last in SELECTIONS and not case.ours.is_floating_point()


def find_selection(case: Case) -> Cause:
    """A tie, another order or numbering of the same choice, or an error."""
    if found := _other_numbering(case):
        return found
    rows = [_row(case, index) for index in _divergent(case)]
    if all(not row.ours and not row.theirs for row in rows):
        return _other_order(case, rows)
    limit = case.tolerance.margin
    ties = [row for row in rows if row.gap is not None and row.gap < limit]
    if len(ties) == len(rows):
        widest = max(row.gap or 0.0 for row in ties)
        exact = ", exactly 0 in one: ours gives ties to the lowest index" if any(row.gap == 0 for row in ties) else ""
        detail = f"{_change(ties[0])}; {_count(ties)} chosen by at most {widest:.2g} (a tie below {limit:g}){exact}"
        return Cause(kind="tie", what="", detail=detail)
    clear = next(row for row in rows if row not in ties)
    if clear.gap is None:
        how = "neither dump has its margin or scores, so that a tie cannot be told"
    else:
        how = f"chosen by {clear.gap:.2g}, which is no tie (below {limit:g})"
    other = f"; {_count(ties)} of {len(rows)} are ties" if ties else ""
    return Cause(
        kind="error", what="another selection", detail=f"row {_at(clear.index)}: {_change(clear)}, {how}{other}"
    )


def _divergent(case: Case) -> list[tuple[int, ...]]:
    """Indices of the divergent rows, in order; the last dimension is the set unless there is but one number a row."""
    wrong = case.wrong if case.ours.dim() == 1 else case.wrong.any(-1)
    return [tuple(index) for index in wrong.nonzero().tolist()]


def _row(case: Case, index: tuple[int, ...]) -> Row:
    sides = [set(_chosen(case, x[index])) for x in (case.ours, case.theirs)]
    ours, theirs = tuple(sorted(sides[0] - sides[1])), tuple(sorted(sides[1] - sides[0]))
    gaps = _margins(case, index)
    if len(ours) == len(theirs) == 1:
        gaps += _score_gaps(case, index, ours[0], theirs[0])
    return Row(index=index, ours=ours, theirs=theirs, gap=min(gaps) if gaps else None)


def _chosen(case: Case, row: Tensor) -> list[int]:
    if case.parsed.last == "candidates":
        return [int(i) for i in row.nonzero().flatten()]
    return [int(i) for i in row.flatten() if i >= 0]


def _margins(case: Case, index: tuple[int, ...]) -> list[float]:
    last = MARGINS.get(case.parsed.last)
    found = case.look(case.parsed.sibling(last)) if last else ()
    return [float(m[index]) for m in found if m is not None and m.dim() == len(index) and _inside(m, index)]


def _score_gaps(case: Case, index: tuple[int, ...], one: int, other: int) -> list[float]:
    last = SCORES.get(case.parsed.last)
    gaps = []
    for scores in case.look(case.parsed.sibling(last)) if last else ():
        if scores is None or scores.dim() != len(index) + 1 or not _inside(scores, index):
            continue
        if max(one, other) < scores.shape[-1]:
            gap = abs(float(scores[index][one]) - float(scores[index][other]))
            gaps += [gap] if gap == gap else []
    return gaps


def _inside(x: Tensor, index: tuple[int, ...]) -> bool:
    return all(i < n for i, n in zip(index, x.shape, strict=False))


def _other_numbering(case: Case) -> Cause | None:
    """All valid indices off by one constant: one-based, or a window's offset left in."""
    if case.parsed.last == "candidates" or case.ours.dim() < 2:
        return None
    ours, theirs = case.ours[case.rows], case.theirs[case.rows]
    valid = (ours >= 0) & (theirs >= 0)
    offsets = (theirs - ours)[valid]
    if len(offsets) < 4 or not bool(offsets[0]) or not bool((offsets == offsets[0]).all()):
        return None
    if not bool(((ours >= 0) == (theirs >= 0)).all()):
        return None
    return Cause(
        kind="shift",
        what="indices",
        detail=f"every index of theirs is ours {int(offsets[0]):+d}: numbered from elsewhere",
    )


def _other_order(case: Case, rows: list[Row]) -> Cause:
    """The same sets; a tie where the weights of what changed places are nearly equal."""
    first = rows[0].index
    sides = f"{_listed(case.ours[first])} in ours, {_listed(case.theirs[first])} in theirs"
    last = WEIGHTS.get(case.parsed.last)
    weights = case.look(case.parsed.sibling(last))[0] if last else None
    if weights is not None and weights.shape == case.ours.shape:
        moved = case.ours != case.theirs
        spread = torch.where(moved, weights, -torch.inf).amax(-1) - torch.where(moved, weights, torch.inf).amin(-1)
        if float(spread[moved.any(-1)].max()) < case.tolerance.margin:
            return Cause(
                kind="tie", what="order", detail=f"the same set in another order, of nearly equal weights: {sides}"
            )
    detail = f"row {_at(first)}: {sides}; {_count(rows)} hold the same set in another order"
    return Cause(kind="permutation", what="order of the selection", detail=detail)


def _change(row: Row) -> str:
    ours, theirs = (
        ", ".join(map(str, side[:4])) + ("..." if len(side) > 4 else "") or "nothing" for side in (row.ours, row.theirs)
    )
    return f"ours takes {ours} where theirs takes {theirs}"


def _listed(row: Tensor) -> str:
    values = row.flatten().tolist()
    return "[" + ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "") + "]"


def _count(rows: list[Row]) -> str:
    return f"{len(rows)} row{'s' if len(rows) != 1 else ''}"


def _at(index: tuple[int, ...]) -> str:
    return str(index[0]) if len(index) == 1 else str(list(index))
