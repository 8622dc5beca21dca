"""Global KV: packed entries of every source in contiguous pages.

A page holds `page_tokens` tokens of *all* KV sources (SPEC 11, DESIGN 2): 113,920 bytes in the release. Pages are
addressed by a block table, one per sequence and shared by all sources, because every source advances in lockstep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.cache.memory import zeros_in_large_pages
from rorqual.formats.codec import Packed
from rorqual.formats.spec import NumberFormat
from rorqual.layout import KVLayout, SourceRegion
from rorqual.ops.paged import PagedRegion


class GlobalPages:
    """`num_pages` pages in one uint8 tensor; allocation of page ids is the owner's business (a pool or a session)."""

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.pool = zeros_in_large_pages(num_pages, layout.page_bytes, device=device)
        self.main: dict[int, PagedRegion] = {}
        self.index: dict[int, PagedRegion] = {}
        for source in layout.sources:
            self.main[source.layer_id] = self._region(source, "main", layout.main_format)
            self.index[source.layer_id] = self._region(source, "index", layout.index_format)

    def _region(self, source: SourceRegion, kind: str, fmt: NumberFormat) -> PagedRegion:
        codes, scales = getattr(source, f"{kind}_codes"), getattr(source, f"{kind}_scales")
        return PagedRegion(
            pool=self.pool,
            codes_offset=codes.offset,
            code_bytes=codes.entry_bytes,
            scales_offset=scales.offset,
            scale_bytes=scales.entry_bytes,
            entries=source.entries,
            fmt=fmt,
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated, equal to num_pages x layout.page_bytes."""
        return self.pool.numel()

    def write(self, region: PagedRegion, block_table: Tensor, first_group: int, rows: Packed) -> None:
        """Store groups [first_group, first_group + len(rows)) of a sequence.

        Args:
            region: where entries of this source and kind stand in a page.
            block_table: int64 [pages of the sequence], page ids.
            first_group: index of the first group in the sequence (position // ratio).
            rows: codes uint8 [g, code_bytes] and scales uint8 [g, scale_bytes].
        """
        count = rows.codes.shape[0]
        if count == 0:
            return
        groups = torch.arange(first_group, first_group + count, device=self.pool.device)
        pages = block_table[groups // region.entries]
        slots = groups % region.entries
        codes, scales = region.views()
        codes[pages, slots] = rows.codes
        if region.scale_bytes:
            scales[pages, slots] = rows.scales

    def copy(self, source: int, target: int) -> None:
        """Let page `target` hold what page `source` holds: a last page that two sequences go on writing apart."""
        self.pool[target] = self.pool[source]

    def page(self, page: int) -> memoryview:
        """The bytes of a page: on the CPU the page itself, so to be copied before it is written again."""
        row: Tensor = self.pool[page].cpu()
        return row.numpy().data

    def load(self, page: int, data: bytes) -> None:
        """Let a page hold `page_bytes` bytes that `page` once gave."""
        # Of a bytearray, because torch warns of memory that it must not write.
        self.pool[page] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.pool.device)

    def poison(self, pages: Tensor, byte: int = 0xFF) -> None:
        """Fill pages with a byte whose scales decode to NaN, so that a stale read shows in any output (tests)."""
        self.pool[pages] = byte
