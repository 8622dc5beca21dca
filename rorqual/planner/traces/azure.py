"""Azure's LLM inference traces, CSV: sizes and times of day, no hashes.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:00:00.2500000,4096,12

Arrivals count from the first line. Source: the "Azure LLM inference dataset", 2023 and 2024, of the Azure public
dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from rorqual.planner.traces.csv_rows import rows
from rorqual.planner.traces.request import Request, refuse, token_text

FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(numbered: Iterable[tuple[int, str]]) -> Iterator[Request]:
    """Requests in the order of the file. A time without an offset is taken as UTC.

    Unit: microseconds, tokens. Source: the trace file.

    Raises:
        InputError: naming the line and the column.

    >>> lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:00:00,9,1", "2023-11-16 18:00:01.5,8,1"]
    >>> [(request.time_us, request.input_tokens) for request in read(enumerate(lines, 1))]
    [(0, 9), (1500000, 8)]
    """
    first: datetime | None = None
    for number, (text, tokens, output) in rows(numbered, FIELDS):
        time = _moment(number, text)
        first = time if first is None else first
        if time < first:
            refuse(number, "TIMESTAMP", f"no earlier than the first, {first}", text)
        yield Request(
            (time - first) // timedelta(microseconds=1),
            token_text(number, "ContextTokens", tokens),
            token_text(number, "GeneratedTokens", output),
        )


def _moment(number: int, text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        refuse(number, "TIMESTAMP", "a date and time such as 2023-11-16 18:00:00.25", text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)
