"""What one step has room for: rows that may share it with any others, and one long chunk."""

from __future__ import annotations

from dataclasses import dataclass

from rorqual.errors import InputError
from rorqual.model.rows import SHORT_SEGMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What a step and the queue are bounded by.

    step_tokens: rows of a step beside a long chunk: decode and verification rows, and short prefills.
    chunk_tokens: rows of a long chunk. A step has at most the sum of the two.
    patience: steps after which a waiting request goes before every other.
    waiting: requests that may wait; None for any number.
    """

    step_tokens: int = 128
    chunk_tokens: int = 512
    patience: int = 1000
    waiting: int | None = None

    def __post_init__(self) -> None:
        for name in ("step_tokens", "chunk_tokens", "patience", "waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: {value} is not legal; legal: at least 1")


class Room:
    """What is left of a step.

    >>> room = Room(SchedulerLimits(step_tokens=40, chunk_tokens=100))
    >>> room.take_short(6), room.take(260), room.take(33), room.take(32), room.take(10)
    (6, 100, 0, 32, 2)
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._short, self._long, self._chunk = limits.step_tokens, limits.chunk_tokens, limits.chunk_tokens

    @property
    def any(self) -> bool:
        return self._short > 0 or self._long > 0

    def take(self, rows: int) -> int:
        """Prefill rows to plan of a request that could do so many; 0 where it has to wait for the next step.

        A long chunk is never made shorter for want of room: where it ends would depend on its neighbours. A short one
        may be, and is never made longer than a chunk: more than `SHORT_SEGMENT` rows would share others' products.
        """
        rows = min(rows, self._chunk)
        if rows > SHORT_SEGMENT:
            taken, self._long = min(rows, self._long), 0
            return taken
        return self.take_short(rows)

    def take_whole(self, rows: int) -> int:
        """Rows that run at once or not in this step: all, or 0. More than `SHORT_SEGMENT` share nobody's products."""
        if rows <= min(SHORT_SEGMENT, self._short):
            return self.take_short(rows)
        if self._long < self._chunk:
            return 0
        self._long = 0
        return rows

    def take_short(self, rows: int) -> int:
        """Decode and verification rows to plan, whatever a chunk is."""
        taken = min(rows, self._short)
        self._short -= taken
        return taken
