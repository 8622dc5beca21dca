"""The end of a trace: what the cache holds after the last step, and how recorded pieces become one tensor."""

from __future__ import annotations

import re

import torch
from torch import Tensor
from torch.nn import functional as F

from rorqual.engine.sequence import Sequence
from rorqual.formats.codec import Packed, dequantize
from rorqual.model.tap import Recorder
from rorqual.ops.paged import PagedRegion

GROUP_TENSOR = re.compile(r"(latent|compress_kv|index_k)(\.packed|\.scale)?$")


def is_row_tensor(name: str) -> bool:
    """Whether a prompt tensor has one row a position (and not one a group, or none)."""
    if ".decode" in name or ".spec." in name or ".state." in name or name.endswith((".first_row", "input_ids")):
        return False
    return (
        not GROUP_TENSOR.search(name) and ".image." not in name and ".engram." not in name.replace(".engram.gate", "")
    )


def join_pieces(name: str, pieces: list[Tensor]) -> Tensor:
    """Concatenate along rows; score rows of different chunks are as wide as the context was, so pad with -inf."""
    if len(pieces) == 1:
        return pieces[0]
    if name.endswith((".index_score", ".candidates")):
        width = max(p.shape[1] for p in pieces)
        fill = float("-inf") if name.endswith(".index_score") else 0
        pieces = [F.pad(p, (0, width - p.shape[1]), value=fill) for p in pieces]
    return torch.cat(pieces)


def record_truncated(sequence: Sequence, tap: Recorder, first_row: int) -> None:
    """What a truncated prefill left in the cache: window codes of the rows that every layer ran on, and the packed
    global KV of all complete groups, those written before a hit included."""
    config, cache = sequence.model.config, sequence.cache
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}.window_codes_last"
        if tap.wants(name):
            tap.add(name, cache.slots.rings.read(layer, sequence.slot, first_row, sequence.length).codes)
    for source in config.kv_source_layer_ids:
        for kind, region in (("compress_kv", cache.pages.main[source]), ("index_k", cache.pages.index[source])):
            packed = group_rows(region, sequence.block_table, sequence.length // config.roles[source].ratio)
            for part, value in (("packed", packed.codes), ("scale", packed.scales)):
                name = f"layers.{source}.{kind}.{part}"
                tap.pieces.pop(tap.prefix + name, None)
                tap.add(name, value)


def record_state(
    sequence: Sequence, tap: Recorder, compressed: Tensor | None, tails: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """state.*: rings by slot = position % window, global KV of all complete groups, tails, n-gram ids.

    tails: source -> (kv, score) [m, C], slot = position % m, of the last m positions: slots of a finished group keep
    their values in the released code, so they are kept here too.
    """
    model, cache = sequence.model, sequence.cache
    config = model.config
    prefix, tap.prefix = tap.prefix, "state."
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}.window"
        if tap.wants(name):
            tap.add(name, ring_values(sequence, layer))
    for source in config.kv_source_layer_ids:
        ratio = config.roles[source].ratio
        for kind, region in (("compress_kv", cache.pages.main[source]), ("index_k", cache.pages.index[source])):
            name = f"layers.{source}.{kind}"
            if tap.wants(name):
                tap.add(
                    name, model.numerics.round(group_values(region, sequence.block_table, sequence.length // ratio))
                )
        if source in tails:
            kv, score = tails[source]
            tap.add(f"layers.{source}.tail_kv", kv)
            tap.add(f"layers.{source}.tail_score", score)
    for draft in range(config.num_nextn_predict_layers):
        name = f"mtp.{draft}.window"
        if tap.wants(name):
            tap.add(name, ring_values(sequence, draft, of_draft=True))
    if compressed is not None:
        tap.add("engram_tokens", compressed)
    tap.prefix = prefix


def ring_values(sequence: Sequence, layer: int, *, of_draft: bool = False) -> Tensor:
    """Window keys [W, C] of the last W positions, slot = position % W; unwritten slots are zero."""
    model, slots = sequence.model, sequence.cache.slots
    window = model.config.sliding_window
    rings = slots.draft_rings if of_draft else slots.rings
    state = slots.states[sequence.slot]
    span = state.draft if of_draft else state.encoder if layer < model.config.decoder_start else state.decoder
    start, end = max(span.hi - window, span.held_from(rings.rows)), span.hi
    held = rings.read(layer, sequence.slot, start, end)
    out = torch.zeros(window, model.config.head_dim)
    out[torch.arange(start, end) % window] = dequantize(held.codes, held.scales, rings.fmt)
    return model.numerics.round(out)


def group_rows(region: PagedRegion, block_table: Tensor, groups: int) -> Packed:
    """Packed entries of groups [0, groups) of a sequence."""
    at = torch.arange(groups)
    codes, scales = region.views()
    pages, slots = block_table[at // region.entries], at % region.entries
    return Packed(codes[pages, slots], scales[pages, slots])


def group_values(region: PagedRegion, block_table: Tensor, groups: int) -> Tensor:
    """Dequantised entries [groups, width] of a sequence."""
    return dequantize(*group_rows(region, block_table, groups), region.fmt)
