"""What is private to one sequence and gone with it: rings, compressor tails, n-gram history, pending CED streams."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rorqual.cache.rings import RingSpan, WindowRings
from rorqual.config import ModelConfig
from rorqual.formats.spec import FORMATS
from rorqual.layout import KVLayout


@dataclass(slots=True)
class SlotState:
    """Bookkeeping of one slot. Positions everywhere; `[lo, hi)` intervals.

    encoder, decoder, draft: what the rings of each part hold. tail: which compressor input rows are held.
    pending: rows of the encoder's output that a chunked CED prefill carries to its last chunk (SPEC 11), or None.
    """

    encoder: RingSpan = field(default_factory=RingSpan)
    decoder: RingSpan = field(default_factory=RingSpan)
    draft: RingSpan = field(default_factory=RingSpan)
    tail: RingSpan = field(default_factory=RingSpan)
    history: RingSpan = field(default_factory=RingSpan)
    pending: Any = None

    def reset(self, start: int, decoder_start: int) -> None:
        """Begin a sequence (or a replay) at `start`; the decoder's rings begin at `decoder_start`."""
        self.encoder.reset(start)
        self.tail.reset(start)
        self.history.reset(start)
        self.decoder.reset(decoder_start)
        self.draft.reset(decoder_start)
        self.pending = None

    def copy(self) -> SlotState:
        """The same, apart. Not in the middle of a chunked prefill."""
        assert self.pending is None
        spans = self.encoder, self.decoder, self.draft, self.tail, self.history
        return SlotState(*(replace(span) for span in spans))

    def rewind(self, position: int) -> None:
        """Forget positions >= `position`: rejected drafts, or a regeneration within the rings' reach."""
        for span in (self.encoder, self.decoder, self.tail, self.history):
            span.rewind(position)
        if self.draft.hi > position:
            self.draft.rewind(position)


class Slots:
    """Tensors of all slots, and one SlotState each. Sizes come from the layout and equal what it reports."""

    def __init__(self, config: ModelConfig, layout: KVLayout, slots: int, device: torch.device | str = "cpu") -> None:
        fmt = FORMATS[config.cache.window]
        width = config.head_dim
        self.rings = WindowRings(config.num_hidden_layers, slots, layout.ring_rows, width, fmt, device)
        self.draft_rings = WindowRings(
            config.num_nextn_predict_layers, slots, config.sliding_window, width, fmt, device
        )
        self.draft_rows = layout.ring_rows - config.sliding_window
        self.compressed = [s.layer_id for s in layout.sources if s.ratio > 1]
        self.tails = [
            torch.zeros(slots, layout.tail_rows(s.ratio), 2, width, dtype=torch.float32, device=device)
            for s in layout.sources
            if s.ratio > 1
        ]
        self.history = torch.zeros(slots, layout.history_rows, dtype=torch.int64, device=device)
        self.states = [SlotState() for _ in range(slots)]

    def tail_of(self, source: int) -> Tensor:
        """fp32 [slots, rows, 2 (kv, gate score), C]; position p stands in row p % rows."""
        return self.tails[self.compressed.index(source)]

    @property
    def nbytes(self) -> int:
        """Bytes of every slot together: rings, draft rings, tails and history."""
        tails = sum(t.numel() * t.element_size() for t in self.tails)
        return self.rings.nbytes + self.draft_rings.nbytes + tails + self.history.numel() * 8

    def begin(self, slot: int, start: int, before: Tensor | None = None) -> None:
        """Let a sequence stand at position `start` with nothing below it but n-gram history.

        before: int64, compressed ids of the positions just before `start`.
        """
        self.states[slot].reset(start, 0)
        if before is not None and len(before):
            at = torch.arange(start - len(before), start, device=self.history.device) % self.history.shape[1]
            self.history[slot, at] = before.to(self.history.device)
            self.states[slot].history.lo = start - len(before)

    def copy(self, source: int, target: int) -> None:
        """Let `target` hold what `source` holds, between two steps: a fork."""
        rings = self.rings.data, self.draft_rings.data
        for data in rings:
            data[:, target] = data[:, source]
        for data in (*self.tails, self.history):
            data[target] = data[source]
        self.states[target] = self.states[source].copy()

    def lowest_rewind(self, slot: int, window: int, lookback: int) -> int:
        """The lowest position that the slot's rings, tails and history can be rewound to.

        window: positions a query sees. lookback: n-gram ids before a position.
        """
        state = self.states[slot]
        found = [span.lowest(self.rings.rows, window - 1) for span in (state.encoder, state.decoder) if span.hi]
        found += [state.tail.lowest(tail.shape[1], self.group_rows(tail.shape[1])) for tail in self.tails]
        if self.history.shape[1]:
            found.append(state.history.lowest(self.history.shape[1], lookback))
        return max(found, default=0)

    def group_rows(self, rows: int) -> int:
        """Rows of an unfinished group that a tail of so many rows must hold: all but the drafts' share."""
        return rows - self.draft_rows

    def poison(self, slot: int) -> None:
        """Fill a freed slot with NaN, so that reuse of stale state shows in any output (tests)."""
        self.rings.poison(slot)
        self.draft_rings.poison(slot)
        for tail in self.tails:
            tail[slot] = float("nan")
        self.history[slot] = 7
