"""From a checkpoint folder to one table: which file holds which tensor, and where in it.

Two arrangements: one `model.safetensors`, or shards named by `model.safetensors.index.json` (`weight_map`: tensor name
to shard file). Only safetensors is read; pickled weights can run code when opened and are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rorqual.checkpoint.header import TensorEntry, read_header
from rorqual.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".h5", ".msgpack")


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint: its file and its place in it."""

    path: Path
    entry: TensorEntry


def read_index(path: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by name, in file order. `path` is a folder or one .safetensors file.

    CheckpointError when nothing can be read there, a shard is missing or damaged, a name stands in two shards, or index
    and shards disagree.
    """
    path = Path(path)
    if path.is_file():
        return _one_file(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder")
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.exists() and index.exists():
        raise CheckpointError(f"{path}: holds both {SINGLE_FILE} and {INDEX_FILE}; keep one")
    if single.exists():
        return _one_file(single)
    if index.exists():
        return _shards(path, _read_weight_map(index))
    raise CheckpointError(f"{path}: no {SINGLE_FILE} and no {INDEX_FILE}{_what_else(path)}")


def _one_file(path: Path) -> dict[str, StoredTensor]:
    if path.suffix != SUFFIX:
        raise CheckpointError(f"{path}: only {SUFFIX} checkpoints are read")
    return {name: StoredTensor(path, entry) for name, entry in read_header(path).items()}


def _what_else(folder: Path) -> str:
    """A hint for the line: pickled weights, or shards whose index is gone."""
    names = sorted(child.name for child in folder.iterdir() if child.is_file())
    other = [name for name in names if name.endswith(_OTHER_FORMATS)]
    if other:
        return f"; {other[0]} is not safetensors, the only format that is read"
    shards = [name for name in names if name.endswith(SUFFIX)]
    return f"; {shards[0]} needs the index that names it" if shards else ""


def _read_weight_map(index: Path) -> dict[str, str]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record: dict[str, Any] = {}
        for name, value in pairs:
            if name in record:
                raise CheckpointError(f"{index}: duplicate key {name!r}")
            record[name] = value
        return record

    try:
        document = json.loads(index.read_bytes(), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: not JSON ({error})") from None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: needs a weight_map from tensor names to shard files")
    return weight_map


def _shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = _shard_path(folder, shard, weight_map)
        for name, entry in read_header(path).items():
            if name in found:
                raise CheckpointError(f"{name} stands in two shards, {found[name].path.name} and {shard}")
            found[name] = StoredTensor(path, entry)
    _check_against_map(folder, weight_map, found)
    return found


def _shard_path(folder: Path, shard: str, weight_map: Mapping[str, str]) -> Path:
    index = folder / INDEX_FILE
    if Path(shard).name != shard or not shard.endswith(SUFFIX):
        raise CheckpointError(f"{index}: {shard!r} is not the name of a {SUFFIX} file beside it")
    path = folder / shard
    if not path.is_file():
        names = [name for name, where in weight_map.items() if where == shard]
        raise CheckpointError(f"{path}: missing shard; {INDEX_FILE} puts {_several(names)} there")
    return path


def _check_against_map(folder: Path, weight_map: Mapping[str, str], found: Mapping[str, StoredTensor]) -> None:
    for name, shard in weight_map.items():
        if name not in found:
            raise CheckpointError(f"{folder / shard}: {INDEX_FILE} puts {name} there, but the file does not hold it")
        if found[name].path.name != shard:
            raise CheckpointError(f"{INDEX_FILE} puts {name} in {shard}, but it stands in {found[name].path.name}")
    stray = [name for name in found if name not in weight_map]
    if stray:
        raise CheckpointError(f"{found[stray[0]].path}: holds {_several(stray)}, which {INDEX_FILE} does not name")


def _several(names: Iterable[str]) -> str:
    first, *rest = names
    return f"{first} and {len(rest):,} more" if rest else first
