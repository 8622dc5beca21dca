"""The disk tier: pages in segment files, an sqlite index of them, checks, bounds of size and age.

Durability. A killed process loses at most what was put since the last commit (`BATCH` pages, or `flush`), and nothing
torn is ever served: a page is found only by a row that was committed after its bytes were written, and it is checked
whenever it is read. Without `fsync` a power failure may lose any page, and the index with them; with `fsync` it loses
no more than a kill does.

Memory: some 600 bytes a page, for its row, its segment and the order of use.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from rorqual.errors import InputError
from rorqual.log import logger
from rorqual.store import folder as folders
from rorqual.store.catalogue import Catalogue
from rorqual.store.checksum import PageCheck
from rorqual.store.clock import Clock, steady_clock
from rorqual.store.index import Row, is_damage, open_index
from rorqual.store.interface import PageBytes, StoreIdentity, StoreStat
from rorqual.store.segments import Segments
from rorqual.store.sizes import sizes

BATCH = 64
"""Changes at which the index is committed."""
SPARSE = 0.25
"""The share of live pages below which a segment's pages are moved, so that it can go."""
GRAIN_S = 1e-3
"""How finely time is told to uses; their order is exact for as long as the store is open."""

Progress = Callable[[int, int], None]


class DiskStore:
    """A `PageStore` in the subfolder that `folder` has for this identity.

    Pages of other identities and formats in the same folder are named in a message and left alone. When room is needed,
    the pages unused for longest go; where a whole segment has to be freed, at most half of it is copied, its latest
    pages, and the rest goes too. A full disk drops what is put, and keeps what it has.

    Args:
        disk_bytes: that the segments may take; the index comes on top, some 0.2 % at the release's page size. None for
            no bound.
        ttl: seconds after its last use at which a page goes; None for never.
        fsync: whether a commit outlasts a power failure.

    Raises:
        InputError: another process has it open; it cannot be made, or written; not room for one page; no positive
            lifetime.
    """

    def __init__(
        self,
        folder: Path,
        identity: StoreIdentity,
        *,
        disk_bytes: int | None,
        ttl: float | None = None,
        fsync: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._identity = identity
        self._sizes = sizes(identity.page_bytes, disk_bytes)
        self._known = Catalogue(ttl)
        self._check = PageCheck(identity.page_bytes)
        self._clock = clock or steady_clock()
        self._fsync = fsync
        # Whoever changes files holds the first, and the second too for as long as it changes what is known. Who reads a
        # page needs only the second, and not while it reads.
        self._writing, self._state = Lock(), Lock()
        self._puts = self._gets = self._hits = self._dropped = self._evicted = self._expired = self._damaged = 0
        self._told: set[str] = set()
        self._closed, self._seen = False, -math.inf
        self.path = folders.make(folder, identity)
        self._held = folders.lock(self.path)
        try:
            self._open()
        except OSError as error:
            os.close(self._held)
            raise InputError(f"store: {self.path} cannot be used ({error.strerror})") from error
        except BaseException:
            os.close(self._held)
            raise

    @property
    def identity(self) -> StoreIdentity:
        return self._identity

    def put(self, key: bytes, page: PageBytes) -> bool:
        # Every step of this path is felt: between two copies of a page the processor finds little of it in its caches.
        with self._writing:
            self._puts += 1
            if key in self._known:
                with self._state:
                    if self._find(key) is not None:
                        self._known.use(key)
                        return True
            if self._closed or not self._append(key, page):
                self._dropped += 1
                return False
            if self._known.pending >= BATCH:
                self._commit()
            return True

    def get(self, key: bytes) -> bytes | None:
        with self._state:
            self._gets += 1
            row = self._find(key)
            if row is not None:
                self._known.use(key)
                self._hits += 1
        while row is not None:
            page = self._read(key, row)
            if page is not None:
                return page
            with self._state:
                # It may have been moved, and its old segment removed, between the look-up and the reading.
                before, row = row, self._find(key)
                if row == before:
                    self._lose(key)
                    row = None
                self._hits -= row is None
        return None

    def match(self, keys: Sequence[bytes]) -> int:
        with self._state:
            self._expire()
            if self._closed:
                return 0
            found = next((i for i, key in enumerate(keys) if key not in self._known), len(keys))
            self._known.use_chain(keys[:found])
            return found

    def delete(self, key: bytes) -> bool:
        with self._writing:
            with self._state:
                there = self._find(key) is not None
                if there:
                    self._known.forget(key)
            if self._known.pending >= BATCH and not self._closed:
                self._commit()
            return there

    def stat(self) -> StoreStat:
        with self._state:
            self._expire()
            size, pages = self._identity.page_bytes, 0 if self._closed else len(self._known)
            return StoreStat(
                pages=pages,
                bytes=pages * size,
                capacity=None if self._sizes.pages is None else self._sizes.pages * size,
                used=self._segments.nbytes + self._index.nbytes,
                puts=self._puts,
                gets=self._gets,
                hits=self._hits,
                dropped=self._dropped,
                evicted=self._evicted,
                expired=self._expired,
                damaged=self._damaged,
            )

    def flush(self) -> None:
        with self._writing:
            if not self._closed:
                self._commit()

    def close(self) -> None:
        with self._writing:
            if self._closed:
                return
            self._commit()
            with self._state:
                self._closed = True
            self._segments.close()
            self._index.close()
            os.close(self._held)

    def verify(self, progress: Progress | None = None) -> int:
        """Read every page and forget those that are damaged; how many were read. Not a use of them."""
        with self._state:
            keys = self._known.keys()
        for done, key in enumerate(keys, 1):
            with self._state:
                row = self._find(key)
            if row is not None and self._read(key, row) is None:
                with self._state:
                    if self._find(key) == row:
                        self._lose(key)
            if progress is not None:
                progress(done, len(keys))
        return len(keys)

    def compact(self) -> int:
        """Move pages so that no segment holds others than live ones; by how many bytes the store has shrunk.

        The bound does not hold for the time that it takes.
        """
        with self._writing:
            before = self.stat().used
            wasteful = [n for n in self._segments.numbers if self._known.live(n) < self._segments.pages(n)]
            if self._closed or (self._segments.active in wasteful and not self._begin()):
                return 0
            for number in wasteful:
                self._move_out(number, self._known.live(number))
            if self._commit():
                try:
                    self._index.shrink()
                except sqlite3.Error as error:
                    self._note(error)
            return before - self.stat().used

    # What follows is called with `_writing` held, but for `_find`, `_read`, `_lose` and `_expire`.

    def _open(self) -> None:
        folders.write_about(self.path, self._identity)
        self._segments = Segments(self.path, self._identity.page_bytes, self._sizes.slots, fsync=self._fsync)
        self._index, rows, whole = open_index(self.path, fsync=self._fsync)
        there: list[Row] = []
        for row in rows:
            if row.place.position < self._segments.pages(row.place.segment):
                there.append(row)
            else:
                self._known.discard(row.place)
                self._damaged += 1
        self._expired += self._known.load(there, self._clock())
        if not whole:
            self._damaged += 1
            self._known.mark_all()
            logger.warning("store: the index of %s is damaged; it still finds %d pages", self.path, len(self._known))
        self._evict_beyond(self._sizes.pages)
        self._commit()
        self._shrink()
        ends = self._known.ends()
        if ends and self._segments.active is None and ends[max(ends)] < self._sizes.slots:
            self._segments.resume(max(ends), ends[max(ends)])

    def _shrink(self) -> None:
        """Bring what an earlier bound allowed within this one; a copied segment takes room twice for that time."""
        for number in sorted(self._segments.numbers, key=self._known.live):
            if not self._beyond(self._sizes.most):
                return
            self._move_out(number, self._known.live(number))
            self._commit()

    def _append(self, key: bytes, page: PageBytes) -> bool:
        """Write a new page where there is room or room can be made."""
        if self._sizes.pages is not None:
            self._evict_beyond(self._sizes.pages - 1)
        if not self._segments.room and not self._next_segment():
            return False
        try:
            place = self._segments.append(page)
        except OSError as error:
            self._note(error)
            return False
        digest = self._check(key, page)  # not before it is written: that brings it into the caches
        with self._state:
            self._expire()
            self._known.add(key, place, digest)
        return True

    def _next_segment(self) -> bool:
        """Begin one, within the bound; then the emptiest of the others goes if little in it is live."""
        if self._beyond(self._sizes.begin):
            self._commit()  # segments without live pages go
        while not self._segments.room and self._beyond(self._sizes.begin):
            if not self._free_one():
                return False
        if not self._segments.room and not self._begin():
            return False
        others = (n for n in self._segments.numbers if n != self._segments.active and self._known.live(n))
        victim = min(others, key=self._known.live, default=None)
        if victim is not None and self._known.live(victim) < SPARSE * self._segments.pages(victim):
            self._move_out(victim, self._segments.room)
        return True

    def _free_one(self) -> bool:
        """Free the segment with the fewest live pages, while none is written to: up to half of it moves to the next
        one, its latest pages, and the others go."""
        victim = min(self._segments.numbers, key=self._known.live, default=None)
        if victim is None or not self._begin():
            return False
        self._move_out(victim, min(self._segments.pages(victim), self._sizes.slots) // 2)
        with self._state:
            for key in self._known.latest(victim):
                self._known.forget(key)
                self._evicted += 1
        return self._commit()

    def _move_out(self, victim: int, most: int) -> None:
        """Copy up to `most` of a segment's live pages, the latest first, to where pages are written now."""
        for key in self._known.latest(victim)[:most]:
            row = self._known.find(key)
            if row is None or (not self._segments.room and not self._begin()):
                continue
            page, place = self._read(key, row), None
            if page is not None:
                try:
                    place = self._segments.append(page)
                except OSError as error:
                    self._note(error)
            with self._state:
                if self._known.find(key) != row:
                    continue
                if page is None:
                    self._lose(key)
                elif place is not None:
                    self._known.move(key, place)

    def _commit(self) -> bool:
        """Tell the index what has changed, then remove segments in which nothing is live; False where that failed."""
        with self._state:
            active = self._segments.active
            dead = [n for n in self._segments.numbers if n != active and not self._known.live(n)]
            changes = self._known.take()
        try:
            self._segments.sync()
            if changes.gone or changes.rows:
                self._index.write(changes.gone, changes.rows)
        except (sqlite3.Error, OSError) as error:
            with self._state:
                self._known.give_back(changes)
            self._note(error)
            return isinstance(error, sqlite3.Error) and is_damage(error) and self._renew()
        for number in dead:
            self._segments.remove(number)
        return True

    def _renew(self) -> bool:
        """The index was damaged while it was open: write another from what is known."""
        with self._state:
            self._known.mark_all()
            changes = self._known.take()
        try:
            self._index.renew()
            self._index.write((), changes.rows)
        except (sqlite3.Error, OSError) as error:
            with self._state:
                self._known.give_back(changes)
            self._note(error)
            return False
        return True

    def _begin(self) -> bool:
        try:
            self._segments.begin()
        except OSError as error:
            self._note(error)
            return False
        return True

    def _read(self, key: bytes, row: Row) -> bytes | None:
        """The page that belongs there, None where there are other bytes or none."""
        page = self._segments.read(row.place)
        return page if page is not None and self._check(key, page) == row.digest else None

    def _beyond(self, bound: int | None) -> bool:
        return bound is not None and self._segments.nbytes > bound

    def _evict_beyond(self, pages: int | None) -> None:
        with self._state:
            while pages is not None and len(self._known) > pages:
                self._known.evict()
                self._evicted += 1

    def _find(self, key: bytes) -> Row | None:
        """With `_state` held."""
        self._expire()
        return None if self._closed else self._known.find(key)

    def _expire(self) -> None:
        """With `_state` held."""
        now = self._clock()
        if now - self._seen >= GRAIN_S:
            self._seen = now
            self._expired += len(self._known.expire(now))

    def _lose(self, key: bytes) -> None:
        """With `_state` held: the page is damaged."""
        self._known.forget(key)
        self._damaged += 1
        self._note("a page is damaged and forgotten")

    def _note(self, what: object) -> None:
        """Say once what goes wrong; how often, `stat` counts."""
        said = (what.strerror if isinstance(what, OSError) else None) or f"{what}"
        if said not in self._told:
            self._told.add(said)
            logger.warning("store: %s: %s", self.path, said)
