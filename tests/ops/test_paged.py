"""What kernels keep of a region is that region's own."""

from __future__ import annotations

import copy

import torch

from rorqual.formats.spec import E2M1_E8M0_32
from rorqual.ops.fast.arrays import pool_arrays
from rorqual.ops.paged import PagedRegion


def test_a_deep_copy_of_a_region_reads_its_own_memory() -> None:
    region = PagedRegion(
        pool=torch.zeros(2, 4 * 17, dtype=torch.uint8),
        codes_offset=0,
        code_bytes=16,
        scales_offset=64,
        scale_bytes=1,
        entries=4,
        fmt=E2M1_E8M0_32,
    )
    first, geometry = pool_arrays(region)
    assert pool_arrays(region)[0] is first and pool_arrays(region)[1] is geometry
    twin = copy.deepcopy(region)
    twin.pool.fill_(7)
    assert (pool_arrays(twin)[0] == 7).all() and not first.any()
