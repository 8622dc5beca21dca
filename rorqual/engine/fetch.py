"""Pages of waiting requests come out of a store into host memory, in a thread beside the steps. No torch is in here.

    engine's thread                         fetcher's thread
    add, order, drop             ------->   match, then get page by page, the first request in the queue first
    blobs of a fetch             <-------   as far as the bytes that may be held at once go

The thread is there while there is something to fetch: nobody has to end it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from rorqual.log import logger
from rorqual.store.interface import PageStore

HELD_BYTES = 256 << 20
"""Of all fetched pages that wait for their request's admission: 2,356 of the release's, 301,568 tokens."""
IDLE_SECONDS = 1.0
"""How long the thread waits for more before it ends."""


@dataclass(slots=True, kw_only=True, eq=False)
class Fetch:
    """What one request lacks.

    keys: of its full pages that the index did not know, in order. places: which pages of the request these are.
    pages: all of its full pages. least: a prefix of so many or fewer is of no use (one window), so nothing is fetched.
    blobs: what has arrived, of leading keys. wanted: leading keys that the store knows, once it was asked. done:
    nothing more arrives. claimed: what has arrived is about to be used, and stays until it is dropped.
    """

    keys: Sequence[bytes] = ()
    places: Sequence[int] = ()
    pages: int = 0
    least: int = 0
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    wanted: int | None = None
    done: bool = False
    claimed: bool = False

    @property
    def reach(self) -> int:
        """Leading pages of the request that were in the index, or have arrived."""
        return self._reach(len(self.blobs))

    @property
    def next(self) -> bytes | None:
        """The key that is fetched next; None when all have arrived."""
        return self.keys[len(self.blobs)] if len(self.blobs) < len(self.keys) else None

    def known(self, count: int) -> None:
        """The store knows so many leading keys."""
        self.wanted = count if self._reach(count) > self.least else 0
        self.done = not self.wanted

    def _reach(self, count: int) -> int:
        return self.pages if count == len(self.keys) else self.places[count]


class Fetcher:
    """Reads for the fetches that were added, in their order.

    Args:
        store: asked from this thread alone.
        page_bytes: of a page; a blob of another size counts as lost.
        held_bytes: of all blobs of fetches that were not dropped yet, at most.
    """

    def __init__(self, store: PageStore, page_bytes: int, held_bytes: int = HELD_BYTES) -> None:
        self.store, self.page_bytes = store, page_bytes
        self.most = max(1, held_bytes // page_bytes)
        self.turns = 0
        """Answers of the store so far: while a call hangs, this stands still."""
        self._queue: list[Fetch] = []
        self._changed = threading.Condition()
        self._signals = 0
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> int:
        """Pages in host memory."""
        return sum(len(fetch.blobs) for fetch in self._queue)

    def add(self, fetch: Fetch) -> None:
        """Fetch for one more request, after those in front of it."""
        with self._changed:
            self._queue.append(fetch)
            self._wake()

    def order(self, fetches: Sequence[Fetch]) -> None:
        """These come first from now on; all of them were added."""
        with self._changed:
            if self._queue[: len(fetches)] != list(fetches):
                self._queue = [*fetches, *(fetch for fetch in self._queue if fetch not in fetches)]
                self._wake()

    def claim(self, fetch: Fetch) -> bool:
        """What has arrived stays until it is dropped; False where more is to come."""
        with self._changed:
            fetch.claimed = fetch.done
            return fetch.done

    def stop(self, fetch: Fetch) -> None:
        """Nothing more arrives for it, and what has arrived is claimed."""
        with self._changed:
            fetch.done = fetch.claimed = True

    def drop(self, fetch: Fetch) -> None:
        """Forget a fetch and what has arrived for it."""
        with self._changed:
            fetch.done = True
            self._queue.remove(fetch)
            self._wake()

    def wait(self, fetches: Sequence[Fetch], seconds: float) -> None:
        """Until one of these is done, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: any(fetch.done for fetch in fetches), seconds)

    def turn(self) -> bool:
        """Ask the store one thing; False where there is nothing to ask, or no room for the answer."""
        with self._changed:
            left = [fetch for fetch in self._queue if not fetch.done]
            if not left:
                return False
            # Look-ups first: for most requests that is all, and no reason to wait for another's pages.
            fetch = next((fetch for fetch in left if fetch.wanted is None), left[0])
            if fetch.wanted is not None and not self._room(fetch):
                return False
            key = fetch.next
        assert key is not None
        count = blob = None
        # Whatever a store does, a request must not wait for it in vain.
        try:
            if fetch.wanted is None:
                count = self.store.match(fetch.keys)
            else:
                blob = self.store.get(key)
        except Exception:
            logger.exception("store: a call failed; going on without these pages")
        with self._changed:
            self.turns += 1
            if not fetch.done:
                self._answer(fetch, key, count, blob)
            self._changed.notify_all()
        return True

    def _answer(self, fetch: Fetch, key: bytes, count: int | None, blob: bytes | None) -> None:
        if fetch.wanted is None:
            fetch.known(count or 0)
        elif blob is None or len(blob) != self.page_bytes:
            fetch.done = True  # lost between look-up and load: the hit ends here
        else:
            fetch.blobs[key] = blob
            fetch.done = len(fetch.blobs) == fetch.wanted

    def _room(self, fetch: Fetch) -> bool:
        """Whether one more page may be held for a fetch. Those behind it give back theirs, and begin again later."""
        behind = self._queue[self._queue.index(fetch) + 1 :]
        while self.held >= self.most:
            victim = next((other for other in reversed(behind) if other.blobs and not other.claimed), None)
            if victim is None:
                # Alone it has all that there is: this is as far as its prefix goes.
                fetch.done = len(fetch.blobs) == self.held
                self._changed.notify_all()
                return False
            victim.blobs, victim.wanted, victim.done = {}, None, False
        return True

    def _wake(self) -> None:
        self._signals += 1
        self._changed.notify_all()
        if self._thread is None and not all(fetch.done for fetch in self._queue):
            self._thread = threading.Thread(target=self._run, name="rorqual-fetch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        seen: int | None = -1
        while (seen := self._signal(seen)) is not None:
            while self.turn():
                pass

    def _signal(self, seen: int | None) -> int | None:
        """The number of the newest signal, once it is another than `seen`; None when the thread is to end."""
        with self._changed:
            if self._changed.wait_for(lambda: self._signals != seen, IDLE_SECONDS):
                return self._signals
            self._thread = None
            return None
