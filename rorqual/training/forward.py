"""The backbone over packed sequences, with gradients: the same modules as inference, other keys and faster ops.

Pieces of documents are segments, so no attention, compression pair or n-gram crosses them. Every layer runs on every
row; the CED seam is simulated by a floor under some decoder windows (`rorqual.training.kv`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rorqual.model.layer import first_pre
from rorqual.model.ngram import compress_ids
from rorqual.model.rope import Rotary
from rorqual.model.rows import Rows, Segment
from rorqual.model.run import Carry, Run
from rorqual.model.transformer import Transformer
from rorqual.training.batch import Packed

# T rows of the micro-batch, D hidden, V vocabulary, M target layers x hidden


class Outputs(NamedTuple):
    """normed fp32 [T, D]: what the head is applied to. targets fp32 [T, M], detached: what drafts are fed from."""

    normed_TD: Tensor
    targets_TM: Tensor | None


def training_rows(model: Transformer, batch: Sequence[Packed]) -> Rows:
    """Rows of all sequences in order; one segment a piece, numbered by slot."""
    segments: list[Segment] = []
    row = 0
    for packed in batch:
        for start, end in packed.pieces():
            segments.append(_segment(row + start, row + end, len(segments)))
        row += packed.ids.shape[0]
    ids = torch.cat([packed.ids for packed in batch])
    positions = torch.cat([torch.arange(s.end, device=ids.device) for s in segments])
    ngrams = None
    if model.ngram is not None:
        folded = compress_ids(model.token_map, ids.cpu())
        ngrams = torch.cat([model.ngram.rows(folded[s.rows]) for s in segments]).to(ids.device)
    return Rows(
        segments=tuple(segments),
        positions_T=positions,
        rotary=Rotary(model.backbone.freqs, positions, 0),
        short_rows=0,  # in training rows share their products, whatever the length of a piece
        engram_TLE=ngrams,
    )


def backbone(model: Transformer, ids_T: Tensor, rows: Rows, run: Run) -> Outputs:
    """Embedding to the output norm."""
    body, copies = model.backbone, model.config.hc_mult
    embedded = F.embedding(ids_T, body.embed)
    x = embedded[:, None].expand(-1, copies, -1).contiguous()
    pre, carry = first_pre(x), Carry()
    for layers in (body.encoder, body.decoder):
        x, pre = body.run_layers(layers, x, pre, rows, carry, run)
    normed = run.norm(body.hidden(x, pre, rows, run), body.norm, body.eps)
    targets = None
    if model.draft is not None:
        targets = torch.cat([carry.hidden[i] for i in model.config.dspark_target_layer_ids], dim=1).detach()
    return Outputs(normed, targets)


def _segment(row_start: int, row_end: int, slot: int) -> Segment:
    return Segment(
        row_start=row_start,
        row_end=row_end,
        start=0,
        end=row_end - row_start,
        slot=slot,
        block_table=None,
        write_floor=0,
        window_floor=0,
    )
