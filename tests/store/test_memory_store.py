"""The memory tier: bounded, the page unused for longest goes first."""

from __future__ import annotations

import pytest
from stores import IDENTITY, PAGE_BYTES, key, page

from rorqual.errors import InputError
from rorqual.store.memory import MemoryStore


def full(pages: int = 4) -> MemoryStore:
    store = MemoryStore(IDENTITY, capacity=pages * PAGE_BYTES + 1)
    for number in range(pages):
        assert store.put(key(number), page(number))
    return store


def test_it_holds_what_fits_and_not_one_page_more() -> None:
    store = full()
    assert store.put(key(9), page(9))
    assert [store.get(key(number)) for number in (0, 1, 9)] == [None, page(1), page(9)]
    stat = store.stat()
    assert (stat.pages, stat.bytes, stat.used, stat.evicted) == (4, 4 * PAGE_BYTES, 4 * PAGE_BYTES, 1)
    assert (stat.puts, stat.gets, stat.hits, stat.dropped) == (5, 3, 2, 0)


def test_uses_renew_a_page_and_a_chain_goes_from_its_end() -> None:
    store = full()
    assert store.put(key(0), page(0))  # there already: a use
    assert store.match([key(1), key(2), key(7)]) == 2
    for number in (10, 11, 12):
        store.put(key(number), page(number))
    assert [number for number in range(4) if store.match([key(number)])] == [1]


def test_a_copy_is_kept() -> None:
    store, mine = full(0 + 1), bytearray(page(5))
    store.put(key(5), mine)
    mine[:] = bytes(PAGE_BYTES)
    assert store.get(key(5)) == page(5)


def test_pages_age() -> None:
    now = 1000.0
    store = MemoryStore(IDENTITY, capacity=10 * PAGE_BYTES, ttl=60, clock=lambda: now)
    store.put(key(0), page(0))
    store.put(key(1), page(1))
    now += 59
    assert store.get(key(1)) == page(1)
    now += 1
    assert store.match([key(0)]) == 0 and store.get(key(0)) is None and store.get(key(1)) == page(1)
    assert store.stat().expired == 1


def test_delete_and_close() -> None:
    store = full()
    assert store.delete(key(2)) and not store.delete(key(2)) and store.get(key(2)) is None
    store.flush()
    store.close()
    store.close()
    assert not store.put(key(0), page(0)) and store.get(key(1)) is None and store.match([key(1)]) == 0
    assert store.stat().pages == 0 and store.stat().dropped == 1


def test_bad_values_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=f"memory: 2099 bytes hold no page; legal: at least {PAGE_BYTES}"):
        MemoryStore(IDENTITY, capacity=PAGE_BYTES - 1)
    with pytest.raises(InputError, match="ttl must be a time above 0"):
        MemoryStore(IDENTITY, capacity=PAGE_BYTES, ttl=0)
