"""Dequantised entries by group index: the Numba twin of `rorqual.ops.reference.gather`, the same bits."""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from numba import prange
from torch import Tensor

from rorqual.ops.cpu import Path, best_path
from rorqual.ops.fast.decode import (
    BLOCK,
    DECODED,
    REGION,
    check_pages,
    decode_row,
    decode_row_plain,
    locate,
    region_arrays,
)
from rorqual.ops.fast.kernel import Kernel, kernel, workers
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference.gather import gather_rows as plain_gather_rows

ROWS_A_TASK = 64
"""Fewer rows than this are not worth another thread."""

_SIGNATURE = f"void({REGION}, int64[::1], int64, int64, float32[::1])"


@kernel(_SIGNATURE, parallel=True)
def _gather_vector(region, index, width, tasks, out):
    for task in prange(tasks):
        for i in range(task * index.size // tasks, (task + 1) * index.size // tasks):
            if index[i] < 0:
                out[i * width : (i + 1) * width] = 0
            else:
                codes, scales = locate(region[1], region[2], index[i])
                decode_row(region, codes, scales, width, out, i * width)


@kernel(_SIGNATURE, parallel=True)
def _gather_plain(region, index, width, tasks, out):
    for task in prange(tasks):
        for i in range(task * index.size // tasks, (task + 1) * index.size // tasks):
            if index[i] < 0:
                out[i * width : (i + 1) * width] = 0
            else:
                codes, scales = locate(region[1], region[2], index[i])
                decode_row_plain(region, codes, scales, width, out, i * width)


def kernels(path: Path) -> tuple[Kernel, ...]:
    """What `gather_rows` runs on `path`; odd widths take the plain loops on any."""
    return (_gather_plain,) if path == "plain" else (_gather_vector,)


def gather_rows(region: PagedRegion, block_table: Tensor, index: Tensor, *, path: Path | None = None) -> Tensor:
    """As the plain `gather_rows`, the same bits. Formats that kernels do not read, and other devices, go there.

    path: of `rorqual.ops.cpu`; None takes the best.
    """
    if region.fmt not in DECODED or region.pool.device.type != "cpu":
        return plain_gather_rows(region, block_table, index)
    check_pages(region, block_table, index)
    out = torch.empty(*index.shape, region.width, dtype=torch.float32)
    if not out.numel():
        return out
    tasks = max(1, min(workers(), index.numel() // ROWS_A_TASK))
    vectors = (path or best_path()) != "plain" and region.width % BLOCK == 0
    run = _gather_vector if vectors else _gather_plain
    flat = index.contiguous().view(-1).numpy()
    run(region_arrays(region, block_table), flat, region.width, tasks, out.view(-1).numpy(), tasks=tasks)
    return out
