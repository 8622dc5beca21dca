"""A check changes with every bit that it covers."""

from __future__ import annotations

import random

import pytest

from rorqual.store.checksum import CHECK_BYTES, COLUMNS, PageCheck, compiled_hash, plain_hash

RELEASE = 113_920
ROW = 8 * COLUMNS
SIZES = [1, 7, 8, 9, ROW - 1, ROW, ROW + 1, 2100, RELEASE]


@pytest.mark.parametrize("size", SIZES)
def test_any_kind_of_buffer_has_the_same_check(size: int) -> None:
    page = random.Random(size).randbytes(size)
    for check in (PageCheck(size, plain_hash), PageCheck(size, compiled_hash())):
        found = check(b"key", page)
        assert len(found) == CHECK_BYTES
        assert found == check(b"key", bytearray(page)) == check(b"key", memoryview(page))
        assert found != check(b"kez", page) and found != check(b"ke", page)


def test_both_ways_agree() -> None:
    draw = random.Random(3)
    compiled = compiled_hash()
    for size in (*SIZES, *(draw.randrange(1, 5000) for _ in range(40))):
        for page in (draw.randbytes(size), bytes(size), b"\xff" * size):
            assert PageCheck(size, plain_hash)(b"key", page) == PageCheck(size, compiled)(b"key", page), size


def test_it_is_the_same_on_every_machine() -> None:
    """A stored page must be found by a later release, on another processor."""
    assert (
        PageCheck(2309, plain_hash)(b"key", bytes(range(256)) * 9 + b"rest!").hex()
        == "2e4be23782c5efa9066f122af88e90c1a9ab908a"
    )


def test_every_flipped_bit_changes_it() -> None:
    page = bytearray(random.Random(0).randbytes(2 * ROW + 53))
    check = PageCheck(len(page), compiled_hash())
    seen = {check(b"key", page)}
    for bit in range(8 * len(page)):
        page[bit // 8] ^= 1 << bit % 8
        seen.add(check(b"key", page))
        page[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 8 * len(page)


def test_pairs_of_flipped_bits_change_it() -> None:
    """Among them the same bit twice in a row or a column, and the highest ones, which plain sums miss."""
    page = bytearray(random.Random(0).randbytes(4 * ROW))
    check = PageCheck(len(page), compiled_hash())
    sound = check(b"key", page)
    draw = random.Random(5)
    for _ in range(3000):
        first, away = draw.randrange(8 * len(page)), draw.choice((64, 128, 8 * ROW, 16 * ROW, draw.randrange(1, 9999)))
        bits = [first | draw.choice((0, 63)), (first + away) % (8 * len(page)) | draw.choice((0, 63))]
        for bit in bits:
            page[bit // 8] ^= 1 << bit % 8
        assert check(b"key", page) != sound or bits[0] == bits[1]
        for bit in bits:
            page[bit // 8] ^= 1 << bit % 8


def test_what_plain_sums_miss_is_caught() -> None:
    """Words and rows that change places, blocks of zeros, stale blocks."""
    draw = random.Random(1)
    sound = bytearray(draw.randbytes(RELEASE))
    check = PageCheck(RELEASE, compiled_hash())
    seen = {check(b"key", sound)}

    def changed(start: int, new: bytes) -> None:
        page = bytearray(sound)
        page[start : start + len(new)] = new
        assert page != sound
        found = check(b"key", page)
        assert found not in seen
        seen.add(found)

    words = [bytes(sound[i : i + 8]) for i in range(0, 4 * ROW, 8)]
    changed(0, words[1] + words[0])
    changed(0, words[COLUMNS] + bytes(sound[8:ROW]) + words[0])
    changed(0, bytes(sound[ROW : 2 * ROW] + sound[:ROW]))
    for start in (0, 512, 4096, RELEASE - 4096):
        changed(start, bytes(512))
        changed(start, draw.randbytes(4096))
