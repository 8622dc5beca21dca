"""Which format a trace is in, and its requests."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

from rorqual.errors import InputError
from rorqual.planner.traces import azure, bailian, burstgpt, mooncake, plain
from rorqual.planner.traces.request import Progress, Reader, Request
from rorqual.planner.traces.text import lines


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFormat:
    """name: as `--format` takes it. fields: what a first line or header must name. block_tokens: 0 without hashes."""

    name: str
    read: Reader
    fields: tuple[str, ...]
    block_tokens: int = 0
    is_json: bool = False


FORMATS = (
    # Bailian's fields include Mooncake's, so it is asked first.
    TraceFormat(
        name="bailian", read=bailian.read, fields=bailian.FIELDS, block_tokens=bailian.BLOCK_TOKENS, is_json=True
    ),
    TraceFormat(
        name="mooncake", read=mooncake.read, fields=mooncake.FIELDS, block_tokens=mooncake.BLOCK_TOKENS, is_json=True
    ),
    TraceFormat(name="burstgpt", read=burstgpt.read, fields=burstgpt.FIELDS),
    TraceFormat(name="azure", read=azure.read, fields=azure.FIELDS),
    TraceFormat(name="plain", read=plain.read, fields=plain.FIELDS),
)
NAMES = tuple(entry.name for entry in FORMATS)


def named(name: str) -> TraceFormat:
    """The format of that name. Without unit; source: `FORMATS`.

    Raises:
        InputError: no such format; the message names those that are.

    >>> named("bailian").block_tokens
    16
    """
    for entry in FORMATS:
        if entry.name == name:
            return entry
    raise InputError(f"format must be one of {', '.join(NAMES)}; got {name!r}")


def recognise(first: str) -> TraceFormat | None:
    """The format whose fields this first line names, if any. Without unit; source: `FORMATS`.

    >>> found = recognise("TIMESTAMP,ContextTokens,GeneratedTokens")
    >>> found and found.name, recognise("a,b,c")
    ('azure', None)
    """
    is_json = first.startswith("{")
    found = _json_fields(first) if is_json else _header(first)
    return next((e for e in FORMATS if e.is_json == is_json and found.issuperset(e.fields)), None)


def detect(path: str) -> TraceFormat:
    """The format of a file, by its first line. Without unit; source: the file's first line.

    Raises:
        InputError: no file, a pipe, an empty one, or a first line that fits none; the message names what each asks for.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w") as file:
    ...     print("timestamp_s,input_tokens,output_tokens", file=file, flush=True)
    ...     detect(file.name).name
    'plain'
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        # What comes out of a pipe is gone for the reader.
        raise InputError(f"{path} is no ordinary file and can be read but once; give --format")
    first = next((line.strip() for _, line in lines(path) if line.strip()), None)
    if first is None:
        raise InputError(f"{path}: the trace is empty")
    found = recognise(first)
    if found is None:
        known = "; ".join(f"{entry.name} ({', '.join(entry.fields)})" for entry in FORMATS)
        raise InputError(f"{path}: line 1 is of no known format; give --format. Known: {known}")
    return found


def _json_fields(line: str) -> set[str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return set()
    return set(record) if isinstance(record, dict) else set()


def _header(line: str) -> set[str]:
    try:
        return {name.strip() for name in next(csv.reader([line]), [])}
    except csv.Error:
        return set()


def requests(path: str, trace_format: TraceFormat, progress: Progress | None = None) -> Iterator[Request]:
    """The requests of a trace, as a stream; at least one. Units are `Request`'s; source: the trace file.

    Raises:
        InputError: from the reader, naming line and field, or a trace without a request.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w") as file:
    ...     print("timestamp_s,input_tokens,output_tokens", "0,9,1", "1,8,1", sep=chr(10), file=file, flush=True)
    ...     [request.input_tokens for request in requests(file.name, named("plain"))]
    [9, 8]
    """
    empty = True
    for request in trace_format.read(lines(path, progress)):
        empty = False
        yield request
    if empty:
        raise InputError(f"{path}: the trace holds no request")
