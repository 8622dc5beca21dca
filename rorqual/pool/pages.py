"""Pages of global KV: who refers to them, which are published under a key, and which goes when room is needed.

A page is in one of three states:

    free      nobody refers to it and no key finds it: its bytes mean nothing
    used      somebody refers to it; published or not
    cached    nobody refers to it, but a key finds it: the next sequence with this prefix has it without computing

Publishing makes a page immutable. Only cached pages are ever taken away from the index, the one unused for longest
first; of one sequence the deepest goes first, because no later page is of use without an earlier one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from rorqual.errors import CapacityError
from rorqual.policies import LRU


class PagePool:
    """`pages` pages, numbered from 0.

    Args:
        pages: how many.
        freed: called with a page that has become free, before anybody can have it again; tests poison it there.

    >>> pool = PagePool(3)
    >>> a, b = pool.allocate(2)
    >>> pool.publish(a, b"first")
    True
    >>> pool.release([a, b])
    >>> (pool.free, pool.used, pool.cached), pool.match([b"first", b"second"]) == [a]
    ((2, 0, 1), True)
    """

    def __init__(self, pages: int, freed: Callable[[int], None] | None = None) -> None:
        if pages < 1:
            raise CapacityError(f"a page pool needs at least 1 page, got {pages}")
        self.pages = pages
        self.evictions = 0
        self._freed = freed
        self._free = deque(range(pages))
        self._references = [0] * pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached = LRU[int]()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.pages - self.free - self.cached

    @property
    def available(self) -> int:
        """Pages that `allocate` could give: free ones, and cached ones after their eviction."""
        return self.free + self.cached

    def references(self, page: int) -> int:
        return self._references[page]

    def key(self, page: int) -> bytes | None:
        """What the page is published under."""
        return self._key_of.get(page)

    def allocate(self, count: int) -> list[int]:
        """That many pages with one reference each, free ones before the longest unused cached ones; all or none.

        Raises:
            CapacityError: fewer are available.
        """
        if count > self.available:
            raise CapacityError(f"{count} pages are asked for; {self.free} are free and {self.cached} cached")
        while len(self._free) < count:
            self._evict()
        found = [self._free.popleft() for _ in range(count)]
        for page in found:
            self._references[page] = 1
        return found

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each: used or cached pages, in the order of their sequence."""
        for page in pages:
            if not self._references[page]:
                self._cached.remove(page)
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each, in the order of their sequence: the last becomes the first to be evicted."""
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} has no reference to give back"
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._key_of:
                self._cached.insert(page)
            else:
                self._give_back(page)

    def publish(self, page: int, key: bytes) -> bool:
        """Let `key` find the page from now on; False where another page has the key already and this one stays private.

        Two sequences may compute one prefix at the same time. Theirs are two pages then, and each keeps reading its
        own: the bits of a sequence do not change under it.
        """
        assert self._references[page] > 0 and page not in self._key_of, f"page {page} cannot be published"
        if key in self._page_of:
            return False
        self._key_of[page], self._page_of[key] = key, page
        return True

    def find(self, key: bytes) -> int | None:
        """The page that a key finds; no reference is taken."""
        return self._page_of.get(key)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest run of leading keys that the index holds. No reference is taken."""
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def drop_cached(self) -> int:
        """Evict every cached page; how many there were."""
        count = self.cached
        for _ in range(count):
            self._evict()
        return count

    def check_integrity(self) -> None:
        """Every page in exactly one state, and keys and pages paired both ways."""
        free, cached = set(self._free), set(self._cached)
        used = {page for page in range(self.pages) if self._references[page]}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(cached) + len(used) == self.pages, (len(free), len(cached), len(used), self.pages)
        assert not (free & cached or free & used or cached & used)
        assert all(count >= 0 for count in self._references)
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert cached <= self._key_of.keys() and not free & self._key_of.keys()

    def _evict(self) -> None:
        page = self._cached.evict()
        del self._page_of[self._key_of.pop(page)]
        self.evictions += 1
        self._give_back(page)

    def _give_back(self, page: int) -> None:
        self._free.append(page)
        if self._freed is not None:
            self._freed(page)
