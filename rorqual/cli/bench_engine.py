"""What only `rorqual bench engine` has: its options, and the tables of its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rorqual.cli.output import Cell, print_table
from rorqual.errors import InputError

PARTS = ("load", "single", "prefix", "restore", "trace", "memory")
"""As `rorqual.bench.engine` has them, which is too heavy to import for a refusal."""
LOAD_COLUMNS = ("requests", "drafts", "tokens/s", "speedup", "first token", "p95", "a token", "p95", "accepted", "bar")
STEP_COLUMNS = ("a step of", "drafts", "ms", "plan", "choose and settle", "model", "draft", "bookkeeping", "bar")
TRACE_COLUMNS = ("trace", "prefix", "tokens/s", "first token", "p95", "a token", "p95", "hit tokens", "of prompts")
NAMES = ("load", "bookkeeping", "trace")
"""Rows that have a table here; others are shown as those of every benchmark."""


def check_trace(what: str, parts: Sequence[str], trace: Path | None, time_scale: float | None) -> None:
    """Refuse a trace that could not be replayed."""
    for name, value in (("trace", trace), ("time-scale", time_scale)):
        if value is not None and (what != "engine" or (parts and "trace" not in parts)):
            raise InputError(f"{name}: nothing is replayed here; legal: with engine and its part trace")
    if trace is not None and not trace.is_file():
        raise InputError(f"trace: {trace} is not a file")
    if time_scale is not None and not (math.isfinite(time_scale) and time_scale >= 0):
        raise InputError(f"time-scale: {time_scale} is not legal; legal: 0 (all at once) or a positive number")


def show_engine(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table a kind of row, of those that have one."""
    tables = {
        "load": (LOAD_COLUMNS, _load, "load"),
        "bookkeeping": (STEP_COLUMNS, _step, "where steps go"),
        "trace": (TRACE_COLUMNS, _trace, "trace"),
    }
    for name, (columns, cells, title) in tables.items():
        if found := [row for row in rows if row["name"] == name and "ratio" not in row]:
            print_table(columns, [cells(row) for row in found], title=title)
            print()


def _load(row: Mapping[str, Any]) -> tuple[Cell, ...]:
    accepted = row.get("accepted_share")
    return (
        row["shape"],
        row["drafts"],
        row["tokens_per_s"]["median"],
        row["speedup"],
        *_waits(row),
        "-" if accepted is None else f"{accepted:.0%}",
        _bar(row),
    )


def _step(row: Mapping[str, Any]) -> tuple[Cell, ...]:
    shares = [f"{row[f'{part}_share']:.1%}" for part in ("plan", "other", "model", "draft", "bookkeeping")]
    return row["shape"], row["drafts"], 1e3 * row["step_s"]["median"], *shares, _bar(row)


def _trace(row: Mapping[str, Any]) -> tuple[Cell, ...]:
    share = f"{row['hit_tokens'] / row['prompt_tokens']:.0%}"
    return row["shape"], row["prefix"], row["tokens_per_s"]["median"], *_waits(row), row["hit_tokens"], share


def _waits(row: Mapping[str, Any]) -> tuple[str, ...]:
    waits = (row["first_token_s"], row["per_token_s"])
    return tuple(f"{1e3 * wait[key]:.4g} ms" for wait in waits for key in ("median", "p95"))


def _bar(row: Mapping[str, Any]) -> str:
    bar = row.get("bar")
    if bar is None:
        return "-"
    wanted = f">= {bar['at_least']:g}" if "at_least" in bar else f"<= {bar['at_most']:.0%}"
    return f"{wanted}: {'reached' if bar['reached'] else 'MISSED'}"
