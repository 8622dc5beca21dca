"""One small random checkpoint, and a way to make damaged copies of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_files import write_index
from safetensors.torch import load_file, save_file

from rorqual.checkpoint.random import write_random
from rorqual.config import ModelConfig

Edit = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture(scope="session")
def tiny_folder(tiny_config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native checkpoint of `tiny_config` in one file, without a tokenizer. Tests read it only."""
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_random(tiny_config, folder, seed=1)
    return folder


@pytest.fixture
def edited(tiny_folder: Path, tmp_path: Path) -> Callable[[Edit], Path]:
    """Copy the tiny checkpoint with its tensors changed by a function, written by the safetensors library."""

    def make(edit: Edit) -> Path:
        tensors = load_file(tiny_folder / "model.safetensors")
        edit(tensors)
        folder = tmp_path / "edited"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture
def sharded(tiny_folder: Path, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """The tiny checkpoint in three shards with an index, written by the safetensors library; and the index's map."""
    tensors = load_file(tiny_folder / "model.safetensors")
    folder = tmp_path / "sharded"
    folder.mkdir()
    names = sorted(tensors)
    weight_map = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    shutil.copy(tiny_folder / "config.json", folder)
    write_index(folder, weight_map)
    return folder, weight_map
