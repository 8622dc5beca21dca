"""The header of a safetensors file: where each tensor lies, read without touching a tensor byte.

A file is an unsigned little-endian 64-bit length, that many bytes of JSON, then the data. Offsets in the JSON count
from the start of the data; here they are absolute. A file is accepted only when its tensors tile the data exactly: no
hole, no overlap, nothing after the last one. So a truncated download and a damaged header are found before anything is
computed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rorqual.errors import CheckpointError

ELEMENT_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 256 * 2**20


class TensorEntry(NamedTuple):
    """One tensor of a file: `[start, end)` are byte offsets in that file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file by name. CheckpointError when the file is truncated, damaged or repeats a name."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(LENGTH_BYTES)
            if len(prefix) < LENGTH_BYTES:
                raise CheckpointError(f"{path}: truncated: {file_bytes} bytes hold no safetensors header")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: not a safetensors file: its header claims {length:,} bytes")
            if LENGTH_BYTES + length > file_bytes:
                raise CheckpointError(
                    f"{path}: truncated: the header is {length:,} bytes long, the file {file_bytes:,} bytes"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    entries = _parse(path, text, LENGTH_BYTES + length)
    _check_tiling(path, entries, LENGTH_BYTES + length, file_bytes)
    return entries


def _parse(path: Path, text: bytes, data_start: int) -> dict[str, TensorEntry]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: duplicate key {twice!r} in the header")
        return record

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: damaged header: not JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: damaged header: a JSON object is expected")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, record, data_start) for name, record in header.items()}


def _entry(path: Path, name: str, record: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = record["dtype"], record["shape"], record["data_offsets"]
        sound = isinstance(dtype, str) and type(start) is int and type(end) is int
        sound = sound and all(type(size) is int and size >= 0 for size in shape)
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or not 0 <= start <= end:
        raise CheckpointError(f"{path}: damaged header: {name!r} needs dtype, shape and two ascending data_offsets")
    if dtype not in ELEMENT_BYTES:
        raise CheckpointError(f"{path}: {name} has dtype {dtype!r}; known: {', '.join(ELEMENT_BYTES)}")
    needed = math.prod(shape) * ELEMENT_BYTES[dtype]
    if end - start != needed:
        raise CheckpointError(
            f"{path}: {name} is {dtype} {list(shape)}, {needed:,} bytes, but its data_offsets span {end - start:,}"
        )
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + end)


def _check_tiling(path: Path, entries: Mapping[str, TensorEntry], data_start: int, file_bytes: int) -> None:
    previous, reached = "the header", data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start < reached:
            raise CheckpointError(f"{path}: overlapping data: {name} begins inside {previous}")
        if entry.start > reached:
            raise CheckpointError(f"{path}: {entry.start - reached:,} unnamed bytes between {previous} and {name}")
        if entry.end > file_bytes:
            raise CheckpointError(f"{path}: truncated: {name} ends at byte {entry.end:,}, the file has {file_bytes:,}")
        previous, reached = name, entry.end
    if reached != file_bytes:
        raise CheckpointError(f"{path}: {file_bytes - reached:,} unnamed bytes after {previous}")
