"""The fused compressor against the ops that it stands for: the same bytes in pages and tails."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from rorqual.cache.kv_cache import KVCache
from rorqual.checkpoint.random import write_random
from rorqual.cli.init import distinct_keys
from rorqual.config import CacheFormats, WeightFormats, presets
from rorqual.errors import FormatError
from rorqual.formats.codec import dequantize
from rorqual.model.compressor import Compressor
from rorqual.model.kv import PagedKV
from rorqual.model.load import load
from rorqual.model.rows import Rows, Segment, build_rows
from rorqual.model.run import Run
from rorqual.model.tap import Tap
from rorqual.model.transformer import Transformer
from rorqual.ops import cpu

pytestmark = pytest.mark.skipif(
    "avx512f" not in cpu.features(), reason="this CPU has no AVX512: there are no fused regions"
)
NUMERICS = pytest.mark.parametrize("numerics", ["fp32", "native"])
PAGE, PAGES, SLOTS = 16, 8, 3

CONFIGS: dict[str, dict[str, Any]] = {
    "as released": {},
    "ratio 4": {"compress_ratios": (0, 4, 4, 1, 1, 1, 0, 0, 0)},
    "other formats": {"cache": CacheFormats(main="e4m3_e8m0_32", index_key="e2m1_e4m3_16")},
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Transformer]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = presets.load("tiny").without("vision").replace(**CONFIGS[request.param])
    write_random(config, folder, 3, compressed_size=lambda path: distinct_keys(path, config.vocab_size))
    return {n: load(folder, page_tokens=PAGE, kernels="fast", numerics=n) for n in ("fp32", "native")}


def compressors(model: Transformer) -> list[Compressor]:
    found = [layer.attn.compressor for layer in (*model.backbone.encoder, *model.backbone.decoder)]
    return [compressor for compressor in found if compressor is not None]


def made(model: Transformer) -> tuple[KVCache, Run]:
    """A cache whose every byte is told apart from what is written, and a run on it."""
    cache = KVCache(model.config, model.layout, pages=PAGES * SLOTS, slots=SLOTS)
    cache.pages.pool.fill_(0xA5)
    ops = model.backend.ops()
    kv = PagedKV(model.config, cache, ops, model.numerics.native)
    return cache, Run(ops=ops, numerics=model.numerics, kv=kv, tap=Tap())


def rows_of(model: Transformer, segments: list[tuple[int, int, int, int]]) -> Rows:
    """Rows of (slot, start, rows, write floor), short segments first; pages in no order."""
    order = torch.randperm(PAGES * SLOTS, generator=torch.Generator().manual_seed(1)).view(SLOTS, PAGES)
    placed, row = [], 0
    for slot, start, count, floor in segments:
        span = {"row_start": row, "row_end": row + count, "start": start, "end": start + count}
        placed.append(Segment(**span, slot=slot, block_table=order[slot], write_floor=floor, window_floor=0))
        row += count
    return build_rows(placed, model.backbone.freqs)


def inputs(model: Transformer, count: int, seed: int) -> Tensor:
    noise = torch.randn(count, model.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    return noise.to(model.numerics.act_dtype)


Steps = list[list[tuple[int, int, int, int]]]

DECODE: Steps = [[(0, t, 1, 0)] for t in range(40)]
RAGGED: Steps = [
    [(0, 0, 5, 0), (1, 0, 1, 0), (2, 0, 32, 0)],
    [(1, 1, 7, 0), (0, 5, 1, 0)],
    [(2, 32, 3, 0), (0, 6, 31, 0), (1, 8, 1, 0)],
]
BESIDE_LONG: Steps = [[(1, 0, 3, 0), (0, 0, 60, 0)], [(0, 60, 2, 0), (1, 3, 70, 0)], [(1, 73, 1, 0), (0, 62, 1, 0)]]
FLOORS: Steps = [[(0, 0, 9, 9), (1, 0, 9, 20), (2, 0, 9, 4)], [(0, 9, 11, 14), (1, 9, 11, 20), (2, 9, 11, 0)]]
REPLAYED: Steps = [[(0, 7, 6, 10)], [(0, 13, 1, 0)], [(0, 14, 12, 0)]]
"""Begins inside a group."""


def written(model: Transformer, compressor: Compressor, steps: Steps, fused: bool) -> KVCache:
    cache, run = made(model)
    for slot, start, *_ in steps[0]:
        cache.slots.states[slot].tail.reset(start)
    for i, segments in enumerate(steps):
        rows = rows_of(model, segments)
        x = inputs(model, len(rows), seed=i)
        (compressor if fused else compressor._by_op)(x, rows, run)
        for slot, start, count, _ in segments:
            cache.slots.states[slot].tail.advance(start, start + count)
    return cache


VECTORIZE: Any = numba.vectorize
EXP = VECTORIZE(["float32(float32)"])(lambda x: math.exp(x))


def plain_softmax(x: Tensor, dim: int) -> Tensor:
    """With the exp of the kernels, which differs from torch's in the last bits; sums in order."""
    assert dim == 1
    e = torch.from_numpy(EXP((x - x.amax(1, keepdim=True)).numpy()))
    total = e[:, 0].clone()
    for t in range(1, e.shape[1]):
        total += e[:, t]
    return e / total[:, None]


