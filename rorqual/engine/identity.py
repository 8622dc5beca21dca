"""Which model a cache is of: what decides the values that its pages hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rorqual.checkpoint.table import EngramTable
from rorqual.model.transformer import Transformer
from rorqual.store.interface import StoreIdentity

SAMPLED_BYTES = 4096
"""Of each tensor's beginning."""
SAMPLED_ROWS = 4
"""Of a table that may be on disk."""
PARTS = ("tensor", "codes", "packed", "scales")
"""What holds the values of a weight or a table, whichever kind it is."""


def fingerprint(model: Transformer, *, decoder: bool = False) -> str:
    """sha256 (hex) of config, numerics, and the beginning of every tensor that decides what a page holds.

    Those are the tower's, the encoder's and the last source's: what decoder and drafts hold writes no global KV, and a
    model without its decoder has the fingerprint of the whole one. A checkpoint that was trained on differs in all of
    its vectors and matrices, one that an adapter was merged into in some of its matrices: their beginnings tell. Of a
    list, such as the experts', the first and the last are looked at. Nothing is read through, which would take as long
    as loading it.

    decoder: of what decoder, drafts and head compute too: window KV and logits.
    """
    total = hashlib.sha256(f"{model.config.fingerprint()} {model.numerics}".encode())
    for name, value in _deciding(model, decoder):
        for tensor in _tensors(value):
            total.update(f"{name} ".encode() + _bytes(tensor))
    return total.hexdigest()


def store_identity(model: Transformer) -> StoreIdentity:
    """Whose pages a store holds that is used with this model."""
    layout = model.layout
    return StoreIdentity(fingerprint=fingerprint(model), page_tokens=layout.page_tokens, page_bytes=layout.page_bytes)


def _deciding(model: Transformer, decoder: bool) -> Iterator[tuple[str, object]]:
    """What is held by the parts that write global KV, under names that are the same with a decoder and without."""
    body = model.backbone
    yield "token_map", model.token_map
    yield "embed", body.embed
    parts: dict[str, nn.Module | None] = {"encoder": body.encoder, "vision": model.vision}
    if body.has_seam:
        first = body.first_of_decoder
        yield "seam.attn_norm", first.attn_norm
        parts |= {"seam.engram": first.engram, "seam.compressor": first.compressor}
    if decoder:
        yield from (("norm", body.norm), ("head", body.head))
        parts |= {"decoder": body.decoder, "draft": model.draft}
    for prefix, part in parts.items():
        for name, module in part.named_modules() if part is not None else ():
            held = {**vars(module), **module._parameters}
            for key in sorted(key for key in held if not key.startswith("_")):
                yield f"{prefix}.{name}.{key}", held[key]


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, EngramTable):
        yield value.rows(torch.arange(SAMPLED_ROWS))
    elif isinstance(value, list | tuple):
        for one in (*value[:1], *value[1:][-1:]):
            yield from _tensors(one)
    else:
        for part in PARTS:
            found = getattr(value, part, None)
            if isinstance(found, Tensor):
                yield found


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().flatten()
    first = flat[: max(1, SAMPLED_BYTES // flat.element_size())]
    return first.contiguous().view(torch.uint8).cpu().numpy().tobytes()
