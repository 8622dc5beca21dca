"""Rows of what prompts need beside imports, weights and cache, several fresh processes a row, and their growth.

How a C library places the same blocks differs from process to process, so a single one of each length compares two
throws of dice: growth is of medians, and a row's other fields are those of the worst process.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from rorqual.bench.report import Bar, JsonRow

MEDIAN = "workspace_median_bytes"


def workspace_row(name: str, shape: str, repeats: int, process: Callable[[], JsonRow]) -> JsonRow:
    """`process` gives what `rorqual.bench.workspace` prints; called `repeats` times."""
    runs = [process() for _ in range(repeats)]
    found = [workspace_bytes(run) for run in runs]
    return {
        "name": name,
        "shape": shape,
        "numerics": "fp32",
        **runs[found.index(max(found))],
        "workspaces_of_runs_bytes": found,
        MEDIAN: int(median(found)),
    }


def judge_growth(short: JsonRow, long: JsonRow, bar: Bar | None) -> None:
    """Put the median of `long` over that of `short` into `long`, and what the bar says of it."""
    growth = workspace_bytes(long, MEDIAN) / max(1, workspace_bytes(short, MEDIAN))
    long["workspace_growth"] = growth
    if bar is not None:
        long["bar"] = bar.as_json(growth)


def workspace_bytes(row: JsonRow, field: str = "workspace_bytes") -> int:
    found = row[field]
    assert isinstance(found, int)
    return found
