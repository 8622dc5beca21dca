"""The memory tier: pages in a dict, bounded in bytes, the one unused for longest goes first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import Lock

from rorqual.errors import InputError
from rorqual.policies import TTL
from rorqual.store.clock import Clock, steady_clock
from rorqual.store.interface import PageBytes, StoreIdentity, StoreStat


class MemoryStore:
    """Args:
        capacity: bytes of pages that it may hold.
        ttl: seconds after its last use at which a page goes; None for never.

    Raises:
        InputError: not room for one page, or no positive lifetime.

    >>> store = MemoryStore(StoreIdentity(fingerprint="m", page_tokens=4, page_bytes=2), capacity=4)
    >>> store.put(b"a", b"11"), store.put(b"b", b"22"), store.get(b"a"), store.put(b"c", b"33")
    (True, True, b'11', True)
    >>> store.match([b"a", b"b"]), store.stat().evicted
    (1, 1)
    """

    def __init__(
        self, identity: StoreIdentity, *, capacity: int, ttl: float | None = None, clock: Clock | None = None
    ) -> None:
        if capacity < identity.page_bytes:
            raise InputError(f"memory: {capacity} bytes hold no page; legal: at least {identity.page_bytes}")
        self._identity = identity
        self._capacity = capacity
        self._clock = clock or steady_clock()
        self._lock = Lock()
        self._pages: dict[bytes, bytes] = {}
        self._order = TTL[bytes](math.inf if ttl is None else ttl)
        self._puts = self._gets = self._hits = self._dropped = self._evicted = self._expired = 0
        self._closed = False

    @property
    def identity(self) -> StoreIdentity:
        return self._identity

    def put(self, key: bytes, page: PageBytes) -> bool:
        size = self._identity.page_bytes
        assert memoryview(page).nbytes == size, (memoryview(page).nbytes, size)
        copy = bytes(page)
        with self._lock:
            self._puts += 1
            if self._closed:
                self._dropped += 1
                return False
            self._expire()
            if key in self._pages:
                self._order.touch(key)
                return True
            while (len(self._pages) + 1) * size > self._capacity:
                del self._pages[self._order.evict()]
                self._evicted += 1
            self._pages[key] = copy
            self._order.insert(key)
            return True

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            self._gets += 1
            self._expire()
            page = self._pages.get(key)
            if page is not None:
                self._hits += 1
                self._order.touch(key)
            return page

    def match(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            self._expire()
            found = next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))
            # Deepest first: no page of a chain is to go before those that are useless without it.
            self._order.touch_all(reversed(keys[:found]))
            return found

    def delete(self, key: bytes) -> bool:
        with self._lock:
            if key not in self._pages:
                return False
            del self._pages[key]
            self._order.remove(key)
            return True

    def stat(self) -> StoreStat:
        with self._lock:
            self._expire()
            held = len(self._pages) * self._identity.page_bytes
            return StoreStat(
                pages=len(self._pages),
                bytes=held,
                capacity=self._capacity,
                used=held,
                puts=self._puts,
                gets=self._gets,
                hits=self._hits,
                dropped=self._dropped,
                evicted=self._evicted,
                expired=self._expired,
            )

    def flush(self) -> None:
        """Nothing: what is in memory is gone with the process."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for key in self._pages:
                self._order.remove(key)
            self._pages.clear()

    def _expire(self) -> None:
        gone = self._order.expire(self._clock())
        self._expired += len(gone)
        for key in gone:
            del self._pages[key]
