"""The forward pass over ragged sequences: embed, encoder, the CED seam, decoder, logits.

    all rows        embedding -> encoder layers -> (stream, pre)
    the seam        rows whose decoder does not run now leave the last source's global KV, and wait
    kept rows       decoder layers -> collapse -> norm -> logits

Nothing here branches on "prefill", "decode" or "replay": a step's integers say which rows exist and which are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rorqual.cache.kv_cache import KVCache
from rorqual.cache.slots import SlotState
from rorqual.errors import InputError
from rorqual.model.kv import PagedKV
from rorqual.model.layer import first_pre
from rorqual.model.ngram import BEFORE, compress_ids
from rorqual.model.pending import Crossing, cat_masks, decoder_rows, join
from rorqual.model.rows import SHORT_SEGMENT, Rows, Segment, build_rows, short_first
from rorqual.model.run import Carry, Run
from rorqual.model.short import ShortLayers
from rorqual.model.step import SequenceOutput, SequenceStep
from rorqual.model.tap import Tap
from rorqual.model.transformer import Transformer
from rorqual.model.vision.tower import merge_image_embeddings
from rorqual.ops.rowwise import joined

# T rows, S residual copies, D hidden, V vocabulary


@dataclass(slots=True)
class Flow:
    """Rows on their way through a part, with the step each segment belongs to (indices into the caller's steps)."""

    order: list[int]
    rows: Rows
    x: Tensor
    pre: Tensor
    carry: Carry


def forward(
    model: Transformer,
    cache: KVCache,
    steps: Sequence[SequenceStep],
    *,
    tap: Tap | None = None,
    stale_decode: bool = False,
) -> list[SequenceOutput]:
    """Run one step of every sequence and return their outputs in the given order.

    Row bits of sequences with at most SHORT_SEGMENT rows do not depend on what else is in the step.

    Raises:
        InputError: ids outside the vocabulary, positions past the model's, two steps of one slot.
    """
    check_steps(model, steps, cache)
    steps = [step.to(model.device) for step in steps]
    ops = model.backend.ops()
    kv = PagedKV(model.config, cache, ops, model.numerics.native)
    run = Run(ops=ops, numerics=model.numerics, kv=kv, tap=tap or Tap(), stale_decode=stale_decode)
    if run.regions is not None:
        run.short = ShortLayers(kv, run.regions)
    with torch.inference_mode():
        body, flow = model.backbone, None
        if any(s.end > s.start for s in steps):
            flow = enter(model, cache, steps, run)
            flow.x, flow.pre = body.run_layers(body.encoder, flow.x, flow.pre, flow.rows, flow.carry, run)
        kept, outputs = cross(model, cache, steps, flow, run), dict[int, SequenceOutput]()
        for part in kept:
            part.x, part.pre = body.run_layers(body.decoder, part.x, part.pre, part.rows, part.carry, run)
            outputs |= finish(model, steps, part, run)
        # Not before: a source with a tail may be the decoder's first layer.
        advance_encoder(cache, steps)
        for part in kept:
            advance_decoder(cache, part.rows)
        nothing = [SequenceOutput(first=s.end, end=s.end, logits=None, main_hidden=None) for s in steps]
        return [outputs.get(i, nothing[i]) for i in range(len(steps))]


def check_steps(model: Transformer, steps: Sequence[SequenceStep], cache: KVCache) -> None:
    """Refuse what would index outside a tensor, by name."""
    limit, vocab = model.config.max_position_embeddings, model.config.vocab_size
    if len({s.slot for s in steps}) != len(steps):
        raise InputError("steps: a slot appears twice in one step; a slot holds one sequence")
    for step in steps:
        ids = step.tokens_n
        if step.run_decoder and not model.has_decoder:
            raise InputError("model: it was loaded without its decoder, which only prefills")
        if ids.numel() == 0 and step.run_decoder and cache.slots.states[step.slot].pending is not None:
            continue
        if ids.numel() == 0:
            raise InputError("ids: empty; a step needs at least 1 token")
        numbers = ids.tolist()
        if min(numbers) < 0 or max(numbers) >= vocab:
            bad = next(i for i in numbers if not 0 <= i < vocab)
            raise InputError(f"ids: {bad} is outside the vocabulary, legal ids are 0..{vocab - 1}")
        if step.end > limit:
            raise InputError(f"ids: position {step.end - 1} is past the model's last, {limit - 1}")


def enter(model: Transformer, cache: KVCache, steps: Sequence[SequenceStep], run: Run) -> Flow:
    """Rows of every step (short segments first), their embeddings and n-gram rows."""
    order = [i for i in short_first([s.end - s.start for s in steps]) if steps[i].end > steps[i].start]
    segments, row = [], 0
    for i in order:
        step = steps[i]
        count = step.end - step.start
        segments.append(
            Segment(
                row_start=row,
                row_end=row + count,
                start=step.start,
                end=step.end,
                slot=step.slot,
                block_table=step.block_table,
                write_floor=step.write_floor,
                window_floor=step.window_floor,
            )
        )
        row += count
    placed = [steps[i] for i in order]
    image = cat_masks([(s.image_n, s.end - s.start) for s in placed])
    ngrams = [ngram_rows(model, cache, s, run) for s in placed]
    rows = build_rows(
        segments,
        model.backbone.freqs,
        image_T=image,
        engram_TLE=joined([g for g in ngrams if g is not None]) if model.ngram is not None else None,
    )
    embedded = run.numerics.round(joined([embed(model, s) for s in placed]))
    embedded = run.record("embed_out", embedded, rows)
    x = embedded[:, None].expand(-1, model.config.hc_mult, -1)
    return Flow(order, rows, x, first_pre(x), Carry())


def embed(model: Transformer, step: SequenceStep) -> Tensor:
    """Token embeddings [n, D], image features in the place of image-span positions."""
    rows = model.backbone.embed[step.tokens_n].to(torch.float32)
    if step.image_embeds is None or step.image_n is None:
        return rows
    return merge_image_embeddings(rows, step.image_n, step.image_embeds)


def ngram_rows(model: Transformer, cache: KVCache, step: SequenceStep, run: Run) -> Tensor | None:
    """Engram table rows [n, L, E]; reads and extends the slot's history of compressed ids, addressed by position."""
    if model.ngram is None:
        return None
    history = cache.slots.history[step.slot]
    span = cache.slots.states[step.slot].history
    held = min(step.start - span.held_from(history.shape[0]), model.ngram.history_size)
    if run.regions is not None:
        packed, place = model.ngrams_for(run.regions), (step.start, max(0, held))
        return run.regions.ngrams(step.tokens_n, step.image_n, packed, history, *place)
    tap, compressed = run.tap, compress_ids(model.token_map, step.tokens_n, step.image_n)
    past = history.new_full((model.ngram.history_size,), BEFORE)
    if held > 0:
        past[-held:] = history[torch.arange(step.start - held, step.start, device=history.device) % history.shape[0]]
    found = model.ngram.rows(compressed, past)
    keep = min(compressed.shape[0], history.shape[0])
    if keep:
        at = torch.arange(step.end - keep, step.end, device=history.device) % history.shape[0]
        history[at] = compressed[-keep:]
    if tap.active:
        found = tap("engram.hash_ids", found, step.start)
        tap("engram_tokens", compressed, step.start)
    return found


def cross(model: Transformer, cache: KVCache, steps: Sequence[SequenceStep], flow: Flow | None, run: Run) -> list[Flow]:
    """Narrow to the rows whose decoder runs now; the rest write global KV at the seam and wait in their slot.

    In several parts where more than one sequence keeps more than SHORT_SEGMENT rows, as those do whose last chunks are
    short: each is alone in its products, as it would be without the others (DESIGN 12).
    """
    if flow is not None and not model.backbone.has_seam:
        return [flow]
    whole = all(
        s.run_decoder and s.start >= s.decoder_floor and cache.slots.states[s.slot].pending is None for s in steps
    )
    if flow is not None and whole:
        placed = [steps[i].decoder_floor for i in flow.order]
        segments = [replace(seg, window_floor=floor) for seg, floor in zip(flow.rows.segments, placed, strict=True)]
        rows = replace(flow.rows, segments=tuple(segments))
        return [Flow(flow.order, rows, flow.x, flow.pre, flow.carry)]
    kept = [] if flow is None else _narrow(model, cache, steps, flow, run)
    kept += _waiting(cache, steps)
    lengths = [crossing.end - crossing.start for _, _, crossing in kept]
    ordered = [kept[i] for i in short_first(lengths)]
    together = sum(length <= SHORT_SEGMENT for length in lengths) + 1
    parts = [ordered[:together], *([one] for one in ordered[together:])]
    return [_kept_flow(model, steps, part) for part in parts if part]


def _narrow(
    model: Transformer, cache: KVCache, steps: Sequence[SequenceStep], flow: Flow, run: Run
) -> list[tuple[int, Segment, Crossing]]:
    """Of the rows that ran through the encoder, those whose decoder runs now."""
    model.backbone.seam(flow.x, flow.pre, flow.rows, run)
    kept = []
    for at, seg in zip(flow.order, flow.rows.segments, strict=True):
        step, state = steps[at], cache.slots.states[seg.slot]
        crossing = _collect(flow, seg, state)
        if step.run_decoder:
            state.pending = None
            kept.append((at, replace(seg, write_floor=seg.end), crossing.last(step.decoder_floor)))
        else:
            state.pending = crossing.last(step.end - model.config.sliding_window).clone()
    return kept


def _waiting(cache: KVCache, steps: Sequence[SequenceStep]) -> list[tuple[int, Segment, Crossing]]:
    """Rows that only wait for their decoder: their encoder ran elsewhere."""
    kept = []
    for at, step in enumerate(steps):
        if step.end > step.start:
            continue
        state = cache.slots.states[step.slot]
        crossing, state.pending = state.pending, None
        placed = Segment(
            row_start=0,
            row_end=0,
            start=step.end,
            end=step.end,
            slot=step.slot,
            block_table=step.block_table,
            write_floor=step.write_floor,
            window_floor=step.window_floor,
        )
        kept.append((at, placed, crossing))
    return kept


def _collect(flow: Flow, seg: Segment, state: SlotState) -> Crossing:
    """This segment's rows, after the rows that wait in its slot."""
    rows, carry = flow.rows, flow.carry
    own = Crossing(
        start=seg.start,
        end=seg.end,
        x_TSD=flow.x[seg.rows],
        pre_TS=flow.pre[seg.rows],
        image_T=None if rows.image_T is None else rows.image_T[seg.rows],
        engram_TLE=None if rows.engram_TLE is None else rows.engram_TLE[seg.rows],
        candidates_TB=None if carry.candidates_TB is None else carry.candidates_TB[seg.rows],
        hidden={layer: h[seg.rows] for layer, h in carry.hidden.items()},
    )
    return own if state.pending is None else join([state.pending, own])


def _kept_flow(
    model: Transformer, steps: Sequence[SequenceStep], kept: Sequence[tuple[int, Segment, Crossing]]
) -> Flow:
    crossings = [c for _, _, c in kept]
    floors = [steps[at].decoder_floor for at, _, _ in kept]
    rows = decoder_rows(crossings, [seg for _, seg, _ in kept], floors, model.backbone.freqs)
    candidates = [c.candidates_TB for c in crossings if c.candidates_TB is not None]
    carry = Carry(candidates_TB=torch.cat(candidates) if candidates else None)
    for layer in crossings[0].hidden:
        carry.hidden[layer] = torch.cat([c.hidden[layer] for c in crossings])
    x, pre = torch.cat([c.x_TSD for c in crossings]), torch.cat([c.pre_TS for c in crossings])
    return Flow([at for at, _, _ in kept], rows, x, pre, carry)


def advance_encoder(cache: KVCache, steps: Sequence[SequenceStep]) -> None:
    """The encoder's rings, tails and history now hold the steps' positions."""
    for step in steps:
        state = cache.slots.states[step.slot]
        if step.start == step.end:  # the decoder's first layer may have pooled rows
            state.tail.advance(state.tail.hi, step.end)
            continue
        for span in (state.encoder, state.tail, state.history):
            span.advance(step.start, step.end)


def advance_decoder(cache: KVCache, rows: Rows) -> None:
    """The decoder's rings hold the kept rows; after a CED prefill they begin at the first of them."""
    for seg in rows.segments:
        span = cache.slots.states[seg.slot].decoder
        if seg.start > span.hi:
            span.reset(seg.start)
        span.advance(seg.start, seg.end)


def finish(model: Transformer, steps: Sequence[SequenceStep], kept: Flow, run: Run) -> dict[int, SequenceOutput]:
    """Collapse, norm and head of the wanted rows; hidden states of every kept row for the draft.

    By index in `steps`.
    """
    rows, main_hidden = kept.rows, None
    if model.draft is not None:
        main_hidden = torch.cat([kept.carry.hidden[t] for t in model.config.dspark_target_layer_ids], dim=1)
        main_hidden = run.record("main_hidden", main_hidden, rows)
    wanted = [_wanted(steps[at], seg) for at, seg in zip(kept.order, rows.segments, strict=True)]
    logits = _logits(model, kept, wanted, run)
    outputs = {}
    for at, seg, wants, own in zip(kept.order, rows.segments, wanted, logits, strict=True):
        assert wants.stop == seg.row_end
        outputs[at] = SequenceOutput(
            first=seg.start,
            end=seg.end,
            logits=own,
            main_hidden=None if main_hidden is None else main_hidden[seg.rows],
        )
    return outputs


def _wanted(step: SequenceStep, seg: Segment) -> slice:
    """Rows of a segment whose logits are wanted: from `logits_from` (none, if it lies beyond), or the last one."""
    start = seg.end - 1 if step.logits_from is None else min(max(step.logits_from, seg.start), seg.end)
    return slice(seg.row_start + start - seg.start, seg.row_end)


def _logits(model: Transformer, kept: Flow, wanted: Sequence[slice], run: Run) -> list[Tensor]:
    """Logits of each wanted slice. Few wanted rows of a sequence go row by row, whatever stands beside them."""
    rows, body = kept.rows, model.backbone
    counts = [w.stop - w.start for w in wanted]
    order = short_first(counts)
    short, total = sum(count for count in counts if count <= SHORT_SEGMENT), sum(counts)
    index = None
    if total < len(rows) or order != sorted(order):
        index = torch.cat([torch.arange(wanted[i].start, wanted[i].stop, device=kept.x.device) for i in order])
    logits = None
    if short == total:
        few = (kept.x, kept.pre) if index is None else (kept.x[index], kept.pre[index])
        logits = body.few_logits(*few, run)
    if logits is None:
        hidden = body.hidden(kept.x, kept.pre, rows, run)
        normed, logits = body.logits(hidden if index is None else hidden[index], short, run)
        if run.tap.active:
            first = rows.segments[0].end - total
            run.tap("final_norm", normed, first)
            logits = run.tap("logits", logits, first)
    parts = dict(zip(order, logits.split([counts[i] for i in order]), strict=True))
    return [parts[i] for i in range(len(wanted))]