@NUMERICS
@pytest.mark.parametrize("steps", [DECODE, RAGGED, BESIDE_LONG, FLOORS, REPLAYED])
def test_pages_and_tails_hold_the_bytes_of_the_ops(
    models: dict[str, Transformer], numerics: str, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models[numerics]
    monkeypatch.setattr(torch, "softmax", plain_softmax)
    for compressor in compressors(model):
        fused, plain = (written(model, compressor, steps, way) for way in (True, False))
        assert compressor._packed is not None
        assert torch.equal(fused.pages.pool, plain.pages.pool)
        assert bool((fused.pages.pool != 0xA5).any())
        assert all(torch.equal(a, b) for a, b in zip(fused.slots.tails, plain.slots.tails, strict=True))


def values(cache: KVCache, compressor: Compressor) -> list[Tensor]:
    """Everything that stands in a source's main KV and keys; codes of nobody read as 0."""
    found = []
    for region in (cache.pages.main[compressor.layer], cache.pages.index[compressor.layer]):
        codes, scales = region.views()
        found.append(dequantize(codes.flatten(0, 1), scales.flatten(0, 1), region.fmt).nan_to_num())
    return found


@NUMERICS
def test_what_torch_pools_differs_in_last_bits(models: dict[str, Transformer], numerics: str) -> None:
    """An entry that stands on the edge between two codes may fall to the other; hardly any does."""
    model = models[numerics]
    for compressor in compressors(model):
        fused, plain = (written(model, compressor, RAGGED, way) for way in (True, False))
        for ours, theirs in zip(values(fused, compressor), values(plain, compressor), strict=True):
            assert float((ours == theirs).float().mean()) > 0.999


@NUMERICS
def test_a_sequences_bytes_do_not_depend_on_its_company(models: dict[str, Transformer], numerics: str) -> None:
    model, alone = models[numerics], [(0, 5, 9, 0)]
    for compressor in compressors(model):
        found = []
        for segments in (alone, [(1, 0, 3, 0), *alone, (2, 11, 2, 0)]):
            cache, run = made(model)
            for slot, start, *_ in segments:
                cache.slots.states[slot].tail.reset(start)
            rows = rows_of(model, segments)
            x = inputs(model, 14, seed=3)
            own = x[3:12] if segments is alone else x
            compressor(own, rows, run)
            table = rows_of(model, alone).segments[0].block_table
            found.append((cache.pages.pool[table], [tail[0] for tail in cache.slots.tails]))
        assert torch.equal(found[0][0], found[1][0])
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@NUMERICS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_cannot_be_quantised_leaves_the_cache_alone(
    models: dict[str, Transformer], numerics: str, bad: float
) -> None:
    model = models[numerics]
    for compressor in compressors(model):
        cache, run = made(model)
        rows = rows_of(model, [(0, 0, 8, 0), (1, 0, 8, 0)])
        x = inputs(model, 16, seed=0)
        x[12, 3] = bad
        before = cache.pages.pool.clone(), [tail.clone() for tail in cache.slots.tails]
        with pytest.raises(FormatError, match="every value must be finite"):
            compressor(x, rows, run)
        assert torch.equal(cache.pages.pool, before[0])
        assert all(torch.equal(a, b) for a, b in zip(cache.slots.tails, before[1], strict=True))


def test_a_nan_below_the_write_floor_is_nobodys_business(models: dict[str, Transformer]) -> None:
    model = models["fp32"]
    for compressor in compressors(model):
        for way in (compressor, compressor._by_op):
            _, run = made(model)
            x = inputs(model, 12, seed=0)
            x[1] = math.nan
            way(x, rows_of(model, [(0, 0, 12, 8)]), run)


def test_groups_without_a_page_are_refused(models: dict[str, Transformer]) -> None:
    model = models["fp32"]
    for compressor in compressors(model):
        for way in ("short table", "page outside the pool"):
            cache, run = made(model)
            rows = rows_of(model, [(0, 0, 32, 0)])
            table = rows.segments[0].block_table
            assert table is not None
            if way == "short table":
                object.__setattr__(rows.segments[0], "block_table", table[:1])
            else:
                table[1] = PAGES * SLOTS
            with pytest.raises(IndexError):
                compressor(inputs(model, 32, seed=0), rows, run)
            assert bool((cache.pages.pool == 0xA5).all())


def test_weights_of_other_kinds_go_by_op(tmp_path: Path) -> None:
    """And so do cache formats that kernels do not write."""
    config = (
        presets.load("tiny")
        .without("vision")
        .replace(weights=WeightFormats(dense="bf16", experts="bf16", engram="bf16"), cache=CacheFormats(main="bf16"))
    )
    write_random(config, tmp_path / "m", 3, compressed_size=lambda path: distinct_keys(path, config.vocab_size))
    model = load(tmp_path / "m", page_tokens=PAGE, kernels="fast")
    for compressor in compressors(model):
        fused, plain = (written(model, compressor, RAGGED, way) for way in (True, False))
        assert compressor._packed is None
        assert np.array_equal(fused.pages.pool.numpy(), plain.pages.pool.numpy())
