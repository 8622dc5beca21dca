"""`rorqual plan trace`: a request trace replayed against a pool of pages. No torch in here."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.cli.plan.options import MODEL, AsCsv, AsJson, ModelOption, PageTokens
from rorqual.cli.plan.printing import check_output, emit
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.layout import KVLayout
    from rorqual.planner.table import Table
    from rorqual.planner.traces.curve import CurveSample
    from rorqual.planner.traces.formats import TraceFormat
    from rorqual.planner.traces.prompts import Batch
    from rorqual.planner.traces.replay import ReplaySettings

POOL = "256GB"
OF_A_REPLAY = {
    "model": MODEL,
    "pool": POOL,
    "policy": "lru",
    "ttl": None,
    "residence": 300.0,
    "format_name": None,
    "curve": False,
    "target_hit_rate": None,
    "sample_rate": None,
    "page_tokens": None,
    "as_json": False,
    "as_csv": False,
}
"""Options that writing a synthetic trace has no use for, and what they are when nobody gives them."""
BYTES_A_USE = 8
"""Of a trace file for each block id, roughly: what the default sampling rate is taken from."""


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The trace; with --synthetic, the file to write.")],
    model: ModelOption = MODEL,
    pool: Annotated[str, typer.Option(help="Bytes of the pool: 256GB, 1TiB.")] = POOL,
    policy: Annotated[str, typer.Option(help="lru, lfu or ttl.")] = "lru",
    ttl: Annotated[float | None, typer.Option(help="Seconds that ttl keeps a block after its last use.")] = None,
    residence: Annotated[float, typer.Option(help="Seconds that a session stays after its last request.")] = 300.0,
    format_name: Annotated[
        str | None, typer.Option("--format", help="mooncake, bailian, burstgpt, azure or plain; else told by line 1.")
    ] = None,
    curve: Annotated[bool, typer.Option("--curve", help="Show hit rates of all pool sizes.")] = False,
    target_hit_rate: Annotated[float | None, typer.Option(help="Show the smallest pool with this hit rate.")] = None,
    sample_rate: Annotated[float | None, typer.Option(help="Share of the blocks that the curve samples.")] = None,
    page_tokens: PageTokens = None,
    synthetic: Annotated[
        int | None, typer.Option(metavar="N", help="Write a synthetic trace of N requests instead (Mooncake's format).")
    ] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Replay a trace against a pool: hit rate, tokens reused, bytes moved, evictions, sessions alive.

    A plain CSV names timestamp_s, input_tokens, output_tokens and perhaps session. Without block ids nothing is shared.
    """
    given = locals()
    from rorqual.cli.inspect import read_config
    from rorqual.layout import KVLayout
    from rorqual.planner.traces.formats import detect, named
    from rorqual.planner.traces.replay import ReplaySettings
    from rorqual.planner.traces.tables import check_target
    from rorqual.planner.units import parse_bytes

    if synthetic is not None:
        write_synthetic(file, synthetic, given)
        return
    # All that can be wrong is asked before a trace of millions is read.
    check_output(as_json, as_csv)
    check_target(target_hit_rate)
    config = read_config(model)
    layout = KVLayout(config) if page_tokens is None else KVLayout(config, page_tokens=page_tokens)
    settings = ReplaySettings(pool_bytes=parse_bytes(pool, "--pool"), policy=policy, ttl_s=ttl, residence_s=residence)
    trace_format = detect(str(file)) if format_name is None else named(format_name)
    sample = None
    if curve or target_hit_rate is not None:
        sample = _sample(file, trace_format, layout, policy, sample_rate)
    elif sample_rate is not None:
        raise InputError("--sample-rate is for --curve and --target-hit-rate; give one of them")
    tables = replayed(file, trace_format, layout, settings, sample, target_hit_rate)
    emit(tables, as_json=as_json, as_csv=as_csv)


def write_synthetic(file: Path, requests: int, given: Mapping[str, object]) -> None:
    """Write a synthetic trace. Raises InputError for options of a replay, which this is not."""
    from rorqual.cli.output import ProgressLine, count_text
    from rorqual.planner.traces.synthetic import write

    meant = [name for name, default in OF_A_REPLAY.items() if given[name] != default]
    if meant:
        spelled = ", ".join(f"--{name.removesuffix('_name').removeprefix('as_').replace('_', '-')}" for name in meant)
        raise InputError(f"--synthetic writes a trace and replays none; leave out {spelled}")
    with ProgressLine("writing", count_text) as progress:
        write(str(file), requests, progress=progress)


def replayed(
    file: Path,
    trace_format: TraceFormat,
    layout: KVLayout,
    settings: ReplaySettings,
    sample: CurveSample | None,
    target: float | None,
) -> list[Table]:
    """The tables of one replay, with progress in bytes of the file."""
    from rorqual.cli.output import ProgressLine, bytes_text
    from rorqual.planner.traces.ahead import batches_of
    from rorqual.planner.traces.replay import prompts_of, replay_batches
    from rorqual.planner.traces.tables import curve_table, pool_figures, sample_figures, trace_figures
    from rorqual.planner.traffic_tables import figures_table
    from rorqual.planner.units import decimal_bytes

    with _without_collector(), ProgressLine("reading", bytes_text) as progress:
        prompts = prompts_of(trace_format.block_tokens, layout, settings)
        batches = batches_of(str(file), trace_format, prompts, progress)
        if sample is not None:
            batches = _watched(batches, sample)
        result = replay_batches(batches, prompts, layout, settings)
    pool = f"Pool of {decimal_bytes(settings.pool_bytes)}, {settings.policy}"
    tables = [
        figures_table(trace_figures(result, layout, settings), "trace", f"{file.name} ({trace_format.name})"),
        figures_table(pool_figures(result, layout), "pool", pool),
    ]
    if sample is not None:
        curve = sample.curve(result.arrivals.input_tokens)
        tables.append(curve_table(curve, layout, target))
        tables.append(figures_table(sample_figures(curve), "sample", "What the curve was made from"))
    return tables


def _sample(file: Path, trace_format: TraceFormat, layout: KVLayout, policy: str, rate: float | None) -> CurveSample:
    from rorqual.planner.traces.curve import CurveSample, sampling_rate

    if policy != "lru":
        raise InputError(f"the curve is that of lru; --policy {policy} has none")
    if rate is None and not file.is_file():
        raise InputError(f"{file} is no ordinary file, whose size a rate is taken from; give --sample-rate")
    if rate is None:
        rate = sampling_rate(file.stat().st_size // BYTES_A_USE)
    return CurveSample(trace_format.block_tokens, layout.page_tokens, layout.config.sliding_window, rate)


def _watched(batches: Iterable[Batch], sample: CurveSample) -> Iterator[Batch]:
    for batch in batches:
        for _, keys, pages in batch.prompts():
            sample.add(keys, pages)
        yield batch


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
