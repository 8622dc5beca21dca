"""What `rorqual diff` has to say.

A divergence spreads to everything computed from it, so only the first is explained. But row r of a causal model
depends on rows up to r alone: a later tensor that diverges in an earlier row has a cause of its own, and the first such
is explained too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rorqual.analysis.compare import group_of
from rorqual.analysis.diff_case import Cause
from rorqual.analysis.diff_order import causal, parse

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One tensor out of tolerance. row, index, ours, theirs: the first element that is, None where shapes differ.

    rows, elements: how many diverge; of_rows, of_elements: how many there are. error: the worst, in `unit`.
    """

    name: str
    shape: tuple[int, ...]
    row: int | None
    index: Index | None
    ours: float | None
    theirs: float | None
    rows: int
    of_rows: int
    elements: int
    of_elements: int
    error: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Divergent tensors of one group (layer numbers left out). relation: "first", "after the first", or "an earlier
    row", which the first divergence cannot have caused."""

    name: str
    tensors: int
    divergent: int
    error: float
    unit: str
    first: str
    row: int | None
    relation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome. cause explains `first`; `other` is the first divergence that it cannot have caused."""

    numerics: str
    common: int
    agreeing: int
    only_ours: tuple[str, ...]
    only_theirs: tuple[str, ...]
    unused_renames: tuple[str, ...]
    reshaped: tuple[str, ...]
    first: Divergence | None = None
    cause: Cause | None = None
    other: Divergence | None = None
    other_cause: Cause | None = None
    groups: tuple[Group, ...] = ()

    @property
    def equal(self) -> bool:
        return self.first is None


def independent(seen: list[Divergence]) -> list[Divergence]:
    """Those that diverge in a row before any that the first of `seen` can have reached.

    Scale, codes and values of one cache entry are one thing: the entry's earliest row counts.
    """
    if not seen:
        return []
    first = parse(seen[0].name)
    entry = [d.row for d in seen if parse(d.name).stem == first.stem and d.row is not None]
    return [
        d
        for d in seen[1:]
        if d.row is not None
        and d.of_rows == seen[0].of_rows
        and parse(d.name).scope == first.scope
        and entry
        and d.row < min(entry)
        and causal(first.full)
        and causal(d.name)
    ]


def groups(common: list[str], seen: list[Divergence], own: list[Divergence]) -> Iterator[Group]:
    """Groups with a divergence, in order of their first one."""
    sizes: dict[str, int] = {}
    for name in common:
        sizes[group_of(name)] = sizes.get(group_of(name), 0) + 1
    by_group: dict[str, list[Divergence]] = {}
    for divergence in seen:
        by_group.setdefault(group_of(divergence.name), []).append(divergence)
    for name, members in by_group.items():
        apart = next((d for d in members if d in own), None)
        relation = "first" if members[0] is seen[0] else "an earlier row" if apart else "after the first"
        shown = apart or members[0]
        worst = max(members, key=lambda d: d.error)
        yield Group(
            name=name,
            tensors=sizes[name],
            divergent=len(members),
            error=worst.error,
            unit=worst.unit,
            first=shown.name if relation != "first" else members[0].name,
            row=shown.row if relation != "first" else members[0].row,
            relation=relation,
        )
