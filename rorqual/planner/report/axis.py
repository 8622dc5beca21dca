"""A scale of a drawing, linear or logarithmic, and where its ticks are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rorqual.planner.units import Number

LINEAR_TICKS = 5
MOST_DECADES = 8  # with as many powers of ten or more, every second or third has a tick


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """From `low` to `high`, in the unit of what is drawn. text: what stands at a tick."""

    low: float
    high: float
    logarithmic: bool
    text: Callable[[Number], str]

    def share(self, value: Number) -> float:
        """Where a value lies between the ends, 0..1; what lies outside is at the nearer end.

        >>> Axis(low=1, high=10_000, logarithmic=True, text=str).share(100)
        0.5
        """
        if self.logarithmic:
            if value <= self.low:
                return 0.0
            part = math.log10(float(value) / self.low) / math.log10(self.high / self.low)
        else:
            part = (float(value) - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, part))

    def ticks(self) -> tuple[int, ...]:
        """Whole numbers: powers of ten, or multiples of 1, 2 or 5 times one.

        >>> Axis(low=180, high=1e8, logarithmic=True, text=str).ticks()
        (1000, 10000, 100000, 1000000, 10000000, 100000000)
        >>> Axis(low=180, high=1200, logarithmic=True, text=str).ticks()
        (200, 500, 1000)
        >>> Axis(low=0, high=141, logarithmic=False, text=str).ticks()
        (0, 50, 100)
        """
        if self.logarithmic:
            powers = self._multiples(1)
            # A short axis has too few powers of ten to be read by.
            return powers[:: 1 + len(powers) // MOST_DECADES] if len(powers) > 1 else self._multiples(1, 2, 5)
        step = _step(self.high / LINEAR_TICKS)
        return tuple(range(0, int(self.high) + 1, step))

    def _multiples(self, *factors: int) -> tuple[int, ...]:
        """These factors of powers of ten, between the ends."""
        powers = range(math.floor(math.log10(self.high)) + 1)
        found = (factor * 10**power for power in powers for factor in factors)
        return tuple(value for value in found if self.low <= value <= self.high)


def linear(high: Number, text: Callable[[Number], str]) -> Axis:
    """From 0 to `high`, in its unit; to 1 where that is 0. Source: the caller.

    >>> linear(250, str).ticks()
    (0, 50, 100, 150, 200, 250)
    """
    return Axis(low=0.0, high=float(high) or 1.0, logarithmic=False, text=text)


def logarithmic(values: Iterable[Number], text: Callable[[Number], str], *, below: float = 4, above: float = 1) -> Axis:
    """Around the values above 0: `below` times less than the least, `above` times more than the largest.

    >>> axis = logarithmic([0, 890, 5_242_880], str, above=2)
    >>> axis.low, axis.high
    (222.5, 10485760.0)

    In the values' unit; source: the caller. Without a value above 0 it goes around 1.
    """
    positive = [float(value) for value in values if value > 0] or [1.0]
    return Axis(low=min(positive) / below, high=max(positive) * above, logarithmic=True, text=text)


def _step(least: float) -> int:
    """The least of 1, 2, 5, 10, 20, ... that is not below `least`."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10
