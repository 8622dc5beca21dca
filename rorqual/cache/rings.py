"""Window KV: one ring of packed rows a layer and slot, addressed by position.

A ring of R rows stores position p in row p % R. It is private to a sequence, never persisted, and rebuilt by replay
(SPEC 11). With drafting R = window + block, so that rejected drafts cannot overwrite what a rollback still needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.formats.codec import Packed
from rorqual.formats.spec import NumberFormat


@dataclass(slots=True)
class RingSpan:
    """The interval of positions that the rings of one slot hold. All layers of a part move together.

    `lo`: nothing below it was ever written since the reset. `hi`: next position to write. `top`: highest position
    ever written, plus one; after a rewind `top > hi`, and rows below `top - rows` are overwritten for good.
    """

    lo: int = 0
    hi: int = 0
    top: int = 0

    def reset(self, start: int) -> None:
        self.lo = self.hi = self.top = start

    def held_from(self, rows: int) -> int:
        """First position still readable in a ring of `rows` rows; reads below it are masked."""
        return max(self.lo, self.top - rows)

    def advance(self, start: int, end: int) -> None:
        assert start == self.hi, f"ring expects position {self.hi}, got {start}"
        self.hi = end
        self.top = max(self.top, end)

    def lowest(self, rows: int, need: int) -> int:
        """The lowest position to rewind to: the `need` positions before it must still be held."""
        held = self.held_from(rows)
        return held if held == self.lo else held + need

    def rewind(self, position: int) -> None:
        """Forget positions >= `position` (rejected drafts)."""
        assert self.lo <= position <= self.hi, f"rewind to {position} outside [{self.lo}, {self.hi}]"
        self.hi = position


class WindowRings:
    """uint8 [layers, slots, rows, row_bytes]: codes then scales of every row.

    For example the release with a block of 5: 40 x 133 x 528 = 2,808,960 bytes a slot.
    """

    def __init__(
        self, layers: int, slots: int, rows: int, width: int, fmt: NumberFormat, device: torch.device | str = "cpu"
    ) -> None:
        self.fmt = fmt
        self.rows = rows
        self.width = width
        self.code_bytes = fmt.code_bytes(width)
        self.data = torch.zeros(layers, slots, rows, fmt.row_bytes(width), dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def write(self, layer: int, slot: int, start: int, rows: Packed) -> None:
        """Store positions [start, start + n); of more than a ring's worth only the last `self.rows` are kept."""
        count = rows.codes.shape[0]
        skip = max(0, count - self.rows)
        index = torch.arange(start + skip, start + count, device=self.data.device) % self.rows
        ring = self.data[layer, slot]
        ring[index, : self.code_bytes] = rows.codes[skip:]
        ring[index, self.code_bytes :] = rows.scales[skip:]

    def write_rows(self, layer: int, slots_T: Tensor, positions_T: Tensor, rows: Packed) -> None:
        """Store one position of each given slot; no two rows meet in one place of a ring."""
        ring, index = self.data[layer], positions_T % self.rows
        ring[slots_T, index, : self.code_bytes] = rows.codes
        ring[slots_T, index, self.code_bytes :] = rows.scales

    def read(self, layer: int, slot: int, start: int, end: int) -> Packed:
        """Codes and scales of positions [start, end); the caller asks only for what the span holds."""
        assert end - start <= self.rows
        index = torch.arange(start, end, device=self.data.device) % self.rows
        rows: Tensor = self.data[layer, slot][index]
        return Packed(rows[:, : self.code_bytes].contiguous(), rows[:, self.code_bytes :].contiguous())

    def poison(self, slot: int) -> None:
        """NaN scales in a freed slot: a read outside the held interval shows in any output (tests)."""
        self.data[:, slot] = 0xFF
