"""Views of a memory-mapped file: opening a checkpoint reads no weights, and touching one reads only its pages."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rorqual.checkpoint.header import ELEMENT_BYTES, TensorEntry
from rorqual.errors import CheckpointError

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
assert TORCH_DTYPES.keys() == ELEMENT_BYTES.keys()

# Python names this flag from 3.13 on. Without it Linux counts a private mapping as memory it may have to provide, and
# refuses one of a shard that is larger than the machine.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


class MappedFile:
    """One file, mapped copy-on-write: a view may be written to, the file never changes.

    The mapping lives as long as any view of it. `path` must not be truncated meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = _map_private(file.fileno())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be mapped: {error}") from None
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, entry: TensorEntry) -> Tensor:
        """The tensor as it stands in the file; a copy only where its bytes are not aligned to its elements."""
        raw = self._bytes[entry.start : entry.end]
        if entry.start % ELEMENT_BYTES[entry.dtype]:
            raw = raw.clone()
        return raw.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)

    def expect_random_reads(self, entry: TensorEntry) -> None:
        """Tell the system that rows of this tensor are read here and there: it then fetches no neighbours."""
        if hasattr(mmap, "MADV_RANDOM") and entry.end > entry.start:
            start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_RANDOM, start, entry.end - start)


def _map_private(fileno: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(fileno, 0, access=mmap.ACCESS_COPY)
    return mmap.mmap(fileno, 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
