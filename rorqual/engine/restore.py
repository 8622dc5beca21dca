"""Pages go to a store when they are published, and come back when a waiting request is admitted.

The copy of a page is taken in the engine's thread, and restored pages are put into the cache there. All that may take
long is behind it: a store writes behind (`rorqual.store`), a `Fetcher` reads ahead. A request waits for what is being
fetched, without standing in anybody's way, until it has waited long enough: then it computes what has not arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rorqual.cache.pages import GlobalPages
from rorqual.engine.fetch import Fetch, Fetcher
from rorqual.engine.queue import Track
from rorqual.log import logger
from rorqual.pool.manager import KVManager
from rorqual.store.interface import PageStore, StoreIdentity

PATIENCE = 5.0
"""Seconds that a request which could be admitted waits for its pages at most."""
AHEAD = 16
"""Requests of the queue for which pages are fetched before it is their turn."""
OFFERED = 8
"""Pages that are offered again in one step: some 1 MB to copy."""
WAIT = 0.01
"""Seconds that an engine without anything to compute waits for a page; its commands wait as long."""


class Restorer:
    """One engine's `Loads`. Called from the engine's thread.

    Args:
        store: of pages of this model; its `put` does not wait for a medium.
        kv: whose index is looked in first.
        pages: the bytes.
        clock: seconds.
    """

    def __init__(self, store: PageStore, kv: KVManager, pages: GlobalPages, clock: Callable[[], float]) -> None:
        self.store, self.patience = store, PATIENCE
        self.fetcher = Fetcher(store, pages.layout.page_bytes)
        self._kv, self._pages, self._clock = kv, pages, clock
        self._least = kv.window // kv.page_tokens
        self._fetches: dict[str, Fetch] = {}
        self._since: dict[str, float] = {}
        self._ahead: list[Fetch] = []
        self._stalled_at: int | None = None

    def offer(self, page: int, key: bytes) -> None:
        """A page was published: the store copies it, or has no room for it."""
        self.store.put(key, self._pages.page(page))

    def begin(self, track: Track) -> None:
        """A request begins to wait: what it lacks is looked up before the next step asks."""
        self._fetch(track)

    def look(self, waiting: Sequence[Track]) -> None:
        """Fetch for these; the first is admitted next. And offer again some of what the store is found to lack."""
        for key in self.fetcher.lacking(OFFERED):
            page = self._kv.pages.find(key)
            if page is not None:
                self.offer(page, key)
        self._ahead = [self._fetch(track) for track in waiting]
        if self._ahead:
            self.fetcher.order([fetch for fetch in self._ahead if fetch.keys])

    def wait(self) -> None:
        """Where nothing runs: until one of the requests that were looked at is ready, or a moment."""
        if self._ahead:
            self.fetcher.wait(self._ahead, WAIT)

    def loaded(self, track: Track) -> Collection[bytes] | None:
        fetch = self._fetch(track)
        now = self._clock()
        waited = now - self._since.setdefault(track.id, now)
        # A store that has not answered for somebody's patience keeps nobody waiting until it answers.
        if waited < self.patience and self._stalled_at != self.fetcher.turns:
            fetch = self._renewed(track, fetch)
            if not self.fetcher.claim(fetch):
                return None
        elif not self.fetcher.claim(fetch):
            self.fetcher.stop(fetch)
            self._stalled_at = self.fetcher.turns
        return fetch.blobs

    def admitted(self, request: str, keys: Sequence[bytes], restored: Sequence[tuple[int, bytes]]) -> None:
        for page, key in restored:
            self._pages.load(page, self._fetches[request].blobs[key])
        self.dropped(request)
        if len(restored) < len(keys):
            # What is always found here would be the first to go there, and all that goes on from it would be lost.
            self.fetcher.notice(keys)

    def dropped(self, request: str) -> None:
        self._since.pop(request, None)
        self._drop(self._fetches.pop(request, None))

    def check_integrity(self, waiting: Sequence[Track]) -> None:
        """Nothing is held but for requests that wait."""
        kept = {track.id for track in waiting}
        assert self._fetches.keys() <= kept and self._since.keys() <= kept
        assert len(self.fetcher) == sum(bool(fetch.keys) for fetch in self._fetches.values())

    def _fetch(self, track: Track) -> Fetch:
        if track.id not in self._fetches:
            self._fetches[track.id] = self._made(track)
        return self._fetches[track.id]

    def _made(self, track: Track) -> Fetch:
        # Logits of the prompt are computed, and so is the prompt.
        keys = track.chain.keys if track.logits_from is None else []
        if len(keys) <= self._least:
            return Fetch(done=True)
        places = [at for at, key in enumerate(keys) if self._kv.pages.find(key) is None]
        fetch = Fetch(
            keys=[keys[at] for at in places], places=places, pages=len(keys), least=self._least, done=not places
        )
        if places:
            self.fetcher.add(fetch)
        return fetch

    def _renewed(self, track: Track, fetch: Fetch) -> Fetch:
        """The fetch, or another one where the index has changed: it lost what this one builds on, or got what it is
        after, from a request that was admitted before."""
        if not fetch.done:
            stale = fetch.next is not None and self._kv.pages.find(fetch.next) is not None
        else:
            keys = track.chain.keys[: fetch.reach]
            stale = any(key not in fetch.blobs and self._kv.pages.find(key) is None for key in keys)
        if stale:
            self._drop(fetch)
            fetch = self._fetches[track.id] = self._made(track)
        return fetch

    def _drop(self, fetch: Fetch | None) -> None:
        if fetch is not None and fetch.keys:
            self.fetcher.drop(fetch)


def restorer_of(
    store: PageStore, own: StoreIdentity, kv: KVManager, pages: GlobalPages, clock: Callable[[], float]
) -> Restorer | None:
    """Of a cache with this identity; None, with a warning, where the store is of another."""
    if store.identity != own:
        logger.warning("store: it is of another model or page size (%s); going on without", store.identity)
        return None
    return Restorer(store, kv, pages, clock)
