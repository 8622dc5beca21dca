"""The fetcher alone: what it asks a store for, in which order, how much it holds, and when it gives up."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from rorqual.engine import fetch as module
from rorqual.engine.fetch import Fetch, Fetcher
from rorqual.store.interface import PageBytes, StoreIdentity, StoreStat

SIZE = 4


class Told:
    """A store that writes down what it is asked. Keys are single bytes, and so are the pages' contents."""

    def __init__(self, keys: bytes) -> None:
        self.keys = {bytes([key]) for key in keys}
        self.asked: list[str] = []
        self.fails = False

    @property
    def identity(self) -> StoreIdentity:
        return StoreIdentity(fingerprint="m", page_tokens=1, page_bytes=SIZE)

    def put(self, key: bytes, page: PageBytes) -> bool:
        return False

    def get(self, key: bytes) -> bytes | None:
        self.asked.append(key.decode())
        if self.fails:
            raise OSError("broken")
        return key * SIZE if key in self.keys else None

    def match(self, keys: Sequence[bytes]) -> int:
        self.asked.append("?" + b"".join(keys).decode())
        if self.fails:
            raise OSError("broken")
        return next((at for at, key in enumerate(keys) if key not in self.keys), len(keys))

    def delete(self, key: bytes) -> bool:
        return False

    def stat(self) -> StoreStat:
        return StoreStat()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Still(Fetcher):
    """Without a thread: who turns it says when."""

    def _wake(self) -> None:
        pass


def of(keys: str, first: int = 0, least: int = 0) -> Fetch:
    """The fetch of a request whose first pages are on the device."""
    return Fetch(
        keys=[bytes([ord(key)]) for key in keys],
        places=range(first, first + len(keys)),
        pages=first + len(keys),
        least=least,
    )


def arrived(fetch: Fetch) -> str:
    assert all(blob == key * SIZE for key, blob in fetch.blobs.items())
    return b"".join(fetch.blobs).decode()


def finish(fetcher: Fetcher) -> None:
    while fetcher.turn():
        pass


def test_look_ups_come_first_then_pages_in_the_order_of_the_queue() -> None:
    store = Told(b"abcdxy")
    fetcher = Still(store, SIZE)
    fetches = [of("ab"), of("xyz", first=3), of("cd")]
    for fetch in fetches:
        fetcher.add(fetch)
    fetcher.order([fetches[2], fetches[0]])
    finish(fetcher)
    assert store.asked == ["?cd", "?ab", "?xyz", "c", "d", "a", "b", "x", "y"]
    assert [arrived(fetch) for fetch in fetches] == ["ab", "xy", "cd"]
    assert [fetch.reach for fetch in fetches] == [2, 5, 2] and all(fetch.done for fetch in fetches)
    assert fetcher.held == 6 and fetcher.turns == 9


@pytest.mark.parametrize(("keys", "first", "least", "asked"), [("abz", 0, 2, 0), ("abz", 1, 2, 2), ("zab", 9, 2, 0)])
def test_what_is_of_no_use_is_not_read(keys: str, first: int, least: int, asked: int) -> None:
    """A window or less; where the device has more than that, nothing is missing in front."""
    store = Told(b"ab")
    fetcher, fetch = Still(store, SIZE), of(keys, first, least)
    fetcher.add(fetch)
    finish(fetcher)
    assert len(store.asked) == 1 + asked and fetch.done


def test_a_page_that_is_lost_ends_its_fetch() -> None:
    store = Told(b"abc")
    fetcher, fetch = Still(store, SIZE), of("abc")
    fetcher.add(fetch)
    assert fetcher.turn() and fetch.wanted == 3
    store.keys.discard(b"b")
    finish(fetcher)
    assert (arrived(fetch), fetch.done, store.asked[-1]) == ("a", True, "b")


def test_a_store_that_fails_has_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = Told(b"abc")
    fetcher, (first, second) = Still(store, SIZE), (of("abc"), of("ab"))
    fetcher.add(first)
    assert fetcher.turn() and fetcher.turn()
    store.fails = True
    fetcher.add(second)
    finish(fetcher)
    assert (arrived(first), arrived(second)) == ("a", "") and first.done and second.done
    assert caplog.text.count("store: a call failed") == 2


def test_the_first_takes_room_from_those_behind_it() -> None:
    fetcher = Still(Told(b"abcdef"), SIZE, 3 * SIZE + 1)
    behind, claimed = of("ab"), of("c")
    for fetch in (behind, claimed):
        fetcher.add(fetch)
    finish(fetcher)
    assert fetcher.claim(claimed) and fetcher.held == 3
    first = of("def")
    fetcher.add(first)
    fetcher.order([first])
    finish(fetcher)
    # What is about to be used is left alone; the rest of the first has to wait.
    assert (arrived(first), arrived(behind), arrived(claimed)) == ("de", "", "c")
    assert not first.done and not behind.done and not fetcher.claim(first)
    fetcher.drop(claimed)
    finish(fetcher)
    assert arrived(first) == "def" and first.done and fetcher.held == 3
    fetcher.drop(first)
    finish(fetcher)
    assert arrived(behind) == "ab" and fetcher.held == 2


def test_a_prefix_that_is_longer_than_all_room_has_it_alone() -> None:
    fetcher, (long, next_one) = Still(Told(b"abcdefg"), SIZE, 2 * SIZE), (of("abcdef"), of("g"))
    for fetch in (long, next_one):
        fetcher.add(fetch)
    finish(fetcher)
    assert arrived(long) == "abcdef" and long.done and long.reach == 6
    assert next_one.wanted == 1 and not next_one.done
    fetcher.drop(long)
    finish(fetcher)
    assert arrived(next_one) == "g"


def test_what_is_noticed_comes_last_and_what_is_lacking_is_told_once() -> None:
    store = Told(b"abcd")
    fetcher, fetch = Still(store, SIZE), of("cd")
    for keys in ("abzy", "ab"):
        fetcher.notice([bytes([ord(key)]) for key in keys])
    fetcher.add(fetch)
    finish(fetcher)
    assert store.asked == ["?cd", "c", "d", "?abzy", "?ab"]
    assert fetcher.lacking(1) == [b"z"] and fetcher.lacking(9) == [b"y"] and fetcher.lacking(9) == []


def test_stopped_and_dropped_fetches_get_no_more() -> None:
    fetcher, (one, two) = Still(Told(b"abcd"), SIZE), (of("ab"), of("cd"))
    for fetch in (one, two):
        fetcher.add(fetch)
    for _ in range(3):
        fetcher.turn()
    fetcher.stop(one)
    fetcher.drop(two)
    finish(fetcher)
    assert (arrived(one), arrived(two)) == ("a", "") and fetcher.held == 1
    fetcher.drop(one)
    assert fetcher.held == 0 and not fetcher.turn()


def test_the_thread_is_there_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends by itself, and another one takes up what comes later, or what had no room."""
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)

    def ended() -> bool:
        for thread in threading.enumerate():
            if thread.name == "rorqual-fetch":
                thread.join(60)
        return fetcher._thread is None

    fetcher = Fetcher(Told(b"abcd"), SIZE, 2 * SIZE)
    assert ended()
    first, second = of("ab"), of("cd")
    fetcher.add(first)
    fetcher.wait([first], 60)
    assert first.done and ended()
    fetcher.add(second)
    assert ended() and not second.done and second.wanted == 2
    fetcher.drop(first)
    fetcher.wait([second], 60)
    assert arrived(second) == "cd" and ended()
