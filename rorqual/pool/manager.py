"""What a scheduler asks of pages, slots and the prefix index. Requests are known by id alone.

A request holds one slot and the pages of its positions, leading ones shared with whoever has the same prefix. What it
may count on is reserved at once or not at all; what it gives back stays in the index while there is room.

A page that was published leaves this pool for a store too, and may come back from it: an admission is told which keys'
bytes are at hand, and gives them pages of the pool as if the index had found them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field

from rorqual.errors import CapacityError
from rorqual.pool.pages import PagePool
from rorqual.pool.slots import SlotPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """slot: for the private state, to be reset. hit: tokens whose global KV is there already, whole pages or 0.

    restored: of these, pages whose bytes the caller has and puts there at once, before anybody reads; with their keys.
    """

    slot: int
    hit: int
    restored: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """What to copy for a fork: (from, to) of the private state, and of a last page that is not full."""

    slot: tuple[int, int]
    page: tuple[int, int] | None


@dataclass(slots=True)
class _Held:
    slot: int
    pages: list[int]
    published: int
    """Leading pages that are immutable: found in the index, or published and maybe shared since."""
    private: set[int] = field(default_factory=set)
    """Of these, pages whose key another page has."""


class KVManager:
    """Pages, slots and the prefix index of one cache.

    Args:
        pages: how many the cache has.
        slots: how many sequences it has private state for.
        page_tokens: tokens of a page.
        window: W. A hit of W tokens or fewer is not adopted: a replay would compute all of it again.
        freed_page: as `freed` of `PagePool`.
        freed_slot: as `freed` of `SlotPool`.
        published: called with a page and its key when a request has put it into the index: all of its tokens are
            accepted, and it never changes until it is freed. Not for restored pages.
    """

    def __init__(
        self,
        *,
        pages: int,
        slots: int,
        page_tokens: int,
        window: int,
        freed_page: Callable[[int], None] | None = None,
        freed_slot: Callable[[int], None] | None = None,
        published: Callable[[int, bytes], None] | None = None,
    ) -> None:
        self.page_tokens, self.window = page_tokens, window
        self._published = published
        self.pages = PagePool(pages, freed_page)
        self.slots = SlotPool(slots, freed_slot)
        self._held: dict[Hashable, _Held] = {}

    def __contains__(self, request: Hashable) -> bool:
        return request in self._held

    def pages_of(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)

    def fits(self, tokens: int) -> bool:
        """Whether so many tokens fit at all, were the cache empty."""
        return self.pages_of(tokens) <= self.pages.pages

    def block_table(self, request: Hashable, first: int = 0) -> list[int]:
        """Page ids, by position // page_tokens, from the `first` on."""
        return self._held[request].pages[first:]

    def slot(self, request: Hashable) -> int:
        return self._held[request].slot

    def hit(self, keys: Sequence[bytes], length: int) -> int:
        """Tokens of a prompt of `length` tokens that an admission would adopt now; keys: of its full pages.

        >>> manager = KVManager(pages=4, slots=1, page_tokens=128, window=128)
        >>> manager.hit([b"unknown"], 200)
        0
        """
        return len(self._adopted(keys, length)) * self.page_tokens

    def admits(self, keys: Sequence[bytes], length: int, tokens: int, loaded: Collection[bytes] = ()) -> bool:
        """Whether `admit` would succeed."""
        return self.slots.free > 0 and self._missing(self._adopted(keys, length, loaded), tokens) <= 0

    def admit(
        self, request: Hashable, keys: Sequence[bytes], length: int, tokens: int, loaded: Collection[bytes] = ()
    ) -> Admission:
        """A slot, and pages for positions [0, tokens): adopted ones first, new ones for the rest; all or nothing.

        Args:
            request: an id that holds nothing.
            keys: of the prompt's full pages.
            length: tokens of the prompt.
            tokens: to reserve for now; what a hit covers is there anyway.
            loaded: keys whose bytes the caller has from elsewhere.

        Raises:
            CapacityError: no slot, or too few pages.
        """
        assert request not in self._held, f"{request!r} holds a slot already"
        if not self.slots.free:
            raise CapacityError(f"all {self.slots.slots} slots are taken")
        adopted = self._adopted(keys, length, loaded)
        missing = self._missing(adopted, tokens)
        if missing > 0:
            raise CapacityError(f"{missing} pages too few for {tokens} tokens; the cache has {self.pages.pages}")
        found = [page for page in adopted if page is not None]
        # Before anything is allocated, so that they are not evicted for it.
        self.pages.share(found)
        fresh = iter(self.pages.allocate(self._fresh(adopted, tokens)))
        pages = [next(fresh) if page is None else page for page in adopted]
        restored = tuple((pages[at], keys[at]) for at, page in enumerate(adopted) if page is None)
        for page, key in restored:
            assert self.pages.publish(page, key)
        self._held[request] = _Held(self.slots.allocate(), [*pages, *fresh], len(adopted))
        slot, hit = self._held[request].slot, len(adopted) * self.page_tokens
        return Admission(slot=slot, hit=hit, restored=restored)

    def extend(self, request: Hashable, tokens: int) -> bool:
        """Pages for positions [0, tokens); False, and nothing taken, where there are too few."""
        held = self._held[request]
        count = self.pages_of(tokens) - len(held.pages)
        if count > self.pages.available:
            return False
        if count > 0:
            held.pages += self.pages.allocate(count)
        return True

    def publish(self, request: Hashable, keys: Sequence[bytes]) -> None:
        """Put full pages into the index. keys: of all full pages whose tokens are all accepted and stand in the cache.

        Raises nothing for a key that another page has: this one stays the request's own.
        """
        held = self._held[request]
        assert len(keys) <= len(held.pages), f"{len(keys)} keys for {len(held.pages)} pages"
        for page, key in zip(held.pages[held.published : len(keys)], keys[held.published :], strict=False):
            if not self.pages.publish(page, key):
                held.private.add(page)
            elif self._published is not None:
                self._published(page, key)
        held.published = max(held.published, len(keys))

    def rewind(self, request: Hashable, position: int) -> int:
        """Make positions >= `position` writable again; from where the request's global KV has to be written anew.

        A published page may be somebody else's by now, so the request lets go of the one that the position lies in,
        and of those behind. What is not published yet is simply rewritten.
        """
        held = self._held[request]
        if position >= held.published * self.page_tokens:
            return position
        keep = position // self.page_tokens
        self.pages.release(held.pages[keep:])
        held.private.difference_update(held.pages[keep:])
        del held.pages[keep:]
        held.published = keep
        return keep * self.page_tokens

    def fork(self, request: Hashable, child: Hashable, length: int) -> Fork:
        """A second owner of positions [0, length): full pages are shared, a last one that is not full is to be copied.

        Raises:
            CapacityError: no slot, or no page for the copy; nothing is taken.
        """
        assert child not in self._held, f"{child!r} holds a slot already"
        held, full = self._held[request], length // self.page_tokens
        partial = length % self.page_tokens != 0
        assert full <= held.published and self.pages_of(length) <= len(held.pages), "publish full pages before a fork"
        if not self.slots.free:
            raise CapacityError(f"all {self.slots.slots} slots are taken")
        if partial > self.pages.available:
            raise CapacityError("no page is available for the last tokens of a fork")
        shared = held.pages[:full]
        self.pages.share(shared)
        own = self.pages.allocate(int(partial))
        made = _Held(self.slots.allocate(), shared + own, full, held.private & set(shared))
        self._held[child] = made
        return Fork(slot=(held.slot, made.slot), page=(held.pages[full], own[0]) if partial else None)

    def release(self, request: Hashable) -> None:
        """Give back the slot and every page."""
        held = self._held.pop(request)
        self.slots.release(held.slot)
        self.pages.release(held.pages)

    def check_integrity(self) -> None:
        """Of both pools; and every reference is some request's."""
        self.pages.check_integrity()
        self.slots.check_integrity()
        counts = [0] * self.pages.pages
        for held in self._held.values():
            assert len(set(held.pages)) == len(held.pages) and held.published <= len(held.pages)
            for at, page in enumerate(held.pages):
                counts[page] += 1
                assert at >= held.published or (self.pages.key(page) is None) == (page in held.private)
                assert at < held.published or (self.pages.key(page) is None and self.pages.references(page) == 1)
        assert counts == [self.pages.references(page) for page in range(self.pages.pages)]
        assert len({held.slot for held in self._held.values()}) == len(self._held)

    def _adopted(self, keys: Sequence[bytes], length: int, loaded: Collection[bytes] = ()) -> list[int | None]:
        """Pages that an admission takes over, None for one whose bytes are to be restored."""
        found: list[int | None] = []
        for key in keys[: length // self.page_tokens]:
            page = self.pages.find(key)
            if page is None and key not in loaded:
                break
            found.append(page)
        return found if len(found) * self.page_tokens > self.window else []

    def _fresh(self, adopted: Sequence[int | None], tokens: int) -> int:
        """Pages that an admission has to allocate: for what is restored, and for what is neither there nor at hand."""
        return max(len(adopted), self.pages_of(tokens)) - sum(page is not None for page in adopted)

    def _missing(self, adopted: Sequence[int | None], tokens: int) -> int:
        """Pages that an admission lacks; 0 or less where it has enough."""
        cached = sum(page is not None and self.pages.references(page) == 0 for page in adopted)
        return self._fresh(adopted, tokens) - (self.pages.available - cached)
