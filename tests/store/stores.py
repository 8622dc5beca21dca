"""Pages that anybody can make again from their number."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path

from rorqual.store.folder import subfolder
from rorqual.store.index import FILE
from rorqual.store.interface import StoreIdentity
from rorqual.store.segments import SUFFIX

PAGE_BYTES = 2100
"""Two rows of a check and some bytes behind them."""
IDENTITY = StoreIdentity(fingerprint="a model", page_tokens=4, page_bytes=PAGE_BYTES)


def key(number: int) -> bytes:
    return hashlib.sha256(f"key {number}".encode()).digest()


def page(number: int, size: int = PAGE_BYTES) -> bytes:
    return random.Random(number).randbytes(size)


def segments_of(folder: Path, identity: StoreIdentity = IDENTITY) -> list[Path]:
    return sorted(subfolder(folder, identity).glob(f"*{SUFFIX}"))


def index_of(folder: Path, identity: StoreIdentity = IDENTITY) -> Path:
    return subfolder(folder, identity) / FILE


def files_of(folder: Path) -> list[Path]:
    """Segments, the index and its log: whatever holds pages or says where they are."""
    index = index_of(folder)
    return [*segments_of(folder), *(path for path in (index, Path(f"{index}-wal")) if path.exists())]


def flip(path: Path, bit: int) -> None:
    """Turn one bit of a file over, in place."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def copied(folder: Path, to: Path) -> Path:
    """The folder as a process that dies now leaves it; nobody holds the copy's lock."""
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(folder, to))
