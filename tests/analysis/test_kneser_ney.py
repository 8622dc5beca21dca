"""Kneser-Ney against a hand-computed case, a plain implementation over dictionaries, and what any model must be."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from rorqual.analysis.kneser_ney import KneserNey, summary
from rorqual.errors import InputError

A, B, C = 0, 1, 2


def sampled(seed: int, documents: int, length: int, vocab: int) -> list[np.ndarray]:
    """Documents of a random bigram chain."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(vocab, 0.3), vocab)
    found = []
    for _ in range(documents):
        ids = [int(rng.integers(vocab))]
        for _ in range(length - 1):
            ids.append(int(rng.choice(vocab, p=table[ids[-1]])))
        found.append(np.array(ids))
    return found


def plain(documents: list[np.ndarray], vocab: int, order: int, model: KneserNey) -> dict[tuple[int, ...], float]:
    """P(last | all before it) of every n-gram of the full order, by the textbook, with the model's discounts."""
    seen: Counter[tuple[int, ...]] = Counter()
    for ids in documents:
        padded = [vocab] * (order - 1) + ids.tolist()
        seen.update(tuple(padded[i - order + 1 : i + 1]) for i in range(order - 1, len(padded)))
    counts = {order: seen}
    for n in range(order - 1, 0, -1):
        counts[n] = Counter(gram[1:] for gram in counts[n + 1])
    after: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    for level in counts.values():
        for gram, count in level.items():
            after[gram[:-1]][gram[-1]] = count

    def probability(context: tuple[int, ...], token: int) -> float:
        shorter = probability(context[1:], token) if context else 1 / vocab
        follow = after.get(context)
        if not follow:
            return shorter
        discounts = model.levels[len(context)].discounts
        total = sum(follow.values())
        freed = sum(discounts[min(count, 3)] for count in follow.values())
        own = follow.get(token, 0)
        return (own - discounts[min(own, 3)] + freed * shorter) / total

    symbols = range(vocab + 1)
    return {
        (*context, token): probability(context, token)
        for context in itertools.product(symbols, repeat=order - 1)
        for token in range(vocab)
    }


def test_a_bigram_by_hand() -> None:
    """Documents aab and ab. Too few counts to estimate discounts, so they are 0.5 for 1 and 1 for 2.

    Bigrams: ^a 2, aa 1, ab 2. Tokens that precede: a has 2 (^, a), b has 1 (a), c none.
    """
    model = KneserNey.train([[A, A, B], [A, B]], vocab_size=3, order=2)
    # Single tokens: (2 - 1)/3 and (1 - 0.5)/3, and 1.5/3 is left for the uniform third.
    a, b, c = 1 / 3 + 0.5 / 3, 0.5 / 3 + 0.5 / 3, 0.5 / 3
    np.testing.assert_allclose(model.distribution([]), [(2 - 1 + 1 * a) / 2, b / 2, c / 2])
    np.testing.assert_allclose(model.distribution([A]), [(0.5 + 1.5 * a) / 3, (1 + 1.5 * b) / 3, 1.5 * c / 3])
    np.testing.assert_allclose(model.distribution([A, B]), [a, b, c], err_msg="b is followed by nothing")
    expected = [-math.log((1 + a) / 2), -math.log((1 + 1.5 * b) / 3), -math.log(c)]
    np.testing.assert_allclose(model.losses([A, B, C]), expected)


def test_every_context_sums_to_one() -> None:
    vocab, order = 4, 5
    model = KneserNey.train(sampled(1, 6, 60, vocab), vocab, order)
    for length in range(order + 1):
        for context in itertools.product(range(vocab), repeat=length):
            distribution = model.distribution(context)
            assert abs(distribution.sum() - 1) < 1e-12, context
            assert distribution.min() > 0, context


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_equals_the_textbook_over_dictionaries(order: int) -> None:
    vocab = 5
    documents = sampled(2, 5, 80, vocab)
    model = KneserNey.train(documents, vocab, order)
    expected = plain(documents, vocab, order, model)
    held = sampled(3, 1, 200, vocab)[0]
    padded = [vocab] * (order - 1) + held.tolist()
    wanted = [-math.log(expected[tuple(padded[i : i + order])]) for i in range(len(held))]
    np.testing.assert_allclose(model.losses(held), wanted, rtol=1e-12)
    for position in (0, 1, 7, 150):
        one = -np.log(model.distribution(held[:position].tolist())[held[position]])
        assert abs(one - wanted[position]) < 1e-12


def test_discounts_follow_the_counts_of_counts() -> None:
    """n-grams seen once 4 times, twice 3, three times 2, four times 1."""
    tokens = np.repeat(np.arange(10), [1, 1, 1, 1, 2, 2, 2, 3, 3, 4])
    model = KneserNey.train([tokens], 10, order=1)
    y = 4 / (4 + 2 * 3)
    expected = [0, 1 - 2 * y * 3 / 4, 2 - 3 * y * 2 / 3, 3 - 4 * y * 1 / 2]
    np.testing.assert_allclose(model.levels[0].discounts, expected)
    assert summary(model)["ngrams"] == [10]


def test_no_ngram_crosses_documents() -> None:
    """Cut in two, a text loses the pair at the cut: what stood before it no longer predicts what came after."""
    whole = KneserNey.train([[A, A, B, B]], 3, order=2)
    cut = KneserNey.train([[A, A], [B, B]], 3, order=2)
    assert whole.distribution([A])[B] > cut.distribution([A])[B]


def test_longer_contexts_beat_single_tokens() -> None:
    documents = sampled(4, 30, 300, 30)
    held = np.concatenate(
        [KneserNey.train(documents[:-3], 30, order).losses(ids) for order in (1, 3) for ids in documents[-3:]]
    ).reshape(2, -1)
    unigram, trigram = held.mean(1)
    assert trigram < unigram - 0.3


def test_a_large_vocabulary_needs_no_packing_into_bits() -> None:
    """20 bits a token, five tokens: more than 63 bits."""
    vocab = 1 << 20
    ids = [(i * 7919) % vocab for i in range(50)] * 3
    model = KneserNey.train([ids], vocab, order=5)
    losses = model.losses(ids)
    assert losses[60:].max() < 1.5
    assert losses[60:].max() < math.log(vocab) / 5


def test_refuses_what_is_no_text() -> None:
    with pytest.raises(InputError, match="order"):
        KneserNey.train([[A]], 3, order=0)
    with pytest.raises(InputError, match="no token"):
        KneserNey.train([], 3)
    with pytest.raises(InputError, match=r"3 is outside 0\.\.2"):
        KneserNey.train([[A, 3]], 3)
    with pytest.raises(InputError, match="-1 is outside"):
        KneserNey.train([[A]], 3).losses([-1])
