"""The draft beside a running sequence: feeding its windows and asking for a block (SPEC 9)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from rorqual.engine.sequence import Sequence
from rorqual.model.draft import Choose, Proposal
from rorqual.model.kv import PagedKV
from rorqual.model.rows import Segment, build_rows
from rorqual.model.run import Run
from rorqual.model.step import SequenceOutput
from rorqual.model.tap import Tap


def draft_run(sequence: Sequence, tap: Tap | None = None) -> Run:
    """The constants of one draft pass over the sequence's cache."""
    model = sequence.model
    ops = model.backend.ops()
    kv = PagedKV(model.config, sequence.cache, ops, model.numerics.native)
    return Run(ops=ops, numerics=model.numerics, kv=kv, tap=tap or Tap())


def feed_draft(
    sequence: Sequence, output: SequenceOutput, tap: Tap | None = None, accepted: int | None = None
) -> Tensor:
    """Write the draft windows of a step's rows; returns main_x [rows, D].

    accepted: only the first so many rows, when the rest were rejected drafts.
    """
    model = sequence.model
    assert model.draft is not None and output.main_hidden is not None
    hidden = output.main_hidden if accepted is None else output.main_hidden[:accepted]
    seg = Segment(
        row_start=0,
        row_end=hidden.shape[0],
        start=output.first,
        end=output.first + hidden.shape[0],
        slot=sequence.slot,
        block_table=None,
        write_floor=0,
        window_floor=0,
    )
    with torch.inference_mode():
        rows = build_rows([seg], model.backbone.freqs)
        return model.draft.feed(sequence.cache, hidden, rows, draft_run(sequence, tap))


def propose(sequences: Seq[Sequence], next_ids_B: Tensor, choose: Choose, tap: Tap | None = None) -> Proposal:
    """A block of drafts after each sequence's already-sampled next token; the sequences share one cache."""
    first = sequences[0]
    model = first.model
    assert model.draft is not None and all(s.cache is first.cache for s in sequences)
    body = model.backbone
    with torch.inference_mode():
        return model.draft.propose(
            first.cache, body.embed, body.head, [s.slot for s in sequences], next_ids_B, choose, draft_run(first, tap)
        )
