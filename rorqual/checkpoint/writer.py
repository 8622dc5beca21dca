"""Writing a checkpoint as a stream: a plan first (each tensor's file and place in it), then tensors in any order.

No tensor is held for longer than its own write, and one tensor may come in pieces. All files of a folder appear
together: they grow in a hidden sub-folder and are moved out, `config.json` last, once every byte is there.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from rorqual.checkpoint.header import ELEMENT_BYTES, LENGTH_BYTES
from rorqual.checkpoint.index import INDEX_FILE, SINGLE_FILE
from rorqual.checkpoint.mapping import TORCH_DTYPES
from rorqual.errors import CheckpointError
from rorqual.inventory.names import TensorSpec

UNFINISHED = ".unfinished"
"""The sub-folder that a checkpoint grows in. One left by a killed process is cleared by the next."""

_DATA_ALIGNMENT = 64  # the header is padded to it, so that mapped weights start on a cache line


class Place(NamedTuple):
    """Where one tensor goes: a file name, and `[start, end)` in that file."""

    file: str
    start: int
    end: int


class CheckpointWriter:
    """Writes tensors to their places in `folder`. Use as a context manager; `finish` closes and checks."""

    def __init__(self, folder: Path, specs: Iterable[TensorSpec], shard_bytes: int | None = None) -> None:
        """Lay out `specs` (each in its first dtype) and write headers, plus the index when there is more than one file.

        shard_bytes: a file takes tensors, in order, until the next would pass this; None puts all in one file.
        """
        self.folder = folder
        self.places: dict[str, Place] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._missing: dict[str, int] = {}
        self._files: dict[str, BinaryIO] = {}
        shards = _split(list(specs), shard_bytes)
        for number, shard in enumerate(shards, 1):
            file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._open_file(file, shard)
        if len(shards) > 1:
            _write_index(folder / INDEX_FILE, self.places)

    def write(self, name: str, tensor: Tensor, first_row: int = 0) -> None:
        """Put `tensor` at the rows [first_row, first_row + n) of `name`; each row is written once."""
        place = self.places[name]
        assert tensor.dtype == self._dtypes[name], f"{name} is {tensor.dtype}, laid out as {self._dtypes[name]}"
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        row_bytes = data.nbytes // max(1, tensor.shape[0])
        start = place.start + first_row * row_bytes
        assert start + data.nbytes <= place.end, f"{name}: rows beyond its end"
        file = self._files[place.file]
        file.seek(start)
        file.write(data.data)
        self._missing[name] -= data.nbytes

    def finish(self) -> None:
        """Close the files; every byte of every tensor must have been written."""
        self.close()
        short = [name for name, count in self._missing.items() if count]
        assert not short, f"{len(short)} tensors not written exactly once: {', '.join(short[:5])}"

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _open_file(self, name: str, specs: list[TensorSpec]) -> None:
        header, length = _header(specs)
        start = LENGTH_BYTES + length
        for spec in specs:
            self.places[spec.name] = Place(name, start, start + spec.nbytes)
            self._dtypes[spec.name] = TORCH_DTYPES[spec.dtypes[0]]
            self._missing[spec.name] = spec.nbytes
            start += spec.nbytes
        file = (self.folder / name).open("wb")
        self._files[name] = file
        file.write(struct.pack("<Q", length) + header)
        file.truncate(start)


def _split(specs: list[TensorSpec], shard_bytes: int | None) -> list[list[TensorSpec]]:
    """Shards in order; inside one, wide elements first, so that every tensor is aligned without a hole."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shard_bytes is not None and shards[-1] and size + spec.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return [sorted(shard, key=lambda spec: -ELEMENT_BYTES[spec.dtypes[0]]) for shard in shards]


def _header(specs: Iterable[TensorSpec]) -> tuple[bytes, int]:
    record: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        offsets = [offset, offset + spec.nbytes]
        record[spec.name] = {"dtype": spec.dtypes[0], "shape": list(spec.shape), "data_offsets": offsets}
        offset += spec.nbytes
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + LENGTH_BYTES) % _DATA_ALIGNMENT)
    return text, len(text)


def _write_index(path: Path, places: Mapping[str, Place]) -> None:
    total = sum(place.end - place.start for place in places.values())
    document = {"metadata": {"total_size": total}, "weight_map": {name: place.file for name, place in places.items()}}
    path.write_text(json.dumps(document, indent=2) + "\n")


@contextmanager
def new_checkpoint_folder(out: Path) -> Iterator[Path]:
    """A folder to build a checkpoint in; what stands there at the end is moved to `out`, on an error nothing is left.

    CheckpointError when `out` exists and is not empty, or cannot be made.
    """
    existed = out.exists()
    unfinished = out / UNFINISHED
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = [child.name for child in out.iterdir() if child.name != UNFINISHED]
        if others:
            raise CheckpointError(f"{out} is not empty (it holds {others[0]}); give a new or empty folder")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be made: {error.strerror or error}") from None
    try:
        yield unfinished
        # The config last: without it nobody takes the folder for a checkpoint.
        for path in sorted(unfinished.iterdir(), key=lambda path: path.name == "config.json"):
            path.rename(out / path.name)
        unfinished.rmdir()
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not existed:
            _remove_if_empty(out)
        raise


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
