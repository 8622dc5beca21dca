"""The fused indexer against the ops that it stands for: the same queries, the same groups, the same blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rorqual.cache.kv_cache import KVCache
from rorqual.checkpoint.random import write_random
from rorqual.cli.init import distinct_keys
from rorqual.config import LayerRole, WeightFormats, presets
from rorqual.errors import FormatError
from rorqual.layout import KVLayout
from rorqual.model.indexer import Indexer, Query
from rorqual.model.kv import PagedKV
from rorqual.model.load import load
from rorqual.model.numerics import Numerics
from rorqual.model.rope import Rotary
from rorqual.model.rows import Rows, Segment
from rorqual.model.run import Run
from rorqual.model.tap import Tap
from rorqual.model.transformer import Transformer
from rorqual.ops import cpu
from rorqual.ops.dispatch import fast_ops
from rorqual.ops.fast import index_choice

pytestmark = pytest.mark.skipif(
    "avx512f" not in cpu.features(), reason="this CPU has no AVX512: there are no fused regions"
)
NUMERICS = pytest.mark.parametrize("numerics", ["fp32", "native"])
PATHS = pytest.mark.parametrize("path", [path for path in ("vnni", "vector") if not cpu.missing(path)])
PAGE, PAGES, DIM = 16, 24, 32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Transformer]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = presets.load("tiny").without("vision")
    write_random(config, folder, 3, compressed_size=lambda path: distinct_keys(path, config.vocab_size))
    return {n: load(folder, page_tokens=PAGE, kernels="fast", numerics=n) for n in ("fp32", "native")}


def indexers(model: Transformer) -> list[Indexer]:
    found = [layer.attn.indexer for layer in (*model.backbone.encoder, *model.backbone.decoder)]
    return [indexer for indexer in found if indexer is not None]


def rows_of(model: Transformer, first: int, count: int, short: int) -> Rows:
    at = torch.arange(first, first + count)
    return Rows(segments=(), positions_T=at, rotary=Rotary(model.backbone.freqs, at, short), short_rows=short)


def inputs(model: Transformer, indexer: Indexer, count: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(count)
    widths = (model.config.hidden_size, indexer.wq_b.shape[1])
    x, qr = (torch.randn(count, width, generator=made).to(model.numerics.act_dtype) for width in widths)
    return x, qr


def run_of(model: Transformer) -> Run:
    return Run(ops=model.backend.ops(), numerics=model.numerics, kv=None, tap=Tap())  # type: ignore[arg-type]


@NUMERICS
def test_queries_have_the_bits_of_the_ops(models: dict[str, Transformer], numerics: str) -> None:
    model = models[numerics]
    run = run_of(model)
    for count, short in ((1, 1), (7, 7), (32, 32), (80, 5)):
        rows = rows_of(model, 100, count, short)
        for indexer in indexers(model):
            x, qr = inputs(model, indexer, count)
            fused, plain = indexer.queries(x, qr, rows, run), indexer._queries_by_op(x, qr, rows, run)
            assert indexer._packed is not None
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(fused, plain, strict=True))
            for t in range(min(short, 3)):
                own = indexer.queries(x[t : t + 1], qr[t : t + 1], rows_of(model, 100 + t, 1, 1), run)
                assert all(torch.equal(a, b[t : t + 1]) for a, b in zip(own, fused, strict=True))


def test_what_native_cannot_quantise_is_named(models: dict[str, Transformer]) -> None:
    model = models["native"]
    indexer = indexers(model)[0]
    x, qr = inputs(model, indexer, 3)
    qr[2, 1] = math.nan
    with pytest.raises(FormatError, match="every value must be finite"):
        indexer.queries(x, qr, rows_of(model, 0, 3, 3), run_of(model))


def test_weights_of_other_kinds_go_by_op(tmp_path: Path) -> None:
    config = presets.load("tiny").without("vision")
    config = config.replace(weights=WeightFormats(dense="bf16", experts="bf16", engram="bf16"))
    write_random(config, tmp_path / "m", 3, compressed_size=lambda path: distinct_keys(path, config.vocab_size))
    model = load(tmp_path / "m", page_tokens=PAGE, kernels="fast")
    rows, run = rows_of(model, 0, 3, 3), run_of(model)
    for indexer in indexers(model):
        x, qr = inputs(model, indexer, 3)
        fused, plain = indexer.queries(x, qr, rows, run), indexer._queries_by_op(x, qr, rows, run)
        assert indexer._packed is None
        assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))


@dataclass
class Settings:
    """Of an indexer, without weights."""

    ratio: int
    topk: int
    block: int
    keep_blocks: int
    role: LayerRole = field(init=False)
    last_source: int = 3

    def __post_init__(self) -> None:
        self.role = next(role for role in presets.load("tiny").kv_sources if role.ratio == self.ratio)


def scanned(
    settings: Settings, rows: int, heads: int, end: int, numerics: str, path: str, *, ties: bool = False
) -> tuple[Query, Run]:
    """Queries of the last rows before position `end`, against random keys in pages of no order."""
    config = presets.load("tiny")
    cache = KVCache(config, KVLayout(config, page_tokens=PAGE), pages=PAGES, slots=1)
    cache.pages.pool.fill_(0xFF)
    ops = fast_ops(path)  # type: ignore[arg-type]
    native = numerics == "native"
    kv = PagedKV(config, cache, replace(ops, regions=None), native)
    run = Run(ops=ops, numerics=Numerics(name=numerics), kv=kv, tap=Tap())
    made = torch.Generator().manual_seed(end + heads)
    table = torch.randperm(PAGES, generator=made)
    seg = Segment(
        row_start=0, row_end=rows, start=end - rows, end=end, slot=0, block_table=table, write_floor=0, window_floor=0
    )
    groups = end // settings.ratio
    keys = torch.randn(groups, DIM, generator=made)
    if ties:
        keys = keys[torch.arange(groups) % 4]
    source = settings.role.layer_id
    kv.put_groups(source, seg, 0, torch.zeros(groups, config.head_dim), keys, Tap())
    dtype = run.numerics.act_dtype
    q, w = torch.randn(rows, heads, DIM, generator=made).to(dtype), torch.randn(rows, heads, generator=made).to(dtype)
    return Query(settings, seg, q, w, torch.arange(end - rows, end), run), run  # type: ignore[arg-type]


def by_op(query: Query, run: Run) -> Query:
    plain = replace(run, ops=replace(run.ops, regions=None))
    return Query(query.indexer, query.seg, query.q, query.w, query.at, plain)


SETTINGS = [
    Settings(ratio=1, topk=8, block=4, keep_blocks=3),
    Settings(ratio=2, topk=16, block=8, keep_blocks=40),
    Settings(ratio=1, topk=200, block=5, keep_blocks=2),
]


@PATHS
@NUMERICS
@pytest.mark.parametrize("settings", SETTINGS)
def test_scans_choose_what_the_ops_choose(settings: Settings, numerics: str, path: str) -> None:
    """From no visible group on, over the edges of pages, blocks and tiles of keys, ties among the scores."""
    cases = [(1, 16, 1), (1, 16, 2), (3, 16, 3), (1, 16, 49), (1, 5, 97), (7, 33, 200), (32, 16, 333), (2, 8, 384)]
    for rows, heads, end in cases:
        for ties in (False, True):
            query, run = scanned(settings, rows, heads, end, numerics, path, ties=ties)
            plain = by_op(query, run)
            for want in (True, False):
                fused, theirs = query.from_all(want), plain.from_all(want)
                assert query._fused(None, 0) is not None
                assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(fused, theirs, strict=True))
            _, pool = plain.from_all(True)
            pool = torch.where(torch.rand(pool.shape) < 0.2, -1, pool)
            assert torch.equal(query.from_pool(pool), plain.from_pool(pool))
            assert torch.equal(query.from_pool(pool[:, :0]), plain.from_pool(pool[:, :0]))


@PATHS
def test_threads_do_not_show(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(ratio=1, topk=8, block=4, keep_blocks=3)
    query, _ = scanned(settings, 4, 16, 380, "fp32", path)
    found = []
    for products in (1 << 40, 1):
        monkeypatch.setattr(index_choice, "PRODUCTS_A_TASK", products)
        found.append(query.from_all(True))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_many_scores_go_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(ratio=1, topk=8, block=4, keep_blocks=3)
    query, run = scanned(settings, 4, 16, 380, "fp32", cpu.best_path())
    monkeypatch.setattr(index_choice, "SCORES_A_TASK", 4 * 380 // 2)
    assert query._fused(None, 0) is None
    assert torch.equal(query.from_all(False)[0], by_op(query, run).from_all(False)[0])


def test_the_stale_decode_looks_at_another_source() -> None:
    settings = Settings(ratio=2, topk=8, block=4, keep_blocks=3)
    query, run = scanned(settings, 1, 16, 41, "fp32", cpu.best_path())
    assert isinstance(run.kv, PagedKV)
    other = torch.randn(41, DIM, generator=torch.Generator().manual_seed(9))
    run.kv.put_groups(3, query.seg, 0, torch.zeros(41, presets.load("tiny").head_dim), other, Tap())
    stale = replace(run, stale_decode=True)
    found = Query(query.indexer, query.seg, query.q, query.w, query.at, stale)
    assert found.source == 3 and found._fused(None, 0) is not None
    assert torch.equal(found.from_all(False)[0], by_op(found, stale).from_all(False)[0])
    assert not torch.equal(found.from_all(False)[0], query.from_all(False)[0])


@PATHS
def test_refusals_are_those_of_the_ops(path: str) -> None:
    settings = Settings(ratio=1, topk=8, block=4, keep_blocks=3)
    make = partial(scanned, settings, 2, 16, 200, "fp32", path)
    pool = torch.tensor([[0, 40, 49], [3, -1, -1]])

    def refused(query: Query, run: Run, error: type[Exception], match: str | None = None) -> None:
        for one in (query, by_op(query, run)):
            for scan in (partial(one.from_all, False), partial(one.from_pool, pool)):
                with pytest.raises(error, match=match):
                    scan()

    query, run = make()
    query.q[1, 3, 5] = math.inf
    refused(query, run, FormatError, "every value must be finite")
    query, run = make()
    query.w[1, 3] = math.nan
    refused(query, run, FormatError, "is NaN: scores must be numbers or -inf")
    query, run = make()
    short = replace(query.seg, block_table=query.seg.block_table[:12])  # type: ignore[index]
    refused(Query(query.indexer, short, query.q, query.w, query.at, run), run, IndexError)
    query, run = make()
    assert query.seg.block_table is not None
    query.seg.block_table[10] = PAGES
    refused(query, run, IndexError)


def test_pages_that_no_row_sees_are_not_looked_at() -> None:
    settings = Settings(ratio=1, topk=8, block=4, keep_blocks=3)
    query, run = scanned(settings, 2, 16, 200, "fp32", cpu.best_path())
    assert query.seg.block_table is not None
    query.seg.block_table[13:] = -7
    pool = torch.tensor([[49, 50, 60], [3, -1, 70]])
    assert torch.equal(query.from_pool(pool), by_op(query, run).from_pool(pool))
    assert torch.equal(query.from_all(True)[1], by_op(query, run).from_all(True)[1])
