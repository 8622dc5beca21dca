"""Reading what a user hands in as a file: token ids, tensors to inject."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rorqual.errors import InputError


def read_ids(path: Path, name: str) -> Tensor:
    """Token ids int64 [N] from a JSON list, a .npy array, or a safetensors file with one tensor (or `input_ids`).

    Raises:
        InputError: no such file, another kind of file, or not a list of integers.
    """
    if not path.is_file():
        raise InputError(f"{name}: {path} does not exist")
    try:
        found = _read(path)
    except (ValueError, OSError, EOFError, SafetensorError, KeyError, RecursionError, MemoryError) as error:
        raise InputError(f"{name}: {path} cannot be read ({' '.join(str(error).split())})") from error
    if found.dtype.is_floating_point or found.dtype == torch.bool:
        raise InputError(f"{name}: {path} holds {found.dtype}; legal: integers")
    return found.to(torch.int64)


def _read(path: Path) -> Tensor:
    if path.suffix == ".json":
        values = json.loads(path.read_text())
        if not isinstance(values, list) or not all(type(v) is int for v in values):
            raise ValueError("a JSON list of integers is needed")
        return torch.tensor(values, dtype=torch.int64)
    if path.suffix == ".npy":
        try:
            values = np.load(path, allow_pickle=False)
        except ValueError as error:
            raise ValueError("not a .npy array of numbers") from error
        return torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
    if path.suffix == ".safetensors":
        tensors = load_file(path)
        if len(tensors) > 1 and "input_ids" not in tensors:
            raise ValueError(f"{len(tensors)} tensors, none of them input_ids")
        return tensors["input_ids"] if "input_ids" in tensors else next(iter(tensors.values()))
    raise ValueError("legal: .json, .npy, .safetensors")


def read_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """Every tensor of a safetensors file.

    Raises:
        InputError: no such file, or not a safetensors file.
    """
    if not path.is_file():
        raise InputError(f"{name}: {path} does not exist")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{name}: {path} is not a safetensors file ({error})") from error
