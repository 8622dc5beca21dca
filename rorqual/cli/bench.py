"""`rorqual bench`: kernels, a model, memory, a long context, an engine, the planner, a store, transfers, and bars."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rorqual.checkpoint.shipped import shipped_model
from rorqual.cli import bench_engine
from rorqual.cli.output import Cell, Facts, ProgressLine, bytes_text, print_facts, print_json, print_table
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.bench.report import JsonRow

KINDS = ("kernels", "model", "memory", "context", "engine", "plan", "store", "transfer")
WITHOUT_MODEL = {
    "kernels": "kernels are measured without a checkpoint",
    "context": "context takes presets of its own",
    "plan": "the planner is measured without a checkpoint",
    "store": "a store is measured without a checkpoint",
    "transfer": "transfers are measured without a checkpoint",
}
MEDIANS = ("decode_s", "start_s", "write_s", "replay_s", "cpu_s", "first_token_s", "tokens_per_s")
PARTS = {"context": ("decode", "memory", "prefill"), "engine": bench_engine.PARTS}
"""As `rorqual.bench.context` has them, which is too heavy to import for a refusal."""
PROFILED = ("kernels", "model", "engine")
PROFILE_COLUMNS = ("part of a step", "calls", "ms", "share")
BASELINE_SECOND = (["ced_s", "full_s"], ["long_s", "short_s"], ["engine_s", "bare_s"], ["shared_s", "cold_s"])
"""Contestants of a ratio whose second is what the first is measured against."""
TIME_COLUMNS = ("what", "shape", "variant", "baseline", "measured", "ratio", "of roofline", "baseline's")


def command(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="kernels, model, memory, context, engine, plan, store or transfer.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Samples of each contestant.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny shapes: shows that it runs, measures nothing.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder for model, memory and engine; else the shipped model.")
    ] = None,
    random: Annotated[
        str | None, typer.Option(metavar="PRESET", help="A random checkpoint of this preset instead.")
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART",
            help="Of context: decode, memory or prefill; of engine: load, single, prefix, trace or memory; else all.",
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Of kernels, model and engine: also where a decode step goes.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Of engine: the trace to replay; else a synthetic one.")] = None,
    time_scale: Annotated[
        float | None, typer.Option(help="Of engine: seconds of the replay for a second of the trace.")
    ] = None,
) -> None:
    """Measure on this machine: kernels and a model against plain twins, memory, a long context, an engine's speed and
    waits, the planner's times, the rates of a store and of transfers."""
    parts = tuple(part or ())
    check(what, repeats, model, random, parts)
    bench_engine.check_trace(what, parts, trace, time_scale)
    if profile and what not in PROFILED:
        raise InputError(f"profile: {what} has none; legal: with {_listed(PROFILED)}")

    from rorqual.bench.report import check_out, write_document

    if out is not None:
        check_out(out)
    document = measure(what, repeats, quick, model, random, parts, profile, trace, time_scale)
    if out is not None:
        write_document(document, out)
    if as_json:
        print_json(document)
    else:
        show(document)


def check(what: str, repeats: int | None, model: Path | None, random: str | None, parts: Sequence[str] = ()) -> None:
    """Refuse what cannot be measured, before anything heavy is imported."""
    if what not in KINDS:
        raise InputError(f"what: '{what}' cannot be measured; legal: {', '.join(KINDS)}")
    if repeats is not None and repeats < 1:
        raise InputError(f"repeats: {repeats} is not legal; legal: at least 1")
    check_parts(what, parts)
    if what in WITHOUT_MODEL:
        for name, value in (("model", model), ("random", random)):
            if value is not None:
                raise InputError(f"{name}: {WITHOUT_MODEL[what]}; legal: with model, memory and engine")
    elif model is None and random is None:
        shipped_model()
    if model is not None and random is not None:
        raise InputError("random: a model is given too; legal: one of them")


def check_parts(what: str, parts: Sequence[str]) -> None:
    """Only those of `PARTS` have some."""
    if parts and what not in PARTS:
        raise InputError(f"part: {what} has no parts; legal: with {_listed(tuple(PARTS))}")
    for name in parts:
        if name not in PARTS[what]:
            raise InputError(f"part: '{name}' is none of {what}'s; legal: {', '.join(PARTS[what])}")


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return f"{', '.join(names[:-1])} and {names[-1]}"


