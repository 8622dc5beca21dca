"""A pool of pages under a policy: what a prompt finds there, what it adds, what has to go.

Keys form a tree, since a block is of use to prompts that share all before it. Runs of keys without a branch are one
segment, so a prompt of a hundred keys takes a handful of steps, and a segment is what the policy orders: its keys were
last used by the same prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rorqual.errors import InputError
from rorqual.planner.traces.blocks import BlockMap, Key
from rorqual.policies import LFU, LRU, TTL


class Segment:
    """A run of keys below `parent`, never empty, of `pages` pages; prompts branch only at its end."""

    __slots__ = ("children", "keys", "pages", "parent")

    def __init__(self, parent: Segment | None, keys: list[Key], pages: int) -> None:
        self.parent = parent
        self.keys = keys
        self.pages = pages
        self.children: dict[Key, Segment] | None = None


@dataclass(slots=True, kw_only=True)
class PoolCounts:
    """Pages since the start: written, evicted for room, expired; and keys evicted or expired."""

    written: int = 0
    evicted: int = 0
    expired: int = 0
    keys_gone: int = 0


class Pool:
    """Pages by key, `capacity` pages in all; about 150 bytes of our own memory a key.

    A prompt finds the longest run of its keys from its start; the pages that it misses are written, and it is the
    latest user of all its keys. Within a prompt the deepest key is the first to go: a page is useless without those
    before it. None that it found makes room for it. A prompt larger than the pool keeps its first keys that fit.
    """

    __slots__ = ("_blocks", "_policy", "_root", "capacity", "counts", "used")

    def __init__(self, capacity: int, policy: LRU[Any] | LFU[Any] | TTL[Any], blocks: BlockMap) -> None:
        if capacity < 0:
            raise InputError(f"a pool has 0 pages or more; got {capacity}")
        self.capacity = capacity
        self.used = 0
        self.counts = PoolCounts()
        self._blocks = blocks
        self._policy = policy
        self._root = Segment(None, [], 0)

    def at(self, now: int) -> None:
        """Tell the time to a policy that expires keys."""
        if isinstance(self._policy, TTL):
            for segment in self._policy.expire(now):
                self._detach(segment)
                self.used -= segment.pages
                self.counts.expired += segment.pages
                self.counts.keys_gone += len(segment.keys)

    def serve(self, keys: list[Key]) -> int:
        """Look the prompt up, use and add its pages; pages [1] found at its start.

        >>> pool = Pool(10, LRU(), BlockMap(512, 128))
        >>> pool.serve([7, 8]), pool.serve([7, 9]), pool.serve([7, 8]), pool.counts.written, pool.counts.evicted
        (0, 4, 4, 16, 8)
        """
        total = self._blocks.pages(keys)
        if total > self.capacity:
            keys = self._first_that_fit(keys)
            total = self._blocks.pages(keys)
        path, found = self._walk(keys)
        if found == len(keys):
            path.reverse()
            self._policy.touch_all(path)
            return total
        # Only the last key of a prompt can be an odd one, and it is not among those found.
        pages = found * self._blocks.full
        need = total - pages
        self._make_room(need, path)
        # What is new before what was there, deepest first: no key goes before those below it.
        self._policy.insert(self._grow(path[-1] if path else self._root, keys[found:], need))
        path.reverse()
        self._policy.touch_all(path)
        self.used += need
        self.counts.written += need
        return pages

    def _walk(self, keys: list[Key]) -> tuple[list[Segment], int]:
        """Segments along the prompt, and how many of its keys they hold; one that it leaves halfway is split there."""
        path: list[Segment] = []
        at, children = 0, self._root.children
        while at < len(keys) and children is not None and (segment := children.get(keys[at])) is not None:
            run = segment.keys
            # A key stands for all before it: the last one that is alike tells how many are.
            shared = min(len(run), len(keys) - at)
            while run[shared - 1] != keys[at + shared - 1]:
                shared -= 1
            if shared < len(run):
                segment = self._split(segment, shared)
            path.append(segment)
            at, children = at + shared, segment.children
        return path, at

    def _split(self, tail: Segment, shared: int) -> Segment:
        """The first `shared` keys as a segment of their own; the rest keeps its place in the policy's order."""
        above = tail.parent
        assert above is not None
        pages = shared * self._blocks.full
        head = self._grow(above, tail.keys[:shared], pages)
        tail.keys = tail.keys[shared:]
        tail.pages -= pages
        tail.parent = head
        head.children = {tail.keys[0]: tail}
        self._policy.insert_like(head, tail)
        return head

    @staticmethod
    def _grow(parent: Segment, keys: list[Key], pages: int) -> Segment:
        segment = Segment(parent, keys, pages)
        if parent.children is None:
            parent.children = {}
        parent.children[keys[0]] = segment
        return segment

    @staticmethod
    def _detach(segment: Segment) -> None:
        assert segment.parent is not None and segment.parent.children is not None and not segment.children
        del segment.parent.children[segment.keys[0]]

    def _make_room(self, need: int, path: list[Segment]) -> None:
        """Take the deepest keys of the next to go, no more than need be and none of the prompt's own."""
        over = self.used + need - self.capacity
        gone = freed = 0
        while freed < over:
            segment = next(segment for segment in self._policy if segment not in path)
            keep = self._kept(segment, over - freed)
            gone += len(segment.keys) - keep
            pages = keep * self._blocks.full
            freed += segment.pages - pages
            if keep:
                del segment.keys[keep:]
                segment.pages = pages
            else:
                self._policy.remove(segment)
                self._detach(segment)
        self.used -= freed
        self.counts.evicted += freed
        self.counts.keys_gone += gone

    def _kept(self, segment: Segment, over: int) -> int:
        """How many keys of a segment stay when `over` of its pages must go; its last, the odd one if any, is first."""
        return max(0, min((segment.pages - over) // self._blocks.full, len(segment.keys) - 1))

    def _first_that_fit(self, keys: list[Key]) -> list[Key]:
        left, count = self.capacity, 0
        for key in keys:
            left -= self._blocks.pages_of(key)
            if left < 0:
                break
            count += 1
        return keys[:count]

    def check_integrity(self) -> None:
        """Assert that tree, policy and pages counted agree, within the capacity."""
        held: list[Segment] = []
        below = [self._root]
        while below:
            segment = below.pop()
            for key, child in (segment.children or {}).items():
                assert child.parent is segment and child.keys[0] == key
                held.append(child)
                below.append(child)
        assert len(held) == len(self._policy) and set(held) == set(self._policy)
        assert all(segment.pages == self._blocks.pages(segment.keys) for segment in held)
        assert self.used == sum(segment.pages for segment in held) <= self.capacity
