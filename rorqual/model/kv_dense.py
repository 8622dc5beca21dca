"""Keys as fake-quantised tensors: no pages, no packing, gradients pass straight through the quantisers.

The twin of the packed cache and of training's keys: chunks and decode steps append, and
the results are the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.config import ModelConfig
from rorqual.formats.codec import fake_quantize
from rorqual.formats.spec import FORMATS
from rorqual.model.rows import Segment
from rorqual.model.tap import Tap
from rorqual.ops.reference.attention import attention_over
from rorqual.ops.reference.index_scores import dot_dtype, scores_from_values

# n rows of a segment, L window keys, H heads, C head dim, I index heads, D index dim, G groups, K top-k

ROW_TILE = 64
"""Query rows whose keys are gathered at once."""


class DenseKV:
    """Grows with the sequence; a store is made for one batch and dropped with it.

    quantise: False keeps full-precision keys (training before the caches are quantised).
    """

    def __init__(self, config: ModelConfig, native: bool, *, quantise: bool = True) -> None:
        self.config = config
        self.native = native
        self.quantise = quantise
        self.scale = config.head_dim**-0.5
        self.block_dtype = dot_dtype(FORMATS[config.cache.index_key])
        self._window: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self._tail: dict[tuple[int, int], tuple[Tensor, Tensor, int]] = {}
        self._main: dict[tuple[int, int], Tensor] = {}
        self._keys: dict[tuple[int, int], Tensor] = {}

    def _fake(self, x: Tensor, name: str) -> Tensor:
        return fake_quantize(x, FORMATS[name]) if self.quantise else x

    def window(self, layer: int, seg: Segment, kv_nC: Tensor, tap: Tap) -> tuple[Tensor, int]:
        own = self._fake(kv_nC, self.config.cache.window).float()
        if tap.active:
            own = tap(f"layers.{layer}.window_kv", own, seg.start)
        at = (layer, seg.slot)
        base = min(seg.start, max(seg.window_floor, seg.start - self.config.sliding_window + 1, 0))
        keys, first = own, seg.start
        if at in self._window:
            held, held_first = self._window[at]
            base = max(base, held_first)
            held = held[base - held_first : seg.start - held_first]
            keys, first = torch.cat((held, own)), min(base, seg.start)
        self._window[at] = (keys, first)
        return keys, first

    def tail(self, source: int, seg: Segment, kv_nC: Tensor, score_nC: Tensor) -> tuple[Tensor, Tensor, int]:
        at = (source, seg.slot)
        ratio = self.config.roles[source].ratio
        kv, score, first = kv_nC, score_nC, seg.start
        if at in self._tail:
            held_kv, held_score, held_first = self._tail[at]
            first = max(held_first, seg.start // ratio * ratio)
            kv = torch.cat((held_kv[first - held_first :], kv_nC))
            score = torch.cat((held_score[first - held_first :], score_nC))
        keep = seg.end // ratio * ratio - first
        self._tail[at] = (kv, score, first) if keep <= 0 else (kv[keep:], score[keep:], first + keep)
        return kv, score, first

    def put_groups(self, source: int, seg: Segment, first: int, main_GC: Tensor, key_GD: Tensor, tap: Tap) -> None:
        at = (source, seg.slot)
        ratio = self.config.roles[source].ratio
        skip = min(max(0, seg.write_floor // ratio - first), main_GC.shape[0])
        main = self._fake(main_GC[skip:], self.config.cache.main).float()
        keys = self._fake(key_GD[skip:], self.config.cache.index_key).float()
        if tap.active:
            main = tap(f"layers.{source}.compress_kv", main, first + skip)
            keys = tap(f"layers.{source}.index_k", keys, first + skip)
        held = self._main.get(at)
        self._main[at] = main if held is None else torch.cat((held, main))
        self._keys[at] = keys if held is None else torch.cat((self._keys[at], keys))

    def index_scores(
        self, source: int, seg: Segment, q_nID: Tensor, w_nI: Tensor, groups: tuple[int, int], visible_n: Tensor
    ) -> Tensor:
        q = self._fake(q_nID, self.config.cache.index_key).float()
        keys = self._keys[source, seg.slot][groups[0] : groups[1]]
        scores = scores_from_values(q, w_nI.float(), keys, self.native, self.block_dtype)
        hidden = torch.arange(groups[0], groups[1], device=q.device)[None] >= visible_n[:, None]
        return scores.masked_fill(hidden, float("-inf"))

    def index_scores_at(self, source: int, seg: Segment, q_nID: Tensor, w_nI: Tensor, index_nK: Tensor) -> Tensor:
        q = self._fake(q_nID, self.config.cache.index_key).float()
        keys = self._keys[source, seg.slot]
        rows = [
            scores_from_values(
                q[i : i + 1], w_nI[i : i + 1].float(), keys[index_nK[i].clamp_min(0)], self.native, self.block_dtype
            )
            for i in range(q.shape[0])
        ]
        return torch.cat(rows).masked_fill(index_nK < 0, float("-inf"))

    def attend(
        self,
        source: int | None,
        seg: Segment,
        q_nHC: Tensor,
        window: tuple[Tensor, int],
        topk_nK: Tensor | None,
        sink_H: Tensor,
    ) -> Tensor:
        keys, base = window
        reach = torch.arange(1 - self.config.sliding_window, 1, device=keys.device)
        floor = max(seg.window_floor, base)
        out = []
        for tile in range(seg.start, seg.end, ROW_TILE):
            rows = slice(tile - seg.start, min(tile + ROW_TILE, seg.end) - seg.start)
            at = torch.arange(tile, min(tile + ROW_TILE, seg.end), device=keys.device)[:, None] + reach
            valid = at >= floor
            gathered = keys[(at - base).clamp_min(0)] * valid[..., None]
            if source is not None and topk_nK is not None:
                main = self._main.get((source, seg.slot))
                chosen = topk_nK[rows]
                picked = (
                    main[chosen.clamp_min(0)] * (chosen >= 0)[..., None]
                    if main is not None and main.shape[0]
                    else keys.new_zeros(*chosen.shape, keys.shape[1])
                )
                gathered, valid = torch.cat((gathered, picked), 1), torch.cat((valid, chosen >= 0), 1)
            out.append(attention_over(q_nHC[rows].float(), gathered, valid, sink_H, self.scale, self.native))
        return torch.cat(out)
