"""What the files of figures share: exact values, and a figure that is a proportion of several counts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rorqual.planner.figure import Figure

MILLION = 10**6
MEBI = 1 << 20


def exact(value: Fraction) -> int | Fraction:
    """A whole number as an int. In the value's own unit, unrounded.

    >>> exact(Fraction(890)), exact(Fraction(5, 2))
    (890, Fraction(5, 2))
    """
    return value.numerator if value.denominator == 1 else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Proportion(Figure):
    """A figure such as 4 : 8 : 40. `terms` is what JSON states as the value; `value` is the last over the first."""

    terms: tuple[int, ...]

    def document(self) -> dict[str, object]:
        """For JSON, as any figure's, the value a list."""
        return Figure.document(self) | {"value": list(self.terms)}
