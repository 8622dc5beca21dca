"""A prompt that was computed elsewhere: what it left, taken out of one engine's cache and put into another's.

    replay    pages and tails; the last W tokens run again in all layers, as after a prefix hit of the whole prompt
    streams   and the encoder's windows and its output of the last W rows; the decoder runs on those
    rings     all windows and the last row's logits; nothing is left to run

The rows that the decoder runs on, and what they read, are those of an engine that does both, so their bits are too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.cache.kv_cache import KVCache
from rorqual.cache.state import SlotRows, read_slot, window_rows, write_slot, write_tails
from rorqual.engine.plan import Standing
from rorqual.engine.sequence import Prompt
from rorqual.model.ngram import BEFORE, compress_ids
from rorqual.model.pending import Crossing
from rorqual.model.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """The state behind a prompt of `tokens` tokens.

    kind: `replay`, `streams` or `rings`. pages: uint8 [page bytes] each, in order, the partial last one included.
    rows: private state. write_floor, decoder_floor: as of the step that would have run the decoder.
    x_TSD, pre_TS, candidates_TB, hidden: of `streams`, what crosses the seam (`Crossing`). logits_V: fp32, of `rings`.
    """

    kind: str
    tokens: int
    pages: Sequence[Tensor]
    rows: SlotRows
    write_floor: int
    decoder_floor: int
    x_TSD: Tensor | None = None
    pre_TS: Tensor | None = None
    candidates_TB: Tensor | None = None
    hidden: dict[int, Tensor]
    logits_V: Tensor | None = None


def standing(handed: Handed, window: int) -> Standing:
    """Where a request begins with it, in numbers."""
    end = handed.tokens
    first = max(0, end - window)
    if handed.kind == "replay":
        # A prompt of W tokens or fewer is computed whole, as a hit of so few is not adopted.
        floor = end if first else 0
        return Standing(kind="replay", start=first, write_floor=floor, window_floor=first, decoder_floor=0)
    if handed.kind == "rings":
        floors = {"write_floor": end, "decoder_floor": handed.decoder_floor}
        return Standing(kind="rings", start=end - 1, window_floor=first, **floors)
    floors = {"write_floor": handed.write_floor, "decoder_floor": handed.decoder_floor}
    return Standing(kind="streams", start=first, window_floor=first, **floors)


def take_out(
    model: Transformer,
    cache: KVCache,
    slot: int,
    pages: Sequence[int],
    *,
    kind: str,
    tokens: int,
    write_floor: int,
    decoder_floor: int,
    logits_V: Tensor | None = None,
) -> Handed:
    """What a slot holds that has computed a whole prompt. Pages are views of the cache's, everything else is a copy."""
    config = model.config
    layers = {"replay": 0, "streams": config.decoder_start, "rings": config.num_hidden_layers}[kind]
    drafts = model.layout.draft_layers if kind == "rings" else 0
    pending = cache.slots.states[slot].pending if kind == "streams" else None
    assert pending is None or (isinstance(pending, Crossing) and pending.end == tokens)
    return Handed(
        kind=kind,
        tokens=tokens,
        pages=[cache.pages.pool[page] for page in pages],
        rows=read_slot(cache.slots, model.layout, slot, tokens, layers=layers, drafts=drafts),
        write_floor=write_floor,
        decoder_floor=decoder_floor,
        x_TSD=None if pending is None else pending.x_TSD,
        pre_TS=None if pending is None else pending.pre_TS,
        candidates_TB=None if pending is None else pending.candidates_TB,
        hidden={} if pending is None else pending.hidden,
        logits_V=logits_V,
    )


def same_pages(handed: Handed, cache: KVCache, pages: Sequence[int]) -> int:
    """How many of these pages, from the first on, hold what was handed over to the bit: they need not be held twice."""
    count, device = 0, cache.pages.pool.device
    for page, held in zip(pages, handed.pages, strict=False):
        if not torch.equal(cache.pages.pool[page], held.to(device)):
            break
        count += 1
    return count


def put_in(
    handed: Handed, model: Transformer, cache: KVCache, slot: int, table: Tensor, prompt: Prompt, shared: int = 0
) -> None:
    """Fill a request's pages and its slot. For `replay` the slot stands at its start already.

    prompt: the ids, and which of them are images; features are not looked at. shared: leading pages that are there.
    """
    device = cache.pages.pool.device
    for page, held in zip(table[shared : len(handed.pages)].tolist(), handed.pages[shared:], strict=True):
        cache.pages.pool[page] = held.to(device)
    if handed.kind == "replay":
        write_tails(cache.slots, slot, handed.rows)
        return
    write_slot(cache.slots, model.layout, slot, handed.rows)
    if handed.kind != "streams":
        return
    state = cache.slots.states[slot]
    state.pending = _crossing(handed, model, prompt)
    if handed.write_floor < handed.tokens:
        # The decoder's first layer pools these rows itself, from their first on.
        state.tail.reset(state.pending.start)


def _crossing(handed: Handed, model: Transformer, prompt: Prompt) -> Crossing:
    """The rows that wait for the decoder: what was handed over of them, and what follows from the prompt."""
    end, device = handed.tokens, model.device
    first = end - window_rows(model.layout, end)
    assert handed.x_TSD is not None and handed.pre_TS is not None and handed.x_TSD.shape[0] == end - first
    return Crossing(
        start=first,
        end=end,
        x_TSD=handed.x_TSD.to(device),
        pre_TS=handed.pre_TS.to(device),
        image_T=None if prompt.image is None else prompt.image[first:end].to(device),
        engram_TLE=_ngram_rows(model, prompt, first, end),
        candidates_TB=None if handed.candidates_TB is None else handed.candidates_TB.to(device),
        hidden={layer: hidden.to(device) for layer, hidden in handed.hidden.items()},
    )


def _ngram_rows(model: Transformer, prompt: Prompt, first: int, end: int) -> Tensor | None:
    """Engram table rows [n, L, E] of positions [first, end); ids alone decide them, so they are not handed over."""
    if model.ngram is None:
        return None
    size = model.ngram.history_size
    begin = max(0, first - size)
    image = None if prompt.image is None else prompt.image[begin:end].to(model.device)
    compressed = compress_ids(model.token_map, prompt.ids[begin:end].to(model.device), image)
    past = compressed.new_full((size,), BEFORE)
    if first > begin:
        past[-(first - begin) :] = compressed[: first - begin]
    with torch.inference_mode():
        return model.ngram.rows(compressed[first - begin :], past)
