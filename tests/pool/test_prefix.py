"""A key stands for all that was before: ids, images, model, page size, tenant (field case 16)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.errors import InputError
from rorqual.pool.prefix import ImageSpan, PrefixChain, root_key

PAGE = 4
ROOT = root_key("model", PAGE)


def chain(ids: Sequence[int], images: Sequence[ImageSpan] = (), root: bytes = ROOT) -> PrefixChain:
    made = PrefixChain(root, PAGE, images)
    made.extend(ids)
    return made


def shared(one: PrefixChain, other: PrefixChain) -> int:
    """Leading pages that both have under one key; behind the first difference nothing may be equal."""
    same = [a == b for a, b in zip(one.keys, other.keys, strict=False)]
    count = same.index(False) if False in same else len(same)
    assert not any(same[count:])
    return count


def test_only_full_pages_have_keys() -> None:
    assert [len(chain(range(n)).keys) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert len(chain(range(7))) == 7


def test_two_prompts_that_share_two_and_a_half_pages_share_two() -> None:
    assert shared(chain(range(12)), chain([*range(10), 99, 99])) == 2


def test_model_page_size_and_tenant_keep_prompts_apart() -> None:
    roots = [
        ROOT,
        root_key("other", PAGE),
        root_key("model", 8),
        root_key("model", PAGE, "a"),
        root_key("mode", PAGE, "l"),
    ]
    roots += [root_key("model", PAGE, "b"), root_key("1:m", PAGE), root_key("m", PAGE, "1:")]
    assert len({chain(range(4), root=root).keys[0] for root in roots}) == len(roots)


def test_images_of_one_size_do_not_share() -> None:
    def with_image(digest: bytes, start: int = 2, end: int = 7) -> PrefixChain:
        return chain([5] * 12, [ImageSpan(start=start, end=end, digest=digest)])

    assert shared(with_image(b"cat"), with_image(b"cat")) == 3
    assert shared(with_image(b"cat"), with_image(b"dog")) == 0
    assert shared(with_image(b"cat"), chain([5] * 12)) == 0
    assert shared(with_image(b"cat", 5, 7), with_image(b"dog", 5, 7)) == 1
    assert shared(with_image(b"cat"), with_image(b"cat", 3, 8)) == 0
    # The same pixels of an image in another page are another part of it.
    assert with_image(b"cat", 0, 12).keys[0] != with_image(b"cat", 0, 12).keys[1]


def test_two_images_side_by_side_are_not_two_of_other_sizes() -> None:
    def pair(cut: int) -> PrefixChain:
        return chain([5] * 8, [ImageSpan(start=0, end=cut, digest=b"a"), ImageSpan(start=cut, end=8, digest=b"b")])

    assert shared(pair(3), pair(4)) == 0 and shared(pair(5), pair(6)) == 0


def test_images_in_order_and_apart() -> None:
    spans = [ImageSpan(start=0, end=4, digest=b"a"), ImageSpan(start=3, end=8, digest=b"b")]
    with pytest.raises(InputError, match=r"images: \[3, 8\) begins before"):
        PrefixChain(ROOT, PAGE, spans)


@given(st.lists(st.integers(0, 2**40), max_size=30), st.lists(st.integers(0, 30), max_size=6), st.integers(0, 30))
def test_keys_depend_on_what_is_there_and_not_on_how_it_came(ids: list[int], cuts: list[int], kept: int) -> None:
    whole, pieces = chain(ids), chain([])
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for start, end in itertools.pairwise(bounds):
        pieces.extend(ids[start:end])
    assert pieces.keys == whole.keys
    kept = min(kept, len(ids))
    twin = whole.fork()
    twin.truncate(kept)
    assert twin.keys == chain(ids[:kept]).keys and whole.keys == pieces.keys
    twin.extend(ids[kept:])
    assert twin.keys == whole.keys


def test_an_image_that_is_cut_stays_in_front() -> None:
    span = ImageSpan(start=1, end=7, digest=b"cat")
    cut = chain([5] * 7, [span])
    cut.truncate(3)
    cut.extend([5] * 5)
    assert cut.keys == chain([5] * 8, [ImageSpan(start=1, end=3, digest=b"cat")]).keys
    assert shared(cut, chain([5] * 8)) == 0 and shared(cut, chain([5] * 8, [span])) == 0
