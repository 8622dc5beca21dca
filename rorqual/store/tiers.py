"""Several stores as one, the quickest first: memory over disk over a remote one."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from rorqual.errors import InputError
from rorqual.store.interface import PageBytes, PageStore, StoreIdentity, StoreStat

SUMMED = ("pages", "bytes", "used", "dropped", "evicted", "expired", "damaged")


class Tiers:
    """A page is put into every tier, and got from the first that has it; those above take a copy then.

    Raises:
        InputError: no tier, or tiers of different identities.
    """

    def __init__(self, *tiers: PageStore) -> None:
        if not tiers:
            raise InputError("store: has no tier; legal: at least one of memory, disk and remote")
        first = tiers[0].identity
        for tier in tiers:
            if tier.identity != first:
                raise InputError(f"store: tiers of {first} and of {tier.identity}; legal: one identity")
        self.tiers = tiers
        self._lock = Lock()
        self._puts = self._gets = self._hits = 0

    @property
    def identity(self) -> StoreIdentity:
        return self.tiers[0].identity

    def put(self, key: bytes, page: PageBytes) -> bool:
        """True where any tier keeps it."""
        copy = bytes(page)  # once, for all tiers
        with self._lock:
            self._puts += 1
        kept = [tier.put(key, copy) for tier in self.tiers]
        return any(kept)

    def get(self, key: bytes) -> bytes | None:
        found = None
        for depth, tier in enumerate(self.tiers):
            found = tier.get(key)
            if found is not None:
                for above in self.tiers[:depth]:
                    above.put(key, found)
                break
        with self._lock:
            self._gets += 1
            self._hits += found is not None
        return found

    def match(self, keys: Sequence[bytes]) -> int:
        """Pages may be found in turns, one in memory and the next on disk; a slow tier is asked for the rest only."""
        found = 0
        while found < len(keys):
            rest = keys[found:]
            more = next((count for tier in self.tiers if (count := tier.match(rest))), 0)
            if not more:
                break
            found += more
        return found

    def delete(self, key: bytes) -> bool:
        there = [tier.delete(key) for tier in self.tiers]
        return any(there)

    def stat(self) -> StoreStat:
        """Calls of this store; all else summed over the tiers, where a page that two of them hold counts twice."""
        stats = [tier.stat() for tier in self.tiers]
        capacities = [stat.capacity for stat in stats if stat.capacity is not None]
        with self._lock:
            calls = {"puts": self._puts, "gets": self._gets, "hits": self._hits}
        return StoreStat(
            capacity=sum(capacities) if len(capacities) == len(stats) else None,
            **calls,
            **{name: sum(getattr(stat, name) for stat in stats) for name in SUMMED},
        )

    def flush(self) -> None:
        for tier in self.tiers:
            tier.flush()

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()
