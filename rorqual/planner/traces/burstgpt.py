"""BurstGPT's CSV traces: sizes and times in seconds, no hashes.

    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    5,ChatGPT,300,20,320,Conversation log

A failed request has 0 response tokens. Source: the trace files published with "BurstGPT: A Real-world Workload Dataset
to Optimize LLM Serving Systems" (arXiv 2401.17644).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rorqual.planner.traces.csv_rows import rows
from rorqual.planner.traces.request import Request, seconds_us, token_text

FIELDS = ("Timestamp", "Request tokens", "Response tokens")


def read(numbered: Iterable[tuple[int, str]]) -> Iterator[Request]:
    """Requests in the order of the file; the other columns are not needed. Source: the trace file.

    Raises:
        InputError: naming the line and the column.

    >>> [request] = read([(1, "Timestamp,Model,Request tokens,Response tokens"), (2, "5,ChatGPT,300,20")])
    >>> request.time_us, request.input_tokens, request.output_tokens, request.ids
    (5000000, 300, 20, [])
    """
    for number, (time, tokens, output) in rows(numbered, FIELDS):
        yield Request(
            seconds_us(number, "Timestamp", time),
            token_text(number, "Request tokens", tokens),
            token_text(number, "Response tokens", output),
        )
