"""Where packed entries stand inside pages: what every op that reads the cache is handed.

Group g of a sequence lives in page `block_table[g // entries]`, row `g % entries`. Inside the page its codes start at
`codes_offset + row * code_bytes`, its scales at `scales_offset + row * scale_bytes`. Worked example, index keys of the
release's ratio-2 sources (64 entries a page, 64 + 4 bytes each): group 200 is row 8 of the sequence's fourth page.

-1 is the only invalid index. It gathers zeros; any other index outside the block table is an IndexError.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rorqual.formats.codec import Packed
from rorqual.formats.spec import NumberFormat


class Kept(list[Any]):
    """Views of a region's own memory. A deep copy of the region has other memory, and begins without any."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PagedRegion:
    """One kind of entry of one KV source: its stretch of every page, and its number format.

    Args:
        pool: uint8 [pages, page_bytes], contiguous; shared by every region of every source.
        codes_offset: first byte of the codes inside a page.
        code_bytes: bytes of one entry's codes.
        scales_offset: first byte of the scales inside a page.
        scale_bytes: bytes of one entry's scales, 0 for a format without.
        entries: groups a page.
        fmt: how an entry's bytes read.
    """

    pool: Tensor
    codes_offset: int
    code_bytes: int
    scales_offset: int
    scale_bytes: int
    entries: int
    fmt: NumberFormat
    kept: Kept = field(default_factory=Kept, init=False, repr=False, compare=False)
    """What kernels made of the above, once."""

    def __post_init__(self) -> None:
        assert self.pool.dtype == torch.uint8 and self.pool.ndim == 2 and self.pool.is_contiguous(), self.pool.shape
        assert self.entries > 0 and self.scale_bytes == self.fmt.scale_bytes(self.width), (self.entries, self.fmt.name)
        for offset, entry_bytes in ((self.codes_offset, self.code_bytes), (self.scales_offset, self.scale_bytes)):
            assert offset >= 0 and offset + self.entries * entry_bytes <= self.pool.shape[1], "region leaves its page"

    @property
    def width(self) -> int:
        """Elements of one entry."""
        return self.code_bytes * 8 // self.fmt.bits

    def views(self) -> tuple[Tensor, Tensor]:
        """Codes uint8 [pages, entries, code_bytes] and scales uint8 [pages, entries, scale_bytes], without a copy."""
        parts = []
        for offset, entry_bytes in ((self.codes_offset, self.code_bytes), (self.scales_offset, self.scale_bytes)):
            stretch = self.pool[:, offset : offset + self.entries * entry_bytes]
            parts.append(stretch.unflatten(1, (self.entries, entry_bytes)))
        return parts[0], parts[1]

    def read(self, block_table: Tensor, index: Tensor) -> Packed:
        """Packed entries of groups `index` int64 [...], each inside the block table int64 [pages of the sequence].

        Raises:
            IndexError: an index outside [0, len(block_table) * entries), or a page id outside the pool.
        """
        self.check(block_table, index)
        page = block_table[torch.div(index, self.entries, rounding_mode="floor")]
        slot = torch.remainder(index, self.entries)
        codes, scales = self.views()
        return Packed(codes[page, slot], scales[page, slot])

    def check(self, block_table: Tensor, index: Tensor) -> None:
        """Raise IndexError unless every index (-1 is not allowed here) lies inside the block table."""
        limit = block_table.shape[0] * self.entries
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < limit:
            raise IndexError(f"group {int(index.min())}..{int(index.max())} is outside [0, {limit}) of the block table")


class GroupWrite(NamedTuple):
    """A segment's rows, and the groups that they complete.

    row, rows, start: first row, number of rows, position of the first. group, groups: first group and how many. skip:
    how many of them stand in their pages already, and stay. slot: of the tail.
    """

    row: int
    rows: int
    start: int
    group: int
    groups: int
    skip: int
    slot: int
    block_table: Tensor
