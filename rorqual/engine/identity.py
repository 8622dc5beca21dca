"""Which model a cache is of: what decides the values that its pages hold."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rorqual.model.transformer import Transformer
from rorqual.store.interface import StoreIdentity

SAMPLED_BYTES = 1 << 16
"""Of each tensor's beginning."""


def fingerprint(model: Transformer) -> str:
    """sha256 (hex) of config, numerics, the vectors of the model and the beginning of its embedding.

    Two checkpoints of one config differ in their norms, biases and sinks; the matrices are not read through, which
    would take as long as loading them.
    """
    total = hashlib.sha256(f"{model.config.fingerprint()} {model.numerics}".encode())
    for name, tensor in sorted(model.named_parameters()):
        if tensor.dim() <= 1:
            total.update(name.encode() + _bytes(tensor))
    total.update(_bytes(model.backbone.embed))
    return total.hexdigest()


def store_identity(model: Transformer) -> StoreIdentity:
    """Whose pages a store holds that is used with this model."""
    layout = model.layout
    return StoreIdentity(fingerprint=fingerprint(model), page_tokens=layout.page_tokens, page_bytes=layout.page_bytes)


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().flatten()
    first = flat[: max(1, SAMPLED_BYTES // flat.element_size())]
    return first.contiguous().view(torch.uint8).cpu().numpy().tobytes()
