"""Random inputs of ops: packed regions and weights straight from random bytes, none of them a NaN."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from rorqual.formats.spec import NumberFormat
from rorqual.formats.weights import TILE, Fp4Weight, Fp8Weight, Weight
from rorqual.ops.paged import PagedRegion

PAGE_ENTRIES = 64
"""Groups a page, as for the release's ratio-2 sources."""


def random_region(fmt: NumberFormat, width: int, groups: int, generator: Generator) -> tuple[PagedRegion, Tensor]:
    """At least `groups` entries of an FP4 format, and a shuffled block table over all of its pages."""
    codes, scales = fmt.code_bytes(width), fmt.scale_bytes(width)
    pages = -(-groups // PAGE_ENTRIES)
    pool = torch.randint(256, (pages, PAGE_ENTRIES * (codes + scales)), dtype=torch.uint8, generator=generator)
    region = PagedRegion(
        pool=pool,
        codes_offset=0,
        code_bytes=codes,
        scales_offset=PAGE_ENTRIES * codes,
        scale_bytes=scales,
        entries=PAGE_ENTRIES,
        fmt=fmt,
    )
    scale_bytes = region.views()[1]
    scale_bytes.copy_(random_scales(tuple(scale_bytes.shape), fmt.scale or "e8m0", generator))
    return region, torch.randperm(pages, generator=generator)


def random_scales(shape: tuple[int, ...], kind: str, generator: Generator) -> Tensor:
    """Scale bytes uint8 around 1: E8M0 from 2^-2 to 2^1, E4M3 from 1/2 to just under 2."""
    low, high = (125, 129) if kind == "e8m0" else (0x30, 0x40)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def random_weight(kind: str, shape: tuple[int, int], generator: Generator) -> Weight:
    """An "fp4" or "fp8" weight [N, K]."""
    n, k = shape
    if kind == "fp4":
        packed = torch.randint(256, (n, k // 2), dtype=torch.uint8, generator=generator)
        return Fp4Weight(packed, random_scales((n, k // TILE), "e8m0", generator))
    codes = torch.randint(127, (n, k), dtype=torch.uint8, generator=generator)
    signs = torch.randint(2, (n, k), dtype=torch.uint8, generator=generator) << 7
    return Fp8Weight(codes | signs, random_scales((-(-n // TILE), -(-k // TILE)), "e8m0", generator))


def sorted_choice(rows: int, count: int, among: int, generator: Generator) -> Tensor:
    """int64 [rows, count], each row distinct and ascending, as a top-k gives them."""
    return torch.stack([torch.randperm(among, generator=generator)[:count].sort().values for _ in range(rows)])