def spelled(
    what: str,
    repeats: int | None,
    quick: bool,
    model: Path | None,
    random: str | None = None,
    parts: Sequence[str] = (),
    profile: bool = False,
    trace: Path | None = None,
    time_scale: float | None = None,
) -> str:
    """The command line that measures the same, without paths of this machine."""
    words = ["rorqual", "bench", what]
    for name in parts:
        words += ["--part", name]
    words += ["--repeats", str(repeats)] if repeats is not None else []
    words += ["--quick"] if quick else []
    words += ["--model", model.name] if model is not None else []
    words += ["--random", random] if random is not None else []
    words += ["--profile"] if profile else []
    words += ["--trace", trace.name] if trace is not None else []
    words += ["--time-scale", f"{time_scale:g}"] if time_scale is not None else []
    return shlex.join(words)


def measure(
    what: str,
    repeats: int | None,
    quick: bool,
    model: Path | None,
    random: str | None,
    parts: Sequence[str] = (),
    profile: bool = False,
    trace: Path | None = None,
    time_scale: float | None = None,
) -> JsonRow:
    """Run one benchmark; the document of `--json`."""
    from rorqual.bench import context, engine, first_token, kernels, memory, plan, store
    from rorqual.bench import model as models
    from rorqual.bench.profile import NOTE
    from rorqual.bench.report import Report

    told: tuple[str, ...] = (NOTE,) if profile else ()
    told += first_token.NOTES if what == "model" and model is None and random is None else ()
    report = Report(what, spelled(what, repeats, quick, model, random, parts, profile, trace, time_scale), quick)
    with ProgressLine(f"measuring {what}") as progress:
        if what == "kernels":
            found = kernels.run_kernels(
                repeats=repeats or kernels.REPEATS, quick=quick, profile=profile, progress=progress
            )
            return report.document(found, (*kernels.NOTES, *told))
        if what == "plan":
            taken = plan.run_plan(repeats=repeats or plan.REPEATS, quick=quick, progress=progress)
            return report.document(taken, plan.NOTES)
        if what == "store":
            rates = store.run_store(repeats=repeats or store.REPEATS, quick=quick, progress=progress)
            return report.document(rates, store.NOTES)
        if what == "transfer":
            # Imported here: no other benchmark needs Mooncake.
            from rorqual.bench import transfer

            rows = transfer.run_transfer(repeats=repeats or transfer.REPEATS, quick=quick, progress=progress)
            return report.document(rows, transfer.NOTES)
        if what == "context":
            costs = context.run_context(parts=parts or PARTS[what], repeats=repeats, quick=quick, progress=progress)
            return report.document(costs, context.NOTES)
        if what == "engine":
            served = engine.run_engine(
                model=model,
                random=random,
                parts=parts or PARTS[what],
                repeats=repeats,
                quick=quick,
                profile=profile,
                trace=trace,
                time_scale=time_scale,
                progress=progress,
            )
            return report.document(served, (*engine.NOTES, *told))
        if what == "model":
            times = models.run_model(
                model=model,
                random=random,
                repeats=repeats or models.REPEATS,
                quick=quick,
                profile=profile,
                progress=progress,
            )
            return report.document(times, (*models.NOTES, *told))
        peaks = memory.run_memory(
            model=model, random=random, repeats=repeats or memory.REPEATS, quick=quick, progress=progress
        )
        return report.document(peaks, memory.NOTES)


def show(document: Mapping[str, Any]) -> None:
    """The document as tables."""
    rows = document["rows"]
    if times := [row for row in rows if "ratio" in row]:
        print_table(TIME_COLUMNS, [_cells(row) for row in times], title=document["command"])
        print()
        if judged := [row for row in times if _bars(row)]:
            for row in judged:
                print(f"{row['name']} {_variant(row)}, {row['shape']}: {_bars(row)}")
            print()
    bench_engine.show_engine(rows)
    for row in rows:
        if row["name"] in bench_engine.NAMES and "ratio" not in row:
            continue
        if "profile" in row:
            _show_profile(row)
        elif "ratio" not in row:
            _show_sizes(row)
        elif "composition" in row:
            _show_composition(row)
    machine, roofline = document["machine"], document["roofline"]
    print_facts("machine", {key: _text(value) for key, value in machine.items()})
    print_facts("roofline", roofline)
    for note in document["notes"]:
        print(note)


def _show_profile(row: Mapping[str, Any]) -> None:
    """A table of each contestant: the parts of its step, slowest first."""
    for kind, parts in row["profile"].items():
        cells = [
            (part["part"], f"{part['calls']:g}", f"{part['seconds'] * 1e3:.3f}", f"{part['share']:.1%}")
            for part in parts
        ]
        print_table(PROFILE_COLUMNS, cells, title=f"{row['shape']}, {row['numerics']}, {kind}")
        print()


