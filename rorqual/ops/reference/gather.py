"""Dequantised entries by group index, in plain torch. The fast twin is `rorqual.ops.fast.gather`."""

from __future__ import annotations

from torch import Tensor

from rorqual.formats.codec import dequantize
from rorqual.ops.paged import PagedRegion


def gather_rows(region: PagedRegion, block_table: Tensor, index: Tensor) -> Tensor:
    """Entries of groups `index` int64 [...] as fp32 [..., width]; index -1 gives zeros.

    Where an index is -1 nothing is read, so a poisoned page (NaN scale bytes) cannot reach the result through it.

    Args:
        region: the entries.
        block_table: int64 [pages of the sequence].
        index: int64 [...] group indices.

    Raises:
        IndexError: an index below -1 or beyond the block table.
    """
    absent = index == -1
    present = index[~absent]
    codes, scales = region.read(block_table, present)
    rows = dequantize(codes, scales, region.fmt)
    if present.numel() == index.numel():
        return rows.view(*index.shape, region.width)
    out = rows.new_zeros(*index.shape, region.width)
    out[~absent] = rows
    return out
