"""The one function that picks a worker."""

from __future__ import annotations

import random

import pytest

from rorqual.disagg.cluster.routing import Candidate, route
from rorqual.errors import InputError

KEYS = [bytes([n]) for n in range(8)]


def worker(name: str, held: int = 0, load: int = 0, slots: int = 4) -> Candidate:
    return Candidate(name=name, held=held, load=load, slots=slots)


def chosen(*workers: Candidate, keys: int = 8) -> str:
    return route(KEYS[:keys], workers, page_tokens=128, window=128)


@pytest.mark.parametrize(
    ("workers", "name"),
    [
        ([worker("a", held=2), worker("b", held=5), worker("c")], "b"),
        ([worker("a", held=3, load=3), worker("b", held=2)], "a"),
        ([worker("a", held=4, load=2), worker("b", held=4, load=1)], "b"),
        ([worker("a", load=2), worker("b", load=1)], "b"),
        ([worker("b"), worker("a")], "a"),
    ],
    ids=["longest prefix", "prefix before load", "load among equals", "load without prefix", "name"],
)
def test_the_longest_stored_prefix_then_the_least_load(workers: list[Candidate], name: str) -> None:
    assert chosen(*workers) == name
    assert chosen(*reversed(workers)) == name


def test_a_prefix_of_a_window_or_less_is_none() -> None:
    """One page of 128 tokens is not adopted where W is 128: all of it would be replayed."""
    assert chosen(worker("a", held=1, load=1), worker("b")) == "b"
    assert chosen(worker("a", held=2, load=1), worker("b")) == "a"


def test_more_is_held_than_is_asked_for() -> None:
    """Pages behind the prompt's end are of no use."""
    assert chosen(worker("a", held=8, load=1), worker("b", held=3), keys=3) == "b"


def test_a_full_worker_comes_last_whatever_it_holds() -> None:
    assert chosen(worker("a", held=8, load=4), worker("b", load=3)) == "b"
    assert chosen(worker("a", held=8, load=9), worker("b", load=7), worker("c", held=2, load=7)) == "c"


def test_nobody_answers() -> None:
    with pytest.raises(InputError, match="no worker answers"):
        chosen()


def test_the_same_question_has_the_same_answer() -> None:
    draw = random.Random(7)
    for _ in range(200):
        workers = [
            worker(f"w{n}", held=draw.randrange(9), load=draw.randrange(6), slots=draw.randrange(1, 5))
            for n in range(draw.randrange(1, 6))
        ]
        first = chosen(*workers)
        draw.shuffle(workers)
        assert chosen(*workers) == first
        picked = next(own for own in workers if own.name == first)
        free = [own for own in workers if own.load < own.slots]
        assert not free or picked in free
        if picked in free and picked.held < 2:
            assert all(own.held < 2 and own.load >= picked.load for own in free)
