"""What an indexer's queries choose, for a few rows in one kernel: the twin of `model.indexer.Query`'s scans.

    queries quantised, heads completed to whole panels
    scored against every visible group, or against the groups of candidate blocks
    the best groups, and the best blocks of the candidate source

Scores are the kernels of `index_scores`, choices those of `topk`: the bits are those of the op-by-op path.

n rows, I index heads, K index dim, J heads in whole panels, k groups chosen, G groups scored, B blocks, C = B x block.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from rorqual.errors import FormatError
from rorqual.formats.codec import check_finite
from rorqual.formats.spec import E2M1_E8M0_32
from rorqual.formats.weights import TILE
from rorqual.ops.cpu import Path, best_path
from rorqual.ops.fast.arrays import floats, region_arrays
from rorqual.ops.fast.codec import quantize_e2m1_e8m0
from rorqual.ops.fast.decode import ENTRIES, PAGE_BYTES, REGION
from rorqual.ops.fast.index_scores import KERNELS
from rorqual.ops.fast.kernel import Kernel, kernel, refuse_gradients, workers
from rorqual.ops.fast.linear import has_vectors
from rorqual.ops.fast.row_kernels import part, round_bf16
from rorqual.ops.fast.row_vectors import Array
from rorqual.ops.fast.score_kernels import KEYS
from rorqual.ops.fast.topk import SCORES_A_TASK, select
from rorqual.ops.fast.vectors import LANES
from rorqual.ops.paged import PagedRegion

_U32 = np.uint32
PRODUCTS_A_TASK = 1 << 20
"""Products of small integers worth a thread of their own."""
_CHOSEN, _NOT_FINITE, _NO_PAGE, _NAN = range(4)


@part
def _has_pages(geometry, table, pool, blocks_nB, block, visible_n, count):
    """Whether every group that is scored has a page of the pool."""
    pages, entries = pool.size // geometry[PAGE_BYTES], geometry[ENTRIES]
    if not blocks_nB.shape[1]:
        for page in range((count + entries - 1) // entries):
            if page >= table.size or not 0 <= table[page] < pages:
                return False
        return True
    for r in range(blocks_nB.shape[0]):
        for b in range(blocks_nB.shape[1]):
            if blocks_nB[r, b] >= 0 and blocks_nB[r, b] * block < visible_n[r]:
                last = min(blocks_nB[r, b] * block + block, visible_n[r]) - 1
                for page in range(blocks_nB[r, b] * block // entries, last // entries + 1):
                    if page >= table.size or not 0 <= table[page] < pages:
                        return False
    return True


@part
def _panels(q_nIK, w_nI, native, codes_nJb, scales_nJs, w_nJ):
    """Queries quantised, heads completed to panels of sixteen: a head that weighs nothing adds nothing. False where
    there is a NaN or an Inf."""
    heads = q_nIK.shape[1]
    codes_nJb[:, heads:], scales_nJs[:, heads:], w_nJ[:, heads:] = 0, 127, 0
    for r in range(q_nIK.shape[0]):
        bits = q_nIK[r].view(np.uint32)
        if not quantize_e2m1_e8m0(bits, _U32(0), 32, codes_nJb[r, :heads], scales_nJs[r, :heads]):
            return False
        for h in range(heads):
            w_nJ[r, h] = round_bf16(w_nI[r, h]) if native else w_nI[r, h]
    return True


@part
def _pool_groups(blocks_nB, block, visible_n, index_nC):
    """The groups of candidate blocks, -1 where one is not visible."""
    for r in range(blocks_nB.shape[0]):
        for b in range(blocks_nB.shape[1]):
            for i in range(block):
                group = blocks_nB[r, b] * block + i
                index_nC[r, b * block + i] = group if blocks_nB[r, b] >= 0 and group < visible_n[r] else -1


@part
def _select(scores_G, counts, out_k):
    """`topk.select`, for which few scores need no search; where a NaN stands, or -1."""
    if scores_G.size > out_k.size:
        return select(scores_G, out_k.size, counts, out_k)
    n = 0
    for g in range(scores_G.size):
        if scores_G[g] != scores_G[g]:
            return g
        if scores_G[g] > -np.inf:
            out_k[n] = g
            n += 1
    out_k[n:] = -1
    return -1


@part
def _best_blocks(scores_G, visible, block, counts, out_B):
    """The blocks of the best visible groups; the newest group's is always among them."""
    best = np.full((scores_G.size + block - 1) // block, -np.inf, np.float32)
    for g in range(scores_G.size):
        best[g // block] = max(best[g // block], scores_G[g])
    if 0 < visible <= scores_G.size:
        best[(visible - 1) // block] = np.inf
    _select(best, counts, out_B)


@part
def _prepare(query, visible_n, blocks_nB, region, settings, packed, index_nC, status):
    """Queries packed and the pool's groups listed; False, and why, where there is something to refuse."""
    (q_nIK, w_nI), (_, _, block, count, native) = query, settings
    codes, scales, w_nJ = packed
    status[0] = _CHOSEN
    if not _panels(q_nIK, w_nI, native, codes, scales, w_nJ):
        status[0] = _NOT_FINITE
    elif not _has_pages(region[1], region[2], region[0], blocks_nB, block, visible_n, count):
        status[0] = _NO_PAGE
    elif blocks_nB.shape[1]:
        _pool_groups(blocks_nB, block, visible_n, index_nC)
    return status[0] == _CHOSEN


@part
def _select_all(scores, visible_n, settings, index_nC, top_nk, best_nB, status):
    """The best of every row's scores: their groups, and the blocks of these."""
    _, _, block, count, _ = settings
    counts = np.empty(2048, np.int64)
    for r in range(top_nk.shape[0]):
        own = scores[r * count : (r + 1) * count]
        bad = _select(own, counts, top_nk[r])
        if bad >= 0:
            status[0], status[1], status[2] = _NAN, r, bad
            return
        if best_nB.shape[1]:
            _best_blocks(own, visible_n[r], block, counts, best_nB[r])
        if index_nC.shape[1]:
            for i in range(top_nk.shape[1]):
                top_nk[r, i] = index_nC[r, top_nk[r, i]] if top_nk[r, i] >= 0 else -1


@part
def _rooms(query, blocks_nB, count):
    """What queries are packed in, heads completed to whole panels, and the groups of the pool."""
    rows, heads, width = query[0].shape
    panels = (heads + LANES - 1) // LANES * LANES
    codes, scales = np.empty((rows, panels, width // 2), np.uint8), np.empty((rows, panels, width // 32), np.uint8)
    index_nC = np.empty((rows, count if blocks_nB.shape[1] else 0), np.int64)
    return (codes, scales, np.empty((rows, panels), np.float32)), index_nC


_SIGNATURE = (
    "void(Tuple((float32[:, :, ::1], float32[:, ::1])), int64[:, ::1], "
    f"{REGION}, Tuple((int64, int64, int64, int64, boolean)), int64, int64[:, ::1], int64[:, ::1], int64[::1])"
)
# Named here, because a kernel that is handed to another as an argument cannot be cached on disk.
_score_vnni, _score_vector = KERNELS["vnni"].code, KERNELS["vector"].code


@kernel(_SIGNATURE, calls=(KERNELS["vnni"],))
def _choose_vnni(query, blocks_nB, region, settings, tasks, top_nk, best_nB, status):
    """query: q [n, I, K], w [n, I]. blocks_nB: the pool; without columns every group up to `count` is scored. settings:
    position of the first row, ratio, groups a block, count, native. status: how it ended, and where."""
    rows, (first, ratio, _, count, native) = top_nk.shape[0], settings
    visible_n = np.arange(first + 1, first + rows + 1) // ratio
    (codes, scales, w), index_nC = _rooms(query, blocks_nB, count)
    if _prepare(query, visible_n, blocks_nB, region, settings, (codes, scales, w), index_nC, status):
        scores, keys = np.empty(rows * count, np.float32), (index_nC.reshape(-1), 0, count)
        packed = codes.reshape(-1), scales.reshape(-1), w.reshape(-1), visible_n
        _score_vnni(packed, keys, region, rows, native, tasks, scores)
        _select_all(scores, visible_n, settings, index_nC, top_nk, best_nB, status)


@kernel(_SIGNATURE, calls=(KERNELS["vector"],))
def _choose_vector(query, blocks_nB, region, settings, tasks, top_nk, best_nB, status):
    """As `_choose_vnni`."""
    rows, (first, ratio, _, count, native) = top_nk.shape[0], settings
    visible_n = np.arange(first + 1, first + rows + 1) // ratio
    (codes, scales, w), index_nC = _rooms(query, blocks_nB, count)
    if _prepare(query, visible_n, blocks_nB, region, settings, (codes, scales, w), index_nC, status):
        scores, keys = np.empty(rows * count, np.float32), (index_nC.reshape(-1), 0, count)
        packed = codes.reshape(-1), scales.reshape(-1), w.reshape(-1), visible_n
        _score_vector(packed, keys, region, rows, native, tasks, scores)
        _select_all(scores, visible_n, settings, index_nC, top_nk, best_nB, status)


CHOOSE: Mapping[Path, Kernel] = MappingProxyType({"vnni": _choose_vnni, "vector": _choose_vector})


def kernels(path: Path) -> tuple[Kernel, ...]:
    """What `choose` runs on `path`."""
    return (CHOOSE[path],) if has_vectors(path) else ()


def choose(
    query: tuple[Tensor, Tensor],
    first: int,
    ratio: int,
    region: PagedRegion,
    block_table: Tensor,
    blocks_nB: Tensor | None,
    k: int,
    keep: int,
    block: int,
    native: bool,
    *,
    path: Path | None = None,
) -> tuple[Tensor, Tensor] | None:
    """The best groups of a few rows, int64 [n, k] ascending, and their best blocks [n, keep]; both -1 padded.

    Args:
        query: index queries [n, I, K] and head weights [n, I] of adjacent rows.
        first: position of the first row.
        ratio: m; the row at position p sees groups [0, (p + 1) // m).
        region: index keys.
        block_table: int64 [pages of the sequence].
        blocks_nB: int64 candidate blocks to choose from, -1 padded; None for every visible group.
        k: groups to choose.
        keep: blocks to choose, 0 for none.
        block: groups a block.
        native: round as SPEC 3.
        path: of `rorqual.ops.cpu`; None takes the best.

    Returns:
        None, and nothing is done, where there is no kernel: another format, or more scores than a thread chooses from.

    Raises:
        FormatError: NaN or Inf among the queries, or NaN among the scores.
        IndexError: a visible group outside the block table.
    """
    q, w = query
    rows, heads, width = q.shape
    count = (first + rows) // ratio if blocks_nB is None else blocks_nB.shape[1] * block
    path = path or best_path()
    if region.fmt is not E2M1_E8M0_32 or width % TILE or rows * count >= 2 * SCORES_A_TASK or not has_vectors(path):
        return None
    refuse_gradients(q, w)
    if count <= 0:
        return torch.full((rows, k), -1), torch.full((rows, keep), -1)
    top, best = np.empty((rows, k), np.int64), np.empty((rows, keep), np.int64)
    blocks = np.empty((rows, 0), np.int64) if blocks_nB is None else blocks_nB.contiguous().numpy()
    units = min(rows * count * heads * width // PRODUCTS_A_TASK, -(-count // KEYS))
    tasks, status = max(1, min(workers(), units)), np.zeros(3, np.int64)
    known = (region_arrays(region, block_table), (first, ratio, block, count, native), tasks)
    CHOOSE[path]((floats(q), floats(w)), blocks, *known, top, best, status, tasks=tasks)
    if status[0] != _CHOSEN:
        _refuse(status, q.float(), block_table, region)
    return torch.from_numpy(top), torch.from_numpy(best)


def _refuse(status: Array, q_nIK: Tensor, block_table: Tensor, region: PagedRegion) -> None:
    if status[0] == _NOT_FINITE:
        check_finite(q_nIK, E2M1_E8M0_32)
    if status[0] == _NO_PAGE:
        limit = block_table.shape[0] * region.entries
        raise IndexError(f"a group leaves [0, {limit}), what the block table holds, or its page leaves the pool")
    if status[0] == _NAN:
        raise FormatError(f"score {(int(status[1]), int(status[2]))} is NaN: scores must be numbers or -inf")
