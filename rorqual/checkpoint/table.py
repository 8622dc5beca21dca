"""An Engram table on disk: hundreds of millions of rows of which a token reads 24 (SPEC 8).

Rows are gathered from the mapped file, so only the pages that hold them are ever read. Scales may stand anywhere, in
another shard as well. Working memory is bounded by the chunk, whatever the number of rows asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.errors import CheckpointError, FormatError
from rorqual.formats.codec import dequantize
from rorqual.formats.fp8 import E8M0_NAN
from rorqual.formats.spec import E4M3_E8M0_32

# R rows of the table, D width

CHUNK_ROWS = 16_384
"""Look-ups served at once: 4 MiB of codes and 16 MiB of fp32 at a width of 256."""

_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class EngramTable:
    """Rows by id, as fp32.

    Args:
        weight: plain [R, D] (fp32, bf16), or FP8 codes [R, D] (float8_e4m3fn or uint8).
        scale: E8M0 bytes [R, ceil(D/32)] of an FP8 table (float8_e8m0fnu or uint8), None for a plain one.
        name: what errors call it.

    Raises:
        FormatError: shapes or dtypes that are none of these.
    """

    def __init__(self, weight: Tensor, scale: Tensor | None = None, name: str = "Engram table") -> None:
        self.name = name
        if scale is None:
            if weight.dtype not in _PLAIN_DTYPES or weight.ndim != 2:
                raise FormatError(f"{name}: a table without scales is plain [rows, width], got {weight.dtype}")
            self._weight, self._scale = weight, None
            return
        if weight.dtype not in (torch.uint8, torch.float8_e4m3fn):
            raise FormatError(f"{name}: a table with scales holds float8_e4m3fn codes, got {weight.dtype}")
        rows, width = weight.shape
        expected = (rows, E4M3_E8M0_32.scale_bytes(width))
        if tuple(scale.shape) != expected:
            raise FormatError(f"{name}: codes {(rows, width)} need scales {expected}, got {tuple(scale.shape)}")
        self._weight, self._scale = weight.view(torch.uint8), scale.view(torch.uint8)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, width)."""
        return self._weight.shape[0], self._weight.shape[1]

    @property
    def packed(self) -> tuple[Tensor, Tensor] | None:
        """Codes and scales of an FP8 table as uint8, where they stand; None of a plain one."""
        return None if self._scale is None else (self._weight, self._scale)

    def rows(self, index: Tensor) -> Tensor:
        """int64 [...] row ids -> fp32 [..., width], on the ids' device; the table stays where it is, in its file.

        CheckpointError when a row that is read has the scale byte 255 (NaN): a table is too large to look through when
        it is opened.
        """
        flat = index.reshape(-1).to(self._weight.device)
        out = torch.empty(flat.numel(), self.shape[1])
        for start in range(0, flat.numel(), CHUNK_ROWS):
            # Repeated rows of a chunk are read once, and in ascending order: the file is read forwards.
            ids, position = torch.unique(flat[start : start + CHUNK_ROWS], return_inverse=True)
            low, high = int(ids[0]), int(ids[-1])
            assert 0 <= low <= high < self.shape[0], f"{self.name}: row ids {low}..{high} of {self.shape[0]} rows"
            torch.index_select(self._expand(ids), 0, position, out=out[start : start + CHUNK_ROWS])
        return out.view(*index.shape, self.shape[1]).to(index.device)

    def _expand(self, ids: Tensor) -> Tensor:
        """fp32 [n, D] of ascending row ids [n]."""
        codes = self._weight.index_select(0, ids)
        if self._scale is None:
            return codes.to(torch.float32)
        scales = self._scale.index_select(0, ids)
        bad = (scales == E8M0_NAN).any(dim=1)
        if bool(bad.any()):
            raise CheckpointError(f"{self.name}.scale: scale byte 255 (NaN) in row {int(ids[bad][0])}; legal: 0..254")
        return dequantize(codes, scales, E4M3_E8M0_32)
