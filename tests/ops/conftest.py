"""Paged regions for the ops that read the cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rorqual.formats.codec import quantize
from rorqual.formats.spec import NumberFormat
from rorqual.ops.paged import PagedRegion

MakeRegion = Callable[..., tuple[PagedRegion, Tensor]]


def build_region(
    values_GW: Tensor, fmt: NumberFormat, entries: int = 8, spare_pages: int = 2
) -> tuple[PagedRegion, Tensor]:
    """Groups of a sequence in shuffled pages at odd offsets; every other byte of the pool decodes to NaN.

    Returns the region and its block table.
    """
    packed = quantize(values_GW, fmt)
    groups, code_bytes, scale_bytes = len(values_GW), packed.codes.shape[1], packed.scales.shape[1]
    pages = -(-groups // entries)
    codes_offset = 5
    scales_offset = codes_offset + entries * code_bytes + 3
    pool = torch.full((pages + spare_pages, scales_offset + entries * scale_bytes + 7), 255, dtype=torch.uint8)
    region = PagedRegion(
        pool=pool,
        codes_offset=codes_offset,
        code_bytes=code_bytes,
        scales_offset=scales_offset,
        scale_bytes=scale_bytes,
        entries=entries,
        fmt=fmt,
    )
    block_table = torch.randperm(pages + spare_pages, generator=torch.Generator().manual_seed(groups))[:pages]
    at = torch.arange(groups)
    codes, scales = region.views()
    codes[block_table[at // entries], at % entries] = packed.codes
    scales[block_table[at // entries], at % entries] = packed.scales
    return region, block_table


@pytest.fixture
def make_region() -> MakeRegion:
    return build_region
