"""Pages of waiting requests come out of a store into host memory, in a thread beside the steps. No torch is in here.

    engine's thread                         fetcher's thread
    add, order, drop             ------->   match, then get page by page, the first request in the queue first
    blobs of a fetch             <-------   as far as the bytes that may be held at once go
    notice                       ------->   match, when there is nothing else: a use, as far as the store counts uses
    lacking                      <-------   what it does not have

The thread is there while there is something to fetch: nobody has to end it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rorqual.log import logger
from rorqual.store.interface import PageStore

HELD_BYTES = 256 << 20
"""Of all fetched pages that wait for their request's admission: 2,356 of the release's, for 301,568 tokens."""
NOTICED, LACKING = 64, 4096
"""Prefixes and pages that are remembered until there is time for them; the oldest go."""
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
        held_bytes: of all blobs of fetches that were not dropped yet, at most; but one request alone may have as much
            as it needs, which its pages in the cache bound.
    """

    def __init__(self, store: PageStore, page_bytes: int, held_bytes: int = HELD_BYTES) -> None:
        self.store, self.page_bytes = store, page_bytes
        self.most = max(1, held_bytes // page_bytes)
        self.turns = 0
        """Answers of the store so far: while a call hangs, this stands still."""
        self._queue: list[Fetch] = []
        self._noticed: deque[Sequence[bytes]] = deque(maxlen=NOTICED)
        self._lacking: deque[bytes] = deque(maxlen=LACKING)
        self._changed = threading.Condition()
        self._signals = 0
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Fetches that were added and not dropped yet."""
        return len(self._queue)

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

    def notice(self, keys: Sequence[bytes]) -> None:
        """Somebody uses these pages without asking for them. The store is told, when there is nothing else to do."""
        with self._changed:
            self._noticed.append(keys)
            self._wake()

    def lacking(self, most: int) -> list[bytes]:
        """Keys that were noticed and that the store does not have, so many at most; each is told once."""
        if not self._lacking:
            return []
        with self._changed:
            return [self._lacking.popleft() for _ in range(min(most, len(self._lacking)))]

    def turn(self) -> bool:
        """Ask the store one thing; False where there is nothing to ask, or no room for the answer."""
        with self._changed:
            fetch = self._next()
            keys = fetch.keys if fetch is not None else self._noticed.popleft() if self._noticed else None
            wanted = None if fetch is None else fetch.next if fetch.wanted is not None else None
        if keys is None:
            return False
        count, blob = self._ask(keys, wanted)
        with self._changed:
            self.turns += 1
            if fetch is None:
                self._lacking.extend(keys[count:])
            elif not fetch.done:
                self._answer(fetch, count, wanted, blob)
            self._changed.notify_all()
        return True

    def _next(self) -> Fetch | None:
        """Look-ups first: for most requests that is all, and no reason to wait for another's pages."""
        left = [fetch for fetch in self._queue if not fetch.done]
        if not left:
            return None
        fetch = next((fetch for fetch in left if fetch.wanted is None), left[0])
        return fetch if fetch.wanted is None or self._room(fetch) else None

    def _ask(self, keys: Sequence[bytes], wanted: bytes | None) -> tuple[int, bytes | None]:
        """(leading keys that it knows, None) without a wanted page, else (0, that page)."""
        try:
            return (self.store.match(keys), None) if wanted is None else (0, self.store.get(wanted))
        except Exception:
            # Whatever a store does, a request must not wait for it in vain.
            logger.exception("store: a call failed; going on without these pages")
            return 0, None

    def _answer(self, fetch: Fetch, count: int, wanted: bytes | None, blob: bytes | None) -> None:
        if wanted is None:
            fetch.known(count)
        elif blob is None or len(blob) != self.page_bytes:
            fetch.done = True  # lost between look-up and load: the hit ends here
        else:
            fetch.blobs[wanted] = blob
            fetch.done = len(fetch.blobs) == fetch.wanted

    def _room(self, fetch: Fetch) -> bool:
        """Whether one more page may be held for a fetch: within the bound, or beyond it where nobody else holds any.

        Those behind it give back theirs, and begin again later.
        """
        behind = self._queue[self._queue.index(fetch) + 1 :]
        while self.held >= self.most:
            victim = next((other for other in reversed(behind) if other.blobs and not other.claimed), None)
            if victim is None:
                return len(fetch.blobs) == self.held
            victim.blobs, victim.wanted, victim.done = {}, None, False
        return True

    def _wake(self) -> None:
        self._signals += 1
        self._changed.notify_all()
        if self._thread is None and (self._noticed or not all(fetch.done for fetch in self._queue)):
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
