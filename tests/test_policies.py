"""Policies against models too simple to be wrong: a list sorted anew for every victim."""

from __future__ import annotations

import doctest
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual import policies
from rorqual.errors import InputError
from rorqual.policies import LFU, LRU, TTL, make

BOUNDED = settings(max_examples=50, deadline=None, derandomize=True)
KEYS = "abcd"
CALLS = [(call, key) for call in ("insert", "touch", "remove") for key in KEYS] + [("evict", "")]


class Naive:
    """Every use of every key with the time it happened; the victim is found by looking at all of them."""

    def __init__(self, name: str, ttl: float = 0) -> None:
        self.name, self.ttl, self.now, self.tick = name, ttl, 0.0, 0
        self.uses: dict[str, int] = {}
        self.last: dict[str, tuple[float, int]] = {}

    def order(self) -> list[str]:
        return sorted(self.last, key=lambda k: (self.uses[k] if self.name == "lfu" else 0, self.last[k][1]))

    def apply(self, call: str, key: str) -> str | None:
        """What the call returns, or 'refused'."""
        self.tick += 1
        if call == "evict":
            if not self.last:
                return "refused"
            key = self.order()[0]
        elif (key in self.last) == (call == "insert"):
            return "refused"
        if call in ("evict", "remove"):
            del self.last[key], self.uses[key]
            return key if call == "evict" else None
        self.uses[key] = self.uses.get(key, 0) + 1
        self.last[key] = (self.now, self.tick)
        return None

    def expire(self, now: float) -> list[str]:
        self.now = now
        gone = [k for k in self.order() if now - self.last[k][0] >= self.ttl]
        for key in gone:
            del self.last[key], self.uses[key]
        return gone


def applied(policy: Any, call: str, key: str) -> str | None:
    try:
        if call == "evict":
            victim: str = policy.evict()
            return victim
        getattr(policy, call)(key)
    except (KeyError, AssertionError):
        return "refused"
    return None


@pytest.mark.parametrize("name", ["lru", "lfu"])
def test_every_short_history_equals_the_naive_one(name: str) -> None:
    """All 2,197 histories of three calls after three inserts, then everything evicted."""
    for calls in itertools.product(CALLS, repeat=3):
        policy, naive = make(name), Naive(name)
        for call, key in [("insert", "a"), ("insert", "b"), ("insert", "c"), *calls]:
            assert applied(policy, call, key) == naive.apply(call, key), (calls, call, key)
        assert list(policy) == naive.order(), calls
        assert [policy.evict() for _ in range(len(policy))] == naive.order(), calls


@BOUNDED
@given(name=st.sampled_from(["lru", "lfu", "ttl"]), data=st.data())
def test_long_histories_equal_the_naive_ones(name: str, data: st.DataObject) -> None:
    policy = make(name, 5 if name == "ttl" else None)
    naive, now = Naive(name, ttl=5), 0
    steps = st.one_of(st.sampled_from(CALLS), st.tuples(st.just("expire"), st.integers(0, 6)))
    for call, argument in data.draw(st.lists(steps, max_size=120)):
        if call == "expire":
            if isinstance(policy, TTL):
                now += int(argument)
                assert policy.expire(now) == naive.expire(now)
        else:
            assert applied(policy, call, str(argument)) == naive.apply(call, str(argument))
        assert list(policy) == naive.order()
        assert len(policy) == len(naive.last)
        assert all((key in policy) == (key in naive.last) for key in KEYS)
        if isinstance(policy, LFU):
            assert all(policy.frequency(key) == uses for key, uses in naive.uses.items())


@pytest.mark.parametrize("name", ["lru", "lfu", "ttl"])
def test_many_keys_at_once_are_the_same_as_one_by_one(name: str) -> None:
    ttl = 9 if name == "ttl" else None
    together, alone = make(name, ttl), make(name, ttl)
    for call, keys in (("insert", "abcd"), ("touch", "ca"), ("insert", "e"), ("touch", "ba"), ("touch", "")):
        getattr(together, f"{call}_all")(keys)
        for key in keys:
            getattr(alone, call)(key)
        assert list(together) == list(alone)
    # d and e were used once, c and b twice, a three times, which LFU alone remembers.
    assert list(together) == list("decba" if name == "lfu" else "dceba")


def test_ties_of_lfu_go_to_the_one_unused_for_longest() -> None:
    lfu = LFU[str]()
    lfu.insert_all("abc")
    for key in "bacbac":
        lfu.touch(key)
    assert [lfu.frequency(key) for key in "abc"] == [3, 3, 3]
    assert [lfu.evict() for _ in range(3)] == ["b", "a", "c"]


def test_a_frequency_is_forgotten_with_its_key() -> None:
    lfu = LFU[str]()
    lfu.insert("a")
    for _ in range(1000):
        lfu.touch("a")
    assert lfu.evict() == "a"
    lfu.insert_all("ab")
    lfu.touch("b")
    assert lfu.evict() == "a"


def test_a_lifetime_ends_at_its_last_moment_and_every_use_renews_it() -> None:
    ttl = TTL[str](10)
    ttl.insert_all("abc")
    assert ttl.expire(9) == []
    ttl.touch("b")
    assert ttl.last_use("b") == 9
    assert ttl.expire(10) == ["a", "c"]
    assert ttl.expire(18) == []
    assert ttl.expire(19) == ["b"]
    assert len(ttl) == 0


@pytest.mark.parametrize("policy", [LRU[str](), LFU[str](), TTL[str](1)])
def test_what_is_not_there(policy: LRU[str] | LFU[str] | TTL[str]) -> None:
    for call in (policy.touch, policy.remove):
        with pytest.raises(KeyError):
            call("x")
    with pytest.raises(KeyError):
        policy.evict()
    policy.insert("x")
    with pytest.raises(AssertionError):
        policy.insert("x")
    with pytest.raises(AssertionError):
        policy.insert_all("yx")


@pytest.mark.parametrize(
    ("name", "ttl", "message"),
    [
        ("fifo", None, "policy must be one of lru, lfu, ttl; got 'fifo'"),
        ("ttl", None, "policy ttl needs a time to live"),
        ("ttl", 0, "ttl must be a time above 0; got 0"),
        ("ttl", float("nan"), "ttl must be a time above 0; got nan"),
        ("lru", 5, "a time to live is for policy ttl; policy lru has none"),
    ],
)
def test_illegal_policies(name: str, ttl: float | None, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make(name, ttl)
    assert str(caught.value) == message


def test_docstring_examples() -> None:
    results = doctest.testmod(policies)
    assert results.attempted >= 12
    assert results.failed == 0
