"""One request of a trace, and the refusal that names the line and the field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, NoReturn, Protocol

from rorqual.errors import InputError

MAX_TOKENS = 1 << 40
MAX_SECONDS = 1 << 40
MICROSECONDS = 1_000_000


class Request(NamedTuple):
    """What a trace tells of one request. A tuple, since a replay makes millions of them.

    time_us: arrival in whole microseconds, from the trace's own zero. ids: the trace's block ids of the prompt in
    order, the partial last block's included where the format gives it one; empty without hashes. An id names its block
    and all that precedes it. chat, parent: ids of this turn and of the turn before, None where the format has none.
    """

    time_us: int
    input_tokens: int
    output_tokens: int
    ids: list[int] = []  # noqa: RUF012 (one empty list for all: nobody writes into it)
    chat: object = None
    parent: object = None


class Progress(Protocol):
    """Called now and then with bytes read and bytes in all."""

    def __call__(self, done: int, total: int, /) -> None: ...


class Reader(Protocol):
    """What each format's module offers as `read`: requests from numbered lines of text."""

    def __call__(self, numbered: Iterable[tuple[int, str]], /) -> Iterator[Request]: ...


def refuse(line: int, field: str, legal: str, got: object) -> NoReturn:
    """Raise the InputError for a field of a line. Without unit; source: the caller.

    >>> refuse(7, "input_length", "an integer of 0 or more", -1)
    Traceback (most recent call last):
    rorqual.errors.InputError: line 7: input_length must be an integer of 0 or more; got -1
    """
    text = repr(got)
    raise InputError(f"line {line}: {field} must be {legal}; got {text if len(text) <= 60 else text[:57] + '...'}")


def token_count(line: int, field: str, value: object) -> int:
    """A number of tokens as JSON gives it. Source: the trace file.

    >>> token_count(1, "input_length", 6955)
    6955
    """
    if type(value) is not int or not 0 <= value < MAX_TOKENS:
        refuse(line, field, "an integer of 0 or more", value)
    return value


def token_text(line: int, field: str, text: str) -> int:
    """A number of tokens as CSV gives it. Source: the trace file.

    >>> token_text(2, "ContextTokens", " 374 ")
    374
    """
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 12):
        refuse(line, field, "an integer of 0 or more", text)
    return int(digits)


def seconds_us(line: int, field: str, value: object) -> int:
    """A time in seconds, a number or its text, as whole microseconds. Source: the trace file.

    >>> seconds_us(1, "timestamp", 61.114), seconds_us(2, "Timestamp", "5")
    (61114000, 5000000)
    """
    try:
        time = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        time = math.nan
    if not 0 <= time < MAX_SECONDS:
        refuse(line, field, "a time in seconds, 0 or more", value)
    return round(time * MICROSECONDS)


def block_ids(line: int, value: object, tokens: int, block_tokens: int) -> list[int]:
    """The field `hash_ids`: distinct integers, one a block, the partial last block with or without one.

    Source: the trace file.

    >>> block_ids(1, [46, 47], 600, 512), block_ids(1, [46], 600, 512)
    ([46, 47], [46])
    """
    if type(value) is not list:
        refuse(line, "hash_ids", "a list of integers", value)
    full, rest = divmod(tokens, block_tokens)
    count = len(value)
    if count != full and (count != full + 1 or not rest):
        blocks = full + bool(rest)
        refuse(line, "hash_ids", f"{blocks} ids, one for each {block_tokens} of {tokens} tokens", count)
    try:
        # Two passes in C instead of one in Python: a sum is an int only if every term is one, and ids that repeat
        # leave a smaller set.
        sound = type(sum(value)) is int and len(set(value)) == count
    except TypeError:
        sound = False
    if not sound:
        refuse(line, "hash_ids", "distinct integers", value)
    return value
