"""Index scores of FP4 keys: the Numba twin of `rorqual.ops.reference.index_scores`, the same bits on every path.

The kernels are in `score_bytes` (`vnni`, and `vector` on x86), `score_kernels` (`vector` elsewhere) and `score_plain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rorqual.formats.spec import E2M1_E8M0_32
from rorqual.ops.cpu import Path, best_path, features
from rorqual.ops.fast.decode import check_groups, check_pages, region_arrays
from rorqual.ops.fast.kernel import Kernel, refuse_gradients, workers
from rorqual.ops.fast.score_bytes import score_pairs, score_vnni
from rorqual.ops.fast.score_kernels import KEYS, ROWS, score_vector
from rorqual.ops.fast.score_plain import score_plain
from rorqual.ops.fast.vectors import LANES
from rorqual.ops.paged import PagedRegion
from rorqual.ops.reference import index_scores as plain

# R rows, H index heads, C candidates of a row, b code bytes, s scale bytes

KERNELS: Mapping[Path, Kernel] = MappingProxyType(
    {"vnni": score_vnni, "vector": score_pairs if "avx2" in features() else score_vector, "plain": score_plain}
)


def kernels(path: Path) -> tuple[Kernel, ...]:
    """What the ops of this file run on `path`."""
    return (KERNELS[path],)


def index_scores(
    q_codes_RHb: Tensor,
    q_scales_RHs: Tensor,
    w_RH: Tensor,
    region: PagedRegion,
    block_table: Tensor,
    group0: int,
    group1: int,
    visible_R: Tensor,
    native: bool,
    *,
    path: Path | None = None,
) -> Tensor:
    """As the plain `index_scores`, which also takes the formats other than E2M1/E8M0/32. No gradients.

    path: of `rorqual.ops.cpu`; None takes the best.
    """
    query = (q_codes_RHb, q_scales_RHs, w_RH)
    if region.fmt != E2M1_E8M0_32 or region.pool.device.type != "cpu":
        return plain.index_scores(*query, region, block_table, group0, group1, visible_R, native)
    rows, count = q_codes_RHb.shape[0], group1 - group0
    if rows == 0 or count == 0:
        return torch.empty(rows, count)
    check_groups(region, block_table, group0, min(group1, int(visible_R.max())))
    keys = (_flat(w_RH.new_empty(0, dtype=torch.int64)), group0, count)
    units = -(-count // KEYS) * -(-rows // ROWS)
    return _run(path, query, visible_R, region, block_table, keys, units, native)


def index_scores_at(
    q_codes_RHb: Tensor,
    q_scales_RHs: Tensor,
    w_RH: Tensor,
    region: PagedRegion,
    block_table: Tensor,
    index_RC: Tensor,
    native: bool,
    *,
    path: Path | None = None,
) -> Tensor:
    """As the plain `index_scores_at`; `path` as in `index_scores`."""
    query = (q_codes_RHb, q_scales_RHs, w_RH)
    if region.fmt != E2M1_E8M0_32 or region.pool.device.type != "cpu":
        return plain.index_scores_at(*query, region, block_table, index_RC, native)
    rows, count = index_RC.shape
    if index_RC.numel() == 0:
        return torch.empty(rows, count)
    check_pages(region, block_table, index_RC)
    keys = (_flat(index_RC), 0, count)
    return _run(path, query, index_RC[:0, 0], region, block_table, keys, -(-count // KEYS) * rows, native)


def _run(
    path: Path | None,
    query: tuple[Tensor, Tensor, Tensor],
    visible_R: Tensor,
    region: PagedRegion,
    block_table: Tensor,
    keys: tuple[Any, int, int],
    units: int,
    native: bool,
) -> Tensor:
    codes, scales, w = query
    refuse_gradients(w)
    w = w.detach().to(torch.float32)
    if native:
        w = w.to(torch.bfloat16).float()
    rows, heads = w.shape
    if heads % LANES:
        # Whole panels of sixteen heads: a head of zeros, weighing nothing, adds nothing. Its scale is 1 (byte 127), for
        # arithmetic on the subnormal that byte 0 means is slow.
        more = -heads % LANES
        codes, scales = pad(codes, (0, 0, 0, more)), pad(scales, (0, 0, 0, more), value=127)
        w = pad(w, (0, more))
    out = torch.empty(rows, keys[2])
    tasks = min(workers(), units)
    arrays = (_flat(codes), _flat(scales), _flat(w), _flat(visible_R))
    run = KERNELS[path or best_path()]
    run(arrays, keys, region_arrays(region, block_table), rows, native, tasks, out.view(-1).numpy(), tasks=tasks)
    return out


def _flat(x: Tensor) -> Any:
    return x.contiguous().view(-1).numpy()
