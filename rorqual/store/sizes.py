"""How a bound in bytes is cut into segments, and how many pages are kept within it.

A segment goes as a whole, so some room is always taken by pages that nobody wants any more. A tenth of the segments is
left for those, and one segment for copying what is still wanted out of another: the files never outgrow the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from rorqual.errors import InputError
from rorqual.store.index import POSITION_BITS

SEGMENTS = 32
"""Of a store, at least, where pages are small enough."""
SEGMENT_BYTES = 256 * 1024**2
"""Of one segment at most: what is copied and removed at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """slots: pages of a segment. pages: kept at most; begin: bytes of segments beyond which no other is begun before
    one is freed; most: bytes of segments at any time. None where there is no bound."""

    slots: int
    pages: int | None = None
    begin: int | None = None
    most: int | None = None


def sizes(page_bytes: int, disk_bytes: int | None) -> Sizes:
    """The sizes of a store whose segments take at most `disk_bytes`.

    Raises:
        InputError: not room for one page.

    >>> sizes(113_920, 10**9)
    Sizes(slots=274, pages=7672, begin=936422400, most=1000000000)
    """
    if disk_bytes is None:
        return Sizes(slots=_slots(SEGMENT_BYTES, page_bytes))
    if disk_bytes < page_bytes:
        raise InputError(f"disk: {disk_bytes} bytes hold no page; legal: at least {page_bytes}")
    slots = _slots(min(SEGMENT_BYTES, disk_bytes // SEGMENTS), page_bytes)
    segment = slots * page_bytes
    count = disk_bytes // segment
    if slots == 1:  # a page is a segment: nothing is ever copied, no room is ever wasted
        return Sizes(slots=1, pages=count, begin=(count - 1) * segment, most=disk_bytes)
    kept = count - 1 - max(1, (count - 1) // 10)
    return Sizes(slots=slots, pages=kept * slots, begin=(count - 2) * segment, most=disk_bytes)


def _slots(segment_bytes: int, page_bytes: int) -> int:
    return max(1, min(segment_bytes // page_bytes, 1 << POSITION_BITS))
