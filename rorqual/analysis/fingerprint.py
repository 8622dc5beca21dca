"""Which checkpoint a study measured: a fingerprint for its document."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rorqual.config import ModelConfig
from rorqual.errors import InputError


def fingerprint(folder: Path, name: str) -> str:
    """sha256 of everything that decides what a checkpoint computes: config, weights, tokenizer. name: of the option.

    Raises:
        InputError: not a folder.
    """
    if not folder.is_dir():
        raise InputError(f"{name}: {folder} is not a folder; a checkpoint is a folder with config.json and safetensors")
    total = hashlib.sha256(ModelConfig.from_json(folder).fingerprint().encode())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("tokenizer.json")]):
        with file.open("rb") as stream:
            total.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()
