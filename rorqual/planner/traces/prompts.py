"""Requests made ready for a pool: when each prompt arrives, its keys and its pages. All else they say is summed up.

None of this depends on the pool, so another process can do it. Batches are columns: an array goes through a pipe as its
bytes, where a list of requests would be made anew there, object by object.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from rorqual.planner.traces.arrivals import Arrivals
from rorqual.planner.traces.blocks import BlockMap, Keys
from rorqual.planner.traces.request import Request
from rorqual.planner.traces.sessions import Sessions

BATCH = 512


class Batch(NamedTuple):
    """Prompts in their order. times_us: arrivals. lengths, pages: keys and pages of each. keys: of all, in turn."""

    times_us: array[int]
    lengths: array[int]
    pages: array[int]
    keys: array[int]

    def prompts(self) -> Iterator[tuple[int, Keys, int]]:
        """(arrival [us], keys, pages) of each prompt.

        >>> batch = Batch(*(array("q", column) for column in ([0, 9], [2, 1], [8, 3], [7, 8, 9])))
        >>> [(time, list(keys), pages) for time, keys, pages in batch.prompts()]
        [(0, [7, 8], 8), (9, [9], 3)]
        """
        keys, start = self.keys, 0
        for time, length, pages in zip(self.times_us, self.lengths, self.pages, strict=True):
            end = start + length
            yield time, keys[start:end], pages
            start = end


class Prompts:
    """The prompts of one trace; `arrivals` and `sessions` are complete once all batches have been taken.

    Args:
        block_tokens, page_tokens: as `BlockMap`. residence_us: as `Sessions`.
    """

    __slots__ = ("_blocks", "arrivals", "sessions")

    def __init__(self, block_tokens: int, page_tokens: int, residence_us: int) -> None:
        self._blocks = BlockMap(block_tokens, page_tokens)
        self.arrivals = Arrivals()
        self.sessions = Sessions(residence_us)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._blocks.page_tokens

    @property
    def key_pages(self) -> int:
        """Pages of every key but a prompt's last."""
        return self._blocks.full

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Requests as batches of prompts, a few hundred each.

        >>> prompts = Prompts(512, 128, 10**6)
        >>> [batch.pages.tolist() for batch in prompts.batches([Request(0, 1300, 9, [1, 2]), Request(5, 600, 9, [1])])]
        [[10, 4]]
        >>> prompts.arrivals.requests, prompts.sessions.peak
        (2, 2)
        """
        stream = iter(requests)
        while found := list(islice(stream, BATCH)):
            yield self._batch(found)

    def _batch(self, requests: list[Request]) -> Batch:
        batch = Batch(array("q"), array("q"), array("q"), array("q"))
        for request in requests:
            now = self.arrivals.add(request)
            self.sessions.arrive(now, request)
            keys = self._blocks.keys(request)
            batch.times_us.append(now)
            batch.lengths.append(len(keys))
            batch.pages.append(request.input_tokens // self.page_tokens)
            batch.keys.extend(keys)
        return batch
