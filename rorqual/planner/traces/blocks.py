"""A prompt's trace blocks as pages of the model: what a pool is asked for.

A page belongs to the block that holds its last token, so a run of blocks from the start of a prompt holds
floor(their tokens / page) pages, whatever the two sizes are:

    blocks of 512, pages of 128    a key is a block, of 4 pages; the last one of a prompt may have 0 to 3
    blocks of 16, pages of 128     a key is a page; its name is chained from the ids of all 8 blocks and the page before
    blocks of 512, pages of 384    a key is a page, too; the ids of the blocks that it ends in and those since the last

Two requests share a page if they share the blocks that hold its tokens; what they share within a block, a trace does
not tell. Pages that no id covers are private: they take room and are never found again.
"""

from __future__ import annotations

from typing import cast

from rorqual.errors import InputError
from rorqual.planner.traces.request import Request

Key = int | tuple[int, ...]
"""An int: a block or page of `BlockMap.full` pages. A tuple: (name, its pages, or with a third 0 if private)."""


class BlockMap:
    """Keys of a prompt, and the pages of each.

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

    def keys(self, request: Request) -> list[Key]:
        """Keys of the prompt in order; their pages sum to floor(prompt / page).

        >>> mooncake = BlockMap(512, 128)
        >>> mooncake.keys(Request(0, 1300, 1, [7, 8, 31])), mooncake.keys(Request(0, 1100, 1, [7, 8, 32]))
        ([7, 8, (31, 2)], [7, 8])
        >>> mooncake.keys(Request(0, 1300, 1, [7, 8]))
        [7, 8, (1, 2, 0)]
        """
        ids, tokens = request.ids, request.input_tokens
        if not self.by_block:
            return self._pages(ids, tokens)
        full = tokens // self.block_tokens
        rest = (tokens - full * self.block_tokens) // self.page_tokens
        keys = cast("list[Key]", ids[:full])
        if rest:
            keys.append((ids[full], rest) if len(ids) > full else self._name_private(rest))
        return keys

    def pages_of(self, key: Key) -> int:
        """Pages [1] of one key.

        >>> BlockMap(512, 128).pages_of(7), BlockMap(512, 128).pages_of((31, 2))
        (4, 2)
        """
        return key[1] if type(key) is tuple else self.full

    def pages(self, keys: list[Key]) -> int:
        """Pages [1] of a run of one prompt's keys: only its last can be an odd one.

        >>> BlockMap(512, 128).pages([7, 8, (31, 2)])
        10
        """
        if not keys:
            return 0
        last = keys[-1]
        return self.full * (len(keys) - 1) + (last[1] if type(last) is tuple else self.full)

    def _pages(self, ids: list[int], tokens: int) -> list[Key]:
        """Page after page, its name made of the name before it and of the ids since."""
        block, page = self.block_tokens, self.page_tokens
        covered = min(len(ids) * block, tokens) // page
        keys: list[Key] = []
        name, used = 0, 0
        for number in range(1, covered + 1):
            end = -(-number * page // block)
            name = hash((name, *ids[used:end]))
            keys.append(name)
            used = end
        alone = tokens // page - covered
        if alone:
            keys.append(self._name_private(alone))
        return keys

    def _name_private(self, pages: int) -> Key:
        self._private += 1
        return (self._private, pages, 0)
