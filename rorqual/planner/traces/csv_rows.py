"""Rows of a CSV file by column name, read as a stream."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence

from rorqual.errors import InputError


def rows(
    numbered: Iterable[tuple[int, str]], needed: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line number, cells of the needed columns and then of the optional ones, "" where there is none).

    Source: the trace file.

    Columns may stand in any order among others.

    Raises:
        InputError: a column missing in the header, a row of another width, malformed quotes; the line is named.

    >>> list(rows([(1, "b,a"), (2, "1,2")], ["a"], ["c"]))
    [(2, ('2', ''))]
    """
    reader = csv.reader((line for _, line in numbered), strict=True)
    try:
        header = [name.strip() for name in next((row for row in reader if row), [])]
        places = [_place(reader.line_num, header, name) for name in needed]
        extra = [header.index(name) if name in header else -1 for name in optional]
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise InputError(f"line {reader.line_num}: {len(row)} cells; the header names {len(header)}")
            cells = [row[at] for at in places]
            yield reader.line_num, (*cells, *(row[at] if at >= 0 else "" for at in extra))
    except csv.Error as error:
        raise InputError(f"line {reader.line_num}: not CSV ({error})") from None


def _place(line: int, header: Sequence[str], name: str) -> int:
    if header.count(name) != 1:
        raise InputError(f"line {line}: the header must name {name} once; got {','.join(header)[:200]!r}")
    return header.index(name)
