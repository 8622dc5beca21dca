"""What a disk store knows of its pages: where each is, in which order they go, and what the index has yet to be told.

Integers and keys only: no file is touched here, and whoever holds it locks it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rorqual.policies import TTL
from rorqual.store.index import Row
from rorqual.store.segments import Place

MICRO = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """gone: rows to delete. rows: to write."""

    gone: Sequence[Place]
    rows: Sequence[Row]


class Catalogue:
    """Args:
        ttl: seconds after its last use at which a page goes; None for never.

    >>> known = Catalogue()
    >>> known.expire(1.0)
    []
    >>> known.add(b"a", Place(1, 0), b"digest")
    >>> known.move(b"a", Place(2, 0))
    >>> (known.live(1), known.live(2)), known.take().gone
    ((0, 1), [Place(segment=1, position=0)])
    """

    def __init__(self, ttl: float | None = None) -> None:
        self._rows: dict[bytes, Row] = {}  # `used` as it is in the index; the order knows the latest
        self._order = TTL[bytes](math.inf if ttl is None else ttl)
        self._in: defaultdict[int, set[bytes]] = defaultdict(set)
        self._changed: dict[Place, Row | None] = {}  # what is there now, None for nothing
        self._used: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object, /) -> bool:
        return key in self._rows

    @property
    def pending(self) -> int:
        """Pages that came, moved or went and that the index does not know of. Mere uses are told when others are."""
        return len(self._changed)

    def keys(self) -> list[bytes]:
        """From the page unused for longest to the latest."""
        return list(self._order)

    def find(self, key: bytes) -> Row | None:
        return self._rows.get(key)

    def live(self, segment: int) -> int:
        """Pages of a segment that are wanted."""
        return len(self._in.get(segment, ()))

    def latest(self, segment: int) -> list[bytes]:
        """Keys of a segment's pages, the latest use first."""
        return sorted(self._in.get(segment, ()), key=self._order.last_use, reverse=True)

    def ends(self) -> dict[int, int]:
        """Of every segment that holds live pages: the position behind the last of them."""
        found: dict[int, int] = {}
        for row in self._rows.values():
            number, position = row.place
            found[number] = max(found.get(number, 0), position + 1)
        return found

    def expire(self, now: float) -> list[bytes]:
        """Set the time; forget and return what is too old."""
        gone = self._order.expire(now)
        for key in gone:
            self._drop(key)
        return gone

    def add(self, key: bytes, place: Place, digest: bytes) -> None:
        self._order.insert(key)
        self._place(Row(place, key, digest, self._last_use(key)))

    def use(self, key: bytes) -> None:
        self._order.touch(key)
        self._used.add(key)

    def use_chain(self, keys: Sequence[bytes]) -> None:
        """Deepest first: no page of a chain is to go before those that are useless without it."""
        self._order.touch_all(reversed(keys))
        self._used.update(keys)

    def move(self, key: bytes, place: Place) -> None:
        """The page is elsewhere now; not a use."""
        row = self._rows[key]
        self._unplace(row)
        self._place(row._replace(place=place))

    def forget(self, key: bytes) -> None:
        self._order.remove(key)
        self._drop(key)

    def evict(self) -> None:
        """Forget the page unused for longest."""
        self._drop(self._order.evict())

    def load(self, rows: Iterable[Row], now: float) -> int:
        """Take over what an index holds; how many pages were too old.

        Uses in the future were written while the wall clock was ahead; they count as now, and are told so. Of uses at
        one time, as those of a chain are, the page that was written last is taken for the deepest, and goes first.
        """
        by_place = sorted(rows, key=lambda row: row.place, reverse=True)
        expired = 0
        for row in sorted(by_place, key=lambda row: min(row.used / MICRO, now)):
            if row.key in self._rows:  # the index is damaged; one of the two is enough
                self._changed[row.place] = None
                continue
            expired += len(self.expire(max(0.0, min(row.used / MICRO, now))))
            self._rows[row.key] = row
            self._in[row.place.segment].add(row.key)
            self._order.insert(row.key)
            if row.used / MICRO > now:
                self._used.add(row.key)
        return expired + len(self.expire(now))

    def discard(self, place: Place) -> None:
        """A row of the index is of no use."""
        self._changed[place] = None

    def mark_all(self) -> None:
        """The index begins anew: it has to be told everything."""
        self._changed = {row.place: row for row in self._rows.values()}

    def take(self) -> Changes:
        """What the index has to be told; counts as told unless it is given back."""
        gone = [place for place, row in self._changed.items() if row is None]
        rows = [row for row in self._changed.values() if row is not None]
        rows += [self._rows[key]._replace(used=self._last_use(key)) for key in self._used]
        self._changed, self._used = {}, set()
        return Changes(gone=gone, rows=rows)

    def give_back(self, changes: Changes) -> None:
        """It could not be told. What has happened since is newer."""
        for place in changes.gone:
            self._changed.setdefault(place, None)
        for row in changes.rows:
            now = self._rows.get(row.key)
            self._changed.setdefault(row.place, row if now is not None and now.place == row.place else None)

    def _last_use(self, key: bytes) -> int:
        return int(self._order.last_use(key) * MICRO)

    def _place(self, row: Row) -> None:
        self._rows[row.key] = self._changed[row.place] = row
        self._in[row.place.segment].add(row.key)

    def _unplace(self, row: Row) -> None:
        members = self._in[row.place.segment]
        members.discard(row.key)
        if not members:
            del self._in[row.place.segment]
        self._changed[row.place] = None

    def _drop(self, key: bytes) -> None:
        """Everything but the order, which has let go of it."""
        self._unplace(self._rows.pop(key))
        self._used.discard(key)
