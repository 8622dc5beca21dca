"""Mooncake's JSONL traces: block ids of 512 tokens, times in milliseconds.

    {"timestamp": 1200, "input_length": 1500, "output_length": 80, "hash_ids": [7, 8, 31]}

One id for each 512 tokens of the prompt, the partial last block included: 3 ids for 1,500 tokens. An id names its
block and everything before it. Source: the trace files published with "Mooncake: A KVCache-centric Disaggregated
Architecture for LLM Serving" (arXiv 2407.00079).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rorqual.planner.traces.jsonl import field, records
from rorqual.planner.traces.request import MAX_SECONDS, Request, block_ids, refuse, token_count

BLOCK_TOKENS = 512
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(numbered: Iterable[tuple[int, str]]) -> Iterator[Request]:
    """Requests in the order of the file. Unit: microseconds, tokens. Source: the trace file.

    Raises:
        InputError: naming the line and the field.

    >>> line = '{"timestamp": 1200, "input_length": 1500, "output_length": 80, "hash_ids": [7, 8, 31]}'
    >>> list(read([(1, line)]))
    [Request(time_us=1200000, input_tokens=1500, output_tokens=80, ids=[7, 8, 31], chat=None, parent=None)]
    """
    for number, record in records(numbered):
        time = field(number, record, "timestamp")
        if not (type(time) is int or type(time) is float) or not 0 <= time < 1000 * MAX_SECONDS:
            refuse(number, "timestamp", "a time in milliseconds, 0 or more", time)
        tokens = token_count(number, "input_length", field(number, record, "input_length"))
        output = token_count(number, "output_length", field(number, record, "output_length"))
        ids = block_ids(number, field(number, record, "hash_ids"), tokens, BLOCK_TOKENS)
        yield Request(round(1000 * time), tokens, output, ids)
