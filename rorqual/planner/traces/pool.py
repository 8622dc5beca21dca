"""A pool of pages under a policy: what a prompt finds there, what it adds, what has to go.

Keys form a tree, since a block is of use to prompts that share all before it. Runs of keys without a branch are one
segment, so a prompt of a hundred keys takes a handful of steps, and a segment is what the policy orders: its keys were
last used by the same prompts. A key names all that precedes it, so a segment is found by its first key alone: the tree
needs no pointers up or down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rorqual.errors import InputError
from rorqual.planner.traces.blocks import Keys
from rorqual.policies import LFU, LRU, TTL


class Segment:
    """A run of keys, never empty, of `pages` pages; prompts branch only at its end."""

    __slots__ = ("keys", "pages")

    def __init__(self, keys: Keys, pages: int) -> None:
        self.keys = keys
        self.pages = pages


@dataclass(slots=True, kw_only=True)
class PoolCounts:
    """Pages since the start: written, evicted for room, expired; and keys evicted or expired."""

    written: int = 0
    evicted: int = 0
    expired: int = 0
    keys_gone: int = 0


class Pool:
    """Pages by key, `capacity` in all, `full` a key but for a prompt's last; about 160 bytes of our own memory a key.

    A prompt finds the longest run of its keys from its start; the pages that it misses are written, and it is the
    latest user of all its keys. Within a prompt the deepest key is the first to go: a page is useless without those
    before it. None that it found makes room for it. A prompt larger than the pool keeps its first keys that fit.
    """

    __slots__ = ("_full", "_policy", "_segments", "capacity", "counts", "used")

    def __init__(self, capacity: int, policy: LRU[Any] | LFU[Any] | TTL[Any], full: int) -> None:
        if capacity < 0:
            raise InputError(f"a pool has 0 pages or more; got {capacity}")
        self.capacity = capacity
        self.used = 0
        self.counts = PoolCounts()
        self._full = full
        self._policy = policy
        self._segments: dict[int, Segment] = {}  # by first key

    def at(self, now: int) -> None:
        """Tell the time to a policy that expires keys."""
        if isinstance(self._policy, TTL):
            for segment in self._policy.expire(now):
                self._forget(segment)
                self.used -= segment.pages
                self.counts.expired += segment.pages
                self.counts.keys_gone += len(segment.keys)

    def serve(self, keys: Keys, pages: int) -> int:
        """Look the prompt up, use and add its pages, so many in all; pages [1] found at its start.

        >>> from array import array
        >>> pool = Pool(10, LRU(), 4)
        >>> [pool.serve(array("q", keys), 8) for keys in ([7, 8], [7, 9], [7, 8])]
        [0, 4, 4]
        >>> pool.counts.written, pool.counts.evicted
        (16, 8)
        """
        if pages > self.capacity:
            keys = keys[: min(self.capacity // self._full, len(keys) - 1)]
            pages = self._full * len(keys)
        path, found = self._walk(keys)
        if found == len(keys):
            path.reverse()
            self._policy.touch_all(path)
            return pages
        # Only the last key of a prompt can be an odd one, and it is not among those found.
        there = found * self._full
        need = pages - there
        self._make_room(need, path)
        # What is new before what was there, deepest first: no key goes before those below it.
        self._policy.insert(self._add(keys[found:], need))
        path.reverse()
        self._policy.touch_all(path)
        self.used += need
        self.counts.written += need
        return there

    def _walk(self, keys: Keys) -> tuple[list[Segment], int]:
        """Segments along the prompt, and how many of its keys they hold; one that it leaves halfway is split there."""
        path: list[Segment] = []
        at, end, segments = 0, len(keys), self._segments
        while at < end and (segment := segments.get(keys[at])) is not None:
            run = segment.keys
            # A key stands for all before it: the last one that is alike tells how many are.
            shared = min(len(run), end - at)
            while run[shared - 1] != keys[at + shared - 1]:
                shared -= 1
            if shared < len(run):
                segment = self._split(segment, shared)
            path.append(segment)
            at += shared
        return path, at

    def _split(self, tail: Segment, shared: int) -> Segment:
        """The first `shared` keys as a segment of their own; the rest keeps its place in the policy's order."""
        pages = shared * self._full
        head = self._add(tail.keys[:shared], pages)
        tail.keys = tail.keys[shared:]
        tail.pages -= pages
        self._segments[tail.keys[0]] = tail
        self._policy.insert_like(head, tail)
        return head

    def _add(self, keys: Keys, pages: int) -> Segment:
        segment = self._segments[keys[0]] = Segment(keys, pages)
        return segment

    def _forget(self, segment: Segment) -> None:
        # A trace whose ids do not name what precedes them may have put another there.
        self._segments.pop(segment.keys[0], None)

    def _make_room(self, need: int, path: list[Segment]) -> None:
        """Take the deepest keys of the next to go, no more than need be and none of the prompt's own."""
        over = self.used + need - self.capacity
        if over <= 0:
            return
        gone: list[Segment] = []
        freed = keys_gone = 0
        for segment in self._policy:
            if segment in path:
                continue
            keep = self._kept(segment, over - freed)
            pages = keep * self._full
            freed += segment.pages - pages
            keys_gone += len(segment.keys) - keep
            if keep:
                del segment.keys[keep:]
                segment.pages = pages
            else:
                gone.append(segment)
            if freed >= over:
                break
        for segment in gone:
            self._policy.remove(segment)
            self._forget(segment)
        self.used -= freed
        self.counts.evicted += freed
        self.counts.keys_gone += keys_gone

    def _kept(self, segment: Segment, over: int) -> int:
        """How many keys of a segment stay when `over` of its pages must go; its last, the odd one if any, is first."""
        return max(0, min((segment.pages - over) // self._full, len(segment.keys) - 1))

    def check_integrity(self) -> None:
        """Assert that tree, policy and pages counted agree, within the capacity."""
        held = list(self._policy)
        assert all(self._segments[segment.keys[0]] is segment for segment in held)
        assert len(held) == len(self._policy) == len(self._segments)
        keys = [key for segment in held for key in segment.keys]
        assert len(set(keys)) == len(keys)
        assert all(segment.pages > self._full * (len(segment.keys) - 1) for segment in held)
        assert self.used == sum(segment.pages for segment in held) <= self.capacity
