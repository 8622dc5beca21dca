"""A slot belongs to one sequence at a time."""

from __future__ import annotations

import pytest

from rorqual.errors import CapacityError
from rorqual.pool.slots import SlotPool


def test_slots_come_back() -> None:
    gone: list[int] = []
    pool = SlotPool(2, gone.append)
    assert [pool.allocate(), pool.allocate()] == [0, 1] and pool.free == 0
    with pytest.raises(CapacityError, match="all 2 slots are taken"):
        pool.allocate()
    pool.release(1)
    pool.check_integrity()
    assert gone == [1] and pool.allocate() == 1
    with pytest.raises(AssertionError):
        SlotPool(1).release(0)
    with pytest.raises(CapacityError, match="at least 1 slot, got 0"):
        SlotPool(0)
