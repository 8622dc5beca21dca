"""Entries of pages to fp32 inside Numba kernels, for the three scaled formats, in vectors or in plain loops.

A kernel sees a region as (pool, geometry, table): the pool flattened to bytes, six numbers, the block table. Values are
exact: an element times its scale has few bits. So both ways give the bits of `formats.codec.dequantize`.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from rorqual.formats.fp4 import E2M1_BY_BYTE
from rorqual.formats.fp8 import E4M3_BY_BYTE, E8M0_BY_BYTE
from rorqual.formats.spec import E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32, NumberFormat
from rorqual.ops.cpu import features
from rorqual.ops.fast.kernel import inlined
from rorqual.ops.fast.vectors import (
    ARRAY,
    F32,
    I32,
    LANES,
    VECTOR_F32,
    VECTOR_I8,
    VECTOR_I32,
    call,
    const,
    instruction,
    load_at,
    multiply,
    pick,
    prefetch,
    splat,
    store,
    tuple_of,
)
from rorqual.ops.paged import PagedRegion

Array = NDArray[Any]

DECODED: tuple[NumberFormat, ...] = (E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32)
"""Formats that kernels read; the others go through the plain ops."""

PAIRS, E4M3 = E2M1_BY_BYTE.numpy(), E4M3_BY_BYTE.numpy()
E8M0 = E8M0_BY_BYTE.numpy()
E2M1_VALUES = tuple(PAIRS[:16, 0].tolist())
_E2M1_TABLE, _FOUR_WORDS = ir.Constant(VECTOR_F32, list(E2M1_VALUES)), ir.VectorType(I32, 4)
_LOOKUP = "avx512f" in features()
BLOCK = 32
"""Elements decoded together; kernels that use vectors want widths that are a multiple."""

AHEAD, LINE = 8, 64
"""Entries asked for before they are decoded; bytes of a cache line."""

REGION = "Tuple((uint8[::1], int64[::1], int64[::1], float32[::1]))"
"""Numba type of what `region_arrays` returns."""

# The numbers of `geometry`.
PAGE_BYTES, CODES_OFFSET, CODE_BYTES, SCALES_OFFSET, SCALE_BYTES, ENTRIES, IS_E2M1, GROUP = range(8)


def region_arrays(region: PagedRegion, block_table: Tensor) -> tuple[Array, Array, Array, Array]:
    """(pool bytes, geometry, table, scale table) of a region in one of the `DECODED` formats."""
    scales = E4M3 if region.fmt.scale == "e4m3" else E8M0
    return region.pool.numpy().reshape(-1), geometry_of(region), block_table.contiguous().numpy(), scales


def geometry_of(region: PagedRegion) -> Array:
    """The numbers that kernels find a region's entries by. Never written."""
    places = (region.codes_offset, region.code_bytes, region.scales_offset, region.scale_bytes)
    return _geometry(region.pool.shape[1], *places, region.entries, region.fmt.value == "e2m1", region.fmt.group)


@lru_cache(maxsize=256)
def _geometry(*numbers: int) -> Array:
    return np.array(numbers, dtype=np.int64)


NO_REGION = (np.zeros(0, np.uint8), np.ones(8, np.int64), np.zeros(0, np.int64), E8M0)
"""For kernels that may be called without a region."""


@inlined
def locate(geometry, table, group):
    """First byte of the codes, and of the scales, of a group. The caller has checked that it is in the table."""
    page = group // geometry[ENTRIES]
    return locate_slot(geometry, table[page], group - page * geometry[ENTRIES])


@inlined
def locate_slot(geometry, page_id, slot):
    """`locate` by page id and row of the page."""
    start = page_id * geometry[PAGE_BYTES]
    codes = start + geometry[CODES_OFFSET] + slot * geometry[CODE_BYTES]
    return codes, start + geometry[SCALES_OFFSET] + slot * geometry[SCALE_BYTES]


def _with_sign(builder: Any, magnitude: Any, code: Any, sign_bit: int) -> Any:
    """fp32 from the bits of a magnitude and the sign bit of a code."""
    sign = builder.shl(builder.and_(code, const(VECTOR_I32, 1 << sign_bit)), const(VECTOR_I32, 31 - sign_bit))
    return builder.bitcast(builder.or_(magnitude, sign), VECTOR_F32)


def _e2m1_value(builder: Any, code: Any) -> Any:
    """The low four bits of codes to fp32: exponent and mantissa moved to their places, 0 and 0.5 apart. The sign of
    zero is kept."""
    magnitude = builder.and_(code, const(VECTOR_I32, 7))
    bits = builder.add(builder.shl(magnitude, const(VECTOR_I32, 22)), const(VECTOR_I32, 126 << 23))
    bits = builder.select(
        builder.icmp_unsigned("==", magnitude, const(VECTOR_I32, 1)), const(VECTOR_I32, 126 << 23), bits
    )
    bits = builder.select(builder.icmp_unsigned("==", magnitude, const(VECTOR_I32, 0)), const(VECTOR_I32, 0), bits)
    return _with_sign(builder, bits, code, 3)


