"""What the trainer trains: the V4.1 model, or a baseline behind the same few methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from rorqual.training.batch import Packed

# n tokens of a sequence, E experts, V vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What is on at a step.

    quantise_caches: caches go through FP4 and FP8, gradients straight through.
    quantise_weights: weights too, in the formats of the config.
    sparse: Top-K and candidates act; False: every visible group is read (the indexer learns all the same).
    draft: the DSpark losses.
    replay: share of the sequences whose decoder windows begin at a random seam, as after a CED prefill.
    """

    quantise_caches: bool = True
    quantise_weights: bool = False
    sparse: bool = True
    draft: bool = True
    replay: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Of a whole optimiser step, over all micro-batches and processes: what its sums are divided by.

    tokens: targets that count. sequences: packed sequences.
    """

    tokens: int
    sequences: int


@dataclass(slots=True, kw_only=True)
class StepLoss:
    """One micro-batch's share of a step.

    total: a scalar to call `backward` on.
    parts: "loss" (next token, nats), "indexer", "balance", "draft_ce", "draft_tv", "draft_confidence", as far as they
        are on; already divided by the step's totals, so that micro-batches and processes add up. Where the drafts learn
        alone, "loss" is the sum that they are trained on.
    loads: MoE layer name -> int64 [E], tokens routed to each expert.
    """

    total: Tensor
    parts: dict[str, float]
    loads: dict[str, Tensor]


class Learner(Protocol):
    """Parameters by checkpoint name in a fixed order; Engram tables get sparse gradients."""

    parameters: dict[str, nn.Parameter]

    def loss(self, batch: Sequence[Packed], phase: Phase, totals: Totals) -> StepLoss:
        """The losses of one micro-batch, with gradients."""

    def after_step(self, loads: Mapping[str, Tensor]) -> None:
        """What a step changes beside the optimiser: router biases, from the whole step's loads."""

    def token_losses(self, batch: Sequence[Packed], phase: Phase) -> list[Tensor]:
        """Next-token loss in nats, fp32 [n] a sequence, 0 where the target is IGNORE; no gradient."""

    def next_logits(self, ids: Tensor, phase: Phase) -> Tensor:
        """fp32 [V] after the last of ids int64 [n]; no gradient. What samples are drawn from."""
