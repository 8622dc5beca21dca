"""A prompt's trace blocks as pages of the model: what a pool is asked for.

A page belongs to the block that holds its last token, so a run of blocks from the start of a prompt holds
floor(their tokens / page) pages, whatever the two sizes are:

    blocks of 512, pages of 128    a key is a block, of 4 pages; the last one of a prompt may have 0 to 3
    blocks of 16, pages of 128     a key is a page; its name is chained from the ids of all 8 blocks and the page before
    blocks of 512, pages of 384    a key is a page, too; the ids of the blocks that it ends in and those since the last

Two requests share a page if they share the blocks that hold its tokens; what they share within a block, a trace does
not tell. Pages that no id covers are private: they take room and are never found again.

A key is a word of 64 bits: a block's id, or else a hash. Keys of a prompt lie in an array, since a pool holds millions
and most that come are dropped at once: as objects of their own they take most of a replay's time.
"""

from __future__ import annotations

from array import array
from typing import TypeAlias

from rorqual.errors import InputError
from rorqual.planner.traces.request import Request

Keys: TypeAlias = "array[int]"
"""Keys of a prompt in order. All are of `BlockMap.full` pages but the last, whose pages are what is left of them."""
WORD = 1 << 64


class BlockMap:
    """Keys of prompts, and the pages of each.

    Args:
        block_tokens: tokens of a trace block; 0 for a trace without hashes, whose pages are all private.
        page_tokens: tokens of a page of the model.
    """

    __slots__ = ("_private", "block_tokens", "by_block", "full", "page_tokens")

    def __init__(self, block_tokens: int, page_tokens: int) -> None:
        if block_tokens < 0 or page_tokens < 1:
            raise InputError(f"blocks of {block_tokens} tokens and pages of {page_tokens} do not go together")
        self.block_tokens = block_tokens
        self.page_tokens = page_tokens
        self.by_block = block_tokens > 0 and block_tokens % page_tokens == 0
        self.full = block_tokens // page_tokens if self.by_block else 1
        self._private = 0

    def keys(self, request: Request) -> Keys:
        """Keys of the prompt in order; together they are of floor(prompt / page) pages.

        >>> mooncake = BlockMap(512, 128)
        >>> full = mooncake.keys(Request(0, 1100, 1, [7, 8, 32]))
        >>> partial = mooncake.keys(Request(0, 1300, 1, [7, 8, 31]))
        >>> list(full), partial[:2] == full, len(partial)
        ([7, 8], True, 3)
        """
        ids, tokens = request.ids, request.input_tokens
        if not self.by_block:
            return self._pages(ids, tokens)
        full = tokens // self.block_tokens
        rest = (tokens - full * self.block_tokens) // self.page_tokens
        keys = _words(ids[:full])
        if rest:
            # Another key than that of the full block, should the id come back as one.
            keys.append(hash((ids[full], rest)) if len(ids) > full else self._name_private())
        return keys

    def sizes(self, keys: int, pages: int) -> list[int]:
        """Pages [1] of each of a prompt's keys, of which there are so many, of so many pages in all.

        >>> BlockMap(512, 128).sizes(3, 10)
        [4, 4, 2]
        """
        return [self.full] * (keys - 1) + [pages - self.full * (keys - 1)] if keys else []

    def _pages(self, ids: list[int], tokens: int) -> Keys:
        """Page after page, its name made of the name before it and of the ids since."""
        block, page = self.block_tokens, self.page_tokens
        covered = min(len(ids) * block, tokens) // page
        keys = array("q")
        name, used = 0, 0
        for number in range(1, covered + 1):
            end = -(-number * page // block)
            name = hash((name, *ids[used:end]))
            keys.append(name)
            used = end
        if tokens // page > covered:
            keys.append(self._name_private())
        return keys

    def _name_private(self) -> int:
        self._private += 1
        return hash((self._private, 0, 0))


def _words(ids: list[int]) -> Keys:
    """Ids as they are; of those beyond 64 bits with a sign, the lowest 64.

    >>> list(_words([7, -1])), list(_words([7, 2**64 - 9]))
    ([7, -1], [7, -9])
    """
    try:
        return array("q", ids)
    except OverflowError:
        return array("q", [(name + WORD // 2) % WORD - WORD // 2 for name in ids])
