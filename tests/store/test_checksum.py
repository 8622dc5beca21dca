"""A check changes with every bit that it covers."""

from __future__ import annotations

import random

import pytest

from rorqual.store.checksum import CHECK_BYTES, ROW, check

RELEASE = 113_920


@pytest.mark.parametrize("size", [0, 1, 7, 8, ROW - 1, ROW, ROW + 1, 2100, RELEASE])
def test_any_kind_of_buffer_has_the_same_check(size: int) -> None:
    page = random.Random(size).randbytes(size)
    found = check(b"key", page)
    assert len(found) == CHECK_BYTES
    assert found == check(b"key", bytearray(page)) == check(b"key", memoryview(page))
    assert found != check(b"kez", page) and found != check(b"ke", page) and found != check(b"key", page + b"\0")


def test_it_is_the_same_on_every_machine() -> None:
    """A stored page must be found by a later release, on another processor."""
    assert check(b"key", bytes(range(256)) * 9).hex() == "69deac3ae4aac6943dcb3ad259b4e3a4"


def test_every_flipped_bit_changes_it() -> None:
    page = bytearray(random.Random(0).randbytes(2 * ROW + 52))
    sound = check(b"key", page)
    for bit in range(8 * len(page)):
        page[bit // 8] ^= 1 << bit % 8
        assert check(b"key", page) != sound, bit
        page[bit // 8] ^= 1 << bit % 8


def test_what_plain_sums_miss_is_caught() -> None:
    """Words that change places, the same bit twice, the highest bits, blocks of zeros, a stale block."""
    draw = random.Random(1)
    sound = bytearray(draw.randbytes(RELEASE))
    seen = {check(b"key", sound)}

    def changed(start: int, new: bytes) -> None:
        page = bytearray(sound)
        page[start : start + len(new)] = new
        assert page != sound
        found = check(b"key", page)
        assert found not in seen
        seen.add(found)

    words = [bytes(sound[i : i + 8]) for i in range(0, 4 * ROW, 8)]
    changed(0, words[1] + words[0])  # in one row
    changed(0, words[ROW // 8] + bytes(sound[8:ROW]) + words[0])  # in one column
    changed(0, bytes(sound[ROW : 2 * ROW] + sound[:ROW]))  # whole rows
    for start in (0, 512, 4096, RELEASE - 4096):
        changed(start, bytes(512))
        changed(start, draw.randbytes(4096))
    both = bytearray(sound[: ROW + 8])
    both[7] ^= 0x80
    both[15] ^= 0x80  # the highest bit of two words of a row
    changed(0, bytes(both))
    both[ROW + 7] ^= 0x80  # and of a column
    changed(0, bytes(both))
