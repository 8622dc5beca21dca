"""`rorqual plan trace`: a request trace replayed against a pool of pages. No torch in here."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.layout import KVLayout
    from rorqual.planner.traces.curve import CurveSample
    from rorqual.planner.traces.formats import TraceFormat
    from rorqual.planner.traces.request import Request

BYTES_A_USE = 8
"""Of a trace file for each block id, roughly: what the default sampling rate is taken from."""


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The trace; with --synthetic, the file to write.")],
    model: Annotated[str, typer.Option(help="A preset, a config.json or a folder.")] = "v4.1-flash",
    pool: Annotated[str, typer.Option(help="Bytes of the pool: 256GB, 1TiB.")] = "256GB",
    policy: Annotated[str, typer.Option(help="lru, lfu or ttl.")] = "lru",
    ttl: Annotated[float | None, typer.Option(help="Seconds that ttl keeps a block after its last use.")] = None,
    residence: Annotated[float, typer.Option(help="Seconds that a session stays after its last request.")] = 300.0,
    format_name: Annotated[
        str | None, typer.Option("--format", help="mooncake, bailian, burstgpt, azure or plain; else told by line 1.")
    ] = None,
    curve: Annotated[bool, typer.Option("--curve", help="Show hit rates of all pool sizes.")] = False,
    target_hit_rate: Annotated[float | None, typer.Option(help="Show the smallest pool with this hit rate.")] = None,
    sample_rate: Annotated[float | None, typer.Option(help="Share of the blocks that the curve samples.")] = None,
    page_tokens: Annotated[int | None, typer.Option(help="Tokens a page.")] = None,
    synthetic: Annotated[
        int | None, typer.Option(metavar="N", help="Write a synthetic trace of N requests instead (Mooncake's format).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the tables as CSV.")] = False,
) -> None:
    """Replay a trace against a pool: hit rate, tokens reused, bytes moved, evictions, sessions alive.

    A plain CSV names timestamp_s, input_tokens, output_tokens and perhaps session. Without block ids nothing is shared.
    """
    from rorqual.cli.inspect import read_config
    from rorqual.cli.output import ProgressLine, bytes_text, count_text
    from rorqual.cli.plan.printing import emit
    from rorqual.layout import KVLayout
    from rorqual.planner.traces.ahead import requests_of
    from rorqual.planner.traces.formats import detect, named
    from rorqual.planner.traces.replay import ReplaySettings, replay
    from rorqual.planner.traces.tables import curve_table, pool_figures, trace_figures
    from rorqual.planner.traffic_tables import figures_table
    from rorqual.planner.units import parse_bytes

    if synthetic is not None:
        from rorqual.planner.traces.synthetic import write

        with ProgressLine("writing", count_text) as progress:
            write(str(file), synthetic, progress=progress)
        return
    config = read_config(model)
    layout = KVLayout(config) if page_tokens is None else KVLayout(config, page_tokens=page_tokens)
    settings = ReplaySettings(pool_bytes=parse_bytes(pool, "--pool"), policy=policy, ttl_s=ttl, residence_s=residence)
    trace_format = detect(str(file)) if format_name is None else named(format_name)
    sample = None
    if curve or target_hit_rate is not None:
        sample = _sample(file, trace_format, layout, policy, sample_rate)
    elif sample_rate is not None:
        raise InputError("--sample-rate is for --curve and --target-hit-rate; give one of them")
    with _without_collector(), ProgressLine("reading", bytes_text) as progress:
        requests = requests_of(str(file), trace_format, progress)
        if sample is not None:
            requests = _watched(requests, sample.add)
        result = replay(requests, trace_format.block_tokens, layout, settings)
    tables = [
        figures_table(trace_figures(result, layout, settings), "trace", f"{file.name} ({trace_format.name})"),
        figures_table(pool_figures(result, layout), "pool", f"Pool of {pool}, {policy}"),
    ]
    if sample is not None:
        tables.append(curve_table(sample.curve(), layout, target_hit_rate))
    emit(tables, as_json=as_json, as_csv=as_csv)


def _sample(file: Path, trace_format: TraceFormat, layout: KVLayout, policy: str, rate: float | None) -> CurveSample:
    from rorqual.planner.traces.curve import CurveSample, sampling_rate

    if policy != "lru":
        raise InputError(f"the curve is that of lru; --policy {policy} has none")
    if rate is None:
        rate = sampling_rate(file.stat().st_size // BYTES_A_USE)
    return CurveSample(trace_format.block_tokens, layout.page_tokens, layout.config.sliding_window, rate)


def _watched(requests: Iterable[Request], watch: Callable[[Request], None]) -> Iterator[Request]:
    for request in requests:
        watch(request)
        yield request


@contextmanager
def _without_collector() -> Iterator[None]:
    """A replay makes no cycles, and the collector would go through the whole pool again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
