"""The rows of one run of layers: which positions of which sequences, and what never changes from layer to layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rorqual.model.rope import Rotary
from rorqual.ops.rowwise import joined

# T rows of the run, L engram layers, E hash columns

SHORT_SEGMENT = 32
"""Segments of at most this many rows are computed row by row (DESIGN 12); longer ones may share a GEMM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Rows [row_start, row_end) of a run: positions [start, end) of the sequence in `slot`.

    write_floor: global KV of positions below it is already stored and is not rewritten.
    window_floor: no window key below it exists for this part of the model (SPEC 11: the encoder's and the
    decoder's floors of one request differ).
    block_table: int64 [pages] of the sequence, or None without a paged cache.
    """

    row_start: int
    row_end: int
    start: int
    end: int
    slot: int
    block_table: Tensor | None
    write_floor: int
    window_floor: int

    @property
    def rows(self) -> slice:
        return slice(self.row_start, self.row_end)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Ragged rows in segment order, short segments first.

    short_rows: the leading rows that belong to segments of at most SHORT_SEGMENT rows; their bits do not depend on
    their neighbours. engram_TLE: int64 table rows, or None without Engram. image_T: bool, image-span positions.
    """

    segments: tuple[Segment, ...]
    positions_T: Tensor
    rotary: Rotary
    short_rows: int
    image_T: Tensor | None = None
    engram_TLE: Tensor | None = None

    def __len__(self) -> int:
        return int(self.positions_T.shape[0])

    def split(self, x_T: Tensor) -> tuple[Tensor, ...]:
        """x [T, ...] segment by segment, views; the gradient of all of them is one concatenation."""
        parts: tuple[Tensor, ...] = x_T.split([s.row_end - s.row_start for s in self.segments])
        return parts

    def without_short(self) -> Rows:
        """The rows after the short ones, for what is done row by row: it looks at no segment."""
        cut = slice(self.short_rows, None)
        return replace(
            self,
            segments=(),
            positions_T=self.positions_T[cut],
            rotary=self.rotary.without_short(),
            short_rows=0,
            image_T=None if self.image_T is None else self.image_T[cut],
            engram_TLE=None if self.engram_TLE is None else self.engram_TLE[cut],
        )

    def only_short(self) -> Rows:
        """The short rows, for what is done row by row: it looks at no segment."""
        cut = slice(self.short_rows)
        return replace(
            self,
            segments=(),
            positions_T=self.positions_T[cut],
            rotary=self.rotary.only_short(),
            image_T=None if self.image_T is None else self.image_T[cut],
            engram_TLE=None if self.engram_TLE is None else self.engram_TLE[cut],
        )

    @property
    def first(self) -> int:
        """Position of the first row (traces run one sequence at a time)."""
        return self.segments[0].start


def short_row_count(lengths: Sequence[int]) -> int:
    """Rows of the leading short segments; long segments must follow short ones.

    >>> short_row_count([1, 6, 512])
    7
    """
    count = 0
    for position, length in enumerate(lengths):
        if length > SHORT_SEGMENT:
            assert all(n > SHORT_SEGMENT for n in lengths[position:]), "short segments come first"
            break
        count += length
    return count


def short_first(lengths: Sequence[int]) -> list[int]:
    """Indices of sequences, those of at most SHORT_SEGMENT rows first, otherwise in order.

    >>> short_first([512, 1, 600, 6])
    [1, 3, 0, 2]
    """
    return sorted(range(len(lengths)), key=lambda i: lengths[i] > SHORT_SEGMENT)


def build_rows(
    segments: Sequence[Segment],
    freqs: tuple[Tensor, Tensor],
    *,
    image_T: Tensor | None = None,
    engram_TLE: Tensor | None = None,
) -> Rows:
    """Rows of the given segments, which are in row order, short ones first."""
    positions = joined([torch.arange(s.start, s.end, device=freqs[0].device) for s in segments])
    short_rows = short_row_count([s.end - s.start for s in segments])
    return Rows(
        segments=tuple(segments),
        positions_T=positions,
        rotary=Rotary(freqs, positions, short_rows),
        short_rows=short_rows,
        image_T=image_T,
        engram_TLE=engram_TLE,
    )
