"""Encoder rows on their way to the decoder: narrowing at the CED seam, and what a chunked prefill carries (SPEC 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rorqual.model.rows import Rows, Segment, build_rows

# T rows, S residual copies, D hidden, B candidate blocks, L engram layers, E hash columns


@dataclass(slots=True, kw_only=True)
class Crossing:
    """Rows [start, end) of one sequence as they cross the seam: the encoder's exact streams, and whatever else the
    decoder needs of those rows (candidates of an earlier source, DSpark targets below the seam)."""

    start: int
    end: int
    x_TSD: Tensor
    pre_TS: Tensor
    image_T: Tensor | None
    engram_TLE: Tensor | None
    candidates_TB: Tensor | None
    hidden: dict[int, Tensor]

    def last(self, start: int) -> Crossing:
        """The rows at or above position `start`."""
        cut = slice(max(0, start - self.start), None)

        def take(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[cut]

        return Crossing(
            start=max(start, self.start),
            end=self.end,
            x_TSD=self.x_TSD[cut],
            pre_TS=self.pre_TS[cut],
            image_T=take(self.image_T),
            engram_TLE=take(self.engram_TLE),
            candidates_TB=take(self.candidates_TB),
            hidden={layer: h[cut] for layer, h in self.hidden.items()},
        )

    def clone(self) -> Crossing:
        """A copy that keeps only these rows alive, not the chunk they were cut from."""

        def own(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.clone()

        return Crossing(
            start=self.start,
            end=self.end,
            x_TSD=self.x_TSD.clone(),
            pre_TS=self.pre_TS.clone(),
            image_T=own(self.image_T),
            engram_TLE=own(self.engram_TLE),
            candidates_TB=own(self.candidates_TB),
            hidden={layer: h.clone() for layer, h in self.hidden.items()},
        )


def join(parts: Sequence[Crossing]) -> Crossing:
    """Consecutive rows of one sequence as one."""
    if len(parts) == 1:
        return parts[0]
    assert all(a.end == b.start for a, b in pairwise(parts))
    return Crossing(
        start=parts[0].start,
        end=parts[-1].end,
        x_TSD=torch.cat([p.x_TSD for p in parts]),
        pre_TS=torch.cat([p.pre_TS for p in parts]),
        image_T=cat_masks([(p.image_T, p.end - p.start) for p in parts]),
        engram_TLE=cat_optional([p.engram_TLE for p in parts]),
        candidates_TB=cat_optional([p.candidates_TB for p in parts]),
        hidden={layer: torch.cat([p.hidden[layer] for p in parts]) for layer in parts[0].hidden},
    )


def cat_optional(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenation of tensors that are all there or all absent."""
    there = [p for p in parts if p is not None]
    assert len(there) in (0, len(parts))
    return torch.cat(there) if there else None


def cat_masks(parts: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """Concatenation of masks, an absent one being all False over its rows."""
    device = next((mask.device for mask, _ in parts if mask is not None), None)
    if device is None:
        return None
    return torch.cat([torch.zeros(n, dtype=torch.bool, device=device) if mask is None else mask for mask, n in parts])


def decoder_rows(
    crossings: Sequence[Crossing], segments: Sequence[Segment], floors: Sequence[int], freqs: tuple[Tensor, Tensor]
) -> Rows:
    """Rows of the given crossings in order; `segments` tell slot, block table and write floor (the end of rows whose
    global KV was written at the seam), `floors` the decoder's window floor.
    """
    placed, row = [], 0
    for crossing, seg, floor in zip(crossings, segments, floors, strict=True):
        count = crossing.end - crossing.start
        placed.append(
            Segment(
                row_start=row,
                row_end=row + count,
                start=crossing.start,
                end=crossing.end,
                slot=seg.slot,
                block_table=seg.block_table,
                write_floor=seg.write_floor,
                window_floor=floor,
            )
        )
        row += count
    return build_rows(
        placed,
        freqs,
        image_T=cat_masks([(c.image_T, c.end - c.start) for c in crossings]),
        engram_TLE=cat_optional([c.engram_TLE for c in crossings]),
    )
