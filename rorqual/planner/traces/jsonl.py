"""Lines of JSON, one object a line, read as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from rorqual.errors import InputError
from rorqual.planner.traces.request import refuse


def records(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank. Without unit; source: the trace file.

    Raises:
        InputError: a line that holds no JSON object; the line is named.

    >>> list(records([(1, '{"turn": 1}'), (2, ""), (3, '{"turn": 2}')]))
    [(1, {'turn': 1}), (3, {'turn': 2})]
    """
    decode = json.JSONDecoder().raw_decode
    for number, line in numbered:
        text = line.strip()
        if not text:
            continue
        try:
            record, end = decode(text)
        except (ValueError, RecursionError) as error:
            what = getattr(error, "msg", "nested too deep")
            raise InputError(f"line {number}: not JSON ({what})") from None
        if end != len(text) or type(record) is not dict:
            refuse(number, "the line", "one JSON object", text)
        yield number, record


def field(number: int, record: dict[str, Any], name: str) -> Any:
    """A field that must be there. Unit: the field's. Source: the trace file.

    >>> field(3, {"turn": 1}, "chat_id")
    Traceback (most recent call last):
    rorqual.errors.InputError: line 3: chat_id is missing
    """
    try:
        return record[name]
    except KeyError:
        raise InputError(f"line {number}: {name} is missing") from None
