"""What the files of figures share: exact values, and a figure that is a proportion of several counts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rorqual.planner.figure import Figure

MILLION = 10**6
MEBI = 1 << 20


def exact(value: Fraction) -> int | Fraction:
    """A whole number as an int. In the value's own unit, unrounded. Source: the caller.

    >>> exact(Fraction(890)), exact(Fraction(5, 2))
    (890, Fraction(5, 2))
    """
    return value.numerator if value.denominator == 1 else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Proportion(Figure):
    """A figure that is several counts beside each other, such as 4 : 8 : 40, and no single number.

    terms: the counts, in the order in which the id names them: content, address and query of
    `refresh_content_address_query`. JSON states them as the value, a list: rounded to what is shown they are the whole
    figure. `value` is the last over the first, for callers that compare figures as numbers.
    """

    terms: tuple[int, ...]

    def document(self) -> dict[str, object]:
        """For JSON, as any figure's; the value is the list of terms.

        >>> from rorqual.config import presets
        >>> from rorqual.planner.numbers import numbers
        >>> numbers(presets.load("v4.1-flash"))["refresh_content_address_query"].document()["value"]
        [4, 8, 40]
        """
        return Figure.document(self) | {"value": list(self.terms)}
