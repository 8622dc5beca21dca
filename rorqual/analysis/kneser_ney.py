"""Interpolated modified Kneser-Ney: the count model that a small language model has to beat.

Three discounts an order (Chen and Goodman 1999), continuation counts below the highest order, backed off to the
uniform distribution. A document is preceded by `order - 1` begin symbols, so no n-gram crosses two documents.

An n-gram is known by its rank among the distinct n-grams of its length; a longer one is the pair (rank of its context,
last token) in one int64, sorted. That holds for any vocabulary: ranks x (vocabulary + 1) stay below 2^63.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rorqual.errors import InputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PLAIN_DISCOUNTS = (0.0, 0.5, 1.0, 1.5)
"""Where too little text leaves a count of counts at zero, and the estimate undefined."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Level:
    """One n-gram length n.

    keys: sorted int64, rank of the context x (V + 1) + last token; an n-gram's rank is its place here.
    counts: by rank; of the text for the highest order, else of the distinct tokens that precede. 0 where the n-gram is
        only ever a context (it ends in a begin symbol).
    totals, backoff: by rank of the context: sum of its counts, and the share left to the shorter n-gram.
    discounts: for counts 0, 1, 2, and 3 or more.
    """

    keys: Ints
    counts: Ints
    totals: Ints
    backoff: Floats
    discounts: Floats

    def rank(self, keys: Ints) -> Ints:
        """Rank of each key, -1 where the training text has no such n-gram."""
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        found: Ints = np.where(self.keys[place] == keys, place, -1)
        return found

    def kept(self, ranks: Ints) -> Floats:
        """Discounted count of each n-gram, 0 for an unknown one (-1)."""
        counts = np.where(ranks < 0, 0, self.counts[ranks])
        kept: Floats = counts - self.discounts[np.minimum(counts, 3)]
        return kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KneserNey:
    """levels[n - 1] holds the n-grams; `vocab_size` tokens, of which each gets some probability in any context."""

    vocab_size: int
    levels: tuple[Level, ...]

    @property
    def order(self) -> int:
        return len(self.levels)

    @classmethod
    def train(cls, documents: Iterable[ArrayLike], vocab_size: int, order: int = 5) -> KneserNey:
        """From token ids, one list a document.

        Raises:
            InputError: order below 1, no token, or an id outside 0..vocab_size - 1.
        """
        if order < 1:
            raise InputError(f"order: {order} is not legal; legal: at least 1")
        stream = np.concatenate([_padded(ids, vocab_size, order - 1) for ids in documents] or [np.empty(0, np.int64)])
        predicted = stream != vocab_size
        if not predicted.any():
            raise InputError("documents: no token to train on")
        ranks = [stream]
        sizes = [vocab_size + 1]
        firsts: list[Ints] = []
        keys = [np.arange(vocab_size + 1)]
        for _ in range(1, order):
            # np.roll lets the first windows wrap around; these are never predicted and never a predicted one's context.
            distinct, first, rank = np.unique(
                np.roll(ranks[-1], 1) * (vocab_size + 1) + stream, return_index=True, return_inverse=True
            )
            ranks.append(rank)
            firsts.append(first)
            keys.append(distinct)
            sizes.append(len(distinct))
        counts = [np.bincount(ranks[-1][predicted], minlength=sizes[-1])]
        for shorter, first in zip(ranks[-2::-1], firsts[::-1], strict=True):
            # Each distinct longer n-gram, counted once, for the n-gram that it ends in.
            first = first[predicted[first]]
            counts.insert(0, np.bincount(shorter[first], minlength=sizes[order - len(counts) - 1]))
        contexts = [1, *sizes[:-1]]
        return cls(
            vocab_size=vocab_size,
            levels=tuple(_level(keys[n], counts[n], keys[n] // (vocab_size + 1), contexts[n]) for n in range(order)),
        )

    def losses(self, ids: ArrayLike) -> Floats:
        """Nats of each token of one document, given all before it; float64 [n]."""
        stream = _padded(ids, self.vocab_size, self.order - 1)
        ranks, probability = self._first(stream)
        for level in self.levels[1:]:
            # Before the first token stand order - 1 begin symbols, which cover what np.roll wraps around.
            context = np.roll(ranks, 1)
            ranks = level.rank(context * (self.vocab_size + 1) + stream)
            ranks[context < 0] = -1
            probability = _interpolated(level, context, ranks, probability)
        losses: Floats = -np.log(probability[self.order - 1 :])
        return losses

    def distribution(self, context: Sequence[int]) -> Floats:
        """Probability of every token after the tokens `context` of a document; float64 [V]."""
        before = _padded(np.asarray(context, np.int64), self.vocab_size, self.order - 1)
        tokens = np.arange(self.vocab_size)
        _, probability = self._first(tokens)
        for n, level in enumerate(self.levels[1:], 1):
            rank = self._rank(before[len(before) - n :])
            keys = level.rank(rank * (self.vocab_size + 1) + tokens) if rank >= 0 else np.full(self.vocab_size, -1)
            probability = _interpolated(level, np.full(self.vocab_size, rank), keys, probability)
        return probability

    def _first(self, tokens: Ints) -> tuple[Ints, Floats]:
        """Ranks of tokens as 1-grams, and their probabilities without context."""
        level = self.levels[0]
        context = np.zeros_like(tokens)
        uniform = np.full(tokens.shape, 1 / self.vocab_size)
        return tokens, _interpolated(level, context, tokens, uniform)

    def _rank(self, gram: Ints) -> int:
        """Rank of one n-gram, -1 for an unknown one."""
        rank = int(gram[0])
        for level, token in zip(self.levels[1:], gram[1:], strict=False):
            rank = int(level.rank(np.array([rank * (self.vocab_size + 1) + token]))[0])
            if rank < 0:
                break
        return rank


def _padded(ids: ArrayLike, vocab_size: int, begin: int) -> Ints:
    tokens = np.asarray(ids, np.int64)
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise InputError(f"ids: {outside[0]} is outside 0..{vocab_size - 1}")
    return np.concatenate((np.full(begin, vocab_size), tokens))


def _level(keys: Ints, counts: Ints, context: Ints, contexts: int) -> Level:
    discounts = _discounts(counts)
    totals = np.bincount(context, counts, minlength=contexts)
    freed = np.bincount(context, discounts[np.minimum(counts, 3)], minlength=contexts)
    with np.errstate(divide="ignore", invalid="ignore"):
        backoff = np.where(totals > 0, freed / totals, 1.0)
    return Level(keys=keys, counts=counts, totals=totals.astype(np.int64), backoff=backoff, discounts=discounts)


def _discounts(counts: Ints) -> Floats:
    """From how many n-grams have a count of 1, 2, 3, 4; each within 0..count, so that nothing turns negative."""
    one, two, three, four = (int((counts == k).sum()) for k in range(1, 5))
    if not (one and two and three and four):
        return np.array(PLAIN_DISCOUNTS)
    y = one / (one + 2 * two)
    found = (0.0, 1 - 2 * y * two / one, 2 - 3 * y * three / two, 3 - 4 * y * four / three)
    return np.array([min(max(value, 0.0), k) for k, value in enumerate(found)])


def _interpolated(level: Level, context: Ints, ranks: Ints, shorter: Floats) -> Floats:
    """Probability at one length from that of the shorter, which it stays in a context that nothing was seen after."""
    totals = np.where(context < 0, 0, level.totals[context])
    known = totals > 0
    own = level.kept(ranks) / np.maximum(totals, 1)
    probability: Floats = np.where(known, own + level.backoff[context] * shorter, shorter)
    return probability


def summary(model: KneserNey) -> dict[str, Any]:
    """What was counted: order, distinct n-grams by length, discounts."""
    return {
        "order": model.order,
        "smoothing": "interpolated modified Kneser-Ney, three discounts an order",
        "ngrams": [int((level.counts > 0).sum()) for level in model.levels],
        "discounts": [[round(float(d), 4) for d in level.discounts[1:]] for level in model.levels],
    }
