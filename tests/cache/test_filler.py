"""A filled cache: legal bytes of plausible sizes in every format, from a seed, where they belong and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rorqual.cache import filler
from rorqual.cache.filler import fill_pages, fill_slot
from rorqual.cache.kv_cache import KVCache
from rorqual.config import ModelConfig, presets
from rorqual.config.cache_formats import LEGAL_FORMATS
from rorqual.errors import CapacityError, InputError
from rorqual.formats.codec import dequantize
from rorqual.formats.spec import FORMATS
from rorqual.layout import KVLayout

PAGE = 32


def poisoned(config: ModelConfig, pages: int, slots: int = 1) -> KVCache:
    cache = KVCache(config, KVLayout(config, page_tokens=PAGE), pages=pages, slots=slots)
    cache.pages.poison(torch.arange(pages))
    for slot in range(slots):
        cache.slots.poison(slot)
    return cache


def of_formats(main: str, index_key: str, window: str) -> ModelConfig:
    config = presets.load("tiny")
    return config.replace(cache=replace(config.cache, main=main, index_key=index_key, window=window))


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_legal_values_of_plausible_size_in_every_format(name: str) -> None:
    legal = {part: name if name in LEGAL_FORMATS[part] else LEGAL_FORMATS[part][0] for part in LEGAL_FORMATS}
    config = of_formats(**legal)
    cache = poisoned(config, 4)
    fill_pages(cache, torch.tensor([2, 0, 3]), 3 * PAGE)
    fill_slot(cache, 0, 3 * PAGE, 0)
    for region in (*cache.pages.main.values(), *cache.pages.index.values()):
        codes, scales = (part[[2, 0, 3]] for part in region.views())
        values = dequantize(codes.contiguous(), scales.contiguous(), region.fmt)
        assert torch.isfinite(values).all() and 0.2 < float(values.std()) < 4
        assert len(codes.flatten(0, 1).unique(dim=0)) == 3 * region.entries, "two groups are the same"
    packed = cache.slots.rings.read(0, 0, 3 * PAGE - config.sliding_window, 3 * PAGE)
    values = dequantize(*packed, cache.slots.rings.fmt)
    assert torch.isfinite(values).all() and 0.2 < float(values.std()) < 4


def test_other_pages_and_slots_are_left_alone() -> None:
    cache = poisoned(presets.load("tiny"), 4, slots=2)
    fill_pages(cache, torch.tensor([2, 0, 3]), PAGE + 1)
    fill_slot(cache, 1, PAGE + 1, 0)
    assert (cache.pages.pool[[1, 3]] == 0xFF).all() and not (cache.pages.pool[[0, 2]] == 0xFF).all(1).any()
    assert (cache.slots.rings.data[:, 0] == 0xFF).all() and cache.slots.tails[0][0].isnan().all()
    assert cache.slots.states[0].encoder.hi == 0 and cache.slots.states[1].encoder.hi == PAGE + 1


def test_rows_outside_the_intervals_are_left_alone() -> None:
    """Seven tokens, of which the decoder saw the last three."""
    config = presets.load("tiny")
    cache = poisoned(config, 1)
    fill_slot(cache, 0, 7, 4)
    untouched = (cache.slots.rings.data[:, 0] == 0xFF).all(-1)
    assert not untouched[: config.decoder_start, :7].any() and untouched[: config.decoder_start, 7:].all()
    assert not untouched[config.decoder_start :, 4:7].any() and untouched[config.decoder_start :, :4].all()


def test_a_seed_gives_its_bytes_whatever_stood_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config, table = presets.load("tiny"), torch.arange(9)
    monkeypatch.setattr(filler, "PIECE_BYTES", 2 * KVLayout(config, page_tokens=PAGE).page_bytes)
    caches = [poisoned(config, 9) for _ in range(3)]
    fill_pages(caches[1], table, 9 * PAGE, seed=4)
    for cache, seed in zip(caches, (3, 3, 4), strict=True):
        fill_pages(cache, table, 9 * PAGE, seed)
    assert torch.equal(caches[0].pages.pool, caches[1].pages.pool)
    assert not torch.equal(caches[0].pages.pool, caches[2].pages.pool)


def test_what_does_not_fit_is_refused() -> None:
    cache = poisoned(presets.load("tiny"), 2)
    with pytest.raises(CapacityError, match="65 tokens do not fit the 64 allocated"):
        fill_pages(cache, torch.arange(2), 65)
    with pytest.raises(InputError, match="tokens: 0 is not legal; legal: at least 1"):
        fill_pages(cache, torch.arange(2), 0)
