"""What every verb of the planner returns: tables, printed, written as JSON or CSV, or drawn, from the same rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

Cell = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """name: its key in JSON. columns: each says its unit, as in "global KV [B]". note: printed below."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.name

    def records(self) -> list[dict[str, Cell]]:
        """One mapping a row, for JSON."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def csv_text(tables: Sequence[Table]) -> str:
    """The tables as CSV (RFC 4180, but with bare line feeds): a header line each, an empty line between two.

    Units stay in the headers; source: the tables.

    >>> csv_text([Table(name="a", title="", columns=("x [B]", "y"), rows=((1, None),))])
    'x [B],y\\n1,\\n'
    """
    parts = []
    for table in tables:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows(["" if cell is None else cell for cell in row] for row in table.rows)
        parts.append(text.getvalue())
    return "\n".join(parts)
