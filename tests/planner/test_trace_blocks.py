"""Blocks to pages: the keys of a prompt, which pages they stand for and which of them two prompts share."""

from __future__ import annotations

import pytest

from rorqual.errors import InputError
from rorqual.planner.traces.blocks import BlockMap
from rorqual.planner.traces.request import Request


def prompt(tokens: int, *ids: int) -> Request:
    return Request(0, tokens, 1, list(ids))


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 383, 384, 511, 512, 513, 639, 640, 1024, 1300, 1536])
@pytest.mark.parametrize(
    ("block", "page"), [(512, 128), (512, 512), (16, 128), (128, 128), (512, 384), (48, 128), (384, 512)]
)
@pytest.mark.parametrize("partial", [True, False])
def test_keys_hold_the_whole_pages_of_the_prompt(tokens: int, block: int, page: int, partial: bool) -> None:
    blocks = BlockMap(block, page)
    count = -(-tokens // block) if partial else tokens // block
    keys = blocks.keys(prompt(tokens, *range(100, 100 + count)))
    sizes = blocks.sizes(len(keys), tokens // page)
    assert len(sizes) == len(keys) == len(set(keys))
    assert sum(sizes) == tokens // page
    assert all(size == blocks.full for size in sizes[:-1])
    assert all(size > 0 for size in sizes)


def test_the_partial_last_block_is_shared_by_its_id_only() -> None:
    """Mooncake: 1,500 tokens are blocks of 512, 512 and 476; the last has 3 whole pages and an id."""
    blocks = BlockMap(512, 128)
    partial = blocks.keys(prompt(1500, 1, 2, 3))
    assert partial[:2].tolist() == [1, 2]
    assert partial == blocks.keys(prompt(1510, 1, 2, 3)) != blocks.keys(prompt(1500, 1, 2, 4))
    # The same id over fewer pages, or over a full block, is another thing.
    fewer, whole = blocks.keys(prompt(1300, 1, 2, 3)), blocks.keys(prompt(1536, 1, 2, 3))
    assert whole.tolist() == [1, 2, 3]
    assert len({partial[2], fewer[2], whole[2]}) == 3


def test_ids_of_more_than_64_bits() -> None:
    """Hashes without a sign keep their 64 bits; a prompt's other ids do not change with one that is too large."""
    blocks = BlockMap(512, 128)
    large = [2**63, 2**64 - 1, 2**63 - 1, 7]
    keys = blocks.keys(prompt(2048, *large))
    assert len(set(keys)) == 4
    assert keys[2:] == blocks.keys(prompt(1024, *large[2:]))
    assert keys == blocks.keys(prompt(2048, *(name + 2**64 for name in large)))


def test_pages_of_small_blocks_need_all_their_ids() -> None:
    """Bailian: 8 blocks of 16 make a page, and a page stands for all before it."""
    blocks = BlockMap(16, 128)
    first = blocks.keys(prompt(300, *range(19)))
    assert len(first) == 2
    assert blocks.keys(prompt(299, *range(18), 99)) == first
    for changed in (0, 7):
        ids = list(range(19))
        ids[changed] = 77
        assert not set(blocks.keys(prompt(300, *ids))) & set(first)
    ids = list(range(19))
    ids[8] = 77
    assert blocks.keys(prompt(300, *ids))[0] == first[0]
    assert blocks.keys(prompt(300, *ids))[1] != first[1]


def test_pages_that_straddle_blocks() -> None:
    """Blocks of 512, pages of 384: page 2 is tokens 384..767, so it takes blocks 0 and 1 both."""
    blocks = BlockMap(512, 384)
    one, other = blocks.keys(prompt(1024, 1, 2)), blocks.keys(prompt(1024, 1, 3))
    assert len(one) == len(other) == 2
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_without_ids_every_page_is_private() -> None:
    blocks = BlockMap(0, 128)
    first, second = blocks.keys(prompt(1000)), blocks.keys(prompt(1000))
    assert len(first) == len(second) == 1
    assert first != second
    # So are the pages of a partial block without an id.
    blocks = BlockMap(512, 128)
    assert blocks.keys(prompt(1000, 5))[0] == blocks.keys(prompt(1000, 5))[0] == 5
    assert blocks.keys(prompt(1000, 5))[1] != blocks.keys(prompt(1000, 5))[1]


def test_illegal_blocks() -> None:
    for block, page in ((-1, 128), (512, 0)):
        with pytest.raises(InputError, match="do not go together"):
            BlockMap(block, page)