def _show_sizes(row: Mapping[str, Any]) -> None:
    """A row without contestants as facts, and its bar."""
    facts: Facts = {key: value for key, value in row.items() if isinstance(value, int | float | str)}
    facts |= {key: value["median"] for key, value in row.items() if key in MEDIANS and value}
    print_facts(f"{row['name']}: {row['shape']}", facts)
    if row.get("bar"):
        print(f"{_judged(row)}\n")


def _judged(row: Mapping[str, Any]) -> str:
    """What it is judged by: growth where two prompts are compared, a time or a rate if it has one, else bytes."""
    if "workspace_growth" in row:
        return f"growth: {_bar(row, format(row['workspace_growth'], '.3g'))}"
    if "size" in row:
        return f"size over that of the pages: {_bar(row, format(row['size'], '.4g'))}"
    if "tokens_per_s" in row:
        return f"tokens a second: {_bar(row, format(row['tokens_per_s']['median'], '.3g'))}"
    for key in ("start_s", "replay_s", "first_token_s"):
        if key in row and row["name"] != "memory":
            median = f"{row[key]['median']:.3g} s"
            return f"{key.removesuffix('_s').replace('_', ' ')}: {_bar(row, median)}"
    name = "workspace" if "workspace_bytes" in row else "peak"
    return f"{name}: {_bar(row, bytes_text(row['workspace_bytes' if name == 'workspace' else 'peak_rss_bytes']))}"


def _show_composition(row: Mapping[str, Any]) -> None:
    """What a composed step is made of, and where its time goes: `long: index_scores 57 ms, ...`."""
    print(f"{row['name']} {row['path']}: {row['composition']}")
    for name, parts in row["ops"].items():
        print(f"  {name}: " + ", ".join(f"{op} {seconds * 1e3:.3g} ms" for op, seconds in parts.items()))
    print()


def _cells(row: Mapping[str, Any]) -> tuple[Cell, ...]:
    contestants = [key for key in row if key.endswith("_s")]
    if contestants in BASELINE_SECOND:
        contestants.reverse()
    baseline, measured = (_time(key, row[key]) for key in contestants)
    ratio, variant = row["ratio"], _variant(row)
    if ratio is None:
        return row["name"], row["shape"], variant, baseline, row["unavailable"], "-", "-", "-"
    share, plain = (_share(row.get(key)) for key in ("roofline", "baseline_roofline"))
    return row["name"], row["shape"], variant, baseline, measured, f"{ratio:.3g}", share, plain


def _share(found: Mapping[str, Any] | None) -> str:
    return "-" if found is None else f"{found['share']:.0%} ({found['bound']})"


def _bars(row: Mapping[str, Any]) -> str:
    """Every bar of a row of times: `ratio 5.1 >= 5: reached; share 41.0% >= 40%: reached; baseline ...: fair`."""
    said = [f"ratio {_bar(row, format(row['ratio'], '.3g'))}"] if row.get("bar") and row["ratio"] is not None else []
    for key, name in (("roofline", "share"), ("baseline_roofline", "baseline")):
        found = row.get(key) or {}
        if "bar" in found:
            words = ("fair", "NOT FAIR") if name == "baseline" else ("reached", "MISSED")
            least, reached = found["bar"]["at_least"], found["bar"]["reached"]
            said.append(f"{name} {found['share']:.1%} >= {least:.0%}: {words[0 if reached else 1]}")
    return "; ".join(said)


def _variant(row: Mapping[str, Any]) -> str:
    return " ".join(str(row[key]) for key in ("path", "numerics") if key in row)


def _time(name: str, sample: Mapping[str, float] | None) -> str:
    """`plain 46.1 ms (45.0 - 50.2)`; microseconds where that reads better."""
    if sample is None:
        return "-"
    unit, factor = ("ms", 1e3) if sample["median"] >= 1e-3 else ("us", 1e6)
    numbers = [f"{sample[key] * factor:.4g}" for key in ("median", "min", "max")]
    return f"{name.removesuffix('_s')} {numbers[0]} {unit} ({numbers[1]} - {numbers[2]})"


def _bar(row: Mapping[str, Any], value: str) -> str:
    bar = row.get("bar")
    if bar is None:
        return "-"
    sign, limit = (">=", bar["at_least"]) if "at_least" in bar else ("<=", bar["at_most"])
    shown = bytes_text(int(limit)) if limit > 1e6 else f"{limit:g}"
    return f"{value} {sign} {shown}: {'reached' if bar['reached'] else 'MISSED'}"


def _text(value: Any) -> Cell:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    cell: Cell = value
    return cell
