"""Which key goes first when room is needed: LRU, LFU and TTL as state machines over hashable keys.

A policy knows keys and the order among them; bytes, pages and clocks belong to whoever holds it. Every call on one key
is O(1). The same calls serve all three:

    insert(key)               a key that is not there; it counts as used once
    insert_like(key, other)   the same, but with as many uses as `other` has: a part split off from it
    touch(key)                a use of a key that is there
    evict()                   removes the next to go and returns it
    remove(key)               takes out any key

A missing key, and a victim from an empty policy, raise KeyError. `..._all` does the same for many keys in their order:
the last one is the latest. Iterating yields the keys in the order in which they would be evicted; a holder that may not
lose some of them takes the first other one and removes it.

A holder of prefix chains makes room first, then inserts the new blocks and touches those that were there, each time
deepest first: then no block goes before those that are useless without it, under any of the three.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from rorqual.errors import InputError

K = TypeVar("K", bound=Hashable)

POLICIES = ("lru", "lfu", "ttl")
"""Their names, for options."""


class Policy(Protocol[K]):
    """What a pool asks of any of the three."""

    def __len__(self) -> int: ...
    def __contains__(self, key: object, /) -> bool: ...
    def __iter__(self) -> Iterator[K]: ...
    def insert(self, key: K) -> None: ...
    def insert_like(self, key: K, other: K) -> None: ...
    def touch(self, key: K) -> None: ...
    def evict(self) -> K: ...
    def remove(self, key: K) -> None: ...
    def insert_all(self, keys: Iterable[K]) -> None: ...
    def touch_all(self, keys: Iterable[K]) -> None: ...


def make(name: str, ttl: int | float | None = None) -> LRU[Hashable] | LFU[Hashable] | TTL[Hashable]:
    """The policy of that name, empty. `ttl` is asked for by "ttl", in the holder's own unit of time, and by no other.

    Raises:
        InputError: an unknown name, a lifetime that is missing, not positive, or given to a policy without one.

    >>> type(make("lfu")).__name__, type(make("ttl", 300)).__name__
    ('LFU', 'TTL')
    """
    if name not in POLICIES:
        raise InputError(f"policy must be one of {', '.join(POLICIES)}; got {name!r}")
    if name == "ttl":
        if ttl is None:
            raise InputError("policy ttl needs a time to live")
        return TTL(ttl)
    if ttl is not None:
        raise InputError(f"a time to live is for policy ttl; policy {name} has none")
    return LRU() if name == "lru" else LFU()


class LRU(Generic[K]):
    """The key unused for longest goes first.

    >>> lru = LRU[str]()
    >>> lru.insert_all("abc")
    >>> lru.touch("a")
    >>> lru.evict(), list(lru)
    ('b', ['c', 'a'])
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object, /) -> bool:
        return key in self._order

    def __iter__(self) -> Iterator[K]:
        return iter(self._order)

    def insert(self, key: K) -> None:
        assert key not in self._order, key
        self._order[key] = None

    def insert_like(self, key: K, other: K) -> None:
        self.insert(key)

    def touch(self, key: K) -> None:
        self._order.move_to_end(key)

    def evict(self) -> K:
        return self._order.popitem(last=False)[0]

    def remove(self, key: K) -> None:
        del self._order[key]

    def insert_all(self, keys: Iterable[K]) -> None:
        order = self._order
        for key in keys:
            assert key not in order, key
            order[key] = None

    def touch_all(self, keys: Iterable[K]) -> None:
        _each(self._order.move_to_end, keys)


