"""The draft beside running sequences: feeding their windows and asking for a block (SPEC 9).

`feed` and `propose` know slots of one cache, for callers who batch; `feed_draft` and `propose_after` are theirs for
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.cache.kv_cache import KVCache
from rorqual.engine.sequence import Sequence
from rorqual.model.draft import Choose, Proposal
from rorqual.model.kv import PagedKV
from rorqual.model.rows import SHORT_SEGMENT, Segment, build_rows
from rorqual.model.run import Run
from rorqual.model.step import SequenceOutput
from rorqual.model.tap import Tap
from rorqual.model.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """What a slot's draft windows take: hidden [rows, targets x D] of positions from `first` on."""

    slot: int
    first: int
    hidden: Tensor


def draft_run(model: Transformer, cache: KVCache, tap: Tap | None = None) -> Run:
    """The constants of one draft pass over a cache."""
    ops = model.backend.ops()
    kv = PagedKV(model.config, cache, ops, model.numerics.native)
    return Run(ops=ops, numerics=model.numerics, kv=kv, tap=tap or Tap())


def feed(model: Transformer, cache: KVCache, fed: Seq[Fed], tap: Tap | None = None) -> Tensor:
    """Write the draft windows of the given rows; returns main_x [rows of all, D], short ones first."""
    assert model.draft is not None
    segments, row = [], 0
    fed = sorted(fed, key=lambda own: len(own.hidden) > SHORT_SEGMENT)
    for own in fed:
        count = len(own.hidden)
        segments.append(
            Segment(
                row_start=row,
                row_end=row + count,
                start=own.first,
                end=own.first + count,
                slot=own.slot,
                block_table=None,
                write_floor=0,
                window_floor=0,
            )
        )
        row += count
    hidden = fed[0].hidden if len(fed) == 1 else torch.cat([own.hidden for own in fed])
    with torch.inference_mode():
        rows = build_rows(segments, model.backbone.freqs)
        return model.draft.feed(cache, hidden, rows, draft_run(model, cache, tap))


def propose(
    model: Transformer,
    cache: KVCache,
    slots: Seq[int],
    next_ids_B: Tensor,
    choose: Choose,
    *,
    drafts: int | None = None,
    tap: Tap | None = None,
) -> Proposal:
    """Drafts after each slot's already-sampled next token; `drafts` of them, or the whole block."""
    assert model.draft is not None
    body = model.backbone
    with torch.inference_mode():
        return model.draft.propose(
            cache, body.embed, body.head, slots, next_ids_B, choose, draft_run(model, cache, tap), drafts
        )


def feed_draft(
    sequence: Sequence, output: SequenceOutput, tap: Tap | None = None, accepted: int | None = None
) -> Tensor:
    """Write the draft windows of a step's rows; returns main_x [rows, D].

    accepted: only the first so many rows, when the rest were rejected drafts.
    """
    assert output.main_hidden is not None
    hidden = output.main_hidden if accepted is None else output.main_hidden[:accepted]
    return feed(sequence.model, sequence.cache, [Fed(slot=sequence.slot, first=output.first, hidden=hidden)], tap)


def propose_after(sequences: Seq[Sequence], next_ids_B: Tensor, choose: Choose, tap: Tap | None = None) -> Proposal:
    """A block of drafts after each sequence's already-sampled next token; the sequences share one cache."""
    first = sequences[0]
    assert all(s.cache is first.cache for s in sequences)
    return propose(first.model, first.cache, [s.slot for s in sequences], next_ids_B, choose, tap=tap)
