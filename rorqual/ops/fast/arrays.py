"""Tensors as kernels take them. Between the kernels of a decoded token a call of torch costs as much as thousands of
multiplications, so what is in the right form already is handed on as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.ops.fast.decode import E4M3, E8M0, geometry_of
from rorqual.ops.fast.row_vectors import Array
from rorqual.ops.paged import PagedRegion


def floats(x: Tensor) -> Array:
    """The tensor's own memory where it is contiguous fp32, else a copy that is."""
    if x.requires_grad:
        x = x.detach()
    if x.dtype is not torch.float32:
        x = x.to(torch.float32)
    return (x if x.is_contiguous() else x.contiguous()).numpy()


def angle_arrays(cos_sin: tuple[Tensor, Tensor]) -> tuple[Array, Array]:
    """cos and sin as `floats`."""
    return floats(cos_sin[0]), floats(cos_sin[1])


def pool_arrays(region: PagedRegion) -> tuple[Array, Array]:
    """The pool's bytes, flat, and the numbers by which a region's entries are found in it."""
    if not region.kept:
        region.kept.append((region.pool.numpy().reshape(-1), geometry_of(region)))
    found: tuple[Array, Array] = region.kept[0]
    return found


def region_arrays(region: PagedRegion, block_table: Tensor) -> tuple[Array, Array, Array, Array]:
    """As `decode.region_arrays`, which it makes once but for the table."""
    pool, geometry = pool_arrays(region)
    scales = E4M3 if region.fmt.scale == "e4m3" else E8M0
    return pool, geometry, block_table.contiguous().numpy(), scales