class TTL(Generic[K]):
    """A key lives for `ttl` after its last use; within that, the one unused for longest goes first.

    Time is told by `expire(now)`, in any unit, and stands still between two calls. Every use renews a lifetime, so the
    order of expiry is the order of use.

    >>> ttl = TTL[str](10)
    >>> ttl.expire(0)
    []
    >>> ttl.insert_all("ab")
    >>> ttl.expire(9)
    []
    >>> ttl.touch("a")
    >>> ttl.expire(10), list(ttl)
    (['b'], ['a'])
    """

    __slots__ = ("_now", "_order", "ttl")

    def __init__(self, ttl: int | float) -> None:
        if not ttl > 0:
            raise InputError(f"ttl must be a time above 0; got {ttl!r}")
        self.ttl = ttl
        self._now: int | float = 0
        self._order: OrderedDict[K, int | float] = OrderedDict()  # key -> last use, oldest first

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object, /) -> bool:
        return key in self._order

    def __iter__(self) -> Iterator[K]:
        return iter(self._order)

    def expire(self, now: int | float) -> list[K]:
        """Set the time and remove the keys whose lifetime has passed, oldest first. Time never runs backwards."""
        assert now >= self._now, (now, self._now)
        self._now = now
        gone: list[K] = []
        for key, used in self._order.items():
            if now - used < self.ttl:
                break
            gone.append(key)
        for key in gone:
            del self._order[key]
        return gone

    def last_use(self, key: K) -> int | float:
        """The time that was told when the key was last used."""
        return self._order[key]

    def insert(self, key: K) -> None:
        assert key not in self._order, key
        self._order[key] = self._now

    def insert_like(self, key: K, other: K) -> None:
        self.insert(key)

    def touch(self, key: K) -> None:
        self._order.move_to_end(key)
        self._order[key] = self._now

    def evict(self) -> K:
        return self._order.popitem(last=False)[0]

    def remove(self, key: K) -> None:
        del self._order[key]

    def insert_all(self, keys: Iterable[K]) -> None:
        _each(self.insert, keys)

    def touch_all(self, keys: Iterable[K]) -> None:
        _each(self.touch, keys)


class _Bucket(Generic[K]):
    """The keys of one frequency, latest use last, between the buckets of the next lower and higher frequency in use."""

    __slots__ = ("frequency", "higher", "keys", "lower")

    def __init__(self, frequency: int) -> None:
        self.frequency = frequency
        self.keys: OrderedDict[K, None] = OrderedDict()
        self.lower: _Bucket[K] = self
        self.higher: _Bucket[K] = self


class LFU(Generic[K]):
    """The key used least often goes first; of equal ones the one unused for longest (oldest first).

    Frequencies are kept while a key is in and forgotten when it leaves. Buckets form a ring around a head of frequency
    0, so the rarest is always next to the head, however far apart the frequencies are.

    >>> lfu = LFU[str]()
    >>> lfu.insert_all("abc")
    >>> lfu.touch("a")
    >>> lfu.evict(), lfu.frequency("a"), list(lfu)
    ('b', 2, ['c', 'a'])
    """

    __slots__ = ("_bucket", "_head")

    def __init__(self) -> None:
        self._head: _Bucket[K] = _Bucket(0)
        self._bucket: dict[K, _Bucket[K]] = {}

    def __len__(self) -> int:
        return len(self._bucket)

    def __contains__(self, key: object, /) -> bool:
        return key in self._bucket

    def __iter__(self) -> Iterator[K]:
        bucket = self._head.higher
        while bucket is not self._head:
            yield from bucket.keys
            bucket = bucket.higher

    def frequency(self, key: K) -> int:
        """Uses since the key was inserted, that one included."""
        return self._bucket[key].frequency

    def insert(self, key: K) -> None:
        assert key not in self._bucket, key
        self._place(key, self._head, 1)

    def insert_like(self, key: K, other: K) -> None:
        assert key not in self._bucket, key
        self._place(key, self._bucket[other].lower, self._bucket[other].frequency)

    def touch(self, key: K) -> None:
        bucket = self._bucket[key]
        self._place(key, bucket, bucket.frequency + 1)
        self._leave(key, bucket)

    def evict(self) -> K:
        for key in self:
            self.remove(key)
            return key
        raise KeyError("there is no key to evict")

    def remove(self, key: K) -> None:
        self._leave(key, self._bucket.pop(key))

    def insert_all(self, keys: Iterable[K]) -> None:
        _each(self.insert, keys)

    def touch_all(self, keys: Iterable[K]) -> None:
        _each(self.touch, keys)

    def _place(self, key: K, below: _Bucket[K], frequency: int) -> None:
        """Put the key into the bucket after `below`, a new one if that is not of this frequency."""
        bucket = below.higher
        if bucket.frequency != frequency:
            bucket = _Bucket(frequency)
            bucket.lower, bucket.higher = below, below.higher
            below.higher.lower = below.higher = bucket
        bucket.keys[key] = None
        self._bucket[key] = bucket

    @staticmethod
    def _leave(key: K, bucket: _Bucket[K]) -> None:
        del bucket.keys[key]
        if not bucket.keys:
            bucket.lower.higher, bucket.higher.lower = bucket.higher, bucket.lower


def _each(call: Callable[[K], object], keys: Iterable[K]) -> None:
    """A call for each key, its results dropped, without a Python frame a key where the call has none."""
    deque(map(call, keys), maxlen=0)
