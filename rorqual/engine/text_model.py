"""What reads a model's prompts and writes its texts, without its weights: configuration and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from rorqual.checkpoint.shipped import shipped_model
from rorqual.checkpoint.tokenizer import read_tokenizer
from rorqual.config import ModelConfig
from rorqual.errors import InputError


class TextModel(Protocol):
    """A loaded model, or as much of one as prompts need."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutWeights:
    """A `TextModel` of a checkpoint whose tensors nobody here opens."""

    config: ModelConfig
    tokenizer: Tokenizer | None

    @classmethod
    def read(cls, path: Path | None = None) -> WithoutWeights:
        """Of a checkpoint folder, or of the model that ships with the package.

        Raises:
            InputError, ConfigError, CheckpointError: no folder, or what it holds is not legal.
        """
        folder = shipped_model() if path is None else path
        if not folder.is_dir():
            raise InputError(f"model: {folder} is not a folder; a checkpoint is one, with config.json and safetensors")
        file = folder / "tokenizer.json"
        return cls(config=ModelConfig.from_json(folder), tokenizer=read_tokenizer(file) if file.exists() else None)
