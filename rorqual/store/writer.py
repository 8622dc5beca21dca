"""Write-behind: `put` leaves a copy in a bounded queue and returns; one thread takes it to the store behind.

Whoever puts never waits for a medium. A full queue drops the page and counts it: what is not stored is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Condition, Thread

from rorqual.errors import InputError
from rorqual.log import logger
from rorqual.store.interface import PageBytes, PageStore, StoreIdentity, StoreStat


class WriteBehind:
    """A store whose `put` does not wait. `get` and `match` see what is still queued.

    Args:
        behind: where pages go; closed with this one.
        queue_bytes: of pages that wait at most, the one that is being written included.

    Raises:
        InputError: the queue holds not one page.
    """

    def __init__(self, behind: PageStore, *, queue_bytes: int) -> None:
        size = behind.identity.page_bytes
        if queue_bytes < size:
            raise InputError(f"queue: {queue_bytes} bytes hold no page; legal: at least {size}")
        self._behind = behind
        self._most = queue_bytes // size
        self._changed = Condition()
        self._queue: dict[bytes, bytes] = {}  # oldest first; a page stays in it until it is written
        self._writing: bytes | None = None
        self._puts = self._gets = self._hits = self._dropped = 0
        self._closed = False
        # Nobody waits for it at the end of the interpreter: who wants the queue written closes the store.
        self._thread = Thread(target=self._work, name="rorqual-store-writer", daemon=True)
        self._thread.start()

    @property
    def identity(self) -> StoreIdentity:
        return self._behind.identity

    def put(self, key: bytes, page: PageBytes) -> bool:
        size = self.identity.page_bytes
        assert memoryview(page).nbytes == size, (memoryview(page).nbytes, size)
        with self._changed:
            self._puts += 1
            if key in self._queue:
                return True
            if self._closed or len(self._queue) >= self._most:
                self._dropped += 1
                return False
            self._queue[key] = bytes(page)
            self._changed.notify_all()
            return True

    def get(self, key: bytes) -> bytes | None:
        with self._changed:
            self._gets += 1
            page = self._queue.get(key)
            closed = self._closed
        if page is None and not closed:
            page = self._behind.get(key)
        if page is not None:
            with self._changed:
                self._hits += 1
        return page

    def match(self, keys: Sequence[bytes]) -> int:
        found = 0
        while found < len(keys):
            with self._changed:
                if self._closed:
                    return 0
                # A page leaves the queue only after it is behind: looked for there next, it is not missed.
                queued = next((i for i in range(found, len(keys)) if keys[i] not in self._queue), len(keys)) - found
            found += queued
            behind = self._behind.match(keys[found:]) if found < len(keys) else 0
            if not behind:
                break
            found += behind
        return found

    def delete(self, key: bytes) -> bool:
        with self._changed:
            while self._writing == key:
                self._changed.wait()
            queued = self._queue.pop(key, None) is not None
            if queued:
                self._changed.notify_all()
        return self._behind.delete(key) or queued

    def stat(self) -> StoreStat:
        """Of the store behind, with the calls made here; pages that wait count as held."""
        with self._changed:
            waiting, dropped = len(self._queue), self._dropped
            calls = {"puts": self._puts, "gets": self._gets, "hits": self._hits}
        there = self._behind.stat()
        size = self.identity.page_bytes
        pages, held = there.pages + waiting, there.bytes + waiting * size
        return replace(there, pages=pages, bytes=held, dropped=there.dropped + dropped, **calls)

    def flush(self) -> None:
        """Waits until all that was put before is behind, and flushes that."""
        with self._changed:
            last = next(reversed(self._queue), None)
            self._changed.wait_for(lambda: last not in self._queue)
        self._behind.flush()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._behind.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                key = next(iter(self._queue), None)
                if key is None:
                    return
                page = self._queue[key]
                self._writing = key
            try:
                self._behind.put(key, page)
            except Exception:
                # A bug of ours in a cache is no reason to fail requests: the page is lost and counted.
                logger.exception("store: a page could not be written")
                with self._changed:
                    self._dropped += 1
            with self._changed:
                self._writing = None
                del self._queue[key]
                self._changed.notify_all()
