"""Admission, growth, publication, rewind, fork and release: all or nothing, nothing lost, nobody's page rewritten."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rorqual.errors import CapacityError
from rorqual.pool.manager import KVManager
from rorqual.pool.prefix import PrefixChain, root_key

PAGE, WINDOW = 4, 4
ROOT = root_key("model", PAGE)


def keys(ids: Sequence[int]) -> list[bytes]:
    chain = PrefixChain(ROOT, PAGE)
    chain.extend(ids)
    return chain.keys


def manager(pages: int = 8, slots: int = 3, page: int = PAGE, window: int = WINDOW) -> KVManager:
    return KVManager(pages=pages, slots=slots, page_tokens=page, window=window)


def run(kv: KVManager, request: str, ids: Sequence[int]) -> int:
    """Admit, compute and publish a whole prompt; its hit."""
    hit = kv.admit(request, keys(ids), len(ids), len(ids)).hit
    kv.publish(request, keys(ids))
    kv.check_integrity()
    return hit


@pytest.mark.parametrize(
    ("shared", "hit"), [(0, 0), (1, 0), (127, 0), (128, 0), (129, 0), (255, 0), (256, 256), (300, 256), (384, 384)]
)
def test_a_hit_is_whole_pages_and_more_than_a_window(shared: int, hit: int) -> None:
    kv, root = manager(page=128, window=128), root_key("m", 128)
    ids = list(range(400))
    for request, given in (("first", ids), ("second", ids[:shared] + [9999] * (400 - shared))):
        chain = PrefixChain(root, 128)
        chain.extend(given)
        foreseen = kv.hit(chain.keys, 400)
        found = kv.admit(request, chain.keys, 400, 400).hit
        kv.publish(request, chain.keys)
        assert found == foreseen
    assert found == hit
    same = sum(a == b for a, b in zip(kv.block_table("first"), kv.block_table("second"), strict=True))
    assert same * 128 == hit
    kv.check_integrity()


def test_a_prompt_of_whole_pages_is_a_hit_to_its_end() -> None:
    kv = manager()
    assert run(kv, "a", range(8)) == 0 and run(kv, "b", range(8)) == 8


def test_pages_outlive_their_request_until_room_is_needed() -> None:
    kv = manager(pages=3)
    run(kv, "a", range(10))
    kv.release("a")
    assert (kv.pages.cached, kv.pages.free) == (2, 1)
    assert run(kv, "b", range(9)) == 8
    kv.release("b")
    run(kv, "c", range(100, 112))
    assert kv.pages.evictions == 2 and kv.hit(keys(range(9)), 9) == 0


def test_an_admission_does_not_evict_what_it_adopts() -> None:
    kv = manager(pages=3)
    run(kv, "a", range(8))
    kv.release("a")
    assert kv.admits(keys(range(12)), 12, 12)
    assert kv.admit("b", keys(range(12)), 12, 12).hit == 8
    assert kv.pages.evictions == 0
    kv.check_integrity()


def test_nothing_is_taken_where_there_is_too_little() -> None:
    kv = manager(pages=4, slots=2)
    run(kv, "a", range(8))
    before = kv.block_table("a"), kv.pages.free
    with pytest.raises(CapacityError, match="1 pages too few for 20 tokens; the cache has 4"):
        kv.admit("b", keys(range(20)), 20, 20)
    assert not kv.admits(keys(range(20)), 20, 20) and kv.fits(16) and not kv.fits(17)
    assert not kv.extend("a", 17) and (kv.block_table("a"), kv.pages.free) == before and "b" not in kv
    assert kv.extend("a", 16) and len(kv.block_table("a")) == 4 and kv.extend("a", 3)
    run(kv, "b", range(8))
    with pytest.raises(CapacityError, match="all 2 slots are taken"):
        kv.admit("c", [], 1, 1)
    kv.check_integrity()


@pytest.mark.parametrize(("loaded", "hit"), [([], 4), ([1], 12), ([3, 1], 16), ([3], 4), ([1, 3, 0, 2], 16)])
def test_pages_from_elsewhere_are_adopted_between_those_that_are_here(loaded: list[int], hit: int) -> None:
    """Page 0 and page 2 are in the index, others are at hand; all of it was somebody's before."""
    kv, chain = manager(pages=9, window=0), keys(range(16))
    kv.admit("a", chain, 16, 16)
    for at in (0, 2):
        kv.pages.publish(kv.block_table("a")[at], chain[at])
    here = dict(zip(chain, kv.block_table("a"), strict=True))
    kv._held["a"].private.update(kv.block_table("a")[at] for at in (1, 3))
    kv._held["a"].published = 4
    assert kv.admits(chain, 16, 18, [chain[at] for at in loaded])
    found = kv.admit("b", chain, 16, 18, [chain[at] for at in loaded])
    kv.check_integrity()
    table = kv.block_table("b")
    assert found.hit == hit and len(table) == 5
    assert found.restored == tuple((table[at], chain[at]) for at in (1, 3) if at in loaded and at < hit // PAGE)
    assert [table[at] for at in (0, 2) if at < hit // PAGE] == [here[chain[at]] for at in (0, 2) if at < hit // PAGE]
    assert kv.hit(chain, 16) == hit
    kv.release("b")
    kv.check_integrity()


def test_a_restored_page_never_takes_the_place_of_one_that_it_goes_on_from() -> None:
    kv = manager(pages=4, window=0)
    run(kv, "a", range(8))
    kv.release("a")
    run(kv, "b", range(50, 54))
    chain = keys(range(12))
    assert not kv.admits(chain, 12, 16, chain) and kv.admits(chain, 12, 12, chain)
    found = kv.admit("c", chain, 12, 12, chain)
    assert found.hit == 12 and len(found.restored) == 1 and kv.pages.evictions == 0
    kv.check_integrity()


def test_whom_a_publication_is_told_to() -> None:
    """The one whose page the index took, once; not for what was found, restored, or has a twin there."""
    told: list[tuple[int, bytes]] = []
    kv = KVManager(pages=9, slots=3, page_tokens=PAGE, window=0, published=lambda page, key: told.append((page, key)))
    chain = keys(range(12))
    kv.admit("a", chain, 12, 12)
    kv.admit("twin", chain, 12, 12)
    for request in ("a", "twin", "a"):
        kv.publish(request, chain[:2])
    assert told == list(zip(kv.block_table("a"), chain[:2], strict=False))
    kv.release("twin")
    found = kv.admit("b", chain, 12, 12, chain)
    assert found.hit == 12 and len(found.restored) == 1
    kv.publish("b", chain)
    assert len(told) == 2
    kv.check_integrity()


def test_a_rewind_never_rewrites_a_published_page() -> None:
    kv = manager()
    run(kv, "a", range(14))
    table = kv.block_table("a")
    assert kv.rewind("a", 13) == 13 and kv.block_table("a") == table
    assert kv.rewind("a", 10) == 8 and kv.block_table("a") == table[:2]
    assert kv.hit(keys(range(14)), 14) == 12
    assert kv.extend("a", 14) and not set(kv.block_table("a")[2:]) & {table[2]}
    kv.check_integrity()


def test_a_fork_shares_full_pages_and_copies_the_last() -> None:
    kv = manager()
    run(kv, "a", range(10))
    fork = kv.fork("a", "b", 10)
    one, two = kv.block_table("a"), kv.block_table("b")
    assert one[:2] == two[:2] and fork.page == (one[2], two[2]) and one[2] != two[2]
    assert fork.slot == (kv.slot("a"), kv.slot("b"))
    assert kv.fork("a", "c", 8).page is None and kv.block_table("c") == one[:2]
    with pytest.raises(CapacityError, match="slots"):
        kv.fork("a", "d", 8)
    kv.check_integrity()
    for request in "acb":
        kv.release(request)
        kv.check_integrity()
    assert (kv.pages.free, kv.pages.cached) == (6, 2)


def test_a_fork_without_a_page_takes_nothing() -> None:
    kv = manager(pages=2)
    run(kv, "a", range(6))
    with pytest.raises(CapacityError, match="no page is available"):
        kv.fork("a", "b", 6)
    assert kv.slots.free == 2
    kv.check_integrity()


def test_two_that_compute_one_prefix_keep_their_own_pages() -> None:
    kv = manager()
    for request in "ab":
        kv.admit(request, keys(range(8)), 8, 8)
    for request in "ab":
        kv.publish(request, keys(range(8)))
    kv.check_integrity()
    assert not set(kv.block_table("a")) & set(kv.block_table("b"))
    kv.fork("b", "c", 8)
    kv.release("b")
    kv.release("c")
    assert kv.pages.free == 6 and kv.hit(keys(range(8)), 8) == 8
    kv.check_integrity()


def test_a_thousand_that_come_and_go_leave_the_pool_as_it_was() -> None:
    kv, draw = manager(pages=32, slots=8), random.Random(0)
    live: list[int] = []
    for request in range(1000):
        ids = [draw.randrange(2) for _ in range(draw.randrange(1, 40))]
        if kv.admits(keys(ids), len(ids), len(ids)):
            kv.admit(request, keys(ids), len(ids), len(ids))
            live.append(request)
            if draw.random() < 0.7:
                kv.publish(request, keys(ids))
        while live and (draw.random() < 0.4 or not kv.slots.free):
            kv.release(live.pop(draw.randrange(len(live))))
        kv.check_integrity()
    for request in live:
        kv.release(request)
    kv.pages.drop_cached()
    assert kv.pages.free == 32 and kv.slots.free == 8
    kv.check_integrity()


class Machine(RuleBasedStateMachine):
    """Requests over a small alphabet. What every page holds is written down beside it: nobody may change it."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: dict[int, list[int]] = {}
        self.slots: set[int] = set()
        self.kv = KVManager(
            pages=9, slots=3, page_tokens=PAGE, window=WINDOW, freed_page=self._freed, freed_slot=self.slots.discard
        )
        self.ids: dict[int, list[int]] = {}
        self.count = 0

    def _freed(self, page: int) -> None:
        self.holds.pop(page, None)

    def _write(self, request: int, start: int) -> None:
        """What a runner does: rows from `start` on into the request's pages; then full ones are published."""
        table, ids = self.kv.block_table(request), self.ids[request]
        for page in range(start // PAGE, self.kv.pages_of(len(ids))):
            old = self.holds.get(table[page])
            assert self.kv.pages.key(table[page]) is None or old == ids[page * PAGE : (page + 1) * PAGE]
            self.holds[table[page]] = ids[page * PAGE : (page + 1) * PAGE]
        self.kv.publish(request, keys(ids))

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=24), loaded=st.sets(st.integers(0, 5)))
    def submit(self, ids: list[int], loaded: set[int]) -> None:
        chain = keys(ids)
        at_hand = {chain[at] for at in loaded if at < len(chain)}
        if not self.kv.admits(chain, len(ids), len(ids), at_hand):
            with pytest.raises(CapacityError):
                self.kv.admit(-1, chain, len(ids), len(ids), at_hand)
            return
        foreseen, request = self.kv.hit(chain, len(ids)), self.count
        found = self.kv.admit(request, chain, len(ids), len(ids), at_hand)
        assert found.slot not in self.slots
        assert found.hit == foreseen if not found.restored else found.hit > foreseen
        self.slots.add(found.slot)
        table = self.kv.block_table(request)
        for restored, key in found.restored:
            page = table.index(restored)
            assert key == chain[page] and key in at_hand and restored not in self.holds
            self.holds[restored] = ids[page * PAGE : (page + 1) * PAGE]
        for page in range(found.hit // PAGE):
            assert self.holds[table[page]] == ids[page * PAGE : (page + 1) * PAGE]
        self.ids[request], self.count = ids, self.count + 1
        self._write(request, found.hit)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        request = data.draw(st.sampled_from(sorted(self.ids)))
        start = len(self.ids[request])
        if self.kv.extend(request, start + len(more)):
            self.ids[request] = self.ids[request] + more
            self._write(request, start)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.ids)))
        position = data.draw(st.integers(1, len(self.ids[request])))
        start = self.kv.rewind(request, position)
        assert start <= position and position - start < PAGE
        self.ids[request] = self.ids[request][:position]
        if not self.kv.extend(request, position):
            self.release(data, request)
        else:
            self._write(request, start)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.ids)))
        length = len(self.ids[request])
        try:
            made = self.kv.fork(request, self.count, length)
        except CapacityError:
            return
        if made.page is not None:
            self.holds[made.page[1]] = self.holds[made.page[0]]
        self.slots.add(made.slot[1])
        self.ids[self.count], self.count = list(self.ids[request]), self.count + 1

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def release(self, data: st.DataObject, request: int | None = None) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.ids))) if request is None else request
        self.kv.release(chosen)
        del self.ids[chosen]

    @rule()
    def evict(self) -> None:
        self.kv.pages.drop_cached()

    @invariant()
    def everybody_reads_what_is_theirs(self) -> None:
        self.kv.check_integrity()
        assert len(self.slots) == len(self.ids) == self.kv.slots.slots - self.kv.slots.free
        for request, ids in self.ids.items():
            table = self.kv.block_table(request)
            for page in range(self.kv.pages_of(len(ids))):
                assert self.holds[table[page]] == ids[page * PAGE : (page + 1) * PAGE]


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, suppress_health_check=[*HealthCheck]
)
