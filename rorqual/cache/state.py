"""A slot's private state as rows that end at one position: taken out of one cache, put into another.

What a sequence needs to go on from position `end` is no more than its last window: W rows of each ring, the unfinished
group of each tail, the n-gram history. Rows that a rollback of drafts would need are not among them: nothing is rolled
back to below `end`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.cache.rings import RingSpan
from rorqual.cache.slots import Slots
from rorqual.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRows:
    """Positions below `end`.

    tails: fp32 [m - 1, 2, C] of each source of a ratio m > 1, the rows just before `end`, zeros before position 0.
    history: int64, the last compressed ids, zeros before position 0. rings: uint8 [layers, rows, row bytes] of the
    first so many layers, none of a sequence whose windows come back by replay. drafts: the same of draft layers.
    """

    end: int
    tails: tuple[Tensor, ...]
    history: Tensor
    rings: Tensor
    drafts: Tensor


def window_rows(layout: KVLayout, end: int) -> int:
    """Rows of a ring that a sequence of `end` tokens needs."""
    return min(end, layout.config.sliding_window)


def read_slot(slots: Slots, layout: KVLayout, slot: int, end: int, *, layers: int, drafts: int) -> SlotRows:
    """Copies, on the cache's device. layers, drafts: how many rings, from the first on."""
    rows = window_rows(layout, end)
    tails = []
    for tail in slots.tails:
        count = slots.group_rows(tail.shape[1])
        held, first = tail.new_zeros(count, *tail.shape[2:]), max(0, end - count)
        held[count - (end - first) :] = tail[slot, _at(first, end, tail.shape[1], tail)]
        tails.append(held)
    history = slots.history.new_zeros(layout.history_rows_logical)
    first = max(0, end - len(history))
    if len(history):
        at = _at(first, end, slots.history.shape[1], history)
        history[len(history) - (end - first) :] = slots.history[slot, at]
    rings, windows = slots.rings, slots.draft_rings
    return SlotRows(
        end=end,
        tails=tuple(tails),
        history=history,
        rings=rings.data[:layers, slot][:, _at(end - rows, end, rings.rows, rings.data)],
        drafts=windows.data[:drafts, slot][:, _at(end - rows, end, windows.rows, windows.data)],
    )


def write_tails(slots: Slots, slot: int, rows: SlotRows) -> None:
    """The unfinished groups alone, for a sequence that stands below `rows.end` and computes up to it again."""
    for tail, held in zip(slots.tails, rows.tails, strict=True):
        count = min(len(held), rows.end)
        own = held[len(held) - count :].to(tail.device)
        tail[slot, _at(rows.end - count, rows.end, tail.shape[1], tail)] = own


def write_slot(slots: Slots, layout: KVLayout, slot: int, rows: SlotRows) -> None:
    """Let the slot stand at `rows.end`, as if it had computed all positions below it, of the layers that are given.

    Rings of other layers hold nothing, and begin with the next rows that these layers run on.
    """
    end, state = rows.end, slots.states[slot]
    state.reset(end, 0)
    write_tails(slots, slot, rows)
    _hold(state.tail, max((len(held) for held in rows.tails), default=0), end)
    count = min(len(rows.history), end)
    if count:
        at = _at(end - count, end, slots.history.shape[1], slots.history)
        slots.history[slot, at] = rows.history[len(rows.history) - count :].to(slots.history.device)
    _hold(state.history, count, end)
    layers, kept = rows.rings.shape[:2]
    slots.rings.data[:layers, slot, _at(end - kept, end, slots.rings.rows, slots.rings.data)] = rows.rings.to(
        slots.rings.data.device
    )
    _hold(state.encoder, kept, end)
    if layers == layout.config.num_hidden_layers:
        _hold(state.decoder, kept, end)
    if len(rows.drafts):
        windows, kept = slots.draft_rings, rows.drafts.shape[1]
        at = _at(end - kept, end, windows.rows, windows.data)
        windows.data[: len(rows.drafts), slot, at] = rows.drafts.to(windows.data.device)
        _hold(state.draft, kept, end)


def _hold(span: RingSpan, rows: int, end: int) -> None:
    span.reset(max(0, end - rows))
    span.advance(span.hi, end)


def _at(start: int, end: int, rows: int, like: Tensor) -> Tensor:
    return torch.arange(start, end, device=like.device) % rows
