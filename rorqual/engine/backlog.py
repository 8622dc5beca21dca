"""Accepted rows whose hidden states no draft window has taken yet.

Where drafts do not pay, their windows would still be fed a row a step, so that they can be tried again some day: a
fifth of a step of one request. A few rows at once cost little more than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rorqual.engine.draft import Fed

ROWS = 8
"""Rows of a slot that wait at most. They are bytes too: at the release's widths 49 KB each."""


@dataclass(slots=True)
class _Waiting:
    first: int
    hidden: list[Tensor] = field(default_factory=list)
    rows: int = 0


class Backlog:
    """By slot. Rows come in their order and are given back so."""

    def __init__(self) -> None:
        self._slots: dict[int, _Waiting] = {}

    def add(self, fed: Iterable[Fed]) -> tuple[list[Fed], list[Fed]]:
        """Keep what can wait; returns what cannot, as two batches to feed one after the other."""
        older, newer = [], []
        for own in fed:
            count, waiting = len(own.hidden), self._slots.get(own.slot)
            if waiting is not None:
                assert waiting.first + waiting.rows == own.first, f"slot {own.slot} skips rows before {own.first}"
                if waiting.rows + count > ROWS:
                    older += self.take([own.slot])
            if count > ROWS:
                newer.append(own)
                continue
            kept = self._slots.setdefault(own.slot, _Waiting(own.first))
            # A copy: a few rows must not keep those of a whole step.
            kept.hidden.append(own.hidden.clone())
            kept.rows += count
        return older, newer

    def take(self, slots: Sequence[int]) -> list[Fed]:
        """What waits for these slots; it waits no more."""
        found = [(slot, waiting) for slot in slots if (waiting := self._slots.pop(slot, None)) is not None]
        return [
            Fed(slot=slot, first=own.first, hidden=own.hidden[0] if len(own.hidden) == 1 else torch.cat(own.hidden))
            for slot, own in found
        ]

    def drop(self, slot: int) -> None:
        """The slot begins anew."""
        self._slots.pop(slot, None)

    def copy(self, source: int, target: int) -> None:
        """The windows of `target` are now those of `source`."""
        self.drop(target)
        own = self._slots.get(source)
        if own is not None:
            self._slots[target] = _Waiting(own.first, own.hidden[:], own.rows)
