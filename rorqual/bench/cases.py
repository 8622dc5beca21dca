"""The ops that are measured, with inputs at the release's widths, and what each call cannot do without.

Inputs that a model finds in memory (weights, gathered entries, chosen groups) come in several sets which take turns, so
that a small second-level cache does not answer for the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from rorqual.bench.baseline import expanded
from rorqual.bench.inputs import random_region, random_weight, sorted_choice
from rorqual.bench.report import Bar
from rorqual.bench.roofline import Work
from rorqual.formats.codec import quantize
from rorqual.formats.spec import E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32, NumberFormat
from rorqual.formats.weights import Weight
from rorqual.ops.cpu import PATHS, Path
from rorqual.ops.dispatch import Ops

CACHE_FORMATS = (E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32)
"""Main KV, index keys, window KV: the formats with kernels of their own."""

INDEX_BARS = {"vnni": Bar(at_least=8), "vector": Bar(at_least=3.5)}
ATTENTION_BAR = Bar(at_least=1.7)


class AttentionSize(NamedTuple):
    """One attention call."""

    rows: int
    heads: int
    dim: int
    window: int
    selected: int


RELEASE_DECODE = AttentionSize(rows=1, heads=64, dim=512, window=128, selected=512)
MID_TILE = AttentionSize(rows=128, heads=8, dim=128, window=128, selected=128)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Shapes of one run of the kernel benchmark."""

    codec: tuple[int, int] = (512, 512)
    entries: int = 100_000
    gathered: int = 512
    keys: int = 262_144
    index_heads: int = 32
    index_dim: int = 128
    scores: int = 1_000_000
    topk: int = 512
    decode: AttentionSize = RELEASE_DECODE
    tile: AttentionSize = MID_TILE
    weight: tuple[int, int] = (2304, 5120)
    weight_bytes: int = 128 << 20
    experts: int = 8
    experts_per_token: int = 6


