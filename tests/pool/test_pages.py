"""Pages change state only as the pool says, and every one of them is somewhere."""

from __future__ import annotations

import pytest

from rorqual.errors import CapacityError
from rorqual.pool.pages import PagePool


def states(pool: PagePool) -> tuple[int, int, int]:
    pool.check_integrity()
    return pool.free, pool.used, pool.cached


def published(pool: PagePool, *keys: bytes) -> list[int]:
    pages = pool.allocate(len(keys))
    for page, key in zip(pages, keys, strict=True):
        assert pool.publish(page, key)
    return pages


def test_a_page_goes_round() -> None:
    gone: list[int] = []
    pool = PagePool(2, gone.append)
    pages = published(pool, b"a")
    assert states(pool) == (1, 1, 0) and pool.references(pages[0]) == 1
    pool.release(pages)
    assert states(pool) == (1, 0, 1) and gone == []
    pool.share(pages)
    assert states(pool) == (1, 1, 0) and pool.match([b"a"]) == pages
    pool.release(pages)
    assert pool.drop_cached() == 1
    assert states(pool) == (2, 0, 0) and gone == pages and pool.match([b"a"]) == [] and pool.key(pages[0]) is None


def test_unpublished_pages_are_free_at_once() -> None:
    pool = PagePool(3)
    pool.release(pool.allocate(3))
    assert states(pool) == (3, 0, 0)


def test_free_pages_go_before_cached_ones_and_the_longest_unused_first() -> None:
    pool = PagePool(4)
    first, second = published(pool, b"a"), published(pool, b"b")
    pool.release(first)
    pool.release(second)
    pool.share(first)
    pool.release(first)
    assert not set(pool.allocate(2)) & {*first, *second} and pool.evictions == 0
    assert pool.allocate(1) == second and pool.evictions == 1
    assert pool.match([b"a"]) == first and pool.match([b"b"]) == []


def test_of_one_sequence_the_deepest_goes_first() -> None:
    pool = PagePool(3)
    pages = published(pool, b"a", b"b", b"c")
    pool.release(pages)
    pool.allocate(1)
    assert pool.match([b"a", b"b", b"c"]) == pages[:2]


def test_what_is_used_is_never_taken() -> None:
    pool = PagePool(3)
    kept = published(pool, b"a", b"b")
    with pytest.raises(CapacityError, match="2 pages are asked for; 1 are free and 0 cached"):
        pool.allocate(2)
    assert states(pool) == (1, 2, 0)
    pool.share(kept[:1])
    pool.release(kept)
    assert states(pool) == (1, 1, 1) and pool.available == 2


def test_a_key_finds_one_page() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(2)
    assert pool.publish(first, b"a") and not pool.publish(second, b"a")
    assert pool.match([b"a"]) == [first]
    pool.release([second])
    assert states(pool) == (1, 1, 0)


def test_a_match_ends_at_the_first_gap() -> None:
    pool = PagePool(4)
    a, c = published(pool, b"a", b"c")
    assert pool.match([b"a", b"b", b"c"]) == [a] and pool.match([b"c"]) == [c] and pool.match([]) == []


def test_misuse_is_an_assertion() -> None:
    pool = PagePool(2)
    (page,) = published(pool, b"a")
    for call in (
        lambda: pool.publish(page, b"b"),
        lambda: pool.publish(1 - page, b"b"),
        lambda: pool.release([1 - page]),
    ):
        with pytest.raises(AssertionError):
            call()
    with pytest.raises(CapacityError, match="at least 1 page, got 0"):
        PagePool(0)
