"""The arena gives apart runs, takes them back, and forgets nothing."""

from __future__ import annotations

import itertools
import random

import pytest

from rorqual.disagg.arena import Arena


@pytest.mark.parametrize("seed", range(20))
def test_runs_lie_apart_and_all_come_back(seed: int) -> None:
    draw = random.Random(seed)
    arena = Arena(128, 128 + 64 * 40, 64)
    held: dict[int, int] = {}
    for _ in range(300):
        if held and draw.random() < 0.5:
            start = draw.choice(list(held))
            arena.give(start, held.pop(start))
        else:
            size = draw.randint(1, 500)
            start_or_none = arena.take(size)
            if start_or_none is not None:
                held[start_or_none] = size
        arena.check_integrity()
        runs = sorted((start, start + size) for start, size in held.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(runs))
        assert all(start >= 128 and end <= 128 + 64 * 40 and start % 64 == 0 for start, end in runs)
    for start, size in held.items():
        arena.give(start, size)
    arena.check_integrity()
    assert arena.take(64 * 40) == 128, "one free run again"


def test_no_run_is_long_enough() -> None:
    arena = Arena(0, 256, 64)
    first, second = arena.take(64), arena.take(64)
    assert (first, second) == (0, 64)
    arena.give(0, 64)
    assert arena.take(192) is None, "128 behind, 64 in front: never together"
    assert arena.take(128) == 128
    with pytest.raises(KeyError):
        arena.give(0, 64)
