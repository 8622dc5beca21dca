"""Room for messages in one block of memory: runs of bytes by first fit, each at a multiple of an alignment."""

from __future__ import annotations

import bisect


class Arena:
    """[start, end), of which runs are taken. Neighbours that are free are one.

    >>> arena = Arena(0, 256, 64)
    >>> arena.take(100), arena.take(64), arena.take(128)
    (0, 128, None)
    >>> arena.give(0, 100); arena.take(128)
    0
    """

    def __init__(self, start: int, end: int, alignment: int) -> None:
        assert 0 <= start <= end and start % alignment == 0
        self.start, self.end, self.alignment = start, end - end % alignment, alignment
        self._free = [(start, self.end)] if self.end > start else []
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Where `size` bytes begin; None where no free run is long enough."""
        need = self._rounded(size)
        for number, (start, end) in enumerate(self._free):
            if end - start >= need:
                self._free[number : number + 1] = [(start + need, end)] if end - start > need else []
                self._taken[start] = need
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Back what `take` gave."""
        need = self._taken.pop(start)
        assert need == self._rounded(size), (need, size)
        end = start + need
        number = bisect.bisect(self._free, (start, end))
        if number < len(self._free) and self._free[number][0] == end:
            end = self._free.pop(number)[1]
        if number and self._free[number - 1][1] == start:
            number -= 1
            start = self._free.pop(number)[0]
        self._free.insert(number, (start, end))

    def check_integrity(self) -> None:
        """Free and taken runs tile the block, and no two free ones touch."""
        runs = sorted([(*run, "free") for run in self._free] + [(a, a + n, "taken") for a, n in self._taken.items()])
        at, before = self.start, "taken"
        for start, end, kind in runs:
            assert start == at < end, f"{kind} [{start}, {end}) after {at}"
            assert kind == "taken" or before == "taken", f"two free runs meet at {at}"
            at, before = end, kind
        assert at == self.end, f"{at} is not the end {self.end}"

    def _rounded(self, size: int) -> int:
        assert size > 0
        return -(-size // self.alignment) * self.alignment
