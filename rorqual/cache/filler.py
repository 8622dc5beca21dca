"""A cache as a long prefill would leave it, without the prefill: packed bytes at random, in place, from a seed.

What a decode step costs at a position depends on how much global KV stands before it, hardly on what it says. So codes
are random bits, and only what must be legal or plausible is looked up: a byte (or a wider element) picks one of the
codes or scales that quantised normal values have. The release's 0.87 GiB at 1,048,576 tokens take about a second.

    E2M1 codes       random bits: every nibble is legal, and a uniform choice has the spread of quantised normal values
    E4M3, BF16, FP32 an element's random bits choose among quantised values
    scales           a random byte chooses among the scales of 256 groups whose sizes spread log-normally
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rorqual.cache.kv_cache import KVCache
from rorqual.errors import CapacityError, InputError
from rorqual.formats.codec import Packed, quantize
from rorqual.formats.spec import NumberFormat
from rorqual.ops.paged import PagedRegion

# P pages of a piece, b code bytes, s scale bytes

PIECE_BYTES = 8 << 20
"""Pages written at once: what the filler needs beside the cache, twice."""
SPREAD = 0.5
"""Standard deviation of the logarithm of a group's size, around values of about 1 as a norm leaves them."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Legal:
    """Tables that random bits index: codes by element (None: any bits are legal), scales by byte (None: no scales)."""

    codes: NDArray[Any] | None
    scales: Bytes | None

    @classmethod
    def of(cls, fmt: NumberFormat, rng: np.random.Generator) -> Legal:
        """The tables of `fmt`, from quantised normal values."""
        groups = 256 if fmt.bits <= 8 else 1 << 16
        values = rng.standard_normal((groups, fmt.width_multiple), dtype=np.float32)
        sizes = np.exp(SPREAD * rng.standard_normal((groups, 1), dtype=np.float32))
        packed = quantize(torch.from_numpy(values * sizes), fmt)
        scales = packed.scales[:, 0].numpy() if fmt.scale is not None else None
        if fmt.value == "e2m1":
            return cls(None, scales)
        element = np.dtype(f"u{fmt.bits // 8}")
        return cls(np.ascontiguousarray(packed.codes.numpy()[:, : element.itemsize]).view(element)[:, 0], scales)

    def settle(self, codes: Bytes, scales: Bytes) -> None:
        """Random bytes [..., b] and [..., s] become legal ones, in place."""
        if self.codes is not None:
            elements = codes.view(self.codes.dtype)
            elements[...] = self.codes[elements & (self.codes.size - 1)]
        if self.scales is not None:
            scales[...] = self.scales[scales]


def fill_pages(cache: KVCache, block_table: Tensor, tokens: int, seed: int = 0) -> None:
    """Global KV of every source for positions [0, tokens), whole pages of it.

    Args:
        block_table: int64 [pages of the sequence], page ids; its first ceil(tokens / page_tokens) pages are written.

    Raises:
        InputError: tokens below 1. CapacityError: more than the block table holds.
    """
    layout, pool = cache.layout, cache.pages.pool
    _check_tokens(cache, block_table, tokens)
    rng = np.random.Generator(np.random.SFC64(seed))
    regions = [(region, Legal.of(region.fmt, rng)) for region in _regions(cache)]
    used = block_table[: layout.pages(tokens)]
    for ids in used.split(max(1, PIECE_BYTES // max(1, layout.page_bytes))):
        piece = _random_bytes(rng, len(ids) * layout.page_bytes).reshape(len(ids), layout.page_bytes)
        for region, legal in regions:
            legal.settle(*_stretches(piece, region))
        pool[ids] = torch.from_numpy(piece)


def fill_slot(cache: KVCache, slot: int, tokens: int, decoder_floor: int, seed: int = 0) -> None:
    """Rings, tails and history of a sequence of `tokens` tokens, and the intervals that they hold.

    Rows outside those intervals are left alone, and so are draft windows: a prefill feeds none either.

    Args:
        decoder_floor: first position that the decoder's layers ran on: 0, or tokens - W after a CED prefill.
    """
    slots, config = cache.slots, cache.config
    rng = np.random.Generator(np.random.SFC64((seed, slot)))
    _fill_rings(cache, slot, tokens, decoder_floor, rng)
    for tail in slots.tails:
        held = torch.arange(max(0, tokens - tail.shape[1]), tokens) % tail.shape[1]
        values = rng.standard_normal((len(held), *tail.shape[2:]), dtype=np.float32)
        tail[slot, held] = torch.from_numpy(values).to(tail.device)
    rows = slots.history.shape[1]
    if rows:
        held = torch.arange(max(0, tokens - rows), tokens)
        ids = rng.integers(config.engram_compressed_vocab_size, size=len(held), dtype=np.int64)
        slots.history[slot, held % rows] = torch.from_numpy(ids).to(slots.history.device)
    state = slots.states[slot]
    state.reset(0, 0)
    for span in (state.encoder, state.tail, state.history):
        span.advance(0, tokens)
    state.decoder.reset(decoder_floor)
    state.decoder.advance(decoder_floor, tokens)


def _fill_rings(cache: KVCache, slot: int, tokens: int, decoder_floor: int, rng: np.random.Generator) -> None:
    rings, legal = cache.slots.rings, Legal.of(cache.slots.rings.fmt, rng)
    for layer in range(rings.data.shape[0]):
        start = max(tokens - rings.rows, decoder_floor if layer >= cache.config.decoder_start else 0, 0)
        raw = _random_bytes(rng, (tokens - start) * rings.data.shape[-1]).reshape(tokens - start, -1)
        codes, scales = (np.ascontiguousarray(part) for part in np.split(raw, [rings.code_bytes], axis=1))
        legal.settle(codes, scales)
        packed = Packed(torch.from_numpy(codes), torch.from_numpy(scales))
        rings.write(layer, slot, start, packed)


def _regions(cache: KVCache) -> Iterator[PagedRegion]:
    for layer_id, main in cache.pages.main.items():
        yield main
        yield cache.pages.index[layer_id]


def _stretches(piece: Bytes, region: PagedRegion) -> tuple[Bytes, Bytes]:
    """A region's codes [P, entries x b] and scales [P, entries x s] inside whole pages, as views."""
    codes, scales = region.codes_offset, region.scales_offset
    return (
        piece[:, codes : codes + region.entries * region.code_bytes],
        piece[:, scales : scales + region.entries * region.scale_bytes],
    )


def _random_bytes(rng: np.random.Generator, count: int) -> Bytes:
    words = rng.integers(2**64 - 1, size=-(-count // 8), dtype=np.uint64, endpoint=True)
    return words.view(np.uint8)[:count]


def _check_tokens(cache: KVCache, block_table: Tensor, tokens: int) -> None:
    if tokens < 1:
        raise InputError(f"tokens: {tokens} is not legal; legal: at least 1")
    capacity = int(block_table.shape[0]) * cache.layout.page_tokens
    if tokens > capacity:
        raise CapacityError(f"cache: {tokens} tokens do not fit the {capacity} allocated for this sequence")
