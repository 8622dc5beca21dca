"""From logits to a token: what a request asked of the logits, the distribution that is left, and the draw from it.

    logits -> penalties, bias -> without what may not come -> temperature -> top-k, top-p, min-p -> draw

Greedy takes the largest of what is left before the temperature; ties go to the lowest id. All of it in fp64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from rorqual.engine.grammar import Matcher
from rorqual.engine.noise import TOKEN, Noise, draw
from rorqual.engine.params import SamplingParams
from rorqual.errors import FormatError

DAMAGED = "logits: NaN or Inf; the checkpoint's weights are damaged or overflow"


class Sampler:
    """One sequence's choices; they do not depend on what else is running.

    Args:
        params: as asked.
        prompt: its tokens, for the repetition penalty.
        ends: tokens that end the text and so may not come before `min_tokens`.
        matcher: of the constraint.
        index: of the completion, so that n of them with one seed differ.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt: Iterable[int] = (),
        ends: Collection[int] = (),
        matcher: Matcher | None = None,
        index: int = 0,
    ) -> None:
        self.params, self.matcher = params, matcher
        self.noise = Noise(params.seed, index)
        self._ends = sorted(ends)
        self._bias = _sparse(params.logit_bias) if params.logit_bias else None
        self._prompt = set(prompt) if params.repetition_penalty != 1 else set()
        self._counts = Counter[int]()
        self.count = 0
        """Tokens taken so far."""

    @property
    def plain(self) -> bool:
        """The next token is the largest logit's."""
        params, adjusted = self.params, self._bias is not None or self.matcher is not None
        return params.greedy and not adjusted and not params.penalised and self.count >= params.min_tokens

    def __call__(self, logits_V: Tensor) -> int:
        """The next token, from fp32 logits [V]; it is taken.

        Raises:
            FormatError: NaN or Inf among the logits; nothing sensible can be sampled.
        """
        # Draws come from the CPU's generator, whatever device computed the logits.
        logits_V = logits_V.cpu()
        if not bool(logits_V.isfinite().all()):
            raise FormatError(DAMAGED)
        token = self.choose(self.weights(logits_V))
        self.take(token)
        return token

    def take(self, token: int) -> None:
        """The token is the next one."""
        self.count += 1
        if self.params.penalised:
            self._counts[token] += 1
        if self.matcher is not None:
            self.matcher.take(token)

    def restart(self, taken: Iterable[int], matcher: Matcher | None) -> None:
        """As if these had been taken, and no other. matcher: a fresh one of the constraint."""
        self.count, self.matcher = 0, matcher
        self._counts.clear()
        for token in taken:
            self.take(token)

    def weights(self, logits_V: Tensor) -> Tensor:
        """fp64 distribution [V] of the next token; of greedy all in one place."""
        if self.plain:
            return _one_hot(logits_V)
        adjusted = self._adjusted(logits_V.double())
        return _one_hot(adjusted) if self.params.greedy else probabilities(adjusted, self.params)

    def choose(self, weights_V: Tensor, purpose: int = TOKEN, ahead: int = 0) -> int:
        """A draw for the token `ahead` places after the next one, not taken."""
        if self.params.greedy:
            return int(weights_V.argmax())
        return draw(weights_V, self.noise.exponential(purpose, self.count + ahead, weights_V.shape[0]))

    def _adjusted(self, logits_V: Tensor) -> Tensor:
        params = self.params
        if params.penalised:
            logits_V = self._penalised(logits_V)
        if self._bias is not None:
            ids, values = self._bias
            logits_V = logits_V.index_add(0, ids, values)
        if self.matcher is not None:
            logits_V = logits_V.masked_fill(~self.matcher.allowed(), float("-inf"))
        if self.count < params.min_tokens and self._ends:
            kept = logits_V.index_fill(0, torch.tensor(self._ends), float("-inf"))
            # A constraint may leave nothing but the end.
            logits_V = kept if bool(kept.isfinite().any()) else logits_V
        return logits_V

    def _penalised(self, logits_V: Tensor) -> Tensor:
        params, logits_V = self.params, logits_V.clone()
        seen = torch.tensor(sorted(self._prompt | self._counts.keys()), dtype=torch.int64)
        if params.repetition_penalty != 1 and len(seen):
            own = logits_V[seen]
            logits_V[seen] = torch.where(own > 0, own / params.repetition_penalty, own * params.repetition_penalty)
        if self._counts:
            ids, counts = _sparse(self._counts)
            logits_V[ids] -= params.presence_penalty + params.frequency_penalty * counts
        return logits_V


def probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """fp64 distribution [V] after temperature, top-k, top-p and min-p; the most likely token always stays."""
    scaled = (logits_V.double() - logits_V.max()) / params.temperature
    if not 0 < params.top_k < scaled.shape[0] and params.top_p == 1:
        return _above(scaled.softmax(0), params.min_p)
    order = scaled.sort(descending=True, stable=True)
    values = order.values
    if 0 < params.top_k < values.shape[0]:
        values = values.clone()
        values[params.top_k :] = float("-inf")
    weights = values.softmax(0)
    if params.top_p < 1:
        before = weights.cumsum(0) - weights
        weights = weights.masked_fill(before >= params.top_p, 0)
        weights = weights / weights.sum()
    return _above(torch.zeros_like(weights).scatter_(0, order.indices, weights), params.min_p)


def _above(weights_V: Tensor, min_p: float) -> Tensor:
    """What is at least `min_p` of the likeliest."""
    if not min_p:
        return weights_V
    kept = weights_V.masked_fill(weights_V < min_p * weights_V.max(), 0)
    return kept / kept.sum()


def _one_hot(logits_V: Tensor) -> Tensor:
    weights = torch.zeros(logits_V.shape[0], dtype=torch.float64)
    weights[int(logits_V.argmax())] = 1
    return weights


def _sparse(values: object) -> tuple[Tensor, Tensor]:
    """(ids int64, values fp64) of a mapping, in the order of ids."""
    pairs = sorted(dict(values).items())  # type: ignore[call-overload]
    ids = torch.tensor([token for token, _ in pairs], dtype=torch.int64)
    return ids, torch.tensor([value for _, value in pairs], dtype=torch.float64)
