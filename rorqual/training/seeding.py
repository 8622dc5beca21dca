"""Random choices keyed by what they are for, so that they depend on nothing that was drawn before."""

from __future__ import annotations

import hashlib

import torch


def keyed_generator(*key: str | int) -> torch.Generator:
    """A CPU generator of its own for every key. Hashed: neighbouring seeds and numbers must not share a stream."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
