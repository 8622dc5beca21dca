"""A checkpoint as the beginning of a training run: its values as parameters, its tokenizer for the texts."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.checkpoint.load import Checkpoint
from rorqual.checkpoint.tokenizer import TOKENIZER_FILE, read_tokenizer
from rorqual.config import ModelConfig
from rorqual.errors import InputError
from rorqual.inventory.names import TensorSpec, is_quantised_pair
from rorqual.training.parameters import trained_specs


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """An opened checkpoint in the release's layout, quantised or not, of a text model."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Start:
        """Config and tokenizer; values are read by `values`.

        Raises:
            InputError: not a folder, or without a tokenizer.
            ConfigError, CheckpointError: its config or tokenizer cannot be read.
        """
        path = Path(folder)
        if not path.is_dir():
            raise InputError(f"init: {path} is not a folder; a checkpoint is a folder with config.json and safetensors")
        config = ModelConfig.from_json(path)
        if not (path / TOKENIZER_FILE).is_file():
            raise InputError(f"init: {path} has no {TOKENIZER_FILE}; texts cannot be read for it")
        return cls(folder=path, config=config, tokenizer=read_tokenizer(path / TOKENIZER_FILE))

    def values(self, wanted: ModelConfig) -> dict[str, Tensor]:
        """fp32 by name, as `trained_specs(wanted)` names them, unpacked and dequantised.

        A checkpoint in the formats of `wanted` is left as it is by a run that does not train it: what was rounded to a
        format once stays itself when it is rounded again.

        Raises:
            InputError: `wanted` is another model; formats of weights may differ.
            CheckpointError: tensors that are missing, damaged, or not those of the checkpoint's config.
        """
        theirs = self.config.replace(weights=wanted.weights)
        for field in dataclasses.fields(ModelConfig):
            ours, found = getattr(wanted, field.name), getattr(theirs, field.name)
            if ours != found:
                raise InputError(
                    f"init: {self.folder} is another model: its {field.name} is {found}, the recipe's is {ours}"
                )
        checkpoint = Checkpoint.open(self.folder, self.config)
        return {name: _value(checkpoint, spec) for name, spec in trained_specs(self.config).items()}


def _value(checkpoint: Checkpoint, spec: TensorSpec) -> Tensor:
    scope, name = checkpoint.scope(), spec.name.removesuffix(".weight")
    if not is_quantised_pair(spec):
        return scope.tensor(spec.name).to(torch.float32)
    if spec.part == "engram_tables":
        table = scope.table(name)
        return table.rows(torch.arange(table.shape[0]))
    return scope.weight(name).expand().to(torch.float32)
