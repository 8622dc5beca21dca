"""Wall-clock samples of functions that take turns, so that a busy spell of the machine falls on all of them."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

Call = Callable[[int], object]
"""Called with 0, 1, 2, ...: a function that should not find its last data in a cache takes the next set of them."""

SAMPLE_S = 0.02
"""Shorter calls are repeated until they fill this time; a sample is their mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Seconds a call."""

    median: float
    min: float
    max: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Sample:
        return cls(median=median(seconds), min=min(seconds), max=max(seconds), runs=len(seconds))


def interleaved(functions: Mapping[str, Call], repeats: int, sample_s: float = SAMPLE_S) -> dict[str, Sample]:
    """`repeats` samples of each function, taken in turn, after two calls each that are not counted."""
    loops = {name: _loops(call, sample_s) for name, call in functions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    with undisturbed():
        for turn in range(repeats):
            for name, call in functions.items():
                first = 2 + turn * loops[name]
                seconds[name].append(elapsed(partial(_repeat, call, first, loops[name])) / loops[name])
    return {name: Sample.of(taken) for name, taken in seconds.items()}


def elapsed(function: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection inside."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _loops(call: Call, sample_s: float) -> int:
    call(0)
    return max(1, math.ceil(sample_s / max(elapsed(lambda: call(1)), 1e-9)))


def _repeat(call: Call, first: int, count: int) -> None:
    for i in range(first, first + count):
        call(i)
