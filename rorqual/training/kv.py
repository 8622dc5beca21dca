"""Keys in training: whole pieces at once, fake-quantised, and the selection and the indexer's loss that go with them.

A `KVStore` (of `rorqual.model.kv`) and the `Hooks` of a run in one object, because an index source's loss needs what
both of them see: its queries, and the attention that they are to foretell. Lives for one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rorqual.config import LayerRole, ModelConfig
from rorqual.formats.spec import FORMATS, NumberFormat
from rorqual.model.rows import Rows, Segment
from rorqual.model.run import Carry
from rorqual.model.tap import Tap
from rorqual.ops.dispatch import Ops
from rorqual.ops.precision import products
from rorqual.training.attend import Masks, Softmax, attend
from rorqual.training.indexing import block_pool, index_kl, index_scores, select, teacher
from rorqual.training.learner import Phase

# n rows of a piece, T rows of the micro-batch, H heads, C head dim, I index heads, D index dim, G groups, E experts

ROW_TILE = 256
"""Query rows of a piece that are scored at once."""

FakeQuantize = Callable[[Tensor, NumberFormat], Tensor]


class Routed(NamedTuple):
    """A MoE layer's unbiased scores [T, E] and choice [T, k]."""

    name: str
    scores_TE: Tensor
    index_Tk: Tensor


class Asked(NamedTuple):
    """An index source's queries of the drawn rows of a piece, until its attention is known."""

    q_RID: Tensor
    w_RI: Tensor


@dataclass(slots=True, kw_only=True)
class Choice:
    """What was drawn for one piece.

    index_rows: int64, ascending: the rows that the indexer learns from; row_weight: of each in the loss.
    seam: the position that decoder windows begin at for itself and all later ones, or None.
    """

    index_rows: Tensor
    row_weight: float
    seam: int | None


