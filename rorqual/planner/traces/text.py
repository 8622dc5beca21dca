"""Lines of a text file as a stream, with progress in bytes and a bound on memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TextIO

from rorqual.errors import InputError
from rorqual.planner.traces.request import Progress

MAX_LINE = 1 << 24
"""Characters of the longest line: the ids of a prompt of 10^6 tokens in blocks of 1 take half of it."""
REPORT_EVERY = 4096
"""Lines between two calls of a progress."""


def lines(path: str, progress: Progress | None = None) -> Iterator[tuple[int, str]]:
    """(number from 1, line with its end) of every line of a UTF-8 file; a mark of byte order is dropped.

    Unit: lines. Source: the file.

    Raises:
        InputError: no such file, a folder, or a line longer than MAX_LINE.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w") as file:
    ...     print("one", "two", sep=chr(10), file=file, flush=True)
    ...     [(number, line.strip()) for number, line in lines(file.name)]
    [(1, 'one'), (2, 'two')]
    """
    with _open(path) as file:
        total = os.fstat(file.fileno()).st_size
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE and line[-1] != "\n":
                raise InputError(f"line {number} is longer than {MAX_LINE} characters: this is no trace")
            yield number, line
            if progress is not None and number % REPORT_EVERY == 0:
                progress(min(file.buffer.tell(), total), total)
        if progress is not None and number:
            progress(total, total)


def _open(path: str) -> TextIO:
    try:
        # What is not UTF-8 becomes U+FFFD: it can only stand in a field that nobody reads, or spoils one that is.
        return open(path, encoding="utf-8-sig", errors="replace", newline="")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
