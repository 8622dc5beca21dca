"""What is allocated is what the layout says, in bytes."""

import pytest
import torch

from rorqual.cache.kv_cache import KVCache
from rorqual.cache.rings import RingSpan
from rorqual.config import presets
from rorqual.errors import CapacityError
from rorqual.formats.codec import Packed
from rorqual.layout import KVLayout


@pytest.mark.parametrize("preset", ["tiny", "mid"])
@pytest.mark.parametrize(("pages", "slots"), [(1, 1), (5, 3)])
def test_allocated_bytes_are_the_layouts(preset: str, pages: int, slots: int) -> None:
    config = presets.load(preset)
    layout = KVLayout(config, page_tokens=128)
    cache = KVCache(config, layout, pages=pages, slots=slots)
    assert cache.pages.pool.numel() == pages * layout.page_bytes
    assert cache.slots.rings.data.numel() == slots * layout.window_bytes_allocated
    assert cache.slots.draft_rings.data.numel() == slots * layout.draft_window_bytes
    assert sum(t.numel() * t.element_size() for t in cache.slots.tails) == slots * layout.tail_bytes
    assert cache.nbytes == pages * layout.page_bytes + slots * layout.sequence_bytes_allocated
    assert cache.nbytes == sum(t.untyped_storage().nbytes() for t in tensors(cache))


def tensors(cache: KVCache) -> list[torch.Tensor]:
    slots = cache.slots
    return [cache.pages.pool, slots.rings.data, slots.draft_rings.data, slots.history, *slots.tails]


def test_the_releases_cache_is_890_bytes_a_token() -> None:
    """Allocated for real: two pages and one slot of the release's own config."""
    config = presets.load("v4.1-flash")
    layout = KVLayout(config)
    cache = KVCache(config, layout, pages=2, slots=1)
    assert cache.pages.pool.shape == (2, 113_920)
    assert cache.pages.nbytes / (2 * layout.page_tokens) == 890
    assert cache.slots.rings.data.shape == (40, 1, 133, 528)
    assert cache.slots.rings.nbytes == 2_808_960
    assert cache.slots.draft_rings.nbytes == 202_752
    assert sum(t.numel() * 4 for t in cache.slots.tails) == 73_728


def test_every_byte_of_a_page_belongs_to_one_entry() -> None:
    config = presets.load("v4.1-flash")
    cache = KVCache(config, KVLayout(config), pages=1, slots=1)
    owners = torch.zeros(cache.pages.pool.shape[1], dtype=torch.int64)
    for region in (*cache.pages.main.values(), *cache.pages.index.values()):
        owners[region.codes_offset : region.codes_offset + region.entries * region.code_bytes] += 1
        owners[region.scales_offset : region.scales_offset + region.entries * region.scale_bytes] += 1
    assert torch.equal(owners, torch.ones_like(owners))


def test_groups_are_written_through_the_block_table() -> None:
    config = presets.load("tiny")
    layout = KVLayout(config, page_tokens=32)
    cache = KVCache(config, layout, pages=4, slots=1)
    source = layout.sources[0]
    region = cache.pages.main[source.layer_id]
    count = source.entries + 3
    codes = torch.arange(count * region.code_bytes).remainder(251).to(torch.uint8).view(count, -1)
    scales = torch.full((count, region.scale_bytes), 56, dtype=torch.uint8)
    cache.pages.write(region, torch.tensor([3, 1]), 2, Packed(codes, scales))
    stored, _ = region.views()
    assert torch.equal(stored[3, 2:], codes[: source.entries - 2])
    assert torch.equal(stored[1, : count - source.entries + 2], codes[source.entries - 2 :])
    assert not stored[0].any() and not stored[2].any()


def test_a_span_knows_what_a_ring_still_holds() -> None:
    span = RingSpan()
    span.reset(100)
    assert span.held_from(20) == 100
    span.advance(100, 150)
    assert span.held_from(20) == 130
    span.rewind(145)
    assert (span.hi, span.held_from(20)) == (145, 130)
    span.advance(145, 148)
    assert span.held_from(20) == 130
    with pytest.raises(AssertionError, match="rewind to 90"):
        span.rewind(90)


@pytest.mark.parametrize(("pages", "slots"), [(0, 1), (1, 0)])
def test_an_empty_cache_is_refused(pages: int, slots: int) -> None:
    config = presets.load("tiny")
    with pytest.raises(CapacityError, match="at least 1 page and 1 slot"):
        KVCache(config, KVLayout(config), pages=pages, slots=slots)
