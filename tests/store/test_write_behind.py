"""Write-behind: `put` never waits, and what is queued is as good as stored."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from stores import IDENTITY, PAGE_BYTES, key, page

from rorqual.errors import InputError
from rorqual.store.interface import PageBytes
from rorqual.store.memory import MemoryStore
from rorqual.store.writer import WriteBehind

DEADLINE_S = 60


class Gated(MemoryStore):
    """A medium that takes a page only when the gate is open, and says when it has begun one."""

    def __init__(self) -> None:
        super().__init__(IDENTITY, capacity=100 * PAGE_BYTES)
        self.gate, self.begun = threading.Event(), threading.Event()
        self.failing = self.flushed = False

    def put(self, key: bytes, page: PageBytes) -> bool:
        self.begun.set()
        assert self.gate.wait(DEADLINE_S)
        if self.failing:
            raise RuntimeError("a bug")
        return super().put(key, page)

    def flush(self) -> None:
        self.flushed = True


@pytest.fixture
def behind() -> Gated:
    return Gated()


@pytest.fixture
def store(behind: Gated) -> Iterator[WriteBehind]:
    store = WriteBehind(behind, queue_bytes=3 * PAGE_BYTES)
    yield store
    behind.gate.set()
    store.close()


def test_a_blocked_medium_delays_nobody(store: WriteBehind, behind: Gated) -> None:
    assert [store.put(key(number), page(number)) for number in range(5)] == [True, True, True, False, False]
    assert behind.begun.wait(DEADLINE_S) and behind.stat().pages == 0
    assert [store.get(key(number)) for number in (0, 2, 3)] == [page(0), page(2), None]
    assert store.match([key(number) for number in range(5)]) == 3
    assert store.put(key(1), page(1))  # queued already
    stat = store.stat()
    assert (stat.pages, stat.puts, stat.dropped, stat.gets, stat.hits) == (3, 6, 2, 3, 2)
    behind.gate.set()
    store.flush()
    assert behind.flushed and behind.stat().pages == 3 and store.stat().pages == 3
    assert store.put(key(3), page(3)) and store.get(key(3)) == page(3)


def test_a_chain_may_lie_on_both_sides(store: WriteBehind, behind: Gated) -> None:
    behind.gate.set()
    for number in (0, 2):
        store.put(key(number), page(number))
    store.flush()
    behind.gate.clear()
    for number in (1, 3):
        store.put(key(number), page(number))
    assert store.match([key(number) for number in range(6)]) == 4


def test_a_queued_page_is_a_copy(store: WriteBehind, behind: Gated) -> None:
    mine = bytearray(page(7))
    store.put(key(7), mine)
    mine[:] = bytes(PAGE_BYTES)
    assert store.get(key(7)) == page(7)
    behind.gate.set()
    store.flush()
    assert behind.get(key(7)) == page(7)


def test_a_page_is_forgotten_wherever_it_is(store: WriteBehind, behind: Gated) -> None:
    for number in range(3):
        store.put(key(number), page(number))
    assert behind.begun.wait(DEADLINE_S)
    assert store.delete(key(2)) and store.get(key(2)) is None  # still queued
    deleting = threading.Thread(target=store.delete, args=(key(0),))  # being written: waits for it, then deletes it
    deleting.start()
    behind.gate.set()
    deleting.join(DEADLINE_S)
    store.flush()
    assert not deleting.is_alive() and store.match([key(0)]) == 0 and store.match([key(1)]) == 1
    assert store.delete(key(1)) and not store.delete(key(1))


def test_a_bug_behind_loses_pages_and_nothing_else(store: WriteBehind, behind: Gated) -> None:
    behind.failing = True
    behind.gate.set()
    store.put(key(0), page(0))
    store.flush()
    behind.failing = False
    assert store.get(key(0)) is None and store.stat().dropped == 1
    store.put(key(1), page(1))
    store.flush()
    assert behind.get(key(1)) == page(1)


def test_closing_writes_what_is_queued(behind: Gated) -> None:
    written: list[bytes] = []

    class Kept(Gated):
        def close(self) -> None:
            written.extend(self._pages)

    kept = Kept()
    store = WriteBehind(kept, queue_bytes=3 * PAGE_BYTES)
    for number in range(3):
        store.put(key(number), page(number))
    kept.gate.set()
    store.close()
    assert written == [key(number) for number in range(3)]
    assert not store.put(key(4), page(4)) and store.get(key(0)) is None and store.match([key(0)]) == 0
    store.close()


def test_many_threads_find_what_they_put() -> None:
    store = WriteBehind(MemoryStore(IDENTITY, capacity=1000 * PAGE_BYTES), queue_bytes=1000 * PAGE_BYTES)
    wrong: list[int] = []

    def work(first: int) -> None:
        for number in range(first, first + 60):
            store.put(key(number), page(number))
            if store.get(key(number)) != page(number) or store.match([key(number)]) != 1:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert wrong == [] and store.stat().pages >= 240
    store.close()


def test_a_queue_holds_a_page() -> None:
    with pytest.raises(InputError, match=f"queue: 5 bytes hold no page; legal: at least {PAGE_BYTES}"):
        WriteBehind(MemoryStore(IDENTITY, capacity=PAGE_BYTES), queue_bytes=5)
