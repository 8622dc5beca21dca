"""Slots of private state: rings, tails, n-gram history, draft windows. One a sequence, gone with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rorqual.errors import CapacityError


class SlotPool:
    """`slots` slots, numbered from 0; the one free for longest is given first.

    freed: as of `PagePool`.
    """

    def __init__(self, slots: int, freed: Callable[[int], None] | None = None) -> None:
        if slots < 1:
            raise CapacityError(f"a slot pool needs at least 1 slot, got {slots}")
        self.slots = slots
        self._freed = freed
        self._free = deque(range(slots))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise CapacityError(f"all {self.slots} slots are taken")
        slot = self._free.popleft()
        self._used.add(slot)
        return slot

    def release(self, slot: int) -> None:
        assert slot in self._used, f"slot {slot} is not taken"
        self._used.remove(slot)
        self._free.append(slot)
        if self._freed is not None:
            self._freed(slot)

    def check_integrity(self) -> None:
        assert len(self._free) == len(set(self._free)) and not self._used & set(self._free)
        assert self._used | set(self._free) == set(range(self.slots))
