"""Numba twin of `rorqual.ops.reference.pool`: one pass, without a mask of every group."""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from numba import prange
from torch import Tensor

from rorqual.ops.fast.kernel import kernel
from rorqual.ops.fast.linear import parts_of
from rorqual.ops.reference.pool import pool_groups as plain_pool_groups

# R rows, B candidate blocks


@kernel("void(int64[:, ::1], int64[::1], int64, int64[::1], int64)", parallel=True)
def _pool_groups(blocks_RB, visible_R, block, out, parts):
    rows, count = blocks_RB.shape
    for share in prange(parts):
        for r in range(rows * share // parts, rows * (share + 1) // parts):
            for b in range(count):
                first, at = blocks_RB[r, b] * block, (r * count + b) * block
                last = min(block, visible_R[r] - first) if first >= 0 else 0
                for i in range(max(last, 0)):
                    out[at + i] = first + i
                for i in range(max(last, 0), block):
                    out[at + i] = -1


KERNELS = (_pool_groups,)


def pool_groups(blocks_RB: Tensor, visible_R: Tensor, block: int) -> Tensor:
    """As the plain `pool_groups`, which also serves other devices."""
    if blocks_RB.device.type != "cpu" or not blocks_RB.numel():
        return plain_pool_groups(blocks_RB, visible_R, block)
    rows, count = blocks_RB.shape
    out, parts = torch.empty(rows, count * block, dtype=torch.int64), parts_of(blocks_RB.numel() * block)
    arrays = blocks_RB.contiguous().numpy(), visible_R.contiguous().numpy()
    _pool_groups(*arrays, block, out.view(-1).numpy(), parts, tasks=parts)
    return out
