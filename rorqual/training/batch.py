"""What a training step is handed: packed sequences of whole or cut documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

IGNORE = -100
"""A target that trains nothing."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """One packed sequence of n tokens.

    ids: int64 [n].
    targets: int64 [n], the token after each position within its document piece, IGNORE where there is none.
    starts: where each document piece begins, ascending, the first 0. Positions restart at 0 in each piece: no
        attention, compression pair or n-gram crosses a start. A piece may be empty (two equal starts).
    number: the sequence's place in the run; every random choice made for the sequence is keyed by it.
    """

    ids: Tensor
    targets: Tensor
    starts: tuple[int, ...]
    number: int

    def __post_init__(self) -> None:
        n = self.ids.shape[0]
        assert self.ids.shape == self.targets.shape and self.starts[:1] == (0,), (n, self.starts)
        assert all(a <= b for a, b in zip(self.starts, (*self.starts[1:], n), strict=True)), self.starts

    def pieces(self) -> Iterator[tuple[int, int]]:
        """[start, end) of each piece that holds a token."""
        ends = (*self.starts[1:], self.ids.shape[0])
        return ((start, end) for start, end in zip(self.starts, ends, strict=True) if end > start)

    @property
    def trained(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORE).sum())


def micro_batches(batch: Sequence[Packed], tokens: int) -> list[list[Packed]]:
    """The batch in order, cut so that a part holds at most `tokens` tokens (and at least one sequence)."""
    parts: list[list[Packed]] = []
    held = 0
    for sequence in batch:
        length = sequence.ids.shape[0]
        if not parts or held + length > tokens:
            parts.append([])
            held = 0
        parts[-1].append(sequence)
        held += length
    return parts
