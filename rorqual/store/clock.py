"""The time of uses: the wall clock as it stood when a store was opened, and from there a clock that nobody sets."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since 1970; never runs backwards."""


def steady_clock(wall: Clock = time.time, steady: Clock = time.monotonic) -> Clock:
    """A clock that no jump of the wall clock reaches, forwards or backwards, after this call.

    >>> said = iter([100.0, 5.0, 5.0, 7.5])
    >>> clock = steady_clock(lambda: next(said), lambda: next(said))
    >>> clock(), clock()
    (100.0, 102.5)
    """
    offset = wall() - steady()
    return lambda: offset + steady()
