"""A prompt's state as the parts of a parcel, and back; of the sizes that the planner counts, or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rorqual.cache.state import SlotRows, window_rows
from rorqual.config import ModelConfig
from rorqual.disagg.parcel import PARTS, Header, Parcel
from rorqual.engine.handed import Handed
from rorqual.errors import HandoverError
from rorqual.layout import KVLayout
from rorqual.model.transformer import Transformer
from rorqual.planner.traffic import Handover, handover

# n rows, S residual copies, D hidden, B candidate blocks


def planned(model: Transformer, tokens: int, mode: str) -> Handover:
    """Bytes of a hand-over of this model, as the planner has them, at the width of its activations."""
    return handover(model.layout, tokens, mode, model.numerics.act_dtype.itemsize)


def pack(header: Header, handed: Handed) -> Parcel:
    """The parcel of a prompt. On a CPU its pages are views of the cache, and must stay as they are while it lives."""
    rows, crossing = handed.rows, handed.kind == "streams"
    carried = [handed.hidden[layer] for layer in sorted(handed.hidden)]
    if handed.candidates_TB is not None:
        carried.append(handed.candidates_TB.to(torch.int32))
    held: dict[str, Sequence[Tensor]] = {
        "pages": handed.pages,
        "tails": rows.tails,
        "history": [rows.history],
        "rings": [rows.rings],
        "drafts": [rows.drafts],
        "streams": [] if handed.x_TSD is None else [handed.x_TSD],
        "mixing": [] if handed.pre_TS is None else [handed.pre_TS],
        "carried": carried if crossing else [],
        "logits": [] if handed.logits_V is None else [handed.logits_V],
    }
    assert tuple(held) == PARTS
    return Parcel.of(header, {name: [_bytes(x) for x in own if x.numel()] for name, own in held.items()})


def unpack(parcel: Parcel, model: Transformer) -> Handed:
    """The state in a verified parcel.

    Raises:
        HandoverError: a part of another size than this model's.
    """
    header, config, layout = parcel.header, model.config, model.layout
    tokens, mode = header.tokens, header.mode
    wanted, found = planned(model, tokens, mode), parcel.sizes()
    for name in PARTS:
        own, size = getattr(found, name), getattr(wanted, name)
        if own != size:
            raise HandoverError(f"hand-over of {header.request!r}: part {name} has {own} bytes; legal: {size}")
    n, act = window_rows(layout, tokens), model.numerics.act_dtype
    streams = mode == "streams"
    hidden, candidates = _carried(_part(parcel, "carried"), config, layout, n, act) if streams else ({}, None)
    return Handed(
        kind=mode,
        tokens=tokens,
        pages=list(_part(parcel, "pages", copy=False).view(layout.pages(tokens), layout.page_bytes)),
        rows=_slot_rows(parcel, layout, n),
        write_floor=header.write_floor,
        decoder_floor=header.decoder_floor,
        x_TSD=_part(parcel, "streams").view(act).view(n, config.hc_mult, config.hidden_size) if streams else None,
        pre_TS=_part(parcel, "mixing").view(torch.float32).view(n, config.hc_mult) if streams else None,
        candidates_TB=candidates,
        hidden=hidden,
        logits_V=_part(parcel, "logits").view(torch.float32) if mode == "rings" else None,
    )


def _slot_rows(parcel: Parcel, layout: KVLayout, n: int) -> SlotRows:
    config, width = layout.config, layout.window_row_bytes
    mode = parcel.header.mode
    layers = {"replay": 0, "streams": config.decoder_start, "rings": config.num_hidden_layers}[mode]
    drafts = layout.draft_layers if mode == "rings" else 0
    tails, flat, at = [], _part(parcel, "tails").view(torch.float32), 0
    for source in layout.sources:
        if source.ratio > 1:
            count = (source.ratio - 1) * 2 * config.head_dim
            tails.append(flat[at : at + count].view(source.ratio - 1, 2, config.head_dim))
            at += count
    return SlotRows(
        end=parcel.header.tokens,
        tails=tuple(tails),
        history=_part(parcel, "history").view(torch.int64),
        rings=_part(parcel, "rings").view(layers, n if layers else 0, width),
        drafts=_part(parcel, "drafts").view(drafts, n if drafts else 0, width),
    )


def _carried(
    part: Tensor, config: ModelConfig, layout: KVLayout, n: int, act: torch.dtype
) -> tuple[dict[int, Tensor], Tensor | None]:
    """Hidden states of DSpark targets below the seam, in the order of their layers, then candidate blocks."""
    targets = config.dspark_target_layer_ids if layout.draft_layers else ()
    hidden, at = {}, 0
    for layer in sorted(target for target in targets if target < config.decoder_start):
        size = n * config.hidden_size * act.itemsize
        hidden[layer] = part[at : at + size].clone().view(act).view(n, config.hidden_size)
        at += size
    if at == len(part):
        return hidden, None
    return hidden, part[at:].clone().view(torch.int32).view(n, -1).to(torch.int64)


def _part(parcel: Parcel, name: str, copy: bool = True) -> Tensor:
    """uint8 [bytes]. copy: aligned for wider elements, and apart from the message."""
    buffers = parcel.parts.get(name, ())
    if not buffers:
        return torch.empty(0, dtype=torch.uint8)
    (own,) = buffers
    writable = own if not own.readonly else memoryview(bytearray(own))
    found = torch.frombuffer(writable, dtype=torch.uint8)
    return found.clone() if copy else found


def _bytes(tensor: Tensor) -> memoryview:
    """What a tensor holds; on the CPU without a copy where it is contiguous."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # numpy's arrays are buffers before Python 3.12 too