@instruction(tuple_of(F32, 2), ARRAY, types.intp)
def e2m1_block(builder: Any, data: Any, offset: Any) -> Any:
    """32 elements, unscaled and in order, from 16 bytes."""
    packed = load_at(builder, data, offset, _FOUR_WORDS)
    pair = ir.Constant(ir.ArrayType(VECTOR_F32, 2), ir.Undefined)
    for half in range(2):
        # Eight codes are a word: each lane takes its word and moves its code to the lowest bits.
        words = builder.shuffle_vector(packed, packed, pick([2 * half + lane // 8 for lane in range(LANES)]))
        code = builder.lshr(words, ir.Constant(VECTOR_I32, [lane % 8 * 4 for lane in range(LANES)]))
        if _LOOKUP:  # which reads the low four bits of its index only
            value = call(builder, "llvm.x86.avx512.permvar.sf.512", VECTOR_F32, _E2M1_TABLE, code)
        else:
            value = _e2m1_value(builder, code)
        pair = builder.insert_value(pair, value, half)
    return pair


@instruction(F32, ARRAY, types.intp)
def e4m3_vector(builder: Any, data: Any, offset: Any) -> Any:
    """16 unscaled elements from 16 bytes; the two NaN codes give NaN."""
    code = builder.zext(load_at(builder, data, offset, VECTOR_I8), VECTOR_I32)
    magnitude = builder.and_(code, const(VECTOR_I32, 127))
    bits = builder.add(builder.shl(magnitude, const(VECTOR_I32, 20)), const(VECTOR_I32, 120 << 23))
    small = builder.fmul(builder.sitofp(magnitude, VECTOR_F32), const(VECTOR_F32, 2.0**-9))
    is_small = builder.icmp_unsigned("<", magnitude, const(VECTOR_I32, 8))
    bits = builder.select(is_small, builder.bitcast(small, VECTOR_I32), bits)
    is_nan = builder.icmp_unsigned("==", magnitude, const(VECTOR_I32, 127))
    bits = builder.select(is_nan, const(VECTOR_I32, 0x7FC00000), bits)
    return _with_sign(builder, bits, code, 7)


@inlined
def decode_row(region, codes, scales, width, out, at):
    """One entry to fp32 out[at .. at + width], in vectors; width is a multiple of 32."""
    pool, geometry, _, scale_table = region
    if geometry[IS_E2M1]:
        # Two scales a block of 32: neighbours when the group is 16, one and the same when it is 32.
        shift = 1 if geometry[GROUP] == LANES else 0
        for block in range(width // BLOCK):
            first, second = e2m1_block(pool, codes + block * LANES)
            first_scale = scale_table[pool[scales + (block << shift)]]
            second_scale = scale_table[pool[scales + (block << shift) + shift]]
            store(out, at + block * BLOCK, multiply(first, splat(first_scale)))
            store(out, at + block * BLOCK + LANES, multiply(second, splat(second_scale)))
    else:
        for block in range(width // BLOCK):
            scale = splat(scale_table[pool[scales + block]])
            for half in range(2):
                start = block * BLOCK + half * LANES
                store(out, at + start, multiply(e4m3_vector(pool, codes + start), scale))


@inlined
def decode_rows(region, groups, first, last, width, out):
    """`decode_row` of groups[first:last], entry m to out[m * width]. Entries stand anywhere in memory, so each is asked
    for while some before it are decoded."""
    for m in range(first, min(first + AHEAD, last)):
        _ask_row(region, groups[m])
    for m in range(first, last):
        if m + AHEAD < last:
            _ask_row(region, groups[m + AHEAD])
        codes, scales = locate(region[1], region[2], groups[m])
        decode_row(region, codes, scales, width, out, m * width)


@inlined
def _ask_row(region, group):
    pool, geometry, table, _ = region
    codes, scales = locate(geometry, table, group)
    for at in range(0, geometry[CODE_BYTES], LINE):
        prefetch(pool, codes + at)
    prefetch(pool, scales)


@inlined
def decode_row_plain(region, codes, scales, width, out, at):
    """`decode_row` in plain loops, for any width."""
    pool, geometry, _, scale_table = region
    group = geometry[GROUP]
    for g in range(width // group):
        scale = scale_table[pool[scales + g]]
        if geometry[IS_E2M1]:
            for j in range(g * group // 2, (g + 1) * group // 2):
                byte = pool[codes + j]
                out[at + 2 * j] = PAIRS[byte, 0] * scale
                out[at + 2 * j + 1] = PAIRS[byte, 1] * scale
        else:
            for j in range(g * group, (g + 1) * group):
                out[at + j] = E4M3[pool[codes + j]] * scale


def check_pages(region: PagedRegion, block_table: Tensor, index: Tensor) -> None:
    """Raise IndexError for an index or a page that kernels, which check no bounds, may not follow; -1 is allowed."""
    if index.numel():
        low, high = (int(edge) for edge in index.aminmax())
        check_groups(region, block_table, min(low + 1, 0), high + 1)


def check_groups(region: PagedRegion, block_table: Tensor, group0: int, group1: int) -> None:
    """As `check_pages` for groups [group0, group1)."""
    if group1 <= group0:
        return
    limit = block_table.shape[0] * region.entries
    if group0 < 0 or group1 > limit:
        raise IndexError(f"groups [{group0}, {group1}) leave [0, {limit}), what the block table holds")
    low, high = (int(edge) for edge in block_table[group0 // region.entries : -(-group1 // region.entries)].aminmax())
    if low < 0 or high >= region.pool.shape[0]:
        raise IndexError(f"pages {low}..{high} leave [0, {region.pool.shape[0]}), the pool")
