"""The texts that a quality study is paired on: windows of held-out documents, each holding a prompt of every length.

A window is as long as the longest prompt and the tokens scored after it; the prompts of a window are its prefixes, so
one pass gives them all. Every window begins with the begin token, wherever in a document it is cut: training has it at
position 0 always.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.analysis.positions import with_begin, without_begin
from rorqual.errors import InputError

# P windows, L tokens of a window


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """ids int64 [n] of one text, with its begin token or without."""

    name: str
    ids: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """ids int64 [P, L], the begin token first, in random order: the first so many are a sample of all.

    sources: document of each, and which token of its text (0: the first after a begin token) follows the begin token.
    stride: tokens between neighbours of one document; below L - 1 they overlap, but the tokens scored after prompts of
    one length never do. short: documents with no room for a window.
    """

    ids: Tensor
    sources: tuple[tuple[str, int], ...]
    stride: int
    short: int

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def fingerprint(self) -> str:
        """sha256 of the ids."""
        return hashlib.sha256(self.ids.contiguous().numpy().tobytes()).hexdigest()


def cut_windows(
    documents: Sequence[Document], length: int, count: int, *, scored: int, bos: int, seed: int = 0
) -> Windows:
    """At most `count` windows of `length` tokens, the begin token `bos` and `length` - 1 of a text, spread over every
    document long enough.

    They keep as far apart as the text allows, at least `scored` tokens. `seed` draws which of the possible ones, and
    their order.

    Raises:
        InputError: no document is long enough.
    """
    bodies, taken = [without_begin(document.ids.to(torch.int64), bos) for document in documents], length - 1
    spare = [len(body) - taken for body in bodies if len(body) >= taken]
    if not spare:
        longest = max((1 + len(body) for body in bodies), default=0)
        raise InputError(
            f"data: no document has the {length:,} tokens of a window, the longest of {len(documents)} has {longest:,},"
            " begin token included; give longer texts or shorter --lengths"
        )
    stride = widest_stride(spare, count, scored, taken)
    places = [(i, start) for i, body in enumerate(bodies) for start in range(0, len(body) - taken + 1, stride)]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    chosen = [places[at] for at in order]
    return Windows(
        ids=torch.stack([with_begin(bodies[i][start : start + taken], bos) for i, start in chosen]),
        sources=tuple((documents[i].name, start) for i, start in chosen),
        stride=stride,
        short=len(documents) - len(spare),
    )


def widest_stride(spare: Sequence[int], count: int, least: int, most: int) -> int:
    """The largest stride in [least, most] at which documents with so many spare tokens hold `count` windows; `least`
    where even that holds fewer.

    >>> widest_stride([1000], 3, 100, 400), widest_stride([1000], 6, 100, 400), widest_stride([1000], 99, 100, 400)
    (400, 200, 100)
    """
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        if sum(tokens // middle + 1 for tokens in spare) >= count:
            low = middle
        else:
            high = middle - 1
    return low
