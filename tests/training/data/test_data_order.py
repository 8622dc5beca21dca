"""Order: a function of key and place alone, each pass a shuffle of all."""

from __future__ import annotations

import hashlib

from rorqual.training.data.order import Pool, permutation

LENGTHS = [5, 40, 3, 17, 9, 26, 2, 8]


def header(document: int, start: int) -> list[int]:
    return [1]


def mixed(place: int, key: str) -> int:
    """splitmix64 in plain integers."""
    word = (place * 0x9E3779B97F4A7C15 + int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def test_permutations_are_the_order_of_a_hash() -> None:
    assert permutation(50, "seed").tolist() == sorted(range(50), key=lambda place: mixed(place + 1, "seed"))
    assert permutation(0, "seed").tolist() == []
    assert sorted(permutation(1000, "a").tolist()) == list(range(1000))
    assert permutation(1000, "a").tolist() != permutation(1000, "b").tolist()


def places(pool: Pool, indices: range, n: int) -> list[list[list[int]]]:
    found = []
    for index in indices:
        plan, place = pool.find(index, n)
        found.append(plan.pieces[plan.first[place] : plan.first[place + 1]].tolist())
    return found


def test_any_place_can_be_asked_first() -> None:
    whole = places(Pool(range(8), LENGTHS, header, "k"), range(60), 10)
    for start in (0, 1, 13, 37, 59):
        assert places(Pool(range(8), LENGTHS, header, "k"), range(start, 60), 10) == whole[start:]
    backwards = Pool(range(8), LENGTHS, header, "k")
    assert [places(backwards, range(i, i + 1), 10)[0] for i in reversed(range(60))] == whole[::-1]


def test_a_pass_holds_everything_once_and_the_next_is_another() -> None:
    pool = Pool(range(8), LENGTHS, header, "k")
    plan, _ = pool.find(0, 10)
    passes, at = [], 0
    for _ in range(3):
        plan, _ = pool.find(at, 10)
        rows = [row for sequence in places(pool, range(at, at + plan.sequences), 10) for row in sequence]
        passes.append(rows)
        at += plan.sequences
        held = sorted((document, place) for document, start, stop in rows for place in range(start, stop))
        assert held == [(document, place) for document, length in enumerate(LENGTHS) for place in range(length)]
    assert passes[0] != passes[1] != passes[2]


def test_two_lengths_do_not_disturb_each_other() -> None:
    pool, other = (Pool(range(8), LENGTHS, header, "k") for _ in range(2))
    short = places(other, range(30), 10)
    mixed = []
    for index in range(30):
        mixed += places(pool, range(index, index + 1), 10)
        places(pool, range(index, index + 1), 33)
    assert mixed == short
