"""Where a request goes. One function of what it is told, with no memory of its own.

Membership, liveness and restarts are Ray's; what a worker holds and how much it does is its own to say. A front that
restarts therefore routes as before, and several fronts need not know of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rorqual.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A worker that answers. held: leading keys of the request's whose pages it has. load: requests that it has, live
    or waiting. slots: of them that run at once.
    """

    name: str
    held: int
    load: int
    slots: int


def route(keys: Sequence[bytes], candidates: Sequence[Candidate], *, page_tokens: int, window: int) -> str:
    """The worker with the longest stored prefix among those with a slot free; of equals the one with the least load.

    A worker without a free slot comes last whatever it holds: a hit saves this request its prefill, waiting for a slot
    costs it the rest of somebody else's request, prefill and decode. Where all are full the least load decides first,
    for the same reason, and the prefix second. A prefix of W tokens or fewer is none: it is not adopted, all of it
    would be replayed (SPEC 11). Names break the last ties, so that the same question has the same answer.

    Args:
        keys: of the prompt's full pages, as `PrefixChain` makes them: of this model, tenant and images.
        candidates: who answered.
        page_tokens, window: of the model.

    Raises:
        InputError: no candidates.

    >>> one, two = (Candidate(name=n, held=h, load=1, slots=4) for n, h in (("a", 2), ("b", 5)))
    >>> route([b"k"] * 8, [one, two], page_tokens=128, window=128)
    'b'
    """
    if not candidates:
        raise InputError("route: no worker answers")

    def order(worker: Candidate) -> tuple[object, ...]:
        held = min(worker.held, len(keys))
        worth = held if held * page_tokens > window else 0
        full = worker.load >= worker.slots
        return (full, worker.load, -worth, worker.name) if full else (full, -worth, worker.load, worker.name)

    return min(candidates, key=order).name