@dataclass(slots=True, kw_only=True)
class LearningKV:
    """See the file's head.

    `choices`: one a segment, by slot; `fake`, `softmax`: the plain functions or faster twins.
    """

    config: ModelConfig
    ops: Ops
    fake: FakeQuantize
    softmax: Softmax
    phase: Phase
    choices: list[Choice]
    index_losses: list[Tensor] = field(default_factory=list)
    routing: list[Routed] = field(default_factory=list)
    _main: dict[int, Tensor] = field(default_factory=dict)
    _keys: dict[int, Tensor] = field(default_factory=dict)
    _banned: dict[int, Tensor] = field(default_factory=dict)
    _pool: dict[int, Tensor] = field(default_factory=dict)
    _asked: dict[int, Asked] = field(default_factory=dict)
    _bands: dict[tuple[int, bool], Tensor] = field(default_factory=dict)
    _layer: int = -1

    def window(self, layer: int, seg: Segment, kv_nC: Tensor, tap: Tap) -> tuple[Tensor, int]:
        self._layer = layer
        return self._rounded(kv_nC, self.config.cache.window), 0

    def tail(self, source: int, seg: Segment, kv_nC: Tensor, score_nC: Tensor) -> tuple[Tensor, Tensor, int]:
        return kv_nC, score_nC, 0

    def put_groups(self, source: int, seg: Segment, first: int, main_GC: Tensor, key_GD: Tensor, tap: Tap) -> None:
        self._main[seg.slot] = self._rounded(main_GC, self.config.cache.main)
        self._keys[seg.slot] = self._rounded(key_GD, self.config.cache.index_key)

    def index_scores(
        self, source: int, seg: Segment, q_nID: Tensor, w_nI: Tensor, groups: tuple[int, int], visible_n: Tensor
    ) -> Tensor:
        raise AssertionError("in training a piece is scored whole, by select")

    def index_scores_at(self, source: int, seg: Segment, q_nID: Tensor, w_nI: Tensor, index_nK: Tensor) -> Tensor:
        raise AssertionError("in training a piece is scored whole, by select")

    def attend(
        self,
        source: int | None,
        seg: Segment,
        q_nHC: Tensor,
        window: tuple[Tensor, int],
        topk_nK: Tensor | None,
        sink_H: Tensor,
    ) -> Tensor:
        keys, slot, rows = window[0], seg.slot, q_nHC.shape[0]
        ratio = self.config.roles[source].ratio if source is not None else 0
        groups = rows // ratio if ratio else 0
        if groups and slot in self._asked:
            with products("highest"):  # no two pieces have the same shapes
                self._teach(slot, q_nHC, keys, groups, ratio, sink_H)
        main = self._main[slot] if groups else keys[:0]
        masks = self._masks(slot, rows, groups, ratio, q_nHC.device)
        return attend(q_nHC, keys, main, masks, sink_H, self.config.head_dim**-0.5, self.softmax)

    def select(self, role: LayerRole, q_TID: Tensor, w_TI: Tensor, rows: Rows, carry: Carry) -> Tensor:
        if torch.is_grad_enabled():
            self._ask(q_TID, w_TI, rows)
        for seg in rows.segments:
            count = seg.end - seg.start
            groups = count // role.ratio
            if not groups:
                continue
            visible = (torch.arange(count, device=q_TID.device) + 1) // role.ratio
            hidden = torch.arange(groups, device=q_TID.device) >= visible[:, None]
            self._banned[seg.slot] = hidden
            if self.phase.sparse:
                with torch.no_grad(), products("highest"):
                    q, w = q_TID[seg.rows], w_TI[seg.rows]
                    self._banned[seg.slot] = ~self._chosen(role, seg.slot, q, w, hidden, visible)
        # Attention takes the selection from here, as masks.
        return torch.empty(len(rows), 0, dtype=torch.int64, device=q_TID.device)

    def routed(self, name: str, scores_TE: Tensor, index_Tk: Tensor, rows: Rows) -> None:
        self.routing.append(Routed(name, scores_TE, index_Tk))

    def _ask(self, q_TID: Tensor, w_TI: Tensor, rows: Rows) -> None:
        """Keep the queries of the drawn rows, all pieces in one gather."""
        drawn = [self.choices[seg.slot].index_rows for seg in rows.segments]
        at = torch.cat([index + seg.row_start for index, seg in zip(drawn, rows.segments, strict=True)])
        counts = [len(index) for index in drawn]
        for seg, q, w in zip(rows.segments, q_TID[at].split(counts), w_TI[at].split(counts), strict=True):
            if len(q):
                self._asked[seg.slot] = Asked(q, w)

    def _rounded(self, x: Tensor, name: str) -> Tensor:
        return self.fake(x, FORMATS[name]) if self.phase.quantise_caches else x

    def _chosen(
        self, role: LayerRole, slot: int, q_nID: Tensor, w_nI: Tensor, hidden_nG: Tensor, visible_n: Tensor
    ) -> Tensor:
        """Bool [n, G]: the Top-K; the candidate source's pool is kept for the later ones."""
        c = self.config
        pooled = role.is_candidate_source or role.uses_candidates
        held = min(c.index_topk, c.candidate_topk_blocks * c.candidate_block_size) if pooled else c.index_topk
        if hidden_nG.shape[1] <= held:
            self._pool[slot] = ~hidden_nG
            return ~hidden_nG
        q = self._rounded(q_nID, c.cache.index_key)
        tiles = range(0, q.shape[0], ROW_TILE)
        scores = torch.cat([index_scores(q[a : a + ROW_TILE], w_nI[a : a + ROW_TILE], self._keys[slot]) for a in tiles])
        scores.masked_fill_(hidden_nG, -torch.inf)
        if role.is_candidate_source:
            self._pool[slot] = block_pool(scores, visible_n, c.candidate_block_size, c.candidate_topk_blocks, self.ops)
        elif role.uses_candidates:
            scores.masked_fill_(~self._pool[slot], -torch.inf)
        return select(scores, c.index_topk, self.ops)

    def _masks(self, slot: int, rows: int, groups: int, ratio: int, device: torch.device) -> Masks:
        """Window and groups of a piece's rows in the layer at hand; kept until the next selection."""
        decoder = self._layer >= self.config.decoder_start
        size = self.config.sliding_window
        filled = -(-rows // size) * size
        if (slot, decoder) not in self._bands:
            row = torch.arange(filled, device=device).view(-1, size, 1)
            key = row[:, :1] - size + torch.arange(2 * size, device=device)
            self._bands[slot, decoder] = ~self._sees(slot, row, key, decoder).flatten(0, 1)
        banned = torch.empty(filled, 0, dtype=torch.bool, device=device)
        if groups:
            banned = torch.nn.functional.pad(self._banned[slot], (0, 0, 0, filled - rows), value=True)
        return Masks(self._bands[slot, decoder], banned, ratio)

    def _sees(self, slot: int, row: Tensor, key: Tensor, decoder: bool) -> Tensor:
        """Whether the query at position `row` sees the window key at position `key`."""
        sees = (key <= row) & (key > row - self.config.sliding_window) & (key >= 0)
        seam = self.choices[slot].seam
        return sees & ((row < seam) | (key >= seam)) if decoder and seam is not None else sees

    def _teach(self, slot: int, q_nHC: Tensor, keys: Tensor, groups: int, ratio: int, sink_H: Tensor) -> None:
        """The indexer's loss of the drawn rows, now that the layer's queries and keys are known."""
        asked, choice = self._asked.pop(slot), self.choices[slot]
        row = choice.index_rows[:, None]
        key = row + torch.arange(1 - self.config.sliding_window, 1, device=row.device)
        sees = self._sees(slot, row, key, self._layer >= self.config.decoder_start)
        visible = torch.arange(groups, device=row.device) < (row + 1) // ratio
        target = teacher(
            q_nHC[choice.index_rows],
            keys[key.clamp_min(0)],
            sees,
            self._main[slot],
            visible,
            sink_H,
            self.config.head_dim**-0.5,
        )
        q = self._rounded(asked.q_RID, self.config.cache.index_key)
        scores = index_scores(q, asked.w_RI, self._keys[slot])
        self.index_losses.append(index_kl(scores, target, visible) * choice.row_weight)
