"""The losses of a micro-batch beside the draft's, from what the forward left in its hooks.

Everything is a sum over rows or sequences divided by the totals of the whole step, so that any cut into micro-batches
or processes adds up to the same loss and the same gradients (field case 59).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from rorqual.training.batch import IGNORE, Packed
from rorqual.training.kv import Choice, Routed
from rorqual.training.learner import Totals
from rorqual.training.recipe import LossRecipe
from rorqual.training.seeding import keyed_generator

# T rows, E experts, k experts a row, V vocabulary


def draw(packed: Packed, loss: LossRecipe, replay: float, window: int, seed: int) -> list[Choice]:
    """One choice a piece: rows for the indexer's loss, and with probability `replay` a decoder seam.

    A seam lies where a CED prefill could have ended: its floor s is N - W for some prompt of N <= n tokens, N > W.
    """
    generator = keyed_generator("draw", seed, packed.number)
    choices = []
    with_seam = bool(torch.rand((), generator=generator, device="cpu") < replay)
    for start, end in packed.pieces():
        n = end - start
        count = min(n, round(loss.indexer_rows * n)) if loss.indexer else 0
        count = max(count, 1) if loss.indexer and loss.indexer_rows else count
        rows = torch.randperm(n, generator=generator, device="cpu")[:count].sort().values.to(packed.ids.device)
        latest = n - window
        seam = (
            int(torch.randint(1, latest + 1, (), generator=generator, device="cpu"))
            if with_seam and latest >= 1
            else None
        )
        choices.append(Choice(index_rows=rows, row_weight=n / max(1, count), seam=seam))
    return choices


def noised(packed: Packed, share: float, noise_id: int, seed: int) -> Packed:
    """The sequence with a share of its tokens replaced, its targets as they were: what a small model with few texts
    cannot learn by heart. Drawn anew for every sequence number, so at every pass over a text."""
    if not share:
        return packed
    generator = keyed_generator("noise", seed, packed.number)
    hit = torch.rand(packed.ids.shape[0], generator=generator, device="cpu") < share
    return dataclasses.replace(packed, ids=packed.ids.masked_fill(hit.to(packed.ids.device), noise_id))


def next_token_loss(logits_TV: Tensor, targets_T: Tensor, totals: Totals) -> Tensor:
    """Summed cross-entropy in nats over the targets that count, divided by the step's."""
    return F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORE, reduction="sum") / max(1, totals.tokens)


def balance_loss(routing: Sequence[Routed], lengths: Sequence[int], totals: Totals) -> Tensor:
    """The small sequence balance loss: sum over experts of f P for each sequence, averaged over layers and sequences.

    f: the expert's share of the sequence's choices, times the number of experts (1 when even; no gradient).
    P: mean over the sequence of the expert's normalised score.
    """
    total = torch.zeros((), device=routing[0].scores_TE.device if routing else None)
    for routed in routing:
        experts, slots = routed.scores_TE.shape[1], routed.index_Tk.shape[1]
        share = routed.scores_TE / routed.scores_TE.sum(1, keepdim=True).clamp_min(1e-20)
        for part, index in zip(share.split(list(lengths)), routed.index_Tk.split(list(lengths)), strict=True):
            f = torch.bincount(index.flatten(), minlength=experts) * (experts / (slots * part.shape[0]))
            total = total + (f * part.mean(0)).sum()
    return total / max(1, len(routing)) / max(1, totals.sequences)


def expert_loads(routing: Sequence[Routed]) -> dict[str, Tensor]:
    """Rows sent to each expert of each layer, int64 [E]."""
    return {r.name: torch.bincount(r.index_Tk.flatten(), minlength=r.scores_TE.shape[1]) for r in routing}
