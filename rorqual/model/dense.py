"""The forward pass without a cache: whole sequences, gradients through fake-quantised keys.

The readable twin of what training runs (`rorqual.training.forward`), and of the packed cache.

The same modules and the same rows as `forward`; only the key store differs, and no decoder row is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.errors import InputError
from rorqual.model.kv_dense import DenseKV
from rorqual.model.layer import first_pre
from rorqual.model.ngram import compress_ids
from rorqual.model.rows import Segment, build_rows, short_first
from rorqual.model.run import Carry, Run
from rorqual.model.tap import Tap
from rorqual.model.transformer import Transformer
from rorqual.model.vision.tower import merge_image_embeddings
from rorqual.ops.dispatch import Ops, reference_ops


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One whole sequence: ids int64 [n]; with images, their mask bool [n] and features [image positions, D]."""

    ids: Tensor
    image: Tensor | None = None
    embeds: Tensor | None = None


def dense_forward(
    model: Transformer,
    documents: Sequence[Document],
    *,
    quantise: bool = True,
    ops: Ops | None = None,
    tap: Tap | None = None,
) -> list[Tensor]:
    """Logits fp32 [n, V] of every position of every document; no attention, pair or n-gram crosses documents.

    Args:
        quantise: False keeps full-precision keys.
        ops: the plain torch ops by default: those let gradients through.

    Raises:
        InputError: an empty document.
    """
    if any(not d.ids.numel() for d in documents):
        raise InputError("ids: empty; a document needs at least 1 token")
    order = short_first([len(d.ids) for d in documents])
    placed = [documents[i] for i in order]
    rows = build_rows(
        _segments(placed),
        model.backbone.freqs,
        image_T=_images(placed),
        engram_TLE=_ngrams(model, placed),
    )
    kv = DenseKV(model.config, model.numerics.native, quantise=quantise)
    run = Run(ops=ops or reference_ops(), numerics=model.numerics, kv=kv, tap=tap or Tap())
    copies = model.config.hc_mult
    embedded = run.record("embed_out", run.numerics.round(torch.cat([_embed(model, d) for d in placed])), rows)
    x = embedded[:, None].expand(-1, copies, -1)
    pre, carry = first_pre(x), Carry()
    for layers in (model.backbone.encoder, model.backbone.decoder):
        x, pre = model.backbone.run_layers(layers, x, pre, rows, carry, run)
    hidden = model.backbone.hidden(x, pre, rows, run)
    _, logits = model.backbone.logits(hidden, rows.short_rows, run)
    parts = dict(zip(order, (logits[s.rows] for s in rows.segments), strict=True))
    return [parts[i] for i in range(len(documents))]


def _segments(documents: Sequence[Document]) -> list[Segment]:
    segments, row = [], 0
    for slot, document in enumerate(documents):
        count = len(document.ids)
        segments.append(
            Segment(
                row_start=row,
                row_end=row + count,
                start=0,
                end=count,
                slot=slot,
                block_table=None,
                write_floor=0,
                window_floor=0,
            )
        )
        row += count
    return segments


def _images(documents: Sequence[Document]) -> Tensor | None:
    if all(d.image is None for d in documents):
        return None
    return torch.cat([torch.zeros_like(d.ids, dtype=torch.bool) if d.image is None else d.image for d in documents])


def _ngrams(model: Transformer, documents: Sequence[Document]) -> Tensor | None:
    if model.ngram is None:
        return None
    return torch.cat([model.ngram.rows(compress_ids(model.token_map, d.ids, d.image)) for d in documents])


def _embed(model: Transformer, document: Document) -> Tensor:
    rows = model.backbone.embed[document.ids].float()
    if document.image is None or document.embeds is None:
        return rows
    return merge_image_embeddings(rows, document.image, document.embeds)
