"""Documents packed into sequences of exactly n tokens.

A document longer than what is left of a sequence is cut, and goes on at the start of the next one; a shorter one shares
a sequence with others. Every token of every document is in exactly one place. The target of a piece's last token is the
token that really follows it, so every token but the first of a document is a target exactly once.

A piece that goes on begins with bos, which trains nothing: at inference too a text that starts anywhere has bos before
it, and position 0 is bos there always. A piece that goes on inside a turn of a conversation has the turn's opening
markers after bos, so that it reads as a conversation that starts in the middle of that turn. What is left of the last
sequence of a pass is padding, a piece of its own without targets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rorqual.training.batch import IGNORE, Packed

LOOK_AHEAD = 64
"""Documents among which the longest that fits the rest of a sequence is sought before one is cut."""

Header = Callable[[int, int], Sequence[int]]
"""(document, offset > 0) -> ids that a piece which starts there begins with, bos first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every token of a pass goes.

    pieces: int64 [P, 3], document and [start, stop) within it. first: int64 [S+1], the first piece of each sequence.
    """

    pieces: NDArray[np.int64]
    first: NDArray[np.int64]

    @property
    def sequences(self) -> int:
        return len(self.first) - 1


def plan_pass(order: Sequence[int], lengths: Sequence[int], n: int, header: Header) -> Plan:
    """Each document of `order` once, in that order but for those that fill the end of a sequence.

    lengths: tokens by document. n: tokens a sequence, at least 1.
    """
    pieces: list[tuple[int, int, int]] = []
    first = [0]
    pending = deque(document for document in order if lengths[document])
    done, room = 0, n  # `done` tokens of pending[0] are placed
    while pending:
        index = 0 if done or lengths[pending[0]] <= room else _that_fits(pending, lengths, room)
        document = pending[index]
        extra = len(cut_header(header, document, done, n)) if done else 0
        stop = min(lengths[document], done + room - extra)
        assert stop > done, (document, done, room, extra)
        pieces.append((document, done, stop))
        room -= extra + stop - done
        if stop == lengths[document]:
            del pending[index]
            done = 0
        else:
            done = stop
        if not room:
            first.append(len(pieces))
            room = n
    if first[-1] != len(pieces):
        first.append(len(pieces))
    return Plan(np.array(pieces, dtype=np.int64).reshape(-1, 3), np.array(first, dtype=np.int64))


def _that_fits(pending: deque[int], lengths: Sequence[int], room: int) -> int:
    """Place in `pending` of the longest whole document within `room`; 0 where none is near."""
    near = ((lengths[document], -index) for index, document in enumerate(islice(pending, LOOK_AHEAD)))
    return -max((item for item in near if item[0] <= room), default=(0, 0))[1]


def cut_header(header: Header, document: int, start: int, n: int) -> Sequence[int]:
    """What a piece from `start` begins with, short enough that n tokens hold one token of the document too."""
    return header(document, start)[: n - 1]


def pack(
    plan: Plan,
    sequence: int,
    n: int,
    number: int,
    pad: int,
    header: Header,
    ids: Callable[[int, int, int], Tensor],
) -> Packed:
    """The plan's sequence as tensors. ids: (document, start, stop) -> int64, shorter where the document ends."""
    tokens = torch.full((n,), pad, dtype=torch.int64)
    targets = torch.full((n,), IGNORE, dtype=torch.int64)
    starts: list[int] = []
    at = 0
    for document, start, stop in plan.pieces[plan.first[sequence] : plan.first[sequence + 1]].tolist():
        starts.append(at)
        extra = cut_header(header, document, start, n) if start else ()
        tokens[at : at + len(extra)] = torch.tensor(extra, dtype=torch.int64)
        at += len(extra)
        following = ids(document, start, stop + 1)
        size = stop - start
        tokens[at : at + size] = following[:size]
        targets[at : at + len(following) - 1] = following[1:]
        at += size
    if at < n:
        starts.append(at)
    return Packed(ids=tokens, targets=targets, starts=tuple(starts), number=number)
