"""What verbs print: tables for people, one JSON document for programs, a progress line on stderr.

Rich is imported when a table is printed, not when a verb starts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence

Cell = str | int | float | bool | None
Facts = dict[str, Cell]
# A pipe has no width of its own; rich would assume 80 columns and fold the cells.
PIPE_WIDTH = 200


def print_json(document: Mapping[str, object] | Sequence[object]) -> None:
    """Print one JSON document, keys in the order given. NaN and infinity have no JSON and are refused (ValueError)."""
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], title: str = "") -> None:
    """Print rows under their columns; a column that holds only numbers and blanks is set to the right."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # As Text: in a plain string rich would take "[B]" for markup and drop it.
    heading = Text(title) if title else None
    table = Table(title=heading, title_justify="left", box=SIMPLE, pad_edge=False, show_edge=False)
    for index, name in enumerate(columns):
        numeric = all(isinstance(row[index], int | float | None) for row in rows)
        table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell_text(value)) for value in row))
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    console.print(table)


def print_facts(title: str, facts: Facts) -> None:
    """Print named numbers under a title, large ones rounded beside the exact value; `bytes` in a name is a unit."""
    rows = [(name.replace("_", " "), value, _rounded(name, value)) for name, value in facts.items()]
    print_table((title, "", ""), rows)
    print()


def _rounded(name: str, value: Cell) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return ""
    if "bytes" in name:
        return bytes_text(value) if value >= 10_000 else ""
    return count_text(value) if value >= 1_000_000 else ""


def cell_text(value: Cell) -> str:
    """A cell as text: `-` for None, yes or no, thousands grouped, floats to four significant digits or two decimals."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.2f}"
    return value


def bytes_text(count: int) -> str:
    """Bytes in a decimal unit: 890 -> `890 B`, 510286023000 -> `510.3 GB`."""
    return _scaled(count, ("B", "KB", "MB", "GB", "TB", "PB"))


def count_text(count: int) -> str:
    """A count in short: 15472910336 -> `15.5 billion`."""
    return _scaled(count, ("", "thousand", "million", "billion", "trillion"))


def _scaled(count: int, units: Sequence[str]) -> str:
    power = 0
    while abs(count) >= 1000 ** (power + 1) and power + 1 < len(units):
        power += 1
    return f"{count / 1000**power:.1f} {units[power]}" if power else f"{count} {units[0]}".rstrip()


class ProgressLine:
    """Progress on stderr: one line rewritten in place on a terminal, a line every few seconds elsewhere.

    Called with (done, total). `text` puts a count into words: `bytes_text` for bytes.

        with ProgressLine("writing", bytes_text) as progress:
            progress(done, total)
    """

    def __init__(self, what: str, text: Callable[[int], str] = str, interval_s: float = 5.0) -> None:
        self.total = 0
        self._what = what
        self._text = text
        self._interval_s = interval_s
        self._shown_s = time.monotonic()
        self._live = sys.stderr.isatty()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live and self.total:
            print(file=sys.stderr)

    def __call__(self, done: int, total: int) -> None:
        self.total = total
        line = f"{self._what}: {self._text(done)} of {self._text(total)}"
        if self._live:
            # Erase to the end of the line: the text before may have been longer.
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._shown_s >= self._interval_s:
            print(line, file=sys.stderr, flush=True)
            self._shown_s = time.monotonic()
