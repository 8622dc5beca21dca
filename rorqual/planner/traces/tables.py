"""What `rorqual plan trace` prints: the trace, the pool, the curve."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner.figure import Figure
from rorqual.planner.table import Cell, Table
from rorqual.planner.traces.curve import Curve
from rorqual.planner.traces.replay import ReplayResult, ReplaySettings
from rorqual.planner.traces.request import MICROSECONDS
from rorqual.planner.traffic_tables import bytes_figure, plain_figure, tokens_figure
from rorqual.planner.units import decimal_bytes

SIZES = 12
"""Rows of a curve, each pool twice the one before."""


def trace_figures(result: ReplayResult, layout: KVLayout, settings: ReplaySettings) -> tuple[Figure, ...]:
    """What the trace asked for: arrivals [1/s], tokens, sessions alive [1] and their fixed bytes [B].

    Source: the trace; `KVLayout.sequence_bytes_allocated` for the bytes. Rates are left out if all arrive at once.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.traces.replay import replay
    >>> from rorqual.planner.traces.request import Request
    >>> layout, settings = KVLayout(presets.load("v4.1-flash")), ReplaySettings(pool_bytes=10**9)
    >>> result = replay([Request(0, 1300, 9), Request(500_000, 700, 9)], 0, layout, settings)
    >>> [figure.shown for figure in trace_figures(result, layout, settings) if figure.id == "arrival_rate"]
    ['4']
    """
    return tuple(_trace(result, layout, settings))


def _trace(result: ReplayResult, layout: KVLayout, settings: ReplaySettings) -> Iterator[Figure]:
    seconds = Fraction(result.arrivals.span_us, MICROSECONDS)
    yield plain_figure("requests", result.arrivals.requests, "1", "requests", str(result.arrivals.requests))
    yield plain_figure("span", seconds, "s", "last arrival - first", f"{float(seconds):.10g}")
    yield tokens_figure(
        "input_tokens", result.arrivals.input_tokens, "sum of prompts", str(result.arrivals.input_tokens)
    )
    yield tokens_figure(
        "output_tokens", result.arrivals.output_tokens, "sum of answers", str(result.arrivals.output_tokens)
    )
    if result.arrivals.span_us:
        for name, amount, unit in (
            ("arrival_rate", result.arrivals.requests, "requests/s"),
            ("input_rate", result.arrivals.input_tokens, "tokens/s"),
            ("output_rate", result.arrivals.output_tokens, "tokens/s"),
        ):
            rate = result.per_second(amount)
            assert rate is not None
            yield plain_figure(
                name, rate, unit, f"{unit.removesuffix('/s')} / span", f"{amount} / {float(seconds):.10g}"
            )
    peak = Fraction(result.arrivals.peak_minute, 60)
    yield plain_figure(
        "peak_rate", peak, "requests/s", "those of the busiest minute / 60", f"{result.arrivals.peak_minute} / 60"
    )
    if result.arrivals.late:
        yield plain_figure(
            "late", result.arrivals.late, "1", "stamped before one further up, taken in turn", str(result.arrivals.late)
        )
    what = f"sessions (requests, if no chats are named), {settings.residence_s:g} s after the last request"
    yield plain_figure("sessions_started", result.sessions_started, "1", what, str(result.sessions_started))
    yield plain_figure(
        "sessions_peak", result.sessions_peak, "1", "most of them alive at once", str(result.sessions_peak)
    )
    if result.sessions_mean is not None:
        mean = result.sessions_mean
        yield plain_figure(
            "sessions_mean",
            mean,
            "1",
            "time alive, summed / span",
            f"{float(mean * seconds):.10g} / {float(seconds):.10g}",
        )
    fixed = layout.sequence_bytes_allocated
    yield bytes_figure(
        "sessions_bytes",
        result.sessions_peak * fixed,
        "B",
        "peak x fixed bytes a sequence",
        f"{result.sessions_peak} x {fixed}",
    )


def pool_figures(result: ReplayResult, layout: KVLayout) -> tuple[Figure, ...]:
    """What the pool gave and took: hit rate [1], tokens, pages as bytes [B], rates [B/s].

    Source: SPEC 11 for what a hit is; page bytes from the layout. Rates are left out if all arrive at once.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.traces.replay import replay
    >>> from rorqual.planner.traces.request import Request
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> trace = [Request(0, 1300, 9, [1, 2, 3]), Request(1, 1100, 9, [1, 2, 4])]
    >>> figures = pool_figures(replay(trace, 512, layout, ReplaySettings(pool_bytes=10**9)), layout)
    >>> [figure.expression for figure in figures if figure.id in ("hit_rate", "bytes_read")]
    ['1024 / 2400', '8 x 113920']
    """
    return tuple(_pool(result, layout))


def _pool(result: ReplayResult, layout: KVLayout) -> Iterator[Figure]:
    page, counts = layout.page_bytes, result.counts
    yield bytes_figure(
        "pool", result.pool_pages * page, "B", "whole pages x page bytes", f"{result.pool_pages} x {page}"
    )
    yield bytes_figure(
        "pool_used", result.pool_used * page, "B", "pages at the end x page bytes", f"{result.pool_used} x {page}"
    )
    asked = result.arrivals.input_tokens
    if asked:  # a trace of empty prompts has no rate
        for name, what, share, found in (
            ("hit_rate", "hit", result.hit_rate, result.hit_tokens),
            ("reuse_rate", "reused", result.reuse_rate, result.reused_tokens),
        ):
            yield plain_figure(name, share, "1", f"{what} tokens / input tokens", f"{found} / {asked}")
    yield plain_figure("hits", result.hits, "1", "requests that adopt a hit (more than W tokens)", str(result.hits))
    yield tokens_figure(
        "hit_tokens", result.hit_tokens, "whole pages found x page", f"{result.pages_read} x {layout.page_tokens}"
    )
    window = layout.config.sliding_window
    yield tokens_figure(
        "reused_tokens",
        result.reused_tokens,
        "hit tokens - hits x W",
        f"{result.hit_tokens} - {result.hits} x {window}",
    )
    for name, pages, what in (
        ("read", result.pages_read, "pages of hits"),
        ("written", counts.written, "pages missed"),
        ("evicted", counts.evicted, "pages gone for room"),
        ("expired", counts.expired, "pages past their time"),
    ):
        size = pages * page
        yield bytes_figure(f"bytes_{name}", size, "B", f"{what} x page bytes", f"{pages} x {page}")
        rate = result.per_second(size)
        if rate is not None and name in ("read", "written"):
            seconds = result.arrivals.span_us / MICROSECONDS
            yield bytes_figure(f"{name}_rate", rate, "B/s", f"bytes {name} / span", f"{size} / {seconds:.10g}")


def check_target(target: float | None) -> None:
    """Refuse a hit rate [1] that no pool can have; None is no target. Source: the caller.

    >>> check_target(1.5)
    Traceback (most recent call last):
    rorqual.errors.InputError: target hit rate must be in 0..1; got 1.5
    """
    if target is not None and not 0 <= target <= 1:
        raise InputError(f"target hit rate must be in 0..1; got {target}")


def curve_table(curve: Curve, layout: KVLayout, target: float | None = None) -> Table:
    """Hit rates [1] of pools [B], each twice the one before, up to the one that never evicts; and of the target.

    Source: `Curve`. The rows come with the pages that the pool holds.

    Raises:
        InputError: a target outside 0..1.

    >>> from rorqual.config import presets
    >>> curve = Curve(rate=1.0, sampled=3, requests=2, input_tokens=1000, gains={4: 128, 16: 256})
    >>> curve_table(curve, KVLayout(presets.load("v4.1-flash")), 0.2).rows[-1]
    ('target', 16, 1822720, '1.82 MB', 0.384)
    """
    check_target(target)
    sizes = sorted({-(-curve.largest >> halvings) for halvings in range(SIZES)})
    rows: list[tuple[Cell, ...]] = [_row("", pages, curve, layout) for pages in sizes]
    note = (
        f"LRU; sampled {curve.rate:g} of the keys, {curve.sampled:,} uses; no pool finds more than {curve.ceiling:.4g}."
    )
    if target is not None:
        pages_needed = curve.pages_for(target)
        if pages_needed is None:
            note += f" The target of {target:g} is out of reach."
            rows.append(("target", None, None, "out of reach", None))
        else:
            rows.append(_row("target", pages_needed, curve, layout))
    columns = ("", "pool [pages]", "pool [B]", "pool", "hit rate")
    return Table(name="curve", title="Hit rate by pool size", columns=columns, rows=tuple(rows), note=note)


def sample_figures(curve: Curve) -> tuple[Figure, ...]:
    """What a curve was made from: the share [1] of keys sampled, their uses [1], the hit rate [1] that no pool exceeds.

    Source: `Curve`.

    >>> curve = Curve(rate=0.5, sampled=3, requests=2, input_tokens=1000, gains={4: 128, 16: 256})
    >>> [(figure.id, figure.shown) for figure in sample_figures(curve)]
    [('sampling_rate', '0.5'), ('sampled_uses', '3'), ('ceiling', '0.384')]
    """
    ceiling = Fraction(curve.ceiling)
    return (
        plain_figure("sampling_rate", Fraction(curve.rate), "1", "keys sampled / keys", f"{curve.rate:g}"),
        plain_figure("sampled_uses", curve.sampled, "1", "uses of the keys sampled", str(curve.sampled)),
        plain_figure("ceiling", ceiling, "1", "hit rate of a pool that never evicts", f"{curve.ceiling:.6g}"),
    )


def _row(name: str, pages: int, curve: Curve, layout: KVLayout) -> tuple[Cell, ...]:
    size = pages * layout.page_bytes
    return name, pages, size, decimal_bytes(size), round(curve.hit_rate(pages), 6)
