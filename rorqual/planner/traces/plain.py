"""A plain CSV of your own: sizes and times, and a session where there is one; no hashes.

    timestamp_s,input_tokens,output_tokens,session
    0.25,4096,128,alice

timestamp_s: seconds from any zero. session (optional column): any text; a request continues the last of its session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rorqual.planner.traces.csv_rows import rows
from rorqual.planner.traces.request import Request, seconds_us, token_text

FIELDS = ("timestamp_s", "input_tokens", "output_tokens")


def read(numbered: Iterable[tuple[int, str]]) -> Iterator[Request]:
    """Requests in the order of the file. Source: the trace file.

    Raises:
        InputError: naming the line and the column.

    >>> [request] = read([(1, "timestamp_s,input_tokens,output_tokens"), (2, "0.25,4096,128")])
    >>> request.time_us, request.input_tokens, request.output_tokens, request.chat
    (250000, 4096, 128, None)
    """
    for number, (time, tokens, output, session) in rows(numbered, FIELDS, ("session",)):
        yield Request(
            seconds_us(number, "timestamp_s", time),
            token_text(number, "input_tokens", tokens),
            token_text(number, "output_tokens", output),
            chat=session or None,
            parent=session or None,
        )
