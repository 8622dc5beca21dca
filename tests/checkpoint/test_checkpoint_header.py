"""A damaged file is one clear CheckpointError, never another exception and never a wrong tensor (field case 37)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rorqual.checkpoint.header import read_header
from rorqual.errors import CheckpointError


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.safetensors"
    tensors = {"b": torch.arange(6, dtype=torch.float32).view(2, 3), "a": torch.ones(5, dtype=torch.int8)}
    save_file(tensors | {"empty": torch.ones(0, 4)}, path, metadata={"format": "pt"})
    return path


def test_entries_are_absolute_byte_ranges(sound):
    entries = read_header(sound)
    assert set(entries) == {"a", "b", "empty"}
    assert entries["b"].dtype == "F32" and entries["b"].shape == (2, 3)
    data = sound.read_bytes()[entries["b"].start : entries["b"].end]
    assert struct.unpack("<6f", data) == (0, 1, 2, 3, 4, 5)


def test_every_truncation_is_found(sound):
    data = sound.read_bytes()
    for size in range(len(data)):
        sound.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="truncated"):
            read_header(sound)


def test_any_flipped_header_byte_is_sound_or_a_checkpoint_error(sound):
    data = bytearray(sound.read_bytes())
    length = 8 + struct.unpack("<Q", data[:8])[0]
    refused = 0
    for position in range(length):
        for flip in (0x01, 0x20, 0x80):
            data[position] ^= flip
            sound.write_bytes(data)
            try:
                read_header(sound)
            except CheckpointError as error:
                assert "\n" not in str(error)
                refused += 1
            data[position] ^= flip
    assert refused > length  # most of what the header says is checked


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
         "duplicate key 'a'"),
        ({"a": entry(0, 3), "b": entry(2, 4)}, "overlapping data: b begins inside a"),
        ({"a": entry(0, 1), "b": entry(2, 4)}, "unnamed bytes between a and b"),
        ({"a": entry(0, 3)}, "1 unnamed bytes after a"),
        ({"a": entry(0, 5)}, "truncated: a ends at byte"),
        ({"a": entry(4, 0, [0])}, "two ascending data_offsets"),
        ({"a": entry(-2, 2)}, "two ascending data_offsets"),
        ({"a": entry(0, 4, [-2, -2])}, "two ascending data_offsets"),
        ({"a": {"dtype": "U8", "shape": [4]}}, "needs dtype, shape"),
        ({"a": 7}, "needs dtype, shape"),
        ({"a": entry(0, 4, [2])}, "2 bytes, but its data_offsets span 4"),
        ({"a": entry(0, 4, dtype="F4")}, "dtype 'F4'; known: "),
        ({"a": entry(0, 4, dtype=["F32"])}, "dtype"),  # type: ignore[arg-type]
        ([1, 2], "a JSON object is expected"),
        (b"{not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 5000, "not JSON"),
    ],
)  # fmt: skip
def test_damaged_headers(tmp_path, header, message):
    path = raw(tmp_path / "x.safetensors", header, b"data")
    with pytest.raises(CheckpointError, match=message.replace("[", r"\[")) as caught:
        read_header(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_header_longer_than_the_file(tmp_path):
    path = raw(tmp_path / "x.safetensors", {}, length=1000)
    with pytest.raises(CheckpointError, match="truncated: the header is 1,000 bytes long, the file 10 bytes"):
        read_header(path)


def test_a_file_of_another_kind_does_not_ask_for_a_huge_header(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"PK\x03\x04 this is a zip file, really")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(path)
