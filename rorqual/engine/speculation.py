"""Lossless speculation: what is proposed for a request, and which of it stands after verification.

    greedy          a draft stands while it is the backbone's own choice
    with a seed     the same, both choices drawn with one noise: the text is that of plain sampling, token for token
    without one     the standard rule: accept x with probability min(1, p(x) / q(x)), else draw from max(0, p - q)

The standard rule accepts most drafts, but which token comes depends on how many are verified, and that on what else is
running. Whoever gives a seed asks for the same text again, so there the draws decide and the drafts only guess them.
p is what the request asked for, penalties and constraint included; q the draft's logits at its temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.cache.kv_cache import KVCache
from rorqual.engine.backlog import Backlog
from rorqual.engine.draft import Fed, feed, propose
from rorqual.engine.draft_length import Worth, survivals
from rorqual.engine.noise import ACCEPT, DRAFT, TOKEN
from rorqual.engine.sampler import Sampler, probabilities
from rorqual.errors import InputError
from rorqual.model.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """ids: proposals for the tokens after the newest known one. weights: what each was drawn from, fp64 [V], for the
    standard rule; None where the backbone's own choice decides. survivals: what their drafter promised of each."""

    ids: list[int]
    weights: list[Tensor] | None = None
    survivals: Sequence[float] = ()


NO_DRAFTS = Drafts(ids=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Who wants drafts: the slot whose draft windows are fed, its newest token, its sampler, and how many at most."""

    slot: int
    token: int
    sampler: Sampler
    room: int


def coupled(sampler: Sampler) -> bool:
    """Drafts are accepted where they are the backbone's own choice."""
    return sampler.params.greedy or sampler.params.seed is not None


def accept(sampler: Sampler, logits_nV: Tensor, drafts: Drafts, ends: frozenset[int] = frozenset()) -> list[int]:
    """The tokens that a verification gives: accepted drafts, then one that is the backbone's; all are taken.

    Args:
        sampler: of the sequence.
        logits_nV: fp32, of the newest token and of each draft; finite.
        drafts: n - 1 of them at least.
        ends: tokens that end the text; what is behind one is dropped.
    """
    found: list[int] = []
    for at, logits_V in enumerate(logits_nV):
        draft = drafts.ids[at] if at + 1 < len(logits_nV) else None
        weights = sampler.weights(logits_V)
        if draft is None or drafts.weights is None:
            token, stands = sampler.choose(weights), draft is not None
            stands = stands and token == draft
        else:
            token, stands = _by_rejection(sampler, weights, drafts.weights[at], draft)
        sampler.take(token)
        found.append(token)
        if not stands or (token in ends and sampler.count >= sampler.params.min_tokens):
            break
    return found


def _by_rejection(sampler: Sampler, weights_V: Tensor, proposed_V: Tensor, draft: int) -> tuple[int, bool]:
    """(token, whether it is the draft)."""
    if sampler.noise.uniform(ACCEPT, sampler.count) * float(proposed_V[draft]) < float(weights_V[draft]):
        return draft, True
    rest = (weights_V - proposed_V).clamp_min(0)
    # Equal distributions reject nothing; what rounding leaves of them is no distribution.
    return sampler.choose(rest if float(rest.sum()) > 1e-12 else weights_V), False


class Speculator:
    """Proposals for the requests of one engine.

    Args:
        model: with drafts.
        cache: whose draft windows are fed.
        width: drafts a verification at most; None for the whole block.

    Raises:
        InputError: a model without drafts, or a width that its block does not have (field case 30).
    """

    def __init__(self, model: Transformer, cache: KVCache, width: int | None = None) -> None:
        if model.draft is None:
            raise InputError("speculative: this model has no draft layers; legal: False")
        block = model.config.dspark_block_size
        self.width = block if width is None else width
        if not 1 <= self.width <= block:
            raise InputError(f"draft_tokens: {width} is not legal; legal: 1..{block}, the block of this model's draft")
        self.worth = Worth()
        self.drafted = 0
        """Requests that the last call of `propose` made drafts for."""
        self._model, self._cache, self._backlog = model, cache, Backlog()

    def begin(self, slot: int) -> None:
        """The slot is another sequence's, or stands elsewhere."""
        self._backlog.drop(slot)

    def fork(self, source: int, target: int) -> None:
        """The slot `target` is a copy of `source`."""
        self._backlog.copy(source, target)

    def feed(self, fed: Sequence[Fed]) -> None:
        """Accepted rows, for the draft windows to have before the next drafts."""
        for batch in self._backlog.add(fed):
            self._write(batch)

    def wanted(self, asks: Sequence[Ask], rows: int) -> bool:
        """Whether drafts pay; their windows are then up to date. rows: of the next step without any draft."""
        self.drafted = len(asks) if asks and self.worth.pays(len(asks), rows) else 0
        if self.drafted:
            self._write(self._backlog.take([ask.slot for ask in asks]))
        return bool(self.drafted)

    def _write(self, fed: Sequence[Fed]) -> None:
        if fed:
            feed(self._model, self._cache, fed)

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Drafts]:
        """Drafts for each, where they are `wanted`."""
        found: list[list[Tensor]] = [[] for _ in asks]

        def choose(logits_BV: Tensor, draft: int) -> Tensor:
            if all(ask.sampler.params.greedy for ask in asks):
                return logits_BV.argmax(-1)
            return torch.tensor([self._draw(ask, logits_BV[i], draft, found[i]) for i, ask in enumerate(asks)])

        tokens = torch.tensor([ask.token for ask in asks])
        made = propose(self._model, self._cache, [a.slot for a in asks], tokens, choose, drafts=self.width)
        ids: list[list[int]] = made.ids_Bg.tolist()
        sure = [survivals(own)[: ask.room] for ask, own in zip(asks, made.confidence_Bg.tolist(), strict=True)]
        lengths = self.worth.lengths(sure, rows)
        return [
            Drafts(
                ids=own[:length],
                weights=None if coupled(ask.sampler) else weights[:length],
                survivals=promised[:length],
            )
            for ask, own, weights, promised, length in zip(asks, ids, found, sure, lengths, strict=True)
        ]

    def _draw(self, ask: Ask, logits_V: Tensor, ahead: int, found: list[Tensor]) -> int:
        sampler = ask.sampler
        if sampler.params.greedy:
            return int(logits_V.argmax())
        weights = probabilities(logits_V.cpu(), sampler.params)
        found.append(weights)
        return sampler.choose(weights, TOKEN if coupled(sampler) else DRAFT, ahead)
