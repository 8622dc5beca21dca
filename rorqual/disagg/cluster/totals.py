"""Statistics of several engines as those of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

from rorqual.engine.output import Counts
from rorqual.engine.stats import RECENT_STEPS, EngineStats

OF_ONE = ("page_bytes", "page_tokens")
"""The same everywhere; all other whole numbers add up."""


def totals(each: Sequence[EngineStats], *, waiting: int, requests: int, finished: int, aborted: int) -> EngineStats:
    """Of workers of one model. Steps of different machines stand in the order of their own clocks.

    Args:
        each: as the workers told.
        waiting: requests that no worker has yet, beside theirs.
        requests, finished, aborted: as their front counts.
    """
    first = each[0]
    names = [own.name for own in fields(first) if type(getattr(first, own.name)) is int and own.name not in OF_ONE]
    sums = {name: sum(getattr(own, name) for own in each) for name in names}
    counts, groups = Counts(), Counter[str]()
    for own in each:
        counts.add(own.counts)
        groups.update(own.bytes_by_group)
    recent = sorted((step for own in each for step in own.recent), key=lambda step: step.at)
    sums |= {"waiting": sums["waiting"] + waiting, "requests": requests, "finished": finished, "aborted": aborted}
    return replace(first, **sums, bytes_by_group=dict(groups), counts=counts, recent=tuple(recent[-RECENT_STEPS:]))
