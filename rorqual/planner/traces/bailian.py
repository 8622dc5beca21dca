"""Qwen-Bailian JSONL traces: block ids of 16 tokens, times in seconds, turns of a chat chained by id.

    {"chat_id": 12, "parent_chat_id": 3, "timestamp": 4.25, "input_length": 40, "output_length": 9,
     "type": "text", "turn": 2, "hash_ids": [70, 71, 90]}

`parent_chat_id` is -1 in a first turn. Source: the anonymised usage traces published with "KVCache Cache in the Wild:
Characterizing and Optimizing KVCache Cache at a Large Cloud Provider" (arXiv 2506.02634).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rorqual.planner.traces.jsonl import field, records
from rorqual.planner.traces.request import Request, block_ids, refuse, seconds_us, token_count

BLOCK_TOKENS = 16
FIELDS = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")


def read(numbered: Iterable[tuple[int, str]]) -> Iterator[Request]:
    """Requests in the order of the file; `type` and `turn` are not needed.

    Unit: microseconds, tokens. Source: the trace file.

    Raises:
        InputError: naming the line and the field.

    >>> line = '{"chat_id": 12, "parent_chat_id": 3, "timestamp": 4.25, "input_length": 20, "output_length": 9, '
    >>> list(read([(1, line + '"hash_ids": [70, 90]}')]))
    [Request(time_us=4250000, input_tokens=20, output_tokens=9, ids=[70, 90], chat=12, parent=3)]
    """
    for number, record in records(numbered):
        tokens = token_count(number, "input_length", field(number, record, "input_length"))
        parent = _chat(number, record, "parent_chat_id")
        yield Request(
            seconds_us(number, "timestamp", field(number, record, "timestamp")),
            tokens,
            token_count(number, "output_length", field(number, record, "output_length")),
            block_ids(number, field(number, record, "hash_ids"), tokens, BLOCK_TOKENS),
            _chat(number, record, "chat_id"),
            None if parent == -1 else parent,
        )


def _chat(number: int, record: dict[str, object], name: str) -> int:
    value = field(number, record, name)
    if type(value) is not int:
        refuse(number, name, "an integer", value)
    return value
