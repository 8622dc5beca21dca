"""Every figure in a document of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator


def numbers(value: object) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
