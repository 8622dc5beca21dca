"""Which model a cache is of: what decides the values that its pages hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rorqual.model.transformer import Transformer
from rorqual.store.interface import StoreIdentity

SAMPLED_BYTES = 1 << 16
"""Of each tensor's beginning."""


def fingerprint(model: Transformer) -> str:
    """sha256 (hex) of config, numerics, the vectors behind the pages and the beginning of the embedding.

    Pages hold what tower, encoder and the last source's compressor make, so theirs are the vectors (norms, biases,
    sinks): a model without its decoder has the fingerprint of the whole one. Two checkpoints of one config differ in
    them; the matrices are not read through, which would take as long as loading them.
    """
    total = hashlib.sha256(f"{model.config.fingerprint()} {model.numerics}".encode())
    for name, tensor in _vectors(model):
        total.update(name.encode() + _bytes(tensor))
    total.update(_bytes(model.backbone.embed))
    return total.hexdigest()


def store_identity(model: Transformer) -> StoreIdentity:
    """Whose pages a store holds that is used with this model."""
    layout = model.layout
    return StoreIdentity(fingerprint=fingerprint(model), page_tokens=layout.page_tokens, page_bytes=layout.page_bytes)


def _vectors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one dimension, by name. Most are plain attributes, which torch's own lists do not have."""
    backbone = model.backbone
    parts: list[tuple[str, nn.Module]] = [("encoder", backbone.encoder)]
    if backbone.has_seam:
        yield "seam.attn_norm", backbone.first_of_decoder.attn_norm
        parts.append(("seam.compressor", backbone.first_of_decoder.compressor))
    if model.vision is not None:
        parts.append(("vision", model.vision))
    for prefix, part in parts:
        for name, module in part.named_modules():
            own = {**vars(module), **dict(module.named_parameters(recurse=False))}
            for key, value in sorted(own.items()):
                if isinstance(value, Tensor) and value.dim() <= 1:
                    yield f"{prefix}.{name}.{key}", value


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().flatten()
    first = flat[: max(1, SAMPLED_BYTES // flat.element_size())]
    return first.contiguous().view(torch.uint8).cpu().numpy().tobytes()
