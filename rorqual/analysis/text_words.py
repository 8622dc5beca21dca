"""Words of sampled text: do they exist, and are long runs of them copied?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set

import numpy as np

RUN = 12
"""Words in a row that count as copied."""

_WORD = re.compile(r"(?:[^\W\d_]|['’])+")
_QUOTES = "'’"


def words(text: str, start: int = 0, *, whole: bool = True) -> list[str]:
    """Maximal runs of letters and apostrophes, lower-cased, without the apostrophes at their ends: quotation marks.

    start: only words that begin there or later, in a text whose beginning was given.
    whole: False where the text was cut off, and the word that it ends in may be part of a longer one.
    """
    found = list(_WORD.finditer(text))
    if found and not whole and found[-1].end() == len(text):
        found.pop()
    plain = (match[0].strip(_QUOTES).replace("’", "'").lower() for match in found if match.start() >= start)
    return [word for word in plain if word]


def known_share(samples: Iterable[Sequence[str]], vocabulary: Set[str]) -> tuple[float, list[str]]:
    """Share of all words of all samples that are in the vocabulary, and the unknown ones; 1.0 of no words."""
    everything = [word for sample in samples for word in sample]
    unknown = [word for word in everything if word not in vocabulary]
    return 1 - len(unknown) / max(1, len(everything)), unknown


def copied(samples: Sequence[Sequence[str]], corpus: Iterable[Sequence[str]], run: int = RUN) -> list[bool]:
    """Of each sample, whether some `run` words in a row stand in a row in one of the corpus's texts.

    Exact: runs of 2, 4, 8 .. words are numbered by doubling, and one of `run` words is two of these that overlap.
    """
    assert run >= 1
    texts = [*samples, *corpus]
    numbers: dict[str, int] = {}
    ids = np.array([numbers.setdefault(word, len(numbers)) for text in texts for word in text], dtype=np.int64)
    owner = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    length = 1
    while 2 * length <= run:
        ids = _numbered(ids[:-length], ids[length:])
        length *= 2
    if length < run:
        ids = _numbered(ids[: length - run], ids[run - length :])
    # A run that begins in one text and ends in another is none.
    inside = owner[: len(ids)] == owner[run - 1 :][: len(ids)]
    ids, owner = ids[inside], owner[: len(inside)][inside]
    mine = owner < len(samples)
    taken = owner[mine][np.isin(ids[mine], ids[~mine])]
    found = np.zeros(len(samples), dtype=bool)
    found[taken] = True
    return [bool(value) for value in found]


def _numbered(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """One number for each distinct pair."""
    if not len(first):
        return np.empty(0, np.int64)
    _, number = np.unique(first * (int(second.max()) + 1) + second, return_inverse=True)
    return np.asarray(number, dtype=np.int64)
