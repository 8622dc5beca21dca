"""How the planner's tables reach standard output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rorqual.cli.output import print_json, print_table
from rorqual.errors import InputError
from rorqual.planner.table import Table, csv_text


def check_output(as_json: bool, as_csv: bool) -> None:
    """Refuse `--json` with `--csv`, before anything is computed. Raises InputError."""
    if as_json and as_csv:
        raise InputError("--json and --csv exclude each other; give one of them")


def emit(tables: Sequence[Table], *, as_json: bool, as_csv: bool, document: Mapping[str, object] | None = None) -> None:
    """Print tables for people, or as one JSON document or CSV.

    document: what `--json` prints; by default each table's records under its name.

    Raises:
        InputError: both `--json` and `--csv`.
    """
    check_output(as_json, as_csv)
    if as_json:
        print_json(document if document is not None else {table.name: table.records() for table in tables})
    elif as_csv:
        print(csv_text(tables), end="")
    else:
        for number, table in enumerate(tables):
            if number:
                print()
            print_table(table.columns, table.rows, title=table.title)
            if table.note:
                print(f"\n{table.note}")
