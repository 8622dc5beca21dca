"""Packed entries inside Triton kernels: where a group's bytes stand, and bytes to exact values.

A kernel sees a region as its pool, the block table, and the numbers of `geometry`, which are constants of a compiled
kernel. Values are put together from bits: no conversion whose rounding, or existence, depends on the GPU.
"""

# Kernels are typed by Triton.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.paged import PagedRegion


def geometry(region: PagedRegion) -> dict[str, int]:
    """A region's constants, by the names of the kernels' arguments."""
    return {
        "PAGE_BYTES": region.pool.shape[1],
        "CODES_OFFSET": region.codes_offset,
        "CODE_BYTES": region.code_bytes,
        "SCALES_OFFSET": region.scales_offset,
        "SCALE_BYTES": region.scale_bytes,
        "ENTRIES": region.entries,
    }


def check(region: PagedRegion, block_table: Tensor, index: Tensor) -> None:
    """Raise IndexError for a group or a page that kernels, which check no bounds, may not follow; -1 is not allowed."""
    region.check(block_table, index)
    if not len(index):
        return
    pages = block_table[int(index.min()) // region.entries : int(index.max()) // region.entries + 1]
    if not 0 <= int(pages.min()) <= int(pages.max()) < region.pool.shape[0]:
        raise IndexError(f"pages {int(pages.min())}..{int(pages.max())} leave [0, {region.pool.shape[0]}), the pool")


@triton.jit
def locate(table, group, present, PAGE_BYTES: tl.constexpr, ENTRIES: tl.constexpr):
    """First byte (int64) of the pages that hold groups, and the groups' rows there; of an absent group, anything."""
    page = tl.load(table + group // ENTRIES, mask=present, other=0)
    return page * PAGE_BYTES, group % ENTRIES


@triton.jit
def e2m1_doubled(code):
    """Codes 0..15 to twice their values, integers of at most 12, as fp32. -0 becomes 0."""
    code = code.to(tl.int32)
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = tl.where(exponent == 0, mantissa, ((mantissa | 2) << exponent) >> 1)
    return tl.where(code & 8 != 0, -magnitude, magnitude).to(tl.float32)


@triton.jit
def e4m3(byte):
    """E4M3 bytes to fp32; 127 and 255 give NaN."""
    byte = byte.to(tl.int32)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    magnitude = tl.where(byte & 127 == 127, float("nan"), magnitude)
    # A product, for the sign of zero: Triton's own minus may be a difference from 0.
    return magnitude * tl.where(byte & 128 != 0, -1.0, 1.0)


@triton.jit
def e8m0(byte):
    """E8M0 bytes to fp32: 0 gives a subnormal, 255 NaN."""
    byte = byte.to(tl.int32)
    power = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
    return tl.where(byte == 255, float("nan"), power)


@triton.jit
def round_bf16(x):
    """fp32 to the nearest bf16, ties to even, kept as fp32. On the bits: the interpreter's own cast truncates."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    # NaN bits would run over.
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
