"""The lightning indexer with hierarchical candidates (SPEC 5): which compressed groups each query reads.

Scores are computed in tiles with a running Top-K, so nothing grows with (queries x context).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rorqual.config import LayerRole, ModelConfig
from rorqual.errors import InputError
from rorqual.model.kv import PagedKV
from rorqual.model.rows import Rows, Segment
from rorqual.model.run import NOT_YET, Carry, Run, padded
from rorqual.model.weights import Scope
from rorqual.ops.dispatch import Regions
from rorqual.ops.rowwise import joined

# T rows, n rows of a segment, I index heads, D index dim, K top-k, G groups of a tile, B candidate blocks

GROUP_TILE = 4096
"""Groups scored at once for a full tile of rows; fewer rows take as many more groups."""
ROW_TILE = 256
"""Query rows scored at once; with GROUP_TILE it bounds the score tile at 4 MB, whether of 256 rows or of one."""
WIDE = 16
"""Scores of a row so many times the k wanted are chosen from alone; fewer are joined to the kept ones at once."""


class Indexer(nn.Module):
    """Index queries, weights and Top-K of a Full or Reindex layer."""

    def __init__(self, config: ModelConfig, role: LayerRole, scope: Scope) -> None:
        super().__init__()
        self.role = role
        self.heads = config.index_n_heads
        self.topk = config.index_topk
        self.block = config.candidate_block_size
        self.keep_blocks = config.candidate_topk_blocks
        self.scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.last_source = config.decoder_start
        self.wq_b = scope.weight("indexer.wq_b")
        self.weights_proj = scope.weight("indexer.weights_proj")
        self._packed: Any = NOT_YET

    def forward(self, x_TD: Tensor, qr_TQ: Tensor, rows: Rows, carry: Carry, run: Run) -> Tensor:
        """Top-K groups int64 [T, K], ascending, -1 padded; sets the carry's candidates on the candidate source."""
        name = f"layers.{self.role.layer_id}"
        # A selection has no gradient; what the indexer learns from (its own loss) must not move the backbone.
        x_TD, qr_TQ = x_TD.detach(), qr_TQ.detach()
        q, w = self.queries(x_TD, qr_TQ, rows, run)
        w = run.record(f"{name}.index_weights", w, rows)
        if run.hooks is not None:
            return run.hooks.select(self.role, q, w, rows, carry)
        pool = carry.candidates_TB if self.role.uses_candidates else None
        chosen, blocks = [], []
        for seg in rows.segments:
            query = Query(self, seg, _cut(q, seg), _cut(w, seg), _cut(rows.positions_T, seg), run)
            if pool is not None:
                chosen.append(query.from_pool(_cut(pool, seg)))
            else:
                top, best_blocks = query.from_all(self.role.is_candidate_source)
                chosen.append(top)
                blocks.append(best_blocks)
            if run.tap.active:
                query.record(chosen[-1], None if pool is None else pool[seg.rows])
        topk = joined(chosen)
        if self.role.is_candidate_source:
            carry.candidates_TB = joined(blocks)
        if run.tap.active:
            topk = run.record(f"{name}.topk_idxs", topk.to(torch.int32), rows).to(torch.int64)
            if bool(((topk < -1) | (topk >= self.visible(rows)[:, None])).any()):
                raise InputError(f"inject: {name}.topk_idxs names a group that its query cannot see")
            self._record_candidates(rows, carry, run)
        return topk

    def queries(self, x_TD: Tensor, qr_TQ: Tensor, rows: Rows, run: Run) -> tuple[Tensor, Tensor]:
        """Rotated index queries [T, I, D] and head weights [T, I], in the activation dtype."""
        # Where there is a kernel for the whole, every short row takes it, whatever stands beside them (DESIGN 12).
        regions, short = run.regions, rows.short_rows
        if regions is None or not short or self._packed_for(regions) is None:
            return self._queries_by_op(x_TD, qr_TQ, rows, run)
        (cos, sin), qr, x = rows.rotary.at(True), qr_TQ, x_TD
        if short < len(rows):
            cos, sin, qr, x = cos[:short], sin[:short], qr[:short], x[:short]
        q, w = regions.index_queries(qr, x, self._packed, (cos, sin), run.numerics.native)
        q, w = run.numerics.round(q), run.numerics.round(w)
        if short < len(rows):
            rest = self._queries_by_op(x_TD[short:], qr_TQ[short:], rows.without_short(), run)
            q, w = (torch.cat(pair) for pair in zip((q, w), rest, strict=True))
        return q, w

    def _packed_for(self, regions: Regions) -> Any:
        """The weights as the region takes them; None where there is none for them."""
        if self._packed is NOT_YET:
            parts = (self.wq_b, self.weights_proj)
            self._packed = regions.pack_indexer(*parts, heads=self.heads, scale=self.scale)
        return self._packed

    def _queries_by_op(self, x_TD: Tensor, qr_TQ: Tensor, rows: Rows, run: Run) -> tuple[Tensor, Tensor]:
        q = run.linear(qr_TQ, self.wq_b, rows).unflatten(-1, (self.heads, -1))
        q = run.numerics.round(run.ops.rotate(q, rows.rotary.at(True), overwrite=True))
        return q, run.numerics.round(run.linear(x_TD, self.weights_proj, rows) * self.scale)

    def visible(self, rows: Rows) -> Tensor:
        """Groups that each row sees, [T]; the stale decode looks at another source's, which are no fewer."""
        return (rows.positions_T + 1) // self.role.ratio

    def _record_candidates(self, rows: Rows, carry: Carry, run: Run) -> None:
        """The pool as a 0/1 mask over groups, as traces name it; an injected mask replaces the blocks."""
        name = f"layers.{self.role.layer_id}.candidates"
        if not self.role.is_candidate_source or carry.candidates_TB is None:
            return
        groups = rows.segments[0].end // self.role.ratio
        shape = (len(rows), -(-groups // self.block) + 1)
        mask = torch.zeros(shape, dtype=torch.uint8, device=rows.positions_T.device)
        mask.scatter_(1, carry.candidates_TB.clamp_min(-1) % mask.shape[1], 1)
        mask = mask[:, :-1].repeat_interleave(self.block, dim=1)[:, :groups]
        given = run.record(name, mask, rows)
        if given is not mask:
            blocks = given[:, :: self.block].float().masked_fill(given[:, :: self.block] == 0, float("-inf"))
            carry.candidates_TB = padded(run.ops.topk_lowest(blocks, self.keep_blocks), self.keep_blocks)


class Query:
    """The index queries of one segment against one source's keys."""

    def __init__(self, indexer: Indexer, seg: Segment, q_nID: Tensor, w_nI: Tensor, at_n: Tensor, run: Run) -> None:
        self.indexer = indexer
        self.seg = seg
        self.q, self.w, self.at, self.run = q_nID, w_nI, at_n, run
        role = indexer.role
        assert role.kv_source is not None
        self.source = role.kv_source
        if run.stale_decode and seg.end - seg.start == 1 and role.ratio > 1 and seg.end % role.ratio:
            # The released code's defect (SPEC 5), behind its switch: keys of the last source, left by the last step.
            self.source = indexer.last_source

    @cached_property
    def visible(self) -> Tensor:
        """Groups that each row sees, [n]."""
        return (self.at + 1) // self.indexer.role.ratio

    def _row_tiles(self, step: int) -> Iterator[slice]:
        for first in range(0, self.q.shape[0], step):
            yield slice(first, min(first + step, self.q.shape[0]))

    def _scores(self, rows: slice, groups: tuple[int, int]) -> Tensor:
        kv = self.run.kv
        return kv.index_scores(self.source, self.seg, self.q[rows], self.w[rows], groups, self.visible[rows])

    def from_all(self, want_blocks: bool) -> tuple[Tensor, Tensor]:
        """Top-K over every visible group, and the candidate blocks (empty unless wanted)."""
        found = self._fused(None, self.indexer.keep_blocks if want_blocks else 0)
        if found is not None:
            return found
        parts = [self._scan(rows, want_blocks) for rows in self._row_tiles(ROW_TILE)]
        return joined([p[0] for p in parts]), joined([p[1] for p in parts])

    def _fused(self, blocks_nB: Tensor | None, keep: int) -> tuple[Tensor, Tensor] | None:
        """Both in one kernel, where there is one and the scores are few: the same groups and blocks."""
        ix, run, kv = self.indexer, self.run, self.run.kv
        if run.regions is None or not isinstance(kv, PagedKV):
            return None
        keys = (kv.cache.pages.index[self.source], self.seg.block_table)
        rows, wanted = (self.seg.start, ix.role.ratio), (ix.topk, keep, ix.block)
        return run.regions.index_choose((self.q, self.w), *rows, *keys, blocks_nB, *wanted, run.numerics.native)

    def _scan(self, rows: slice, want_blocks: bool) -> tuple[Tensor, Tensor]:
        ix, n = self.indexer, rows.stop - rows.start
        best = Running(n, ix.topk, self.run, self.q.device)
        blocks = Running(n, ix.keep_blocks if want_blocks else 0, self.run, self.q.device)
        end = int(self.visible[rows].max())
        tile = GROUP_TILE * ROW_TILE // n
        if want_blocks:
            tile = max(1, tile // ix.block) * ix.block
        for g in range(0, end, tile):
            scores = self._scores(rows, (g, min(g + tile, end)))
            best.add(scores, g)
            if want_blocks:
                blocks.add(self._block_scores(scores, g, self.visible[rows]), g // ix.block)
            del scores  # not beside the next tile's
        return best.index(), blocks.index()

    def _block_scores(self, scores_nG: Tensor, first: int, visible_n: Tensor) -> Tensor:
        """Best visible group of every block; +inf for the block of the newest visible group."""
        block, groups = self.indexer.block, scores_nG.shape[1]
        whole = groups - groups % block
        best = torch.unflatten(scores_nG[:, :whole], 1, (-1, block)).amax(-1)
        if whole < groups:
            best = torch.cat((best, scores_nG[:, whole:].amax(-1, keepdim=True)), 1)
        newest = torch.div(visible_n - 1, block, rounding_mode="floor") - first // block
        pinned = (visible_n > 0) & (newest >= 0) & (newest < best.shape[1])
        columns = torch.arange(best.shape[1], device=best.device)
        return best.masked_fill(pinned[:, None] & (columns == newest[:, None]), float("inf"))

    def from_pool(self, blocks_nB: Tensor) -> Tensor:
        """Top-K over the candidate pool's visible groups: O(pool) a query, whatever the context."""
        found = self._fused(blocks_nB, 0)
        if found is not None:
            return found[0]
        pool = blocks_nB.shape[1] * self.indexer.block
        step = max(1, min(ROW_TILE, GROUP_TILE * ROW_TILE // max(1, pool)))
        return joined([self._pool_tile(rows, blocks_nB[rows]) for rows in self._row_tiles(step)])

    def _pool_tile(self, rows: slice, blocks_nB: Tensor) -> Tensor:
        ix = self.indexer
        at = self.run.ops.pool_groups(blocks_nB, self.visible[rows], ix.block)
        kv = self.run.kv
        scores = kv.index_scores_at(self.source, self.seg, self.q[rows], self.w[rows], at)
        chosen = self.run.ops.topk_lowest(scores, min(ix.topk, scores.shape[1]))
        picked = at.gather(1, chosen.clamp_min(0)).masked_fill(chosen < 0, -1)
        return padded(picked, ix.topk)

    def record(self, topk_nK: Tensor, blocks_nB: Tensor | None) -> None:
        """Full scores and margins, computed only when a trace asks for them."""
        role, tap = self.indexer.role, self.run.tap
        name = f"layers.{role.layer_id}"
        wanted = [f"{name}.{t}" for t in ("index_score", "topk_margin", "candidate_margin")]
        if not any(tap.wants(t) for t in wanted):
            return
        groups = self.seg.end // role.ratio
        rows = self.q.shape[0]
        scores = self._scores(slice(0, rows), (0, groups)) if groups else self.q.new_zeros(rows, 0)
        if role.is_candidate_source and groups:
            best = self._block_scores(scores, 0, self.visible)
            tap(wanted[2], margin(best, self.indexer.keep_blocks), self.seg.start)
        elif role.is_candidate_source:
            tap(wanted[2], scores.new_full((self.q.shape[0],), float("inf")), self.seg.start)
        if blocks_nB is not None and groups:
            block = torch.arange(groups, device=scores.device) // self.indexer.block
            inside = (block == blocks_nB[..., None]).any(1)
            scores = scores.masked_fill(~inside, float("-inf"))
        tap(wanted[0], self.run.numerics.round(scores), self.seg.start)
        tap(wanted[1], margin(scores, self.indexer.topk), self.seg.start)


def _cut(x_T: Tensor, seg: Segment) -> Tensor:
    return x_T if seg.row_end - seg.row_start == x_T.shape[0] else x_T[seg.rows]


class Running:
    """The k best of a growing row of scores, ties to the lowest index. Candidates stay in index order, so the tie rule
    of `topk_lowest` on (kept | new), or on (kept | the k best of the new), is the tie rule on the whole row."""

    def __init__(self, rows: int, k: int, run: Run, device: torch.device | None = None) -> None:
        self.k = k
        self.run = run
        self.value = torch.full((rows, 0), float("-inf"), device=device)
        self.at = torch.full((rows, 0), -1, dtype=torch.int64, device=device)

    def add(self, scores_nG: Tensor, first: int) -> None:
        held = self.value.shape[1]
        if not held:
            self.value, chosen = self._best(scores_nG)
            self.at = torch.where(chosen < 0, chosen, chosen + first)
            return
        wide = scores_nG.shape[1] >= WIDE * self.k
        value, at = self._best(scores_nG) if wide else (scores_nG, None)
        self.value, chosen = self._best(torch.cat((self.value, value), 1))
        new = (chosen - held).clamp_min_(0)
        new = new if at is None else at.gather(1, new)
        kept = self.at.gather(1, chosen.clamp(0, held - 1))
        self.at = torch.where(chosen < held, kept, new + first).masked_fill_(chosen < 0, -1)

    def _best(self, scores_nG: Tensor) -> tuple[Tensor, Tensor]:
        """(scores, indices) of the k best, -inf and -1 where there are fewer."""
        chosen = self.run.ops.topk_lowest(scores_nG, min(self.k, scores_nG.shape[1]))
        return scores_nG.gather(1, chosen.clamp_min(0)).masked_fill(chosen < 0, float("-inf")), chosen

    def index(self) -> Tensor:
        return padded(self.at, self.k)


def margin(scores_nG: Tensor, k: int) -> Tensor:
    """k-th minus (k+1)-th score of each row; inf where at most k are finite: nothing was close."""
    if scores_nG.shape[1] <= k:
        return scores_nG.new_full((scores_nG.shape[0],), float("inf"))
    top = scores_nG.float().topk(k + 1, dim=1).values
    return torch.where(top[:, k] == float("-inf"), float("inf"), top[:, k - 1] - top[:, k])
