"""A check changes with every bit that it covers."""

from __future__ import annotations

import random

import pytest

from rorqual.store.checksum import CHECK_BYTES, page_check

RELEASE = 113_920


@pytest.mark.parametrize("size", [1, 7, 8, 241, 2100, RELEASE])
def test_any_kind_of_buffer_has_the_same_check(size: int) -> None:
    page = random.Random(size).randbytes(size)
    found = page_check(b"key", page)
    assert len(found) == CHECK_BYTES
    assert found == page_check(b"key", bytearray(page)) == page_check(b"key", memoryview(page))
    assert found != page_check(b"kez", page) and found != page_check(b"ke", b"y" + page)


def test_it_is_the_same_on_every_machine() -> None:
    """A stored page must be found by a later release, on another processor."""
    assert page_check(b"key", bytes(range(256)) * 9 + b"rest!").hex() == "c5dfa330c7f89188fbada66d46205f21"


def test_every_flipped_bit_changes_it() -> None:
    page = bytearray(random.Random(0).randbytes(2600))
    seen = {page_check(b"key", page)}
    for bit in range(8 * len(page)):
        page[bit // 8] ^= 1 << bit % 8
        seen.add(page_check(b"key", page))
        page[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 8 * len(page)


def test_torn_and_stale_pages_are_told() -> None:
    """Blocks that change places, blocks of zeros, blocks of another page."""
    draw = random.Random(1)
    sound = draw.randbytes(RELEASE)
    seen = {page_check(b"key", sound), page_check(b"key", sound[512:1024] + sound[:512] + sound[1024:])}
    for start in (0, 512, 4096, RELEASE - 4096):
        for block in (bytes(512), draw.randbytes(4096)):
            page = bytearray(sound)
            page[start : start + len(block)] = block
            seen.add(page_check(b"key", page))
    assert len(seen) == 2 + 4 * 2
