"""Words, known and copied, on toy texts."""

from __future__ import annotations

import random

import pytest

from rorqual.analysis.text_words import copied, known_share, words


def test_words_are_letters_and_inner_apostrophes() -> None:
    assert words("Thou'rt 3 times 'Welcome', O King_of Néw—men's ways' ''") == [
        *("thou'rt", "times", "welcome", "o", "king", "of", "néw", "men's", "ways"),
    ]
    assert words("It’s") == words("it's") == ["it's"]


def test_words_that_were_begun_or_not_finished_do_not_count() -> None:
    text = "the gr|eat sea and the wha"
    cut = text.index("|")
    text = text.replace("|", "")
    assert words(text, cut) == ["sea", "and", "the", "wha"]
    assert words(text, cut, whole=False) == ["sea", "and", "the"]
    assert words("the sea. ", whole=False) == ["the", "sea"]
    assert words("", whole=False) == []


def test_known_share_counts_every_word() -> None:
    share, unknown = known_share([["a", "b", "a"], ["zz", "a"], []], {"a", "b"})
    assert share == pytest.approx(4 / 5)
    assert unknown == ["zz"]
    assert known_share([[]], {"a"}) == (1.0, [])


@pytest.mark.parametrize("run", [1, 2, 3, 4, 7, 8, 12])
def test_copied_equals_a_plain_search(run: int) -> None:
    draw = random.Random(run)
    corpus = [[draw.choice("abcd") for _ in range(draw.randrange(40))] for _ in range(6)]
    # Words of pieces of the corpus, so that runs of every length occur.
    samples = [[]]
    for _ in range(40):
        source = draw.choice(corpus)
        start = draw.randrange(len(source) + 1)
        samples.append([*draw.choices("abcd", k=3), *source[start : start + draw.randrange(15)], "d"])
    held = {tuple(text[i : i + run]) for text in corpus for i in range(len(text) - run + 1)}
    expected = [any(tuple(one[i : i + run]) in held for i in range(len(one) - run + 1)) for one in samples]
    assert copied(samples, corpus, run) == expected
    assert run < 5 or (any(expected) and not all(expected))


def test_no_run_across_texts() -> None:
    assert copied([list("abcd")], [list("xab"), list("cdx")], 4) == [False]
    assert copied([list("ab"), list("cd")], [list("abcd")], 4) == [False, False]
    assert copied([list("abcd")], [list("xabcdx")], 4) == [True]
    assert copied([], [list("abc")], 2) == []
    assert copied([list("a")], [], 12) == [False]