FULL = Sizes()
QUICK = Sizes(
    codec=(32, 64),
    entries=512,
    gathered=64,
    keys=640,
    index_heads=16,
    index_dim=32,
    scores=2000,
    topk=32,
    decode=AttentionSize(1, 16, 64, 16, 32),
    tile=AttentionSize(4, 4, 32, 8, 16),
    weight=(64, 128),
    weight_bytes=0,
    experts=4,
    experts_per_token=2,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One op on one shape. `run(ops, i)` calls it on the i-th set of inputs; path None is the best that there is.

    baseline: called so in place of `run` for the baseline, on weights expanded beforehand; its work is `baseline_work`.
    """

    name: str
    shape: str
    run: Callable[[Ops, int], object]
    work: Work
    path: Path | None = None
    bar: Bar | None = None
    baseline: Callable[[Ops, int], object] | None = None
    baseline_work: Work | None = None


def cases(sizes: Sizes, seed: int = 0) -> Iterator[tuple[Case, ...]]:
    """Cases in groups that share their inputs and their baseline; each group's inputs are gone with it."""
    generator = torch.Generator().manual_seed(seed)
    for fmt in CACHE_FORMATS:
        yield from codec_cases(sizes, fmt, generator)
    yield (gather_case(sizes, generator),)
    yield index_cases(sizes, generator)
    yield (topk_case(sizes, generator),)
    yield (attention_case(sizes.decode, sizes.entries, generator, ATTENTION_BAR),)
    yield (attention_case(sizes.tile, sizes.entries, generator, None),)
    for kind in ("fp4", "fp8"):
        yield from linear_cases(sizes, kind, generator)
    yield (experts_case(sizes, generator),)


def codec_cases(sizes: Sizes, fmt: NumberFormat, generator: Generator) -> Iterator[tuple[Case, ...]]:
    """Packing and unpacking of a matrix that fits a second-level cache, as a step's new keys do."""
    rows, width = sizes.codec
    values = torch.randn(rows, width, generator=generator)
    packed = quantize(values, fmt)
    moved = rows * width * 4 + rows * fmt.row_bytes(width)
    shape = f"{rows} x {width} {fmt.name}"
    counted = f"{rows} x {width} x 4 + {rows} x {fmt.row_bytes(width)} packed"
    work = Work(bytes=moved, flops=0, formula=f"bytes = {counted}")
    yield (Case(name="quantize", shape=shape, run=lambda ops, i: ops.quantize(values, fmt), work=work),)
    yield (Case(name="dequantize", shape=shape, run=lambda ops, i: ops.dequantize(*packed, fmt), work=work),)


def gather_case(sizes: Sizes, generator: Generator) -> Case:
    width, fmt, count = sizes.decode.dim, E2M1_E4M3_16, sizes.gathered
    region, table = random_region(fmt, width, sizes.entries, generator)
    chosen = [sorted_choice(1, count, sizes.entries, generator)[0] for _ in range(16)]
    row = fmt.row_bytes(width)
    return Case(
        name="gather_rows",
        shape=f"{count} of {sizes.entries:,} entries of {width} {fmt.name}",
        run=lambda ops, i: ops.gather_rows(region, table, chosen[i % len(chosen)]),
        work=Work(
            bytes=count * (row + 4 * width), flops=0, formula=f"bytes = {count} x ({row} packed + 4 x {width} written)"
        ),
    )


def index_cases(sizes: Sizes, generator: Generator) -> tuple[Case, ...]:
    """One row's index scores, on every path: one baseline serves them all."""
    keys, heads, width, fmt = sizes.keys, sizes.index_heads, sizes.index_dim, E2M1_E8M0_32
    region, table = random_region(fmt, width, keys, generator)
    query = quantize(torch.randn(1, heads, width, generator=generator), fmt)
    weights, visible = torch.randn(1, heads, generator=generator), torch.tensor([keys])

    def run(ops: Ops, i: int) -> Tensor:
        return ops.index_scores(*query, weights, region, table, 0, keys, visible, False)

    row = fmt.row_bytes(width)
    work = Work(
        bytes=keys * (row + 4),
        flops=2 * keys * heads * width,
        formula=f"bytes = {keys} x ({row} packed + 4 written), flops = 2 x {keys} keys x {heads} heads x {width}",
    )
    shape = f"1 row, {keys:,} keys, {heads} heads x {width}"
    return tuple(
        Case(name="index_scores", shape=shape, run=run, work=work, path=path, bar=INDEX_BARS.get(path))
        for path in PATHS
    )


def topk_case(sizes: Sizes, generator: Generator) -> Case:
    scores = [torch.randn(1, sizes.scores, generator=generator) for _ in range(4)]
    return Case(
        name="topk_lowest",
        shape=f"{sizes.topk} of {sizes.scores:,}",
        run=lambda ops, i: ops.topk_lowest(scores[i % len(scores)], sizes.topk),
        work=Work(bytes=4 * sizes.scores, flops=0, formula=f"bytes = 4 x {sizes.scores} scores"),
    )


def attention_case(size: AttentionSize, entries: int, generator: Generator, bar: Bar | None) -> Case:
    """Gather and attention together: `rows` queries at the end of a sequence of `entries` groups."""
    rows, heads, dim, window, selected = size
    fmt, held = E2M1_E4M3_16, window + rows - 1
    region, table = random_region(fmt, dim, entries, generator)
    q = torch.randn(rows, heads, dim, generator=generator)
    near = torch.randn(held, dim, generator=generator)
    sink = torch.randn(heads, generator=generator)
    positions = torch.arange(entries - rows, entries)
    chosen = [sorted_choice(rows, selected, entries, generator) for _ in range(8 if rows == 1 else 2)]
    base = entries - held

    def run(ops: Ops, i: int) -> Tensor:
        topk = chosen[i % len(chosen)]
        return ops.sparse_attention(q, positions, near, base, base, window, region, table, topk, sink, dim**-0.5, False)

    slots = window + selected
    moved = rows * selected * fmt.row_bytes(dim) + 4 * held * dim + 8 * rows * heads * dim
    counted = f"{rows} x {selected} x {fmt.row_bytes(dim)} packed + 4 x {held} x {dim} + 8 x {rows} x {heads} x {dim}"
    return Case(
        name="sparse_attention",
        shape=f"{_rows(rows)}, {heads} heads x {dim}, window {window} + {selected} selected",
        run=run,
        work=Work(
            bytes=moved,
            flops=4 * rows * heads * slots * dim,
            formula=f"bytes = {counted}, flops = 4 x {rows} x {heads} x {slots} x {dim}",
        ),
        bar=bar,
    )


def linear_cases(sizes: Sizes, kind: str, generator: Generator) -> Iterator[tuple[Case, ...]]:
    """Decode (1 row) and verification (8 rows): all of them short rows."""
    n, k = sizes.weight
    first = random_weight(kind, sizes.weight, generator)
    more = max(1, sizes.weight_bytes // first.nbytes)
    weights = [first, *(random_weight(kind, sizes.weight, generator) for _ in range(more))]
    dense = [expanded(weight) for weight in weights]
    for rows in (1, 8):
        x = torch.randn(rows, k, generator=generator)

        def run(x: Tensor, rows: int, held: list[Weight], ops: Ops, i: int) -> Tensor:
            return ops.linear(x, held[i % len(held)], rows, False)

        work = Work(
            bytes=first.nbytes,
            flops=2 * rows * n * k,
            formula=f"bytes = {first.nbytes} of weight and scales, flops = 2 x {rows} x {n} x {k}",
        )
        yield (
            Case(
                name="linear",
                shape=f"{_rows(rows)}, {kind} {n} x {k}",
                run=partial(run, x, rows, weights),
                work=work,
                baseline=partial(run, x, rows, dense),
                baseline_work=expanded_work(n * k, 2 * rows * n * k),
            ),
        )


def experts_case(sizes: Sizes, generator: Generator) -> Case:
    width, hidden = sizes.weight
    shapes = ((width, hidden), (hidden, width), (width, hidden))
    weights = [[random_weight("fp4", shape, generator) for _ in range(sizes.experts)] for shape in shapes]
    dense = [[expanded(weight) for weight in held] for held in weights]
    x = torch.randn(1, hidden, generator=generator) / 64
    chosen = [torch.randperm(sizes.experts, generator=generator)[None, : sizes.experts_per_token] for _ in range(8)]
    routing = torch.rand(1, sizes.experts_per_token, generator=generator)
    each = sum(held[0].nbytes for held in weights)
    count = sizes.experts_per_token

    def run(held: list[list[Weight]], ops: Ops, i: int) -> Tensor:
        return ops.experts(x, chosen[i % len(chosen)], routing, *held, 10.0, 1, False)

    return Case(
        name="experts",
        shape=f"1 row, {count} of {sizes.experts} experts fp4 {width} x {hidden}",
        run=partial(run, weights),
        work=Work(
            bytes=count * each,
            flops=6 * count * width * hidden,
            formula=f"bytes = {count} experts x {each}, flops = 6 x {count} x {width} x {hidden}",
        ),
        baseline=partial(run, dense),
        baseline_work=expanded_work(3 * count * width * hidden, 6 * count * width * hidden),
    )


def expanded_work(parameters: int, flops: int) -> Work:
    """What the baseline cannot do without: the same weights in fp32, and the same products."""
    return Work(bytes=4 * parameters, flops=flops, formula=f"bytes = 4 x {parameters} weights in fp32, flops = {flops}")


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"
